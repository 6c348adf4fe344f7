"""Count the FLOPs and the moved bytes of an operation, as plans do.

python -m pytest tests/plan/test_operation_cost.py
"""

import torch

from curry_train.plan.record import operation_cost

aten = torch.ops.aten


def cost(function, *args, **kwargs):
    return operation_cost(function, args, kwargs, function(*args, **kwargs))


def test_flops_and_bytes_of_an_operation():
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    assert cost(aten.mm.default, a, b) == (2 * 8 * 16 * 4, 4 * (8 * 16 + 16 * 4 + 8 * 4))
    assert cost(aten.add.Tensor, a, a) == (0, 2 * a.nbytes)  # one tensor is read once
    assert cost(aten.expand.default, a[:1], [8, 16]) == (0, 0)  # a view
    assert cost(aten.mul_.Tensor, a, a.clone()) == (0, 2 * a.nbytes)
    assert cost(aten._foreach_add_.Scalar, [a, b], 1.0) == (0, a.nbytes + b.nbytes)
    assert cost(aten.add.Tensor, torch.eye(4).to_sparse(), torch.eye(4).to_sparse())[1] > 0
