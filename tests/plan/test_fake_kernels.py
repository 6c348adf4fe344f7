"""Correct the kernels whose bytes torch misstates, and check that it still does.

python -m pytest tests/plan/test_fake_kernels.py
"""

import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from curry_train.core.measure import LiveStorages, OperationMode, operation_flops
from curry_train.plan.shapes import GROUPED_MM_OPERATION, KernelsAsTheyRun, pretended


class Theirs(KernelsAsTheyRun):
    """Torch's own mode."""

    dispatch = FakeTensorMode.dispatch


def test_a_view_of_a_tensor_with_values_has_them():
    real, kinds = torch.arange(6), []
    for mode in (KernelsAsTheyRun(), Theirs()):
        with mode:
            kinds.append(isinstance(real.view(2, 3), FakeTensor))
    assert kinds == [False, True]


def layer_norm_gradient():
    """Run the backward of a norm before a convolution, which has channels first."""
    x = torch.ones(4, 6, 8)
    weight = torch.ones(8)
    mean = torch.zeros(4, 6, 1)
    call = torch.ops.aten.native_layer_norm_backward.default
    gradient = torch.ones(4, 8, 6).transpose(1, 2)
    return call(gradient, x, [8], mean, mean, weight, weight, [True, True, True])[0].stride()


def test_the_backward_of_layer_norm_is_contiguous():
    strides = [layer_norm_gradient()]
    for make in (KernelsAsTheyRun, Theirs):
        with make():
            strides.append(layer_norm_gradient())
    assert strides[0] == strides[1] != strides[2]


@pytest.mark.parametrize("dims", [(2, 3), (2, 2), (3, 2), (3, 3)])
def test_grouped_products_work_in_float32_as_on_the_cpu(dims):
    ends = torch.tensor([8, 16], dtype=torch.int32)
    a = torch.randn(*([2] if dims[0] == 3 else []), 16, 16)
    b = torch.randn(*([2] if dims[1] == 3 else []), 16, 16)
    given = None if dims == (3, 3) else ends
    real = GROUPED_MM_OPERATION(a, b, given)
    with KernelsAsTheyRun() as mode:
        fake = GROUPED_MM_OPERATION(mode.from_tensor(a), mode.from_tensor(b), given)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    with Theirs() as mode, pytest.raises(RuntimeError):
        GROUPED_MM_OPERATION(mode.from_tensor(a), mode.from_tensor(b), given)
    assert operation_flops(GROUPED_MM_OPERATION, (a, b), {}, real) == 2 * 16**3 * (
        2 if dims == (3, 3) else 1
    )


def test_weights_drawn_by_rejection_need_no_values():
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


class NormOutputs(OperationMode):
    """Record shape, stride and dtype of what each norm kernel returns."""

    def __init__(self):
        super().__init__()
        self.made = []

    def run(self, func, args, kwargs):
        out = func(*args, **kwargs)
        if "norm" in str(func):
            self.made += [
                None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype)
                for tensor in out
            ]
        return out


def transposed(*shape):
    """Make a tensor whose second and third dimension are swapped in memory."""
    return torch.randn(shape[0], shape[2], shape[1], *shape[3:]).transpose(1, 2)


NORM_INPUTS = {
    "3d transposed": lambda: transposed(4, 6, 5),
    "4d transposed": lambda: transposed(4, 6, 5, 3),
    "4d channels last": lambda: torch.randn(4, 6, 5, 3).to(memory_format=torch.channels_last),
    "5d channels last": lambda: torch.randn(2, 6, 5, 3, 4).to(memory_format=torch.channels_last_3d),
}


def run_norms(make, dtype, *, affine, training):
    """Run each norm forward and backward, with float32 parameters; return the kernels' outputs."""
    with NormOutputs() as outputs:
        for norm in ("batch", "group", "layer"):
            x = make().to(dtype).requires_grad_()
            size = x.shape[-1] if norm == "layer" else 6
            weight = torch.ones(size, requires_grad=True) if affine else None
            bias = torch.zeros(size, requires_grad=True) if affine else None
            if norm == "batch":
                y = F.batch_norm(x, torch.zeros(6), torch.ones(6), weight, bias, training)
            elif norm == "group":
                y = F.group_norm(x, 2, weight, bias)
            else:
                y = F.layer_norm(x, [size], weight, bias)
            y.backward(torch.ones(y.shape, dtype=y.dtype))
    return outputs.made


@pytest.mark.parametrize("make", NORM_INPUTS.values(), ids=NORM_INPUTS)
def test_norms_have_the_layout_and_dtypes_of_the_real_kernels(make):
    """Batch norm of a transposed tensor is contiguous; statistics of half precision are float32."""
    num_wrong = 0
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, is_full in itertools.product(dtypes, (True, False)):
        options = {"affine": is_full, "training": is_full}
        real = run_norms(make, dtype, **options)
        with pretended():
            assert run_norms(make, dtype, **options) == real, (dtype, options)
        with pretended(mode=Theirs()):
            num_wrong += run_norms(make, dtype, **options) != real
    assert num_wrong > 0, "torch states the outputs of norms correctly now: drop the correction"


def vectors(run):
    """Call a function of a weight and a vector."""
    return lambda weight, x: run(weight, x[0])


HALF_ON_CUDA = {
    "einsum": lambda weight, x: torch.einsum("bi,oi->bo", x, weight),
    "mv": vectors(torch.mv),
    "addmv": vectors(lambda weight, x: torch.addmv(x, weight, x)),
    "multi_dot": lambda weight, x: torch.linalg.multi_dot([x, weight, weight]),
    "prelu": lambda weight, x: F.prelu(x, weight[0]),
}


@pytest.mark.parametrize("run", HALF_ON_CUDA.values(), ids=HALF_ON_CUDA)
def test_autocast_of_cuda_runs_products_in_half_precision(run):
    with pretended(kernels="cuda"), torch.autocast("cuda", torch.bfloat16):
        assert run(nn.Parameter(torch.empty(8, 8)), torch.empty(4, 8)).dtype is torch.bfloat16


@pytest.mark.parametrize("cached", [True, False])
def test_autocast_of_cuda_converts_a_weight_once_and_keeps_it_until_it_ends(cached):
    size = 64
    with pretended(kernels="cuda"), torch.no_grad(), LiveStorages() as storages:
        weight = nn.Parameter(torch.empty(size, size))
        x = torch.empty(4, size)
        before = storages.bytes_alive
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=cached):
            for _ in range(3):
                torch.einsum("bi,oi->bo", x, weight)
            with torch.autocast("cuda", enabled=False):
                pass
            kept = storages.bytes_alive - before
        assert storages.bytes_alive == before
    assert kept == (2 * size * size if cached else 0)
