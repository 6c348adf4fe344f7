"""Symptoms of recompute on two ranks: reproduced, cured, and not cured by the wrong fix.

python -m pytest tests/skills/test_symptoms_recompute_ranks.py
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from symptoms import blocks, linear, mean_square, rows, seeded, symptom
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from curry_train.gates.two_ranks import GradientSyncs, run_on_ranks
from curry_train.primitives.recompute import Recompute, recompute_blocks
from curry_train.primitives.segments import recompute_segments


def every_gradient(model, batch):
    model.zero_grad()
    mean_square(model, batch).backward()
    return [
        getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for p in model.parameters()
        if p.grad is not None
    ]


def equal(gradients, others):
    return all(map(torch.equal, gradients, others)) and len(gradients) == len(others)


def plainly(block, x):
    return block(x)


def reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


class Shared(nn.Module):
    """A model with a block that runs several times, and an unused layer."""

    def __init__(self, run, *, times):
        super().__init__()
        self.stem, self.block, self.unused = linear(), nn.Sequential(linear(), nn.GELU()), linear()
        self.run, self.times = run, times

    def forward(self, x):
        x = self.stem(x)
        for _ in range(self.times):
            x = self.run(self.block, x)
        return x


def ready_once():
    """Return DDP's message for each setting, and whether gradients equal those without it."""
    batch, results = rows().chunk(2)[dist.get_rank()], []
    settings = [
        (2, {}),
        (2, {"find_unused_parameters": True}),
        (1, {"find_unused_parameters": True}),
    ]
    for times, options in [*settings, (2, {"static_graph": True})]:
        models = [seeded(Shared, run, times=times) for run in (plainly, reentrant, plainly)]
        models[2].block = Recompute(models[2].block)
        gradients = []
        for model in models:
            if not options:
                model.unused = None
            try:
                gradients.append(every_gradient(DistributedDataParallel(model, **options), batch))
            except RuntimeError as error:
                gradients.append(str(error))
        plain, theirs, ours = gradients
        results.append(
            [theirs if isinstance(theirs, str) else equal(plain, theirs), equal(plain, ours)]
        )
    return results


@symptom("DDP: `Expected to mark a variable ready only once`")
def test_ddp_counts_what_reentrant_checkpointing_uses_twice():
    for rank in run_on_ranks(f"{__file__}:ready_once"):
        *errors, static_graph = rank
        for error, cured in errors:
            assert error.startswith("Expected to mark a variable ready only once")
            assert cured
        assert static_graph == [True, True]


def shard(model, mesh):
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def orders():
    build, mesh = partial(blocks, linear, nn.GELU, depth=3), init_device_mesh("cpu", (2,))
    batch = rows().chunk(2)[dist.get_rank()]
    # The refused order, and one that looks alike: a second model, which bypasses DDP.
    wrapped = DistributedDataParallel(build())
    with pytest.raises(ValueError, match="wrap the blocks before DistributedDataParallel"):
        Recompute(wrapped)
    gathered = [None, None]
    dist.all_gather_object(gathered, every_gradient(Recompute(wrapped.module), batch)[0])
    # The order to keep, against DDP without recompute, and against one rank with the whole batch.
    plain, found, collectives = every_gradient(DistributedDataParallel(build()), batch), {}, {}
    techniques = {
        "none": list,
        "blocks": recompute_blocks,
        "segments": partial(recompute_segments, num_segments=2),
    }
    for name, technique in techniques.items():
        for kind in ("ddp", "fsdp2"):
            model = build()
            technique(model)
            wrapped = DistributedDataParallel(model) if kind == "ddp" else shard(model, mesh)
            with GradientSyncs() as syncs:
                found[f"{kind} {name}"] = equal(every_gradient(wrapped, batch), plain)
            collectives.setdefault(kind, set()).add(syncs.num_calls)
    sharded_first = shard(build(), mesh)
    recompute_blocks(sharded_first)
    found["fsdp2 first"] = equal(every_gradient(sharded_first, batch), plain)
    one = every_gradient(build(), rows())
    return {
        "beside is synced": torch.equal(*gathered),
        "differ": [name for name, same in found.items() if not same],
        # The mean over two ranks adds in another order, so the last bits differ.
        "as one rank": all(
            torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(one, plain, strict=True)
        ),
        "counts of collectives": [len(counts) for counts in collectives.values()],
    }


@symptom("`wrap the blocks before DistributedDataParallel`")
def test_the_order_is_recompute_and_then_ddp_or_fsdp2():
    for found in run_on_ranks(f"{__file__}:orders"):
        assert found == {
            "beside is synced": False,
            "differ": [],
            "as one rank": True,
            "counts of collectives": [1, 1],  # the same with recompute as without
        }
