"""Overhead of `run_accumulated_step` over the same loop written by hand.

    python benchmarks/accumulation_cost.py --json evidence/grad_accum.json

The two loops run in turns in one process, so that machine drift affects both alike.
Proof: `python -m pytest tests/trainer/test_benchmark.py`.
"""

import statistics

import click
import torch
from torch import Tensor, nn

from curry_train.benchmark import run_accumulated_step
from curry_train.cli.options import json_option
from curry_train.core.timing import time_in_turns
from curry_train.core.wording import provenance, write_json


def measure_accumulation_cost(microsteps: int, *, repeats: int) -> dict[str, float]:
    """Compare a window with the same step by hand, on a model so small that Python dominates.

    The figures are microseconds per microstep, as medians; `cost_us` is that of the differences.
    """
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    microbatches = list(torch.randn(microsteps, 4, 8))

    def by_hand() -> None:
        optimizer.zero_grad(set_to_none=True)
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

    hand, ours = time_in_turns([by_hand, window], rounds=repeats, warmup=50)
    differences = [second - first for first, second in zip(hand, ours, strict=True)]
    columns = {"by_hand_us": hand, "helper_us": ours, "cost_us": differences}
    scale = 1e6 / microsteps
    return {name: scale * statistics.median(column) for name, column in columns.items()}


def _square_sum(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


@click.command()
@click.option("--repeats", default=400, type=click.IntRange(1), show_default=True)
@json_option()
def main(repeats: int, json_path: str | None) -> None:
    """Measure the overhead of `run_accumulated_step` over the same loop written by hand."""
    figures = {}
    for microsteps in (4, 8, 32):
        cost = measure_accumulation_cost(microsteps, repeats=repeats)
        figures[f"microsteps_{microsteps}"] = cost
        click.echo(
            f"{microsteps:3d} microsteps: by hand {cost['by_hand_us']:6.1f} us, "
            f"helper {cost['helper_us']:6.1f} us, cost {cost['cost_us']:+5.1f} us each",
            err=json_path == "-",
        )
    if json_path:
        write_json(
            json_path,
            provenance(torch.device("cpu")) | {"repeats": repeats, "helper_cost": figures},
        )


if __name__ == "__main__":
    main()
