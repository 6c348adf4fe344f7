"""Where a technique goes in a repository that exists: the project's root, the package's dotted name, the next command.

Proof: `python -m pytest tests/cli/test_scaffold_add.py`.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .contents import is_module_name
from .errors import ScaffoldError
from .lock import LOCK

MARKERS = (LOCK, "pyproject.toml", "setup.py", "setup.cfg", ".git")


@dataclass(frozen=True)
class Target:
    """A package directory and the project around it; `search_path` is where Python finds `package`."""

    directory: Path
    root: Path
    package: str
    search_path: Path

    @property
    def inside_root(self) -> str:
        return self.directory.relative_to(self.root).as_posix()

    def next_command(self, tests: Sequence[str], *, working_directory: Path) -> str:
        """What to type to run `tests`, from `working_directory`."""
        command = f"python -m pytest {' '.join(tests)}"
        if self.search_path != self.root:
            path = shlex.quote(os.path.relpath(self.search_path, self.root))
            command = f"PYTHONPATH={path} {command}"
        if working_directory != self.root:
            root = min(os.path.relpath(self.root, working_directory), str(self.root), key=len)
            command = f"cd {shlex.quote(root)} && {command}"
        return command


def find_target(directory: Path, *, working_directory: Path) -> Target:
    """Look around `directory`, which may not exist yet."""
    directory = Path(os.path.abspath(working_directory / directory))
    if directory.exists() and not directory.is_dir():
        raise ScaffoldError(
            f"{directory} is a file; --into takes the package's folder, such as src/mylib/training"
        )
    if not directory.parent.is_dir():
        raise ScaffoldError(
            f"{directory.parent} is not a folder; create it first, or correct --into"
        )
    if any((directory / marker).exists() for marker in MARKERS):
        raise ScaffoldError(
            f"{directory} is a project's root, not a package in it; use --into {directory / 'curry_train'}"
        )
    root = _find_root(directory, working_directory)
    if not directory.resolve().is_relative_to(root.resolve()):
        raise ScaffoldError(
            f"{directory} is a link that leads out of {root}; nothing is written outside a project"
        )
    top = directory
    while top.parent != root and (top.parent / "__init__.py").is_file():
        top = top.parent
    parts = directory.relative_to(top.parent).parts
    for part in parts or ("",):
        if not is_module_name(part):
            raise ScaffoldError(
                f"Python can't import a folder called {part!r}; --into needs a name like my_training"
            )
    return Target(directory, root, ".".join(parts), top.parent)


def _find_root(directory: Path, working_directory: Path) -> Path:
    for folder in directory.parents:
        if any((folder / marker).exists() for marker in MARKERS):
            return folder
    return working_directory if working_directory in directory.parents else directory.parent
