"""What an accumulated step takes, and what the helper costs over a loop written by hand.

    python -m curry_train.benchmark --json evidence/grad_accum.json

The two loops run in turns in one process, so that a machine that drifts drifts for both.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch
from torch import Tensor, nn

from .core.provenance import provenance, write_json
from .primitives.grad_accum import GradientAccumulation, WindowResult, train_window

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class AccumulatedStep:
    """One optimizer step over several microbatches, and the time it took, the device waited for."""

    result: WindowResult
    num_microbatches: int
    seconds: float

    @property
    def terms_per_second(self) -> float:
        return self.result.num_terms / self.seconds


@dataclass(frozen=True)
class HelperCost:
    """Microseconds per microstep, medians over the repeats; `cost` is the median of the paired differences."""

    microsteps: int
    repeats: int
    by_hand_us: float
    helper_us: float
    cost_us: float


def run_accumulated_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Iterable[Any],
    loss: Loss,
    *,
    accumulation: GradientAccumulation | None = None,
    count: Callable[[Any], Any] | None = None,
    clip_norm: float | None = None,
) -> AccumulatedStep:
    """Time one window: all the microbatches, or the first `accumulation.steps` of them."""
    microbatches = list(microbatches)
    accumulation = accumulation or GradientAccumulation(max(1, len(microbatches)))
    start = time.perf_counter()
    window = next(accumulation.windows(microbatches, count=count))
    result = train_window(model, window, loss, optimizer, clip_norm=clip_norm)  # waits for the device
    return AccumulatedStep(result, len(window), time.perf_counter() - start)


def measure_helper_cost(*, microsteps: int = 8, repeats: int = 400, warmup: int = 50) -> HelperCost:
    """The helper against the same step by hand, on a model so small that only the Python around it counts."""
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

    def helper() -> None:
        run_accumulated_step(model, optimizer, microbatches, _square_sum, count=len, clip_norm=1.0)

    pairs = [(_seconds(by_hand), _seconds(helper)) for _ in range(warmup + repeats)][warmup:]
    hand, ours = zip(*pairs, strict=True)
    scale = 1e6 / microsteps
    cost = statistics.median(second - first for first, second in pairs)
    return HelperCost(
        microsteps, repeats, statistics.median(hand) * scale, statistics.median(ours) * scale, cost * scale
    )


def _square_sum(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


def _seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@click.command(help=__doc__)
@click.option("--repeats", default=400, type=click.IntRange(1), show_default=True)
@click.option("--json", "json_path", metavar="PATH", help="write the figures; - is standard output")
def main(repeats: int, json_path: str | None) -> None:
    costs = [measure_helper_cost(microsteps=microsteps, repeats=repeats) for microsteps in (4, 8, 32)]
    for cost in costs:
        click.echo(
            f"{cost.microsteps:3d} microsteps: by hand {cost.by_hand_us:6.1f} us, helper {cost.helper_us:6.1f} us, "
            f"cost {cost.cost_us:+5.1f} us each",
            err=json_path == "-",
        )
    if json_path:
        figures = {f"microsteps_{cost.microsteps}": asdict(cost) for cost in costs}
        write_json(json_path, provenance(torch.device("cpu")) | {"helper_cost": figures})


if __name__ == "__main__":
    main()
