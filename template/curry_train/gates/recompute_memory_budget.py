"""Gates of memory budgets for compiled blocks: same gradients, fewer saved bytes.

Tracing takes most of the time. The gates therefore compile with `aot_eager`, which partitions
forward and backward as inductor does, and only one block of each class.

Proof: `python -m pytest tests/test_memory_budget_gates.py`.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.allocated import saved_bytes
from ..core.blocks import find_blocks
from ..core.compiled import (
    CompileFailed,
    current_budget,
    holds_compiled_code,
    warnings_of_the_compiler_ignored,
    with_own_code,
)
from ..core.parity import Parity, StepRecord, compare, record_step
from ..core.untouched import seeded
from ..core.verdict import Gate, Verdict, not_applicable
from ..core.workload import Case
from ..plan.same_training import OUTER_BOUND, sample_of
from ..plan.strategy import Sample

Bounded = Callable[[nn.Module, Sample, float], list[str]]
BUDGETS = (1.0, 0.5)  # the default of compiled code, and the budget of the strategy
STEPS = (1.0, 0.5, 0.0)  # on the small model, which compiles quickly
MOST_CLASSES = 2


def _bounded(module: nn.Module, sample: Sample, budget: float) -> list[str]:
    # Imported here because it imports the compiler, which takes seconds.
    from ..primitives.memory_budget import memory_budget

    check = {} if sample.batch is None else {"batch": sample.batch, "loss": sample.loss}
    return memory_budget(module, budget, blocks=sample.blocks, backend="aot_eager", **check)


@warnings_of_the_compiler_ignored()
def parity(case: Case, *, apply: Bounded = _bounded) -> Verdict:
    """Compare a step with a budget with the same code at 1.0, and with the eager model."""
    gate = "recompute/budget-parity"
    outer = OUTER_BOUND[case.dtype]
    eager, again = (_step(case, case.build()) for _ in range(2))
    inner = 0.0 if compare(eager, again).bit_equal else outer
    equality = f"within {inner:.0e}" if inner else "bit-equal"
    required = f"{equality} to budget 1.0, within {outer:.0e} of eager"

    sample = _shortened(case)
    steps = list[StepRecord]()
    names = list[str]()
    for budget in BUDGETS:
        module = case.build()
        try:
            names = apply(module, sample, budget)
            steps.append(_step(case, module))
        except CompileFailed as failure:
            return not_applicable(gate, required=required, why=str(failure))
        if not holds_compiled_code(module):
            hint = "uncompiled blocks have no budget: compile them"
            return Verdict(gate, False, "nothing compiled", required, hint)

    to_whole = compare(*steps, tolerance=inner)
    to_eager = _worst(compare(eager, step, tolerance=outer) for step in steps)
    hint = ""
    if not to_whole.holds:
        hint = (
            "the recomputed values differ: the recompute draws other random numbers, which "
            "memory_budget prevents"
        )
    elif not to_eager.holds:
        hint = (
            "compiled code differs from eager at every budget: check what torch.compile does to "
            "the model"
        )
    measured = f"{to_whole.describe(most=1)}; eager: {to_eager.describe(most=1)}"
    measured += f"; {', '.join(names)}"
    return Verdict(gate, not hint, measured, required, hint)


@warnings_of_the_compiler_ignored()
def scope(case: Case, *, apply: Bounded = _bounded) -> Verdict:
    """Check that saved bytes fall with the budget, and that other models are unaffected."""
    gate = "recompute/budget-scope"
    required = "fewer bytes with a budget, and as many as before in other models"
    setting = current_budget()
    others = [_others_bytes()]
    steps = list[int]()
    saved = list[int]()
    for budget in STEPS:
        small = _small()
        apply(small, Sample(None, _sum, blocks="0"), budget)
        if budget == STEPS[-1]:
            others.append(_others_bytes())
        steps.append(saved_bytes(small, torch.ones(64, 16), _sum))
    others.append(_others_bytes())

    try:
        for budget in BUDGETS:
            module = case.build()
            apply(module, _shortened(case), budget)
            saved.append(saved_bytes(module, case.batch(), case.workload.mean_loss))
    except CompileFailed as failure:
        return not_applicable(gate, required=required, why=str(failure))

    hint = ""
    if len(set(others)) > 1 or current_budget() != setting:
        hint = (
            f"the setting was {setting:g}, is {current_budget():g}, and affects other models: set "
            "it only while compiling"
        )
    elif not steps[0] > steps[1] > steps[2]:
        hint = (
            "the budget does not reach the compiler: set "
            "torch._functorch.config.activation_memory_budget"
        )
    elif saved[1] > saved[0]:
        hint = "the budget raises the saved bytes here: choose other blocks, or recompute_blocks"
    elif saved[1] == saved[0]:
        why = (
            f"{saved[0]:,} bytes with and without a budget: the blocks save nothing that could be "
            "recomputed"
        )
        return not_applicable(gate, required=required, why=why)
    measured = (
        f"{_listed(saved)} bytes at {_listed(BUDGETS)}; small model {_listed(steps)}; "
        f"other model {_listed(others)}"
    )
    return Verdict(gate, not hint, measured, required, hint)


GATES = (Gate("recompute/budget-parity", parity), Gate("recompute/budget-scope", scope))


def _shortened(case: Case) -> Sample:
    """Choose the last block of each class: gradients flow into it, as into most blocks."""
    last = {type(block): name for name, block in find_blocks(case.build(), case.blocks).items()}
    return replace(sample_of(case), blocks=list(last.values())[-MOST_CLASSES:])


def _step(case: Case, module: nn.Module) -> StepRecord:
    with seeded(case.seed):
        return record_step(module, case.batch(), case.workload.mean_loss)


def _worst(found: Iterable[Parity]) -> Parity:
    return max(found, key=lambda parity: (not parity.holds, parity.worst))


def _small() -> nn.Module:
    """Build a model whose saved bytes fall in two steps."""
    return nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU()))


def _sum(module: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    return module(batch).sum()


def _others_bytes() -> int:
    """Count the bytes that the small model saves when it is compiled without a budget."""
    model = _small()
    compiled = torch.compile(with_own_code(model, name="another_model"), backend="aot_eager")
    return saved_bytes(model, torch.ones(64, 16), lambda _, batch: _sum(compiled, batch))


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:,}" for value in values)
