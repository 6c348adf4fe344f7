"""Tests of the grad-flow gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_grad_flow.py
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curry_train.gates import grad_flow
from curry_train.primitives import grad_flow_probe
from curry_train.primitives.grad_flow import GradFlow
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case, Workload

SMALL = transformer(depth=2, dim=32, length=16, vocabulary=64)
CHECKS = {gate.name: gate.check for gate in grad_flow.GATES}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, check):
    verdict = CHECKS[check](Case(load_workload(name)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_hold_with_dropout_in_both_precisions(device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    workload = transformer(depth=2, dim=32, length=16, vocabulary=64, dropout=0.1)
    for check in CHECKS.values():
        verdict = check(Case(workload, device=torch.device(device), dtype=dtype))
        assert verdict.passed is not False, verdict


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return {"hidden": F.relu(self.frozen(F.relu(self.first(x)))), "count": len(x)}


def test_gates_hold_where_parameters_are_frozen_or_unused():
    workload = Workload(
        "branch",
        lambda: nn.ModuleDict({"layers": nn.ModuleList(Branch() for _ in range(2))}),
        lambda size: torch.randn(size, 8),
        lambda model, x: (
            model["layers"][1](model["layers"][0](x)["hidden"])["hidden"].square().sum()
        ),
    )
    for name, check in CHECKS.items():
        verdict = check(Case(workload))
        assert verdict.passed is not False, (name, verdict)


def test_a_model_without_blocks_has_nothing_to_recompute():
    workload = Workload(
        "flat",
        lambda: nn.Sequential(nn.Linear(4, 4)),
        lambda size: torch.randn(size, 4),
        lambda m, x: m(x).sum(),
    )
    held = {gate.name: gate.run(Case(workload)).passed for gate in grad_flow.GATES}
    assert held == {
        name: None if name.endswith(("once", "held-bytes")) else True for name in CHECKS
    }


# The saboteurs.


class NoOp(GradFlow):
    """A probe that reads nothing."""

    def __enter__(self):
        super().__enter__()
        self._probed.close()
        self._probing = False
        return self


@contextlib.contextmanager
def changed(owner, **names):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setattr(owner, name, value)
        yield


def sabotaged(owner, **names):
    """Build a probe that replaces attributes of `owner` while its context is open."""

    class Sabotaged(GradFlow):
        def __enter__(self):
            self.sabotage = contextlib.ExitStack()
            self.sabotage.enter_context(changed(owner, **names))
            return super().__enter__()

        def __exit__(self, *raised):
            self.sabotage.close()
            return super().__exit__(*raised)

    return Sabotaged


class AfterClipping(GradFlow):
    """A probe that reads gradients at the optimizer step, after clipping."""

    def _backward_ended(self):
        pass


class FirstMicrobatch(GradFlow):
    """A probe that reads the gradients of the first backward of a window."""

    def _backward_ended(self):
        if not self._read_at:
            super()._backward_ended()


class Averaged(GradFlow):
    """A probe that counts only the last call of a layer."""

    def __enter__(self):
        super().__enter__()
        add = self._activations._add

        def last_only(index, arguments, output):
            for sums in self._activations._sums.values():
                sums[index].zero_()
            add(index, arguments, output)

        self._probed.close()
        self._activations._add = last_only
        self._begin()
        return self


class OffIsFilterless(GradFlow):
    """A probe whose `off` counts recomputed forwards, because recompute is not turned off."""

    def __init__(self, *arguments, recompute="filter", **options):
        super().__init__(*arguments, **options)
        self.passes_over = recompute == "filter"

    def __enter__(self):
        self.sabotage = contextlib.ExitStack()
        if not self.passes_over:
            self.sabotage.enter_context(changed(grad_flow_probe, in_backward=lambda: False))
        return super().__enter__()

    def __exit__(self, *raised):
        self.sabotage.close()
        return super().__exit__(*raised)


class Draws(GradFlow):
    """A probe that draws random numbers, as one that samples elements would."""

    def _read(self, where, scale):
        torch.rand(3)
        super()._read(where, scale)


class CleansGradients(GradFlow):
    """A probe that changes the gradients that it reads, as one that cleans them would."""

    def _read(self, where, scale):
        super()._read(where, scale)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 - 1e-7)


class WritesOutputs(GradFlow):
    """A probe that changes the activation that it reads."""

    def __enter__(self):
        super().__enter__()
        add = self._activations._add
        last = len(self._layers) - 1

        def doubles(index, arguments, output):
            add(index, arguments, output)
            if index == last:
                output.data.mul_(2)

        self._probed.close()
        self._activations._add = doubles
        self._begin()
        return self


class KeepsOutputs(GradFlow):
    """A probe that collects activations and counts them at the end."""

    def __enter__(self):
        super().__enter__()
        self.outputs = []
        add = self._activations._add

        def keeps(index, arguments, output):
            add(index, arguments, output)
            self.outputs.append(output)

        self._probed.close()
        self._activations._add = keeps
        self._begin()
        return self


def with_ones(tensor):
    return tensor + torch.ones_like(tensor)


class KeepsCopies(KeepsOutputs):
    """A probe that collects copies of the outputs, without their graph."""

    def __enter__(self):
        super().__enter__()
        keeps = self._activations._add
        self._probed.close()
        self._activations._add = lambda index, arguments, output: keeps(
            index, arguments, with_ones(output.detach())
        )
        self._begin()
        return self


COUNTS_ALL = sabotaged(grad_flow_probe, in_backward=lambda: False)


def norms_in_half(tensor):
    sums = torch.zeros(4, dtype=torch.float64)
    norm = tensor.detach().to(torch.bfloat16).norm().double()
    sums[0] = tensor.numel()
    sums[3] = norm.square()
    return sums


IN_HALF = sabotaged(grad_flow_probe, sums_of=norms_in_half)


@pytest.mark.parametrize(
    ("check", "saboteur", "in_hint"),
    [
        (grad_flow.exact, NoOp, "left out or counted twice"),
        (grad_flow.exact, AfterClipping, "the gradients are not those"),
        (grad_flow.exact, FirstMicrobatch, "the gradients are not those"),
        (grad_flow.exact, Averaged, "left out or counted twice"),
        (grad_flow.exact, IN_HALF, "left out or counted twice"),
        (grad_flow.layers_counted_once, NoOp, "skip forwards"),
        (grad_flow.layers_counted_once, COUNTS_ALL, "skip forwards"),
        (grad_flow.layers_counted_once, OffIsFilterless, "skip forwards"),
        (grad_flow.flow_same_training, NoOp, "nothing was probed"),
        (grad_flow.flow_same_training, Draws, "draw no random numbers"),
        (grad_flow.flow_same_training, CleansGradients, "write to no tensor"),
        (grad_flow.flow_same_training, WritesOutputs, "write to no tensor"),
        (grad_flow.held_bytes, NoOp, "no call was counted"),
        (grad_flow.held_bytes, KeepsOutputs, "keep sums and no activation"),
        (grad_flow.held_bytes, KeepsCopies, "keep sums and no activation"),
    ],
)
def test_gate_catches(check, saboteur, in_hint):
    verdict = check(Case(SMALL), probe=saboteur)
    assert verdict.passed is False, verdict
    assert in_hint in verdict.hint, verdict
