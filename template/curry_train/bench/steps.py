"""Measure a training step under each lever: time, bytes, FLOPs, utilisation.

    lever = find_lever("sac_matmuls+accumulate=4")

A plus joins several levers, which are applied in that order.

Proof: `python -m pytest tests/bench/test_bench_steps.py`.
"""

import functools
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..core.generators import seed_generators
from ..core.measure import FlopCount, bytes_on_device, is_out_of_memory, peak_of_step, tensors_in
from ..core.measure_compiled import count_executed_flops, holds_compiled_code, measure_allocated
from ..core.timing import Clock, Ratio, Spread, paired_ratio, spread_of, time_in_turns, wait_for
from ..core.wording import did_you_mean, error_in_a_line
from ..plan.optimizers import make_optimizer
from ..plan.saved import Plan
from ..primitives import chunked_loss
from ..primitives.autocast import Autocast, autocast_now
from ..primitives.grad_accum import GradientAccumulation, WindowResult, train_window
from ..primitives.strategies import STRATEGIES, Apply, Sample
from ..workloads.workload import Case, WorkloadError, batch_size

# Levers: named changes to a training step, such as a strategy, accumulation or precision.

# The same batch in K microbatches, weights in bfloat16 or autocast to it, the whole model by
# torch.compile, the loss of the output layer in chunks, and what `curry-train plan --out` wrote.
OPTION_LEVERS = {
    "accumulate": "accumulate=K",
    "bf16": "bf16",
    "autocast": "autocast",
    "compile": "compile[:BACKEND]",
    "chunked_loss": "chunked_loss",
    "plan": "plan=FILE",
}


@dataclass(frozen=True)
class Lever:
    """One change to a training step, or several joined ones."""

    name: str
    changes: tuple[Apply, ...] = ()  # applied to the model one after the other
    accumulate: int = 1  # microbatches that the batch is cut into
    dtype: torch.dtype | None = None  # of weights and batch; None keeps the case's
    autocast: torch.dtype | None = None


PLAIN_LEVER = Lever("plain")


def find_lever(text: str) -> Lever:
    """Return the lever of a name; raise a `ValueError` that suggests the nearest known name."""
    found = Lever(text)
    for single in text.split("+"):
        # Such as accumulate=4.
        name, *values = re.split("[=:]", single.strip(), maxsplit=1)
        if name not in STRATEGIES and name not in OPTION_LEVERS:
            advice = did_you_mean(
                name,
                [*STRATEGIES, *OPTION_LEVERS],
                otherwise=f"there are {', '.join(list_levers())}",
            )
            raise ValueError(f"no lever is called {single!r}; {advice}")
        if values and name not in ("accumulate", "compile", "plan"):
            raise ValueError(f"the lever {name!r} takes no value, got {values[0]!r}: leave it out")
        found = _add_change(found, name, *values)
    return found


def list_levers() -> list[str]:
    """List the levers of this project, as `find_lever` takes them."""
    return [*STRATEGIES, *OPTION_LEVERS.values()]


def _add_change(lever: Lever, name: str, value: str = "") -> Lever:
    """Join another change to a lever."""
    match name:
        case "accumulate":
            if not value.isdecimal() or int(value) < 1:
                raise ValueError(
                    "accumulate takes a number of microbatches, such as accumulate=4; "
                    f"got {value or None!r}"
                )
            return replace(lever, accumulate=int(value))
        case "bf16":
            return replace(lever, dtype=torch.bfloat16)
        case "autocast":
            return replace(lever, autocast=torch.bfloat16)
        case "compile":
            change = _compile(value)
        case "chunked_loss":
            change = _chunk_loss
        case "plan":
            change = _plan(value)
        case _:
            change = STRATEGIES[name].apply
    return replace(lever, changes=(*lever.changes, change))


def _compile(backend: str) -> Apply:
    def change(model: nn.Module, sample: Sample) -> list[str]:
        model.compile(backend=backend or "inductor")
        return [""]

    return change


def _chunk_loss(model: nn.Module, sample: Sample) -> list[str]:
    return list(chunked_loss.apply_chunked_loss(model))


def _plan(path: str) -> Apply:
    plan = Plan.load(path)
    return lambda model, sample: plan.apply(model)


# The outcome of a setup and its times, in turns with those of others.

