"""Tests of the gates of the compile memory budget, and of its strategy.

python -m pytest tests/gates/test_memory_budget_gates.py
"""

import pytest
import torch
import torch._functorch.config as functorch_config
from compiled_models import TRACING, block_class, build, dropout, hidden, loss, rows
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from curry_train.core.blocks import find_blocks
from curry_train.core.measure_compiled import with_own_code
from curry_train.gates import recompute
from curry_train.primitives.compile_budget import Budgeted, memory_budget
from curry_train.primitives.recompute import recompute_blocks
from curry_train.primitives.strategies import STRATEGIES, Sample
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case, Workload, default_workload

pytestmark = TRACING


@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name):
    verdicts = [gate.run(Case(load_workload(name))) for gate in recompute.MEMORY_BUDGET_GATES]
    assert [verdict.passed for verdict in verdicts] == [True, None if name == "snn" else True], (
        verdicts
    )


def test_gates_hold_with_dropout_in_half_precision():
    case = Case(
        transformer(dropout=0.1, depth=1, dim=32, length=16),
        dtype=torch.bfloat16,
        blocks="layers.*",
    )
    for gate in recompute.MEMORY_BUDGET_GATES:
        verdict = gate.run(case)
        assert verdict.passed, verdict


def by_the_setting(set_budget):
    """Build a technique: torch itself compiles blocks, at a budget set by `set_budget`."""

    def apply(module, sample, budget):
        names = list(find_blocks(module, sample.blocks))
        for name in names:
            block = module.get_submodule(name)
            code = with_own_code(block.forward, name="saboteur")
            block.forward = torch.compile(code, backend=set_budget(budget))
        return names

    return apply


def scoped(budget):
    def backend(graph, inputs):
        with functorch_config.patch(activation_memory_budget=budget):
            return lookup_backend("aot_eager")(graph, inputs)

    return backend


def leaking(budget):
    functorch_config.activation_memory_budget = budget
    return "aot_eager"


def leaking_when_it_compiles(budget):
    def backend(graph, inputs):
        functorch_config.activation_memory_budget = budget
        return lookup_backend("aot_eager")(graph, inputs)

    return backend


def on_the_wrong_object(budget):
    torch._dynamo.activation_memory_budget = budget
    return "aot_eager"


def no_op(module, sample, budget):
    return list(find_blocks(module, sample.blocks))


def detached(module, sample, budget):
    names = memory_budget(module, budget, blocks=sample.blocks, backend="aot_eager")
    module.get_submodule(names[0]).register_forward_pre_hook(
        lambda _, args: (args[0].detach(), *args[1:])
    )
    return names


def more_detached_with_a_budget(module, sample, budget):
    return (detached if budget < 1 else recompute._bounded)(module, sample, budget)


def without_compiling(module, sample, budget):
    return recompute_blocks(module, blocks=sample.blocks)


@pytest.mark.parametrize(
    ("check", "saboteur", "disturb", "message"),
    [
        (recompute.budget_parity, by_the_setting(scoped), dropout, "draws other random numbers"),
        (recompute.budget_parity, more_detached_with_a_budget, None, "recomputed values differ"),
        (recompute.budget_parity, detached, None, "at every budget"),
        (recompute.budget_parity, no_op, None, "uncompiled blocks"),
        (recompute.budget_parity, without_compiling, None, "uncompiled blocks"),
        (recompute.scope, by_the_setting(leaking), None, "affects other models"),
        (recompute.scope, by_the_setting(leaking_when_it_compiles), None, "affects other models"),
        (recompute.scope, by_the_setting(on_the_wrong_object), None, "does not reach the compiler"),
        (recompute.scope, no_op, None, "does not reach the compiler"),
    ],
)
def test_gate_catches(check, saboteur, disturb, message):
    block = block_class(*filter(None, [disturb]))
    case = Case(Workload("blocks", lambda: build(block), rows, loss), batch_size=64)
    with functorch_config.patch(activation_memory_budget=1.0):  # undo the changes of a saboteur
        verdict = check(case, apply=saboteur)
    assert verdict.passed is False, verdict
    assert message in verdict.hint, verdict


def test_gates_do_not_apply_where_nothing_can_be_compiled_or_computed_again():
    block = hidden()
    for gate in recompute.MEMORY_BUDGET_GATES:
        verdict = gate.run(Case(Workload("hidden", lambda: build(block), rows, loss)))
        assert verdict.passed is None, verdict
        assert "produced no compiled graph" in verdict.hint


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


class Small(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8))


def transposed():
    return nn.Sequential(nn.Linear(8, 8), *(Transposed() for _ in range(2)))


@pytest.mark.parametrize(
    "check", [recompute.budget_parity, pytest.param(recompute.scope, marks=pytest.mark.long)]
)
def test_blocks_that_torch_itself_can_not_compile_are_not_judged(check):
    """Of torch 2.11 and 2.13: BatchNorm1d has other strides on shapes than its kernel gives."""
    workload = default_workload("transposed", transposed, (transposed(), torch.randn(4, 6, 8)))
    case = Case(workload, batch_size=4, blocks="[12]")
    verdict = check(case)
    assert verdict.passed is None, verdict
    assert "torch.compile itself can't run 2, without a budget either" in verdict.hint


def test_an_error_of_the_implementation_alone_stays_one():
    def broken(module, sample, budget):
        raise RuntimeError("only this implementation fails")

    workload = default_workload("small", Small, (Small(), torch.randn(2, 8)))
    with pytest.raises(RuntimeError, match="only this implementation fails"):
        recompute.budget_parity(Case(workload, blocks="[01]"), apply=broken)
