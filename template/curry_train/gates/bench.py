"""A benchmark says how long a step takes, and nothing of what the machine did; and what it times is training.

Each gate takes the technique as an argument, so that its tests can plant a wrong one. How steps are timed is checked on
a planted machine, whose clock is an account of the work given to it: the answer does not depend on who else is busy.
Proof: `python -m pytest tests/test_bench.py`.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.measure import FlopCount
from ..core.paired import Ratio, Spread, paired_ratio, spread_of
from ..core.parity import StepRecord, compare, record
from ..core.planted_machine import PlantedMachine
from ..core.turns import time_in_turns
from ..core.untouched import seeded
from ..core.verdict import Gate, Verdict
from ..core.workload import Case
from ..plan.bench import measure_levers
from ..plan.bench_report import Bench
from ..plan.optimizers import make_optimizer
from ..plan.same_training import OUTER_BOUND
from ..plan.training_step import TrainingStep

Measure = Callable[..., Bench]
MakeStep = Callable[..., Any]
Time = Callable[..., list[list[float]]]
Ratios = Callable[[Sequence[float], Sequence[float]], Ratio]
Summary = Callable[[Sequence[float]], Spread]

ROUNDS, WARMUP = 12, 3
EACH_ROUND = 3  # steps: one, and two at once
SWAPS, OFTEN = 400, 0.92  # 95%, less three standard errors of so many draws
RATE = 1e-3


def twice(
    case: Case,
    *,
    time: Time = time_in_turns,
    ratio: Ratios = paired_ratio,
    summary: Summary = spread_of,
) -> Verdict:
    """A step that is taken twice takes 2.00 times as long, on a machine that slows down by a third, is slow at first,
    stalls now and then, and answers before it is done."""
    step = TrainingStep(case)
    work = [_work_of(step, 1), _work_of(step, 2)]
    machine = PlantedMachine(
        unit=work[0],
        steps=EACH_ROUND * (WARMUP + ROUNDS),
        cold_steps=EACH_ROUND * WARMUP,
        stall_every=11,
    )
    ways = [lambda amount=amount: machine.launch(amount) for amount in work]
    once, double = time(ways, rounds=ROUNDS, warmup=WARMUP, clock=machine.clock, wait=machine.wait)
    found, spread = ratio(double, once), summary(once)
    wide = spread.upper / spread.lower - 1 if spread.lower else float("inf")
    off, allowed = abs(found.median - 2), 2 * machine.drift_of(EACH_ROUND)
    hint = ""
    if off > allowed:
        hint = "wait for the device before and after each step, take turns, and hold each round against itself"
    elif wide > machine.drift:
        hint = "leave the warm-up out, and tell the tenths of the steps: one stall is no spread"
    measured = f"{found.median:.3f} times; steps spread over {wide:.0%}"
    required = f"2 within {allowed:.3f}; {machine.drift:.0%} at most"
    return Verdict("bench/twice", not hint, measured, required, hint)


def same(case: Case, *, time: Time = time_in_turns, ratio: Ratios = paired_ratio) -> Verdict:
    """A step against itself, timed for real: whichever of the two is called ours in each round, no difference is seen
    in 95% of all cases; and what takes longer in every round is seen to be slower."""
    steps = [TrainingStep(case)]
    steps[0]()
    steps.append(TrainingStep(case, like=steps[0]))
    ours, theirs = time(steps, rounds=ROUNDS, warmup=1, wait=steps[0].wait)
    pairs, draw, unseen = list(zip(ours, theirs, strict=True)), random.Random(case.seed), 0
    for _ in range(
        SWAPS
    ):  # where nothing differs, each round could as well have come out the other way
        swapped = [pair if draw.random() < 0.5 else pair[::-1] for pair in pairs]
        unseen += not _sees(ratio([one for one, _ in swapped], [other for _, other in swapped]))
    longer = 1.1 * max(other / one for one, other in pairs)
    seen = _sees(ratio([longer * one for one, _ in pairs], [other for _, other in pairs]))
    here = ratio(ours, theirs)
    span = "no interval" if here.lower is None else f"{here.lower:.2f} to {here.upper:.2f}"
    measured = f"{unseen / SWAPS:.1%} unseen; {longer:.2f} times {'seen' if seen else 'unseen'}; here {span}"
    hint = (
        ""
        if unseen >= OFTEN * SWAPS and seen
        else "take the interval from the ranks of the rounds' ratios"
    )
    return Verdict("bench/same", not hint, measured, f"{OFTEN:.0%} at least; seen", hint)


def whole_step(
    case: Case, *, make: MakeStep = TrainingStep, measure: Measure = measure_levers
) -> Verdict:
    """Two of the steps that are timed, with a learning rate, leave the weights where a loop by hand does. Without one,
    as they are timed, weights stay; and so do random generators after a whole benchmark."""
    reference = _by_hand(case)
    tolerance = 0.0 if compare(reference, _by_hand(case)).bit_equal else OUTER_BOUND[case.dtype]
    step, resting = make(case, learning_rate=RATE), make(case)
    before = replace(_state(resting.model, torch.zeros(())), buffers={})
    with seeded(case.seed):
        for _ in range(2):
            value = step()
    with seeded(case.seed):
        for _ in range(2):
            resting()
    trained = compare(reference, _state(step.model, torch.tensor(value.loss)), tolerance=tolerance)
    stayed = compare(before, replace(_state(resting.model, torch.zeros(())), buffers={}))
    start = record(nn.Identity(), torch.zeros(()))
    measure(case, rounds=1, warmup=0)
    left = compare(start, record(nn.Identity(), torch.zeros(())))
    measured = f"{trained.describe(most=1)}; timed {stayed.describe(most=1)}; generators {left.describe(most=1)}"
    required = f"{'bit-equal' if not tolerance else f'within {tolerance:.0e}'} by hand; weights and generators stay"
    hint = ""
    if not trained.holds:
        hint = "drop gradients, run forward and backward of every microbatch, divide once, and take the step"
    elif not stayed.holds:
        hint = "time with a learning rate of 0: each step then does what the one before it did"
    elif not left.holds:
        hint = "seed within a context that puts the generators back"
    return Verdict("bench/whole-step", not hint, measured, required, hint)


GATES = (
    Gate("bench/twice", twice),
    Gate("bench/same", same),
    Gate("bench/whole-step", whole_step),
)


def _sees(ratio: Ratio) -> bool:
    return (
        ratio.lower is not None and ratio.upper is not None and not ratio.lower <= 1 <= ratio.upper
    )


def _work_of(step: TrainingStep, repeats: int) -> float:
    """FLOPs that so many steps run; their number, where torch has no formula for anything in them."""
    with FlopCount() as count:
        for _ in range(repeats):
            step()
    return float(count.flops or repeats)


def _by_hand(case: Case) -> StepRecord:
    """The weights after two optimizer steps as anybody would write them, and the second loss."""
    module, batch = case.build(), case.batch()
    optimizer = make_optimizer("adamw", module, foreach=case.device.type == "cuda")
    for group in optimizer.param_groups:
        group["lr"] = RATE
    with seeded(case.seed):
        for _ in range(2):
            optimizer.zero_grad()
            value = case.workload.loss(module, batch) / case.workload.count(batch)
            value.backward()
            optimizer.step()
    return _state(module, torch.tensor(value.item()))


def _state(module: nn.Module, loss: Tensor) -> StepRecord:
    """Weights in the place of gradients."""
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    return StepRecord(loss, weights, buffers, {})
