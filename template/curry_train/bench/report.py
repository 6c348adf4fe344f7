"""Compare levers in one benchmark and report ratios with intervals.

Notes name what disturbs a timing, such as other processes.

Proof: `python -m pytest tests/gates/test_gates.py tests/bench/test_machine.py`.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..core.generators import seed_generators, seeded
from ..core.measure import is_out_of_memory
from ..core.timing import Clock, Ratio, Spread, paired_ratio, spread_of, time_in_turns
from ..plan.device import peak_rate
from ..primitives.grad_accum import NonFiniteWindow, WindowResult
from ..workloads.workload import Case, Workload, WorkloadError
from .steps import MEASURED_OUTCOME, PLAIN_LEVER, Lever, TrainingStep, failure


def drift_of(seconds: Sequence[float]) -> float:
    """Return the ratio of the last third's median to the first third's; 1 below 6 timings."""
    third = len(seconds) // 3
    if third < 2:
        return 1.0
    return statistics.median(seconds[-third:]) / statistics.median(seconds[:third])


# Load of the machine during a timing: other processes on its cores.

CPU_STAT_FILE = Path("/proc/stat")

# From this share of all cores in use on, a process that needs one more core has to wait.
CROWDED_SHARE = 0.9

# Up to this share of all cores, other processes are the machine's own housekeeping.
HOUSEKEEPING_SHARE = 0.1

# Seconds. The kernel counts in hundredths, and in less time one of them would be many cores.
SHORTEST_SECONDS = 0.1


@dataclass(frozen=True)
class CoreTime:
    """Seconds of the wall clock, of all processes on all cores, and of this process."""

    wall: float
    all_cores: float
    own: float


def read_core_time() -> CoreTime | None:
    """Read the time of user, nice, system, interrupts and steal; None without /proc/stat."""
    if not CPU_STAT_FILE.is_file():
        return None
    first_line = CPU_STAT_FILE.read_text(encoding="ascii").split("\n", 1)[0]
    fields = [int(field) for field in first_line.split()[1:9]]
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = fields
    ticks = user + nice + system + interrupts + soft_interrupts + stolen
    seconds = ticks / os.sysconf("SC_CLK_TCK")
    return CoreTime(time.perf_counter(), seconds, time.process_time())


def crowding_notes(start: CoreTime | None, end: CoreTime | None, *, cores: int) -> list[str]:
    """Warn where other processes left too few cores to a timing."""
    if start is None or end is None or end.wall - start.wall < SHORTEST_SECONDS:
        return []
    wall = end.wall - start.wall
    own = (end.own - start.own) / wall
    others = max(0.0, (end.all_cores - start.all_cores) / wall - own)
    if others <= HOUSEKEEPING_SHARE * cores or others + own <= CROWDED_SHARE * cores:
        return []
    return [
        f"other processes took {others:.1f} of {cores} cores meanwhile, and this one waited for "
        "them: trust the ratios more than the seconds, or run again when they have ended"
    ]


# Benchmark results: one row per configuration, with notes on how far to trust its figures.

WIDE_SPREAD = 0.25  # 10th to 90th percentile of the step times, as a fraction of the median
DRIFT_TOLERANCE = 0.1  # change between the first and the last third of the rounds, as a fraction
LOSS_TOLERANCE = {
    torch.float32: 1e-4,
    torch.float64: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-2,
}


@dataclass
class Figures:
    """Figures of one configuration; what was not measured is None."""

    name: str
    outcome: str = MEASURED_OUTCOME  # measured, refused, failed or out of memory
    why: str = ""  # the reason for any outcome but measured
    num_changed: int = 0  # modules that the lever changed
    num_microbatches: int = 1
    num_terms: int = 0  # terms of the loss in one step
    seconds: list[float] = field(default_factory=list)  # of each timed step
    step: Spread | None = None
    ratio: Ratio | None = None  # step time over the plain step's of the same round
    terms_per_second: float | None = None
    peak_bytes: int | None = None
    peak_ratio: float | None = None  # peak over the plain configuration's
    model_flops: int | None = None  # of one optimizer step, without recompute
    executed_flops: int | None = None  # of one optimizer step, with recompute
    peak_flops_per_second: float | None = None  # of the device
    peak_source: str = ""
    mfu: float | None = None  # model FLOPs as a fraction of the device's peak
    hfu: float | None = None  # executed FLOPs as a fraction of the device's peak
    loss: float | None = None
    grad_norm: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def recompute_flops(self) -> int | None:
        if self.executed_flops is None or self.model_flops is None:
            return None
        return self.executed_flops - self.model_flops

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        if self.ratio is not None:
            values["ratio"]["verdict"] = self.ratio.verdict
        return values


@dataclass
class Bench:
    """All configurations on one batch; the first row is the plain one."""

    workload: str
    device: str
    dtype: str
    optimizer: str
    batch_size: int
    rounds: int
    warmup: int
    unit: str  # of a loss term: samples, tokens or terms
    rows: list[Figures]
    notes: list[str] = field(default_factory=list)  # about the machine

    @property
    def plain(self) -> Figures:
        return self.rows[0]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "rows": [row.to_json() for row in self.rows]}


def complete_figures(
    row: Figures, plain: Figures, *, same_model: bool, precision: torch.dtype | None
) -> None:
    """Derive ratios, throughput, MFU and HFU from the measured figures, and add warnings.

    `precision` is the dtype whose loss tolerance applies, None for a step that changes precision:
    its loss is not compared with the plain step's.
    """
    if row.step is None:
        return
    if row.peak_bytes is not None and plain.peak_bytes:
        row.peak_ratio = row.peak_bytes / plain.peak_bytes
    row.terms_per_second = row.num_terms / row.step.median

    if row.peak_flops_per_second and row.model_flops:
        row.mfu = row.model_flops / row.step.median / row.peak_flops_per_second
        if row.executed_flops is not None:
            row.hfu = row.executed_flops / row.step.median / row.peak_flops_per_second
    if max(row.mfu or 0.0, row.hfu or 0.0) > 1:
        row.notes.append(
            f"above the peak ({row.peak_source}), so that is not the peak for what ran: give --peak"
        )

    if row is not plain and same_model and precision is not None:
        row.notes += _training_notes(row, plain, LOSS_TOLERANCE[precision])


def timing_notes(rows: Sequence[Figures]) -> list[str]:
    """Warn where step times spread widely or drift over the rounds."""
    notes = []
    timed = [row for row in rows if row.step is not None]
    wide = [row.name for row in timed if row.step is not None and row.step.relative > WIDE_SPREAD]
    if wide:
        which = "all steps" if len(wide) == len(timed) else f"the steps of {', '.join(wide)}"
        notes.append(
            f"{which} spread over more than {WIDE_SPREAD:.0%} of their median: do not rely on the "
            "seconds; use the ratios and their intervals, or run on a quiet machine"
        )
    drift = statistics.median(drift_of(row.seconds) for row in timed)
    if abs(drift - 1) > DRIFT_TOLERANCE:
        cause = "raise --warmup" if drift < 1 else "the device may be hot"
        notes.append(
            f"the last rounds took {drift:.2f} of the time of the first rounds: {cause}, "
            "or other work ran on the machine"
        )
    return notes


def _training_notes(row: Figures, plain: Figures, bound: float) -> list[str]:
    """Warn where loss or gradient norm differ from plain: the lever may skip part of the work."""
    differences = []
    for what, ours, theirs in (
        ("loss", row.loss, plain.loss),
        ("gradient norm", row.grad_norm, plain.grad_norm),
    ):
        if ours is None or theirs is None or math.isclose(ours, theirs, rel_tol=bound):
            continue
        differences.append(f"{what} {ours:.5g}, plain {theirs:.5g}")
    if not differences:
        return []
    return [
        f"{'; '.join(differences)}: changes the training result, unless random numbers or batch "
        "statistics are drawn per microbatch. Run the gates of the technique"
    ]


# Benchmark levers: time whole optimizer steps in turns, in one process.

Tell = Callable[[str], None]
MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


def measure_levers(
    case: Case,
    levers: Sequence[Lever] = (),
    *,
    against: Sequence[Workload] = (),
    optimizer: str | MakeOptimizer = "adamw",
    rounds: int = 20,
    warmup: int = 5,
    peak: float | str | None = None,
    clock: Clock = time.perf_counter,
    tell: Tell = lambda doing: None,
) -> Bench:
    """Measure the plain step, one step per lever, and the plain steps of other models.

    All take the same batch. A lever that does not apply to the model, or does not fit, gives a row
    with the reason; a plain step that can't run is an error. `peak` is the device's peak for MFU
    and HFU: FLOP/s, or "measured"; None looks it up by the name of the device. `tell` receives
    progress messages.
    """
    if rounds < 1 or warmup < 0:
        raise ValueError(
            f"rounds must be at least 1 and warmup at least 0, got {rounds} and {warmup}"
        )
    start = read_core_time()
    with seeded(case.seed):
        run = _LeverRun(case, optimizer, peak, tell)
        rows = [run.prepare(PLAIN_LEVER, case)]
        if rows[0].outcome != MEASURED_OUTCOME:
            raise WorkloadError(
                f"{case.workload.name}, batch size {case.batch_size}: a plain step: {rows[0].why}"
            )
        rows += [run.prepare(lever, case) for lever in levers]
        rows += [
            run.prepare(replace(PLAIN_LEVER, name=_name(other)), replace(case, workload=other))
            for other in against
        ]
        run.time(rows, rounds=rounds, warmup=warmup, clock=clock)
    plain = run.steps[0]
    crowded = crowding_notes(start, read_core_time(), cores=os.cpu_count() or 1)
    return Bench(
        workload=case.workload.name,
        device=str(case.device),
        dtype=str(case.dtype).removeprefix("torch."),
        optimizer=str(getattr(optimizer, "__qualname__", optimizer)),
        batch_size=case.batch_size,
        rounds=rounds,
        warmup=warmup,
        unit=plain.unit,
        rows=rows,
        notes=[*crowded, *timing_notes(rows)],
    )


def _name(workload: Workload) -> str:
    return workload.spec or workload.name


class _LeverRun:
    """The steps under test, alive at the same time, in the order of their rows.

    A step that can't run is None.
    """

    def __init__(
        self, case: Case, optimizer: str | MakeOptimizer, peak: float | str | None, tell: Tell
    ) -> None:
        self.case = case
        self.optimizer = optimizer
        self.peak = peak
        self.tell = tell
        self.steps: list[Any] = []
        self.model_flops: int | None = None
        self.batch = case.batch()

    def prepare(self, lever: Lever, case: Case) -> Figures:
        """Build a step and measure everything but its time."""
        row = Figures(lever.name)
        step = None
        self.tell(f"{lever.name}: memory and FLOPs")
        try:
            step = self._build(lever, case)
            self._measure(step, row)
        except WorkloadError:
            raise
        except (ValueError, RuntimeError, NonFiniteWindow) as error:
            step = None
            row.outcome, row.why = failure(error, case)
        self.steps.append(step)
        return row

    def _measure(self, step: TrainingStep, row: Figures) -> None:
        """Fill in loss, memory and FLOPs."""
        seed_generators(self.case.seed)
        result = self._first(step)
        row.loss = result.loss
        row.grad_norm = result.grad_norm
        row.num_terms = result.num_terms
        row.num_changed = len(step.changed)
        row.num_microbatches = len(step.window)
        row.executed_flops = step.count_flops()
        row.peak_bytes = step.peak_bytes()

        # The model's FLOPs are the plain step's: recompute adds executed FLOPs only.
        if step.lever.is_plain:
            self.model_flops = row.executed_flops
        row.model_flops = self.model_flops
        rate = peak_rate(step.case.device, step.dtype_of_products, given=self.peak)
        row.peak_flops_per_second = rate.flops_per_second
        row.peak_source = rate.source

        if step.lever.changes and not step.changed:
            row.notes.append("changes nothing here: the steps are the same as plain")
        if row.peak_bytes is None:
            row.notes.append(
                "no peak: on the CPU, compiled code that accumulates gradients can't be followed"
            )

    def time(self, rows: Sequence[Figures], *, rounds: int, warmup: int, clock: Clock) -> None:
        """Time the steps in turns and complete their rows."""
        alive = [index for index, row in enumerate(rows) if row.outcome == MEASURED_OUTCOME]
        ways = [self._way(rows[index], self.steps[index]) for index in alive]

        def tell(turn: int, way: int) -> None:
            which = f"step {turn + 1} of {rounds}" if turn >= 0 else "warm-up"
            self.tell(f"{rows[alive[way]].name}: {which}")

        seconds = time_in_turns(
            ways,
            rounds=rounds,
            warmup=warmup,
            clock=clock,
            wait=self.steps[0].wait,
            before=self._between,
            tell=tell,
        )
        for index, taken in zip(alive, seconds, strict=True):
            if rows[index].outcome == MEASURED_OUTCOME:
                rows[index].seconds = taken
                rows[index].step = spread_of(taken)
                rows[index].ratio = paired_ratio(taken, seconds[0]) if index else None

        plain = rows[0]
        if plain.outcome != MEASURED_OUTCOME:
            raise WorkloadError(f"{self.case.workload.name}: a plain step: {plain.why}")
        for row, step in zip(rows, self.steps, strict=True):
            same = step is not None and step.case.workload is self.case.workload
            precision = None if step is None or step.lever.changes_precision else step.case.dtype
            complete_figures(row, plain, same_model=same, precision=precision)

    def _build(self, lever: Lever, case: Case) -> TrainingStep:
        like = self.steps[0] if self.steps and case.workload is self.case.workload else None
        return TrainingStep(case, lever, batch=self.batch, optimizer=self.optimizer, like=like)

    def _first(self, step: TrainingStep) -> WindowResult:
        """Run a first step, which creates the optimizer state.

        Another model may not accept the batch of the first one.
        """
        try:
            return step()
        except (ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
            ours = self.case.workload
            theirs = step.case.workload
            if ours is theirs or is_out_of_memory(error):
                raise
            raise WorkloadError(
                f"{_name(theirs)} can't take the batch of {_name(ours)}, on which both are "
                f"compared: {type(error).__name__}: {error}. Let both factories return "
                "(module, batch) with batches of the same structure"
            ) from error

    def _way(self, row: Figures, step: TrainingStep) -> Callable[[], None]:
        """Return the timed function of a row; a step that fails once is skipped afterwards."""

        def way() -> None:
            if row.outcome != MEASURED_OUTCOME:
                return
            try:
                step()
            except RuntimeError as error:
                row.outcome, row.why = failure(error, step.case)

        return way

    def _between(self) -> None:
        """Before each step, drop all gradients and reset the random generators."""
        for step in self.steps:
            if step is not None:
                step.drop_gradients()
        seed_generators(self.case.seed)
