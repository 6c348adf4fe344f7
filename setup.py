"""Put the template of a project and the owned tests into the package that setuptools builds.

Everything else is in pyproject.toml. Proof: `python -m pytest tests/cli/test_scaffold_wheel.py`.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "template"))

from curry_train.cli.ownership import BUNDLED_FOLDER, PACKAGE, bundled_files, find_bundle  # noqa: E402


class BuildWithBundle(build_py):
    """Build the package with the files that `curry-train new` and `add` copy."""

    def run(self) -> None:
        """Copy the modules, then the files to copy; a clone has those beside the package."""
        super().run()
        if self.editable_mode:
            return
        for path, content in bundled_files(find_bundle()).items():
            place = Path(self.build_lib, PACKAGE, BUNDLED_FOLDER, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)


setup(cmdclass={"build_py": BuildWithBundle})
