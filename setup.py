"""Put the template of a project and the owned tests into the package that setuptools builds.

Everything else is in pyproject.toml. Proof: `python -m pytest tests/cli/test_scaffold_wheel.py`.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TEMPLATE = Path(__file__).resolve().parent / "template"
LEFT_BY_RUNS = ("__pycache__", ".[!g]*", "*.egg-info", "runs", "build", "wheels", "*.lock")


class BuildWithBundle(build_py):
    """Build the package with the files that `curry-train new` and `add` copy."""

    def run(self) -> None:
        """Copy the modules, then the files to copy; a clone has those next to the package."""
        super().run()
        if self.editable_mode:
            return
        for name in ("project", "tests"):
            place = Path(self.build_lib, "curry_train/bundled", name)
            left = shutil.ignore_patterns(*LEFT_BY_RUNS)
            shutil.copytree(TEMPLATE / name, place, ignore=left, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithBundle})
