"""The files of the tree as the house rules see them; `tests/house/house.py` runs the rules.

Every function takes the root, so that a rule can be tried on a copy with a fault planted in it.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PACKAGE = "template/curry_train"
PYTHON_FOLDERS = ("template", "scripts", "tests")
HIDDEN_BUT_OURS = {".ci", ".claude-plugin", ".github", ".gitignore"}


def relative(path: Path, root: Path) -> str:
    """Name a file as messages name it."""
    return path.relative_to(root).as_posix()


def files(root: Path) -> Iterator[Path]:
    """Yield the project's own files: no environment, no cache, nothing that an installation left behind."""
    for path in sorted(root.iterdir()):
        hidden = path.name.startswith(".") and path.name not in HIDDEN_BUT_OURS
        if (
            hidden
            or path.name in {"__pycache__", "build", "dist"}
            or path.suffix in {".egg-info", ".pyc"}
        ):
            continue
        if path.is_dir():
            yield from files(path)
        else:
            yield path


def python_files(root: Path) -> list[Path]:
    """List every module that is written here."""
    return [
        path for folder in PYTHON_FOLDERS for path in files(root / folder) if path.suffix == ".py"
    ]


def package_files(root: Path) -> list[Path]:
    """List the modules of curry_train."""
    return [path for path in files(root / PACKAGE) if path.suffix == ".py"]


def parse(path: Path) -> ast.Module:
    """Parse a module."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@dataclass(frozen=True)
class Skill:
    """A folder of skills/ with its SKILL.md; `problem` says why the frontmatter is empty when it cannot be read."""

    name: str
    frontmatter: dict[str, Any]
    body: str
    problem: str | None = None

    @property
    def technique(self) -> str:
        """The name as Python spells it."""
        return self.name.replace("-", "_")

    @property
    def modules(self) -> list[str]:
        """The modules that `metadata.module` names, the home module first."""
        return str((self.frontmatter.get("metadata") or {}).get("module", "")).split()


def skills(root: Path) -> list[Skill]:
    """List the techniques; the folders of skills/ are the only catalogue."""
    return [_read_skill(path) for path in sorted(root.glob("skills/*/SKILL.md"))]


def _read_skill(path: Path) -> Skill:
    name, text = path.parent.name, path.read_text(encoding="utf-8")
    before, *rest = text.split("---\n", 2)
    if before or len(rest) != 2:
        return Skill(name, {}, text, "open it with frontmatter between two lines of ---")
    try:
        frontmatter = yaml.safe_load(rest[0])
    except yaml.YAMLError as error:
        return Skill(name, {}, rest[1], f"quote what YAML cannot read in the frontmatter: {error}")
    return Skill(name, frontmatter or {}, rest[1])
