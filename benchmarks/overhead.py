"""Overhead of accumulation and of grad-flow over the same steps without them.

    python benchmarks/overhead.py grad_accum --json evidence/grad_accum.json
    python benchmarks/overhead.py grad_flow --json evidence/grad_flow.json

`grad_accum` compares `run_accumulated_step` with the same loop written by hand, `grad_flow` steps
with and without probes. What is compared runs in turns in one process, so that machine drift
affects all alike.
Proof: `python -m pytest tests/trainer/test_benchmark.py`.
"""

import contextlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from curry_train.benchmark import run_accumulated_step
from curry_train.core.measure import LiveStorages
from curry_train.core.timing import paired_ratio, time_in_turns
from curry_train.primitives.grad_flow import GradFlow
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case
from recording import Figures, record_parser, write_record

# Accumulation, in a window against the step by hand.

REPEATS = 1000


def measure_accumulation_cost(microsteps: int) -> float:
    """Compare a window with the same step by hand, on a model so small that Python dominates.

    The figure is the median of the differences, in microseconds per microstep.
    """
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    microbatches = list(torch.randn(microsteps, 4, 8))

    def by_hand() -> None:
        optimizer.zero_grad()
        total = torch.zeros(())
        for microbatch in microbatches:
            value = _square_sum(model, microbatch) / (4 * microsteps)
            value.backward()
            total += value.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total.item(), norm.item()

    def window() -> None:
        run_accumulated_step(model, optimizer, microbatches, _square_sum, count=len, clip_norm=1.0)

    hand, ours = time_in_turns([by_hand, window], rounds=REPEATS, warmup=50)
    differences = [second - first for first, second in zip(hand, ours, strict=True)]
    return 1e6 / microsteps * statistics.median(differences)


def _square_sum(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


def measure_accumulation() -> Figures:
    costs = {
        f"microsteps_{number}": {"cost_us": measure_accumulation_cost(number)} for number in (4, 32)
    }
    return {"helper_cost": costs}


# Grad-flow, with each step probed and between probes.

Around = Callable[[nn.Module, torch.optim.Optimizer], Any]
ROUNDS = 7
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


def measure_probes() -> Figures:
    """Count the operations of a step for each way, and time it against the plain one in turns."""
    case = Case(transformer(**LLAMA_LIKE))
    operations = {}
    with contextlib.ExitStack() as stack:
        steps = {way: _step(case, around, stack) for way, around in PROBING_WAYS.items()}
        for way, step in steps.items():
            step()
            with LiveStorages() as storages:
                step()
            operations[way] = storages.num_operations
        timed = time_in_turns([*steps.values()], rounds=ROUNDS, warmup=0)
    plain, *_ = timed
    cost = {
        way: {"ratio": paired_ratio(seconds, plain).median, "operations": operations[way]}
        for way, seconds in zip(steps, timed, strict=True)
    }
    return {"llama_like": {"cost": cost}}


MEASURES = {"grad_accum": measure_accumulation, "grad_flow": measure_probes}


def main() -> None:
    """Measure, print and write."""
    parser = record_parser(__doc__)
    parser.add_argument("what", choices=[*MEASURES])
    options = parser.parse_args()
    figures = MEASURES[options.what]()
    print(figures)
    write_record(options.json, figures)


if __name__ == "__main__":
    main()
