"""Find the fastest way to train that fits into a memory budget.

    found = plan(workload, 24 * 2**30, global_batch=64, device="h100")
    print(found.explain())
    found.apply(model)

No device is needed. Options of blocks are measured in whole steps, from shapes, and the chain of
blocks is solved for each microbatch size, which fixes the number of microbatches to accumulate.
Then the whole step of each candidate that may win is estimated, and corrects the chain.

Proof: `python -m pytest tests/plan/test_plan.py`.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import Any

from torch import Tensor, nn

from .. import primitives
from ..core.wording import format_bytes, require_whole
from ..workloads.workload import Workload
from .card import Card
from .costs import MEASURED_MICROBATCH_SIZES
from .device import DeviceProfile, find_profile
from .estimate import Sketch, StepEstimate
from .parallel import name_of
from .profiler import GRADIENTS_GROUP, OPTIMIZER_STATE_GROUP, trained_parameters
from .rank_time import Links, links_of
from .saved import OPTION_KINDS, Candidate, Plan, fingerprint
from .whole_step import WholeSteps, order

# Explain a plan: why a candidate won, or what would help where nothing fits.

# Part of torch's message where a norm over the batch gets a single value.
NEEDS_SAMPLES_ERROR = "Expected more than 1 value per channel"
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
EVERY_LAYER_NOTE = " Layers that the model skips at random are planned as if they always ran."
# A message after this time names the time left.
PATIENCE_SECONDS = 2.0
# The part of the time after which blocks are measured, and whole steps are checked.
CHECKING_STARTS = 0.4


def why_it_won(best: Candidate, found: Sequence[Candidate], plain_seconds: float) -> str:
    """Compare the best candidate with the plain step and with the second-best candidate.

    The plain step is the same batch with all activations held.
    """
    assert best.step_seconds is not None
    text = (
        f"It costs {best.step_seconds / plain_seconds - 1:.1%} over the same batch with all "
        "activations held."
    )

    for second in found:
        if second.step_seconds is not None and second is not best:
            return text + (
                f" The next best is microbatch {second.microbatch} ({second.summary()}), "
                f"{second.step_seconds / best.step_seconds - 1:.1%} slower."
            )
    return text


def what_microbatches_change(module: nn.Module, best: Candidate) -> str:
    """Warn about layers that make training with microbatches differ from the whole batch.

    These are dropout, which draws per microbatch, and batch norm, which takes its statistics per
    microbatch. The text is empty for a single microbatch and for a model without such layers.
    """
    layers = list(module.named_modules())
    dropouts = [name for name, layer in layers if _dropout(layer) > 0]
    norms = [name for name, layer in layers if isinstance(layer, BATCH_NORMS)]

    effects = []
    if dropouts:
        effects.append(f"draws its own dropout ({dropouts[0]})")
    if norms:
        effects.append(f"has its own statistics ({norms[0]})")
    if best.steps == 1 or not effects:
        return ""

    return (
        f" Each microbatch {' and '.join(effects)}: to get exactly the losses of the whole batch, "
        f"use --microbatch {best.steps * best.microbatch}."
    )


def _dropout(layer: nn.Module) -> float:
    """Return the dropout probability of a layer, 0 if it has none."""
    probability = getattr(layer, "p" if "Dropout" in type(layer).__name__ else "dropout", 0)
    return float(probability) if isinstance(probability, int | float) else 0.0


# Planner: the fastest microbatch size and option per block within a memory budget.

Tell = Callable[[str], None]


class Infeasible(ValueError):
    """Raised when nothing fits; `least_bytes` is the least peak that was found."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


def plan(
    workload: Workload | str,
    budget_bytes: int,
    *,
    global_batch: int = 1,
    microbatch: int | None = None,
    **options: Any,
) -> Plan:
    """Plan a training for `budget_bytes` of memory per rank.

    `options` are those of `Planner`. Raises `Infeasible` if nothing fits; the message has the
    missing bytes and what would help.
    """
    with Planner(workload, **options) as planner:
        return planner.plan(budget_bytes, global_batch=global_batch, microbatch=microbatch)


