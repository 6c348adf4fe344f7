"""Savings and cost of strategies: counted figures, a row for each, table, picture, JSON.

python -m pytest tests/bench/test_savings.py
"""

import functools
import json
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from curry_train.bench.savings import SavingsRow, choose_strategies, measure_savings, search
from curry_train.cli import savings as command
from curry_train.cli.savings import savings_command, savings_table
from curry_train.core.timing import Ratio, Spread
from curry_train.primitives import STRATEGIES, Strategy, recompute_blocks
from curry_train.workloads import Case, WorkloadError

from ..command_runs import ran, read_json, require_narrow, require_picture
from ..plan_models import squares
from ..toy_steps import all_equal, feed_forward, stacked

# Blocks of two linear layers with a GELU between them.
CHAIN = squares(lambda: stacked(lambda: feed_forward(16, 64), 4), 16, name="chain")


def register(monkeypatch, name, apply):
    monkeypatch.setitem(STRATEGIES, name, Strategy(name, "planted", apply))


def detach(model, sample):
    """Cut the gradient in the middle."""
    model[2].register_forward_pre_hook(lambda module, args: (args[0].detach(),))
    return ["2"]


def refuse(model, sample):
    raise ValueError("not for this model:\n  use full")


def break_later(model, sample):
    def fail(*_):
        raise RuntimeError("\ntwo tensors disagree\nand more lines")

    model[1].register_forward_hook(fail)
    return ["1"]


def break_in_silence(model, sample):
    raise RuntimeError


# The figures.


def test_figures_of_full_recompute_are_those_that_can_be_counted():
    none, full = measure_savings(Case(CHAIN, batch_size=64), ["full"], repeats=1)
    # The input and output of each GELU, 64 floats a sample; the tensors between the blocks are
    # held with and without recompute.
    assert none.held_bytes - full.held_bytes == 4 * 64 * (64 + 64) * 4 == 131072
    assert full.modules == ["0", "1", "2", "3"]
    assert full.peak_ratio == full.peak_bytes / none.peak_bytes < 0.75
    forward = 4 * 2 * 64 * (16 * 64 + 64 * 16)
    assert none.forward_flops == forward
    assert (
        full.recompute_flops == forward // 2
    )  # a block ends in a linear, which early stop leaves out
    assert full.recompute_ratio == 0.5
    assert (none.recompute_ratio, none.peak_ratio) == (0.0, 1.0)
    assert {row.parity for row in (none, full)} == {"bit-equal"}
    assert full.worst_error == 0.0


def test_every_registered_strategy_is_measured_and_none_comes_first(monkeypatch):
    register(monkeypatch, "halves", lambda model, sample: recompute_blocks(model, blocks="[01]"))
    rows = measure_savings(Case(CHAIN), repeats=1)
    assert [row.name for row in rows] == list(STRATEGIES)
    assert rows[-1].modules == ["0", "1"]
    refused = {row.name for row in rows if row.outcome != "measured"}
    # No loop over time, and no attention.
    assert refused == {"timesteps", "sac_attention"}
    assert [row.name for row in rows if row.stays_here] == ["offload"]
    assert all(row.held_bytes <= rows[0].held_bytes for row in rows if row.outcome == "measured")
    assert choose_strategies(["halves"]) == ["none", "halves"]


def test_weights_are_shared_and_left_as_they_were_and_so_are_the_generators(monkeypatch):
    case, seen = Case(CHAIN), []
    register(monkeypatch, "look", lambda model, sample: seen.append(model) or [])
    before = torch.get_rng_state()
    measure_savings(case, ["look", "full"], repeats=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in seen[0].parameters())
    assert all_equal(seen[0].parameters(), case.build().parameters())


@pytest.mark.parametrize(
    ("strategy", "outcome", "message", "wrong"),
    [
        (refuse, "refused", "not for this model: use full", False),
        (break_later, "failed", "RuntimeError: two tensors disagree", True),
        (break_in_silence, "failed", "RuntimeError", True),
        (detach, "measured", "", True),
    ],
)
def test_a_strategy_that_fails_gets_a_row_with_the_reason(
    monkeypatch, strategy, outcome, message, wrong
):
    register(monkeypatch, "planted", strategy)
    row = measure_savings(Case(CHAIN), ["planted"], repeats=1)[1]
    assert (row.outcome, row.why, row.is_wrong) == (outcome, message, wrong)
    assert row.parity.startswith("differs: gradient 0.0.weight") == (strategy is detach)


def not_finite():
    module = CHAIN.build()
    module[1][0].weight.data[0, 0] = float("nan")
    return module


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.BatchNorm1d(16), "batch size 1: a plain step: Expected more than 1 value"),
        # That is no fault of a strategy.
        (not_finite, "batch size 1: the loss of a plain step is nan"),
    ],
)
def test_a_model_whose_plain_step_fails_is_an_error(build, message):
    with pytest.raises(WorkloadError, match=f"chain, {message}"):
        measure_savings(Case(replace(CHAIN, build=build), batch_size=1))


def test_where_nothing_fits_each_row_says_so():
    def too_large(module, batch):
        raise torch.OutOfMemoryError

    rows = measure_savings(Case(replace(CHAIN, loss=too_large)), ["full"], repeats=1)
    assert [row.outcome for row in rows] == ["out of memory"] * 2


# The largest batch.


