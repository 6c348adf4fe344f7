"""Gates of accumulation tell what couples samples from rounding, and what a rank refuses.

python -m pytest tests/gates/test_grad_accum.py
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from curry_train.gates import grad_accum, two_ranks
from curry_train.gates.verdict import NotApplicable
from curry_train.primitives import train_window
from curry_train.workloads import Case

from ..plan_models import squares
from ..saboteurs.saboteurs import case_of, gates, require
from ..toy_steps import activated, stacked


def with_loss(loss):
    return squares(lambda: stacked(lambda: activated(8), 3), 8, loss=loss)


def constant():
    """Return a loss that a norm makes constant, so that its gradients are rounding."""
    return with_loss(lambda module, batch: nn.functional.normalize(module(batch)).square().sum())


def overflowing():
    return with_loss(lambda module, batch: (module(batch) * 1e30).square().sum())


@pytest.mark.parametrize(
    ("make", "cause"), [(constant, "below the rounding"), (overflowing, "not finite")]
)
def test_no_gate_holds_where_the_plain_gradients_mean_nothing(make, cause):
    case = Case(make())
    names = [
        "recompute/parity-full",
        "recompute/parity-selective",
        "sac/parity-sac",
        "grad-accum/equal",
        "grad-accum/uneven",
        "grad-accum/once",
        "recompute/offload-parity",
        "recompute/budget",
    ]
    for name in names:
        verdict = gates()[name].run(case)
        assert verdict.passed is not True, verdict
        if verdict.passed is False:
            assert cause in verdict.hint, verdict


def test_a_scaler_is_not_asked_for_gradients_in_half_precision():
    case = Case(squares(lambda: activated(8), 8), dtype=torch.float16)
    with pytest.raises(NotApplicable, match="no gradients in"):
        grad_accum.scaled_window(case)


def last_alone(model, window, loss, optimizer):
    train_window(model, replace(window, microbatches=window.microbatches[-1:]), loss, optimizer)


# Coupled samples and rounding are told apart by the precision.


def coupled(weight):
    """Return a loss with a term that couples samples, as a router's balance does."""

    def loss(module, batch):
        out = module(batch)
        return out.square().sum() + weight * len(batch) * out.softmax(1).mean(0).square().sum()

    return with_loss(loss)


@pytest.mark.parametrize("weight", [1.0, 1e-2, 1e-3])
def test_a_small_coupling_of_samples_is_named(weight):
    require(gates()["grad-accum/equal"].run(Case(coupled(weight))), None, "couples samples")


def cancelling():
    """Return a loss whose samples cancel, so that its gradients are rounded to three digits."""

    def batch(size):
        x = torch.randn(size // 2, 8)
        signs = torch.ones(size // 2)
        return {"x": torch.cat([x, x]), "sign": torch.cat([signs, -signs * (1 - 1e-4)])}

    def loss(module, batch):
        return (module(batch["x"]).square().sum(1) * batch["sign"]).sum()

    return replace(with_loss(loss), batch=batch)


def test_rounding_is_no_coupling_however_large():
    case = Case(cancelling())
    gate = gates()["grad-accum/equal"]
    verdict = gate.run(case)
    assert verdict.passed, verdict
    assert float(verdict.required.split()[2]) > 1e-5
    assert gate.check(case, train_window=last_alone)[2]


def test_a_loop_that_divides_gradients_has_the_same_random_numbers():
    def train(model, window, loss, optimizer):
        for microbatch in window:
            loss(model, microbatch).backward()
        for one in model.parameters():
            one.grad /= window.num_terms
        optimizer.step()

    measured, _, hint = grad_accum.random_numbers(case_of("transformer"), train_window=train)
    assert not hint, measured


def test_a_wrapper_that_rank_1_alone_refuses_is_not_compared(monkeypatch):
    held, refused = ("error 0.5", True), ("no DDP here", None)

    def outcome(*results):
        monkeypatch.setattr(two_ranks, "_run_on_two_ranks", lambda *_: results)
        return two_ranks.compare_on_ranks("a:b", None, required="1", hint="mend it")

    measured, _, hint = outcome({"DDP": held, "FSDP2": held}, {"DDP": refused, "FSDP2": held})
    assert (measured, hint) == ("DDP not compared: no DDP here; FSDP2 error 0.5", "")
    wrong = "error 0.7", False
    measured, _, hint = outcome({"DDP": held, "FSDP2": held}, {"DDP": wrong, "FSDP2": held})
    assert measured == "DDP error 0.7 on rank 1; FSDP2 error 0.5"
    assert hint == "mend it"
    with pytest.raises(NotApplicable):
        outcome({"DDP": held, "FSDP2": refused}, {"DDP": refused, "FSDP2": held})