MEASURED_OUTCOME = "measured"
REFUSED_OUTCOME = "refused"
FAILED_OUTCOME = "failed"
OUT_OF_MEMORY_OUTCOME = "out of memory"

Tell = Callable[[str], None]


@dataclass
class SetupRow:
    """The measurements of one setup; None stands for a figure that was not measured."""

    name: str
    outcome: str = MEASURED_OUTCOME  # measured, refused, failed or out of memory
    why: str = ""  # the reason for any outcome but measured
    seconds: list[float] = field(default_factory=list)  # of each timed step
    step: Spread | None = None
    ratio: Ratio | None = None  # step time over the plain step's of the same round
    peak_bytes: int | None = None
    peak_ratio: float | None = None  # peak over the plain step's

    def fail(self, error: Exception, case: Case) -> None:
        """Take over the error of a setup that could not be measured."""
        if is_out_of_memory(error):
            self.outcome = OUT_OF_MEMORY_OUTCOME
            self.why = f"{case.batch_size} samples do not fit into the memory of {case.device}"
        elif isinstance(error, RuntimeError):
            self.outcome = FAILED_OUTCOME
            self.why = error_in_a_line(error)
        else:
            self.outcome = REFUSED_OUTCOME
            self.why = " ".join(str(error).split())


def ratio_of(part: int | None, whole: int | None) -> float | None:
    """Return a part of a whole; None where one was not measured or the whole is nothing."""
    return part / whole if whole and part is not None else None


def require_plain(plain: SetupRow, case: Case) -> None:
    """Raise WorkloadError if the plain step, with which all others are compared, could not run."""
    if plain.outcome != MEASURED_OUTCOME:
        raise WorkloadError(
            f"{case.workload.name}, batch size {case.batch_size}: a plain step: {plain.why}"
        )


def time_setups(
    setups: Sequence[tuple[SetupRow, "TrainingStep"]],
    case: Case,
    *,
    run: "Callable[[TrainingStep], object]",
    rounds: int,
    warmup: int,
    clock: Clock = time.perf_counter,
    tell: Tell,
) -> None:
    """Time what `run` does with the step of each row, in turns; one that fails is skipped then.

    Each begins without gradients and with the same random numbers. The ratios are to the first row.
    """

    def start_equal() -> None:
        for _, step in setups:
            step.drop_gradients()
        seed_generators(case.seed)

    def run_row(row: SetupRow, step: TrainingStep) -> None:
        if row.outcome == MEASURED_OUTCOME:
            try:
                run(step)
            except RuntimeError as error:
                row.fail(error, case)

    def show(turn: int, way: int) -> None:
        which = f"step {turn + 1} of {rounds}" if turn >= 0 else "warm-up"
        tell(f"{setups[way][0].name}: {which}")

    seconds = time_in_turns(
        [functools.partial(run_row, *setup) for setup in setups],
        rounds=rounds,
        warmup=warmup,
        clock=clock,
        wait=functools.partial(wait_for, case.device),
        before=start_equal,
        tell=show,
    )
    start_equal()
    for way, (row, _) in enumerate(setups):
        if row.outcome == MEASURED_OUTCOME:
            row.seconds = seconds[way]
            row.step = spread_of(row.seconds)
            row.ratio = paired_ratio(row.seconds, seconds[0]) if way else None


# Training step: the optimizer step that a benchmark times, with a lever applied.

# A name, or a function that makes it.
Optimizer = str | Callable[[nn.Module], torch.optim.Optimizer]


