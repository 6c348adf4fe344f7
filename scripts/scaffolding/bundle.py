"""What the bundle offers: its version and its techniques, read from `skills/*/SKILL.md`; there is no other registry.

Proof: `python -m pytest tests/cli/test_scaffold.py -k bundle`, or look: `python scripts/scaffold.py list`.
"""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from curry_train.core.wording import did_you_mean

from .errors import ScaffoldError

PACKAGE = "curry_train"


@dataclass(frozen=True)
class Technique:
    """One skill and the files behind it; paths are relative to `template/`."""

    name: str
    description: str
    modules: tuple[str, ...]

    @property
    def home(self) -> str:
        return self.modules[0]

    @property
    def gate(self) -> str:
        return f"{PACKAGE}/gates/{self.name.replace('-', '_')}.py"

    @property
    def test(self) -> str:
        return f"tests/test_{self.name.replace('-', '_')}.py"

    @property
    def decides(self) -> str:
        """The description's first sentence."""
        return re.split(r"(?<=[.!?])\s", self.description, maxsplit=1)[0]


@dataclass(frozen=True)
class Bundle:
    """A checkout of the bundle."""

    root: Path
    version: str
    techniques: tuple[Technique, ...]

    @property
    def template(self) -> Path:
        return self.root / "template"

    def choose(self, names: Sequence[str]) -> tuple[Technique, ...]:
        """The techniques of these names, in the catalogue's order."""
        known = [technique.name for technique in self.techniques]
        for name in names:
            if name not in known:
                raise ScaffoldError(f"no technique is called {name!r}; {did_you_mean(name, known)}")
        return tuple(technique for technique in self.techniques if technique.name in names)


def read_bundle(root: Path) -> Bundle:
    """Read and check the catalogue of the bundle at `root`."""
    skills = sorted(root.glob("skills/*/SKILL.md"))
    if not skills:
        raise ScaffoldError(
            f"no skills/*/SKILL.md under {root}: this is not a whole copy of the bundle"
        )
    techniques = tuple(_read_technique(skill) for skill in skills)
    for technique in techniques:
        for path in (*technique.modules, technique.gate, technique.test):
            if not (root / "template" / path).is_file():
                raise ScaffoldError(
                    f"skill {technique.name} needs template/{path}, which {root} does not have"
                )
    return Bundle(root, _read_version(root / "template" / PACKAGE / "__init__.py"), techniques)


def _read_technique(skill: Path) -> Technique:
    text = skill.read_text(encoding="utf-8")
    block = re.match(r"---\n(.*?\n)---\n", text, flags=re.DOTALL)
    if block is None:
        raise ScaffoldError(f"{skill} does not open with a frontmatter between two lines of ---")
    try:
        fields = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        raise ScaffoldError(f"the frontmatter of {skill} is not YAML: {error}") from error
    metadata = fields.get("metadata") if isinstance(fields, dict) else None
    modules = metadata.get("module") if isinstance(metadata, dict) else None
    if not isinstance(modules, str) or not modules.split():
        raise ScaffoldError(
            f"the frontmatter of {skill} has no metadata.module with the path of its home module"
        )
    name, description = fields.get("name"), fields.get("description")
    if name != skill.parent.name or not isinstance(description, str):
        raise ScaffoldError(
            f"the frontmatter of {skill} needs name: {skill.parent.name} and a description"
        )
    return Technique(name, " ".join(description.split()), tuple(modules.split()))


def _read_version(path: Path) -> str:
    for node in ast.parse(path.read_bytes()).body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id="__version__")], value=ast.Constant(value=str(version))
            ):
                return version
    raise ScaffoldError(f'{path} has no line __version__ = "..."')
