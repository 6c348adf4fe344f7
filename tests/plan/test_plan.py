"""A plan is within its budget to the byte, and its measured peak is the predicted one.

python -m pytest tests/plan/test_plan.py
"""

import functools
import importlib
import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curry_train.core.blocks import find_blocks
from curry_train.gates.same_training import same_training
from curry_train.plan import Infeasible, Plan, Planner, plan
from curry_train.plan.planner import what_microbatches_change
from curry_train.plan.saved import Candidate, Option, apply_options
from curry_train.workloads import Case
from curry_train.workloads.models import mlp, transformer

from ..plan_models import Runs, measured, net, squares
from ..toy_steps import stacked
from ..tree import ROOT

WORKLOADS = {
    "transformer": lambda: transformer(depth=2, dim=64),
    "mlp": lambda: mlp(depth=4, width=32),
    "two kinds": lambda: net(64, 256, 64, 256),
    "frozen": lambda: net(64, 64, 64, 64, frozen=(0, 1)),
    "twice": lambda: net(128, 128, 128, times=2),
    "six times": lambda: net(128, 128, times=6),
}
WITHOUT = {"transformer": ("sac",)}  # takes a second per set


def peak_of(workload, found):
    """Measure the peak of a real step of the plan."""
    return measured(
        workload,
        found.microbatch,
        optimizer=found.settings["optimizer"],
        change=found.apply,
        accumulated=found.steps > 1,
    ).peak.bytes_alive


@functools.cache
def plans(name):
    """Make the workload, its plain and least peaks, and plans for budgets between them."""
    workload, size = WORKLOADS[name](), 512 if name == "mlp" else 8
    with Planner(workload, without=WITHOUT.get(name, ()), chunked_loss=False) as planner:
        make = functools.partial(planner.plan, global_batch=size, microbatch=size)
        plain = make(2**40)
        with pytest.raises(Infeasible) as error:
            make(1)
        least = error.value.least_bytes
        found = []
        for share in (0.0, 0.5):
            planner.whole_steps.known.clear()
            found.append(make(least + round(share * (plain.peak_bytes - least))))
        return workload, plain, least, found


# No plan is above its budget, and the measured peak is the predicted one.


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_measured_peak_of_a_plan_is_the_predicted_one_within_the_budget(name):
    workload, plain, least, found = plans(name)
    assert all(option.kind == "none" for option in plain.options.values())
    assert found[0].peak_bytes == least < plain.peak_bytes
    for one in [plain, *found]:
        assert peak_of(workload, one) == one.peak_bytes <= one.budget_bytes
    assert plain.step_seconds < found[0].step_seconds
    assert found[1].step_seconds <= found[0].step_seconds


def test_the_first_row_is_the_callers_own_setting_as_a_real_step_measures_it():
    workload = replace(net(64, 256, 64, 256), own_batch=2)
    with Planner(workload, chunked_loss=False) as planner:
        plain = planner.plan(2**40, global_batch=8)
        found = planner.plan(round(0.8 * plain.own.peak_bytes), global_batch=8)
    assert (found.own.microbatch, found.own.steps) == (2, 4)
    assert found.own.step_seconds is None
    as_it_is = replace(plain, options={}, chunk_tokens=None, microbatch=2, steps=4)
    assert peak_of(workload, as_it_is) == found.own.peak_bytes
    rows = found.explain().split("microbatch  steps")[1].splitlines()
    assert rows[1].split()[0] == "2"
    assert rows[1].endswith("too large  your own setting")
    assert Plan.from_json(found.to_json()).options == found.options


def test_the_loss_runs_in_chunks_of_the_planned_size():
    """Compare peaks of plans without blocks, for a model that is a head alone."""

    workload = squares(
        lambda: nn.Linear(8, 64),
        8,
        loss=lambda head, x: F.cross_entropy(head(x), torch.zeros(len(x), dtype=torch.long)),
    )
    alone = replace(plans("mlp")[1], options={}, fingerprint={}, chunk_tokens=64, microbatch=64)
    assert peak_of(workload, replace(alone, chunk_tokens=1)) < peak_of(workload, alone)
    assert alone.apply(nn.Sequential(nn.Linear(8, 64))) == ["0"]


def test_messages_of_a_long_search_name_the_time_left(monkeypatch):
    times = itertools.count(step=3.0)
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("curry_train.plan.planner.time", clock)
    messages = []
    plan(net(64, 64), 2**40, global_batch=2, chunked_loss=False, tell=messages.append)
    left = [int(found[1]) for one in messages if (found := re.search(r", about (\d+) s left", one))]
    assert len(left) >= 3
    assert left[-1] < max(left)


