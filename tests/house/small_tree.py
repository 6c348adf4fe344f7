"""A small tree that keeps every house rule, to plant one violation in.

It has each kind of file that a rule reads, with as little in it as the rules allow, and is written
in a few milliseconds. Proof: `python -m pytest tests/house/test_house.py -k small_tree`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rules_imports import PUBLIC_FILES, PUBLIC_NAMES
from tree import PACKAGE


def write_small_tree(root: Path) -> None:
    """Write all files of the small tree below `root`."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _module(*names: str, head: str = "") -> str:
    """Return a module that defines these names; a capital letter makes a class."""
    definitions = [
        f'class {name}:\n    """Be {name}."""'
        if name[0].isupper()
        else f'def {name}():\n    """Do {name}."""'
        for name in names
    ]
    return "\n\n\n".join([f'"""Work for the small tree."""\n{head}'.rstrip(), *definitions]) + "\n"


def _package(names_by_module: Mapping[str, Sequence[str]]) -> str:
    """Return an `__init__.py` that hands names on."""
    table = "".join(f"    {home!r}: {tuple(names)!r},\n" for home, names in names_by_module.items())
    return (
        '"""Hand names on lazily."""\n\nfrom ..core import lazy_names\n\n'
        f"__getattr__, __dir__ = lazy_names(\n    __name__, {{\n{table}}}\n)\n"
    )


_TECHNIQUES = {
    "grad_accum": PUBLIC_FILES["primitives/grad_accum.py"],
    "sac": PUBLIC_FILES["primitives/sac.py"],
}
_NAMED = {name for names in _TECHNIQUES.values() for name in names}
_TECHNIQUES["recompute"] = tuple(name for name in PUBLIC_NAMES["primitives"] if name not in _NAMED)

_PICTURE = (
    '    core["core: shared"]\n    cli --> plan --> core\n    primitives --> core\n    trainer\n'
)

_MANIFEST = '{\n  "name": "small",\n  "version": "1.2.3"\n}\n'

FILES = {
    f"{PACKAGE}/__init__.py": '"""Be small."""\n\n__version__ = "1.2.3"\n',
    f"{PACKAGE}/__main__.py": _module(head="from .cli.main import run_command\n"),
    f"{PACKAGE}/core/__init__.py": _module("lazy_names"),
    f"{PACKAGE}/core/blocks.py": _module("find_blocks", head="import torch\n"),
    f"{PACKAGE}/primitives/__init__.py": _package(_TECHNIQUES),
    f"{PACKAGE}/primitives/grad_accum.py": _module(*_TECHNIQUES["grad_accum"]),
    f"{PACKAGE}/primitives/recompute.py": _module(
        *_TECHNIQUES["recompute"], head="from ..core.blocks import find_blocks\n"
    ),
    f"{PACKAGE}/primitives/sac.py": _module(
        *_TECHNIQUES["sac"], head="from ..core.blocks import find_blocks\n"
    ),
    f"{PACKAGE}/runs/__init__.py": _package({"attach": PUBLIC_NAMES["runs"]}),
    f"{PACKAGE}/runs/attach.py": _module(*PUBLIC_NAMES["runs"]),
    f"{PACKAGE}/plan/__init__.py": _package({"planner": PUBLIC_NAMES["plan"]}),
    f"{PACKAGE}/plan/planner.py": _module(
        *PUBLIC_NAMES["plan"], head="from ..core import blocks\n"
    ),
    f"{PACKAGE}/gates/__init__.py": '"""Judge techniques."""\n',
    f"{PACKAGE}/gates/grad_accum.py": _module(head="\nGATES = ()  # GATES return a Verdict\n"),
    f"{PACKAGE}/gates/verdict.py": _module("Verdict"),
    f"{PACKAGE}/cli/__init__.py": '"""Run commands."""\n',
    f"{PACKAGE}/cli/main.py": _module("run_command", head="from .plan import plan_command\n"),
    f"{PACKAGE}/cli/plan.py": _module("plan_command", head="from ..plan.planner import Plan\n"),
    f"{PACKAGE}/loop.py": _module(*PUBLIC_FILES["loop.py"]),
    f"{PACKAGE}/benchmark.py": _module(*PUBLIC_FILES["benchmark.py"]),
    "tests/gates/test_grad_accum.py": '"""Show that each gate fails on a wrong technique."""\n',
    "scripts/environment.py": '"""Check what a script needs."""\n',
    "scripts/scaffold.py": (
        '# /// script\n# requires-python = ">=3.11"\n# dependencies = ["click>=8.1"]\n# ///\n'
        '"""Start a project."""\n\nimport environment\n\nenvironment.require(__file__)\n\n'
        "import click\n"
    ),
    "skills/grad-accum/SKILL.md": (
        "---\nname: grad-accum\ndescription: Accumulates gradients.\nlicense: MIT\nmetadata:\n"
        "  module: curry_train/primitives/grad_accum.py\n---\n\n# Gradient accumulation\n"
    ),
    "pyproject.toml": (
        '[project]\nname = "small"\nversion = "1.2.3"\nrequires-python = ">=3.11"\n'
        'dependencies = ["click>=8.1"]\n\n[project.optional-dependencies]\ndev = ["ruff>=0.12"]\n\n'
        '[tool.ruff]\nline-length = 100\n\n[tool.ruff.lint]\nselect = ["E", "F"]\nignore = []\n'
    ),
    "plugin.json": _MANIFEST,
    ".claude-plugin/plugin.json": _MANIFEST,
    ".claude-plugin/marketplace.json": _MANIFEST + _MANIFEST,
    "gemini-extension.json": _MANIFEST,
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3\n\n- See [the skill](skills/grad-accum/SKILL.md).\n",
    "README.md": "# Small\n\nRun `python scripts/scaffold.py`, see [rules](AGENTS.md#rules).\n",
    "AGENTS.md": (
        "# For agents\n\n`template/curry_train/` and curry_train/loop.py.\n\n"
        f"```mermaid\nflowchart TD\n{_PICTURE}```\n"
    ),
    "Makefile": "test:\n\tpytest tests/gates/test_grad_accum.py\n",
    ".ci/run": "make test\n",
    "LICENSE": "MIT\n",
}
