"""A plan may recompute modules that the user allows, and is then never slower.

python -m pytest tests/plan/test_plan_also.py
"""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from test_plan import measured
from torch import nn

from curry_train.cli.main import main
from curry_train.core.parity import compare, record_step
from curry_train.plan.planner import Planner
from curry_train.plan.saved import REGIONS_KIND, SAC_KIND, Option, Plan
from curry_train.workloads.workload import Case, Workload

ALSO = ["blocks.*.wave"]


class Wave(nn.Module):
    """An activation of several operations, each of which keeps what it needs."""

    def forward(self, x):
        return torch.sin(x) * torch.tanh(x) + x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 128)
        self.wave = Wave()
        self.down = nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(self.wave(self.up(x)))


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(4)), nn.Linear(32, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def waves():
    return Workload(
        "waves",
        Waves,
        lambda size: torch.randn(size, 64, 32),
        lambda module, x: module(x).square().sum(),
    )


@pytest.fixture(scope="module")
def plans():
    """Make plans with the modules and without, at a budget between the two peaks."""
    found = []
    for also in (ALSO, []):
        with Planner(waves(), also=also, without=(SAC_KIND,), chunked_loss=False) as planner:
            plain = planner.plan(2**40, global_batch=8, microbatch=8)
            found.append(planner.plan(plain.peak_bytes // 2, global_batch=8, microbatch=8))
    return found


def test_the_plan_is_faster_and_its_peak_is_the_predicted_one(plans):
    with_modules, without = plans
    assert Option(REGIONS_KIND, also=("wave",)) in with_modules.options.values()
    assert with_modules.step_seconds < without.step_seconds
    for one in plans:
        assert measured(waves(), one) == one.peak_bytes <= one.budget_bytes


def test_the_planned_model_trains_bit_equal(plans):
    case = Case(waves(), batch_size=8)
    plain, planned = case.build(), case.build()
    plans[0].apply(planned)
    batch, loss = case.batch(), case.workload.mean_loss
    assert compare(record_step(plain, batch, loss), record_step(planned, batch, loss)).bit_equal


def test_a_saved_plan_keeps_the_modules(plans, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plans[0].to_json()))
    assert Plan.load(path).options == plans[0].options
    assert plans[0].settings["also"] == ALSO
    assert "regions+wave" in plans[0].explain()
    assert max(map(len, plans[0].explain().splitlines())) <= 80


@pytest.mark.parametrize("also", [["*.wave"], ["blocks.[0123].wave"]])
def test_equivalent_patterns_select_the_same_modules(plans, also):
    with Planner(waves(), also=also, without=(SAC_KIND,), chunked_loss=False) as planner:
        assert (
            planner.plan(plans[0].budget_bytes, global_batch=8, microbatch=8).options
            == plans[0].options
        )


def test_modules_of_some_of_several_equal_blocks_are_refused():
    planner = Planner(waves(), also=["blocks.1.wave"], without=(SAC_KIND,), chunked_loss=False)
    with (
        planner,
        pytest.raises(
            ValueError, match=r"names wave of some blocks and not of blocks\.[23], which"
        ),
    ):
        planner.plan(2**40, global_batch=8, microbatch=8)


def test_a_pattern_without_a_match_is_refused():
    with (
        pytest.raises(ValueError, match=r"also 'blocks\.\*\.act' matches no module"),
        Planner(waves(), also=["blocks.*.act"]) as planner,
    ):
        planner.plan(2**40)
    ended = CliRunner().invoke(
        main, ["plan", "--model", "mlp", "--budget", "1GiB", "--also", "*.wave"]
    )
    assert ended.exit_code == 2
    assert "'*.wave' matches no module" in ended.output


def test_an_option_without_regions_has_none():
    with pytest.raises(ValueError, match="only 'regions' takes modules to recompute"):
        Option("full", also=("wave",))
    with pytest.raises(ValueError, match="also of a block's option must be a list"):
        Option.from_json({"kind": "regions", "also": "wave"})


class Noisy(Wave):
    def forward(self, x):
        return super().forward(x + torch.rand_like(x))


class Counting(Wave):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("wave", "message"), [(Noisy, "wave draws random numbers"), (Counting, "wave changes a buffer")]
)
def test_a_module_that_can_not_be_run_once_more_is_left_out_with_the_reason(wave, message):
    def build():
        model = Waves()
        for block in model.blocks:
            block.wave = wave()
        return model

    with Planner(
        replace(waves(), build=build), also=ALSO, without=(SAC_KIND,), chunked_loss=False
    ) as planner:
        plan = planner.plan(2**40, global_batch=8, microbatch=8)
        plan = planner.plan(plan.peak_bytes // 2, global_batch=8, microbatch=8)
    assert all(not option.also for option in plan.options.values())
    assert any(message in left_out for left_out in plan.settings["left_out"])


def test_modules_for_regions_without_regions_are_refused():
    with pytest.raises(ValueError, match="is for regions, which without="):
        Planner(waves(), also=ALSO, without=(REGIONS_KIND,))
