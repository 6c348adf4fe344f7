"""Where a run goes on: `latest`, a step, `before-180`, `best`, another run. What is damaged is passed over, and said.

    resumed = load_chosen("runs/x", state, "latest")
    print(resumed.words)

Nothing is changed before all of a checkpoint was verified. Proof: `python -m pytest tests/test_resume.py`.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .errors import DamagedCheckpoint, HostileCheckpoint, RunError
from .names import BEST, KINDS, RESUMABLE, Saved, step_of
from .policy_config import PolicyConfig
from .ranks import OtherRank, Ranks
from .retention import best_first, newest_first
from .saved_run import SavedRun
from .snapshot import LoadReport, State
from .turned_back import given_up

BEFORE = "before-"
logger = logging.getLogger(__name__)


class NothingSaved(DamagedCheckpoint):
    """A run has no checkpoint of what was asked for, not even a damaged one."""


@dataclass(frozen=True)
class Choice:
    """Checkpoints to try, the first that is whole; and those that a look at their manifests showed as damaged. `place`
    is another run's folder."""

    candidates: Sequence[Saved]
    damaged: Mapping[str, str] = field(default_factory=dict)
    place: str | None = None


@dataclass(frozen=True)
class Resumed:
    """What was loaded, and what was passed over, with the reason."""

    saved: Saved
    report: LoadReport
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> str:
        passed = [
            f"{folder} is damaged and was passed over: {why}"
            for folder, why in self.damaged.items()
        ]
        return "; ".join([f"resumed from {self.saved.folder}", *passed, *self.report.notes])


def load_chosen(
    run: SavedRun | str | os.PathLike[str],
    state: State,
    what: str | int = "latest",
    *,
    config: PolicyConfig | None = None,
    strict: bool = True,
) -> Resumed:
    """Load what `what` means into `state`: `latest`, `best`, a step, `before-180` for the newest before that step, a
    run's folder, or a checkpoint's.

    On all ranks together. Raises DamagedCheckpoint, which names each, where none that was asked for is whole.
    """
    own = run if isinstance(run, SavedRun) else SavedRun(run)
    ranks = Ranks(own.group)
    choice = ranks.agree(lambda: choose(own, what, config=config))
    chosen = own if choice.place is None else SavedRun(choice.place, group=own.group)
    damaged = dict(choice.damaged)
    for saved in choice.candidates:
        report, why = _try(chosen, saved, state, strict=strict, ranks=ranks)
        if report is not None:
            return Resumed(saved, report, _beyond(damaged, saved))
        damaged[saved.folder] = why
        logger.warning("passed over: %s", why)
    raise DamagedCheckpoint(
        f"nothing that was asked for is whole: {'; '.join(damaged.values())}; {_others(chosen)}"
    )


