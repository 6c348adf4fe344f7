"""Allocator events agree with the dispatch modes on eager code, and hold for compiled code.

python -m pytest tests/core/test_allocated.py
"""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from curry_train.core.measure import count_flops, measure_memory
from curry_train.core.measure_compiled import (
    count_executed_flops,
    holds_compiled_code,
    measure_allocated,
)
from curry_train.primitives import recompute_blocks
from curry_train.workloads import Case
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer

from ..compiled_models import (
    ROWS,
    TRACING,
    WIDTH,
    block_class,
    bounded,
    build,
    loss,
    rows,
)
from ..toy_steps import activated

pytestmark = TRACING
KIB = 2**10


@pytest.mark.parametrize(
    ("name", "recomputed"),
    [*((name, False) for name in BUILTIN_WORKLOADS), ("transformer", True), ("with dropout", True)],
)
def test_eager_bytes_and_flops_are_those_that_the_dispatch_modes_count(name, recomputed):
    case = Case(transformer(dropout=0.1) if name == "with dropout" else load_workload(name))
    model = case.build()
    batch = case.batch()
    mean_loss = case.workload.mean_loss
    if recomputed:
        recompute_blocks(
            model, preserve_rng_state=False
        )  # the modes don't see the saved state of a generator
    expected, found = (
        measure_memory(model, batch, mean_loss),
        measure_allocated(model, batch, mean_loss),
    )
    # Convolutions use workspace that no operation returns; autograd wraps a number in 8 bytes.
    assert 0 <= found.held_bytes - expected.held_bytes <= 2 * KIB
    assert 0 <= found.peak_bytes - expected.peak_bytes <= 0.002 * expected.peak_bytes + 2 * KIB
    assert count_executed_flops(model, batch, mean_loss) == count_flops(model, batch, mean_loss)


def test_bytes_are_the_same_in_each_measurement_and_the_model_is_unchanged():
    case = Case(load_workload("resnet"))
    model, batch = case.build(), case.batch()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state, environment = torch.get_rng_state(), os.environ.copy()
    assert len({measure_allocated(model, batch, case.workload.mean_loss) for _ in range(3)}) == 1
    count_executed_flops(model, batch, case.workload.mean_loss)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert os.environ == environment


def test_the_profiler_writes_no_lines_of_its_own():
    # The first profile of a process decides for all that follow.
    program = (
        "import torch, curry_train.core.measure_compiled as compiled\n"
        "compiled.measure_allocated(torch.nn.Linear(1, 1), torch.ones(1), torch.nn.Module.__call__)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], stderr=subprocess.STDOUT) == b""


def test_bytes_and_flops_of_compiled_code_are_those_that_ran():
    block, batch = block_class(), rows()
    plain, product = build(block), 2 * ROWS * WIDTH * 2 * WIDTH
    eager = measure_allocated(plain, batch, loss)
    flops = count_executed_flops(plain, batch, loss)
    whole, least = bounded(block, 1.0), bounded(block, 0.0)
    assert (
        measure_allocated(least, batch, loss).held_bytes
        < measure_allocated(whole, batch, loss).held_bytes
    )
    assert measure_allocated(whole, batch, loss).held_bytes <= eager.held_bytes
    assert count_executed_flops(whole, batch, loss) == flops == count_flops(plain, batch, loss)
    again = count_executed_flops(least, batch, loss)
    assert again.forward == flops.forward
    assert (
        again.backward - flops.backward == 2 * product
    )  # the first product of each block; early stop skips the second


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @torch.compile(backend="eager")
    def forward(self, x):
        return self.inner(x)


def compiled_forward(model):
    model[0].forward = torch.compile(model[0].forward, backend="eager")
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.compile(model, backend="eager"),
        compiled_forward,
        lambda model: nn.Sequential(Decorated()),
        lambda model: bounded(block_class(), 0.5),
    ],
)
def test_a_module_with_compiled_code_inside_is_recognised(make):
    model = activated(4)
    assert not holds_compiled_code(model)
    assert holds_compiled_code(make(model))
