"""Decide when a save is due: by steps, by minutes, or by a bound on its overhead.

Young: a run that fails every M seconds and needs d seconds for a save loses the least time when it
saves every sqrt(2 d M) seconds. Daly added the terms that matter when d is not small against M.

Proof: `python -m pytest tests/runs/test_cadence.py tests/runs/test_saving_policy.py`.
"""

import contextlib
import math
import time
from collections import deque

from .background import BackgroundSaver
from .files import Files
from .format import SavableState
from .layout import RESUMABLE_KINDS
from .policy_config import AUTO_INTERVAL, PolicyConfig
from .ranks import Ranks
from .retention import bytes_to_write
from .store import Store

# Decide when to save: every N steps, or within a bound on the overhead of saving.

# Steps until the first save when there is no estimate of its duration. That save may exceed the
# bound; it measures the duration.
FIRST_SAVE_STEPS = 8
# A save is due once the steps have earned this multiple of the longest recent save. The surplus
# counts towards the next save, so the margin does not make saves less frequent.
SAVE_MARGIN_FACTOR = 2.0
# The next step is expected to take the mean of this many recent steps, and the next save as long
# as the longest of this many recent saves.
NUM_RECENT_DURATIONS = 8


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
    for kind in RESUMABLE_KINDS:
        interval = intervals[kind]
        if interval == AUTO_INTERVAL:
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
    the bound from the first one on. There are two exceptions: a save that takes more than
    `SAVE_MARGIN_FACTOR` times as long as every recent save, and saves of other kinds that cost more
    than is earned. The next rollback then waits until the steps have earned the deficit.
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
        self._steps = deque[float](maxlen=NUM_RECENT_DURATIONS)
        self._saves = deque[float](maxlen=NUM_RECENT_DURATIONS)

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
            return max(0, FIRST_SAVE_STEPS - len(self._steps))

        step_seconds = _mean(self._steps)
        missing_seconds = SAVE_MARGIN_FACTOR * save - self._earned
        steps = 0
        if missing_seconds > 1e-9 * save:
            steps = steps_between(missing_seconds, step_seconds, self.overhead)
        if self.mean_time_between_failures is not None and save > 0:
            waiting = young_daly(save, self.mean_time_between_failures) - self._since
            steps = max(steps, math.ceil(waiting / step_seconds - 1e-9))
        return steps


def _mean(values: deque[float]) -> float:
    return max(sum(values) / len(values), 1e-9)


# Estimate the duration of a save by timing a small write on the same volume.

DISK_TRIAL_FILE_NAME = ".speed-of-the-disk"
LEAST_BYTES = 2**20
MOST_BYTES = 2**29
# The trial writes 1/16 of the bytes of a save, so that it costs little in comparison.
DISK_TRIAL_DIVISOR = 16
# Duration of a save of almost no bytes: naming, writing and syncing the index and the manifest.
FIXED_SECONDS = 0.1


def expected_seconds(files: Files, num_bytes: int) -> float:
    """Return the expected seconds of a save of this many bytes by this process.

    The trial file is removed afterwards.
    """
    data = memoryview(bytearray(min(max(num_bytes // DISK_TRIAL_DIVISOR, LEAST_BYTES), MOST_BYTES)))
    # A process that was killed during the trial leaves its file behind.
    with contextlib.suppress(FileNotFoundError):
        files.remove_file(DISK_TRIAL_FILE_NAME)

    began = time.perf_counter()
    stream = files.create(DISK_TRIAL_FILE_NAME)
    try:
        stream.write(data)
        files.finish(stream)
    except BaseException:
        files.abandon(stream)
        raise
    seconds = time.perf_counter() - began

    files.remove_file(DISK_TRIAL_FILE_NAME)
    return FIXED_SECONDS + seconds * max(1.0, num_bytes / len(data))


# Decide on all ranks together when a rollback is due under `rollback_every: auto`.

SECONDS_PER_HOUR = 3600.0
# Assumed share of a background save during which training waits, until the first one is measured.
BACKGROUND_WAIT_SHARE = 0.1


class AutomaticCadence(CadenceFromOverhead):
    """The cadence of `rollback_every: auto`, decided by rank 0.

    Rank 0 also names the next step at which to decide, so that most steps need no communication.
    """

    def __init__(
        self, store: Store, config: PolicyConfig, *, saver: BackgroundSaver | None = None
    ) -> None:
        hours = config.mean_hours_between_failures
        super().__init__(
            config.overhead,
            mean_time_between_failures=None if hours is None else hours * SECONDS_PER_HOUR,
        )
        self._store = store
        self._config = config
        self._saver = saver
        self._following: int | None = None
        self.go_on()

    def go_on(self) -> None:
        """Start the clock of the next step."""
        self._returned = time.perf_counter()
        self._stalled = self._stalled_so_far

    def trained(self) -> None:
        """Call after each step; time spent waiting for a background save is charged to the save."""
        stalled = self._stalled_so_far - self._stalled
        self.stepped(time.perf_counter() - self._returned - stalled)
        self.waited_later(stalled)

    @property
    def _stalled_so_far(self) -> float:
        return self._saver.stalled if self._saver else 0.0

    def turned_back(self) -> None:
        """Call after the run went back to an earlier step."""
        self._following = None if self.expected is None else 0

    def is_due(self, step: int, state: SavableState) -> bool:
        """Return whether a rollback is due after this step; call on all ranks together."""
        if self._config.rollback_every != AUTO_INTERVAL:
            return False
        if self._following is not None and step < self._following:
            return False

        ranks = Ranks(self._store.group)
        if self._following is None:
            self._expect(ranks, state)
        remaining = ranks.agree(self.steps_to_next)
        self._following = step + max(1, remaining)
        return remaining == 0

    def _expect(self, ranks: Ranks, state: SavableState) -> None:
        """Estimate the duration of the first save by timing a small write."""
        began = time.perf_counter()
        num_bytes = bytes_to_write(
            state.snapshot(), model_only=self._config.rollback_parameters_only
        )
        bytes_per_rank = num_bytes // ranks.size
        self._store.open()
        seconds = ranks.agree(lambda: expected_seconds(self._store.files, bytes_per_rank))
        self.expected = seconds * BACKGROUND_WAIT_SHARE if self._saver else seconds
        self.waited(time.perf_counter() - began)
