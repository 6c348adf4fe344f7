"""Gates of the benchmark's timings: step times exclude machine effects, and steps train.

Each gate takes the technique as an argument, so that its tests can plant a wrong one. The timing
is checked on a planted machine whose clock counts the work given to it, so the result does not
depend on the load of the real machine.

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

ROUNDS = 12
WARMUP = 3
EACH_ROUND = 3  # steps: one, and two at once
SWAPS = 400
OFTEN = 0.92  # 95%, less three standard errors of SWAPS draws
RATE = 1e-3


def twice(
    case: Case,
    *,
    time: Time = time_in_turns,
    ratio: Ratios = paired_ratio,
    summary: Summary = spread_of,
) -> Verdict:
    """Measure a doubled step as 2.00 times a single one, on an adversarial planted machine.

    The machine slows down by a third, is slow during warm-up, stalls now and then, and returns from
    a launch before the work is done.
    """
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

    found = ratio(double, once)
    spread = summary(once)
    relative_spread = spread.upper / spread.lower - 1 if spread.lower else float("inf")
    error = abs(found.median - 2)
    allowed = 2 * machine.drift_of(EACH_ROUND)

    hint = ""
    if error > allowed:
        hint = (
            "wait for the device before and after each step, alternate the steps, and compare "
            "them within each round"
        )
    elif relative_spread > machine.drift:
        hint = (
            "exclude the warm-up, and report the tenths of the steps: one stall is not the spread"
        )
    measured = f"{found.median:.3f} times; steps spread over {relative_spread:.0%}"
    required = f"2 within {allowed:.3f}; spread at most {machine.drift:.0%}"
    return Verdict("bench/twice", not hint, measured, required, hint)


def same(case: Case, *, time: Time = time_in_turns, ratio: Ratios = paired_ratio) -> Verdict:
    """Compare a step with itself on the real machine.

    Swapping the two steps of a round at random must show no difference in 95% of all cases, and a
    step that takes longer in every round must be detected as slower.
    """
    steps = [TrainingStep(case)]
    steps[0]()
    steps.append(TrainingStep(case, like=steps[0]))
    ours, theirs = time(steps, rounds=ROUNDS, warmup=1, wait=steps[0].wait)

    # The two steps are the same, so each round could as well have come out the other way round.
    pairs = list(zip(ours, theirs, strict=True))
    generator = random.Random(case.seed)
    num_equal = 0
    for _ in range(SWAPS):
        swapped = [pair if generator.random() < 0.5 else pair[::-1] for pair in pairs]
        num_equal += not _sees(ratio([one for one, _ in swapped], [other for _, other in swapped]))

    factor = 1.1 * max(other / one for one, other in pairs)
    detected = _sees(ratio([factor * one for one, _ in pairs], [other for _, other in pairs]))

    unswapped = ratio(ours, theirs)
    interval = "no interval"
    if unswapped.lower is not None:
        interval = f"{unswapped.lower:.2f} to {unswapped.upper:.2f}"
    measured = (
        f"no difference in {num_equal / SWAPS:.1%}; {factor:.2f} times as long "
        f"{'detected' if detected else 'missed'}; measured ratio {interval}"
    )
    hint = ""
    if num_equal < OFTEN * SWAPS or not detected:
        hint = "compute the interval from the ranks of the rounds' ratios"
    required = f"no difference in at least {OFTEN:.0%}; detected"
    return Verdict("bench/same", not hint, measured, required, hint)


def whole_step(
    case: Case, *, make: MakeStep = TrainingStep, measure: Measure = measure_levers
) -> Verdict:
    """Compare two timed steps with a training loop written out by hand.

    With a learning rate the weights must equal those of the loop. With a learning rate of 0, as
    steps are timed, the weights must not change. A whole benchmark must not change the state of the
    random generators.
    """
    reference = _by_hand(case)
    tolerance = 0.0 if compare(reference, _by_hand(case)).bit_equal else OUTER_BOUND[case.dtype]

    step = make(case, learning_rate=RATE)
    with seeded(case.seed):
        for _ in range(2):
            value = step()
    trained = compare(reference, _state(step.model, torch.tensor(value.loss)), tolerance=tolerance)

    timed = make(case)
    before = replace(_state(timed.model, torch.zeros(())), buffers={})
    with seeded(case.seed):
        for _ in range(2):
            timed()
    unchanged = compare(before, replace(_state(timed.model, torch.zeros(())), buffers={}))

    start = record(nn.Identity(), torch.zeros(()))
    measure(case, rounds=1, warmup=0)
    generators = compare(start, record(nn.Identity(), torch.zeros(())))

    measured = (
        f"{trained.describe(most=1)}; timed {unchanged.describe(most=1)}; "
        f"generators {generators.describe(most=1)}"
    )
    equality = f"within {tolerance:.0e}" if tolerance else "bit-equal"
    required = f"{equality} to the loop by hand; weights and generators unchanged"
    hint = ""
    if not trained.holds:
        hint = (
            "drop gradients, run forward and backward of every microbatch, divide once, and take "
            "the step"
        )
    elif not unchanged.holds:
        hint = "time with a learning rate of 0, so that every step starts from the same weights"
    elif not generators.holds:
        hint = "seed inside a context that restores the generators"
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
    """Count the FLOPs of `repeats` steps; return `repeats` if torch has no formula for them."""
    with FlopCount() as count:
        for _ in range(repeats):
            step()
    return float(count.flops or repeats)


def _by_hand(case: Case) -> StepRecord:
    """Take two optimizer steps in a plain loop; record the weights and the second loss."""
    module = case.build()
    batch = case.batch()
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
    """Record weights and buffers, with the weights in the field for gradients."""
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    return StepRecord(loss, weights, buffers, {})
