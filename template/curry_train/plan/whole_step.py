"""Find the fastest options that fit: the chain proposes, and whole steps check, on any rank.

The chain of blocks predicts a peak from blocks measured alone. `WholeSteps` estimates the step of a
candidate from shapes, corrects the chain by the difference, and searches for the fastest options
that fit. With several ranks, the whole step is that of one rank in its wrapping.

Proof: `python -m pytest tests/plan/test_plan.py tests/plan/test_never_slower.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import nn

from .. import primitives
from .chain import Chain, Integers, PricedChain
from .costs import MEASURED_MICROBATCH_SIZES, drop_saved
from .cuda_step import StepTrace
from .estimate import Sketch, StepEstimate, count_window, time_of_window
from .parallel import Sharding, offload_note
from .rank_step import ForcedRouting
from .rank_time import Links, RankSeconds, links_of
from .saved import (
    FULL_KIND,
    NONE_KIND,
    REGIONS_KIND,
    Candidate,
    Option,
    apply_options,
)

# Limits of one search.
MOST_STEPS = 6  # whole steps that are estimated
MOST_SOLVED = 24  # times that the chain is solved

# Fractions of the budget.
CLOSE_FRACTION = 0.985  # a search ends with a peak above this, if the chain offers nothing faster
WIDER_FRACTION = 0.01  # by so much more the chain is asked for a faster choice, then for twice that
NEAR_RATIO = 1.1  # up to this least peak, a choice other than the chain's may still fit
WIDEST_RATIO = 1.05  # the chain is not asked for what it predicts to need more than this
# The least peak of the chain may be too high by up to this factor.
OVERESTIMATE_RATIO = 1.35

# Ways to run the last block that are tried for the least peak.
LAST_KINDS = (NONE_KIND, REGIONS_KIND, FULL_KIND)

# Microbatch, accumulated, chunked loss, and options.
PlanKey = tuple[int, bool, bool, tuple[tuple[str, Option], ...]]


class WholeSteps:
    """Estimate whole steps from shapes, each of them once, and search among them.

    `chain` returns the chain for a candidate, with what its blocks cost. `overhead` returns the
    bytes that a device needs beside the tensors of a step.
    """

    def __init__(
        self,
        sketch: Sketch,
        *,
        chain: Callable[[Candidate], Chain],
        overhead: Callable[[StepEstimate], int] = lambda step: 0,
        links: Links | None = None,
    ) -> None:
        # None for those of the device.
        self._links = links
        self.sketch = sketch
        self.overhead = overhead
        self.chain = chain

        # Peak and FLOPs of each whole step that was estimated.
        self.known: dict[PlanKey, tuple[int, float]] = {}

        # Traces of the whole steps, for the model of CUDA's allocator.
        self.traces: dict[PlanKey, StepTrace] = {}

        # The steps of one rank of several, for their times.
        self._rank_steps: dict[PlanKey, StepEstimate] = {}

        # Plain steps by tokens of a chunk, accumulated, and whether the model is alone.
        self._plain_steps: dict[tuple[int | None, bool, bool], StepEstimate] = {}

        # Chains by microbatch, accumulated and chunked loss.
        self._priced: dict[tuple[int, bool, bool], PricedChain] = {}

    # What the chain predicts.

    def priced(self, candidate: Candidate) -> PricedChain:
        """Return the chain for a candidate, with the bytes of a device, corrected by a plain step.

        The plain step has the larger size that the chain was measured at. With several ranks, the
        chain is of the model alone, and gets what one rank has more or less.
        """
        key = candidate.microbatch, candidate.steps > 1, candidate.chunked_loss
        if key not in self._priced:
            accumulated = candidate.steps > 1
            chain = self.chain(candidate)
            alone = self._plain_step(chain, accumulated=accumulated, alone=True)
            step = self._plain_step(chain, accumulated=accumulated, alone=False)
            extra = step.peak_bytes - alone.peak_bytes + self.overhead(step)

            size = MEASURED_MICROBATCH_SIZES[-1]
            plain = replace(_plain(chain, candidate), microbatch=size)
            self._remember(self._key(plain), step)
            moments = chain.at(size, accumulated=accumulated).moments(plain.options)
            for_each_sample = numpy.maximum(0, moments - alone.peak_bytes) / size
            shifts: Integers = extra - numpy.rint(candidate.microbatch * for_each_sample).astype(
                numpy.int64
            )
            found = chain.at(candidate.microbatch, accumulated=accumulated).shifted(shifts)
            self._priced[key] = replace(found, floor=found.floor + extra)
        return self._priced[key]

    def predict(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        """Return the chain's choice for a budget, or the one with the least peak if none fits."""
        chain = self.priced(candidate)
        options = chain.fastest(budget_bytes) or chain.least()
        return replace(
            candidate,
            options=options,
            peak_bytes=chain.peak(options),
            step_seconds=self.seconds(candidate, chain.seconds(options)),
            flops=None,
            checked=False,
        )

    # The search.

    def fastest(
        self, candidate: Candidate, budget_bytes: int, best: Candidate | None = None
    ) -> Candidate | None:
        """Find the fastest options for the microbatch and the loss of a candidate that fit.

        If none are found, return the candidate with the least peak. Return None if none can be
        faster than `best`. With a group of options more, the chain may be wrong where it was right
        without them. So the search is done without each group too, and without several, as far as
        that leads to other choices: one more option never makes the plan slower.
        """
        chain = self.priced(candidate)
        groups = {option.group for block in chain.blocks for option in block.options}
        waiting = [frozenset(groups - {NONE_KIND})]
        least: Candidate | None = None
        done: set[frozenset[str]] = set()
        while waiting:
            allowed = waiting.pop(0)
            if allowed in done:
                continue
            done.add(allowed)
            limited = chain.only(allowed)
            if not self._may_be_faster(candidate, limited, budget_bytes, best):
                continue
            tried = self._search(candidate, limited, budget_bytes)
            used = {option.group for one in tried for option in one.options.values()}
            waiting += [allowed - {group} for group in sorted(used - {NONE_KIND})]
            fitting = [one for one in tried if one.peak_bytes <= budget_bytes]
            if least is None:
                least = min(tried, key=lambda one: one.peak_bytes)
            best = min(fitting if best is None else [best, *fitting], key=order, default=None)
        seen = [one for one in self.looked_at(candidate) if one.peak_bytes <= budget_bytes]
        return min(seen, key=order, default=least)

    def _may_be_faster(
        self, candidate: Candidate, chain: PricedChain, budget_bytes: int, best: Candidate | None
    ) -> bool:
        options = chain.fastest(round(WIDEST_RATIO * budget_bytes))
        options = options or chain.fastest(round(OVERESTIMATE_RATIO * budget_bytes))
        if options is None:
            return False
        seconds = self.seconds(candidate, chain.seconds(options))
        return best is None or order(replace(candidate, step_seconds=seconds)) < order(best)

    def _search(
        self, candidate: Candidate, chain: PricedChain, budget_bytes: int
    ) -> list[Candidate]:
        """Return the candidates that the chain proposes, each with its whole step.

        After each whole step the chain predicts its peak. Where the chain proposes the same again,
        it is asked for a faster one with a wider budget, because it may predict too much.
        """
        tried: dict[tuple[Option, ...], Candidate] = {}
        wider = 0
        for _ in range(MOST_SOLVED):
            options = chain.fastest(budget_bytes + wider) or chain.least()
            key = tuple(options.values())
            if key in tried:
                is_close = tried[key].peak_bytes >= CLOSE_FRACTION * budget_bytes
                wider = max(2 * wider, round(WIDER_FRACTION * budget_bytes))
                if is_close or wider > (WIDEST_RATIO - 1) * budget_bytes:
                    break
                continue
            if len(tried) == MOST_STEPS:
                break
            whole = self.whole(replace(candidate, options=options))
            tried[key] = whole
            if whole.peak_bytes <= budget_bytes and chain.seconds(options) <= chain.plain_seconds:
                break
            chain = chain.shifted(chain.shifts_to(options, whole.peak_bytes))
            wider = 0
        return [*tried.values(), *self._variants([*tried.values()], chain, budget_bytes)]

    def _variants(
        self, tried: list[Candidate], chain: PricedChain, budget_bytes: int
    ) -> Iterator[Candidate]:
        """Yield the best candidate with its last block as it is, or others with a low peak.

        The last block is in backward while nothing is freed, so recomputing it may save nothing.
        """
        fitting = [one for one in tried if one.peak_bytes <= budget_bytes]
        if fitting:
            best = min(fitting, key=order)
            if best.options and [*best.options.values()][-1].kind != NONE_KIND:
                last = [*best.options][-1]
                yield self.whole(replace(best, options={**best.options, last: Option(NONE_KIND)}))
            return
        least = min(tried, key=lambda one: one.peak_bytes, default=None)
        if least is not None and least.peak_bytes <= NEAR_RATIO * budget_bytes:
            yield from self._poorest(least, chain)

    def _poorest(self, candidate: Candidate, chain: PricedChain) -> Iterator[Candidate]:
        """Yield alternatives with a low peak, each with its whole step.

        These are the candidate, and both the candidate and full recompute of all blocks with
        `none`, `regions` and `full` for the last block.
        """
        yield self.whole(candidate)
        full = Option(FULL_KIND)
        if not chain.blocks or not all(full in block.options for block in chain.blocks):
            return
        last = chain.blocks[-1]
        tried = [one for one in map(Option, LAST_KINDS) if one in last.options]
        for base in (dict.fromkeys(candidate.options, full), candidate.options):
            for option in tried:
                yield self.whole(replace(candidate, options={**base, last.name: option}))

    def least(self, candidate: Candidate, *, near: float | None = None) -> Candidate:
        """Find the options with the least peak for this microbatch, regardless of time.

        Of equal peaks the fewest FLOPs win. If the chain's figure is far above `near`, it is
        returned without a check.
        """
        chain = self.priced(candidate)
        options = chain.least()
        poorest = replace(
            candidate,
            options=options,
            peak_bytes=chain.peak(options),
            step_seconds=None,
            flops=None,
            checked=False,
        )
        if near is not None and poorest.peak_bytes > OVERESTIMATE_RATIO * near:
            return poorest
        found = self._poorest(poorest, chain)
        return min(found, key=lambda one: (one.peak_bytes, one.flops))

    # Whole steps.

    def peak(self, candidate: Candidate) -> tuple[int, float]:
        """Return the peak of the whole step, and the FLOPs of one microbatch."""
        key = self._key(candidate)
        if key not in self.known:
            step = self.recorded(candidate)
            self._remember(key, step)
        return self.known[key]

    def recorded(self, candidate: Candidate, *, sketch: Sketch | None = None) -> StepEstimate:
        """Estimate the whole step of a candidate, in this sketch if no other one is given."""
        if sketch is None and self._is_known_plain(candidate):
            return self.sketch.step(candidate.microbatch, accumulated=candidate.steps > 1)
        with drop_saved() as offload:

            def change(module: nn.Module) -> None:
                apply_options(
                    module,
                    candidate.options,
                    offload=offload if self.sketch.why_real is None else None,
                )
                if candidate.chunked_loss:
                    primitives.apply_chunked_loss(
                        module, chunk_tokens=self.chain(candidate).chunk_tokens
                    )

            return (sketch or self.sketch).step(
                candidate.microbatch, accumulated=candidate.steps > 1, change=change
            )

    def _is_known_plain(self, candidate: Candidate) -> bool:
        """Check whether the sketch caches the step of a candidate on a rank, which has no change.

        Routers change the step of a model that is otherwise the same.
        """
        sketch = self.sketch
        is_plain = not candidate.chunked_loss and all(
            option.kind == NONE_KIND for option in candidate.options.values()
        )
        is_cached = sketch.sharding.is_shared and sketch.routing is None
        return is_plain and is_cached

    def peak_on(self, candidate: Candidate, sharding: Sharding) -> int:
        """Return the peak of a candidate on one of several ranks, where the plan is for one.

        It runs in a thread of its own, because torch's modes, which this thread is inside of, hold
        for one thread.
        """

        def estimate() -> int:
            with torch.enable_grad(), self.sketch.on_ranks(sharding) as sketch:
                step = self.recorded(candidate, sketch=sketch)
            return step.peak_bytes + self.overhead(step)

        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(estimate).result()

    def _remember(self, key: PlanKey, step: StepEstimate) -> None:
        self.known[key] = step.peak_bytes + self.overhead(step), float(step.flops.sum())
        if step.trace is not None:
            self.traces[key] = step.trace
        if step.course is not None:
            self._rank_steps[key] = step

    def trace(self, candidate: Candidate) -> StepTrace | None:
        """Return the trace of a candidate that was estimated, if it is one of CUDA."""
        return self.traces.get(self._key(candidate))

    def _plain_step(self, chain: Chain, *, accumulated: bool, alone: bool) -> StepEstimate:
        if alone and not accumulated:
            return chain.steps[-1]
        key = chain.chunk_tokens, accumulated, alone
        if key not in self._plain_steps:
            chunk = functools.partial(
                primitives.apply_chunked_loss, chunk_tokens=chain.chunk_tokens
            )
            self._plain_steps[key] = self.sketch.step(
                MEASURED_MICROBATCH_SIZES[-1],
                accumulated=accumulated,
                change=None if chain.chunk_tokens is None else chunk,
                alone=alone,
            )
        return self._plain_steps[key]

    def looked_at(self, candidate: Candidate) -> list[Candidate]:
        """List all choices for the same microbatch whose whole step was estimated."""
        *same, _ = self._key(candidate)
        estimated = [key[-1] for key in self.known if [*key[:-1]] == same]
        return [self.whole(replace(candidate, options=dict(options))) for options in estimated]

    def whole(self, candidate: Candidate) -> Candidate:
        """Return a candidate with the peak, time and FLOPs of its whole step."""
        peak, flops = self.peak(candidate)
        seconds = self.priced(candidate).seconds(candidate.options)
        return replace(
            candidate,
            peak_bytes=peak,
            step_seconds=self.seconds(candidate, seconds),
            flops=candidate.steps * flops,
            checked=True,
        )

    def seconds(self, candidate: Candidate, of_microbatch: float) -> float:
        """Predict the time of an optimizer step, of what the chain predicts for a microbatch.

        One rank of several computes its part of that, and waits for collectives.
        """
        chain = self.chain(candidate)
        if not self.sketch.sharding.is_shared:
            return candidate.steps * of_microbatch + chain.optimizer_seconds
        return self.rank_seconds(candidate, of_microbatch).total

    def rank_seconds(self, candidate: Candidate, of_microbatch: float) -> RankSeconds:
        """Predict the time of an optimizer step of one rank of several.

        A step that was not estimated waits as the plain step of the chain's size does.
        """
        chain = self.chain(candidate)
        plain = self._plain_step(chain, accumulated=candidate.steps > 1, alone=False)
        step, scale = plain, candidate.microbatch / MEASURED_MICROBATCH_SIZES[-1]
        if self._key(candidate) in self._rank_steps:
            step, scale = self._rank_steps[self._key(candidate)], 1.0
        found = self._window(chain, step, steps=candidate.steps, scale=scale)

        # A rank has a part of the model, or its layers' copies besides, by the plain step.
        one = self._window(chain, plain, steps=1).compute
        part = one / chain.plain_seconds(MEASURED_MICROBATCH_SIZES[-1])
        return replace(found, compute=candidate.steps * part * of_microbatch)

    def _window(
        self, chain: Chain, step: StepEstimate, *, steps: int, scale: float = 1.0
    ) -> RankSeconds:
        # FSDP2 computes in the dtype of gathered parameters.
        dtype = self.sketch.sharding.precision
        dtype = dtype or str(self.sketch.case.dtype).removeprefix("torch.")
        links = self._links_of(chain)
        return time_of_window(step, chain.profile, links, dtype=dtype, steps=steps, scale=scale)

    def _links_of(self, chain: Chain) -> Links:
        return self._links or links_of(chain.profile.name)

    def routing_peaks(self, candidate: Candidate) -> dict[str, int] | None:
        """Return the peak where each expert gets as many tokens, and where all choose the same.

        None where shapes do not depend on the routing.
        """
        from ..primitives.routing import has_router

        sketch = self.sketch
        is_measured = sketch.why_real is not None and has_router(sketch.build())
        if not is_measured and sketch.routing is None:
            return None
        routing = sketch.routing or ForcedRouting(even=True)
        with routing if is_measured else contextlib.nullcontext():
            even = self.recorded(candidate)
            with routing.worst():
                worst = self.recorded(candidate)
        peaks = {
            "even_bytes": even.peak_bytes + self.overhead(even),
            "worst_bytes": worst.peak_bytes + self.overhead(worst),
        }
        return peaks if is_measured or peaks["even_bytes"] < peaks["worst_bytes"] else None

    def communication(self, candidate: Candidate) -> dict[str, Any] | None:
        """Describe the time and the collectives of a candidate that was estimated.

        None for one rank.
        """
        step = self._rank_steps.get(self._key(candidate))
        if step is None:
            return None
        chain = self.chain(candidate)
        links = self._links_of(chain)
        seconds = self.priced(candidate).seconds(candidate.options)
        text = f"Links: {links}."
        if step.host_bytes:
            text += f" {offload_note(step.host_bytes)}"
        return self.rank_seconds(candidate, seconds).to_json() | {
            "collectives": count_window(step, candidate.steps),
            "host_bytes": step.host_bytes,
            "links": links.to_json(),
            "text": text,
        }

    @staticmethod
    def _key(candidate: Candidate) -> PlanKey:
        return (
            candidate.microbatch,
            candidate.steps > 1,
            candidate.chunked_loss,
            tuple(candidate.options.items()),
        )


def _plain(chain: Chain, candidate: Candidate) -> Candidate:
    """Return a candidate with all of its blocks as they are."""
    names = {name for names, _ in chain.kinds for name in names}
    blocks = [name for name in chain.steps[0].blocks if name in names]
    return replace(candidate, options=dict.fromkeys(blocks, Option(NONE_KIND)))


def order(candidate: Candidate) -> tuple[float, bool, float, int]:
    """Sort key: the fastest first, and candidates that do not fit last.

    Ties are broken by whole before chunked loss, then the lower peak, then the smaller microbatch.
    """
    if candidate.step_seconds is None:
        return float("inf"), candidate.chunked_loss, candidate.peak_bytes, candidate.microbatch
    return (
        round(candidate.step_seconds, 9),
        candidate.chunked_loss,
        candidate.peak_bytes,
        candidate.microbatch,
    )
