"""Choose the checkpoint to resume from, and load it: `latest`, a step, `before-180`, `best`.

A damaged checkpoint is skipped with a warning, and the next candidate is loaded.

    resumed = load_chosen("runs/x", state, "latest")
    print(resumed.words)

The state is not changed before all of a checkpoint is verified.
Proof: `python -m pytest tests/runs/test_resume.py`.
"""

import functools
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
    read_manifest,
    split_request,
    step_of,
)
from .policy_config import PolicyConfig
from .ranks import DamagedCheckpoint, HostileCheckpoint, Ranks
from .retention import best_first
from .state import TrainingState
from .store import SavedRun

BEFORE_PREFIX = "before-"
logger = logging.getLogger(__name__)


class NothingSaved(DamagedCheckpoint):
    """The run has no such checkpoint, not even a damaged one."""


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
    agree = Ranks().agree
    root, folders = agree(lambda: choose(own, what, config=config))
    # Ranks may reach the run by different paths.
    is_own = agree(lambda: root == own.root)
    chosen = SavedRun(root)

    damaged: dict[str, str] = {}
    for folder in folders:
        try:
            saved = agree(functools.partial(read_manifest, root, folder))
            notes = chosen.load(saved, state, strict=strict)
        except HostileCheckpoint:
            raise
        except DamagedCheckpoint as error:
            damaged[folder] = str(error)
            logger.warning("skipped a damaged checkpoint: %s", error)
        else:
            return Resumed(saved, notes, damaged, is_own)
    raise DamagedCheckpoint(
        f"no requested checkpoint is intact: {'; '.join(damaged.values())}; "
        f"{_describe_others(chosen)}"
    )


def choose(
    run: SavedRun, what: str | int, *, config: PolicyConfig | None = None
) -> tuple[Path, list[str]]:
    """Return a run's folder, and the checkpoints in it that `what` may mean, in order.

    They may be damaged. A run's folder may be followed by a request of its own: `runs/x@best`.
    """
    text = str(what).strip()
    before = text.removeprefix(BEFORE_PREFIX)
    steps = run.steps(*RESUMABLE_KINDS)
    # The newest first; a recovery before a rollback.
    found = sorted(steps, key=lambda folder: (-steps[folder], folder))
    if text == "latest":
        missing = "nothing to resume from: start the run anew"
    elif text == "best":
        config = config or PolicyConfig()
        found = [one.folder for one in best_first(run.committed(BEST_KIND), config)]
        missing = f"no best-K checkpoint for {config.best_k_metric}"
    elif text.isdecimal():
        found = [folder for folder in found if steps[folder] == int(text)]
        missing = f"no step {text}"
    elif text != before and before.isdecimal():
        found = [folder for folder in found if steps[folder] < int(before)]
        missing = f"no state from before step {before}"
    elif step_of(text) is not None:
        found = [text] if (run.root / text).exists() else []
        missing = f"no {text}"
    else:
        place, inside = split_request(text)
        other = SavedRun(place)
        if not inside and not any((other.root / kind).is_dir() for kind in CHECKPOINT_KINDS):
            raise ValueError(
                f"{text!r} is neither a checkpoint nor a run: give latest, best, a step such as "
                f"500, before-500, a run's folder, or RUN@STEP; {_describe_others(run)}"
            )
        return choose(other, inside or "latest", config=config)
    if not found:
        raise NothingSaved(f"{run.root} holds {missing}; {_describe_others(run)}")
    return run.root, found


def _describe_others(run: SavedRun) -> str:
    steps = sorted({saved.step for saved in run.states()})
    if not steps:
        return "nothing else is saved"
    return f"saved steps: {', '.join(map(str, steps[-8:]))}"
