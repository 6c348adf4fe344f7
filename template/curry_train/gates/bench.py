"""Gates of bench: its clock, its ratios and its figures are right.

Each gate takes the technique as an argument, so that its tests can plant a wrong one. The timing
is checked on a planted machine whose clock counts the work given to it, so the result does not
depend on the load of the real machine.

Why so long: the gates of one technique, of its timings and of its figures.

Proof: `python -m pytest tests/gates/test_bench.py`.
"""

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..bench.report import MEASURED_OUTCOME, Bench, Figures, measure_levers
from ..bench.steps import LEVER_HELP, Lever, TrainingStep, find_lever, list_levers, python_calls
from ..core.blocks import NoBlocks, find_blocks
from ..core.measure import FlopCount, count_flops
from ..core.parity import OUTER_BOUND, StepRecord, compare, record
from ..core.rerun import seeded
from ..core.timing import Ratio, Spread, paired_ratio, spread_of, time_in_turns
from ..plan.optimizers import make_optimizer
from ..plan.timeline import record_step_storages, timeline_of
from ..primitives.recompute import recompute_blocks
from ..primitives.strategies import STRATEGIES, Sample
from ..workloads.workload import Case, Workload, batch_size
from .fixtures import PlantedMachine
from .verdict import Gate, Judged, NotApplicable, Takes, Verdict, not_applicable, unlike, unrefused

# Gates of the benchmark's timings: step times exclude machine effects, and steps train.

Measure = Callable[..., Bench]
MakeStep = Callable[..., Any]
Time = Callable[..., list[list[float]]]
Ratios = Callable[[Sequence[float], Sequence[float]], Ratio]
Summary = Callable[[Sequence[float]], Spread]

TIMED_ROUNDS = 12
WARMUP_ROUNDS = 3
EACH_ROUND = 3  # steps: one, and two at once
NUM_SWAPS = 400
LEAST_EQUAL_SHARE = 0.92  # 95%, less three standard errors of SWAPS draws
LEARNING_RATE = 1e-3


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
        steps=EACH_ROUND * (WARMUP_ROUNDS + TIMED_ROUNDS),
        cold_steps=EACH_ROUND * WARMUP_ROUNDS,
        stall_every=11,
    )
    ways = [lambda amount=amount: machine.launch(amount) for amount in work]
    once, double = time(
        ways, rounds=TIMED_ROUNDS, warmup=WARMUP_ROUNDS, clock=machine.clock, wait=machine.wait
    )

    found = ratio(double, once)
    spread = summary(once)
    relative_spread = spread.upper / spread.lower - 1 if spread.lower else float("inf")
    error = abs(found.median - 2)
    allowed = 2 * machine.drift_of(EACH_ROUND)

    if error > allowed or relative_spread > machine.drift:
        _check_equal_steps(case)
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


def step_against_itself(
    case: Case, *, time: Time = time_in_turns, ratio: Ratios = paired_ratio
) -> Verdict:
    """Compare a step with itself on the real machine.

    Swapping the two steps of a round at random must show no difference in 95% of all cases, and a
    step that takes longer in every round must be detected as slower.
    """
    steps = [TrainingStep(case)]
    steps[0]()
    steps.append(TrainingStep(case, like=steps[0]))
    ours, theirs = time(steps, rounds=TIMED_ROUNDS, warmup=1, wait=steps[0].wait)

    # The two steps are the same, so each round could as well have come out the other way round.
    pairs = list(zip(ours, theirs, strict=True))
    generator = random.Random(case.seed)
    num_equal = 0
    for _ in range(NUM_SWAPS):
        swapped = [pair if generator.random() < 0.5 else pair[::-1] for pair in pairs]
        num_equal += not _sees(ratio([one for one, _ in swapped], [other for _, other in swapped]))

    factor = 1.1 * max(other / one for one, other in pairs)
    detected = _sees(ratio([factor * one for one, _ in pairs], [other for _, other in pairs]))

    unswapped = ratio(ours, theirs)
    interval = "no interval"
    if unswapped.lower is not None:
        interval = f"{unswapped.lower:.2f} to {unswapped.upper:.2f}"
    measured = (
        f"no difference in {num_equal / NUM_SWAPS:.1%}; {factor:.2f} times as long "
        f"{'detected' if detected else 'missed'}; measured ratio {interval}"
    )
    hint = ""
    if num_equal < LEAST_EQUAL_SHARE * NUM_SWAPS or not detected:
        hint = "compute the interval from the ranks of the rounds' ratios"
    required = f"no difference in at least {LEAST_EQUAL_SHARE:.0%}; detected"
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

    step = make(case, learning_rate=LEARNING_RATE)
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


