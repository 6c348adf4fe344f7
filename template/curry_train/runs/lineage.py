"""Decide which states count after a run went back to an earlier step.

Each time a run goes back, it begins a new line of states. A manifest has the number of the line
that its state was saved on, and `lineage.json` the step after which each line begins. Later states
of earlier lines are given up: no resume uses them, and retention deletes them.

Proof: `python -m pytest tests/runs/test_saving_policy.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .files import Files
from .layout import SavedCheckpoint
from .policy_config import read_fields
from .ranks import DamagedCheckpoint

LINEAGE_FILE_NAME = "lineage.json"
MOST_LINEAGE_BYTES = 2**22


@dataclass(frozen=True)
class Branch:
    """The beginning of a line of states."""

    line: int
    # States of earlier lines beyond this step are given up.
    after: int
    # Whether they are given up before this line has saved a state.
    at_once: bool


def read_branches(files: Files) -> list[Branch]:
    """Return the branches of a run; none if the file is damaged, so that nothing is deleted."""
    if files.kind(LINEAGE_FILE_NAME) != "file":
        return []
    try:
        data = files.read(LINEAGE_FILE_NAME, most_bytes=MOST_LINEAGE_BYTES)
        return [read_fields(Branch, entry) for entry in json.loads(data)]
    except (DamagedCheckpoint, RecursionError, TypeError, ValueError):
        return []


def write_branches(files: Files, branches: Sequence[Branch]) -> None:
    """Replace the list of branches at once; it is on the disk when this returns."""
    files.write(LINEAGE_FILE_NAME, json.dumps([asdict(one) for one in branches]).encode())
    files.sync_folder("")


def branches_in_force(
    branches: Sequence[Branch], states: Sequence[SavedCheckpoint]
) -> list[Branch]:
    """Return the branches that count: those that have a state, or do not wait for one."""
    newest_line = max((saved.line for saved in states), default=0)
    return [one for one in branches if one.at_once or one.line <= newest_line]


def is_given_up(saved: SavedCheckpoint, in_force: Sequence[Branch]) -> bool:
    """Return whether the run went back from this state."""
    return any(saved.line < one.line and saved.step > one.after for one in in_force)
