"""Watches a loss, and says when it spiked: over a baseline that neither warm-up nor drift nor the spike itself moves.

    watchdog = SpikeWatchdog(SpikeConfig(patience=3))
    for step in ...:
        if spike := watchdog.observe(step, loss):
            print(spike.words)

The level is the median of the last losses, so that a loss that stops falling is no spike. The noise is what is left
around a line through more of them, so that one that falls is not noisy for that, and one that has long been rising may
go on. What is too high enters neither. Before half a window of losses nothing is judged but what is not finite. The
state belongs into the checkpoint: it is then what it was at that step after a resume, and after a rollback.
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

NORMAL = 1.4826  # standard deviations in a median absolute deviation of normal noise


@dataclass(frozen=True)
class Spike:
    """Found after `step`; `first` is the first step whose loss was too high. None where a loss was not finite before
    there was a baseline."""

    step: int
    first: int
    loss: float
    baseline: float | None
    limit: float | None

    @property
    def words(self) -> str:
        if not math.isfinite(self.loss):
            return f"a loss or a gradient of step {self.step} is not finite"
        over = (
            ""
            if self.limit is None
            else f", with {self.baseline:.4g} before and {self.limit:.4g} as the limit"
        )
        since = "" if self.first == self.step else f", too high since step {self.first}"
        return f"loss {self.loss:.4g} at step {self.step}{over}{since}"


@dataclass(frozen=True)
class Limit:
    """How high a loss may be: over `level` by `rise`, of which `drift` is what the losses have been rising by, and the
    rest the larger of `by_noise` and `by_level`, which are `threshold` and `least_rise` at work."""

    level: float
    drift: float
    by_noise: float
    by_level: float

    @property
    def rise(self) -> float:
        return self.drift + max(self.by_noise, self.by_level)


class SpikeWatchdog:
    """`group` are ranks whose losses differ: the mean over them is judged, the same on all. Without it the loss is one
    that all ranks agree on already, as that of `train_window`."""

    may_be_new = True  # in a run that goes on from a state without it

    def __init__(self, config: SpikeConfig | None = None, *, group: Any = None) -> None:
        self.config, self.group = config or SpikeConfig(), group
        self._accepted: deque[tuple[int, float]] = deque(maxlen=self.config.window)
        self._suspects: list[tuple[int, float]] = []
        self._began: float | None = None
        self._told = False  # of what is not finite, and nothing finite came since

    @property
    def suspects(self) -> int:
        """Steps in a row whose loss was too high."""
        return len(self._suspects)

    def observe(self, step: int, loss: float | torch.Tensor) -> Spike | None:
        """The loss of this step. A spike is told once: the losses after it make another baseline, and NaN after NaN is
        the same spike."""
        value = self._agreed(number_of(loss))
        if self._suspects and step > self._suspects[-1][0] + self.config.window:
            self._suspects.clear()  # those are of another time, in which nobody went on watching
        judged = self.limit()
        baseline, limit = (
            (None, None) if judged is None else (judged.level, judged.level + judged.rise)
        )
        if math.isfinite(value):
            self._told = False
        elif self._told:
            return None
        if math.isfinite(value) and (limit is None or value <= limit):
            self._suspects.clear()
            self._accepted.append((step, value))
            if self._began is None and len(self._accepted) == LEVEL:
                self._began = _median([held for _, held in self._accepted])
            return None
        self._suspects.append((step, value))
        if math.isfinite(value) and len(self._suspects) < self.config.patience:
            return None
        self._told = not math.isfinite(value)
        spike = Spike(step, self._suspects[0][0], value, baseline, limit)
        self._suspects.clear()
        self._accepted.clear()
        return spike

    def limit(self) -> Limit | None:
        """What the next loss is held against; None before there are enough of them."""
        if len(self._accepted) < self.config.judges_after:
            return None
        steps, losses = zip(*self._accepted, strict=True)
        level, began = _median(losses[-LEVEL:]), self._began
        slope, noise = line_through(steps, losses)
        gained = 0.0 if began is None else max(0.0, began - level)
        lesser = min(gained, abs(level))  # first losses may be thousands of times those of today
        return Limit(
            level,
            max(0.0, slope) * LEVEL,
            self.config.threshold * noise,
            self.config.least_rise * lesser,
        )

    def state_dict(self) -> dict[str, Any]:
        held = {
            "accepted": list(self._accepted),
            "suspects": list(self._suspects),
            "began": self._began,
        }
        return {**held, "told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accepted = deque(
            ((int(step), float(loss)) for step, loss in state["accepted"]), self.config.window
        )
        self._suspects = [(int(step), float(loss)) for step, loss in state["suspects"]]
        self._began = None if state["began"] is None else float(state["began"])
        self._told = bool(state.get("told", False))

    def _agreed(self, loss: float) -> float:
        if self.group is None:
            return loss
        told = torch.tensor(
            loss,
            dtype=torch.float64,
            device="cuda" if dist.get_backend(self.group) == "nccl" else "cpu",
        )
        dist.all_reduce(told, group=self.group)
        return float(told) / dist.get_world_size(self.group)


def line_through(steps: Sequence[int], losses: Sequence[float]) -> tuple[float, float]:
    """The slope of a robust line, and the robust standard deviation of what is left around it.

    The slope is the median of those from each loss to the one half the window later.
    """
    x, y = numpy.asarray(steps, dtype=numpy.float64), numpy.asarray(losses, dtype=numpy.float64)
    half = len(x) // 2
    slope = float(numpy.median((y[half : 2 * half] - y[:half]) / (x[half : 2 * half] - x[:half])))
    rest = y - slope * x
    return slope, float(NORMAL * numpy.median(numpy.abs(rest - numpy.median(rest))))


def _median(values: Sequence[float]) -> float:
    return float(numpy.median(values))
