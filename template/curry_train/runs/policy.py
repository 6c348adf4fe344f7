"""Decide at each step whether to save and what, and refuse a state that is not healthy.

    with Store("runs/x") as store:
        policy = SavingPolicy(store, PolicyConfig(rollback_every=100))
        policy.resume(state)
        for ... in ...:
            ...
            policy.after_step(state.step, state, {"loss": loss, "dev_loss": dev_loss})
        policy.finish()

A save is due every N steps, or within a bound on its overhead.

A step at which both a rollback and a recovery are due is written once, as a recovery, which counts
as both on every kind of storage. A best-K is a separate file, because it has to stay when the
optimizer's state is deleted.

Proof: `python -m pytest tests/runs/test_cadence.py tests/runs/test_saving_policy.py`.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .background import BackgroundSaver
from .format import MODEL_PREFIX, Snapshot
from .layout import BEST_KIND, RESUMABLE_KINDS, Metric, SavedCheckpoint
from .policy_config import AUTO_INTERVAL, PolicyConfig
from .ranks import Ranks, RunError, StepExists
from .resume import BEFORE_PREFIX, NothingSaved, Resumed, load_chosen
from .retention import is_among_best, to_delete
from .state import TrainingState
from .store import Savable, Store
from .values import Values, floats_of

# Decide when to save: every N steps, or within a bound on the overhead of saving.

# Steps until the first save. It may exceed the bound; it measures the duration.
FIRST_SAVE_STEPS = 8
# A save is due once the steps have earned this multiple of the longest recent save. The surplus
# counts towards the next save, so the margin does not make saves less frequent.
SAVE_MARGIN_FACTOR = 2.0
# The next step is expected to take the mean of this many recent steps, and the next save as long
# as the longest of this many recent saves.
NUM_RECENT_DURATIONS = 8


def steps_between(save_seconds: float, step_seconds: float, overhead: float) -> int:
    """Return the smallest number of steps between saves that keeps saving within `overhead`.

    `overhead` is the bound on the saving time as a fraction of the time of the steps.
    """
    exact = save_seconds / (overhead * step_seconds)
    # The tolerance absorbs rounding: 3.5 / 0.035 is 100.00000000000001.
    return max(1, math.ceil(exact - 1e-9 * exact))


def due(step: int, config: PolicyConfig, *, automatic: bool) -> str | None:
    """Return the kind of checkpoint that is due after this step; a recovery is a rollback too.

    `automatic` is whether a rollback is due according to the automatic cadence.
    """
    every = {"recovery": config.recovery_every, "rollback": config.rollback_every}
    for kind, number in every.items():
        if step > 0 and (automatic if isinstance(number, str) else number and step % number == 0):
            return kind
    return None


class Cadence:
    """Schedule rollbacks so that saving takes at most a fraction of the step time.

    Every step earns `overhead` times its duration, and every save of any kind spends its own
    duration. A rollback is due once its likely cost is earned, so all saves together stay within
    the bound. There are three exceptions: the first save, which is measured; a save that takes more
    than `SAVE_MARGIN_FACTOR` times as long as every recent save; and saves of other kinds that cost
    more than is earned. The next rollback then waits until the steps have earned the deficit.
    """

    def __init__(self, config: PolicyConfig, *, saver: BackgroundSaver | None = None) -> None:
        self._config = config
        self._saver = saver
        # The seconds of all steps, and of all pauses for saves.
        self._trained = 0.0
        self._paused = 0.0
        self._steps = deque[float](maxlen=NUM_RECENT_DURATIONS)
        self._saves = deque[float](maxlen=NUM_RECENT_DURATIONS)
        # Steps until rank 0 decides again, so that most steps need no communication.
        self._left = 0
        self.go_on()

    def go_on(self) -> None:
        """Start the clock of the next step."""
        self._returned = time.perf_counter()
        self._stalled = self._saver.stalled if self._saver else 0.0

    def trained(self) -> None:
        """Call after each step; time spent waiting for a background save is charged to the save."""
        stalled = (self._saver.stalled if self._saver else 0.0) - self._stalled
        self.stepped(time.perf_counter() - self._returned - stalled, stalled=stalled)

    def stepped(self, seconds: float, *, stalled: float = 0.0) -> None:
        """Record a step, and for how long it waited for the last save, in the background."""
        self._steps.append(seconds)
        self._trained += seconds
        self._paused += stalled
        if self._saves:
            self._saves[-1] += stalled

    def waited(self, seconds: float, *, save: bool) -> None:
        """Record a pause of training.

        `save` means that the pause was a whole save, or the beginning of one in the background.
        """
        self._paused += seconds
        if save:
            self._saves.append(seconds)

    def too_costly(self) -> str:
        """Describe the cost of the saves so far and a better cadence; empty within the bound."""
        share = self._paused / max(self._trained, 1e-9)
        overhead = self._config.overhead
        if len(self._saves) < NUM_RECENT_DURATIONS or share <= overhead:
            return ""
        wider = steps_between(_mean(self._saves), _mean(self._steps), overhead)
        return (
            f"saves have taken {share:.0%} of the time of the steps, and overhead allows "
            f"{overhead:.2%}: rollback_every={wider} keeps to it, or {AUTO_INTERVAL}"
        )

    def steps_to_next(self) -> int:
        """Estimate the number of steps until a rollback is due; 0 if it is due now."""
        if not self._saves:
            return max(0, FIRST_SAVE_STEPS - len(self._steps))

        save = max(self._saves)
        earned = self._config.overhead * self._trained - self._paused
        missing_seconds = SAVE_MARGIN_FACTOR * save - earned
        if missing_seconds <= 1e-9 * save:
            return 0
        return steps_between(missing_seconds, _mean(self._steps), self._config.overhead)

    def is_due(self) -> bool:
        """Return whether `auto` saves now; call after each step, on all ranks together."""
        self._left -= 1
        if self._config.rollback_every != AUTO_INTERVAL or self._left > 0:
            return False
        remaining = Ranks().agree(self.steps_to_next)
        self._left = max(1, remaining)
        return remaining == 0


def _mean(values: deque[float]) -> float:
    return max(sum(values) / len(values), 1e-9)


# Check that a state is sound before it is saved.

# Buffers that are infinite only in damaged models; others may be masks.
RUNNING_STATISTICS = (".running_mean", ".running_var")


def unsound_tensors(snapshot: Snapshot) -> dict[str, str]:
    """Return, by name, what is wrong with the tensors that make a state unfit to be saved.

    Parameters and running statistics have to be finite; other buffers (masks), optimizer state and
    parts must not have NaN.
    """
    tensors = {**snapshot.tensors, **snapshot.inline}
    found = {}
    # Search for NaN only in the few tensors whose sum is not finite.
    for name in with_infinite_sum(tensors):
        values = floats_of(tensors[name])
        is_judged = name in snapshot.parameters or name.endswith(RUNNING_STATISTICS)
        if is_judged and not torch.isfinite(values).all():
            found[name] = "is not finite"
        elif torch.isnan(values).any():
            found[name] = "has NaN"
    return found


def with_infinite_sum(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the tensors that may not be finite; waits for a device when all sums are under way.

    A sum reads memory once and allocates none, and NaN or infinity in a tensor is in its sum too.
    """
    flags = {name: torch.isfinite(floats_of(tensor).sum()) for name, tensor in tensors.items()}
    return [name for name, flag in flags.items() if not flag]


