"""Implementations on calls of torch and others pass, and their wrong twins fail.

python -m pytest tests/gates/test_foreign.py
"""

import pytest
import torch

from curry_train.gates import discover
from curry_train.gates.implementation import load_implementation
from curry_train.workloads import Case, load_workload

from ..saboteurs.faulty_memory_plan import LANGUAGE_MODEL
from ..saboteurs.faulty_timesteps import NOISY
from ..saboteurs.saboteurs import case_of, gates

GPT2 = "tests.gates.foreign_recompute:gpt2"
TWO_LAYERS = "shrink=2:transformer"
LOSSES = "apply_chunked_loss=tests.gates.foreign_memory_plan:"
LOOPS = "checkpoint_timesteps=tests.gates.foreign_snn_timesteps:"

# An implementation and a model.
RIGHT = [
    ("recompute_blocks=tests.gates.foreign_recompute:by_checkpoint", TWO_LAYERS),
    ("recompute_blocks=tests.gates.foreign_recompute:by_reentrant_checkpoint", TWO_LAYERS),
    ("recompute_blocks=tests.gates.foreign_recompute:by_wrapper", TWO_LAYERS),
    ("recompute_blocks=tests.gates.foreign_recompute:by_transformers", GPT2),
    ("recompute_blocks=tests.gates.foreign_recompute:by_reentrant_transformers", GPT2),
    ("offload_blocks=tests.gates.foreign_recompute:on_cpu", TWO_LAYERS),
    ("offload_blocks=tests.gates.foreign_recompute:on_pinned_cpu", TWO_LAYERS),
    ("offload_blocks=tests.gates.foreign_recompute:by_offload_wrapper", TWO_LAYERS),
    ("apply_sac=tests.gates.foreign_sac:save_products", "small"),
    ("apply_sac=tests.gates.foreign_sac:by_checkpoint", "small"),
    ("apply_sac=tests.gates.foreign_sac:by_wrapper", "dropout"),
    ("apply_sac=tests.gates.foreign_sac:save_products", "dropout"),
    ("apply_sac=tests.gates.foreign_sac:every_second_product", "mlp"),
    ("apply_sac=tests.gates.foreign_sac:every_second_product", "dropout"),
    ("train_window=tests.gates.foreign_grad_accum:by_hand", TWO_LAYERS),
    ("train_window=tests.gates.foreign_grad_accum:with_clipping", TWO_LAYERS),
    ("train_window=tests.gates.foreign_grad_accum:by_accelerate", TWO_LAYERS),
    (f"{LOOPS}in_chunks", "snn"),
    (f"{LOOPS}in_chunks", NOISY),
    (f"{LOSSES}by_torch", LANGUAGE_MODEL),
    (f"{LOSSES}by_checkpoint", LANGUAGE_MODEL),
    ("plan=tests.gates.foreign_memory_plan:plan_every_block", LANGUAGE_MODEL),
    ("SpikeWatchdog=tests.gates.foreign_loss_spike:MedianWatchdog", "mlp"),
    ("curry_train.primitives.offload:offload_blocks", TWO_LAYERS),
]
# Gates that take an implementation and need not apply to it, by model and implementation.
NEED_NOT_APPLY = {
    "mlp every_second_product": ["sac/products"],
    f"{TWO_LAYERS} by_hand": ["grad-accum/once", "grad-accum/scaled"],
    f"{TWO_LAYERS} by_accelerate": ["grad-accum/scaled"],
}


def verdicts_of(text, case):
    given = load_implementation(text)
    return {gate.name: gate.run(case, [given]) for gate in discover() if given.name in gate.takes}


@pytest.mark.filterwarnings("ignore::UserWarning:accelerate")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize(("text", "model"), RIGHT)
def test_a_right_implementation_passes_every_gate_that_applies(text, model):
    left_out = NEED_NOT_APPLY.get(f"{model} {text.partition(':')[2]}", [])
    verdicts = verdicts_of(text, case_of(model))
    assert len(verdicts) > len(left_out)
    for name, verdict in verdicts.items():
        assert verdict.passed is (None if name in left_out else True), verdict
        assert ("implementation" in verdict.ran) == (name not in left_out)


# The other wrong ones are planted faults, as they break a claim that ours could break too.
WRONG = [f"{LOSSES}by_torch_with_ignored_targets", f"{LOSSES}by_mean_of_means"]


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_chunked_loss_fails(text):
    assert verdicts_of(text, case_of(LANGUAGE_MODEL))["memory-plan/chunked-loss"].passed is False


@pytest.mark.parametrize("text", [f"{LOSSES}by_torch", f"{LOSSES}by_checkpoint"])
def test_chunked_losses_in_half_precision_hold(text):
    verdicts = verdicts_of(text, Case(LANGUAGE_MODEL, dtype=torch.bfloat16))
    assert all(verdict.passed for verdict in verdicts.values()), verdicts


def test_the_names_of_blocks_go_to_an_implementation_on_ranks_too():
    given = load_implementation("recompute_blocks=tests.gates.foreign_recompute:by_checkpoint")
    verdict = gates()["recompute/two-ranks"].run(Case(load_workload("mlp"), blocks="[12]"), [given])
    assert verdict.passed, verdict
