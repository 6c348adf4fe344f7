"""Decide on all ranks together when a rollback is due under `rollback_every: auto`.

The bound on the overhead holds from the first step: the duration of the first save is estimated
from a small timed write, and the save waits until the steps have earned that much time.
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
# Assumed share of a background save during which training waits, until the first one is measured.
IN_BACKGROUND = 0.1


class AutomaticCadence(CadenceFromOverhead):
    """The cadence of `rollback_every: auto`, decided by rank 0.

    Rank 0 also names the next step at which to decide, so that most steps need no communication.
    """

    def __init__(
        self, store: Store, config: PolicyConfig, *, saver: BackgroundSaver | None = None
    ) -> None:
        hours = config.mean_hours_between_failures
        super().__init__(
            config.overhead, mean_time_between_failures=None if hours is None else hours * HOUR
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

    def is_due(self, step: int, state: State) -> bool:
        """Whether a rollback is due after this step; call on all ranks together."""
        if self._config.rollback_every != AUTO:
            return False
        if self._following is not None and step < self._following:
            return False

        ranks = Ranks(self._store.group)
        if self._following is None:
            self._expect(ranks, state)
        remaining = ranks.agree(self.steps_to_next)
        self._following = step + max(1, remaining)
        return remaining == 0

    def _expect(self, ranks: Ranks, state: State) -> None:
        """Estimate the duration of the first save by timing a small write."""
        began = time.perf_counter()
        num_bytes = bytes_of(state.snapshot(), model_only=self._config.rollback_parameters_only)
        bytes_per_rank = num_bytes // ranks.size
        self._store.open()
        seconds = ranks.agree(lambda: expected_seconds(self._store.files, bytes_per_rank))
        self.expected = seconds * IN_BACKGROUND if self._saver else seconds
        self.waited(time.perf_counter() - began)
