"""Models with experts on several ranks, for predicted ranks and for real processes."""

import functools

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from curry_train.plan import Sharding
from curry_train.plan.rank_step import EvenRouting
from ranks import Configuration, make_program, mesh_of, peak_of_running_rank

from ..plan_models import squares
from ..toy_steps import feed_forward

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


def measure(name, batch_size):
    """Measure a program by name, with an even routing, in this rank."""
    workload, sharding = program(name)
    one = Configuration(workload=lambda: workload, batch_size=batch_size)
    make = functools.partial(make_program, one, sharding, mesh_of(tuple(sharding.mesh.items())))
    with EvenRouting():
        return peak_of_running_rank(make, repeats=3)