class TimedSteps:
    """Records of what runs between two readings of a clock: samples, steps and gradients.

    It watches every optimizer of torch, so that no step under test reports on itself.
    """

    def __init__(self, case: Case) -> None:
        self.is_timed = False
        self.samples: list[list[int]] = []  # of each call of the loss, of each timed step
        self.gradients: list[list[list[Tensor | None]]] = []  # of each optimizer step of these
        workload = case.workload

        def loss(module: nn.Module, batch: Any) -> Tensor:
            if self.is_timed:
                self.samples[-1].append(batch_size(batch))
            return workload.loss(module, batch)

        self.case = replace(case, workload=replace(workload, loss=loss))

    def clock(self) -> float:
        """Read the time; every second reading ends a timed step."""
        self.is_timed = not self.is_timed
        if self.is_timed:
            self.samples.append([])
            self.gradients.append([])
        return time.perf_counter()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        handle = register_optimizer_step_pre_hook(self._before_step)
        try:
            yield
        finally:
            handle.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.is_timed:
            owned = [one for group in optimizer.param_groups for one in group["params"]]
            copies = [None if one.grad is None else one.grad.detach().clone() for one in owned]
            self.gradients[-1].append(copies)


def timed_step(case: Case, *, measure: Measure = measure_levers) -> Verdict:
    """Compare the steps that are timed with a step by hand: samples, optimizer steps, gradients.

    Timed are the plain step, full recompute and two microbatches. Where the batch is cut up, random
    numbers may differ, so gradients are compared only where it is not.
    """
    by_hand = TimedSteps(case)
    with by_hand.watch():
        for _ in range(2):
            module = case.build()
            optimizer = make_optimizer("adamw", module, foreach=case.device.type == "cuda")
            batch = case.batch()
            by_hand.clock()
            with seeded(case.seed):
                (by_hand.case.workload.loss(module, batch) / case.workload.count(batch)).backward()
                optimizer.step()
            by_hand.clock()
    first, again = (_as_record(steps[0]) for steps in by_hand.gradients)
    tolerance = 0.0 if compare(first, again).bit_equal else OUTER_BOUND[case.dtype]

    timed, rows = _measured(case, measure)
    num_measured = len(rows)
    short = [sizes for sizes in timed.samples if sum(sizes) != case.batch_size]
    without_step = sum(len(steps) != 1 for steps in timed.gradients)
    found = [
        compare(first, _as_record(steps[0]), tolerance=tolerance)
        for sizes, steps in zip(timed.samples, timed.gradients, strict=True)
        if len(sizes) == 1 and len(steps) == 1
    ]
    differing = [parity for parity in found if not parity.holds]

    hint = ""
    if len(timed.samples) != num_measured:
        hint = "read the clock that is given once before and once after each step"
    elif without_step:
        hint = "time the whole step: forward, backward and one step of the optimizer"
    elif short:
        hint = f"a timed step takes {sum(short[0])} of {case.batch_size} samples: time all of them"
    elif differing or not found:
        hint = "time the step that is checked: its gradients differ from those by hand"
    measured = (
        f"{len(timed.samples)} timed steps, {len(short)} with other samples, {without_step} "
        f"without one optimizer step, {len(differing)} of {len(found)} with other gradients"
    )
    required = (
        f"{num_measured} timed steps, each on {case.batch_size} samples, gradients as by hand"
    )
    return Verdict("bench/timed", not hint, measured, required, hint)


# The last benchmark: all gates of a case judge the same one.
_last_measured: list[Any] = []


