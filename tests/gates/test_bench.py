"""Gates of bench hold on models of any form, and fail on planted faults.

python -m pytest tests/gates/test_bench.py
"""

import gc
import random
from dataclasses import replace

import pytest
import torch
from saboteurs import CASES, faults
from torch import nn

from curry_train.gates.bench import GATES
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload
from curry_train.workloads.workload import Case, Workload


def squares(model, x):
    return model(x).square().sum()


FLAT = Workload("flat", lambda: nn.Linear(8, 8), lambda size: torch.randn(size, 8), squares)


class Dropping(nn.Module):
    """Runs each layer with a probability of a half."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            if self.draw() < 0.5:
                x = x + layer(x)
        return x + self.layers[0](x)


class Rows:
    """A batch that nobody can divide."""

    def __init__(self, x):
        self.x = x

    def to(self, *to):
        return Rows(self.x.to(*to))


def slope(model, x):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(squares(model, x), x, create_graph=True)
    return gradient.square().sum()


def compiled():
    return torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend="eager")


# A case, and the gates that may not apply to it.
FORMS = {
    "dropout": (Case(CASES["dropout"]), ()),
    "bfloat16": (Case(CASES["dropout"], dtype=torch.bfloat16), ()),
    "one sample": (Case(FLAT, batch_size=1), ()),
    "no products": (Case(replace(FLAT, build=lambda: nn.LayerNorm(8))), ("flops",)),
    "a loss with derivatives": (Case(replace(FLAT, loss=slope)), ()),
    "a class of batches": (
        Case(
            replace(
                FLAT, batch=lambda n: Rows(torch.randn(n, 8)), loss=lambda m, b: squares(m, b.x)
            )
        ),
        (),
    ),
    "data parallel": (Case(replace(FLAT, build=lambda: nn.DataParallel(nn.Linear(8, 8)))), ()),
    "compiled": (Case(replace(FLAT, build=compiled)), ("peak",)),
    "layers dropped by torch": (
        Case(replace(FLAT, build=lambda: Dropping(lambda: torch.rand([])))),
        ("flops", "peak"),
    ),
    "layers dropped by Python": (
        Case(replace(FLAT, build=lambda: Dropping(random.random))),
        ("flops", "peak"),
    ),
    **{name: (Case(load_workload(name)), ()) for name in BUILTIN_WORKLOADS},
}


@pytest.mark.parametrize("form", FORMS)
def test_gates_hold_on(form):
    case, without = FORMS[form]
    for gate in GATES:
        verdict = gate.run(case)
        may_not_apply = gate.name.removeprefix("bench/") in without
        assert verdict.passed or (verdict.passed is None and may_not_apply), verdict


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_hold_on_cuda(dtype):
    for gate in GATES:
        verdict = gate.run(Case(CASES["dropout"], device=torch.device("cuda"), dtype=dtype))
        assert verdict.passed, verdict


def test_gates_keep_no_tensor_of_the_case():
    def count_tensors():
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    before = count_tensors()
    for gate in GATES:
        gate.run(Case(CASES["small"]))
    assert count_tensors() <= before


@pytest.mark.parametrize("saboteur", faults("faulty_bench"), ids=str)
def test_a_gate_catches(saboteur):
    saboteur.check()
