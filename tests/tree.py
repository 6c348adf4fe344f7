"""List the project's own files and its techniques.

python -m pytest tests/house/test_house.py
"""

import os
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
HIDDEN_BUT_OURS = {
    ".agents",
    ".ci",
    ".claude-plugin",
    ".codex-plugin",
    ".cursor-plugin",
    ".github",
    ".gitignore",
}
GENERATED = {"__pycache__", "build", "dist", "node_modules"}


def files(root, folder=""):
    """List the project's own files below `folder`: no environment, no cache, no build output."""
    found = []
    for directory, folders, names in os.walk(root / folder):
        folders[:] = sorted(name for name in folders if _is_ours(name))
        found += [Path(directory, name) for name in sorted(names) if _is_ours(name)]
    return found


def _is_ours(name):
    if name in GENERATED or name.endswith((".egg-info", ".pyc")):
        return False
    return not name.startswith(".") or name in HIDDEN_BUT_OURS


@dataclass(frozen=True)
class Skill:
    """A folder of skills/ with its SKILL.md."""

    name: str
    frontmatter: dict

    @property
    def technique(self):
        """The name as Python spells it."""
        return self.name.replace("-", "_")

    @property
    def home(self):
        """The module of the technique, from template/."""
        return str(self.frontmatter.get("metadata", {}).get("module"))


def skills(root):
    """List the techniques; the folders of skills/ are the only catalogue."""
    found = []
    for path in sorted(root.glob("skills/*/SKILL.md")):
        _, frontmatter, _ = path.read_text().split("---\n", 2)
        found.append(Skill(path.parent.name, yaml.safe_load(frontmatter)))
    return found
