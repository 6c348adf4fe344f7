"""Commands work on blocks that run, and print what these hold.

python -m pytest tests/cli/test_blocks_that_run.py
"""

import pytest

from ..command_runs import flat, ran, read_json

MODELS = """
import torch
from torch import nn

from curry_train.workloads import Workload


class Half(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        return self.inner(x)


class PairsInLists(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Half(), Half()]) for _ in range(depth))

    def forward(self, x):
        for first, second in self.layers:
            x = x + second(x + first(x))
        return x


def pairs():
    return PairsInLists(), torch.randn(8, 24, 16)


def broken():
    return Workload(
        "broken",
        PairsInLists,
        batch=lambda size: torch.randn(size, 24, 15),
        loss=lambda model, batch: model(batch).square().sum(),
    )
"""
GATES = "--gate recompute/memory --gate recompute/parity-full --gate recompute/off"
LINE = "8 blocks, layers.0.0 to layers.3.1, hold 98% of what forward saves"
REASON = "the containers give layers.0 to layers.3, of which none is called"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("blocks") / "models_of_pairs.py"
    path.write_text(MODELS)
    return path


@pytest.fixture
def spec(models):
    return f"{models}:pairs"


def run(*words, status=0):
    return flat(ran(*words, status=status).output)


def test_validate_judges_blocks_that_run_and_prints_what_they_hold(spec):
    output = run(f"validate --model {spec} {GATES} --json gates.json")
    assert "3 held, 0 failed, 0 not applicable" in output
    assert LINE in output
    assert REASON in output
    (blocks,) = read_json("gates.json")["blocks"].values()
    assert blocks["names"][:2] == ["layers.0.0", "layers.0.1"]
    assert blocks["coverage"] > 0.98
    assert blocks["notes"] == [REASON]


def test_validate_keeps_named_blocks_and_says_that_they_never_run(spec):
    output = run(f"validate --model {spec} --blocks layers.* {GATES}", status=1)
    assert "layers.0 to layers.3: never called, so nothing has an effect" in output
    assert "hold 0% of what forward saves" in output


def test_a_model_that_can_not_run_is_left_to_the_gates(models):
    output = run(f"validate --model {models}:broken {GATES}", status=1)
    assert "0 held, 2 failed, 1 not applicable" in output
    assert "no forward could be recorded: RuntimeError" in output


PLAN = "--budget 2MiB --global-batch 4 --microbatch 4 --whole-loss --without sac --without offload"


@pytest.mark.parametrize("command", ["memory", f"plan {PLAN}"])
def test_commands_work_on_blocks_that_run_and_print_what_they_hold(command, spec):
    output = run(command, "--model", spec)
    assert "8 blocks, layers.0.0 to layers.3.1, hold 9" in output
    assert REASON in output


def test_generated_tests_choose_blocks_that_run(models, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(models.parent)
    spec = f"{models.stem}:pairs"
    path = tmp_path / "test_pairs.py"
    run("gen-tests --gate recompute/parity-full --model", spec, "--out", path)
    assert ").with_running_blocks()[0]\n" in path.read_text()
    run("gen-tests --gate recompute/parity-full --model mlp --out", path)
    assert "with_running_blocks" not in path.read_text()
