"""Importing a package: its public names on first use, and a torch that was never tested.

python -m pytest tests/core/test_lazy_names.py
"""

import importlib
import os
import sys

import pytest

from curry_train import primitives

from ..command_runs import finished
from ..tree import ROOT


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(
        AttributeError, match=r"module 'curry_train.primitives' has no attribute 'Nothing'"
    ):
        _ = primitives.Nothing


@pytest.mark.parametrize("room", ["gates", "plan", "primitives", "runs", "workloads"])
def test_every_lazy_name_exists_in_the_module_of_its_table(room):
    package = importlib.import_module(f"curry_train.{room}")
    assert package.__all__
    assert {*package.__all__} <= {*dir(package)}
    assert not [name for name in package.__all__ if not hasattr(package, name)]


def test_importing_a_package_does_not_import_torch():
    program = (
        "import sys, curry_train.primitives, curry_train.core.wording; "
        "sys.exit('torch' in sys.modules)"
    )
    finished(sys.executable, "-c", program)


# A torch that the tests never ran with.


def imported_with(folder, *, version, options=()):
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("raise ImportError('nothing needs torch here')\n")
    (folder / "torch/version.py").write_text(f"__all__ = []\n__version__ = '{version}'\n")
    path = f"{folder}{os.pathsep}{ROOT}/template"
    return finished(sys.executable, *options, "-c", "import curry_train", PYTHONPATH=path)


@pytest.mark.parametrize("version", ["2.12.1", "2.15.0+cu130", "2.110.0", "3.0"])
def test_a_torch_that_was_never_tested_is_named_in_one_warning(tmp_path, version):
    done = imported_with(tmp_path, version=version)
    (line,) = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert line.endswith(
        f"UserWarning: curry-train is tested with torch 2.11, 2.13, 2.14, and this is {version}: "
        "run `curry-train validate` on your model before you rely on it"
    )


@pytest.mark.parametrize("version", ["2.11.0", "2.14.1+cu130", "2.13.0a0+git1234"])
def test_a_tested_torch_is_not_mentioned(tmp_path, version):
    assert imported_with(tmp_path, version=version, options=["-W", "error"]).stderr == ""
