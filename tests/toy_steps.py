"""Models, inputs and a loss for small training steps, and comparisons of what they leave."""

import copy
import pickle

import pytest
import torch
from torch import nn

from curry_train.core.parity import compare, record_step

ON_DEVICES = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)


def activated(width, activation=nn.GELU):
    return nn.Sequential(nn.Linear(width, width), activation())


def feed_forward(width, hidden):
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def stacked(block, number):
    return nn.Sequential(*(block() for _ in range(number)))


def seeded_stack(block, number=3):
    """Return blocks in a row, with the same weights each time."""
    torch.manual_seed(0)
    return stacked(block, number)


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def copies_of(model):
    """Return the model itself, a deep copy, and one that was pickled."""
    return model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))


def in_bfloat16(loss):
    """Return a loss that is computed under autocast."""

    def autocast(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    return autocast


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


def all_equal(tensors, others):
    """Return whether tensors have the same values and dtypes, one by one."""
    return all(
        one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(tensors, others, strict=True)
    )


def square_sum(model, batch):
    return model(batch).square().sum()


def require_same_step(plain, changed, batch, loss=square_sum):
    """Fail unless a step of both models has the same results, to the bit."""
    found = compare(*(record_step(model, batch, loss) for model in (plain, changed)))
    assert found.bit_equal, found.describe()
