"""`rollback_every: auto` on all ranks alike: what a save is expected to take, what it took, and whether one is due.

The bound counts from the beginning, so the first save waits until the time of a small write says that it is earned.
Proof: `python -m pytest tests/test_saving_policy.py -k automatic`.
"""

import time

from .background import BackgroundSaver
from .cadence import CadenceFromOverhead
from .disk_speed import expected_seconds
from .free_space import bytes_of
from .policy_config import AUTO, PolicyConfig
from .ranks import Ranks
from .snapshot import State
from .store import Store

HOUR = 3600.0
IN_BACKGROUND = 0.1  # of a save's time training is taken to wait, until the first one shows it


class AutomaticCadence(CadenceFromOverhead):
    """Asks the first rank, and only at the step that it named the last time, so that most steps ask nothing."""

    def __init__(
        self, store: Store, config: PolicyConfig, *, saver: BackgroundSaver | None = None
    ) -> None:
        hours = config.mean_hours_between_failures
        super().__init__(
            config.overhead, mean_time_between_failures=None if hours is None else hours * HOUR
        )
        self._store, self._config, self._saver = store, config, saver
        self._following: int | None = None
        self.go_on()

    def go_on(self) -> None:
        """From here on time is that of the next step."""
        self._returned, self._stalled = time.perf_counter(), self._stalled_so_far

    def trained(self) -> None:
        """A step has ended. What it waited for a save in the background was no step, and is of that save."""
        stalled = self._stalled_so_far - self._stalled
        self.stepped(time.perf_counter() - self._returned - stalled)
        self.waited_later(stalled)

    @property
    def _stalled_so_far(self) -> float:
        return self._saver.stalled if self._saver else 0.0

    def turned_back(self) -> None:
        """Steps count anew, from an earlier one."""
        self._following = None if self.expected is None else 0

    def is_due(self, step: int, state: State) -> bool:
        """Whether a rollback is. All ranks together."""
        if self._config.rollback_every != AUTO or (
            self._following is not None and step < self._following
        ):
            return False
        ranks = Ranks(self._store.group)
        if self._following is None:
            self._expect(ranks, state)
        left = ranks.agree(self.steps_to_next)
        self._following = step + max(1, left)
        return left == 0

    def _expect(self, ranks: Ranks, state: State) -> None:
        began = time.perf_counter()
        size = (
            bytes_of(state.snapshot(), model_only=self._config.rollback_parameters_only)
            // ranks.size
        )
        self._store.open()
        seconds = ranks.agree(lambda: expected_seconds(self._store.files, size))
        self.expected = seconds * IN_BACKGROUND if self._saver else seconds
        self.waited(time.perf_counter() - began)
