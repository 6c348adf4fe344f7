"""A small bundle without torch to copy from, and what the scaffold's tests share."""

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

from curry_train.cli import scaffold as command
from curry_train.cli.ownership import TECHNIQUES, Bundle

from ..command_runs import finished, flat, ran

PYTHON_FIRST = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
REAL = command.find_bundle()
OWNED = {one.name: one for one in REAL.techniques if not one.usage}
# The real `lazy_names`, without the names that core hands on.
LAZY_NAMES = (REAL.package / "core/__init__.py").read_text().partition("__getattr__, ")[0]

PACKAGE = {
    "__init__.py": '"""The package."""\n\n__version__ = "0.2.0"\n',
    "py.typed": "",
    "benchmark.py": "",
    "config.py": "",
    "data.py": "",
    "trainer.py": "",
    "loop.py": (
        "from .primitives.grad_accum import train_window\nfrom .core.measure import PEAK\n\n"
        "LOOP = train_window, PEAK\n"
    ),
    "core/__init__.py": (
        f"{LAZY_NAMES}__getattr__, __dir__, __all__ = lazy_names(\n"
        '    __name__, {"measure": ("PEAK",)}\n)\n'
    ),
    "core/blocks.py": "def find_blocks():\n    return ['block']\n",
    "core/measure.py": "import math\n\nPEAK = math.pi\n",
    "primitives/__init__.py": (
        "from ..core import lazy_names\n\n"
        "__getattr__, __dir__, __all__ = lazy_names(\n    __name__,\n"
        '    {"grad_accum": ("train_window",), "sac": ("apply_sac", "remove_sac")},\n)\n'
    ),
    "primitives/grad_accum.py": (
        '"""Accumulate.\n\nProof: `python -m pytest tests/gates/test_grad_accum.py`.\n"""\n\n\n'
        "def train_window():\n    return 4\n"
    ),
    "primitives/checkpointed.py": (
        "def run_checkpointed():\n    from ..core.blocks import find_blocks\n\n"
        "    return find_blocks()\n"
    ),
    "primitives/sac.py": (
        "from ..core.blocks import (\n    find_blocks,\n)\n"
        "from .checkpointed import run_checkpointed as run  # from ..core.blocks import x\n\n\n"
        "def apply_sac():\n    return run(), find_blocks()\n\n\n"
        "def remove_sac():\n    pass\n"
    ),
    "plan/__init__.py": "",
    "plan/profiler.py": "class Report: ...\n",
    "plan/planner.py": "from .profiler import Report\n\nPLAN = Report\n",
    "runs/__init__.py": (
        "from ..core import lazy_names\n\n"
        "__getattr__, __dir__, __all__ = lazy_names(\n"
        '    __name__, {"attach": ("saving",), "spike": ("SPIKE",)}\n)\n'
    ),
    "runs/attach.py": (
        "from ..core import PEAK\nfrom . import spike\n\n\n"
        "def saving():\n    return PEAK, spike.SPIKE\n"
    ),
    "runs/spike.py": "SPIKE = 3\n",
}
PROJECT = {
    "README.md.jinja": "# {{ name }}\n\nRead train.py.\n",
    "pyproject.toml.jinja": (
        '[project]\nname = "{{ name }}"\nversion = "0"\n{% if own %}\ndependencies = []\n'
        '{% else %}\ndependencies = ["curry-train=={{ version }}"]\n{% endif %}\n'
    ),
    "train.py": (
        '"""Train a model."""\n\nfrom curry_train.loop import LOOP\n'
        "from curry_train.runs import saving\n\n\n"
        "def main():\n    print('trained', LOOP, saving)\n\n\n"
        "if __name__ == '__main__':\n    main()\n"
    ),
    ".gitignore": "/runs/\n",
    "tests/test_project.py": "def test_project():\n    import train\n\n    assert train.LOOP\n",
}
TESTS = {
    "test_grad_accum.py": (
        "from curry_train.primitives.grad_accum import train_window\n\n\n"
        "def test_steps():\n    assert train_window() == 4  # curry_train stays in comments\n"
    ),
    "test_sac.py": (
        "from curry_train.core.blocks import find_blocks\n"
        "from curry_train.primitives.sac import apply_sac, remove_sac\n\n\n"
        "def test_blocks():\n    assert apply_sac() == (find_blocks(), ['block'])\n"
        "    remove_sac()\n"
    ),
}
SMALL_TECHNIQUES = {"grad-accum", "sac", "memory-plan", "loss-spike"}


def make_bundle(root):
    """Make a clone with four techniques and no torch."""
    template = root / "template"
    for folder, files in (("curry_train", PACKAGE), ("project", PROJECT), ("tests", TESTS)):
        for path, text in files.items():
            write(template / folder / path, text)
    techniques = tuple(entry for entry in TECHNIQUES if entry.name in SMALL_TECHNIQUES)
    folders = (template / name for name in ("curry_train", "project", "tests"))
    return Bundle(*folders, techniques, "0.2.0")


def release(bundle, version):
    """Return the bundle with another version."""
    (bundle.package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    return replace(bundle, version=version)


def edit(path, old, new):
    """Replace a text that is in a file once."""
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def write(path, text):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def scaffold(bundle, *arguments, cwd=".", status=0):
    """Run the command of a bundle in this process; the wheel of a small one is not built."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(cwd))
        stack.enter_context(mock.patch.object(command, "find_bundle", return_value=bundle))
        if bundle.techniques is not TECHNIQUES:
            stack.enter_context(mock.patch.object(command, "build_wheel", return_value=b"wheel"))
        return ran(*arguments, command=command.scaffold_group, status=status)


def refusal(bundle, *arguments, **options):
    """Return the message of a command that is refused."""
    return flat(scaffold(bundle, *arguments, status=2, **options).stderr)


def shell(command, *, cwd=None, **variables):
    """Run what a user would type, with this Python as `python` and no path of ours."""
    # Without plugins, as for a user who has torch and pytest alone.
    ours = {"PATH": PYTHON_FIRST, "PYTHONPATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return finished("sh", "-c", command, cwd=cwd, **ours, **variables)


def tree(root):
    """Return every file below `root`."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def times(root):
    """Return when each file and folder was last changed."""
    return {
        path.relative_to(root).as_posix(): path.stat().st_mtime_ns
        for path in [root, *root.rglob("*")]
    }


def after(output, heading):
    """Return the indented line below `heading`."""
    lines = output.splitlines()
    return lines[lines.index(heading) + 1].strip()
