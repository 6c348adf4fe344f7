"""Choose the checkpoint to resume from, and load it: `latest`, a step, `before-180`, `best`.

A damaged checkpoint is skipped with a warning, and the next candidate is loaded.

    resumed = load_chosen("runs/x", state, "latest")
    print(resumed.words)

The state is not changed before all of a checkpoint is verified.
Proof: `python -m pytest tests/runs/test_resume.py`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .files import StrPath
from .layout import (
    BEST_KIND,
    CHECKPOINT_KINDS,
    RESUMABLE_KINDS,
    SavedCheckpoint,
    split_request,
    step_of,
)
from .policy_config import PolicyConfig
from .ranks import DamagedCheckpoint, HostileCheckpoint, Ranks
from .retention import best_first, newest_first
from .state import TrainingState
from .store import SavedRun

BEFORE_PREFIX = "before-"
MOST_STEPS = 10**18
logger = logging.getLogger(__name__)


class NothingSaved(DamagedCheckpoint):
    """The run has no such checkpoint, not even a damaged one."""


# The folder of a run, its checkpoints in the order to try them, and why others are damaged.
Choice = tuple[Path, Sequence[SavedCheckpoint], Mapping[str, str]]


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that was loaded, and the damaged ones that were skipped."""

    saved: SavedCheckpoint
    # How the state differs from what was saved.
    notes: Sequence[str]
    # Folders of the skipped checkpoints, with the reason.
    damaged: Mapping[str, str]
    # Whether it is of this run.
    is_own: bool

    @property
    def words(self) -> str:
        skipped = [
            f"{folder} is damaged and was skipped: {reason}"
            for folder, reason in self.damaged.items()
        ]
        return "; ".join([f"resumed from {self.saved.folder}", *skipped, *self.notes])


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
    folder of a run, or the folder of a checkpoint, from here or in the run's. All ranks call
    together. Raises DamagedCheckpoint, which names every candidate, if none of them is intact.
    """
    own = run if isinstance(run, SavedRun) else SavedRun(run)
    root, candidates, damaged = Ranks().agree(lambda: choose(own, what, config=config))
    # Ranks may reach the run by different paths.
    is_own = Ranks().agree(lambda: root == own.root)
    chosen = SavedRun(root)

    tried: dict[str, str] = {}
    for saved in candidates:
        try:
            notes = chosen.load(saved, state, strict=strict)
        except HostileCheckpoint:
            raise
        except DamagedCheckpoint as error:
            tried[saved.folder] = str(error)
            logger.warning("skipped a damaged checkpoint: %s", error)
        else:
            newer = {
                folder: reason
                for folder, reason in damaged.items()
                if (step_of(folder) or 0) >= saved.step
            }
            return Resumed(saved, notes, newer | tried, is_own)
    raise DamagedCheckpoint(
        f"no requested checkpoint is intact: {'; '.join((tried | dict(damaged)).values())}; "
        f"{_others(chosen)}"
    )


def choose(run: SavedRun, what: str | int, *, config: PolicyConfig | None = None) -> Choice:
    """Return the checkpoints that `what` may mean, in the order to try them.

    A run's folder may be followed by a request of its own: `runs/x@best`.
    """
    config = config or PolicyConfig()
    text = str(what).strip()
    before = text.removeprefix(BEFORE_PREFIX)
    if text == "best":
        best = best_first(run.committed(BEST_KIND), config)
        return _found(run, best, {}, f"no best-K checkpoint for {config.best_k_metric}")
    if text == "latest":
        return _states(run, range(MOST_STEPS), "nothing to resume from: start the run anew")
    if text.isdecimal():
        return _states(run, range(int(text), int(text) + 1), f"no step {text}")
    if text != before and before.isdecimal():
        return _states(run, range(int(before)), f"no state from before step {before}")

    place, inside = split_request(text)
    path = Path(place)
    folder = f"{path.parent.name}/{path.name}"
    if step_of(folder) is not None:
        other = run if place == folder else SavedRun(path.parent.parent)
        committed, damaged = other.scan(path.parent.name)
        candidates = [saved for saved in committed if saved.folder == folder]
        damaged = {folder: damaged[folder]} if folder in damaged else {}
        return _found(other, candidates, damaged, f"no {folder}")
    if any((path / kind).is_dir() for kind in CHECKPOINT_KINDS):
        return choose(SavedRun(place), inside or "latest", config=config)
    raise ValueError(
        f"{text!r} is neither a checkpoint nor a run: give latest, best, a step such as 500, "
        f"before-500, a run's folder, or RUN@STEP; {_others(run)}"
    )


def _states(run: SavedRun, steps: range, missing: str) -> Choice:
    """Return the states of these steps, and those that are damaged."""
    committed, damaged = run.scan(*RESUMABLE_KINDS)
    states = [saved for saved in newest_first(committed) if saved.step in steps]
    damaged = {folder: why for folder, why in damaged.items() if step_of(folder) in steps}
    return _found(run, states, damaged, missing)


def _found(
    run: SavedRun, candidates: Sequence[SavedCheckpoint], damaged: Mapping[str, str], missing: str
) -> Choice:
    """Raise NothingSaved with what is `missing` if there is not even a damaged candidate."""
    if not candidates and not damaged:
        raise NothingSaved(f"{run.root} holds {missing}; {_others(run)}")
    return run.root, candidates, damaged


def _others(run: SavedRun) -> str:
    steps = sorted({saved.step for saved in run.states()})
    if not steps:
        return "nothing else is saved"
    return f"saved steps: {', '.join(map(str, steps[-8:]))}"
