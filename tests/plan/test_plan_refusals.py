"""Plans as files, models that cannot be planned, and errors for what does not fit.

python -m pytest tests/plan/test_plan_refusals.py
"""

import functools
import json

import pytest
from torch import nn

from curry_train.core.blocks import Derived
from curry_train.plan import Infeasible, Plan, PlanMismatch, Planner, Sharding, find_profile, plan
from curry_train.plan.saved import Option, apply_options

from ..command_runs import flat, read_json, require_narrow
from ..plan_models import Net, net, squares

WIDTHS = 64, 256, 64, 256


@functools.cache
def half():
    """Make a plan for half of the bytes that recompute can save."""
    with Planner(net(*WIDTHS), without=("sac", "regions"), chunked_loss=False) as planner:
        plain = planner.plan(2**40, global_batch=8, microbatch=8).peak_bytes
        return planner.plan(round(0.75 * plain), global_batch=8, microbatch=8)


# Plans as files.


def test_a_plan_can_be_read_back_from_its_file(tmp_path):
    found = half()
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(found.to_json()))
    again = Plan.load(path)
    # Other settings are for the reader alone.
    others = {"candidates": [], "own": None}
    assert again.to_json() | others == read_json(path) | others
    changed = again.apply(net(*WIDTHS).build())
    assert changed == [n for n, o in found.options.items() if o.kind != "none"]
    assert (changed.microbatch, changed.steps) == (found.microbatch, found.steps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: json.dumps(data)[:100], "not a complete plan, its JSON can't be read"),
        (lambda data: "[" * 100_000, "not a complete plan, its JSON can't be read"),
        (lambda data: json.dumps([data]), "this is not a plan of version 1, its version is 'list'"),
    ],
)
def test_a_file_that_is_not_a_plan_is_refused(tmp_path, change, message):
    path = tmp_path / "plan.json"
    path.write_text(change(half().to_json()))
    with pytest.raises(ValueError, match=message):
        Plan.load(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("microbatch", -3, "microbatch of the plan is -3, which no plan has: make the plan again"),
        ("steps", 1.5, "steps of the plan is 1.5"),
        ("step_seconds", -1.0, "step_seconds of the plan is -1.0"),
        ("plain_seconds", float("nan"), "plain_seconds of the plan is nan"),
        ("fingerprint", {"blocks.0": 1}, "blocks.0 of fingerprint of the plan is 1"),
        ("settings", {"left_out": 4}, "left_out of settings of the plan is 4"),
        ("cuda", {"reserved_bytes": 1}, "allocated_bytes of cuda of the plan is None"),
        ("options", {"other": {"kind": "full"}}, "option for 'other', .* no block of the plan"),
        (
            "options",
            {"blocks.0": {"kind": "sac", "keep": [["matmul", -1]]}},
            "keep of blocks.0 of options",
        ),
        ("version", 2, "not a plan of version 1, its version is 2: make the plan again"),
        ("options", None, "options of the plan is None"),
        ("options", {"blocks.0": "full"}, "blocks.0 of options of the plan is 'full'"),
        ("options", {"blocks.0": {"kind": "most"}}, "got 'most'"),
        ("options", {"blocks.0": {"kind": "sac", "keep": [["mm", 0]]}}, "matmul; got 'mm'"),
    ],
)
def test_each_field_of_a_plan_file_is_checked(name, value, message):
    with pytest.raises(ValueError, match=message):
        Plan.from_json(half().to_json() | {name: value})


def recomputed(model):
    apply_options(model, {"blocks.3": Option("full")})
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (net(64, 256, 64).build, r"a block blocks\.3, which Net does not have"),
        (net(*WIDTHS, 64).build, r"the model has blocks\.4.*, and the plan is for no more"),
        (
            net(64, 256, 128, 256).build,
            r"block blocks\.2 has .*up.weight\[128, 32\], and .* for .*up.weight\[64, 32\]",
        ),
        (
            lambda: nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(4))}),
            "has Linear: weight.*, and the plan is for Block: ",
        ),
        (
            net(*WIDTHS, outputs=5).build,
            r"the model has last.weight\[5, 32\], and .*\[4, 32\]",
        ),
        (
            lambda: recomputed(net(*WIDTHS).build()),
            r"blocks\.3 is changed already.*as it was built",
        ),
    ],
)
def test_another_model_is_refused_with_the_first_difference_and_not_changed(make, message):
    model = make()
    before = [*map(type, model.modules())]
    with pytest.raises(PlanMismatch, match=message):
        half().apply(model)
    assert [*map(type, model.modules())] == before
    assert any(isinstance(module, Derived) for module in model.modules()) == ("changed" in message)


