"""When to save: every so many steps, or as often as a bound on the time that saving takes allows.

Young: a run that fails every M seconds and saves in d loses the least time when it saves every sqrt(2 d M) seconds;
Daly added the terms that count when d is not small against M. Proof: `python -m pytest tests/test_cadence.py`.
"""

import math
from collections import deque

from .names import RESUMABLE
from .policy_config import AUTO, PolicyConfig

FIRST = 10  # steps until the first save of an automatic cadence, which measures what one costs
RECENT = 8  # saves and steps whose mean is what the next will take


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
        if (automatic if (n := every[kind]) == AUTO else isinstance(n, int) and step % n == 0) and step > 0
    )


class CadenceFromOverhead:
    """Every save of any kind is a debt, which each step pays off by `overhead` of its own time; with no debt left a
    rollback is due. So the sum of all saves stays within the bound, and only one beyond it is ever under way.
    """

    def __init__(self, overhead: float = 0.035, *, mean_time_between_failures: float | None = None) -> None:
        self.overhead, self.mean_time_between_failures = overhead, mean_time_between_failures
        self._debt = 0.0
        self._steps, self._saves = deque[float](maxlen=RECENT), deque[float](maxlen=RECENT)

    def stepped(self, seconds: float) -> None:
        self._steps.append(seconds)
        self._debt = max(0.0, self._debt - self.overhead * seconds)

    def waited(self, seconds: float, *, save: bool = False) -> None:
        """Training stood still so long; `save` if a whole save was made of it, or begun in the background."""
        self._debt += seconds
        if save:
            self._saves.append(seconds)

    def steps_to_next(self) -> int:
        """How many more steps until a rollback is due, as far as is known now."""
        if not self._saves or not self._steps:
            return FIRST
        step, save = _mean(self._steps), _mean(self._saves)
        steps = steps_between(self._debt, step, self.overhead)
        if self.mean_time_between_failures is not None and save > 0:
            steps = max(steps, math.floor(young_daly(save, self.mean_time_between_failures) / step))
        return steps


def _mean(values: deque[float]) -> float:
    return max(sum(values) / len(values), 1e-9)
