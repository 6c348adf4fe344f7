"""Symptoms of recompute in compiled code: reproduced, cured, and not cured by the wrong fix.

python -m pytest tests/skills/test_symptoms_recompute_compile.py
"""

import pytest
import torch
import torch._functorch.config as functorch_config
from compiled_models import (
    TRACING,
    block_class,
    bounded,
    build,
    by_torch_alone,
    dropout,
    loss,
    rows,
    step,
)
from symptoms import symptom
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from curry_train.core.measure_compiled import count_executed_flops, saved_bytes, with_own_code
from curry_train.core.parity import compare
from curry_train.primitives.compile_budget import memory_budget

pytestmark = TRACING


def saved(model):
    return saved_bytes(model, rows(), loss)


@symptom(
    "`torch._dynamo.config.activation_memory_budget does not exist`, "
    "or a budget that changes nothing"
)
def test_a_budget_set_elsewhere_or_too_late_has_no_effect():
    with pytest.raises(AttributeError, match=r"activation_memory_budget does not exist"):
        torch._dynamo.config.activation_memory_budget = 0.2
    torch._dynamo.activation_memory_budget = 0.2
    model = by_torch_alone(block_class(), 1.0)
    del torch._dynamo.activation_memory_budget
    before = saved(model)
    with functorch_config.patch(activation_memory_budget=0.2):
        assert saved(model) == before  # its code is compiled already
    assert saved(bounded(block_class(), 1.0)) == before
    assert saved(bounded(block_class(), 0.2)) < 0.8 * before


@symptom("gradients are wrong with dropout and a budget in compiled code, and no error")
def test_neither_another_budget_nor_a_seed_makes_the_dropout_mask_right():
    reference = step(build(block_class(dropout)))
    for budget in (0.0, 0.9):
        found = compare(
            reference, step(by_torch_alone(block_class(dropout), budget))
        )  # with a seed before each step
        assert (
            max(
                difference.error
                for difference in found.differences
                if difference.kind == "gradient"
            )
            > 0.05
        )
    for budget in (0.0, 0.5, 0.9):
        assert compare(reference, step(bounded(block_class(dropout), budget))).bit_equal


def sequential_blocks():
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU()) for _ in range(3)
    ]
    return nn.Sequential(*layers)


@symptom("blocks that are an `nn.Sequential` save as much after `.compile()`, at any budget")
def test_a_sequential_that_compiles_itself_stays_eager_until_it_is_compiled_from_outside():
    plain = saved(sequential_blocks())
    for budget in (1.0, 0.0):
        model = sequential_blocks()
        for block in model:
            block.compile(backend="aot_eager")
        with functorch_config.patch(activation_memory_budget=budget):
            assert saved(model) == plain
    model = sequential_blocks()
    memory_budget(model, 0.0, backend="aot_eager")
    assert saved(model) < 0.5 * plain
    assert compare(step(sequential_blocks()), step(model)).bit_equal


@symptom("compiled code runs as slow as eager once its FLOPs or its memory were counted")
def test_a_counting_mode_turns_compiled_code_off_until_a_reset():
    runs = []

    def backend(graph, inputs):
        def run(*args):
            runs.append(None)
            return graph(*args)

        return run

    model = nn.ModuleList([block_class()()])[0]
    model.forward = torch.compile(with_own_code(model.forward, name="counted"), backend=backend)
    with torch.no_grad():
        model(rows())
        assert len(runs) == 1
        with FlopCounterMode(display=False):
            model(rows())
        for _ in range(3):  # warming up does not help
            model(rows())
        assert len(runs) == 1
        torch._dynamo.reset()
        model(rows())
        assert len(runs) == 2
    count_executed_flops(model, rows(), loss)
    counted = len(runs)
    model(rows())
    assert len(runs) == counted + 1