def number_of(value: Any) -> float:
    """Convert a number or a tensor, which may still require grad, to a float."""
    return float(value.detach() if isinstance(value, Tensor) else value)


# Save, delete and resume checkpoints according to a policy.

logger = logging.getLogger(__name__)


class SavingPolicy:
    """Applies a PolicyConfig to a store.

    With `saver`, saves run in the background, and `after_step` returns the checkpoints that were
    committed since the last save. `record` gets the events of a journal: each save, once it is
    committed, and each checkpoint that retention deleted. All ranks call together, with the same
    step and metrics.
    """

    def __init__(
        self,
        store: Store,
        config: PolicyConfig | None = None,
        *,
        saver: BackgroundSaver | None = None,
    ) -> None:
        self.store = store
        self.config = config or PolicyConfig()
        self.saver = saver
        self.record: Callable[..., None] = lambda kind, **facts: None
        self._last: SavedCheckpoint | None = None
        self._entered = False
        # The checkpoints that were committed since `after_step` was called last.
        self._committed: list[SavedCheckpoint] = []
        # Tensors that are unsound already before the run trains.
        self._by_design: set[str] = set()
        # `auto` keeps the bound itself, and one warning is enough.
        self._warns = self.config.rollback_every != AUTO_INTERVAL and Ranks().first
        self._cadence = Cadence(self.config, saver=saver)

    def resume(self, state: TrainingState, what: str | int = "latest") -> Resumed | None:
        """Load the checkpoint to resume from; return None where the run has none yet.

        Where this run resumes from an earlier step, its later states stay until a new one is saved.
        `before-180` deletes them at once; best-Ks stay.
        """
        if what != "latest":
            # A save in the background may be of a later step.
            self.finish()
        resumed = None
        try:
            resumed = load_chosen(self.store, state, what, config=self.config)
        except NothingSaved:
            if what != "latest":
                raise
        else:
            if resumed.is_own and resumed.saved.is_state:
                self._last = resumed.saved
                # The next state that is saved replaces these.
                self.store.given_up = self._list_folders_from(resumed.saved.step + 1)
                if str(what).startswith(BEFORE_PREFIX):
                    for folder in self.store.given_up:
                        self.store.discard(folder)
            logger.info("%s", resumed.words)
        self.begin(state)
        return resumed

    def begin(self, state: TrainingState) -> None:
        """Call before a run trains, unless it resumes: `resume` calls it."""
        try:
            self._by_design = {*unsound_tensors(state.snapshot())}
        except Exception as error:  # noqa: BLE001 - the first save raises it, unless it succeeds then
            logger.warning("a save at this moment would fail: %s", error)
        # Time spent reading must not count as a training step.
        self._cadence.go_on()

    def after_step(
        self, step: int, state: Savable, metrics: Values, *, is_step: bool = True
    ) -> list[SavedCheckpoint]:
        """Save what is due after `step` steps; nothing of a state with NaN.

        Only the best parameters are due where `is_step` is false: metrics may be measured within an
        accumulation window, whose gradients are not saved.

        `metrics` holds figures of this step, numbers or tensors; they are read only where a save is
        due. Nothing is saved if one of them is NaN, or if the loss or the metric of the best-K is
        infinite; or if the state is not sound (see `unsound_tensors`).
        """
        cadence = self._cadence
        cadence.trained()
        kind = due(step, self.config, automatic=cadence.is_due()) if is_step else None
        measured = metrics.get(self.config.best_k_metric) is not None
        self._committed = []
        if kind or (measured and self.config.best_k):
            began = time.perf_counter()
            has_begun = self._save_due(step, state, kind, metrics)
            cadence.waited(time.perf_counter() - began, save=has_begun)
            if self._warns and (costly := cadence.too_costly()):
                logger.warning("%s", costly)
                self._warns = False
        cadence.go_on()
        return self._committed

    def save_now(self, step: int, state: Savable) -> list[SavedCheckpoint]:
        """Save a recovery at the end of a run, or before it is stopped.

        Nothing is saved if this step is saved already, or if the state is not sound.
        """
        self._committed = []
        self._save_due(step, state, "recovery", {})
        self.finish()
        return self._committed

    def _list_folders_from(self, step: int) -> list[str]:
        """Return the folders of the states from a step on, damaged or not."""
        steps = Ranks().agree(lambda: self.store.steps(*RESUMABLE_KINDS))
        return [folder for folder in steps if steps[folder] >= step]

    def _save_due(self, step: int, state: Savable, kind: str | None, metrics: Values) -> bool:
        """Save a state as this kind and as a best-K, unless one of the ranks has damage in it.

        Returns whether a save was begun.
        """
        config = self.config
        taken = Ranks().all_do(state.snapshot)
        wrong = Ranks().first_found(lambda: self._find_unfit_part(taken, metrics))
        if wrong:
            logger.warning("step %d was not saved: %s", step, wrong)
            return False
        self.finish()
        saves: list[tuple[str, Metric | None]] = []
        if kind is not None and not (self._last and self._last.step == step):
            self._enter_line(step)
            saves.append((kind, None))
        measured = metrics.get(config.best_k_metric)
        value = math.nan if measured is None else number_of(measured)
        if Ranks().agree(
            lambda: is_among_best(value, step, self.store.committed(BEST_KIND), config)
        ):
            saves.append((BEST_KIND, (config.best_k_metric, value)))
        has_begun = False
        for due_kind, metric in saves:
            self.finish()
            try:
                saved = (self.saver or self.store).save(due_kind, step, taken, metric=metric)
            except StepExists as error:
                logger.warning("%s", error)
            else:
                has_begun = True
                self._record_commit(saved)
        return has_begun

    def _find_unfit_part(self, snapshot: Snapshot, metrics: Values) -> str | None:
        """Describe the first metric or tensor that makes a state unfit to be saved."""
        for name, value in metrics.items():
            number = 0.0 if value is None else number_of(value)
            is_judged = name in ("loss", self.config.best_k_metric)
            if math.isnan(number) or (math.isinf(number) and is_judged):
                return f"{name} is {number}"
        for name, what in unsound_tensors(snapshot).items():
            if name not in self._by_design:
                return f"{name.removeprefix(MODEL_PREFIX)} {what}"
        return None

    def finish(self) -> None:
        """Wait for the save in the background."""
        if self.saver is not None:
            self._record_commit(self.saver.finish())

    def _record_commit(self, saved: SavedCheckpoint | None) -> None:
        """Record what was committed, if anything, and delete what retention no longer keeps."""
        if saved is None:
            return
        self._committed.append(saved)
        if saved.is_state:
            self._last = saved
        step = saved.step
        self.record("save", step=step, checkpoint=saved.folder, num_bytes=saved.num_bytes)
        for superseded in Ranks().agree(lambda: to_delete(self.store.committed(), self.config)):
            if superseded != self._last:
                self.store.discard(superseded)
                pruned = {"checkpoint": superseded.folder, "of_step": superseded.step}
                self.record("prune", step=step, **pruned)

    def _enter_line(self, step: int) -> None:
        """Check at the first save that the run has no states from this step or beyond.

        A resume would take such states for later ones of this training.
        """
        if self._entered:
            return
        self.store.open()
        if ahead := {*self._list_folders_from(step)} - {*self.store.given_up}:
            raise RunError(
                f"{self.store.root} has {max(ahead)}, but training is at step "
                f"{step}: resume from it, or give this run a folder of its own"
            )
        self._entered = True
