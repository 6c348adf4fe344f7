"""Symptoms on the skills' pages that no other test shows: reproduced, cured, and a wrong fix.

Messages and refusals stand in the tests of their technique, and what torch's own recompute gets
wrong in tests/peers.

python -m pytest tests/skills/test_symptoms.py
"""

from functools import partial

import torch
from torch import nn

from curry_train.bench.report import measure_levers
from curry_train.bench.steps import find_lever
from curry_train.core.measure import measure_memory
from curry_train.core.parity import compare, record_step
from curry_train.gates.grad_accum import compare_windows
from curry_train.primitives import recompute_blocks, recompute_segments
from curry_train.workloads import Case
from curry_train.workloads.models import mlp, transformer

from ..plan_models import estimated
from ..toy_steps import drawn, seeded_stack, square_sum

ROWS = drawn(32, 16)


def blocks(*layers, depth=8):
    """Build a chain of equal blocks; `layers` build the layers after the linear one."""
    return seeded_stack(
        lambda: nn.Sequential(nn.Linear(16, 16), *[layer() for layer in layers]), depth
    )


def memory(model):
    return measure_memory(model, ROWS, square_sum)


def step(model):
    torch.manual_seed(0)
    return record_step(model, ROWS, square_sum)


# Recompute.


def test_linear_and_relu_save_nothing_alone_and_something_in_segments():
    plain, model = memory(blocks(nn.ReLU)), blocks(nn.ReLU)
    recompute_blocks(model, preserve_rng_state=False)
    assert memory(model) == plain
    model = blocks(nn.ReLU)
    recompute_segments(model, 3, preserve_rng_state=False)
    assert memory(model).held_bytes < 0.7 * plain.held_bytes
    assert compare(step(blocks(nn.ReLU)), step(model)).bit_equal


def test_fine_tuning_in_eval_mode_recomputes_nothing():
    build = partial(blocks, nn.GELU, partial(nn.Dropout, 0.5), depth=4)
    plain, model, trained = build().eval(), build(), build()
    recompute_blocks(model)
    recompute_blocks(trained)
    assert memory(model.eval()) == memory(plain)
    # The wrong fix: in training mode dropout is on again.
    assert not compare(step(plain), step(trained)).holds
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    assert memory(model).held_bytes < 0.6 * memory(plain).held_bytes
    assert compare(step(plain), step(model)).bit_equal


# Plans.


def test_at_a_peak_in_the_optimizers_step_a_plainer_optimizer_helps_and_recompute_does_not():
    plain = estimated(mlp(), 4, optimizer="adamw")
    assert plain.timeline.peak.phase == "step"
    recomputed = estimated(mlp(), 4, optimizer="adamw", change=recompute_blocks)
    assert recomputed.peak_bytes == plain.peak_bytes
    assert estimated(mlp(), 4, optimizer="adamw-8bit").peak_bytes < 0.8 * plain.peak_bytes


# Bench.


def test_accumulation_with_dropout_draws_other_numbers_and_its_gate_still_holds():
    dropout = transformer(depth=2, dim=32, length=16, vocabulary=64, dropout=0.3)
    found = measure_levers(Case(dropout), [find_lever("accumulate=2")], rounds=1, warmup=0)
    assert "unless random numbers" in found.rows[1].notes[0]
    _, _, hint = compare_windows(Case(dropout), hint="differs")
    assert not hint
