"""A symptom of recompute on two ranks: reproduced, cured, not cured by the wrong fix.

python -m pytest tests/skills/test_symptoms_recompute_ranks.py
"""

import pytest
import torch
import torch.distributed as dist
from symptoms import linear, mean_square, rows, seeded, symptom
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from curry_train.gates.two_ranks import run_on_ranks
from curry_train.primitives.recompute import Recompute


def every_gradient(model, batch):
    model.zero_grad()
    mean_square(model, batch).backward()
    return [
        getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for p in model.parameters()
        if p.grad is not None
    ]


def same_gradients(gradients, others):
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
            [
                theirs if isinstance(theirs, str) else same_gradients(plain, theirs),
                same_gradients(plain, ours),
            ]
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


def wrapping_around_ddp():
    wrapped = DistributedDataParallel(seeded(linear))
    with pytest.raises(ValueError, match="wrap the blocks before DistributedDataParallel"):
        Recompute(wrapped)


def test_recompute_around_ddp_is_refused():
    run_on_ranks(f"{__file__}:wrapping_around_ddp")
