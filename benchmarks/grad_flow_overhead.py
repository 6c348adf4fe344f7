"""Overhead of grad-flow against plain steps.

python benchmarks/grad_flow_overhead.py --json evidence/grad_flow.json
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from curry_train.core.measure import LiveStorages
from curry_train.core.timing import paired_ratio, time_in_turns
from curry_train.primitives.grad_flow import GradFlow
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case
from recording import Figures, record_parser, write_record

Around = Callable[[nn.Module, torch.optim.Optimizer], Any]
REPEATS = 7
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


def measure_costs(case: Case) -> Figures:
    """Count the operations of a step for each way, and time it against the plain one in turns."""
    operations = {}
    with contextlib.ExitStack() as stack:
        steps = {way: _step(case, around, stack) for way, around in PROBING_WAYS.items()}
        for way, step in steps.items():
            step()
            with LiveStorages() as storages:
                step()
            operations[way] = storages.num_operations
        timed = time_in_turns([*steps.values()], rounds=REPEATS, warmup=0)
    plain, *_ = timed
    return {
        way: {"ratio": paired_ratio(seconds, plain).median, "operations": operations[way]}
        for way, seconds in zip(steps, timed, strict=True)
    }


def main() -> None:
    """Measure the overhead of grad-flow and write the figures."""
    options = record_parser(__doc__).parse_args()
    figures = {"llama_like": {"cost": measure_costs(Case(transformer(**LLAMA_LIKE)))}}
    print(figures)
    write_record(options.json, figures)


if __name__ == "__main__":
    main()
