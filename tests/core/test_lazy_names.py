"""Test that public names of a package are imported on first use.

python -m pytest tests/core/test_lazy_names.py
"""

import importlib
import sys

import pytest

from curry_train import primitives

from ..command_runs import finished


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
