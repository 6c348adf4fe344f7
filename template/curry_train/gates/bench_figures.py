"""Gates of the benchmark's memory and FLOP figures: they equal independent counts.

Each gate takes the benchmark as an argument, so that its tests can plant a wrong one.

Proof: `python -m pytest tests/test_bench.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..core.blocks import NoBlocks, find_blocks
from ..core.verdict import Gate, Verdict, not_applicable
from ..core.workload import Case, Workload
from ..plan.bench import measure_levers
from ..plan.bench_report import MEASURED, Bench
from ..plan.levers import Lever
from ..plan.optimizers import make_optimizer
from ..plan.step_lives import record_step
from ..plan.timeline import timeline_of
from ..primitives.recompute import recompute_blocks

Measure = Callable[..., Bench]

# Bytes at most: the loss and the gradient norm, which a window holds until its end.
SCALARS = 16
# On CUDA, where the allocator rounds up and libraries allocate workspaces.
CLOSE = 0.02
FULL = Lever("full", (lambda model, sample: recompute_blocks(model, blocks=sample.blocks),))
HALVED = Lever("accumulate=2", accumulate=2)
# Widths of a chain of layers, and its batch size.
FIRST = 24
SECOND = 40
THIRD = 16
ROWS = 8


def flops(case: Case, *, measure: Measure = measure_levers) -> Verdict:
    """Compare the model's FLOPs with a count by hand, and across techniques.

    Neither recompute nor accumulation may raise the model's FLOPs; recomputed FLOPs count only as
    executed FLOPs.
    """
    gate = "bench/flops"
    by_hand = 2 * ROWS * (2 * FIRST * SECOND + 3 * SECOND * THIRD)  # the batch gets no gradient
    chain = replace(case, workload=_chain(), batch_size=ROWS, blocks=None)
    counted = measure(chain, rounds=1, warmup=0).plain.model_flops
    case = replace(case, batch_size=min(case.batch_size, 2))
    rows = [
        row
        for row in measure(case, _levers(case), rounds=1, warmup=0).rows
        if row.outcome == MEASURED
    ]
    plain = rows[0].model_flops or 0
    if not plain:
        return not_applicable(
            gate, required="FLOPs", why="torch has no FLOP formula for anything this model runs"
        )

    differing = [f"{row.name} {row.model_flops:,}" for row in rows if row.model_flops != plain]
    recomputed = {row.name: (row.executed_flops or 0) - plain for row in rows}
    held = (
        counted == by_hand
        and not differing
        and min(recomputed.values()) >= 0
        and recomputed.get(HALVED.name, 0) == 0
    )
    again = f", full recomputes {recomputed[FULL.name]:,}" if FULL.name in recomputed else ""
    measured = (
        f"chain {counted:,} of {by_hand:,}; plain {plain:,}{again}; "
        f"different with {', '.join(differing) or 'none'}"
    )
    hint = ""
    if not held:
        hint = "count forward and backward of the plain model, over all microbatches of the step"
    return Verdict(gate, held, measured, "as by hand; equal with every lever", hint)


def peak(case: Case, *, measure: Measure = measure_levers) -> Verdict:
    """Compare the peak of a step beside other configurations with its timeline's peak alone."""
    rows = measure(
        case, [lever for lever in _levers(case) if lever is FULL], rounds=1, warmup=0
    ).rows
    changes = {"plain": None, FULL.name: partial(recompute_blocks, blocks=case.blocks)}
    pairs = {
        row.name: (row.peak_bytes or 0, _peak_alone(case, changes[row.name]))
        for row in rows
        if row.outcome == MEASURED
    }
    is_cuda = case.device.type == "cuda"
    wrong = [
        name
        for name, (found, alone) in pairs.items()
        if abs(found - alone) > (CLOSE * alone if is_cuda else 0) + SCALARS
    ]
    measured = "; ".join(f"{name} {found:,} of {alone:,}" for name, (found, alone) in pairs.items())
    required = f"equal but for {SCALARS} bytes of loss and norm"
    if is_cuda:
        required = f"within {CLOSE:.0%}"
    hint = ""
    if wrong:
        hint = f"{', '.join(wrong)}: an owner is missing, or memory of another step is counted"
    return Verdict("bench/peak", not wrong, measured, required, hint)


GATES = (
    Gate("bench/flops", flops),
    Gate("bench/peak", peak),
)


def _levers(case: Case) -> list[Lever]:
    """Choose the levers that apply; full recompute needs a model that repeats blocks."""
    levers = [HALVED] if case.batch_size > 1 else []
    try:
        find_blocks(case.build(), case.blocks)
    except NoBlocks:
        return levers
    return [FULL, *levers]


def _chain() -> Workload:
    return Workload(
        "chain",
        lambda: nn.Sequential(nn.Linear(FIRST, SECOND), nn.GELU(), nn.Linear(SECOND, THIRD)),
        lambda size: torch.randn(size, FIRST),
        lambda module, batch: module(batch).float().square().sum(),
    )


def _peak_alone(case: Case, change: Callable[[nn.Module], object] | None) -> int:
    module = case.build()
    optimizer = make_optimizer("adamw", module, foreach=case.device.type == "cuda")
    if change is not None:
        change(module)
    lives = record_step(module, case.batch(), case.workload.mean_loss, optimizer=optimizer)
    return timeline_of(lives, type(module).__name__).peak.bytes_alive
