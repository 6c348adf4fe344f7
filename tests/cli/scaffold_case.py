"""A small bundle to scaffold from, and what the scaffold's tests share: running the command, hashing a tree."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON_FIRST = (
    f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # so that `python` is this one
)

INIT = '''"""A package."""

from {core}lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, {names})
'''
FILES = {
    "curry_train/__init__.py": '"""The package."""\n\n__version__ = "0.1.0"\n',
    "curry_train/py.typed": "",
    "curry_train/benchmark.py": '"""Times a step."""\n\nfrom .core.timing import SECONDS\n\nSTEP = SECONDS\n',
    "curry_train/core/__init__.py": INIT.format(
        core=".", names='{"verdict": ("HELD",), "unused": ("NEVER",)}'
    ),
    "curry_train/core/lazy.py": (ROOT / "template/curry_train/core/lazy.py").read_text(),
    "curry_train/core/wording.py": (
        ROOT / "template/curry_train/core/wording.py"
    ).read_text(),  # of scaffold.py
    "curry_train/gates/verdict.py": "HELD = True\n",
    "curry_train/core/timing.py": "SECONDS = 1\n",
    "curry_train/core/unused.py": "NEVER = 0\n",
    "curry_train/core/tables/costs.json": "{}\n",
    "curry_train/primitives/__init__.py": INIT.format(
        core="..core.",
        names='{"grad_accum": ("Accumulation",), "recompute": ("Recompute", "Region")}',
    ),
    "curry_train/primitives/grad_accum.py": "class Accumulation:\n    steps = 4\n",
    "curry_train/primitives/recompute.py": "class Region: ...\n\n\nclass Recompute: ...\n",
    "curry_train/primitives/offload.py": "from .recompute import Region\n\nOFFLOAD = Region\n",
    "curry_train/gates/run.py": '"""Claims."""\n',
    "curry_train/gates/grad_accum.py": (
        "from ..core import HELD\nfrom ..primitives import grad_accum\n\nGATES = HELD, grad_accum\n"
    ),
    "curry_train/gates/recompute.py": "from ..core.verdict import HELD\n\nGATES = HELD\n",
    "tests/gates/test_grad_accum.py": (
        "from curry_train.gates.grad_accum import GATES\nfrom curry_train.primitives import Accumulation\n\n\n"
        "def test_steps() -> None:\n    assert GATES and Accumulation.steps == 4  # curry_train stays in comments\n"
    ),
    "tests/gates/test_recompute.py": (
        "import curry_train.gates.recompute as gate\nfrom curry_train.primitives.offload import OFFLOAD\n\n\n"
        "def test_region() -> None:\n    assert gate.GATES and OFFLOAD\n"
    ),
    "README.md.jinja": "# {{ name }}\n",
    "pyproject.toml.jinja": '[project]\nname = "{{ distribution }}"\nversion = "0"\n',
    "train.py.jinja": "from curry_train.primitives import Accumulation\n\nprint('{{ name }}', Accumulation.steps)\n",
}
SKILL = """---
name: {name}
description: Decides {what}. Use when memory is short.
license: MIT
metadata: {{module: "{module}"}}
---
# Body
"""


def make_bundle(root: Path) -> Path:
    """A bundle with two techniques and no torch, under the real scripts."""
    for path, text in FILES.items():
        write(root / "template" / path, text)
    for name, modules in {
        "grad-accum": "grad_accum.py",
        "recompute": "recompute.py offload.py",
    }.items():
        module = " ".join(f"curry_train/primitives/{file}" for file in modules.split())
        write(
            root / f"skills/{name}/SKILL.md",
            SKILL.format(name=name, what=f"about {name}", module=module),
        )
    shutil.copytree(ROOT / "scripts/scaffolding", root / "scripts/scaffolding")
    for script in ("scaffold.py", "environment.py"):
        shutil.copy(ROOT / "scripts" / script, root / "scripts" / script)
    return root


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def scaffold(bundle: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the bundle's command."""
    command = [sys.executable, str(bundle / "scripts/scaffold.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def shell(command: str, *, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run what a user would type, with this Python as `python` and no path of ours."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = (
        inherited | {"PATH": PYTHON_FIRST, "OMP_NUM_THREADS": "1"} | variables
    )  # small models: threads wait
    return subprocess.run(
        command, shell=True, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def tree(root: Path) -> dict[str, bytes]:
    """Every file below `root`."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def times(root: Path) -> dict[str, int]:
    """When every file and folder was last changed."""
    return {
        path.relative_to(root).as_posix(): path.stat().st_mtime_ns
        for path in [root, *root.rglob("*")]
    }


def after(output: str, heading: str) -> str:
    """The indented line below `heading`."""
    lines = output.splitlines()
    return lines[lines.index(heading) + 1].strip()
