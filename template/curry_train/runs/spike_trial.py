"""A short training of a case with planted spikes, and the parts of the recovery that a test of a gate may replace.

Samples are drawn by their position. Training on a bad one spoils the weights. The watchdog is told figures of a run
that began long before, which jump then: whether it finds real ones is another gate's question. Proof:
`python -m pytest template/tests/test_loss_spike.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.quiet import unheard
from ..core.untouched import seeded
from ..core.workload import Case
from .files import LocalFiles
from .policy import SavingPolicy
from .policy_config import PolicyConfig
from .recoveries import Recoveries
from .spike import SpikeWatchdog
from .spike_config import SpikeConfig
from .spike_recovery import Recovered, recover
from .state import TrainingState
from .store import Store

CONFIG = SpikeConfig(
    action="rollback", window=16, threshold=50.0, patience=2, attempts=2, skip_around=1
)
SAVING = PolicyConfig(rollback_every=2, recovery_every=None, best_k=0)
FIRST_BAD = 4  # the step whose samples are the first bad ones; its state is saved
NUM_STEPS = 6
MOST_STEPS = 60  # done in all, with those that were done again


@dataclass(frozen=True)
class SpikeParts:
    """What a gate's test may replace."""

    watchdog: Callable[[SpikeConfig], Any] = SpikeWatchdog
    recover: Callable[..., Recovered] = recover
    recoveries: Callable[[Any], Any] = Recoveries
    saves_watchdog: bool = True


SOUND = SpikeParts()


class WithoutSync(LocalFiles):
    """A folder that no power cut is awaited in."""

    def sync_folder(self, key: str) -> None:
        pass


class Trial:
    """One process of a run in `folder`: it goes on where the folder is. `bad` tells whether a step spoils the weights,
    by its number and its position; `skipped` are positions that are passed over from the start."""

    def __init__(
        self,
        case: Case,
        folder: Path,
        parts: SpikeParts,
        *,
        bad: Callable[[int, int], bool],
        skipped: tuple[tuple[int, int], ...] = (),
        saving: PolicyConfig = SAVING,
    ) -> None:
        self.case, self.parts, self.bad, self.skipped = case, parts, bad, list(skipped)
        self.folder, self.saving, self.done = folder, saving, 0
        self.recovered: list[Recovered] = []

    def run(self, steps: int = NUM_STEPS, *, through: bool = True) -> dict[str, Tensor]:
        """Train until so many steps are done, or until the first recovery; returns copies of all that is saved."""
        watchdog = self.parts.watchdog(CONFIG)
        with seeded(self.case.seed), self._opened(watchdog) as (policy, state, recoveries):
            while state.step < steps and (through or not self.recovered):
                position, self.done = self._next(state.position), self.done + 1
                if self.done > MOST_STEPS:
                    raise ValueError(
                        f"{MOST_STEPS} steps were done for {steps}: the recovery has no bound"
                    )
                self._step(state, position)
                loss = _told(state.step + 1, high=self.bad(state.step + 1, position))
                state.step, state.position = state.step + 1, position + 1
                spike = watchdog.observe(state.step, loss)
                if spike is None:
                    policy.after_step(state.step, state, {"loss": loss})
                    continue
                done = self.parts.recover(
                    spike,
                    CONFIG,
                    state=state,
                    load=lambda what: policy.resume(state, what),
                    after=self._after,
                    recoveries=recoveries,
                )
                self.recovered.append(done)
                self.skipped.append((done.recovery.start, done.recovery.stop))
            return {name: held.clone() for name, held in state.snapshot().tensors.items()}

    def _step(self, state: TrainingState, position: int) -> None:
        with seeded(self.case.seed + 1000 + position):
            batch = self.case.place(self.case.workload.batch(self.case.batch_size))
        loss = self.case.workload.mean_loss(state.model, batch)
        loss.backward()
        state.optimizers[0].step()
        state.optimizers[0].zero_grad()
        if self.bad(state.step + 1, position):
            with torch.no_grad():
                for parameter in state.model.parameters():
                    parameter.add_(torch.ones_like(parameter))

    def _next(self, position: int) -> int:
        """The first position from this one on that is not skipped."""
        while any(start <= position < stop for start, stop in self.skipped):
            position += 1
        return position

    def _after(self, position: int, windows: int) -> int:
        for _ in range(windows):
            position = self._next(position) + 1
        return position

    @contextmanager
    def _opened(self, watchdog: Any) -> Iterator[tuple[SavingPolicy, TrainingState, Any]]:
        model = replace(self.case, seed=self.case.seed).build()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        held = {"spike": watchdog} if self.parts.saves_watchdog else {}
        state = TrainingState(model, torch.optim.AdamW(trained, lr=1e-3), extra=held)
        files = WithoutSync(self.folder)
        with (
            unheard(SavingPolicy.__module__),
            Store(self.folder, files=files) as store,
            SavingPolicy(store, self.saving) as policy,
        ):
            if policy.resume(state) is None:
                for step in range(-CONFIG.window, 1):
                    watchdog.observe(step, _told(step, high=False))
            recoveries = self.parts.recoveries(files)
            self.skipped += [(one.start, one.stop) for one in recoveries.done]
            yield policy, state, recoveries


def _told(step: int, *, high: bool) -> float:
    return 2000.0 if high else 2.0 + 0.01 * (step % 5)