@given(
    st.integers(0, 500), st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 64)
)
def test_the_largest_batch_fits_and_the_next_one_does_not_for_any_growing_bytes(
    fixed, slopes, start
):
    tried = []

    def bytes_of(size):
        tried.append(size)
        return (
            sys.maxsize
            if size > 900
            else fixed + sum(slopes[step % len(slopes)] for step in range(size))
        )

    found = search(bytes_of, 1000, start=start)
    assert found == 0 or bytes_of(found) <= 1000
    assert bytes_of(found + 1) > 1000
    assert {found, found + 1} - {0} <= set(tried[:-2])
    assert max(tried) <= max(2 * start, 2 * found, 2)


# The table and the picture.


def made_row(strategy, ratio=1.0, peak=1.0, **more):
    step = Spread(1.0, 0.9, 1.2)
    times = None if strategy == "none" else Ratio(ratio, ratio - 0.1, ratio + 0.1, 0.95)
    size = int(peak * 2**20)
    values = dict(held_bytes=size, peak_bytes=size, peak_ratio=peak / 9, step=step)
    values |= dict(ratio=times, recompute_ratio=0.5, workload="net", batch_size=8)
    values |= dict(modules=["a"], parity="bit-equal", worst_error=0.0)
    return SavingsRow(strategy, **(values | more))


def test_table_fits_80_columns_and_explains_what_it_lacks():
    rows = [
        made_row("none", peak=70_000, modules=[], largest_batch=123456),
        made_row(
            "memory_budget",
            12.34,
            71_000,
            largest_batch=123456,
            parity="worst 2.0e-07",
            worst_error=2e-7,
        ),
        made_row(
            "detached",
            parity="differs: gradient layers.0.weight: differs in kind",
            worst_error=None,
        ),
        made_row("moved", stays_here=True),
        made_row("segments", outcome="refused", why="the blocks of net are no chain " * 3),
        made_row("sac", outcome="failed", why="RuntimeError: a fault"),
    ]
    assert (
        savings_table(rows, limit=2**30)
        == """\
net, batch size 8 (MiB; a step of none takes 1.00 s)
strategy      modules  held  peak of none again   time  interval   fits  parity
none                0 70000 70000 777778%   50% 1.00 s           123456   equal
memory_budget       1 71000 71000 788889%   50%  12.3x 12.2-12.4 123456   2e-07
detached            1  1.00  1.00     11%   50%  1.00x 0.90-1.10        DIFFERS
moved               1  1.00  1.00     11%   50%  1.00x 0.90-1.10          equal
detached changes the training; differs: gradient layers.0.weight: differs in
    kind
moved moves activations within this machine: no win on a CPU, and not drawn
segments refused: the blocks of net are no chain the blocks of net are no chain
    the blocks of net are no chain
sac failed: RuntimeError: a fault

of none: peak of forward and backward, gradients included, relative to none
again: FLOPs recomputed in backward, relative to one forward
time: median ratio to none in the same round; interval: 95% of that median
fits: the largest batch whose step, parameters included, fits 1.00 GiB"""
    )
    short = savings_table(rows)
    assert "fits" not in short
    require_narrow(short)


# The command.


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return functools.partial(ran, "--out out --repeats 1", command=savings_command)


def test_an_interrupted_measurement_leaves_no_folder(run, tmp_path, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure_savings", interrupted)
    run("--model mlp", status=130)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    run("--model mlp", status=130)
    assert (tmp_path / "out").is_dir()


def test_command_measures_every_model_depth_and_size(run, monkeypatch):
    register(monkeypatch, "planted", lambda model, sample: recompute_blocks(model))
    ended = run(
        "--model mlp --depth 2,3 --batch-size 1 --batch-size 4",
        "--strategy full --strategy planted",
    )
    require_narrow(ended.output)
    assert "mlp, depth 3, batch size 4 (MiB; a step of none takes" in ended.output
    data = read_json("out/savings.json")
    assert {"command", "device", "dtype", "seed", "repeats"} <= set(data)
    rows = data["rows"]
    assert len(rows) == 2 * 2 * 3
    assert {row["outcome"] for row in rows} == {"measured"}
    depths = {row["depth"]: len(row["modules"]) for row in rows if row["name"] == "full"}
    assert depths == {2: 2, 3: 3}
    require_picture("out/savings.png")


def test_models_of_the_same_name_have_their_own_blocks(run, tmp_path, monkeypatch):
    for name in ("wide", "narrow"):
        (tmp_path / f"{name}.py").write_text(
            "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            f"        self.{name} = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])\n\n"
            f"    def forward(self, x):\n        return self.{name}(x)\n\n\n"
            "def build():\n    return Net(), torch.randn(4, 8)\n"
        )
    cases = []
    monkeypatch.setattr(command, "measure_savings", lambda case, *_, **__: cases.append(case) or [])
    run("--model wide.py:build --model narrow.py:build")
    first, second = cases
    assert [case.workload.name for case in cases] == ["wide.py:build", "narrow.py:build"]
    assert "wide" in str(first.blocks)
    assert "narrow" in str(second.blocks)


def test_command_takes_a_factory_and_a_limit_and_writes_pure_json(run, tmp_path):
    (tmp_path / "their_net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def block(): return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))\n"
        "def build(): return nn.Sequential(*[block() for _ in range(4)]), torch.randn(4, 8)\n"
    )
    ended = run("--model their_net:build --strategy full --limit 1MiB --blocks [01] --json -")
    none, full = json.loads(ended.stdout)["rows"]
    assert full["modules"] == ["0", "1"]
    assert full["largest_batch"] > none["largest_batch"] > 100
    assert "fits 1.00 MiB" in ended.stderr


def test_a_strategy_that_changes_the_training_ends_with_status_1(run, monkeypatch):
    register(monkeypatch, "planted", detach)
    monkeypatch.setattr(command, "load_that_fits", lambda spec, make_case: make_case(CHAIN))
    assert "planted" in run("--strategy planted", status=1).output
