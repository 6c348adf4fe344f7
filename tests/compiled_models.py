"""Small models for tests of compiled code; each class is new, so nothing is compiled yet.

Proof: `python -m pytest tests/primitives/test_memory_budget.py`.
"""

import pytest
import torch
import torch._functorch.config as functorch_config
from torch.nn import functional as F

from curry_train.core.parity import record_step
from curry_train.primitives import memory_budget

from .peers import peer_table
from .toy_steps import drawn

TRACING = [  # torch's warnings while it traces
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]
WIDTH, ROWS = 8, 64


def block_class(disturb=lambda h: h):
    """Return a new class whose forward puts `disturb` between two layers."""

    class Block(peer_table.Block):
        def forward(self, x):
            return x + self.last(torch.tanh(disturb(F.gelu(self.first(self.norm(x))))))

    return Block


def build(block):
    return peer_table.Chain(block, depth=2)


def rows(size=ROWS):
    return drawn(size, WIDTH)


def loss(module, batch):
    return module(batch).square().mean()


def step(module, batch=None):
    torch.manual_seed(2)
    return record_step(module, rows() if batch is None else batch, loss)


def bounded(block, budget):
    """Return a model of such blocks with a budget."""
    model = build(block)
    memory_budget(model, budget, backend="aot_eager")
    return model


def by_torch_alone(block, budget, *, backend="aot_eager"):
    """Return a model of such blocks, compiled with torch's setting as documented."""
    model = build(block)
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
    with functorch_config.patch(activation_memory_budget=budget):
        loss(model, rows()).backward()
    return model


def dropout(h):
    return F.dropout(h, 0.5)


def hidden():
    """Return a class whose forward the compiler does not trace."""
    block = block_class()
    apart = torch.compiler.disable(block.forward)

    class Hidden(block):
        def forward(self, x):
            return apart(self, x)

    return Hidden
