"""Detect loss spikes for `saving(spike=...)`, roll back and skip the batches around them.

    watch = AttachedWatch({"action": "rollback"})
    watch.begin(state, store)
    if spike := watch.judge(state.step, loss):
        watch.go_back(spike, state, policy, data)

`state.position` counts the batches drawn since the run began, both trained and skipped.
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
    """The spike watchdog of a run made by `saving`; call its methods on all ranks together.

    `watchdog` exists and is saved even when nothing is watched, so that a later start can watch.
    """

    def __init__(self, spike: SpikeConfig | Mapping[str, Any] | None) -> None:
        if not isinstance(spike, SpikeConfig):
            spike = SpikeConfig(action="none") if spike is None else SpikeConfig.from_config(spike)
        if spike.lower_rate is not None:
            raise ValueError(
                "spike.lower_rate works only in the training project, because `saving` does not "
                "control the schedule of this loop: leave it out"
            )
        self.config = spike
        self.ranks = Ranks.on_the_host()
        group = None
        if self.ranks.size > 1:
            group = self.ranks.group or dist.group.WORLD
        self.watchdog = SpikeWatchdog(spike, group=group)
        self._judged = 0

    def begin(self, state: TrainingState, store: Store) -> None:
        """Read the step that the run resumes from, and the batches that it skips."""
        self._judged = state.step
        self._recoveries = Recoveries(store.files)

    def skips(self, position: int) -> bool:
        """Whether to skip the batch at this position, because it lies around an earlier spike."""
        return any(recovery.start <= position < recovery.stop for recovery in self._recoveries.done)

    def judge(self, step: int, loss: Any) -> Spike | None:
        """Return the spike that this step's loss completes, or None."""
        if self.config.action == "none" or step == self._judged:
            return None
        if loss is None:
            raise ValueError(
                "the watchdog needs the loss of each step: "
                "call run.step(loss=loss), or leave spike out"
            )
        self._judged = step
        spike = self.watchdog.observe(step, loss)
        if spike is not None and not self.config.rolls_back:
            self._warn(
                "spike: %s; with spike={'action': 'rollback'} the run rolls back", spike.words
            )
        return spike

    def go_back(
        self, spike: Spike, state: TrainingState, policy: SavingPolicy, data: DataPosition
    ) -> Recovered:
        """Load a state from before the spike and skip its batches from then on.

        Raises SpikeNotRecovered.
        """
        step = state.step
        position = state.position
        epoch = data.epoch

        def after(start: int, windows: int) -> int:
            """Return the position that lies so many windows of trained batches after `start`."""
            trained = sum(not self.skips(place) for place in range(state.position, position))
            remaining = round(windows * trained / (step - state.step))
            place = start
            while remaining or self.skips(place):
                remaining -= not self.skips(place)
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
        if data.epoch < epoch and not any(name.startswith(OF_DATA) for name in state.generators):
            self._warn(
                "epoch %d will be shuffled again, in an order that depends on the model's random "
                "draws before it: give the loader a generator of its own, "
                "DataLoader(..., generator=torch.Generator())",
                epoch,
            )
        recovery = done.recovery
        self._warn(
            "spike: %s. Rolled back to %s: start again to go on without batches %d to %d "
            "(attempt %d of %d)",
            spike.words,
            done.resumed.saved.folder,
            recovery.start,
            recovery.stop - 1,
            recovery.attempt,
            self.config.attempts,
        )
        return done

    def _warn(self, message: str, *values: object) -> None:
        if self.ranks.first:
            logger.warning(message, *values)
