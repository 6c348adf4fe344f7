"""Copy files of the project to where an agent, a client or a test may change them.

Proof: `python -m pytest tests/evals/test_evals.py -k arm`.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from tests.tree import files

ROOT = Path(__file__).resolve().parents[1]


def copy_files(paths: Iterable[str | Path], folder: Path) -> None:
    """Copy files, given by their paths in the project, to the same paths in a folder."""
    for path in paths:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)


def copy_tree(folder: Path) -> None:
    """Copy the whole working tree, without environments and caches."""
    copy_files((path.relative_to(ROOT) for path in files(ROOT)), folder)
