"""Overhead of grad-flow against plain steps and against hand-written hooks.

python benchmarks/grad_flow_overhead.py --json evidence/grad_flow.json
"""

import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from curry_train.core.measure import LiveStorages
from curry_train.core.timing import time_in_turns
from curry_train.primitives.grad_flow import GradFlow
from curry_train.primitives.recompute import recompute_blocks
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case, Workload
from recording import record_parser, write_record

Around = Callable[[nn.Module, torch.optim.Optimizer], Any]
UNPROBED_INTERVAL = 10**9  # probes only step 0, so every later step is an unprobed one


def sizes() -> dict[str, tuple[Workload, int]]:
    """Return the workloads and batch sizes to measure.

    One is the built-in transformer; the matrix products of the other are large enough to hide small
    overheads.
    """
    larger = transformer(depth=4, dim=384, heads=6, kv_heads=3, vocabulary=2048, length=128)
    return {"transformer": (transformer(), 4), "llama_like": (larger, 4)}


@contextlib.contextmanager
def hooks_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Counter[str]]:
    """Hook as scripts do: three numbers per tensor of each leaf, each a device sync."""
    calls = Counter()
    figures = []

    def see(tensor: Tensor) -> None:
        shares = (tensor == 0, tensor.isfinite())
        figures.extend([tensor.norm().item(), *(one.float().mean().item() for one in shares)])

    def hook(name: str) -> Callable[..., None]:
        def count(module: nn.Module, arguments: Any, output: Tensor) -> None:
            calls[name] += 1
            see(output.detach())

        return count

    def see_gradients(*_: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                see(parameter.grad)

    leaves = [pair for pair in model.named_modules() if not [*pair[1].children()]]
    handles = [module.register_forward_hook(hook(name)) for name, module in leaves]
    handles.append(optimizer.register_step_pre_hook(see_gradients))
    yield calls
    for handle in handles:
        handle.remove()


def _between_probes(model: nn.Module, optimizer: torch.optim.Optimizer) -> GradFlow:
    flow = GradFlow(model, optimizer, every=UNPROBED_INTERVAL)
    flow.next_step = 1  # the first step is probed
    return flow


PROBING_WAYS: dict[str, Around] = {
    "plain": lambda model, optimizer: contextlib.nullcontext(),
    "between": _between_probes,
    "probed": lambda model, optimizer: GradFlow(model, optimizer, every=1),
    "by_hand": hooks_by_hand,
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
    """Measure median seconds and operations of a step for each way, also as ratios to plain.

    The ways run in turns.
    """
    operations = {}
    with contextlib.ExitStack() as stack:
        steps = {way: _step(case, around, stack) for way, around in PROBING_WAYS.items()}
        for way, step in steps.items():
            step()
            with LiveStorages() as storages:
                step()
            operations[way] = storages.num_operations
        timed = time_in_turns([*steps.values()], rounds=repeats, warmup=0)
    seconds = dict(zip(steps, map(statistics.median, timed), strict=True))
    return {
        way: {
            "seconds": seconds[way],
            "ratio": seconds[way] / seconds["plain"],
            "operations": operations[way],
        }
        for way in PROBING_WAYS
    }


def measure_counting(case: Case) -> dict[str, Any]:
    """Count the calls of the first block's layers in one step, with and without recompute.

    Grad-flow and the hand-written hooks count the same step.
    """
    calls_by_case = {}
    for recompute in (False, True):
        module = case.build()
        batch = case.batch()
        if recompute:
            recompute_blocks(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        flow = GradFlow(module, optimizer, every=1, layers="layers.0.*")
        with flow, hooks_by_hand(module, optimizer) as by_hand:
            case.workload.mean_loss(module, batch).backward()
            optimizer.step()

        layers = flow.records[0].layers
        calls_by_case["recompute" if recompute else "bare"] = {
            "grad_flow": sum(layers[name].calls for name in by_hand if name in layers),
            "by_hand": sum(calls for name, calls in by_hand.items() if name in layers),
        }
    return calls_by_case


def main() -> None:
    """Measure the overhead of grad-flow and write the figures."""
    parser = record_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    figures = {"repeats": options.repeats}
    for name, (workload, batch_size) in sizes().items():
        case = Case(workload, batch_size=batch_size)
        figures[name] = {
            "batch_size": batch_size,
            "cost": measure_costs(case, repeats=options.repeats),
            "calls": measure_counting(case),
        }
        print(name, figures[name])
    write_record(options.json, figures)


if __name__ == "__main__":
    main()
