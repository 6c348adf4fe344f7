"""Benchmark levers: time whole optimizer steps in turns, in one process.

    levers = [find_lever("full"), find_lever("accumulate=2")]
    bench = measure_levers(Case(load_workload("transformer")), levers)

All steps take the same batch, which is on the device already, so data loading is not timed. Memory
and FLOPs are measured on separate steps, because the instruments slow a step down.

Proof: `python -m pytest tests/test_bench.py`.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.machine import Machine
from ..core.out_of_memory import is_out_of_memory
from ..core.paired import paired_ratio, spread_of
from ..core.turns import Clock, time_in_turns
from ..core.untouched import seeded
from ..core.workload import Case, Workload, WorkloadError
from ..primitives.grad_accum import NonFiniteWindow, WindowResult
from .bench_report import (
    FAILED,
    MEASURED,
    REFUSED,
    TOO_LARGE,
    Bench,
    Figures,
    complete,
    timing_notes,
)
from .levers import PLAIN, Lever
from .peak_rate import peak_rate
from .training_step import TrainingStep

Tell = Callable[[str], None]


def measure_levers(
    case: Case,
    levers: Sequence[Lever] = (),
    *,
    against: Sequence[Workload] = (),
    optimizer: str = "adamw",
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
    with seeded(case.seed), Machine(case.device) as machine:
        run = _Run(case, optimizer, peak, tell)
        rows = [run.prepare(PLAIN, case)]
        if rows[0].outcome != MEASURED:
            raise WorkloadError(
                f"{case.workload.name}, batch size {case.batch_size}: a plain step {rows[0].why}"
            )
        rows += [run.prepare(lever, case) for lever in levers]
        rows += [
            run.prepare(replace(PLAIN, name=_name(other)), replace(case, workload=other))
            for other in against
        ]
        run.time(rows, rounds=rounds, warmup=warmup, clock=clock)
    plain = run.steps[0]
    return Bench(
        workload=case.workload.name,
        device=str(case.device),
        dtype=str(case.dtype).removeprefix("torch."),
        optimizer=optimizer,
        batch_size=case.batch_size,
        rounds=rounds,
        warmup=warmup,
        unit=plain.unit,
        rows=rows,
        notes=[*machine.remarks(), *timing_notes(rows)],
    )


def _name(workload: Workload) -> str:
    return workload.spec or workload.name


class _Run:
    """The steps under test, alive at the same time, in the order of their rows.

    A step that can't run is None.
    """

    def __init__(self, case: Case, optimizer: str, peak: float | str | None, tell: Tell) -> None:
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
        except (ValueError, NonFiniteWindow) as error:
            step = None
            row.outcome = REFUSED
            row.why = " ".join(str(error).split())
        except RuntimeError as error:
            step = None
            row.outcome, row.why = _told(error, case)
        self.steps.append(step)
        return row

    def _measure(self, step: TrainingStep, row: Figures) -> None:
        """Fill in loss, memory and FLOPs."""
        self._seed()
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
        alive = [index for index, row in enumerate(rows) if row.outcome == MEASURED]
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
            if rows[index].outcome == MEASURED:
                rows[index].seconds = taken
                rows[index].step = spread_of(taken)
                rows[index].ratio = paired_ratio(taken, seconds[0]) if index else None

        plain = rows[0]
        if plain.outcome != MEASURED:
            raise WorkloadError(f"{self.case.workload.name}: a plain step {plain.why}")
        for row, step in zip(rows, self.steps, strict=True):
            same = step is not None and step.case.workload is self.case.workload
            precision = None if step is None or step.lever.changes_precision else step.case.dtype
            complete(row, plain, same_model=same, precision=precision)

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
            if row.outcome != MEASURED:
                return
            try:
                step()
            except RuntimeError as error:
                row.outcome, row.why = _told(error, step.case)

        return way

    def _between(self) -> None:
        """Before each step, drop all gradients and reset the random generators."""
        for step in self.steps:
            if step is not None:
                step.drop_gradients()
        self._seed()

    def _seed(self) -> None:
        torch.manual_seed(self.case.seed)
        random.seed(self.case.seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(self.case.seed % 2**32)


def _told(error: RuntimeError, case: Case) -> tuple[str, str]:
    """Return the outcome and the reason of a step that failed."""
    if is_out_of_memory(error):
        return (
            TOO_LARGE,
            f"does not fit: {case.batch_size} samples need more memory than {case.device} has left",
        )
    lines = str(error).strip().splitlines() or [""]
    return FAILED, f"raised {type(error).__name__}: {lines[0]}"
