"""Gates on models with complex parameters, as operators in Fourier space have them.

python -m pytest tests/gates/test_complex_parameters.py
"""

import pytest
import torch
from torch import nn

from curry_train.gates import checkpoint_policy, grad_accum, grad_flow, loss_spike, memory_plan
from curry_train.primitives import grad_flow_probe
from curry_train.workloads.workload import Case, default_workload

WIDTH = 64


class SpectralBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.inner = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))

    def forward(self, x):
        spectrum = torch.fft.rfft(x) * self.weight
        return x + self.inner(torch.fft.irfft(spectrum, n=WIDTH))


class Operator(nn.Module):
    """Makes its grid in the first forward, and keeps it."""

    def __init__(self):
        super().__init__()
        self.grid = None
        self.blocks = nn.Sequential(*(SpectralBlock() for _ in range(3)))

    def forward(self, x):
        if self.grid is None:
            self.grid = torch.linspace(0, 1, WIDTH, dtype=x.dtype, device=x.device)
        return self.blocks(x + self.grid)


@pytest.fixture(scope="module")
def case():
    def build():
        return Operator()

    workload = default_workload("operator", build, (build(), torch.randn(64, WIDTH)))
    return Case(workload, batch_size=64)


@pytest.mark.parametrize(
    "check",
    [
        checkpoint_policy.compare_resumed,
        grad_accum.non_finite,
        grad_flow.exact,
        grad_flow.held_bytes,
        loss_spike.check_recovery,
        memory_plan.compare_estimate,
        memory_plan.check_budget,
    ],
)
def test_gates_hold_with_complex_parameters(case, check):
    verdict = check(case)
    assert verdict.passed, verdict


def test_torchs_scaler_takes_no_complex_gradients(case):
    verdict = grad_accum.scaled_window(case)
    assert verdict.passed is None
    assert "no complex gradients" in verdict.hint
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(NotImplementedError, match="not implemented for 'ComplexFloat'"):
        scaler.unscale_(torch.optim.SGD([parameter]))


def test_the_gate_catches_a_probe_that_leaves_imaginary_parts_out(case, monkeypatch):
    monkeypatch.setattr(grad_flow_probe, "_numbers", lambda tensor: tensor.detach().real)
    assert grad_flow.exact(case).passed is False
