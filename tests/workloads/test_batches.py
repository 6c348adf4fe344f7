"""Batches and parameters of every common kind are taken as they are, or refused in one line.

python -m pytest tests/workloads/test_batches.py
"""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from curry_train.workloads import Case, Workload
from curry_train.workloads.workload import batch_size, map_tensors, take

Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclass
class Sample:
    inputs: torch.Tensor
    name: str


@dataclass(frozen=True)
class Frozen:
    inputs: torch.Tensor


class Movable:
    """A container with `to`, as graph libraries have; it can't be cut into samples."""

    def __init__(self, inputs):
        self.inputs = inputs

    def to(self, device, dtype=None):
        return Movable(self.inputs.to(device, dtype))


INPUTS = torch.arange(12.0).reshape(4, 3)


@pytest.mark.parametrize(
    "batch",
    [
        Pair(INPUTS, INPUTS + 1),
        Sample(INPUTS, "words"),
        Frozen(INPUTS),
        OrderedDict(inputs=INPUTS, name="words"),
        [INPUTS, (INPUTS, {"more": INPUTS})],
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_container_keeps_its_type_and_is_cut_by_samples(batch):
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert type(doubled) is type(batch)
    assert batch_size(batch) == 4
    half = take(batch, slice(1, 3))
    assert type(half) is type(batch)
    found = []
    map_tensors(half, found.append)
    assert all(torch.equal(tensor - tensor[0, 0], INPUTS[1:3] - INPUTS[1, 0]) for tensor in found)


@pytest.mark.parametrize(
    "batch", [pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]), Movable(INPUTS)]
)
def test_what_can_not_be_cut_is_refused_with_its_type(batch):
    with pytest.raises(ValueError, match=rf"{type(batch).__name__} can't be divided into samples"):
        take(batch, slice(0, 1))


class Complex(nn.Module):
    """Complex weights, as Fourier and state-space layers have."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return torch.fft.ifft(torch.fft.fft(x) * self.weight).real * self.scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_complex_parameters_stay_complex(dtype):
    workload = Workload(
        "complex",
        Complex,
        lambda size: torch.randn(size, 3),
        lambda module, batch: module(batch.float()).square().sum(),
    )
    module = Case(workload, dtype=dtype).build()
    assert module.weight.dtype is torch.complex64
    assert module.scale.dtype is dtype
