"""When to save: every so many steps, or as often as a bound on the time that saving takes allows.

Young: a run that fails every M seconds and saves in d loses the least time when it saves every sqrt(2 d M) seconds;
Daly added the terms that count when d is not small against M. Proof: `python -m pytest tests/test_cadence.py`.
"""

import math
from collections import deque

from .names import RESUMABLE
from .policy_config import AUTO, PolicyConfig

FIRST = 8  # steps until the first save where nothing says what one costs; it is over the bound, and measures
MARGIN = 2.0  # times the longest of late is to be earned; what is left over counts for the next, so none gets rarer
RECENT = 8  # steps whose mean is what the next takes, and saves of which the next takes as long as the longest


def young_daly(save_seconds: float, mean_time_between_failures: float) -> float:
    """Seconds of training from the end of one save to the beginning of the next, all in seconds."""
    if not (save_seconds > 0 and 0 < mean_time_between_failures < math.inf):
        raise ValueError(
            f"seconds of a save and between failures must be above 0, got {save_seconds} and "
            f"{mean_time_between_failures}"
        )
    share = save_seconds / (2 * mean_time_between_failures)
    if share >= 1:
        return mean_time_between_failures
    first = math.sqrt(2 * save_seconds * mean_time_between_failures)
    return first * (1 + math.sqrt(share) / 3 + share / 9) - save_seconds


def steps_between(save_seconds: float, step_seconds: float, overhead: float) -> int:
    """The fewest steps from save to save for which saving takes at most this part of the time of the steps."""
    if not (save_seconds >= 0 and step_seconds > 0 and overhead > 0):
        raise ValueError(
            f"save_seconds must be 0 or more, step_seconds and overhead above 0; got {save_seconds}, {step_seconds} "
            f"and {overhead}"
        )
    exact = save_seconds / (overhead * step_seconds)
    return max(1, math.ceil(exact - 1e-9 * exact))  # 3.5 / 0.035 is 100.00000000000001


def due(step: int, config: PolicyConfig, *, automatic: bool = False) -> tuple[str, ...]:
    """The kinds whose turn it is after so many steps; `automatic` is what an automatic cadence says of a rollback."""
    every = {"rollback": config.rollback_every, "recovery": config.recovery_every}
    return tuple(
        kind
        for kind in RESUMABLE
        if (automatic if (n := every[kind]) == AUTO else isinstance(n, int) and step % n == 0)
        and step > 0
    )


class CadenceFromOverhead:
    """Steps earn `overhead` of their time, every save of any kind costs its own; a rollback is due once what it may
    cost is earned. So all saves together stay within the bound from the first on, unless one takes over `MARGIN` times
    as long as every one of late, or those of other kinds cost more than is earned: that is earned before the next.
    """

    def __init__(
        self,
        overhead: float = 0.035,
        *,
        mean_time_between_failures: float | None = None,
        expected: float | None = None,
    ) -> None:
        self.overhead, self.mean_time_between_failures = overhead, mean_time_between_failures
        self.expected = expected  # seconds of a save, before one was made
        self._earned = self._since = 0.0
        self._steps, self._saves = deque[float](maxlen=RECENT), deque[float](maxlen=RECENT)

    def stepped(self, seconds: float) -> None:
        self._steps.append(seconds)
        self._since += seconds
        self._earned += self.overhead * seconds

    def waited(self, seconds: float, *, save: bool = False) -> None:
        """Training stood still so long; `save` if a whole save was made of it, or begun in the background."""
        self._earned -= seconds
        if save:
            self._saves.append(seconds)
            self._since = 0.0

    def waited_later(self, seconds: float) -> None:
        """Once more for the save before, which is in the background."""
        self._earned -= seconds
        if self._saves:
            self._saves[-1] += seconds

    def steps_to_next(self) -> int:
        """How many more steps until a rollback is due, as far as is known now; 0 if it is due."""
        if not self._steps:
            return 1
        save = max(self._saves, default=self.expected)
        if save is None:
            return max(0, FIRST - len(self._steps))
        step, lacking = _mean(self._steps), MARGIN * save - self._earned
        steps = 0 if lacking <= 1e-9 * save else steps_between(lacking, step, self.overhead)
        if self.mean_time_between_failures is not None and save > 0:
            waiting = young_daly(save, self.mean_time_between_failures) - self._since
            steps = max(steps, math.ceil(waiting / step - 1e-9))
        return steps


def _mean(values: deque[float]) -> float:
    return max(sum(values) / len(values), 1e-9)
