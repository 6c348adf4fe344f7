"""Plans a whole new project, and says why one can't be made.

Proof: `python -m pytest tests/cli/test_scaffold.py`.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from .bundle import PACKAGE, Bundle
from .contents import check_project_name, project_contents
from .errors import ScaffoldError
from .lock import LOCK, Lock, read_lock
from .plan import Plan, State, make_plan


def plan_project(
    bundle: Bundle,
    directory: Path,
    *,
    name: str | None,
    techniques: Sequence[str],
    working_directory: Path,
) -> Plan:
    """The plan for a project in `directory`; without `techniques` it holds the whole package.

    A plan that writes is for a directory that is absent or empty.
    """
    directory = Path(os.path.abspath(working_directory / directory))
    name = directory.name.replace("-", "_") if name is None else name
    check_project_name(name)
    chosen = bundle.choose(techniques) if techniques else None
    _check_directory(directory, name=name)
    lock = Lock(bundle.version, name, PACKAGE, PACKAGE)
    plan = make_plan(directory, project_contents(bundle, chosen, name=name), lock=lock)
    if (directory / LOCK).is_file():
        _check_same(plan)
    elif directory == working_directory:
        raise ScaffoldError(
            f"{directory} is the current directory, which can't be replaced; run this from its parent"
        )
    return plan


def is_made(plan: Plan) -> bool:
    """Whether every file is there already; the lock may know of techniques that were added since."""
    return all(entry.state is State.SAME for entry in plan.entries if entry.path != LOCK)


def _check_directory(directory: Path, *, name: str) -> None:
    if directory.is_symlink():
        raise ScaffoldError(f"{directory} is a link; name the folder itself")
    if directory.exists() and not directory.is_dir():
        raise ScaffoldError(f"{directory} is a file; name a folder that does not exist yet")
    if not directory.parent.is_dir():
        raise ScaffoldError(
            f"{directory.parent} is not a folder; create it first, or name another place"
        )
    lock = read_lock(directory)
    if lock is None and directory.is_dir() and any(directory.iterdir()):
        raise ScaffoldError(
            f"{directory} exists and is not empty; name a new folder, or use 'scaffold.py add' for a repository"
        )
    if lock is not None and lock.project != name:
        owner = (
            f"the project {lock.project}" if lock.project else "a repository with techniques added"
        )
        raise ScaffoldError(f"{directory} holds {owner} already; name a new folder for {name}")


def _check_same(plan: Plan) -> None:
    if not is_made(plan):
        lines = [
            f"  {entry.path}: {entry.reason or 'not there'}"
            for entry in plan.having(State.CONFLICT, State.CREATE)
            if entry.path != LOCK
        ]
        raise ScaffoldError(
            "\n".join(
                [
                    f"{plan.root} holds this project already, with differences; nothing was written",
                    *lines,
                    "'scaffold.py diff' shows them; 'scaffold.py add' brings single techniques",
                ]
            )
        )
