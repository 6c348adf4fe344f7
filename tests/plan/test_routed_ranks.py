"""Ranks with experts peak as real processes do, with tokens that are spread evenly.

python -m pytest tests/plan/test_routed_ranks.py
"""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from curry_train.plan import Sharding, Sketch
from curry_train.plan.rank_step import EvenRouting
from ranks import Configuration, make_program, mesh_of, peak_of_running_rank

from ..plan_models import estimated, squares
from ..rank_calls import run_on_ranks
from ..toy_steps import feed_forward

# Models with experts on several ranks, for predicted ranks and for real processes.

WIDTH = 16
NUM_EXPERTS = 4
CHOSEN = 2


class MoeBlock(nn.Module):
    """A block whose tokens go to two of four experts."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = nn.ModuleList(feed_forward(WIDTH, 8 * WIDTH) for _ in range(NUM_EXPERTS))
        self.counts = []

    def forward(self, x):
        scores, chosen = torch.topk(self.router(x).softmax(-1), CHOSEN, dim=-1)
        out = torch.zeros_like(x)
        self.counts = []
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            self.counts.append(len(rows))
            out = out.index_add(0, rows, expert(x[rows]) * scores[rows, places, None])
        return x + out


def moe_net(block=MoeBlock):
    return nn.Sequential(block(), block())


class SharedBlock(MoeBlock):
    """A block whose experts are on several ranks, once `share_experts` has divided them."""

    group = None
    is_functional = True

    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        scores, chosen = torch.topk(self.router(x).softmax(-1), CHOSEN, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS)
        arriving = self.exchange(counts)
        size = self.group.size()
        sent = counts.view(size, -1).sum(1).tolist()
        received = arriving.view(size, -1).sum(1).tolist()
        swap = functional.all_to_all_single_autograd
        rows = swap(x[order // CHOSEN], received, sent, self.group)
        numbers = torch.arange(len(self.experts)).repeat(size).repeat_interleave(arriving)
        back = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = torch.where(numbers == number)[0]
            back = back.index_add(0, mine, expert(rows[mine]))
        out = swap(back, sent, received, self.group) * scores.flatten()[order][:, None]
        return x + torch.zeros_like(x).index_add(0, order // CHOSEN, out)

    def exchange(self, counts):
        if self.is_functional:
            return functional.wait_tensor(
                functional.all_to_all_single(counts, None, None, self.group)
            )
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        return arriving


class CallingBlock(SharedBlock):
    """The same, with torch's call that writes into a tensor."""

    is_functional = False


def share_experts(model, mesh):
    """Leave each rank its own experts."""
    sharing = mesh["ep"]
    each = NUM_EXPERTS // sharing.size()
    first = sharing.get_local_rank() * each
    for block in model:
        block.group = sharing.get_group()
        block.experts = nn.ModuleList([*block.experts][first : first + each])


def routed(build=moe_net):
    return squares(build, WIDTH)


def program(name, *, rank=0):
    """Return the workload of a program on two ranks, and its sharding."""
    if name == "fsdp2":
        return routed(), Sharding("fsdp2", 2, rank=rank)
    block = {"shared": SharedBlock, "shared, called": CallingBlock}[name]
    return routed(lambda: moe_net(block)), Sharding(share_experts, mesh={"ep": 2}, rank=rank)


# Peaks.

# The second one does not divide evenly among four experts.
BATCH_SIZES = (64, 33)
ROUTED = ["fsdp2", "shared", "shared, called"]


@pytest.fixture(scope="module")
def real():
    """Measure real ranks on gloo."""
    return run_on_ranks(f"{Path(__file__).resolve()}:measure_real")


def measure(name, batch_size):
    """Measure a program by name, with an even routing, in this rank."""
    workload, sharding = program(name)
    one = Configuration(workload=lambda: workload, batch_size=batch_size)
    make = functools.partial(make_program, one, sharding, mesh_of(tuple(sharding.mesh.items())))
    with EvenRouting():
        return peak_of_running_rank(make, repeats=3)


def measure_real():
    return {name: [measure(name, batch_size) for batch_size in BATCH_SIZES] for name in ROUTED}


@pytest.mark.parametrize("name", ROUTED)
def test_a_rank_with_experts_peaks_as_a_real_process_with_an_even_routing(real, name):
    workload, sharding = program(name, rank=1)
    with Sketch(workload, sharding=sharding) as sketch:
        found = [sketch.step(batch_size).peak_bytes for batch_size in BATCH_SIZES]
    assert found == real[1][name]


def test_tokens_are_spread_evenly():
    model = moe_net()
    with EvenRouting():
        with torch.no_grad():
            model(torch.randn(16, WIDTH))
        assert [block.counts for block in model] == 2 * [[8, 8, 8, 8]]
        model(torch.randn(32, WIDTH)).sum().backward()
    assert [block.counts for block in model] == 2 * [[16, 16, 16, 16]]
    # The scores are the model's own, so the router is trained.
    assert model[0].router.weight.grad.abs().sum() > 0


def test_a_rank_whose_shapes_depend_on_other_values_is_refused_in_one_line():
    def positive(module, batch):
        rows = module(batch)
        return rows[rows[:, 0] > 0].square().sum()

    workload = replace(routed(), loss=positive)
    with pytest.raises(ValueError, match=r"from shapes alone: aten\.nonzero"):
        estimated(workload, 4, sharding=Sharding("fsdp2", 2))


def late(model, mesh):
    model.register_forward_hook(lambda module, inputs, rows: rows[rows[:, 0] > 0])


def test_values_that_only_the_wrapped_model_needs_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"from shapes alone: aten\.nonzero") as refused:
        estimated(routed(), 4, sharding=Sharding(late, 2))
    assert len(str(refused.value).splitlines()) == 1
