"""Overhead of `run_accumulated_step` over the same loop written by hand.

    python benchmarks/accumulation_cost.py --json evidence/grad_accum.json

The two loops run in turns in one process, so that machine drift affects both alike.
Proof: `python -m pytest tests/trainer/test_benchmark.py`.
"""

import statistics

import torch
from torch import Tensor, nn

from curry_train.benchmark import run_accumulated_step
from curry_train.core.timing import time_in_turns
from recording import record_parser, write_record

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


def main() -> None:
    """Measure the overhead of `run_accumulated_step` over the same loop written by hand."""
    options = record_parser(__doc__).parse_args()
    figures = {}
    for microsteps in (4, 8, 32):
        cost = measure_accumulation_cost(microsteps)
        figures[f"microsteps_{microsteps}"] = {"cost_us": cost}
        print(microsteps, "microsteps:", cost)
    write_record(options.json, {"repeats": REPEATS, "helper_cost": figures})


if __name__ == "__main__":
    main()