def _measured(case: Case, measure: Measure) -> tuple[TimedSteps, list[Figures]]:
    """Measure one round of the plain step and the levers that apply; return the measured rows."""
    if not _last_measured or _last_measured[0] != (case, measure):
        timed = TimedSteps(case)
        with timed.watch():
            found = measure(timed.case, _levers(case), rounds=1, warmup=0, clock=timed.clock).rows
        rows = [row for row in found if row.outcome == MEASURED_OUTCOME]
        _last_measured[:] = [(case, measure), timed, rows]
    _, timed, rows = _last_measured
    return timed, rows


def _as_record(gradients: Sequence[Tensor | None]) -> StepRecord:
    named = {str(number): gradient for number, gradient in enumerate(gradients)}
    return StepRecord(torch.zeros(()), named, {}, {})


JUDGED_CALLABLES = (
    Judged("time_in_turns", lambda steps, *, rounds, warmup, clock, wait: None),
    Judged("paired_ratio", lambda seconds, others: None),
    Judged("spread_of", lambda seconds: None),
    Judged("TrainingStep", lambda case, *, learning_rate: None),
    Judged("find_lever", lambda text: None),
    Judged("python_calls", lambda case, change: None),
    Judged("measure_levers", lambda case, levers, *, rounds, warmup: None),
)
TIMER_TAKES = {"time_in_turns": Takes("time"), "paired_ratio": Takes("ratio")}
MEASURE_TAKES = {"measure_levers": Takes("measure")}

