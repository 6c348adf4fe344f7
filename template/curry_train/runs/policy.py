"""Save, delete and resume checkpoints according to a policy.

    with Store("runs/x") as store, SavingPolicy(store, PolicyConfig(rollback_every=100)) as policy:
        policy.resume(state)
        for ... in ...:
            ...
            policy.after_step(state.step, state, {"loss": loss, "dev_loss": dev_loss})

A step at which both a rollback and a recovery are due is written once, as a recovery, which counts
as both on every kind of storage. A best-K is a separate file, because it has to stay when the
optimizer's state is deleted.
Proof: `python -m pytest tests/test_saving_policy.py`.
"""

import logging
import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from .automatic import AutomaticCadence
from .background import BackgroundSaver
from .cadence import due
from .errors import RunError
from .free_space import bytes_of, require_room
from .health import number_of, what_is_wrong
from .names import BEST, KINDS, PARAMETERS, RESUMABLE, Metric, Saved, folder_name
from .policy_config import PolicyConfig
from .ranks import Ranks
from .reading import is_being_read
from .resume import NothingSaved, Resumed, choose, load_chosen
from .retention import is_among_best, is_of_line, to_delete
from .snapshot import State
from .store import Store
from .turned_back import finish_giving_up, give_up, given_up

logger = logging.getLogger(__name__)


