"""Gates compare what is above rounding, in the dtype that was asked for.

python -m pytest tests/gates/test_rounding.py
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from curry_train.core.parity import NothingToCompare, check_comparable, record_step
from curry_train.gates import grad_accum
from curry_train.gates.verdict import discover
from curry_train.primitives.grad_accum import train_window
from curry_train.workloads import Case, Workload, load_workload

BF16 = torch.bfloat16
COMPARING = ["recompute/parity-*", "recompute/offload-parity", "grad-accum/*", "sac/parity-*"]


def blocks(end=()):
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)], *end)


def constant():
    """Return a loss that a norm makes constant, so that its gradients are rounding."""
    return Workload(
        "constant",
        blocks,
        lambda size: torch.randn(size, 8),
        lambda module, batch: nn.functional.normalize(module(batch)).square().sum(),
        spec=f"{__file__}:constant",
    )


def overflowing():
    return Workload(
        "overflowing",
        blocks,
        lambda size: torch.randn(size, 8),
        lambda module, batch: (module(batch) * 1e30).square().sum(),
        spec=f"{__file__}:overflowing",
    )


@pytest.mark.parametrize(
    ("make", "cause"), [(constant, "below the rounding"), (overflowing, "not finite")]
)
def test_no_gate_holds_where_the_plain_gradients_mean_nothing(make, cause):
    case = Case(make())
    gates = {gate.name: gate for gate in discover(COMPARING)}
    names = [
        *("recompute/parity-full", "recompute/parity-selective", "sac/parity-sac"),
        *("grad-accum/equal", "grad-accum/uneven", "grad-accum/once", "recompute/offload-parity"),
        "recompute/budget",
    ]
    for name in names:
        verdict = gates[name].run(case)
        assert verdict.passed is not True, verdict
        if verdict.passed is False:
            assert cause in verdict.hint, verdict


def test_a_gradient_of_zeros_and_none_at_all_are_refused():
    for scale in (0.0, None):
        module = blocks()

        def loss(module, batch, scale=scale):
            value = module(batch).sum()
            return value.detach() if scale is None else value * scale

        with pytest.raises(NothingToCompare, match="below the rounding"):
            check_comparable(record_step(module, torch.randn(2, 8), loss))


@pytest.mark.parametrize("name", ["mlp", "transformer", "resnet", "snn"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float64])
def test_steps_of_models_that_train_are_comparable(name, dtype):
    case = Case(load_workload(name), dtype=dtype)
    check_comparable(record_step(case.build(), case.batch(), case.workload.mean_loss))


# Accumulation in the dtype that was asked for.

CHECKS = [
    *(grad_accum.equal_windows, grad_accum.uneven_windows),
    *(grad_accum.short_window, grad_accum.once_per_window),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["mlp", "transformer", "resnet", "snn"])
def test_accumulation_holds_in_bfloat16_by_its_own_tolerance(name, check):
    dtypes = set()

    def train(model, window, loss, optimizer, **options):
        dtypes.update(parameter.dtype for parameter in model.parameters())
        train_window(model, window, loss, optimizer, **options)

    verdict = check(Case(load_workload(name), dtype=BF16), train_window=train)
    assert verdict.passed, verdict
    assert dtypes == {BF16}
    assert "1.0e-06" not in verdict.required


def divided_twice(model, window, loss, optimizer):
    train_window(model, window, lambda *given: loss(*given) / 2, optimizer)


def last_alone(model, window, loss, optimizer):
    train_window(model, replace(window, microbatches=window.microbatches[-1:]), loss, optimizer)


@pytest.mark.parametrize("saboteur", [divided_twice, last_alone])
@pytest.mark.parametrize("check", CHECKS[:3], ids=lambda check: check.__name__)
def test_a_fault_is_found_in_bfloat16(check, saboteur):
    case = Case(load_workload("transformer"), dtype=BF16)
    assert check(case, train_window=saboteur).passed is False


def test_two_ranks_run_in_the_dtype():
    verdict = grad_accum.two_ranks(Case(load_workload("mlp"), dtype=BF16))
    assert verdict.passed, verdict
    errors = [float(part.split()[1].rstrip(",")) for part in verdict.measured.split("; ")]
    assert max(errors) > 1e-4, verdict


# Coupled samples and rounding are told apart by the precision.


def coupled(weight):
    """Return a loss with a term that couples samples, as a router's balance does."""

    def loss(module, batch):
        out = module(batch)
        balance = out.softmax(1).mean(0).square().sum()
        return out.square().sum() + weight * len(batch) * balance

    return Workload("coupled", blocks, lambda size: torch.randn(size, 8), loss)


@pytest.mark.parametrize("weight", [1.0, 1e-2, 1e-3])
def test_a_small_coupling_of_samples_is_named(weight):
    verdict = discover(["grad-accum/equal"])[0].run(Case(coupled(weight)))
    assert verdict.passed is None, verdict
    assert "couples samples" in verdict.hint


def cancelling():
    """Return a loss whose samples cancel, so that its gradients are rounded to three digits."""

    def batch(size):
        x = torch.randn(size // 2, 8)
        signs = torch.ones(size // 2)
        return {"x": torch.cat([x, x]), "sign": torch.cat([signs, -signs * (1 - 1e-4)])}

    def loss(module, batch):
        return (module(batch["x"]).square().sum(1) * batch["sign"]).sum()

    return Workload("cancelling", blocks, batch, loss)


def test_rounding_is_no_coupling_however_large():
    case = Case(cancelling())
    verdict = grad_accum.equal_windows(case)
    assert verdict.passed, verdict
    assert float(verdict.required.split()[2]) > 1e-5
    assert grad_accum.equal_windows(case, train_window=last_alone).passed is False
