"""Tests of the memory-plan gates, on our and others' losses and plans, right and wrong.

python -m pytest tests/gates/test_memory_plan.py
"""

import gc
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faulty_memory_plan import LANGUAGE_MODEL
from plan_models import ROUTED
from saboteurs import case_of, faults, gates
from torch import nn
from torch.nn import functional as F

from curry_train.gates import memory_plan
from curry_train.gates.implementation import load_implementation
from curry_train.primitives import chunked_loss
from curry_train.primitives.cross_entropy import chunked_cross_entropy
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload
from curry_train.workloads.workload import Case, Workload

CHUNKED = [gate for gate in memory_plan.GATES if "chunked" in gate.name]
CLASSES = 256
FOREIGN = Path(__file__).with_name("foreign_memory_plan.py")


@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_or_do_not_apply_to_built_in_workloads(name):
    verdicts = {gate.name: gate.run(Case(load_workload(name))) for gate in memory_plan.GATES}
    assert all(verdict.passed is not False for verdict in verdicts.values()), verdicts
    assert verdicts["memory-plan/estimate"].passed
    assert verdicts["memory-plan/chunked-loss"].passed is (name == "transformer" or None)
    if name == "mlp":  # its peak is in the optimizer's step
        assert "does not lower the peak" in verdicts["memory-plan/fits"].hint
    elif name == "transformer":
        assert all(verdict.ran == ("model", "loss") for verdict in verdicts.values())


@pytest.mark.parametrize(
    ("implementation", "failing"),
    [
        ("apply_chunked_loss:by_torch", None),
        ("apply_chunked_loss:by_torch_without_options", "chunked-memory"),
        ("apply_chunked_loss:by_torch_with_ignored_targets", "chunked-loss"),
        ("apply_chunked_loss:by_checkpoint", None),
        ("apply_chunked_loss:by_kept_chunks", "chunked-memory"),
        ("apply_chunked_loss:by_mean_of_means", "chunked-loss"),
        ("plan:plan_every_block", None),
        ("plan:plan_nothing", "fits"),
        ("plan:plan_without_generators", "parity-plan"),
    ],
)
def test_implementations_on_torchs_own_calls_hold_and_their_twins_fail(implementation, failing):
    contract, _, name = implementation.partition(":")
    given = load_implementation(f"{contract}={FOREIGN}:{name}")
    taking = [gate for gate in memory_plan.GATES if contract in gate.takes]
    found = {gate.name: gate.run(case_of(LANGUAGE_MODEL), [given]) for gate in taking}
    assert len(found) == 2
    if failing is None:
        assert all(verdict.passed for verdict in found.values()), found
        assert all("implementation" in verdict.ran for verdict in found.values())
    else:
        assert found[f"memory-plan/{failing}"].passed is False, found


@pytest.mark.parametrize("name", ["by_torch", "by_checkpoint", None])
def test_losses_in_half_precision_hold(name):
    given = [load_implementation(f"apply_chunked_loss={FOREIGN}:{name}")] if name else []
    for gate in CHUNKED:
        verdict = gate.run(Case(LANGUAGE_MODEL, dtype=torch.bfloat16), given)
        assert verdict.passed, verdict


@pytest.mark.parametrize("saboteur", faults("faulty_memory_plan"), ids=str)
def test_a_gate_catches(saboteur):
    saboteur.check()


# Models and losses of other forms.


class Model(nn.Module):
    """A head with a bias."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(CLASSES, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens):
        return self.head(torch.tanh(self.table(tokens)))


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


def tokens_of(size):
    return torch.randint(CLASSES, (size, 32))


def loss_of(module, tokens, **options):
    return F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten(), **options) * len(tokens)


def loss_per_token(module, tokens):
    losses = loss_of(module, tokens, reduction="none")
    return (losses * torch.linspace(0.5, 1.5, losses.numel())).sum()


def loss_and_penalty(module, tokens):
    loss = loss_of(module, tokens)
    (gradient,) = torch.autograd.grad(loss, module.table.weight, create_graph=True)
    return loss + gradient.square().sum()


BIASED = Workload("biased", Model, tokens_of, loss_of)
SURE = replace(BIASED, name="sure", build=Tied)


class Rows:
    """A batch of the user's own class."""

    def __init__(self, size):
        self.tokens = tokens_of(size)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"loss": loss_per_token},
        {"build": lambda: nn.DataParallel(Model())},
        {"batch": Rows, "loss": lambda module, batch: loss_of(module, batch.tokens)},
    ],
)
def test_losses_of_other_forms_hold(change):
    for gate in memory_plan.GATES[:3]:
        verdict = gate.run(Case(replace(BIASED, **change)))
        assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"loss": lambda m, t: m(t).log_softmax(-1).sum()}, "all logits made for log_softmax"),
        ({"loss": loss_and_penalty}, "the loss takes derivatives"),
        ({"build": lambda: torch.compile(Model(), backend="eager")}, "the model is compiled"),
    ],
)
def test_gates_of_the_loss_do_not_apply(change, why):
    for gate in CHUNKED:
        verdict = gate.run(Case(replace(BIASED, **change)))
        assert verdict.passed is None
        assert why in verdict.hint


def leave_out_a_token(rows, weight, targets, **options):
    return chunked_cross_entropy(rows[:-1], weight, targets[:-1], **options)


def test_float32_may_round_the_gradients_of_sure_predictions_and_no_more(monkeypatch):
    for seed in range(4):
        verdict = gates()["memory-plan/chunked-loss"].run(Case(SURE, seed=seed))
        assert verdict.passed, verdict
    monkeypatch.setattr(chunked_loss, "chunked_cross_entropy", leave_out_a_token)
    verdict = gates()["memory-plan/chunked-loss"].run(Case(SURE))
    assert verdict.passed is False, verdict


def test_a_model_whose_shapes_need_values_has_no_estimate():
    verdict = gates()["memory-plan/estimate"].run(Case(ROUTED))
    assert verdict.passed is None
    assert "nonzero" in verdict.hint
    assert "Routed" in verdict.hint


class Dropping(nn.Module):
    """Runs each layer with a probability of a half."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            if not self.training or self.draw() < 0.5:
                x = x + layer(x)
        return self.layers[0](x)


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random])
def test_no_gate_fails_where_layers_are_dropped_at_random(draw):
    dropping = Workload(
        "dropping",
        lambda: Dropping(draw),
        lambda size: torch.randn(size, 64, 8),
        lambda module, x: module(x).square().sum(),
    )
    verdicts = {gate.name: gate.run(Case(dropping)) for gate in memory_plan.GATES}
    assert all(verdict.passed is not False for verdict in verdicts.values()), verdicts
    for gate in ("memory-plan/estimate", "memory-plan/fits"):
        # What Python draws is the same without values.
        assert verdicts[gate].passed or "depending on random numbers" in verdicts[gate].hint


def test_nothing_stays_on_the_device_after_the_gates():
    def count_tensors():
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    case = Case(LANGUAGE_MODEL)
    gates()["memory-plan/fits"].run(case)
    before = count_tensors()
    for gate in memory_plan.GATES[:4]:
        gate.run(case)
    assert count_tensors() <= before
