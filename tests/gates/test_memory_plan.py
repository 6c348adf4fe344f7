"""Tests of the chunked-loss gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_memory_plan.py
"""

from dataclasses import replace

import pytest
import torch
from saboteurs import faults
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from curry_train.gates import memory_plan
from curry_train.primitives import apply_chunked_loss, chunked_loss
from curry_train.primitives.cross_entropy import chunked_cross_entropy
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case, Workload

CHECKS = {gate.name: gate.check for gate in memory_plan.CHUNKED_LOSS_GATES}
# Planted losses and heads need none of the model.
WITHOUT_A_HEAD = {"memory-plan/loss-calls", "memory-plan/loss-heads"}
CLASSES = 256
IGNORED = -100


def targets_of(size):
    """Mask all but one target in the first rows, and none in the last rows."""
    targets = torch.randint(CLASSES, (size, 8))
    return targets.masked_fill(
        torch.arange(8) > 7 * (torch.arange(size)[:, None] >= size // 2), IGNORED
    )


class Model(nn.Module):
    """An embedding and a head with a bias."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(CLASSES, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens):
        return self.head(torch.tanh(self.table(tokens)))


BIASED = Workload(
    "biased",
    Model,
    lambda size: (torch.randint(CLASSES, (size, 8)), targets_of(size)),
    lambda module, batch: (
        F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten()) * len(batch[0])
    ),
)
PER_TOKEN = replace(
    BIASED,
    name="per token",
    batch=lambda size: (torch.randint(CLASSES, (size, 8)), torch.randint(CLASSES, (size, 8))),
    loss=lambda module, batch: (
        F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="none")
        * torch.linspace(0.5, 1.5, batch[1].numel())
    ).sum(),
)
READ = replace(
    BIASED, name="read", loss=lambda module, batch: module(batch[0]).log_softmax(-1).square().sum()
)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, check):
    verdict = CHECKS[check](Case(load_workload(name)))
    has_head = name == "transformer" or check in WITHOUT_A_HEAD
    assert verdict.passed is (True if has_head else None), verdict
    if not has_head:
        assert "no output layer" in verdict.hint


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "workload", [BIASED, transformer(depth=8, dropout=0.1, length=16)], ids=lambda w: w.name
)
def test_gates_hold_with_a_bias_and_dropout_in_both_precisions(device, dtype, workload):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for check in CHECKS.values():
        verdict = check(Case(workload, device=torch.device(device), dtype=dtype))
        assert verdict.passed, verdict


@pytest.mark.parametrize("check", sorted(CHECKS.keys() - WITHOUT_A_HEAD))
def test_gates_do_not_apply_where_the_loss_reads_the_logits(check):
    verdict = CHECKS[check](Case(READ))
    assert verdict.passed is None, verdict
    assert "all logits made for log_softmax" in verdict.hint


class Tied(nn.Module):
    """A head tied to an embedding drawn with a standard deviation of 1, which repeats its input.

    Most tokens have a probability near 1. Funnel transformers begin training like this.
    """

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(CLASSES, 32)
        self.body = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, CLASSES, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        rows = self.table(tokens)
        return self.head(self.norm(rows + 0.1 * self.body(rows)))


def repeated(size):
    tokens = torch.randint(CLASSES, (size, 32))
    return tokens, tokens


SURE = replace(BIASED, name="sure", build=Tied, batch=repeated)


def test_gate_holds_where_float32_rounds_the_gradients_of_sure_predictions():
    for seed in range(4):
        verdict = CHECKS["memory-plan/chunked-loss"](Case(SURE, seed=seed))
        assert verdict.passed, verdict


def test_gate_catches_a_wrong_loss_of_sure_predictions(monkeypatch):
    for saboteur in (mean_of_means, last_chunk_left_out):
        monkeypatch.setattr(chunked_loss, "chunked_cross_entropy", saboteur)
        verdict = CHECKS["memory-plan/chunked-loss"](Case(SURE))
        assert verdict.passed is False, verdict


def test_gates_hold_where_each_token_has_a_loss_of_its_own():
    for check in CHECKS.values():
        verdict = check(Case(PER_TOKEN))
        assert verdict.passed, verdict


def test_gate_catches_whole_logits_and_a_third_product_of_losses_per_token(monkeypatch):
    check = CHECKS["memory-plan/chunked-loss"]
    for wrong, reason in ((products_twice, "runs again"), (one_whole_loss, "stay whole")):
        monkeypatch.setattr(chunked_loss, "chunked_cross_entropy", wrong)
        verdict = check(Case(PER_TOKEN))
        assert verdict.passed is False, verdict
        assert reason in verdict.hint


# The saboteurs.


def products_twice(rows, weight, targets, **options):
    """Compute every loss a second time in backward, over the pass of the right implementation."""
    return checkpoint(chunked_cross_entropy, rows, weight, targets, use_reentrant=False, **options)


def one_whole_loss(rows, weight, targets, *, bias, reduction, **options):
    return F.cross_entropy(F.linear(rows, weight, bias), targets, reduction=reduction)


def no_op(model, *, head=None, chunk_tokens=None):
    return ["head"]


def one_chunk(model, *, head=None, chunk_tokens=None):
    return apply_chunked_loss(model, head=head, chunk_tokens=2**30)


def in_parts(rows, targets, chunk_tokens):
    size = chunk_tokens or len(targets)
    return zip(rows.split(size), targets.split(size), strict=True)


def divisor(targets, reduction):
    return (targets != IGNORED).sum() if reduction == "mean" else 1


def mean_of_means(rows, weight, targets, *, bias, chunk_tokens, reduction, **options):
    """Divide each chunk by its own number of unmasked targets, which differ."""
    chunks = in_parts(rows, targets, chunk_tokens)
    losses = [
        chunked_cross_entropy(row, weight, target, bias=bias, **options) for row, target in chunks
    ]
    return torch.stack(losses).nanmean()


def without_bias(rows, weight, targets, *, bias, **options):
    return chunked_cross_entropy(rows, weight, targets, bias=bias.detach(), **options)


def last_chunk_left_out(rows, weight, targets, *, chunk_tokens, **options):
    whole = len(targets) // (chunk_tokens or 1) * (chunk_tokens or 1)
    return chunked_cross_entropy(
        rows[:whole], weight, targets[:whole], chunk_tokens=chunk_tokens, **options
    )


def chunks_kept(rows, weight, targets, *, bias, chunk_tokens, reduction, **options):
    """Hold every chunk's logits until backward."""
    chunks = in_parts(rows, targets, chunk_tokens)
    total = sum(part_loss(row, target, weight, bias) for row, target in chunks)
    return total / divisor(targets, reduction)


def computed_again(rows, weight, targets, *, bias, chunk_tokens, reduction, **options):
    """Recompute chunks with plain checkpointing: correct, but the head's product runs twice."""
    chunks = in_parts(rows, targets, chunk_tokens)
    losses = [
        checkpoint(part_loss, row, target, weight, bias, use_reentrant=False)
        for row, target in chunks
    ]
    return sum(losses) / divisor(targets, reduction)


def without_class_weights(*args, class_weights, **options):
    return chunked_cross_entropy(*args, **options)


def without_smoothing(*args, label_smoothing, **options):
    return chunked_cross_entropy(*args, **options)


def with_equal_gradients(*args, reduction, **options):
    """Gives each token's loss the mean of the incoming gradients."""
    losses = chunked_cross_entropy(*args, reduction=reduction, **options)
    if reduction != "none":
        return losses
    return losses.detach() + (losses.mean() - losses.mean().detach())


def part_loss(rows, targets, weight, bias):
    return F.cross_entropy(F.linear(rows, weight, bias).float(), targets, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("check", "saboteur", "in_hint"),
    [
        (memory_plan.chunked_loss, no_op, "the logits stay whole"),
        (memory_plan.chunked_memory, no_op, "all logits"),
        (memory_plan.chunked_memory, one_chunk, "all logits"),
    ],
)
def test_gate_catches(check, saboteur, in_hint, dtype):
    verdict = check(Case(BIASED, dtype=dtype), apply=saboteur)
    assert verdict.passed is False, verdict
    assert in_hint in verdict.hint, verdict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("check", "saboteur", "in_hint"),
    [
        (memory_plan.chunked_loss, mean_of_means, "a divisor"),
        (memory_plan.chunked_loss, without_bias, "gradient head.bias: differs in kind"),
        (memory_plan.chunked_loss, last_chunk_left_out, "a term"),
        (memory_plan.chunked_loss, computed_again, "runs again"),
        (memory_plan.chunked_loss, chunks_kept, "the logits stay whole"),
        (memory_plan.chunked_memory, chunks_kept, "all logits"),
        (memory_plan.chunked_loss, without_class_weights, "with class weights: "),
        (memory_plan.chunked_loss, without_smoothing, "with label smoothing: "),
        (memory_plan.chunked_loss, with_equal_gradients, "with a loss per token: "),
    ],
)
def test_gate_catches_a_wrong_loss(check, saboteur, in_hint, dtype, monkeypatch):
    monkeypatch.setattr(chunked_loss, "chunked_cross_entropy", saboteur)
    verdict = check(Case(BIASED, dtype=dtype))
    assert verdict.passed is False, verdict
    assert in_hint in verdict.hint, verdict


@pytest.mark.parametrize("saboteur", faults("faulty_losses"), ids=str)
def test_the_gate_of_options_catches(saboteur):
    saboteur.check()
