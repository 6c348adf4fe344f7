"""The command `plan`: what it prints and writes, and one message for each wrong input.

python -m pytest tests/cli/test_plan_memory.py
"""

import json
import re
import sys
from pathlib import Path

import pytest

from curry_train.plan import Plan
from curry_train.plan.device import PROFILES

from ..command_runs import flat, ran, require_picture

MODELS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, hidden)
        self.down = nn.Linear(hidden, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def blocks():
    return nn.Sequential(*[Block() for _ in range(3)]), torch.randn(8, 16, 32)


def needs_gpu():
    return nn.Linear(4, 4).cuda(), torch.randn(4, 4, device="cuda")


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.layers(x) if x.sum() < 1e9 else x


def branching():
    return Branching(), torch.randn(8, 16, 32)
"""
QUICK = "--without sac --without regions --whole-loss --global-batch 8"


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    (tmp_path / "planned_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("planned_models", None)


def run(words="", *, model="blocks", budget="1GiB", target="--target cpu", status=0):
    line = f"plan {target} {QUICK} --model planned_models:{model} --budget {budget} {words}"
    return ran(line, status=status)


def narrow(text):
    # A path is not broken.
    return all(len(line) <= 80 or line[:1] == "/" for line in text.splitlines())


# What it prints and writes.


def test_the_output_has_the_current_peak_and_a_plan_whose_peak_is_measured():
    for size in "48":
        as_it_is = json.loads(run(f"--json - --microbatch {size}").stdout)
        free = as_it_is["plan"]["peak_bytes"]
        assert sum(as_it_is["plain_peak"].values()) == free
    budget = f"{round(0.8 * free)}B"
    words = "--explain --verify --out plan.json --plot plan.png --html plan.html --microbatch 8"
    found = run(words, budget=budget)
    assert narrow(found.output), found.output
    assert not found.stdout.startswith("This plan is for")
    for message in (
        "as it is, 8 samples: ",
        "activations",
        "microbatch  steps",
        "It costs",
        "(100.00%)",
        "wrote plan.json",
    ):
        assert message in found.output
    plan = Plan.load("plan.json")
    assert plan.peak_bytes <= round(0.8 * free)
    from planned_models import blocks

    assert plan.apply(blocks()[0])
    require_picture("plan.png")
    page = Path("plan.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["limit"] == round(0.8 * free)
    assert sum(figures[data["peak_place"]] for _, _, figures in data["owners"]) == plan.peak_bytes


def test_the_output_mentions_that_a_model_was_measured_for_real():
    found = run("--target h100", model="branching")
    assert narrow(found.output), found.output
    printed = flat(found.output)
    assert "measured for real, without offload:" in printed
    assert "in the forward of Branching" in printed


@pytest.mark.parametrize(("budget", "status"), [("1GiB", 0), ("20KiB", 1)])
def test_without_a_target_the_first_line_says_that_the_plan_is_for_this_cpu(
    monkeypatch, budget, status
):
    monkeypatch.setattr("curry_train.cli.plan.profile_of", lambda place: PROFILES["cpu"])
    found = run("--microbatch 8", budget=budget, target="", status=status)
    first = found.stdout.splitlines()[0]
    assert first == "This plan is for this CPU; --target h100 plans for a GPU without having one."
    assert ("\nnothing fits 20.0 KiB: the least peak is" in found.stdout) == status
    assert narrow(found.output), found.output


# Wrong input.


def test_a_factory_that_names_cuda_is_planned_without_one():
    found = run(model="needs_gpu")
    assert "no block to plan for" in found.output
    assert narrow(found.output), found.output


def test_the_fewest_gpus_take_several_meshes():
    meshes = "--mesh replicate=1,shard=1 --mesh replicate=1,shard=2"
    # Shared by two ranks, as the factory's own batch is the global one.
    found = ran(f"plan --model planned_models:blocks --fits h100 --parallel hsdp {meshes}")
    assert "replicate=1,shard=1" in found.output
    assert "replicate=1,shard=2" in found.output
