"""Loss spike detection against a baseline that warm-up, drift and spikes do not distort.

    watchdog = SpikeWatchdog(SpikeConfig(patience=3))
    for step in ...:
        if spike := watchdog.observe(step, loss):
            print(spike.words)

The level is the median of the last losses, so a loss that stops falling is not a spike. The noise
is the residual around a line through a whole window of losses, so a falling loss does not count as
noisy, and a loss that has been rising slowly may go on rising. Losses that are too high enter
neither. Before half a window of losses is accepted, only a loss that is not finite is a spike. Save
the watchdog's state in the checkpoint: a resume or a rollback then restores the state that it had
at that step.

Proof: `python -m pytest tests/test_spike.py`.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist

from .health import number_of
from .spike_config import LEVEL, SpikeConfig

# Standard deviations per median absolute deviation, for normally distributed noise.
NORMAL = 1.4826


@dataclass(frozen=True)
class Spike:
    """A loss spike."""

    # The step after which it was found.
    step: int
    # The first step whose loss was too high.
    first: int
    loss: float
    # Baseline and limit are None if a loss was not finite before there was a baseline.
    baseline: float | None
    limit: float | None

    @property
    def words(self) -> str:
        if not math.isfinite(self.loss):
            return f"a loss or a gradient of step {self.step} is not finite"
        reference = ""
        if self.limit is not None:
            reference = f", with {self.baseline:.4g} before and {self.limit:.4g} as the limit"
        since = "" if self.first == self.step else f", too high since step {self.first}"
        return f"loss {self.loss:.4g} at step {self.step}{reference}{since}"


@dataclass(frozen=True)
class Limit:
    """The highest loss that is not too high: `level` + `rise`."""

    # The baseline: the median of the last accepted losses.
    level: float
    # The rise of the accepted losses over as many steps as the level covers; 0 if they fall.
    drift: float
    # The margin of `threshold` standard deviations of the noise.
    by_noise: float
    # The margin of `least_rise`.
    by_level: float

    @property
    def rise(self) -> float:
        return self.drift + max(self.by_noise, self.by_level)


class SpikeWatchdog:
    """Finds loss spikes in a sequence of losses.

    `group` is a process group whose ranks have different losses: their mean is observed, equally on
    all ranks. Without it, the loss has to be the same on all ranks already, like that of
    `train_window`.
    """

    # A run may resume from a state that was saved without a watchdog.
    may_be_new = True

    def __init__(self, config: SpikeConfig | None = None, *, group: Any = None) -> None:
        self.config = config or SpikeConfig()
        self.group = group
        self._accepted: deque[tuple[int, float]] = deque(maxlen=self.config.window)
        self._suspects: list[tuple[int, float]] = []
        self._began: float | None = None
        # A loss that is not finite was reported, and no finite loss has followed yet.
        self._told = False

    @property
    def suspects(self) -> int:
        """The number of steps in a row whose loss was too high."""
        return len(self._suspects)

    def observe(self, step: int, loss: float | torch.Tensor) -> Spike | None:
        """Observe the loss of a step; return the spike if it completes one.

        A spike is reported once: the losses after it form a new baseline, and NaN after NaN is the
        same spike.
        """
        value = self._agreed(number_of(loss))
        if self._suspects and step > self._suspects[-1][0] + self.config.window:
            # The watchdog was off since then, so these suspects no longer count.
            self._suspects.clear()

        allowed = self.limit()
        baseline = None if allowed is None else allowed.level
        limit = None if allowed is None else allowed.level + allowed.rise

        if math.isfinite(value):
            self._told = False
        elif self._told:
            return None

        if math.isfinite(value) and (limit is None or value <= limit):
            self._accept(step, value)
            return None

        self._suspects.append((step, value))
        if math.isfinite(value) and len(self._suspects) < self.config.patience:
            return None

        self._told = not math.isfinite(value)
        spike = Spike(step, self._suspects[0][0], value, baseline, limit)
        self._suspects.clear()
        self._accepted.clear()
        return spike

    def _accept(self, step: int, loss: float) -> None:
        self._suspects.clear()
        self._accepted.append((step, loss))
        if self._began is None and len(self._accepted) == LEVEL:
            self._began = _median([accepted for _, accepted in self._accepted])

    def limit(self) -> Limit | None:
        """Return the limit for the next loss; None before enough losses were accepted."""
        if len(self._accepted) < self.config.judges_after:
            return None

        steps, losses = zip(*self._accepted, strict=True)
        level = _median(losses[-LEVEL:])
        slope, noise = line_through(steps, losses)
        fallen = 0.0 if self._began is None else max(0.0, self._began - level)
        # The first losses may be thousands of times larger than the current ones.
        base = min(fallen, abs(level))
        return Limit(
            level,
            max(0.0, slope) * LEVEL,
            self.config.threshold * noise,
            self.config.least_rise * base,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "accepted": list(self._accepted),
            "suspects": list(self._suspects),
            "began": self._began,
            "told": self._told,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        accepted = [(int(step), float(loss)) for step, loss in state["accepted"]]
        self._accepted = deque(accepted, self.config.window)
        self._suspects = [(int(step), float(loss)) for step, loss in state["suspects"]]
        self._began = None if state["began"] is None else float(state["began"])
        self._told = bool(state.get("told", False))

    def _agreed(self, loss: float) -> float:
        if self.group is None:
            return loss
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        total = torch.tensor(loss, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=self.group)
        return float(total) / dist.get_world_size(self.group)


def line_through(steps: Sequence[int], losses: Sequence[float]) -> tuple[float, float]:
    """Return the slope of a robust line, and the robust standard deviation of its residuals.

    The slope is the median of the slopes from each loss to the one half the window later.
    """
    x = numpy.asarray(steps, dtype=numpy.float64)
    y = numpy.asarray(losses, dtype=numpy.float64)
    half = len(x) // 2
    slopes = (y[half : 2 * half] - y[:half]) / (x[half : 2 * half] - x[:half])
    slope = float(numpy.median(slopes))
    residuals = y - slope * x
    deviations = numpy.abs(residuals - numpy.median(residuals))
    return slope, float(NORMAL * numpy.median(deviations))


def _median(values: Sequence[float]) -> float:
    return float(numpy.median(values))
