"""What `saving(spike=...)` does about a loss: judges each, goes back to before a spike, then skips its batches.

    watch = AttachedWatch({"action": "rollback"})
    watch.begin(state, store)
    if spike := watch.judge(state.step, loss):
        watch.go_back(spike, state, policy, data)

`state.position` counts the batches that were drawn since the run began, trained or skipped.
Proof: `python -m pytest tests/test_attached_spike.py`.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from .data_position import OF_DATA, DataPosition
from .policy import SavingPolicy
from .ranks import Ranks
from .recoveries import Recoveries
from .spike import Spike, SpikeWatchdog
from .spike_config import SpikeConfig
from .spike_recovery import Recovered, recover
from .state import TrainingState
from .store import Store

logger = logging.getLogger(__name__)


class AttachedWatch:
    """On all ranks together. `watchdog` is there, and saved, also where nothing is watched: that may come later."""

    def __init__(self, spike: SpikeConfig | Mapping[str, Any] | None) -> None:
        if not isinstance(spike, SpikeConfig):
            spike = SpikeConfig(action="none") if spike is None else SpikeConfig.from_config(spike)
        if spike.lower_rate is not None:
            raise ValueError(
                "spike.lower_rate is for the training project: the schedule of this loop is its own"
            )
        self.config, self.ranks = spike, Ranks.on_the_host()
        together = self.ranks.size > 1
        self.watchdog = SpikeWatchdog(
            spike, group=(self.ranks.group or dist.group.WORLD) if together else None
        )
        self._judged = 0

    def begin(self, state: TrainingState, store: Store) -> None:
        """Where the run goes on, and what it skips."""
        self._judged = state.step
        self._recoveries = Recoveries(store.files)

    def skips(self, position: int) -> bool:
        """Whether the batch at this position is one that a spike was around."""
        return any(recovery.start <= position < recovery.stop for recovery in self._recoveries.done)

    def judge(self, step: int, loss: Any) -> Spike | None:
        """The spike that this step's loss shows."""
        if self.config.action == "none" or step == self._judged:
            return None
        if loss is None:
            raise ValueError(
                "the watchdog needs the loss of each step: call run.step(loss=loss), or leave spike out"
            )
        self._judged = step
        spike = self.watchdog.observe(step, loss)
        if spike is not None and not self.config.rolls_back:
            self._say("spike: %s; with spike={'action': 'rollback'} the run goes back", spike.words)
        return spike

    def go_back(
        self, spike: Spike, state: TrainingState, policy: SavingPolicy, data: DataPosition
    ) -> Recovered:
        """To before the spike; its batches are skipped from then on. Raises SpikeNotRecovered."""
        step, position, epoch = state.step, state.position, data.epoch

        def after(start: int, windows: int) -> int:
            trained = sum(not self.skips(place) for place in range(state.position, position))
            left, place = round(windows * trained / (step - state.step)), start
            while left or self.skips(place):
                left -= not self.skips(place)
                place += 1
            return place

        done = recover(
            spike,
            self.config,
            state=state,
            load=lambda what: policy.resume(state, what),
            after=after,
            recoveries=self._recoveries,
            write=self.ranks.first,
            go_on='saving(..., resume="{}") once, and without it afterwards',
        )
        recovery, folder = done.recovery, done.resumed.saved.folder
        told = (
            spike.words,
            folder,
            recovery.start,
            recovery.stop - 1,
            recovery.attempt,
            self.config.attempts,
        )
        if data.epoch < epoch and not any(name.startswith(OF_DATA) for name in state.generators):
            self._say(
                "epoch %d is drawn anew, in an order that depends on what the model draws before it: give the loader a "
                "generator of its own, DataLoader(..., generator=torch.Generator())",
                epoch,
            )
        self._say(
            "spike: %s. Back at %s: start again to go on without batches %d to %d (attempt %d of %d)",
            *told,
        )
        return done

    def _say(self, words: str, *figures: object) -> None:
        if self.ranks.first:
            logger.warning(words, *figures)
