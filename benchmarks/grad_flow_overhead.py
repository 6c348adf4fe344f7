"""Overhead of grad-flow against plain steps, and its counts against hooks by hand.

python benchmarks/grad_flow_overhead.py --json evidence/grad_flow.json
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from curry_train.core.measure import LiveStorages
from curry_train.core.timing import paired_ratio, time_in_turns
from curry_train.primitives.grad_flow import GradFlow
from curry_train.primitives.recompute import recompute_blocks
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case
from recording import record_parser, write_record

Around = Callable[[nn.Module, torch.optim.Optimizer], Any]
UNPROBED_INTERVAL = 10**9  # probes only step 0, so every later step is an unprobed one


# Its matrix products are large enough to hide small overheads.
LLAMA_LIKE = {
    "depth": 4,
    "dim": 384,
    "heads": 6,
    "kv_heads": 3,
    "vocabulary": 2048,
    "length": 128,
}


def count_by_hand(model: nn.Module) -> Counter[str]:
    """Count the calls of each leaf by hooks, as scripts do."""
    calls = Counter()
    for name, module in model.named_modules():
        if not [*module.children()]:
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    return calls


def _between_probes(model: nn.Module, optimizer: torch.optim.Optimizer) -> GradFlow:
    flow = GradFlow(model, optimizer, every=UNPROBED_INTERVAL)
    flow.next_step = 1  # the first step is probed
    return flow


PROBING_WAYS = {
    "plain": lambda model, optimizer: contextlib.nullcontext(),
    "between": _between_probes,
    "probed": lambda model, optimizer: GradFlow(model, optimizer, every=1),
}


def _step(case: Case, around: Around, stack: contextlib.ExitStack) -> Callable[[], None]:
    module = case.build()
    batch = case.batch()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    stack.enter_context(around(module, optimizer))

    def step() -> None:
        optimizer.zero_grad()
        case.workload.mean_loss(module, batch).backward()
        optimizer.step()

    return step


def measure_costs(case: Case, *, repeats: int) -> dict[str, Any]:
    """Count the operations of a step for each way, and time it against the plain one in turns."""
    operations = {}
    with contextlib.ExitStack() as stack:
        steps = {way: _step(case, around, stack) for way, around in PROBING_WAYS.items()}
        for way, step in steps.items():
            step()
            with LiveStorages() as storages:
                step()
            operations[way] = storages.num_operations
        timed = time_in_turns([*steps.values()], rounds=repeats, warmup=0)
    plain, *_ = timed
    return {
        way: {"ratio": paired_ratio(seconds, plain).median, "operations": operations[way]}
        for way, seconds in zip(steps, timed, strict=True)
    }


def measure_counting(case: Case) -> dict[str, Any]:
    """Count the calls of the first block's layers in one step that recomputes.

    Grad-flow and the hand-written hooks count the same step.
    """
    module = case.build()
    batch = case.batch()
    recompute_blocks(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    flow = GradFlow(module, optimizer, every=1, layers="layers.0.*")
    by_hand = count_by_hand(module)
    with flow:
        case.workload.mean_loss(module, batch).backward()
        optimizer.step()
    layers = flow.records[0].layers
    return {
        "grad_flow": sum(layers[name].calls for name in by_hand if name in layers),
        "by_hand": sum(calls for name, calls in by_hand.items() if name in layers),
    }


def main() -> None:
    """Measure the overhead of grad-flow and write the figures."""
    parser = record_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    costs = measure_costs(Case(transformer(**LLAMA_LIKE)), repeats=options.repeats)
    calls = measure_counting(Case(transformer()))
    figures = {
        "repeats": options.repeats,
        "transformer": {"calls": {"recompute": calls}},
        "llama_like": {"cost": costs},
    }
    print(figures)
    write_record(options.json, figures)


if __name__ == "__main__":
    main()