BENCH_TIMING_GATES = (
    Gate("bench/twice", twice, TIMER_TAKES | {"spread_of": Takes("summary")}),
    Gate("bench/same", step_against_itself, TIMER_TAKES),
    Gate("bench/whole-step", whole_step, MEASURE_TAKES | {"TrainingStep": Takes("make")}),
    Gate("bench/timed", timed_step, MEASURE_TAKES),
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


def _check_equal_steps(case: Case) -> None:
    """Raise `NotApplicable` if plain steps of the model differ in their FLOPs."""
    step = TrainingStep(case)
    counts = [_work_of(step, 1) for _ in range(STEPS_TO_COMPARE)]
    if len({*counts}) > 1:
        why = (
            f"steps of this model take {min(counts):,.0f} to {max(counts):,.0f} FLOPs, as where "
            "layers are dropped at random, so one says nothing of the next"
        )
        raise NotApplicable(why, required="steps of equal work")


def _by_hand(case: Case) -> StepRecord:
    """Take two optimizer steps in a plain loop; record the weights and the second loss."""
    module = case.build()
    batch = case.batch()
    optimizer = make_optimizer("adamw", module, foreach=case.device.type == "cuda")
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
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


# Gates of the benchmark's memory and FLOP figures: they equal independent counts.

# Bytes at most: the loss and the gradient norm, which a window holds until its end.
SCALAR_BYTES = 16
# On CUDA, where the allocator rounds up and libraries allocate workspaces.
CUDA_PEAK_TOLERANCE = 0.02
FULL_LEVER = Lever("full", (lambda model, sample: recompute_blocks(model, blocks=sample.blocks),))
HALVED_LEVER = Lever("accumulate=2", accumulate=2)
# Widths of a chain of layers, and its batch size.
FIRST_WIDTH = 24
SECOND_WIDTH = 40
THIRD_WIDTH = 16
CHAIN_BATCH_SIZE = 8
# Plain steps whose FLOPs are compared where a gate would fail. Where a step drops each of three
# layers one time in ten, 40 equal steps come once in 300,000 times, and 8 once in 12.
STEPS_TO_COMPARE = 40


def bench_flops(case: Case, *, measure: Measure = measure_levers) -> Verdict:
    """Compare the model's FLOPs with a count by hand, and across techniques.

    Neither recompute nor accumulation may raise the model's FLOPs; recomputed FLOPs count only as
    executed FLOPs.
    """
    gate = "bench/flops"
    by_hand = (
        2 * CHAIN_BATCH_SIZE * (2 * FIRST_WIDTH * SECOND_WIDTH + 3 * SECOND_WIDTH * THIRD_WIDTH)
    )  # the batch gets no gradient
    chain = replace(case, workload=_chain(), batch_size=CHAIN_BATCH_SIZE, blocks=None)
    counted = measure(chain, rounds=1, warmup=0).plain.model_flops
    _, rows = _measured(case, measure)
    plain = rows[0].model_flops or 0
    if not plain:
        return not_applicable(
            gate, required="FLOPs", why="torch has no FLOP formula for anything this model runs"
        )

    differing = [f"{row.name} {row.model_flops:,}" for row in rows if row.model_flops != plain]
    recomputed = {row.name: (row.executed_flops or 0) - plain for row in rows}
    in_halves = recomputed.get(HALVED_LEVER.name, 0)
    held = (
        counted == by_hand
        and not differing
        and recomputed.get(FULL_LEVER.name, 0) >= 0
        and in_halves in (0, _extra_of_halves(case) if in_halves else 0)
    )
    again = (
        f", full recomputes {recomputed[FULL_LEVER.name]:,}"
        if FULL_LEVER.name in recomputed
        else ""
    )
    measured = (
        f"chain {counted:,} of {by_hand:,}; plain {plain:,}{again}; "
        f"different with {', '.join(differing) or 'none'}"
    )
    hint = ""
    if not held:
        _check_equal_steps(case)
        hint = "count forward and backward of the plain model, over all microbatches of the step"
    return Verdict(gate, held, measured, "as by hand; equal with every lever", hint)


def _extra_of_halves(case: Case) -> int:
    """Count the FLOPs that two halves of a batch have more than the batch, in a plain loop.

    These are of products of weights alone, as in weight-decomposed adapters.
    """
    if case.batch_size < 2:
        return 0
    module = case.build()
    batch = case.batch()
    sizes = [case.batch_size - case.batch_size // 2, case.batch_size // 2]
    count = partial(count_flops, module, loss=case.workload.mean_loss)
    return sum(count(half).total for half in case.split(batch, sizes)) - count(batch).total


def peak(case: Case, *, measure: Measure = measure_levers) -> Verdict:
    """Compare the peak of a step beside other configurations with its timeline's peak alone.

    The same is done for a planted model whose peak is in the optimizer step, after the backward.
    """
    _, rows = _measured(case, measure)
    changes = {"plain": None, FULL_LEVER.name: partial(recompute_blocks, blocks=case.blocks)}
    pairs = {
        row.name: (row.peak_bytes or 0, _peak_alone(case, changes[row.name]))
        for row in rows
        if row.name in changes
    }
    is_cuda = case.device.type == "cuda"
    wrong = [
        name
        for name, (found, alone) in pairs.items()
        if abs(found - alone) > (CUDA_PEAK_TOLERANCE * alone if is_cuda else 0) + SCALAR_BYTES
    ]
    if found := measure(_wide_case(case), rounds=1, warmup=0).plain.peak_bytes:
        pairs[WIDE_NAME] = found, 0 if is_cuda else _peak_alone(_wide_case(case), None)
        alone = pairs[WIDE_NAME][1]
        if found < WIDE_LEAST_BYTES or (not is_cuda and abs(found - alone) > SCALAR_BYTES):
            wrong.append(WIDE_NAME)
    measured = "; ".join(f"{name} {found:,} of {alone:,}" for name, (found, alone) in pairs.items())
    required = f"equal but for {SCALAR_BYTES} bytes of loss and norm"
    if is_cuda:
        required = f"within {CUDA_PEAK_TOLERANCE:.0%}"
    hint = ""
    if wrong:
        hint = (
            f"{', '.join(wrong)}: an owner is missing, memory of another step is counted, or the "
            "peak is that of a part of the step"
        )
    return Verdict("bench/peak", not wrong, measured, required, hint)


# A layer whose parameters, gradients and two moments own the peak, in float32.
WIDE_NAME = "wide layer"
WIDE_WIDTH = 2**16
WIDE_LEAST_BYTES = 4 * 4 * WIDE_WIDTH


def _wide_case(case: Case) -> Case:
    wide = Workload(
        WIDE_NAME,
        lambda: nn.Linear(1, WIDE_WIDTH, bias=False),
        lambda size: torch.ones(size, 1),
        lambda module, batch: module(batch).sum(),
    )
    return replace(case, workload=wide, dtype=torch.float32, batch_size=1, blocks=None)


# Levers by their names, on planted blocks.

LEVER_BATCH_SIZE = 6
# Of each name: a step has it if this is true.
NAMED_LEVERS: dict[str, Callable[[TrainingStep], bool]] = {
    "accumulate=4": lambda step: list(map(batch_size, step.window)) == [2, 2, 1, 1],
    "bf16": lambda step: {one.dtype for one in step.model.parameters()} == {torch.bfloat16},
    "autocast": lambda step: (
        next(step.model.parameters()).dtype is torch.float32
        and step.dtype_of_products is torch.bfloat16
    ),
    "full": lambda step: step.changed == ["0", "1", "2"] and len(step.window) == 1,
    "sac:save_matmuls": lambda step: step.changed == ["0", "1", "2"],
    "full + accumulate=2": lambda step: len(step.changed) == 3 and len(step.window) == 2,
    "accumulate=2+bf16": lambda step: step.dtype_of_products is torch.bfloat16,
}
# Names that are none, and what the error has to name.
WRONG_LEVERS = {
    "acumulate=4": "accumulate",
    "ful": "full",
    "accumulate": "accumulate=4",
    "accumulate=0": "'0'",
    "accumulate=two": "'two'",
    "bf16=1": "'bf16'",
    "autocast=fp8": "'autocast'",
    "chunked_loss=2": "'chunked_loss'",
    "full:all": "'full'",
    "sac:save_matmul": "save_matmuls",
    "plan=there.is.none": "there.is.none",
    "full+": "''",
}
# Levers that a step refuses: the name, the dtype of the case, and what the error has to name.
REFUSED_LEVERS = (
    ("accumulate=16", torch.float32, "16"),
    ("bf16", torch.bfloat16, "bfloat16"),
    ("autocast", torch.bfloat16, "bfloat16"),
)


def levers_by_name(case: Case, *, find: Callable[[str], Lever] = find_lever) -> Verdict:
    """Make steps with the levers of given names; wrong names are errors that name what is wrong."""
    gate = "bench/levers"
    blocks = replace(
        case, workload=_blocks(), dtype=torch.float32, batch_size=LEVER_BATCH_SIZE, blocks=None
    )
    wrong = []
    for name, has_it in NAMED_LEVERS.items():
        step = TrainingStep(blocks, find(name))
        if not has_it(step) or step.lever.name != name or step.lever.is_plain:
            wrong.append(f"{name} is not applied")
        elif step().num_terms != LEVER_BATCH_SIZE or step.unit != "samples":
            wrong.append(f"{name} trains on another batch")
    calls: list[tuple[str, Callable[[], Any], str]] = [
        (name, partial(find, name), text) for name, text in WRONG_LEVERS.items()
    ]
    for name, dtype, text in REFUSED_LEVERS:
        calls.append((name, partial(_step_of, replace(blocks, dtype=dtype), find, name), text))
    for name, call, text in calls:
        if why := unrefused(ValueError, call, text):
            wrong.append(f"{name}: {why}")
    if not {*STRATEGIES, *LEVER_HELP} <= set(list_levers()):
        wrong.append("a lever is not listed")
    step = TrainingStep(replace(blocks, blocks="0"), Lever("noting", (_noted,)))
    if step.changed != [f"{LEVER_BATCH_SIZE} of {step.mean_loss} on 0"]:
        wrong.append("a lever gets another batch, loss or choice of blocks")
    num_checked = len(NAMED_LEVERS) + len(calls) + 2
    measured = f"{num_checked - len(wrong)} of {num_checked} right"
    hint = f"{wrong[0]}: a lever is what its name says, and nothing else" if wrong else ""
    return Verdict(gate, not wrong, measured, f"{num_checked} of {num_checked}", hint)


def _noted(model: nn.Module, sample: Sample) -> list[str]:
    return [f"{len(sample.batch)} of {sample.loss} on {sample.blocks}"]


def _step_of(case: Case, find: Callable[[str], Lever], name: str) -> TrainingStep:
    return TrainingStep(case, find(name))


def _blocks() -> Workload:
    return Workload(
        "three blocks",
        lambda: nn.Sequential(
            *[nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)]
        ),
        lambda size: torch.randn(size, 8),
        lambda module, batch: module(batch).float().square().sum(),
    )


# Steps side by side, and Python calls, on planted models.


class CallsByHand(nn.Module):
    """Calls a Python function so many times in each forward, and notes sizes and training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(1)
        self.num_calls = 0
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        for _ in range(self.num_calls):
            _call_once()
        output: Tensor = self.norm(self.layer(x))
        return output


def _call_once() -> None:
    """Call a builtin function, in one Python call."""
    abs(0)


CALLS_WORKLOAD = Workload(
    "calls by hand",
    CallsByHand,
    lambda size: torch.randn(size, 4),
    lambda module, batch: module(batch).square().sum(),
)
# Of each number of calls that is added to a forward, the calls that a step has more.
MORE_CALLS = (0, 1, 40)


def _wrong_calls(case: Case, count_calls: Callable[..., int]) -> Iterator[str]:
    """Yield what is wrong with counts of Python calls, and with what a count leaves behind."""
    made: list[CallsByHand] = []

    def with_calls(number: int) -> Callable[[nn.Module, Case], None]:
        def change(module: Any, case: Case) -> None:
            module.num_calls = number
            made.append(module)

        return change

    previous = sys.getprofile()
    plain = count_calls(case, with_calls(0))
    counts = [count_calls(case, with_calls(number)) for number in MORE_CALLS]
    yield unlike("the calls that are added", [one - plain for one in counts], list(MORE_CALLS))
    # The model, its three children's calls, the loss and backward: fewer than a hundred by far.
    yield "" if 5 < plain < 200 else f"a step of three modules has {plain} Python calls"
    yield "" if sys.getprofile() is previous else "a count leaves its profiler"
    yield unlike("the sizes of the batches", made[0].sizes, [2, 2])
    yield unlike("gradients after a count", [one.grad for one in made[0].parameters()], [None] * 4)
    yield unlike("steps of a norm", made[0].norm.num_batches_tracked, torch.tensor(0))
    alone = replace(case, batch_size=1, workload=_one_layer())
    yield "" if count_calls(alone, lambda module, case: None) > 0 else "one sample is not counted"
    whole = replace(case, workload=replace(case.workload, is_divisible=False))
    count_calls(whole, with_calls(0))
    yield unlike("the size of a batch that is not divided", made[-1].sizes[0], case.batch_size)


def _one_layer() -> Workload:
    return Workload(
        "one layer",
        lambda: nn.Linear(4, 1),
        lambda size: torch.randn(size, 4),
        lambda module, batch: module(batch).square().sum(),
    )


def _wrong_sharing(case: Case, make: MakeStep) -> Iterator[str]:
    """Yield what is wrong with steps that share weights and optimizer state."""
    first = make(case)
    first()
    for name, other_case, is_shared in (
        ("the same dtype", case, True),
        ("another dtype", replace(case, dtype=torch.float64), False),
    ):
        other = make(other_case, like=first)
        pairs = list(zip(first.model.parameters(), other.model.parameters(), strict=True))
        shared = [one.data_ptr() == same.data_ptr() for one, same in pairs]
        yield unlike(f"weights shared with {name}", shared, [is_shared] * len(pairs))
        moments = [
            other.optimizer.state.get(same) is first.optimizer.state[one] for one, same in pairs
        ]
        yield unlike(f"moments shared with {name}", moments, [is_shared] * len(pairs))
    alone = make(case)
    yield unlike("state of a step alone", len(alone.optimizer.state), 0)
    before = [one.clone() for one in alone.model.parameters()]
    for _ in range(2):
        alone()
    after = [one.detach() for one in alone.model.parameters()]
    yield unlike("weights after timed steps", after, before)
    alone()
    alone.drop_gradients()
    yield unlike("gradients", [one.grad for one in alone.model.parameters()], [None] * len(before))
    given = torch.ones(3, 8)
    by_function = make(case, batch=given, optimizer=partial(_sgd, 0.1), learning_rate=0.5)
    yield unlike("the batch that is given", by_function.window.microbatches[0], given)
    yield unlike("the rate", by_function.optimizer.param_groups[0]["lr"], 0.5)
    yield "" if isinstance(by_function.optimizer, torch.optim.SGD) else "the optimizer is another"
    loss = by_function.mean_loss(by_function.model, given)
    summed = by_function.loss(by_function.model, given)
    yield unlike("the mean loss", loss.detach(), summed.detach() / 3)


def _sgd(rate: float, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate)


# A batch, its number of terms, and the unit that a step has.
UNITS: tuple[tuple[Tensor, int, str], ...] = (
    (torch.ones(4, 8), 4, "samples"),
    (torch.ones(4, 8, dtype=torch.int64), 32, "tokens"),
    (torch.ones(4, 8), 32, "terms"),
    (torch.ones(4, dtype=torch.int64), 8, "terms"),
)


def _wrong_units(case: Case, make: MakeStep) -> Iterator[str]:
    for batch, number, unit in UNITS:
        workload = replace(
            case.workload,
            batch=lambda size, batch=batch: batch,  # type: ignore[misc]
            count=lambda batch, number=number: number,  # type: ignore[misc]
        )
        step = make(replace(case, workload=workload, batch_size=len(batch)))
        yield unlike(f"terms of {list(batch.shape)}", step.num_terms, number)
        yield unlike(f"the unit of {list(batch.shape)}", step.unit, unit)


def side_by_side(
    case: Case, *, make: MakeStep = TrainingStep, calls: Callable[..., int] = python_calls
) -> Verdict:
    """Make steps beside each other and count Python calls, on planted models."""
    gate = "bench/steps"
    blocks = replace(
        case,
        device=torch.device("cpu"),
        workload=_blocks(),
        dtype=torch.float32,
        batch_size=LEVER_BATCH_SIZE,
        blocks=None,
    )
    counted = replace(blocks, workload=CALLS_WORKLOAD)
    with seeded(case.seed):
        checks = [
            *_wrong_calls(counted, calls),
            *_wrong_sharing(blocks, make),
            *_wrong_units(blocks, make),
        ]
    wrong = [problem for problem in checks if problem]
    hint = ""
    if wrong:
        hint = f"{wrong[0]}: share weights and state alone, and count the calls of one whole step"
    measured = f"{len(checks) - len(wrong)} of {len(checks)} right"
    return Verdict(gate, not wrong, measured, f"{len(checks)} of {len(checks)}", hint)


BENCH_FIGURE_GATES = (
    Gate(
        "bench/steps",
        side_by_side,
        {"TrainingStep": Takes("make"), "python_calls": Takes("calls")},
    ),
    Gate("bench/levers", levers_by_name, {"find_lever": Takes("find")}),
    Gate("bench/flops", bench_flops, MEASURE_TAKES),
    Gate("bench/peak", peak, MEASURE_TAKES),
)


def _levers(case: Case) -> list[Lever]:
    """Choose the levers that apply; full recompute needs a model that repeats blocks."""
    levers = [HALVED_LEVER] if case.batch_size > 1 else []
    try:
        find_blocks(case.build(), case.blocks)
    except NoBlocks:
        return levers
    return [FULL_LEVER, *levers]


def _chain() -> Workload:
    return Workload(
        "chain",
        lambda: nn.Sequential(
            nn.Linear(FIRST_WIDTH, SECOND_WIDTH), nn.GELU(), nn.Linear(SECOND_WIDTH, THIRD_WIDTH)
        ),
        lambda size: torch.randn(size, FIRST_WIDTH),
        lambda module, batch: module(batch).float().square().sum(),
    )


def _peak_alone(case: Case, change: Callable[[nn.Module], object] | None) -> int:
    module = case.build()
    optimizer = make_optimizer("adamw", module, foreach=case.device.type == "cuda")
    # As in a timed step: sizes may depend on the weights, as where a graph is pooled.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    if change is not None:
        change(module)
    lives = record_step_storages(module, case.batch(), case.workload.mean_loss, optimizer=optimizer)
    return timeline_of(lives, type(module).__name__).peak.bytes_alive


GATES = (*BENCH_TIMING_GATES, *BENCH_FIGURE_GATES)
