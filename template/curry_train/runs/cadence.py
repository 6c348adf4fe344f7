"""Decide when to save: every N steps, or within a bound on the overhead of saving.

Young: a run that fails every M seconds and needs d seconds for a save loses the least time when it
saves every sqrt(2 d M) seconds. Daly added the terms that matter when d is not small against M.
Proof: `python -m pytest tests/test_cadence.py`.
"""

import math
from collections import deque

from .names import RESUMABLE
from .policy_config import AUTO, PolicyConfig

# Steps until the first save when there is no estimate of its duration. That save may exceed the
# bound; it measures the duration.
FIRST = 8
# A save is due once the steps have earned this multiple of the longest recent save. The surplus
# counts towards the next save, so the margin does not make saves less frequent.
MARGIN = 2.0
# The next step is expected to take the mean of this many recent steps, and the next save as long
# as the longest of this many recent saves.
RECENT = 8


def young_daly(save_seconds: float, mean_time_between_failures: float) -> float:
    """Return the optimal seconds of training between the end of a save and the next save.

    All arguments are in seconds.
    """
    if not (save_seconds > 0 and 0 < mean_time_between_failures < math.inf):
        raise ValueError(
            f"save_seconds must be above 0, and mean_time_between_failures above 0 and finite; "
            f"got {save_seconds} and {mean_time_between_failures}"
        )
    share = save_seconds / (2 * mean_time_between_failures)
    if share >= 1:
        return mean_time_between_failures
    first = math.sqrt(2 * save_seconds * mean_time_between_failures)
    return first * (1 + math.sqrt(share) / 3 + share / 9) - save_seconds


def steps_between(save_seconds: float, step_seconds: float, overhead: float) -> int:
    """Return the smallest number of steps between saves that keeps saving within `overhead`.

    `overhead` is the bound on the saving time as a fraction of the time of the steps.
    """
    if not (save_seconds >= 0 and step_seconds > 0 and overhead > 0):
        raise ValueError(
            f"save_seconds must be 0 or more, step_seconds and overhead above 0; "
            f"got {save_seconds}, {step_seconds} and {overhead}"
        )
    exact = save_seconds / (overhead * step_seconds)
    # The tolerance absorbs rounding: 3.5 / 0.035 is 100.00000000000001.
    return max(1, math.ceil(exact - 1e-9 * exact))


def due(step: int, config: PolicyConfig, *, automatic: bool = False) -> tuple[str, ...]:
    """Return the kinds of checkpoint that are due after this step.

    `automatic` is whether a rollback is due according to the automatic cadence.
    """
    if step <= 0:
        return ()
    intervals = {"rollback": config.rollback_every, "recovery": config.recovery_every}
    kinds = []
    for kind in RESUMABLE:
        interval = intervals[kind]
        if interval == AUTO:
            is_due = automatic
        else:
            is_due = isinstance(interval, int) and step % interval == 0
        if is_due:
            kinds.append(kind)
    return tuple(kinds)


class CadenceFromOverhead:
    """Schedule rollbacks so that saving takes at most a fraction of the step time.

    Every step earns `overhead` times its duration, and every save of any kind spends its own
    duration. A rollback is due once its likely cost is earned, so all saves together stay within
    the bound from the first one on. There are two exceptions: a save that takes more than `MARGIN`
    times as long as every recent save, and saves of other kinds that cost more than is earned.
    The next rollback then waits until the steps have earned the deficit.
    """

    def __init__(
        self,
        overhead: float = 0.035,
        *,
        mean_time_between_failures: float | None = None,
        expected: float | None = None,
    ) -> None:
        self.overhead = overhead
        self.mean_time_between_failures = mean_time_between_failures
        # Estimated seconds of a save, used until the first save is measured.
        self.expected = expected
        self._earned = 0.0
        self._since = 0.0
        self._steps = deque[float](maxlen=RECENT)
        self._saves = deque[float](maxlen=RECENT)

    def stepped(self, seconds: float) -> None:
        self._steps.append(seconds)
        self._since += seconds
        self._earned += self.overhead * seconds

    def waited(self, seconds: float, *, save: bool = False) -> None:
        """Record a pause of training.

        `save` means that the pause was a whole save, or the beginning of one in the background.
        """
        self._earned -= seconds
        if save:
            self._saves.append(seconds)
            self._since = 0.0

    def waited_later(self, seconds: float) -> None:
        """Record a further pause for the last save, which runs in the background."""
        self._earned -= seconds
        if self._saves:
            self._saves[-1] += seconds

    def steps_to_next(self) -> int:
        """Estimate the number of steps until a rollback is due; 0 if it is due now."""
        if not self._steps:
            return 1
        save = max(self._saves, default=self.expected)
        if save is None:
            return max(0, FIRST - len(self._steps))

        step_seconds = _mean(self._steps)
        missing_seconds = MARGIN * save - self._earned
        steps = 0
        if missing_seconds > 1e-9 * save:
            steps = steps_between(missing_seconds, step_seconds, self.overhead)
        if self.mean_time_between_failures is not None and save > 0:
            waiting = young_daly(save, self.mean_time_between_failures) - self._since
            steps = max(steps, math.ceil(waiting / step_seconds - 1e-9))
        return steps


def _mean(values: deque[float]) -> float:
    return max(sum(values) / len(values), 1e-9)