def _try(
    run: SavedRun, saved: Saved, state: State, *, strict: bool, ranks: Ranks
) -> tuple[LoadReport | None, str]:
    """A report on every rank, or on every rank why the checkpoint is damaged."""
    report, own = None, None
    try:
        report = run.load(saved, state, strict=strict)
    except (
        RunError,
        ValueError,
        OSError,
    ) as error:  # every rank has to hear of it before any goes on
        own = error
    damage = isinstance(own, DamagedCheckpoint) and not isinstance(own, HostileCheckpoint)
    fatal = own is not None and not damage and not isinstance(own, OtherRank)

    def judge(every: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
        is_fatal = any(fatal for fatal, _ in every)
        return [(is_fatal, "; ".join(sorted({said for _, said in every if said})))] * len(every)

    is_fatal, why = ranks.exchange(lambda: (fatal, str(own) if damage else ""), judge)
    if own is not None and (is_fatal or not why):
        raise own
    return (None if why else report), why


def choose(
    run: SavedRun, what: str | int = "latest", *, config: PolicyConfig | None = None
) -> Choice:
    """The checkpoints that `what` may mean, the first choice first. A path may name what is in it: `runs/x@best`."""
    config = config or PolicyConfig()
    text = str(what).strip()
    if text == "latest":
        return _latest(run)
    if text == "best":
        return _best(run, config)
    if text.isdecimal():
        return _step(run, int(text))
    if text.startswith(BEFORE) and text[len(BEFORE) :].isdecimal():
        return _latest(run, before=int(text[len(BEFORE) :]))
    place, _, inside = text.partition("@")
    path = Path(place)
    if path.parent.name in KINDS and step_of(path.parent.name, path.name) is not None:
        other = SavedRun(path.parent.parent)
        return replace(
            _found(other, f"{path.parent.name}/{path.name}"), place=str(path.parent.parent)
        )
    if not any(SavedRun(place).files.kind(kind) == "folder" for kind in KINDS):
        raise ValueError(
            f"{text!r} is no checkpoint and no run: give latest, best, a step such as 500, before-500, a run's folder, "
            f"or RUN@STEP; {_others(run)}"
        )
    return replace(choose(SavedRun(place), inside or "latest", config=config), place=place)


def _latest(run: SavedRun, *, before: int | None = None) -> Choice:
    gone = given_up(run.files)
    line = [one for one in newest_first(_resumable(run)) if one.folder not in gone]
    broken = {
        folder: why
        for kind in RESUMABLE
        for folder, why in run.damaged(kind).items()
        if folder not in gone
    }
    if before is not None:
        line = [one for one in line if one.step < before]
        broken = {folder: why for folder, why in broken.items() if _step_in(folder) < before}
    if not line and not broken:
        where = run.files.location("")
        if before is not None:
            raise NothingSaved(f"{where} holds no state from before step {before}; {_others(run)}")
        raise NothingSaved(f"{where} holds nothing to resume from: start the run anew")
    newest = line[0].step if line else -1
    return Choice(
        line, {folder: why for folder, why in broken.items() if _step_in(folder) > newest}
    )


def _best(run: SavedRun, config: PolicyConfig) -> Choice:
    found = best_first(run.committed(BEST), config)
    if not found:
        raise NothingSaved(
            f"{run.files.location('')} holds no best by {config.best_k_metric}: name the metric in best_k_metric, or "
            f"resume from latest"
        )
    return Choice(found)


def _step(run: SavedRun, step: int) -> Choice:
    found = [one for one in newest_first(_resumable(run)) if one.step == step]
    broken = {
        folder: why
        for kind in RESUMABLE
        for folder, why in run.damaged(kind).items()
        if _step_in(folder) == step
    }
    if not found and not broken:
        parameters = [one for one in run.committed(BEST) if one.step == step]
        if parameters:
            raise NothingSaved(
                f"of step {step} there are parameters only, without optimizer, generators and position, so no run goes "
                f"on from it; a new one can begin from {parameters[-1].location}; {_others(run)}"
            )
        raise NothingSaved(f"{run.files.location('')} has no step {step}; {_others(run)}")
    return Choice(found, broken)


def _found(run: SavedRun, folder: str) -> Choice:
    kind = folder.partition("/")[0]
    found = [one for one in run.committed(kind) if one.folder == folder]
    if not found and folder not in (broken := run.damaged(kind)):
        raise NothingSaved(f"{run.files.location(folder)} is not there; {_others(run)}")
    return Choice(found, {} if found else {folder: broken[folder]})


def _resumable(run: SavedRun) -> list[Saved]:
    return [one for kind in RESUMABLE for one in run.committed(kind)]


def _beyond(damaged: Mapping[str, str], saved: Saved) -> dict[str, str]:
    """Damage that did not matter is not told."""
    return {
        folder: why
        for folder, why in damaged.items()
        if saved.kind == BEST or _step_in(folder) >= saved.step
    }


def _step_in(folder: str) -> int:
    kind, _, name = folder.partition("/")
    step = step_of(kind, name)
    assert step is not None
    return step


def _others(run: SavedRun) -> str:
    steps = sorted({one.step for one in _resumable(run)})
    told = ", ".join(map(str, steps[-8:]))
    return f"saved are the steps {told}" if steps else "nothing else is saved"
