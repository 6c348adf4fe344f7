"""Find loss spikes, and go back to before one without its samples.

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

Proof: `python -m pytest tests/runs/test_spike.py tests/runs/test_spike_recovery.py`.
"""

import contextlib
import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch

from .files import read, write
from .policy import number_of
from .policy_config import NUM_BASELINE_LOSSES, SpikeConfig, read_fields
from .random_state import Stateful
from .ranks import Ranks, RunError, reading
from .resume import BEFORE_PREFIX, NothingSaved, Resumed
from .state import TrainingState

# Loss spike detection against a baseline that warm-up, drift and spikes do not distort.

# Standard deviations per median absolute deviation, for normally distributed noise.
DEVIATIONS_PER_MAD = 1.4826


@dataclass(frozen=True)
class Spike:
    """A loss spike."""

    # The step after which it was found.
    step: int
    # The first step whose loss was too high.
    first: int
    loss: float
    # Baseline and limit are None only if a loss was not finite before there was a baseline.
    baseline: float | None
    limit: float | None

    @property
    def words(self) -> str:
        if not math.isfinite(self.loss):
            return f"a loss or a gradient of step {self.step} is not finite"
        since = "" if self.first == self.step else f", too high since step {self.first}"
        return (
            f"loss {self.loss:.4g} at step {self.step}, with {self.baseline:.4g} before and "
            f"{self.limit:.4g} as the limit{since}"
        )


class SpikeWatchdog(Stateful):
    """Finds loss spikes in a sequence of losses, which has to be the same on all ranks."""

    STATE = ("_accepted", "_suspects", "_began", "_reported")

    def __init__(self, config: SpikeConfig | Mapping[str, Any] | None = None) -> None:
        # The configuration, or a mapping of its keys.
        self.config = read_fields(SpikeConfig, config or {}, inside="spike")
        # Steps with their losses, in lists, as JSON has them.
        self._accepted: list[Any] = []
        self._suspects: list[Any] = []
        self._began: float | None = None
        # A loss that is not finite was reported, and no finite loss has followed yet.
        self._reported = False

    def observe(self, step: int, loss: float | torch.Tensor) -> Spike | None:
        """Observe the loss of a step; return the spike if it completes one.

        A spike is reported once: the losses after it form a new baseline, and NaN after NaN is the
        same spike.
        """
        value = number_of(loss)
        suspects, accepted = self._suspects, self._accepted
        is_finite = math.isfinite(value)
        baseline, limit = self.limit()
        was_reported = self._reported
        self._reported = not is_finite
        if was_reported and self._reported:
            return None

        if is_finite and (limit is None or value <= limit):
            suspects.clear()
            accepted.append([step, value])
            del accepted[: -self.config.window]
            if self._began is None and len(accepted) == NUM_BASELINE_LOSSES:
                self._began = statistics.median([one for _, one in accepted])
            return None

        suspects.append([step, value])
        if is_finite and len(suspects) < self.config.patience:
            return None

        spike = Spike(step, suspects[0][0], value, baseline, limit)
        suspects.clear()
        accepted.clear()
        return spike

    def limit(self) -> tuple[float, float] | tuple[None, None]:
        """Return the baseline and the highest loss that is not too high.

        The baseline is the median of the last accepted losses; None before there are enough.
        """
        if len(self._accepted) < self.config.judges_after:
            return None, None

        steps, losses = zip(*self._accepted, strict=True)
        level = statistics.median(losses[-NUM_BASELINE_LOSSES:])
        slope, noise = line_through(steps, losses)
        assert self._began is not None
        fallen = max(0.0, self._began - level)
        # The first losses may be thousands of times larger than the current ones.
        least_rise = self.config.least_rise * min(fallen, abs(level))
        # The rise of the accepted losses over as many steps as the level covers.
        drift = max(0.0, slope) * NUM_BASELINE_LOSSES
        return level, level + drift + max(self.config.threshold * noise, least_rise)


def line_through(steps: Sequence[int], losses: Sequence[float]) -> tuple[float, float]:
    """Return the slope of a robust line, and the robust standard deviation of its residuals.

    The slope is the median of the slopes from each loss to the one half the window later.
    """
    x = numpy.asarray(steps)
    y = numpy.asarray(losses)
    half = len(x) // 2
    slopes = (y[half : 2 * half] - y[:half]) / (x[half : 2 * half] - x[:half])
    slope = float(numpy.median(slopes))
    residuals = y - slope * x
    deviations = numpy.abs(residuals - numpy.median(residuals))
    return slope, float(DEVIATIONS_PER_MAD * numpy.median(deviations))


# A run's record of its spike recoveries, with the samples that each of them skips.

RECOVERIES_FILE_NAME = "recoveries.json"


