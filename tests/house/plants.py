"""Changes to plant in the small tree.

A plant is a function that changes the tree whose root it is given.
Proof: `python -m pytest tests/house/test_house.py`.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from tree import PACKAGE

Plant = Callable[[Path], None]

CORE = f"{PACKAGE}/core"
PRIMITIVES = f"{PACKAGE}/primitives"
RUNS = f"{PACKAGE}/runs"
PLAN = f"{PACKAGE}/plan"
GATES = f"{PACKAGE}/gates"
CLI = f"{PACKAGE}/cli"
SKILL = "skills/grad-accum/SKILL.md"
SCRIPT = "scripts/scaffold.py"
DOCSTRING = '"""Work."""\n'


def write(path: str, text: str) -> Plant:
    """Write a file."""

    def plant(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")

    return plant


def module(path: str, text: str = "") -> Plant:
    """Write a module with a docstring."""
    return write(path, DOCSTRING + text)


def append(path: str, text: str) -> Plant:
    """Add to the end of a file."""
    return lambda root: write(path, (root / path).read_text(encoding="utf-8") + text)(root)


def replace(path: str, old: str, new: str) -> Plant:
    """Replace the first occurrence of a text, which must be there."""

    def plant(root: Path) -> None:
        text = (root / path).read_text(encoding="utf-8")
        assert old in text, f"{path} has no {old!r} to spoil: plant another violation"
        write(path, text.replace(old, new, 1))(root)

    return plant


def remove(path: str) -> Plant:
    """Remove a file or a folder."""

    def plant(root: Path) -> None:
        if (root / path).is_dir():
            shutil.rmtree(root / path)
        else:
            (root / path).unlink()

    return plant


def both(*plants: Plant) -> Plant:
    """Plant several changes that make one violation."""

    def plant(root: Path) -> None:
        for each in plants:
            each(root)

    return plant


def skill(name: str, frontmatter: str) -> Plant:
    """Write a skill with this frontmatter."""
    return write(f"skills/{name}/SKILL.md", f"---\nname: {name}\n{frontmatter}\n---\n")


def many_modules(folder: str, count: int) -> Plant:
    """Write `count` modules into a folder of the package."""
    return both(*(module(f"{folder}/part_{number}.py") for number in range(count)))


def branches(count: int) -> str:
    """Return a function with `count` conditions."""
    return "def f(x):\n" + "".join(
        f"    if x == {number}:\n        x = 0\n" for number in range(count)
    )
