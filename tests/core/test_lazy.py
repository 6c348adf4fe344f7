"""Public names come on first use, and a project without a technique is told how to get it.

python -m pytest tests/core/test_lazy.py
"""

import shutil
import subprocess
import sys

import pytest
from tree import ROOT

from curry_train import primitives
from curry_train.core.lazy import MissingTechnique, lazy_names


def test_names_are_handed_on_and_listed():
    from curry_train.primitives import GradientAccumulation

    assert GradientAccumulation.__module__ == "curry_train.primitives.grad_accum"
    assert "GradientAccumulation" in dir(primitives)
    assert primitives.grad_accum.GradientAccumulation is GradientAccumulation


def test_a_name_that_nobody_promised_is_an_attribute_error():
    with pytest.raises(
        AttributeError, match=r"module 'curry_train.primitives' has no attribute 'Nothing'"
    ):
        _ = primitives.Nothing
    assert not hasattr(primitives, "Nothing")


def test_importing_a_package_does_not_import_torch():
    program = (
        "import sys, curry_train.primitives, curry_train.core; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT / "template").returncode == 0


def test_a_missing_technique_is_told_with_the_command_that_brings_it(tmp_path):
    shutil.copytree(
        ROOT / "template/curry_train",
        tmp_path / "theirs",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (tmp_path / "theirs/primitives/grad_accum.py").unlink()
    program = "from theirs.primitives import GradientAccumulation"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert (
        "MissingTechnique: GradientAccumulation belongs to the technique grad-accum" in ended.stderr
    )
    assert "scripts/scaffold.py add grad-accum --into theirs" in ended.stderr


def test_a_module_of_another_technique_is_named_after_it():
    getattr_, _, _ = lazy_names(
        "curry_train.primitives", {"absent": ("Absent",)}, technique_of={"absent": "recompute"}
    )
    with pytest.raises(MissingTechnique, match=r"scaffold\.py add recompute --into curry_train"):
        getattr_("Absent")
