"""Where torch misstates what a kernel holds, ours is right; and torch still misstates it.

python -m pytest tests/plan/test_fake_kernels.py
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from curry_train.core.measure import operation_flops
from curry_train.plan.shapes import GROUPED_MM_OPERATION, KernelsAsTheyRun, pretended


def theirs():
    return FakeTensorMode(allow_non_fake_inputs=True)


def ours():
    return KernelsAsTheyRun(allow_non_fake_inputs=True)


def test_a_view_of_a_tensor_with_values_has_them():
    real, kinds = torch.arange(6), []
    for mode in (ours(), theirs()):
        with mode:
            kinds.append(isinstance(real.view(2, 3), FakeTensor))
    assert kinds == [False, True]


def layer_norm_gradient():
    """Of a norm before a convolution, which takes channels first."""
    x = torch.ones(4, 6, 8)
    weight = torch.ones(8)
    mean = torch.zeros(4, 6, 1)
    call, gradient = (
        torch.ops.aten.native_layer_norm_backward.default,
        torch.ones(4, 8, 6).transpose(1, 2),
    )
    return call(gradient, x, [8], mean, mean, weight, weight, [True, True, True])[0].stride()


def test_the_backward_of_layer_norm_is_contiguous():
    strides = [layer_norm_gradient()]
    for make in (ours, theirs):
        with make():
            strides.append(layer_norm_gradient())
    assert strides[0] == strides[1] != strides[2]


@pytest.mark.parametrize("dims", [(2, 3), (2, 2), (3, 2), (3, 3)])
def test_products_of_groups_are_there_in_float32_as_the_cpu_has_them(dims):
    ends = torch.tensor([8, 16], dtype=torch.int32)
    a = torch.randn(*([2] if dims[0] == 3 else []), 16, 16)
    b = torch.randn(*([2] if dims[1] == 3 else []), 16, 16)
    given = None if dims == (3, 3) else ends
    real = GROUPED_MM_OPERATION(a, b, given)
    with ours() as mode:
        fake = GROUPED_MM_OPERATION(mode.from_tensor(a), mode.from_tensor(b), given)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    with theirs() as mode, pytest.raises(RuntimeError):
        GROUPED_MM_OPERATION(mode.from_tensor(a), mode.from_tensor(b), given)
    assert operation_flops(GROUPED_MM_OPERATION, (a, b), {}, real) == 2 * 16**3 * (
        2 if dims == (3, 3) else 1
    )


def test_weights_that_are_drawn_until_they_fit_need_no_values():
    def build():
        layer = nn.Linear(4, 4)
        nn.init.trunc_normal_(layer.weight)
        return layer

    with pretended():
        assert isinstance(build().weight, nn.Parameter)
    assert build().weight.abs().max() <= 2


@pytest.mark.parametrize("dtype", [bool, int])
def test_dtypes_may_be_written_as_python_has_them(dtype):
    with pretended():
        assert not isinstance(torch.ones(2, dtype=dtype), FakeTensor)
