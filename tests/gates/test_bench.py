"""Tests of the benchmark gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_bench.py
"""

from dataclasses import replace

import pytest
import torch
from saboteurs import faults
from torch import nn

from curry_train.gates import bench
from curry_train.gates.verdict import NotApplicable
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case, Workload

GATES = [*bench.BENCH_TIMING_GATES, *bench.BENCH_FIGURE_GATES]
SMALL = transformer(depth=2, dim=32, length=16, vocabulary=64)
DROPOUT = transformer(depth=2, dim=32, length=8, vocabulary=64, dropout=0.2)
FLAT = Workload(
    "flat",
    lambda: nn.Linear(8, 8),
    lambda size: torch.randn(size, 8),
    lambda module, batch: module(batch).sum(),
)
ELEMENTWISE = replace(FLAT, name="elementwise", build=lambda: nn.LayerNorm(8))


CHECKS = {gate.name: gate.check for gate in GATES}


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, gate):
    verdict = gate.run(Case(load_workload(name)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_hold_with_dropout_in_both_precisions(device, dtype, gate):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    verdict = gate.run(Case(DROPOUT, device=torch.device(device), dtype=dtype))
    assert verdict.passed, verdict


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_gates_hold_on_a_model_without_blocks_and_on_one_sample(gate):
    verdict = gate.run(Case(FLAT, batch_size=1))
    assert verdict.passed, verdict


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_gates_do_not_fail_on_a_model_without_products(gate):
    verdict = gate.run(Case(ELEMENTWISE))
    assert verdict.passed is (None if gate.name == "bench/flops" else True), verdict


# Saboteurs of the timing.


class Dropping(nn.Module):
    """Runs each layer with a probability of a half."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                x = x + layer(x)
        return x + self.layers[0](x)


class Decomposed(nn.Module):
    """Multiplies two weights in each forward, whatever the batch."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, 4))
        self.down = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return x @ (self.up @ self.down)


class Pairwise(nn.Module):
    """Compares each sample with each other one, as contrastive losses do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return y @ y.t()


def workload_of(kind):
    return Workload(
        kind.__name__, kind, lambda size: torch.randn(size, 8), lambda m, x: m(x).square().sum()
    )


def test_gates_say_where_steps_differ_in_work():
    with pytest.raises(NotApplicable, match="FLOPs, as where layers are dropped at random"):
        CHECKS["bench/twice"](Case(workload_of(Dropping)))


@pytest.mark.parametrize("kind", [Decomposed, Pairwise])
def test_microbatches_may_run_more_or_fewer_products_than_the_batch(kind):
    verdict = CHECKS["bench/flops"](Case(workload_of(kind)))
    assert verdict.passed, verdict


# Saboteurs of the step.


# Saboteurs of the figures.


@pytest.mark.parametrize("saboteur", faults("faulty_bench"), ids=str)
def test_gate_catches(saboteur):
    saboteur.check()
