"""A short training with planted loss spikes, for the gates of spike recovery.

Samples are drawn by their position, and training on a bad sample spoils the weights. The watchdog
gets made-up losses of a long run that jump at a bad sample; another gate checks that it finds real
spikes.
Proof: `python -m pytest template/tests/test_loss_spike.py`.
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
# The first step with bad samples; its state is saved.
FIRST_BAD = 4
NUM_STEPS = 6
# The most steps in one trial, including the repeated ones.
MOST_STEPS = 60


@dataclass(frozen=True)
class SpikeParts:
    """The components of the recovery; the test of a gate replaces them with faulty ones."""

    watchdog: Callable[[SpikeConfig], Any] = SpikeWatchdog
    recover: Callable[..., Recovered] = recover
    recoveries: Callable[[Any], Any] = Recoveries
    saves_watchdog: bool = True


SOUND = SpikeParts()


class WithoutSync(LocalFiles):
    """A local folder without syncs, because the trial simulates no power cut."""

    def sync_folder(self, key: str) -> None:
        pass


class Trial:
    """One process of a run, which resumes from the newest state in `folder`.

    `bad(step, position)` returns whether a step spoils the weights; the positions in `skipped` are
    never trained on.
    """

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
        self.case = case
        self.parts = parts
        self.bad = bad
        self.skipped = list(skipped)
        self.folder = folder
        self.saving = saving
        self.done = 0
        self.recovered: list[Recovered] = []

    def run(self, steps: int = NUM_STEPS, *, through: bool = True) -> dict[str, Tensor]:
        """Train to step `steps`, or to the first recovery with `through=False`.

        Returns copies of all tensors of the state.
        """
        watchdog = self.parts.watchdog(CONFIG)
        with seeded(self.case.seed), self._opened(watchdog) as (policy, state, recoveries):
            while state.step < steps and (through or not self.recovered):
                position = self._next(state.position)
                self.done += 1
                if self.done > MOST_STEPS:
                    raise ValueError(
                        f"{MOST_STEPS} steps were done to reach step {steps}: the recovery does "
                        f"not end"
                    )

                self._step(state, position)
                loss = _told(state.step + 1, high=self.bad(state.step + 1, position))
                state.step += 1
                state.position = position + 1

                spike = watchdog.observe(state.step, loss)
                if spike is None:
                    policy.after_step(state.step, state, {"loss": loss})
                    continue
                recovered = self.parts.recover(
                    spike,
                    CONFIG,
                    state=state,
                    load=lambda what: policy.resume(state, what),
                    after=self._after,
                    recoveries=recoveries,
                )
                self.recovered.append(recovered)
                self.skipped.append((recovered.recovery.start, recovered.recovery.stop))
            return {name: tensor.clone() for name, tensor in state.snapshot().tensors.items()}

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
        """Return the first position from `position` on that is not skipped."""
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
        extra = {"spike": watchdog} if self.parts.saves_watchdog else {}
        state = TrainingState(model, torch.optim.AdamW(trained, lr=1e-3), extra=extra)
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
    """Return the loss that the watchdog gets for a step."""
    return 2000.0 if high else 2.0 + 0.01 * (step % 5)
