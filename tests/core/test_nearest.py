"""Commands that take names suggest the closest known one for a misspelled one.

python -m pytest tests/core/test_nearest.py
"""

import subprocess
import sys

import pytest

from curry_train.bench.savings import choose_strategies, load_with_depth
from curry_train.bench.steps import find_lever
from curry_train.core.wording import did_you_mean, nearest
from curry_train.primitives.sac import make_policy
from curry_train.primitives.strategies import CheckpointConfig
from curry_train.workloads.models import load_workload


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("transfomer", "transformer"),
        ("MLP", "mlp"),
        ("grad_acum", "grad-accum"),
        ("grad accum", "grad-accum"),
        ("memory-budget", "memory_budget"),
        ("bert", None),
    ],
)
def test_the_nearest_name_ignores_case_and_dashes(name, meant):
    known = ("mlp", "transformer", "resnet", "grad-accum", "memory_budget")
    assert nearest(name, known) == meant
    message = did_you_mean(name, known)
    assert message == (f"did you mean {meant!r}?" if meant else f"there are {', '.join(known)}")
    assert did_you_mean("bert", known, otherwise="use one of ours") == "use one of ours"


@pytest.mark.parametrize(
    ("refuse", "meant"),
    [
        (lambda: load_workload("transfomer"), "transformer"),
        (lambda: load_with_depth("transfomer", 2), "transformer"),
        (lambda: choose_strategies(["regoins"]), "regions"),
        (lambda: CheckpointConfig(strategy="sequental"), "sequential"),
        (lambda: CheckpointConfig.from_config({"stratgy": "full"}), "strategy"),
        (lambda: find_lever("sac_matmul"), "sac_matmuls"),
        (lambda: make_policy("save_matmul"), "save_matmuls"),
    ],
)
def test_a_misspelled_name_is_refused_with_a_suggestion(refuse, meant):
    with pytest.raises(ValueError, match=f"did you mean '{meant}'\\?"):
        refuse()


def test_suggestions_need_no_torch(pytestconfig):
    program = "import sys, curry_train.core.wording; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=pytestconfig.rootpath / "template", capture_output=True
    )
    assert (ran.returncode, ran.stdout) == (0, b"False\n"), ran.stderr
