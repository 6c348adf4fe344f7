"""Tests of the gates of offload and of the compiler's memory budget, and of its strategy.

python -m pytest tests/gates/test_offload.py
"""

import pytest
import torch
from compiled_models import TRACING, block_class, build, dropout, hidden, loss, rows
from saboteurs import claims_by_name, faults, gates
from test_recompute import squares
from torch import nn

from curry_train.gates import recompute
from curry_train.gates.implementation import load_implementation
from curry_train.gates.offload import compare_budgets, compare_freed_bytes, compare_offload
from curry_train.primitives.compile_budget import Budgeted
from curry_train.primitives.strategies import STRATEGIES, Sample
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case, Workload, default_workload

pytestmark = TRACING
GATES = recompute.OFFLOAD_GATES
CHECKS = (compare_offload, compare_freed_bytes)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, gate):
    verdict = gate.run(Case(load_workload(name)))
    assert verdict.passed or (verdict.passed is None and name == "snn"), verdict


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_hold_with_dropout_in_both_precisions(device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    workload = transformer(dropout=0.1, depth=2)
    case = Case(workload, device=torch.device(device), dtype=dtype, batch_size=16)
    for gate in GATES:
        verdict = gate.run(case)
        assert verdict.passed, verdict


@pytest.mark.parametrize("check", CHECKS)
def test_gates_hold_for_a_single_block_and_do_not_apply_to_small_ones(check):
    assert check(Case(transformer(), blocks="layers.1")).passed
    assert check(Case(transformer(), blocks="layers.*.attention_norm")).passed
    small = squares(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in "123"))
    )
    assert check(Case(small)).passed is None


class SavedOutside(nn.Module):
    """Layers whose inputs are saved by the activations between them too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.mark.parametrize("check", CHECKS)
def test_offload_of_what_is_saved_outside_of_the_blocks_too_is_not_applicable(check):
    workload = squares(SavedOutside, lambda size: torch.randn(40, 32))
    verdict = check(Case(workload, blocks="layers.*"))
    assert verdict.passed is None
    assert "saved outside of them too" in verdict.hint


class Chunks(nn.Module):
    """A cell that writes chunks of one storage in turn, of which ours moves the first alone."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(64, 64)

    def forward(self, x):
        return self.cell(x)[0]


@pytest.mark.parametrize("check", CHECKS)
def test_storages_that_ours_reports_as_left_on_the_device_may_stay(check):
    workload = squares(
        lambda: nn.Sequential(*(Chunks() for _ in "123")), lambda size: torch.randn(64, 64)
    )
    assert check(Case(workload)).passed


@pytest.mark.parametrize("name", ["on_cpu", "on_pinned_cpu"])
def test_offload_on_torchs_own_calls_passes_every_gate(name):
    given = [load_implementation(f"offload_blocks=foreign_recompute:{name}")]
    case = Case(load_workload("transformer"))
    verdicts = [gate.run(case, given) for gate in GATES if given[0].name in gate.takes]
    assert [verdict.passed for verdict in verdicts] == [True, True], verdicts


@pytest.mark.parametrize(
    "saboteur",
    [
        one
        for one in faults("faulty_recompute")
        if gates()[claims_by_name()[one.claim].gate] in GATES
    ],
    ids=str,
)
def test_gate_catches(saboteur):
    saboteur.check()


# The compiler's memory budget.


def test_a_budget_does_not_apply_where_nothing_can_be_compiled():
    verdict = compare_budgets(Case(Workload("hidden", lambda: build(hidden()), rows, loss)))
    assert verdict.passed is None, verdict
    assert "nothing of them is compiled" in verdict.hint


@pytest.mark.parametrize("batch", [None, rows()])
def test_the_strategy_bounds_blocks_with_and_without_a_batch(batch):
    model = build(block_class(dropout))
    assert STRATEGIES["memory_budget"].apply(model, Sample(batch, loss)) == ["layers.0", "layers.1"]
    assert all(isinstance(layer, Budgeted) for layer in model.layers)


def test_the_strategy_refuses_what_cannot_be_compiled():
    model = build(hidden())
    with pytest.raises(ValueError, match=r"Hidden_\w+ produced no compiled graph"):
        STRATEGIES["memory_budget"].apply(model, Sample(rows(), loss))


class Transposed(nn.Module):
    """Normalises a transposed tensor, whose layout the compiler takes for another one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(self.norm(x.transpose(1, 2)).transpose(1, 2))


def transposed():
    return nn.Sequential(nn.Linear(8, 8), *(Transposed() for _ in range(2)))


def test_blocks_that_torch_itself_can_not_compile_are_not_applicable():
    """Of torch 2.11 and 2.13: BatchNorm1d has other strides on shapes than its kernel gives."""
    workload = default_workload("transposed", transposed, (transposed(), torch.randn(4, 6, 8)))
    verdict = compare_budgets(Case(workload, batch_size=4, blocks="[12]"))
    assert verdict.passed is None, verdict
    assert "torch.compile itself can't run 2, without a budget either" in verdict.hint


def test_an_error_of_a_budget_alone_stays_one():
    def broken(model, budget, *, blocks):
        raise RuntimeError("only this implementation fails")

    with pytest.raises(RuntimeError, match="only this implementation fails"):
        compare_budgets(Case(load_workload("mlp")), bound_blocks=broken)
