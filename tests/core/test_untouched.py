"""Restore generators, also CUDA's where CUDA tensors are simulated without values.

python -m pytest tests/core/test_untouched.py
"""

import contextlib

import pytest
import torch
from torch import nn

from curry_train.core.generators import generators_kept, seeded
from curry_train.plan.shapes import KERNEL_DEVICES, pretended
from curry_train.primitives import regions


@pytest.mark.parametrize("kernels", [None, *KERNEL_DEVICES])
def test_cuda_generators_are_restored_also_where_cuda_is_mapped_to_the_cpu(
    kernels, cuda_generators
):
    with pretended(kernels=kernels) if kernels else contextlib.nullcontext():
        with seeded(7):
            assert cuda_generators == {0: 7, 1: 7}
            if kernels:
                assert (
                    torch.empty(1, device="cuda").device.type == "cpu"
                )  # CUDA is still mapped to the CPU
        assert cuda_generators == {0: 3, 1: 5}
        with contextlib.suppress(KeyError), generators_kept():
            cuda_generators[1] = 9
            raise KeyError
        assert cuda_generators == {0: 3, 1: 5}


def test_a_module_uses_no_cuda_generator_where_cuda_is_mapped_to_the_cpu(cuda_generators):
    with pretended():
        assert len(regions.generator_states(nn.Linear(2, 2, device="cuda"))) == 1