# Where nothing fits.


def infeasible(budget, **settings):
    with pytest.raises(Infeasible) as error:
        plan(net(64, 64), budget, global_batch=8, without=("sac", "regions"), **settings)
    text = str(error.value)
    require_narrow(text)
    return flat(text)


def test_the_message_has_the_missing_bytes_and_what_would_help():
    alone = infeasible(10_000, microbatch=8, chunked_loss=False)
    assert "that alone is over the budget, so no choice for activations helps" in alone
    assert "the loss in chunks, which was not tried" in alone
    card = infeasible(500 * 2**20, microbatch=8, device="h100", context_bytes=2**29, margin=0.25)
    assert "nothing fits 400 MiB (with a margin of 25.0%): the least peak is" in card
    assert "is in use: parameters and optimizer state, and the context of the process" in card
    assert "that alone is over the budget" in card
    ranks = infeasible(10_000, microbatch=2, sharding=Sharding("fsdp2", 4))
    assert "before any activation 30.2 KiB is in use" in ranks
    assert "2 bytes per parameter: a peak of 222 KiB" in ranks
    message = infeasible(200_000, microbatch=8)
    assert "nothing fits 195 KiB: the least peak is" in message
    assert "too much, with microbatch 8" in message
    assert "before any activation" in message
    for lever in (
        "a microbatch below 8, which was not tried",
        "several GPUs: curry-train plan --fits h100 finds how many are enough",
        "optimizer state of 2 bytes per parameter: a peak of",
    ):
        assert lever in message


# Several ranks.


def test_ranks_share_the_global_batch():
    assert Sharding("ddp", 2).microbatches(8) == [(1, 4), (2, 2), (4, 1)]
    assert Sharding("ddp", 2).microbatches(8, 2) == [(2, 2)]


# Devices, models whose shapes need values, and wrong input.


class NeedsValues(Net):
    def forward(self, x):
        if x.sum() > 1e9:
            return self.last(self.first(x))
        return super().forward(x)


def offers_offload(planner):
    """Return whether the menus offer it, as a set."""
    return {Option("offload") in menu for menu in planner.whole_steps.menus.values()}


def test_a_model_whose_shapes_need_values_is_measured_for_real_and_offers_no_offload():
    # Tensors of blocks have segments of their own in CUDA's allocator, of 16 MiB and more.
    own = squares(lambda: NeedsValues((64, 64, 64)), 16384, 8)
    h100 = find_profile("h100")
    settings = {"without": ("sac",), "chunked_loss": False, "context_bytes": 0}
    with Planner(own, device=h100, **settings) as planner:
        plain = planner.plan(2**40, global_batch=4, microbatch=4)
        assert offers_offload(planner) == {False}
        found = planner.plan(round(0.8 * plain.peak_bytes), global_batch=4, microbatch=4)
    assert "needs values" in found.settings["why_real"]
    assert plain.own in plain.candidates
    assert found.peak_bytes <= found.budget_bytes
    with Planner(net(64, 64), device=h100, **settings) as planner:
        planner.plan(2**40, global_batch=4, microbatch=4)
    assert offers_offload(planner) == {True}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan(net(64, 64), 0), "budget_bytes must be a whole number of at least 1, got 0"),
        (lambda: plan(net(64, 64), 2**30, global_batch=0), "global_batch must be .* got 0"),
        (
            lambda: plan(net(64, 64), 2**30, without=("half",)),
            r"without=\['half'\]: a block is run as one of",
        ),
        (lambda: Option("sac"), "'sac' needs keep"),
        (lambda: Option("full", frozenset({("matmul", 0)})), "other kinds take none"),
        (lambda: Sharding("ddp", 0), "ranks must be a whole number of at least 1, got 0"),
    ],
)
def test_wrong_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