@dataclass(frozen=True)
class Recovery:
    """One rollback after a spike."""

    # The step after which the spike was found.
    spike: int
    # The step of the state that was loaded.
    back_to: int
    # The first data position that is skipped from now on.
    start: int
    # The data position after the last skipped one.
    stop: int
    # 1, or more where the spike came back.
    attempt: int


def read_recoveries(root: Path) -> list[Recovery]:
    path = root / RECOVERIES_FILE_NAME
    if not path.is_file():
        return []
    with reading(
        f"{path} lists the samples that are skipped, and can't be "
        "read: restore it, or remove it to train on those samples again"
    ):
        return [read_fields(Recovery, entry) for entry in json.loads(read(path))]


# The watchdog of a run made by `saving`: judge each step, roll back, and skip the samples.

logger = logging.getLogger(__name__)


class SpikeNotRecovered(RunError):
    """The spike came back after every attempt, or there is no state to go back to."""


class SampleStream(Protocol):
    """Data that resume from one integer and can leave samples out: `curry_train.data.Stream`.

    `position` is where the next window of samples begins. `after` returns the position of the
    window that is `windows` windows later.
    """

    position: int

    def after(self, position: int, *, windows: int) -> int: ...

    def skip(self, start: int, stop: int) -> None: ...


class AttachedWatch(SpikeWatchdog):
    """The spike watchdog of a run made by `saving`; call its methods on all ranks together.

    It is saved even when nothing is watched, so that a later start can watch.
    """

    def __init__(self, spike: SpikeConfig | Mapping[str, Any] | None, data: SampleStream) -> None:
        super().__init__(spike or {"action": "none"})
        self.ranks = Ranks.on_the_host()
        self._data = data

    def begin(self, root: Path) -> None:
        """Read which samples the run skips."""
        self._root = root
        self._recoveries = self.ranks.agree(lambda: read_recoveries(root))
        for recovery in self._recoveries:
            self._data.skip(recovery.start, recovery.stop)

    def judge(self, step: int, loss: Any) -> Spike | None:
        """Return the spike that this step's loss completes, or None."""
        if self.config.action == "none":
            return None
        if loss is None:
            raise ValueError(
                "the watchdog needs the loss of each step: "
                "call run.step(loss=loss), or leave spike out"
            )
        spike = self.observe(step, self.ranks.mean(number_of(loss)))
        if spike is not None and not self.config.rolls_back and self.ranks.first:
            logger.warning(
                "spike: %s; with spike.action=rollback the run rolls back and skips its samples",
                spike.words,
            )
        return spike

    def go_back(
        self, spike: Spike, state: TrainingState, load: Callable[[str], Resumed | None]
    ) -> Recovery:
        """Load a state from before the spike and skip its samples from then on.

        `load` gets `before-STEP`, and restores the state and the position of the data. Raises
        SpikeNotRecovered.
        """
        last = next(reversed(self._recoveries), None)
        attempt = 1
        # It came back, if it is at most a window from the last one.
        if last and abs(spike.step - last.spike) <= self.config.window:
            attempt += last.attempt
        around = self.config.skip_around * 2 ** (attempt - 1)
        first = max(1, spike.first - around)
        if attempt > self.config.attempts:
            done = self._recoveries[1 - attempt :]
            skipped = ", ".join(f"{one.start} to {one.stop - 1}" for one in done)
            state_before = f"{BEFORE_PREFIX}{first}"
            raise SpikeNotRecovered(
                f"{spike.words}: it came back after {attempt - 1} rollbacks, which skipped the "
                f"samples at positions {skipped}. So the samples are not the cause: look at the "
                f"gradients before the spike (curry-train grad-flow), lower the learning rate, and "
                f'go on with saving(..., resume="{state_before}") once, or --resume '
                f"RUN@{state_before}"
            )

        resumed = None
        # From before the first step that is skipped, or at least from before the spike.
        for before in (first, spike.first):
            with contextlib.suppress(NothingSaved):
                resumed = resumed or load(f"{BEFORE_PREFIX}{before}")
        if resumed is None:
            raise SpikeNotRecovered(
                f"{spike.words}: there is nothing to go back to. Save earlier, with a lower "
                "rollback_every, or set the spike's action to warn"
            )
        start = self._data.after(state.position, windows=max(0, first - 1 - state.step))
        stop = self._data.after(state.position, windows=spike.step + around - state.step)
        recovery = Recovery(spike.step, state.step, start, stop, attempt)
        self._recoveries.append(recovery)
        self._data.skip(start, stop)
        if self.ranks.first:
            data = json.dumps([asdict(one) for one in self._recoveries]).encode()
            write(self._root / RECOVERIES_FILE_NAME, data)
            logger.warning(
                "spike: %s. Rolled back to %s, without the data at positions %d to %d (attempt %d "
                "of %d)",
                *(spike.words, resumed.saved.folder, start, stop - 1),
                *(attempt, self.config.attempts),
            )
        return recovery
