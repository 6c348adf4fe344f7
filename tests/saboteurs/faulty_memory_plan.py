"""Faults of the chunked loss, of estimates and of plans; `foreign_memory_plan` has more.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

from dataclasses import replace

from curry_train.gates import memory_plan
from curry_train.gates.memory_plan import predict
from curry_train.primitives import apply_chunked_loss, chunked_cross_entropy, chunked_loss
from curry_train.workloads.models import transformer

from ..gates import foreign_memory_plan as foreign
from .saboteurs import planted

LANGUAGE_MODEL = transformer(depth=3, dim=32, length=32, vocabulary=256, dropout=0.2)


def last_tokens_left_out(rows, weight, targets, **options):
    num_rows = len(rows) // 100 * 100
    return chunked_cross_entropy(rows[:num_rows], weight, targets[:num_rows], **options)


def weight_without_gradient(rows, weight, targets, **options):
    return chunked_cross_entropy(rows, weight.detach(), targets, **options)


def no_chunks(model, *, head):
    pass


def one_chunk(model, *, head):
    apply_chunked_loss(model, head=head, chunk_tokens=2**30)


def without_optimizer_state(case):
    state = 2 * sum(parameter.nbytes for parameter in case.build().parameters())
    found = predict(case)
    return replace(found, peaks={variant: peak - state for variant, peak in found.peaks.items()})


def plain_for_recompute(case):
    found = predict(case)
    return replace(found, peaks={"full recompute": found.peaks["plain"]})


def plan_one_block(workload, budget_bytes, **sizes):
    return foreign.RecomputeBlocks(1)


class Detaching(foreign.RecomputeBlocks):
    def apply(self, model):
        super().apply(model)
        model.layers[0].register_forward_hook(lambda block, args, output: output.detach())


def plan_detached(workload, budget_bytes, **sizes):
    return Detaching(None)


PREDICT = (memory_plan, "predict")
LOSS = (chunked_loss, "chunked_cross_entropy")
FAULTS = [
    planted("memory-plan.chunked-loss", "rest", patches=[(*LOSS, last_tokens_left_out)]),
    planted("memory-plan.chunked-loss", "weight", patches=[(*LOSS, weight_without_gradient)]),
    planted("memory-plan.chunked-memory", "no-op", apply_chunked_loss=no_chunks),
    planted("memory-plan.chunked-memory", "one-chunk", apply_chunked_loss=one_chunk),
    planted(
        "memory-plan.estimate", "optimizer-state", patches=[(*PREDICT, without_optimizer_state)]
    ),
    planted("memory-plan.estimate", "plain", patches=[(*PREDICT, plain_for_recompute)]),
    planted("memory-plan.fits", "no-op", plan=foreign.plan_nothing),
    planted("memory-plan.fits", "one-block", plan=plan_one_block),
    planted("memory-plan.plan-parity", "no-op", plan=foreign.plan_nothing),
    planted("memory-plan.plan-parity", "detached", plan=plan_detached),
]
HINTS = {
    "memory-plan.chunked-loss": "missing in some chunk",
    "memory-plan.chunked-memory": "all logits",
    "memory-plan.estimate": "an owner is missing",
    "memory-plan.fits": "frees too little",
    "memory-plan.plan-parity": "nothing ran twice|gets no gradient",
}
FAULTS = [replace(one, model=LANGUAGE_MODEL, hint=HINTS[one.claim]) for one in FAULTS]
