"""Saves what the policy says when it says so, keeps what it says, and goes on where a run was.

    with Store("runs/x") as store, SavingPolicy(store, PolicyConfig(rollback_every=100)) as policy:
        policy.resume(state)
        for ... in ...:
            ...
            policy.after_step(state.step, state, {"loss": loss, "dev_loss": dev_loss})

A step at which a rollback and a recovery fall together writes its bytes once, as a recovery, which counts for both on
every kind of storage. A best-K is another file: it has to stay when the optimizer's state goes.
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
    """`saver` saves in the background; what `after_step` returns is then what was committed since the last save.

    `notes` says what was not saved, and why. All ranks call together, with the same step and metrics.
    """

    def __init__(
        self,
        store: Store,
        config: PolicyConfig | None = None,
        *,
        saver: BackgroundSaver | None = None,
    ) -> None:
        self.store, self.config, self.saver = store, config or PolicyConfig(), saver
        self.notes: list[str] = []
        self._damaged: set[str] = set()
        self._protected: set[str] = set()
        self._last: Saved | None = None
        self._pending: int | None = None
        self._entered = self._begun = False
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
        """Load where the run goes on; None where it has nothing yet. From an earlier step of this run it turns back."""
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
        self._cadence.go_on()  # reading is no step
        return resumed

    def after_step(self, step: int, state: State, metrics: Mapping[str, Any]) -> list[Saved]:
        """Save what is due after so many steps. A metric that is not finite, or a parameter, and nothing is saved.

        `metrics` holds figures of this step, numbers or tensors; they are looked at only where something is due. Leave
        out what may be infinite in sound training, such as the norm of a gradient that a scaler skips.
        """
        ranks = Ranks(self.store.group)
        self._cadence.trained()
        kinds = due(step, self.config, automatic=self._cadence.is_due(step, state))
        measured = metrics.get(self.config.best_k_metric) is not None
        saved: list[Saved] = []
        if kinds or (measured and self.config.best_k):
            began, self._begun = time.perf_counter(), False
            value = number_of(metrics[self.config.best_k_metric]) if measured else math.nan
            wrong = ranks.exchange(
                lambda: what_is_wrong(state, metrics), lambda every: [_first(every)] * ranks.size
            )
            if wrong:
                self._note(f"step {step} was not saved: {wrong}")
            else:
                saved = self._save_due(step, state, kinds, value)
            self._cadence.waited(time.perf_counter() - began, save=self._begun)
        self._cadence.go_on()
        return saved

    def save_now(self, step: int, state: State) -> list[Saved]:
        """A recovery, at the end of a run or before it is stopped, unless this step is saved, or is not healthy."""
        ranks = Ranks(self.store.group)
        wrong = ranks.exchange(
            lambda: what_is_wrong(state, {}), lambda every: [_first(every)] * ranks.size
        )
        if wrong:
            self._note(f"step {step} was not saved: {wrong}")
            return []
        done = self._save_due(step, state, ("recovery",), math.nan)
        return done + self.finish()

    def turn_back(self, step: int) -> list[Saved]:
        """Give up the states beyond a step, for good; what is being read goes later. Best-Ks stay."""

        def beyond() -> list[Saved]:
            return [one for one in self._there() if one.step > step and is_of_line(one)]

        self._settle()
        gone = Ranks(self.store.group).agree(beyond)
        if gone:
            give_up(self.store, [one.folder for one in gone])
        if self._last and self._last.step > step:
            self._last = None
        self._cadence.turned_back()
        return gone

    def protect(self, saved: Saved) -> None:
        """Never delete this one in this process."""
        self._protected.add(saved.folder)

    def finish(self) -> list[Saved]:
        """Wait for the save in the background; returns it."""
        return self._settle()

    def _save_due(
        self, step: int, state: State, kinds: tuple[str, ...], value: float
    ) -> list[Saved]:
        saved = self._settle()
        kind = next((kind for kind in ("recovery", "rollback") if kind in kinds), None)
        if kind is not None and not (self._last and self._last.step == step):
            self._enter_line(step)
            metric = (
                (PARAMETERS, float(step))
                if kind == "rollback" and self.config.rollback_parameters_only
                else None
            )
            saved += self._save(BEST if metric else kind, step, state, metric)
        ranks, config = Ranks(self.store.group), self.config
        if ranks.agree(lambda: is_among_best(value, step, self.store.committed(BEST), config)):
            saved += self._settle() + self._save(BEST, step, state, (config.best_k_metric, value))
        return saved

    def _save(
        self, kind: str, step: int, state: State, metric: tuple[str, float] | None
    ) -> list[Saved]:
        ranks = Ranks(self.store.group)
        folder = folder_name(kind, step, None if metric is None else Metric(*metric))
        if ranks.agree(
            lambda: (
                any(one.folder == folder for one in self.store.committed(kind))
                and self._is_good(folder)
            )
        ):
            self._note(f"{folder} was not saved: it is there already")
            return []
        size = bytes_of(state.snapshot(), model_only=kind == BEST)
        ranks.agree(lambda: require_room(self.store.files, kind, size))
        done: list[Saved] = []
        if self.saver is None:
            done = [self.store.save(kind, step, state, metric=metric)]
        else:
            self.saver.save(kind, step, state, metric=metric)
            self._pending = step
        self._begun = True
        return self._committed(done, step)

    def _settle(self) -> list[Saved]:
        """What was begun in the background, committed."""
        if self.saver is None or self._pending is None:
            return []
        step, self._pending = self._pending, None
        done = self.saver.finish()
        return self._committed([done] if done else [], step)

    def _committed(self, done: list[Saved], step: int) -> list[Saved]:
        for one in done:
            self._damaged.discard(one.folder)
            self._last = one if one.kind in RESUMABLE else self._last
        for one in Ranks(self.store.group).agree(lambda: self._superseded(step)) if done else ():
            self.store.discard(one)
        return done

    def _superseded(self, step: int) -> list[Saved]:
        """What retention says, on the first rank."""
        there = self._there()
        protected = {*self._protected, *([self._last.folder] if self._last else [])}
        gone = to_delete(
            there, self.config, step=step, damaged=frozenset(self._damaged), protected=protected
        )
        return [one for one in gone if not is_being_read(self.store.files, one.folder)]

    def _there(self) -> list[Saved]:
        left = given_up(self.store.files)
        return [
            one for kind in KINDS for one in self.store.committed(kind) if one.folder not in left
        ]

    def _is_good(self, folder: str) -> bool:
        return folder not in self._damaged

    def _own_choice(self, what: str | int) -> bool | None:
        """Whether a state of this run is meant; None where `latest` is and there is nothing."""
        try:
            return choose(self.store, what, config=self.config).place is None
        except NothingSaved:
            if what == "latest":
                return None
            raise

    def _enter_line(self, step: int) -> None:
        """At the first save: a run begun anew where later states are would take them for those of a line given up."""
        if self._entered:
            return
        self.store.open()
        finish_giving_up(self.store)

        def ahead() -> list[str]:
            held = [one for one in self._there() if one.step >= step and is_of_line(one)]
            return [one.folder for one in held if self._is_good(one.folder)]

        if found := Ranks(self.store.group).agree(ahead):
            raise RunError(
                f"{self.store.files.location('')} has {found[-1]}, and training is at step {step}: resume from it, "
                f"give this run a folder of its own, or call turn_back({step - 1}) to give up what is beyond"
            )
        self._entered = True

    def _note(self, words: str) -> None:
        self.notes.append(words)
        logger.warning("%s", words)


def _first(every: list[str | None]) -> str | None:
    return next((said for said in every if said), None)