class Dropping(nn.Linear):
    dropout = 0.1


def test_a_model_that_repeats_no_block_is_planned_by_its_microbatch():
    workload = squares(lambda: Dropping(8, 32), 64, 8)
    with Planner(workload, blocks=None, chunked_loss=False) as planner:
        whole = planner.plan(2**40, global_batch=8)
        small = planner.plan(whole.peak_bytes - 1, global_batch=8)
    assert (whole.microbatch, small.microbatch, small.options) == (8, 4, {})
    assert peak_of(workload, small) == small.peak_bytes < whole.peak_bytes
    assert "no block to plan for" in small.explain()
    assert "its own dropout" in small.explain()
    assert "its own dropout" not in whole.explain()
    assert "for cpu, float32, adamw; times are predicted from measured rates" in small.explain()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.GELU(), nn.Dropout(0.1)),
            "Each microbatch draws its own dropout (1): to get exactly the losses",
        ),
        (
            nn.Sequential(nn.BatchNorm1d(64), nn.Dropout(0.0)),
            "Each microbatch has its own statistics (0): to get exactly the losses",
        ),
        (nn.TransformerEncoderLayer(8, 2), "draws its own dropout (self_attn)"),
        (type("FrozenBatchNorm2d", (nn.Identity,), {})(), ""),
    ],
)
def test_a_plan_warns_if_its_microbatches_change_the_training(model, message):
    best = Candidate(2, 4, False, 0, 1.0)
    found = what_microbatches_change(model, best)
    assert message in found
    assert bool(found) == bool(message)
    assert "--microbatch 8" in found or not message
    assert what_microbatches_change(model, replace(best, steps=1)) == ""


def normalized():
    """A residual block whose norm refuses a batch of one sample."""
    norm, layer = nn.BatchNorm1d(16), nn.Linear(16, 16)
    return Runs(lambda inner, x: x + torch.tanh(inner[1](inner[0](x))), norm, layer)


def test_microbatches_that_a_norm_over_the_batch_refuses_are_left_out():
    with Planner(squares(lambda: stacked(normalized, 3), 16)) as planner:
        found = planner.plan(2**40, global_batch=4)
        assert {candidate.microbatch for candidate in found.candidates} == {2, 4}
        for microbatch in (None, 4):
            with pytest.raises(Infeasible, match="nothing fits"):
                planner.plan(1, global_batch=4, microbatch=microbatch)
        with pytest.raises(ValueError, match="does not train on a microbatch of 1 sample"):
            planner.plan(2**40, global_batch=4, microbatch=1)


# The way of a workload.


def test_a_plan_makes_what_the_page_for_agents_lists_in_that_order(monkeypatch):
    page = (ROOT / "AGENTS.md").read_text()
    listed = page.partition("A workload on its way")[2].partition("One rank among")[0]
    steps = re.findall(r"`(\w+)\.py`\s\(`(\w+)`", listed)
    assert len(steps) >= 6
    assert len(set(re.findall(r"`\w+\.py`", listed))) <= 10
    made = []

    def note(kind, make):
        def noted(self, *args, **options):
            if kind not in made:
                made.append(kind)
            make(self, *args, **options)

        return noted

    for file, kind in steps:
        found = getattr(importlib.import_module(f"curry_train.plan.{file}"), kind)
        monkeypatch.setattr(found, "__init__", note(kind, found.__init__))
    plan(net(32, 32), 2**30, device="rtx4090", without=("sac",), chunked_loss=False)
    assert made == [kind for _, kind in steps]


# Neighbouring blocks that are run in different ways are still the same training.


# One case, whose plain training is kept.
CASE = Case(mlp(depth=4, width=32))
OPTIONS = {
    "full": Option("full"),
    "regions": Option("regions"),
    "sac": Option("sac", frozenset({("matmul", 0)})),
    "offload": Option("offload"),
}


@pytest.mark.parametrize("pair", list(itertools.permutations(OPTIONS, 2)), ids="-".join)
def test_alternating_options_leave_the_training_unchanged(pair):
    """Cover regions that could rebuild the last activation of the previous `mlp` block."""

    def apply(model, sample):
        chosen = {block: OPTIONS[pair[place % 2]] for place, block in enumerate(find_blocks(model))}
        return apply_options(model, chosen)

    _, _, hint = same_training(CASE, apply)
    assert not hint
