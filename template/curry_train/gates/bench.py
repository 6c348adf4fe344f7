"""Gates of bench: timed steps are training steps of the model, and their figures are right.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..bench.report import Bench, Figures, measure_levers
from ..bench.steps import MEASURED_OUTCOME, Lever, TrainingStep
from ..core.blocks import NoBlocks, find_blocks
from ..core.generators import seeded
from ..core.measure import FlopCount, count_flops
from ..core.measure_compiled import holds_compiled_code
from ..core.parity import OUTER_BOUND, Parity, StepRecord, compare, record
from ..core.timing import (
    FASTER_VERDICT,
    SLOWER_VERDICT,
    Ratio,
    paired_ratio,
    time_in_turns,
    wait_for,
)
from ..plan.optimizers import make_optimizer
from ..plan.timeline import measure_timeline
from ..primitives.recompute import recompute_blocks
from ..workloads.workload import Case
from .verdict import Gate, NotApplicable, Verdict, not_applicable, shared_result

Measure = Callable[..., Bench]
MakeStep = Callable[..., Any]
Time = Callable[..., list[list[float]]]
Ratios = Callable[[Sequence[float], Sequence[float]], Ratio]

# The ratio of a step to itself.

TIMED_ROUNDS = 12
NUM_SWAPS = 400
LEAST_EQUAL_SHARE = 0.92  # 95%, less three standard errors of NUM_SWAPS draws


def compare_with_itself(
    case: Case, *, time: Time = time_in_turns, ratio: Ratios = paired_ratio
) -> Verdict:
    """Compare a step with itself on this machine.

    Swapping the two steps of a round at random must show no difference in 95% of all cases, and a
    step that takes longer in every round must be detected as slower.
    """
    steps = [TrainingStep(case)]
    steps[0]()
    steps.append(TrainingStep(case, like=steps[0]))
    ours, theirs = time(steps, rounds=TIMED_ROUNDS, warmup=1, wait=lambda: wait_for(case.device))

    # The two steps are the same, so each round could as well have come out the other way round.
    pairs = list(zip(ours, theirs, strict=True))
    generator = random.Random(case.seed)
    num_equal = 0
    for _ in range(NUM_SWAPS):
        swapped = [pair if generator.random() < 0.5 else pair[::-1] for pair in pairs]
        num_equal += not _is_different(ratio(*zip(*swapped, strict=True)))

    factor = 1.1 * max(other / one for one, other in pairs)
    detected = _is_different(ratio([factor * one for one in ours], theirs))
    measured = (
        f"no difference in {num_equal / NUM_SWAPS:.1%}; {factor:.2f} times as long "
        f"{'detected' if detected else 'missed'}"
    )
    hint = ""
    if num_equal < LEAST_EQUAL_SHARE * NUM_SWAPS or not detected:
        hint = "compute the interval from the ranks of the rounds' ratios"
    required = f"no difference in at least {LEAST_EQUAL_SHARE:.0%}; detected"
    return Verdict("bench/same", not hint, measured, required, hint)


def _is_different(ratio: Ratio) -> bool:
    return ratio.verdict in (FASTER_VERDICT, SLOWER_VERDICT)


# The step that is timed, against a training loop written out by hand.

LEARNING_RATE = 1e-3


def compare_whole_step(
    case: Case, *, make: MakeStep = TrainingStep, measure: Measure = measure_levers
) -> Verdict:
    """Compare two timed steps with a training loop written out by hand.

    With a learning rate the weights must equal those of the loop. With a learning rate of 0, as
    steps are timed, the weights must not change. A whole benchmark must not change the state of the
    random generators.
    """
    reference = _train_by_hand(case)
    tolerance = _tolerance(case, reference, _train_by_hand(case))
    step = make(case, learning_rate=LEARNING_RATE)
    with seeded(case.seed):
        step()
        value = step()
    trained = compare(reference, _weights(step.model, value.loss), tolerance=tolerance)

    timed = make(case)
    before = _weights(timed.model)
    with seeded(case.seed):
        timed()
        timed()
    unchanged = compare(before, replace(_weights(timed.model), buffers=before.buffers))

    generators = _benchmark(case, measure).generators
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


def _optimizer_of(case: Case, module: nn.Module, *, rate: float) -> torch.optim.Optimizer:
    optimizer = make_optimizer("adamw", module, foreach=case.device.type == "cuda")
    for group in optimizer.param_groups:
        group["lr"] = rate
    return optimizer


def _train_by_hand(case: Case) -> StepRecord:
    """Take two optimizer steps in a plain loop; record the weights and the second loss."""
    module = case.build()
    optimizer = _optimizer_of(case, module, rate=LEARNING_RATE)
    batch = case.batch()
    with seeded(case.seed):
        for _ in range(2):
            optimizer.zero_grad()
            value = case.workload.loss(module, batch) / case.workload.count(batch)
            value.backward()
            optimizer.step()
    return _weights(module, value.item())


def _weights(module: nn.Module, loss: float = 0.0) -> StepRecord:
    """Record weights and buffers, with the weights in the field for gradients."""
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    return StepRecord(torch.tensor(loss), weights, buffers, {})


def _tolerance(case: Case, one: StepRecord, other: StepRecord) -> float:
    """Return 0 if a step by hand repeats itself to the bit."""
    return 0.0 if compare(one, other).bit_equal else OUTER_BOUND[case.dtype]


@dataclass(frozen=True)
class Benchmark:
    """One round of the plain step and the levers that apply; it holds no tensors of the model."""

    rows: Sequence[Figures]
    # The generators after the benchmark, compared with those before it.
    generators: Parity


FULL_LEVER = Lever("full", (lambda model, sample: recompute_blocks(model, blocks=sample.blocks),))
HALVED_LEVER = Lever("accumulate=2", accumulate=2)


def _benchmark(case: Case, measure: Measure) -> Benchmark:
    return shared_result(case, ("benchmark", measure), partial(_measure, case, measure))


def _measure(case: Case, measure: Measure) -> Benchmark:
    levers = [HALVED_LEVER] if case.batch_size > 1 else []
    # Full recompute needs a model that repeats blocks.
    with contextlib.suppress(NoBlocks):
        find_blocks(case.build(), case.blocks)
        levers = [FULL_LEVER, *levers]
    before = record(nn.Identity(), torch.zeros(()))
    found = measure(case, levers, rounds=1, warmup=0)
    generators = compare(before, record(nn.Identity(), torch.zeros(())))
    rows = [row for row in found.rows if row.outcome == MEASURED_OUTCOME]
    return Benchmark(rows, generators)


# FLOPs and peaks, against independent counts.

# Bytes at most: the loss and the gradient norm, which a window holds until its end.
SCALAR_BYTES = 16
# On CUDA, where the allocator rounds up and libraries allocate workspaces.
CUDA_PEAK_TOLERANCE = 0.02
# Plain steps that are compared where a gate would fail. Where a step drops each of three layers
# one time in ten, 40 equal steps come once in 300,000 times, and 8 once in 12.
STEPS_TO_COMPARE = 40


def compare_model_flops(case: Case, *, measure: Measure = measure_levers) -> Verdict:
    """Compare the model's FLOPs with those of a plain loop, and across techniques.

    Neither recompute nor accumulation may raise the model's FLOPs; recomputed FLOPs count only as
    executed FLOPs.
    """
    gate = "bench/flops"
    rows = _benchmark(case, measure).rows
    by_hand = count_flops(case.build(), case.batch(), case.workload.mean_loss).total
    if not by_hand:
        why = "torch has no FLOP formula for anything this model runs"
        return not_applicable(gate, required="FLOPs", why=why)

    wrong = [f"{row.name} {row.model_flops:,}" for row in rows if row.model_flops != by_hand]
    executed = {row.name: row.executed_flops or 0 for row in rows}
    again = executed.get(FULL_LEVER.name, by_hand) - by_hand
    held = not wrong and again >= 0
    measured = (
        f"plain {by_hand:,} by hand; full recomputes {again:,}; "
        f"different with {', '.join(wrong) or 'none'}"
    )
    hint = ""
    if not held:
        _check_equal_steps(case)
        hint = "count forward and backward of the plain model, over all microbatches of the step"
    return Verdict(gate, held, measured, "as by hand, with every lever", hint)


def _check_equal_steps(case: Case) -> None:
    """Raise `NotApplicable` if plain steps of the model differ in their FLOPs."""
    step = TrainingStep(case)
    counts = set()
    with seeded(case.seed):
        for _ in range(STEPS_TO_COMPARE):
            with FlopCount() as count:
                step()
            counts.add(count.flops)
    if len(counts) > 1:
        why = (
            f"steps of this model take {min(counts):,} to {max(counts):,} FLOPs, as where "
            "layers are dropped at random, so one says nothing of the next"
        )
        raise NotApplicable(why, required="steps of equal work")


def compare_peak(case: Case, *, measure: Measure = measure_levers) -> Verdict:
    """Compare the peak of a step, measured next to other steps, with its timeline's peak alone."""
    is_cuda = case.device.type == "cuda"
    required = f"equal but for {SCALAR_BYTES} bytes of loss and norm"
    if is_cuda:
        required = f"within {CUDA_PEAK_TOLERANCE:.0%}"
    elif holds_compiled_code(case.build()):
        why = "compiled code on the CPU has no timeline: measure the model before torch.compile"
        raise NotApplicable(why, required=required)
    recompute = partial(recompute_blocks, blocks=case.blocks)
    changes: Mapping[str, Any] = {"plain": None, FULL_LEVER.name: recompute}
    pairs = {
        row.name: (row.peak_bytes or 0, _peak_alone(case, changes[row.name]))
        for row in _benchmark(case, measure).rows
        if row.name in changes
    }
    share = CUDA_PEAK_TOLERANCE if is_cuda else 0
    wrong = [
        name
        for name, (found, alone) in pairs.items()
        if abs(found - alone) > share * alone + SCALAR_BYTES
    ]
    measured = "; ".join(f"{name} {found:,} of {alone:,}" for name, (found, alone) in pairs.items())
    hint = ""
    if wrong:
        _check_equal_steps(case)
        hint = (
            f"{', '.join(wrong)}: an owner is missing, memory of another step is counted, or the "
            "peak is that of a part of the step"
        )
    return Verdict("bench/peak", not wrong, measured, required, hint)


def _peak_alone(case: Case, change: Callable[[nn.Module], object] | None) -> int:
    module = case.build()
    # As in a timed step: sizes may depend on the weights, as where a graph is pooled.
    optimizer = _optimizer_of(case, module, rate=0.0)
    if change is not None:
        change(module)
    return measure_timeline(
        module, case.batch(), case.workload.mean_loss, optimizer=optimizer
    ).peak.bytes_alive


GATES = (
    Gate("bench/same", compare_with_itself, machine=True),
    Gate("bench/whole-step", compare_whole_step),
    Gate("bench/flops", compare_model_flops),
    Gate("bench/peak", compare_peak),
)