class SavingPolicy:
    """Applies a PolicyConfig to a store.

    With `saver`, saves run in the background, and `after_step` returns the checkpoints that were
    committed since the last save. `notes` lists what was not saved, with the reason. All ranks call
    together, with the same step and metrics.
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
        self.notes: list[str] = []
        self._damaged: set[str] = set()
        self._protected: set[str] = set()
        self._last: Saved | None = None
        self._pending: int | None = None
        self._entered = False
        self._begun = False
        self._cadence = AutomaticCadence(store, self.config, saver=saver)

    def __enter__(self) -> "SavingPolicy":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()

    def resume(
        self, state: State, what: str | int = "latest", *, strict: bool = True
    ) -> Resumed | None:
        """Load the checkpoint to resume from; return None where the run has none yet.

        Resuming this run from an earlier step deletes its later states (see `turn_back`).
        """
        own = Ranks(self.store.group).agree(lambda: self._own_choice(what))
        if own is None:
            return None
        resumed = load_chosen(self.store, state, what, config=self.config, strict=strict)
        self._damaged |= set(resumed.damaged)
        if own and resumed.saved.kind in RESUMABLE:
            self._last = resumed.saved
            if what != "latest":
                self.turn_back(resumed.saved.step)
        logger.info("%s", resumed.words)
        # Time spent reading must not count as a training step.
        self._cadence.go_on()
        return resumed

    def after_step(self, step: int, state: State, metrics: Mapping[str, Any]) -> list[Saved]:
        """Save what is due after `step` steps; nothing if a metric or parameter is not finite.

        `metrics` holds figures of this step, numbers or tensors; they are read only where a save is
        due. Leave out what may be infinite in correct training, such as the norm of a gradient that
        a scaler skips.
        """
        ranks = Ranks(self.store.group)
        self._cadence.trained()
        kinds = due(step, self.config, automatic=self._cadence.is_due(step, state))
        measured = metrics.get(self.config.best_k_metric) is not None
        saved: list[Saved] = []
        if kinds or (measured and self.config.best_k):
            began = time.perf_counter()
            self._begun = False
            value = number_of(metrics[self.config.best_k_metric]) if measured else math.nan
            wrong = ranks.exchange(
                lambda: what_is_wrong(state, metrics),
                lambda problems: [_first(problems)] * ranks.size,
            )
            if wrong:
                self._note(f"step {step} was not saved: {wrong}")
            else:
                saved = self._save_due(step, state, kinds, value)
            self._cadence.waited(time.perf_counter() - began, save=self._begun)
        self._cadence.go_on()
        return saved

    def save_now(self, step: int, state: State) -> list[Saved]:
        """Save a recovery at the end of a run, or before it is stopped.

        Nothing is saved if this step is saved already, or if a parameter is not finite.
        """
        ranks = Ranks(self.store.group)
        wrong = ranks.exchange(
            lambda: what_is_wrong(state, {}), lambda problems: [_first(problems)] * ranks.size
        )
        if wrong:
            self._note(f"step {step} was not saved: {wrong}")
            return []
        saved = self._save_due(step, state, ("recovery",), math.nan)
        return saved + self.finish()

    def turn_back(self, step: int) -> list[Saved]:
        """Delete the states of steps beyond `step` for good, and return them.

        A state that is being read is deleted later. Best-Ks stay.
        """

        def beyond() -> list[Saved]:
            return [saved for saved in self._there() if saved.step > step and is_of_line(saved)]

        self._settle()
        given_up_states = Ranks(self.store.group).agree(beyond)
        if given_up_states:
            give_up(self.store, [saved.folder for saved in given_up_states])
        if self._last and self._last.step > step:
            self._last = None
        self._cadence.turned_back()
        return given_up_states

    def protect(self, saved: Saved) -> None:
        """Never delete this checkpoint in this process."""
        self._protected.add(saved.folder)

    def finish(self) -> list[Saved]:
        """Wait for the save in the background, and return what it committed."""
        return self._settle()

    def _save_due(
        self, step: int, state: State, kinds: tuple[str, ...], value: float
    ) -> list[Saved]:
        saved = self._settle()
        kind = next((kind for kind in ("recovery", "rollback") if kind in kinds), None)
        if kind is not None and not (self._last and self._last.step == step):
            self._enter_line(step)
            if kind == "rollback" and self.config.rollback_parameters_only:
                saved += self._save(BEST, step, state, (PARAMETERS, float(step)))
            else:
                saved += self._save(kind, step, state, None)

        ranks = Ranks(self.store.group)
        config = self.config
        if ranks.agree(lambda: is_among_best(value, step, self.store.committed(BEST), config)):
            saved += self._settle() + self._save(BEST, step, state, (config.best_k_metric, value))
        return saved

    def _save(
        self, kind: str, step: int, state: State, metric: tuple[str, float] | None
    ) -> list[Saved]:
        ranks = Ranks(self.store.group)
        folder = folder_name(kind, step, None if metric is None else Metric(*metric))

        def is_saved() -> bool:
            committed = {saved.folder for saved in self.store.committed(kind)}
            return folder in committed and self._is_good(folder)

        if ranks.agree(is_saved):
            self._note(f"{folder} was not saved: it already exists")
            return []

        size = bytes_of(state.snapshot(), model_only=kind == BEST)
        ranks.agree(lambda: require_room(self.store.files, kind, size))
        committed: list[Saved] = []
        if self.saver is None:
            committed = [self.store.save(kind, step, state, metric=metric)]
        else:
            self.saver.save(kind, step, state, metric=metric)
            self._pending = step
        self._begun = True
        return self._committed(committed, step)

    def _settle(self) -> list[Saved]:
        """Wait for the save in the background, and return what it committed."""
        if self.saver is None or self._pending is None:
            return []
        step = self._pending
        self._pending = None
        committed = self.saver.finish()
        return self._committed([committed] if committed else [], step)

    def _committed(self, committed: list[Saved], step: int) -> list[Saved]:
        """Record the committed checkpoints, and delete those that retention no longer keeps."""
        if not committed:
            return []
        for saved in committed:
            self._damaged.discard(saved.folder)
            if saved.kind in RESUMABLE:
                self._last = saved
        for superseded in Ranks(self.store.group).agree(lambda: self._superseded(step)):
            self.store.discard(superseded)
        return committed

    def _superseded(self, step: int) -> list[Saved]:
        """Return the checkpoints to delete; called on the first rank."""
        protected = set(self._protected)
        if self._last:
            protected.add(self._last.folder)
        superseded = to_delete(
            self._there(),
            self.config,
            step=step,
            damaged=frozenset(self._damaged),
            protected=protected,
        )
        files = self.store.files
        return [saved for saved in superseded if not is_being_read(files, saved.folder)]

    def _there(self) -> list[Saved]:
        """Return the committed checkpoints of every kind that were not given up."""
        excluded = given_up(self.store.files)
        committed = [saved for kind in KINDS for saved in self.store.committed(kind)]
        return [saved for saved in committed if saved.folder not in excluded]

    def _is_good(self, folder: str) -> bool:
        return folder not in self._damaged

    def _own_choice(self, what: str | int) -> bool | None:
        """Whether `what` is a state of this run; None for `latest` where nothing is saved."""
        try:
            return choose(self.store, what, config=self.config).place is None
        except NothingSaved:
            if what == "latest":
                return None
            raise

    def _enter_line(self, step: int) -> None:
        """Check at the first save that the run has no states from this step or beyond.

        Retention would take such states for leftovers of an abandoned line, and delete them.
        """
        if self._entered:
            return
        self.store.open()
        finish_giving_up(self.store)

        def ahead() -> list[str]:
            states = [saved for saved in self._there() if saved.step >= step and is_of_line(saved)]
            return [saved.folder for saved in states if self._is_good(saved.folder)]

        if folders := Ranks(self.store.group).agree(ahead):
            raise RunError(
                f"{self.store.files.location('')} has {folders[-1]}, but training is at step "
                f"{step}: resume from it, give this run a folder of its own, or call "
                f"turn_back({step - 1}) to delete the states beyond"
            )
        self._entered = True

    def _note(self, note: str) -> None:
        self.notes.append(note)
        logger.warning("%s", note)


def _first(problems: list[str | None]) -> str | None:
    return next((problem for problem in problems if problem), None)
