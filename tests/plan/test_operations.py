"""Storages of torch's operations, forward and backward: on shapes as they are with values.

python -m pytest tests/plan/test_operations.py            # those whose outputs are corrected
python -m pytest tests/plan/test_operations.py -m long    # all of torch's own database
"""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from curry_train.core.measure import LiveStorages
from curry_train.plan.shapes import NEEDS_VALUES_ERRORS, pretended

DIFFERENT = {
    "to_sparse": "a sparse tensor has no storage of its own",
    "bfloat16": "torch's meta kernel loses channels-last where a scalar's gradient is multiplied",
    "half": "the same in half precision",
    "nn.functional.embedding_bag": "an estimate from shapes refuses its kernel",
}
NUM_SAMPLES = 6

# Broadcast targets and deprecated operations warn.
pytestmark = pytest.mark.filterwarnings("ignore")


class Trace(LiveStorages):
    """Record each operation with the bytes alive after it."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def run(self, func, args, kwargs):
        out = super().run(func, args, kwargs)
        self.operations.append((str(func), self.bytes_alive))
        return out


def trace(function, args, kwargs):
    with Trace() as traced:
        out = function(*args, **kwargs)
        outputs = [o for o in tree_leaves(out) if isinstance(o, Tensor) and o.requires_grad]
        if outputs:
            sum(o.abs().sum() for o in outputs).backward()
    return traced.operations


def copied(value):
    return value.detach().clone().requires_grad_(value.requires_grad)


def without_values(value):
    if not value.is_floating_point():
        return value  # integers of a batch keep their values in a plan too
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.requires_grad_(value.requires_grad)


def on_tensors(convert, values):
    return tree_map(lambda value: convert(value) if isinstance(value, Tensor) else value, values)


def compare(function, args, kwargs):
    """Return the first operations whose bytes differ, or None.

    On shapes torch may do the same in other operations; then the peaks are compared.
    """
    args, kwargs = on_tensors(copied, (args, kwargs))
    real = trace(function, *on_tensors(copied, (args, kwargs)))
    with pretended():
        pretended_ones = trace(function, *on_tensors(without_values, (args, kwargs)))
    if [name for name, _ in real] != [name for name, _ in pretended_ones]:
        peaks = [max(alive for _, alive in operations) for operations in (real, pretended_ones)]
        return peaks if peaks[0] != peaks[1] else None
    return next((pair for pair in zip(real, pretended_ones, strict=True) if len({*pair}) > 1), None)


LOSSES = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft_margin": F.soft_margin_loss,
    "bce": lambda x, y, **how: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **how),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_the_storage_of_its_kernel(name, reduction):
    x = torch.randn(4, 7, 5, requires_grad=True)
    kwargs = {"reduction": reduction}
    assert compare(LOSSES[name], (x, torch.randn(4, 7, 5)), kwargs) is None
    if name in ("mse", "smooth_l1", "huber"):
        assert compare(LOSSES[name], (x, torch.randn(7, 1)), kwargs) is None


def test_every_operation_of_the_database_has_the_storages_that_shapes_give():
    from torch.testing._internal.common_methods_invocations import op_db

    different = {}
    num_compared = 0
    for operation in op_db:
        if torch.float32 not in operation.dtypes or operation.name.startswith("jiterator"):
            continue  # jiterator compiles kernels for CUDA alone
        samples = operation.sample_inputs(
            "cpu", torch.float32, requires_grad=operation.supports_autograd
        )
        for sample in itertools.islice(samples, NUM_SAMPLES):
            values = (sample.input, *sample.args)
            if any(not t.numel() for t in tree_leaves(values) if isinstance(t, Tensor)):
                continue
            try:
                found = compare(operation.op, values, sample.kwargs)
            except (RuntimeError, *NEEDS_VALUES_ERRORS):
                continue  # measured for real: its shapes need values, or this CPU has no kernel
            num_compared += 1
            if found and operation.name not in DIFFERENT:
                different[operation.name] = found
    print(f"{num_compared} samples compared")
    assert num_compared > 2500
    assert different == {}