class TrainingStep:
    """A repeatable optimizer step of a case with a lever applied.

    `batch` defaults to the batch of the case. `like` is another step of the same model: its weights
    and, once it has run, its optimizer state are shared, so that many steps fit in memory at once.
    """

    def __init__(
        self,
        case: Case,
        lever: Lever = PLAIN_LEVER,
        *,
        batch: Any = None,
        optimizer: Optimizer = "adamw",
        like: "TrainingStep | None" = None,
    ) -> None:
        case = self.case = replace(case, dtype=lever.dtype or case.dtype)
        self.lever = lever
        # The autocast that the model or its loss sets by itself.
        self.autocast: Autocast = {**like.autocast} if like else {}
        self.device = case.device
        self.model = case.build()
        self.window = self._cut_window(case.batch() if batch is None else case.place(batch))

        twins: dict[Any, nn.Parameter] = {}
        if like is not None and case.dtype == like.case.dtype:
            twins = dict(zip(like.model.parameters(), self.model.parameters(), strict=True))
        for theirs, own in twins.items():
            own.data = theirs.data

        sample = Sample(self.window.microbatches[0], self.mean_loss, case.blocks)
        self.changed = [name for change in lever.changes for name in change(self.model, sample)]
        self.optimizer = make_optimizer(optimizer, self.model)
        for group in self.optimizer.param_groups:
            # The weights stay as they are, whatever the optimizer.
            group["lr"] = 0.0
        if like is not None and twins:
            # The optimizer state does not depend on the lever.
            for other, state in like.optimizer.state.items():
                self.optimizer.state[twins[other]] = state

    def __call__(self) -> WindowResult:
        return train_window(self.model, self.window, self.loss, self.optimizer)

    def loss(self, module: nn.Module, microbatch: Any) -> Tensor:
        """Return the loss of a microbatch, summed over its terms."""
        dtype = self.lever.autocast
        with torch.autocast(self.device.type, dtype) if dtype else nullcontext():
            return self.case.workload.loss(module, microbatch)

    def mean_loss(self, module: nn.Module, microbatch: Any) -> Tensor:
        return self.loss(module, microbatch) / self.case.workload.count(microbatch)

    def drop_gradients(self) -> None:
        """Drop the gradients, which would stay in memory while other steps run."""
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def unit(self) -> str:
        """The unit of the loss terms, derived from the batch: samples, tokens or terms."""
        microbatches = self.window.microbatches
        if self.window.num_terms == sum(map(batch_size, microbatches)):
            return "samples"
        matrices = [leaf for leaf in tensors_in(microbatches[0]) if leaf.dim() == 2]
        return "terms" if all(map(torch.is_floating_point, matrices)) else "tokens"

    @property
    def dtype_of_products(self) -> torch.dtype:
        """The dtype in which most products are computed; known after a step or forward."""
        return self.lever.autocast or self.autocast.get(self.device.type, self.case.dtype)

    def noting_autocast(self) -> AbstractContextManager[Any]:
        """Note the autocast in which modules are called inside the context."""
        return register_module_forward_pre_hook(lambda *_: self.autocast.update(autocast_now()))

    def count_flops(self) -> int:
        """Count the FLOPs of the whole step, recompute included."""
        # FlopCount is a dispatch mode, under which compiled code runs as eager code.
        if holds_compiled_code(self.model):
            counts = (
                count_executed_flops(self.model, microbatch, self.mean_loss)
                for microbatch in self.window
            )
            return sum(count.total for count in counts)
        with FlopCount() as count, self.noting_autocast():
            self()
        return count.flops

    def peak_bytes(self) -> int | None:
        """Measure the peak of the step, with parameters, optimizer state and batch.

        Compiled code on the CPU is followed through forward and backward only, and not at all if it
        accumulates gradients: then the peak is None.
        """
        self.drop_gradients()
        # The tensors that exist before the step.
        others = tensors_in([self.optimizer.state, self.window.microbatches])
        existing = [*self.model.parameters(), *self.model.buffers(), *others]
        before = bytes_on_device(existing, self.device)
        if self.device.type != "cuda" and holds_compiled_code(self.model):
            if len(self.window) > 1:
                return None
            within = measure_allocated(self.model, self.window.microbatches[0], self.mean_loss)
            return before + within.peak_bytes
        peak = before + peak_of_step(self, self.device)
        self.drop_gradients()
        return peak

    def _cut_window(self, batch: Any) -> Any:
        """Cut the batch into microbatches; the first ones are larger if the sizes differ."""
        size = batch_size(batch)
        number = self.lever.accumulate
        if size < number:
            raise ValueError(
                f"a batch of {size} samples can't be cut into {number} microbatches: "
                f"use --batch-size {number} or more"
            )
        sizes = [size // number + (place < size % number) for place in range(number)]
        # A batch that can't be divided is one microbatch.
        microbatches = self.case.split(batch, sizes) if number > 1 else [batch]
        count = self.case.workload.count
        return next(GradientAccumulation(number).windows(microbatches, count=count))