class Planner:
    """Measure a workload once and plan for several budgets; use it as a context manager.

    With `chunked_loss=None`, whole and chunked loss are both tried if the model has a head.
    `without` names kinds of options to leave out, such as `sac`. `tell` receives progress messages.

    On CUDA a plan fits if what the allocator reserves after several steps and the context of the
    process are within the budget and the device. `context_bytes`, `by_reserved` and `margin` are
    those of `Card`. `links` are those between GPUs, for the time of several ranks; by default the
    usual ones of the device. `options` are those of `Sketch`.
    """

    def __init__(
        self,
        workload: Workload | str,
        *,
        device: str | DeviceProfile = "cpu",
        chunked_loss: bool | None = None,
        without: Sequence[str] = (),
        context_bytes: int | None = None,
        by_reserved: bool = True,
        margin: float = 0.0,
        links: Links | None = None,
        tell: Tell = lambda message: None,
        **options: Any,
    ) -> None:
        self.profile = find_profile(device) if isinstance(device, str) else device
        self.card = Card(self.profile, context_bytes, margin, by_reserved)
        self.sketch = Sketch(workload, kernels=self.card.kernels, **options)
        if unknown := set(without) - set(OPTION_KINDS):
            raise ValueError(
                f"without={sorted(unknown)}: a block is run as one of {', '.join(OPTION_KINDS)}"
            )
        self.sharding = self.sketch.sharding
        self.tell = tell
        self.asked = chunked_loss
        self.without = without
        self.whole_steps = WholeSteps(
            self.sketch, card=self.card, links=links or links_of(self.profile.name)
        )

    def __enter__(self) -> "Planner":
        self._began = time.monotonic()
        self.tell("building the model from shapes")
        self.sketch.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.sketch.__exit__(*raised)

    def _tell(self, message: str, done: float) -> None:
        """Pass a message on; after a while with the time left, if the rest goes as fast."""
        elapsed = time.monotonic() - self._began
        if elapsed > PATIENCE_SECONDS and done:
            message += f", about {elapsed * (1 - done) / done:,.0f} s left"
        self.tell(message)

    def _cuda_figures(self, best: Candidate, limit_bytes: int) -> dict[str, int] | None:
        """Return the memory of a plan on CUDA, by the names of `plan --json`.

        None on the CPU. Of several ranks, they are those of the one that is planned for.
        """
        trace = self.card.trace_of(self.whole_steps.step(best))
        if trace is None:
            return None
        self.tell("replaying the steps in CUDA's allocator")
        memory = self.card.memory(trace)
        return {
            **vars(memory),
            "expandable_reserved_bytes": self.card.memory(trace, expandable=True).reserved_bytes,
            "context_bytes": self.card.context(trace),
            "convolution_workspace_bytes": max(
                (one.nbytes for one in trace.convolutions), default=0
            ),
            "limit_bytes": limit_bytes,
        }

    def plan(
        self, budget_bytes: int, *, global_batch: int = 1, microbatch: int | None = None
    ) -> Plan:
        """Return the fastest plan whose peak fits the budget; raise `Infeasible` if none fits."""
        require_whole("budget_bytes", budget_bytes, least=1)
        require_whole("global_batch", global_batch, least=1)

        # The notes are on what of the budget is left free.
        budget_bytes, self.limit_notes = self.card.limit(budget_bytes)
        tried = [
            self.whole_steps.predict(one, budget_bytes)
            for one in self._list_settings(global_batch, microbatch)
        ]
        # The search considers its whole step too.
        own = self._describe_plain(tried, microbatch, budget_bytes)
        found: list[Candidate] = []
        best: Candidate | None = None
        for predicted in sorted(tried, key=order):
            done = CHECKING_STARTS + (1 - CHECKING_STARTS) * len(found) / len(tried)
            self._tell(f"checking whole steps of microbatch {predicted.microbatch}", done)
            candidate = self.whole_steps.fastest(predicted, budget_bytes, best) or predicted
            found.append(candidate)
            if candidate.checked and candidate.peak_bytes <= budget_bytes:
                best = candidate if best is None else min(best, candidate, key=order)
        if best is None:
            self.tell("looking for the least peak")
            best = self.whole_steps.least(min(found, key=lambda candidate: candidate.peak_bytes))
            if best.peak_bytes > budget_bytes:
                raise self._describe_infeasible(best, found, budget_bytes)
            way = best.microbatch, best.chunked_loss
            found = [one for one in found if (one.microbatch, one.chunked_loss) != way] + [best]

        shown = sorted((candidate.within(budget_bytes) for candidate in found), key=order)
        best = next(candidate for candidate in shown if candidate.checked)
        # Where its whole step was estimated in the search, that is its row.
        if own and not own.checked:
            same = (one for one in shown if one.is_plain and one.microbatch == own.microbatch)
            own = next(same, own)
        return replace(self._plan(best, shown, budget_bytes), own=own)

    def _describe_plain(
        self, found: list[Candidate], microbatch: int | None, budget_bytes: int
    ) -> Candidate | None:
        """Return the model as it is with the caller's microbatch, or that of the workload.

        None where the caller has asked for the loss in chunks. A workload without a microbatch of
        its own trains all samples at once. A step that would run for real, or among ranks, is
        predicted by the chain.
        """
        if self.asked:
            return None
        samples = found[0].microbatch * found[0].steps
        size = microbatch or self.sketch.case.workload.own_batch or samples
        if samples % size or (size == 1 and not self._runs_on_one_sample):
            size = samples
        own = self.whole_steps.plain(Candidate(size, samples // size, False))
        if self.sketch.why_real is None and not self.sharding.is_shared:
            own = self.whole_steps.whole(own)
        return own.within(budget_bytes)

    def _list_settings(self, global_batch: int, microbatch: int | None) -> list[Candidate]:
        """Return the settings to try: microbatch size, number of microbatches, chunked loss."""
        sizes = self.sharding.microbatches(global_batch, microbatch)
        if sizes[0][0] == 1 and not self._runs_on_one_sample:
            del sizes[0]
        if not sizes:
            raise ValueError(
                "the model does not train on a microbatch of 1 sample, which a norm over the "
                "batch may refuse: plan for 2 or more"
            )
        return [
            Candidate(size, steps, chunked) for chunked in self._losses for size, steps in sizes
        ]

    @functools.cached_property
    def _runs_on_one_sample(self) -> bool:
        """Check that a step on one sample runs, which norms over the batch may refuse."""
        try:
            self.whole_steps.step(Candidate(1, 1, False))
        except ValueError as error:
            if NEEDS_SAMPLES_ERROR not in str(error):
                raise
            return False
        return True

    @functools.cached_property
    def _losses(self) -> list[bool]:
        """The ways to run the loss that are tried, each measured: whole, in chunks, or both.

        A chunk has a quarter as many tokens as the head is wide, so the head's gradient is read and
        written four times in all.
        """
        losses = []
        if not self.asked:
            self._measure(chunked=False)
            losses.append(False)
        if self.asked is not False:
            try:
                model = self.sketch.build()
                (name,) = primitives.apply_chunked_loss(model)
                width = next(model.get_submodule(name).parameters()).shape[1]
                self.whole_steps.chunk_tokens = max(1, width // 4)
                self._measure(chunked=True)
                losses.append(True)
            except ValueError:
                # No head, or a loss that reads the logits.
                if self.asked:
                    raise
        return losses

    def _measure(self, *, chunked: bool) -> None:
        """Estimate the plain steps of the measured sizes, and once what blocks cost."""
        sizes = " and ".join(map(str, MEASURED_MICROBATCH_SIZES))
        loss = " with chunked loss" if chunked else ""
        is_first = self.whole_steps.menus is None
        self._tell(
            f"estimating steps of {sizes} samples{loss}", 0.0 if is_first else CHECKING_STARTS
        )
        self.whole_steps.plain_steps(chunked=chunked)
        if is_first:
            self.whole_steps.measure(
                chunked=chunked,
                offload=self.card.kernels == "cuda" and self.sketch.why_real is None,
                without=self.without,
                tell=lambda message, done: self._tell(message, CHECKING_STARTS * done),
            )

    def _plan(self, best: Candidate, found: list[Candidate], budget_bytes: int) -> Plan:
        sketch = self.sketch
        sharding = self.sharding
        whole_steps = self.whole_steps
        module = sketch.build()
        blocks = {name: fingerprint(block) for name, block in sketch.blocks(module).items()}
        blocks[""] = fingerprint(module, blocks)
        plain = whole_steps.plain(best).step_seconds
        assert best.step_seconds is not None
        assert plain is not None
        return Plan(
            workload=sketch.case.workload.name,
            budget_bytes=budget_bytes,
            microbatch=best.microbatch,
            steps=best.steps,
            ranks=sharding.ranks,
            chunk_tokens=whole_steps.chunk_tokens if best.chunked_loss else None,
            options=best.options,
            peak_bytes=best.peak_bytes,
            step_seconds=best.step_seconds,
            plain_seconds=plain,
            fingerprint=blocks,
            settings={
                "device": self.profile.name,
                "rates_from": self.profile.source,
                "parallel": sharding.name,
                "mesh": sharding.mesh_text if sharding.is_shared else None,
                "dtype": sketch.dtype_name,
                "block_notes": sketch.choice.lines() if sketch.choice else [],
                "host_note": sketch.host_note,
                "limit_notes": self.limit_notes,
                "optimizer": name_of(sketch.optimizer),
                "why_real": sketch.why_real,
                "left_out": whole_steps.left_out,
            },
            why=why_it_won(best, found, plain)
            + what_microbatches_change(module, best)
            + (EVERY_LAYER_NOTE if sketch.draws.drawn else ""),
            cuda=self._cuda_figures(best, budget_bytes),
            communication=whole_steps.communication(best),
            candidates=tuple(found),
        )

    def _describe_infeasible(
        self, least: Candidate, found: list[Candidate], budget_bytes: int
    ) -> Infeasible:
        """Name the least peak and what would help, in 80 columns."""
        within = " and ".join(self.limit_notes)
        lines = wrap(
            f"nothing fits {format_bytes(budget_bytes)}{within and f' (with {within})'}: the "
            f"least peak is {format_bytes(least.peak_bytes)}, "
            f"{format_bytes(least.peak_bytes - budget_bytes)} too much, with microbatch "
            f"{least.microbatch} and {least.summary()}",
            80,
        )
        for lever in self._describe_levers(least, {one.microbatch for one in found}, budget_bytes):
            lines += wrap(lever, 80, initial_indent="  ", subsequent_indent="    ")
        return Infeasible("\n".join(lines), least.peak_bytes)

    def _describe_levers(
        self, least: Candidate, sizes: set[int], budget_bytes: int
    ) -> Iterator[str]:
        """Yield what is in use before any activation, and what would help: what is free first."""
        step = self.whole_steps.step(least)
        accumulated = step.timeline.owners[GRADIENTS_GROUP][0]
        in_use = {
            "parameters and optimizer state": step.fixed,
            "gradients of earlier microbatches": accumulated,
            "the context of the process": self.card.context(self.card.trace_of(step)),
        }
        num_bytes = sum(in_use.values())
        line = f"before any activation {format_bytes(num_bytes)} is in use: "
        line += ", and ".join(name for name, part in in_use.items() if part)
        if num_bytes > budget_bytes:
            line += "; that alone is over the budget, so no choice for activations helps"
        yield line

        for lever, peak in self._estimate_levers(least, step):
            if peak < least.peak_bytes:
                fits = ", which fits" if peak <= budget_bytes else ""
                yield f"{lever}: a peak of {format_bytes(peak)}{fits}"

        if accumulated:
            yield (
                "one microbatch per window, which accumulates no gradients: up to "
                f"{format_bytes(accumulated)} less, with {least.steps} times fewer samples"
            )
        if sizes == {least.microbatch} != {1}:
            yield f"a microbatch below {least.microbatch}, which was not tried"
        if self.asked is False:
            yield "the loss in chunks, which was not tried"
        if not self.sharding.is_shared:
            yield "several GPUs: curry-train plan --fits h100 finds how many are enough"

    def _estimate_levers(self, least: Candidate, step: StepEstimate) -> Iterator[tuple[str, int]]:
        """Yield changes outside the model, each with the peak that the least one would become."""
        trace = self.card.trace_of(step)
        if trace is not None:
            expandable = self.card.memory(trace, expandable=True).reserved_bytes
            setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, at no cost"
            yield setting, expandable + self.card.context(trace)
        trained = trained_parameters(self.sketch.build())
        # Of a rank: its part of the parameters.
        part = step.gradients / sum(one.nbytes for one in trained)
        kept = 2 * part * sum(map(Tensor.numel, trained))
        saved = step.timeline.owners[OPTIMIZER_STATE_GROUP][0] - round(kept)
        yield "optimizer state of 2 bytes per parameter", least.peak_bytes - saved
