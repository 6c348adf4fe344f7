"""Choose the checkpoint to resume from, and load it: `latest`, a step, `before-180`, `best`.

A damaged checkpoint is skipped with a warning, and the next candidate is loaded.

    resumed = load_chosen("runs/x", state, "latest")
    print(resumed.words)

The state is not changed before all of a checkpoint is verified.
Proof: `python -m pytest tests/runs/test_resume.py`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .files import StrPath
from .format import LoadReport
from .layout import BEST_KIND, CHECKPOINT_KINDS, RESUMABLE_KINDS, SavedCheckpoint, step_of
from .policy_config import PolicyConfig
from .ranks import DamagedCheckpoint, HostileCheckpoint, Ranks
from .retention import best_first, newest_first
from .state import TrainingState
from .store import SavedRun

BEFORE_PREFIX = "before-"
logger = logging.getLogger(__name__)


class NothingSaved(DamagedCheckpoint):
    """The run has no such checkpoint, not even a damaged one."""


@dataclass(frozen=True)
class ResumeChoice:
    """The checkpoints that a request may mean."""

    # In the order to try them; the first intact one is loaded.
    candidates: Sequence[SavedCheckpoint]
    # Folders whose manifests are damaged, with the reason.
    damaged: Mapping[str, str] = field(default_factory=dict)
    # The folder of another run; None for this run.
    place: str | None = None


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that was loaded, and the damaged ones that were skipped."""

    saved: SavedCheckpoint
    report: LoadReport
    # Folders of the skipped checkpoints, with the reason.
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> str:
        skipped = [
            f"{folder} is damaged and was skipped: {reason}"
            for folder, reason in self.damaged.items()
        ]
        return "; ".join([f"resumed from {self.saved.folder}", *skipped, *self.report.notes])


def load_chosen(
    run: SavedRun | StrPath,
    state: TrainingState,
    what: str | int = "latest",
    *,
    config: PolicyConfig | None = None,
    strict: bool = True,
) -> Resumed:
    """Load the checkpoint that `what` names into `state`.

    `what` is `latest`, `best`, a step, `before-180` for the newest state before that step, the
    folder of a run, or the folder of a checkpoint. All ranks call together. Raises
    DamagedCheckpoint, which names every candidate, if none of them is intact.
    """
    own = run if isinstance(run, SavedRun) else SavedRun(run)
    choice = Ranks().agree(lambda: choose(own, what, config=config))
    chosen = own if choice.place is None else SavedRun(choice.place)

    damaged = dict(choice.damaged)
    for saved in choice.candidates:
        try:
            report = chosen.load(saved, state, strict=strict)
        except HostileCheckpoint:
            raise
        except DamagedCheckpoint as error:
            damaged[saved.folder] = str(error)
            logger.warning("skipped a damaged checkpoint: %s", error)
        else:
            return Resumed(saved, report, _beyond(damaged, saved))
    raise DamagedCheckpoint(
        f"no requested checkpoint is intact: {'; '.join(damaged.values())}; {_others(chosen)}"
    )


def choose(
    run: SavedRun, what: str | int = "latest", *, config: PolicyConfig | None = None
) -> ResumeChoice:
    """Return the checkpoints that `what` may mean, in the order to try them.

    A run's folder may be followed by a request of its own: `runs/x@best`.
    """
    config = config or PolicyConfig()
    text = str(what).strip()
    before = text.removeprefix(BEFORE_PREFIX)
    if text == "best":
        return _best(run, config)
    if text == "latest":
        return _states(run, lambda step: True, "nothing to resume from: start the run anew")
    if text.isdecimal():
        return _states(run, lambda step: step == int(text), f"no step {text}; {_others(run)}")
    if text != before and before.isdecimal():
        missing = f"no state from before step {before}; {_others(run)}"
        return _states(run, lambda step: step < int(before), missing)

    place, inside = split_request(text)
    path = Path(place)
    folder = f"{path.parent.name}/{path.name}"
    if step_of(folder) is not None:
        root = path.parent.parent
        choice = _found(SavedRun(root), folder)
        return replace(choice, place=str(root))
    if not any(SavedRun(place).files.kind(kind) == "folder" for kind in CHECKPOINT_KINDS):
        raise ValueError(
            f"{text!r} is neither a checkpoint nor a run: give latest, best, a step such as 500, "
            f"before-500, a run's folder, or RUN@STEP; {_others(run)}"
        )
    return replace(choose(SavedRun(place), inside or "latest", config=config), place=place)


def split_request(text: str) -> tuple[str, str]:
    """Return the path and the request of `runs/x@best`; a path may have an @ of its own."""
    place, _, inside = text.rpartition("@")
    is_whole = not place or "/" in inside or Path(text).exists()
    return (text, "") if is_whole else (place, inside)


def _states(run: SavedRun, fits: Callable[[int], bool], missing: str) -> ResumeChoice:
    """Return the states whose steps fit; raise NothingSaved with what is `missing` without one."""
    states = [saved for saved in newest_first(run.states()) if fits(saved.step)]
    damaged = {
        folder: reason
        for kind in RESUMABLE_KINDS
        for folder, reason in run.damaged(kind).items()
        if fits(step_of(folder) or 0)
    }
    if not states and not damaged:
        raise NothingSaved(f"{run.files.location('')} holds {missing}")
    return ResumeChoice(states, damaged)


def _best(run: SavedRun, config: PolicyConfig) -> ResumeChoice:
    candidates = best_first(run.committed(BEST_KIND), config)
    if not candidates:
        raise NothingSaved(
            f"{run.files.location('')} holds no best-K checkpoint for {config.best_k_metric}: name "
            f"the metric in best_k_metric, or resume from latest"
        )
    return ResumeChoice(candidates)


def _found(run: SavedRun, folder: str) -> ResumeChoice:
    kind = folder.partition("/")[0]
    candidates = [saved for saved in run.committed(kind) if saved.folder == folder]
    if candidates:
        return ResumeChoice(candidates)
    damaged = run.damaged(kind)
    if folder not in damaged:
        raise NothingSaved(f"{run.files.location(folder)} does not exist; {_others(run)}")
    return ResumeChoice(candidates, {folder: damaged[folder]})


def _beyond(damaged: Mapping[str, str], saved: SavedCheckpoint) -> dict[str, str]:
    """Return the damaged checkpoints that were preferred to the one that was loaded."""
    return {
        folder: reason
        for folder, reason in damaged.items()
        if saved.kind == BEST_KIND or (step_of(folder) or 0) >= saved.step
    }


def _others(run: SavedRun) -> str:
    steps = sorted({saved.step for saved in newest_first(run.states())})
    if not steps:
        return "nothing else is saved"
    return f"saved steps: {', '.join(map(str, steps[-8:]))}"
