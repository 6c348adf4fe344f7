"""Find the fastest options that fit: the chain proposes, and whole steps check, on any rank.

The chain of blocks predicts a peak from blocks measured alone. `WholeSteps` estimates the step of a
candidate from shapes, corrects the chain by the difference, and searches for the fastest options
that fit. With several ranks, the whole step is that of one rank in its wrapping.

Proof: `python -m pytest tests/plan/test_plan.py tests/plan/test_never_slower.py`.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy
from torch import nn

from .. import primitives
from .card import Card
from .chain import Integers, PricedChain, chain_of
from .costs import MEASURED_MICROBATCH_SIZES, Drop, Menu
from .estimate import Sketch, StepEstimate, count_window, time_of_window
from .rank_step import ForcedRouting
from .rank_time import OTHER_LINKS, Links, RankSeconds
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

# Microbatch, accumulated, chunked loss and alone among ranks, then options.
ChainKey = tuple[int, bool, bool, bool]
StepKey = tuple[ChainKey, tuple[tuple[str, Option], ...]]


class WholeSteps:
    """Estimate whole steps from shapes, each of them once, and search among them.

    `menus` has what the options of each block cost, and `chunk_tokens` is for a loss in chunks.
    Set both before a search.
    """

    def __init__(self, sketch: Sketch, *, card: Card, links: Links = OTHER_LINKS) -> None:
        self.links = links
        self.sketch = sketch
        self.profile = card.profile
        self.menus: Mapping[str, Menu] | None = None
        self.chunk_tokens: int | None = None

        # Each whole step that was estimated.
        self.known: dict[StepKey, StepEstimate] = {}

        # The memory that a device must have for a step.
        self.bytes_needed = functools.cache(card.bytes_needed)

        self._priced: dict[ChainKey, PricedChain] = {}

    # What the chain predicts.

    def priced(self, candidate: Candidate) -> PricedChain:
        """Return the chain for a candidate, with the bytes of a device, corrected by a plain step.

        The plain step has the larger size that the chain was measured at. With several ranks, the
        chain is of the model alone, and gets what one rank has more or less.
        """
        key, _ = self._key(candidate)
        if key not in self._priced:
            plain = _as_it_is(candidate)
            alone = self.step(plain, alone=True)
            extra = self.bytes_needed(self.step(plain)) - alone.peak_bytes

            measured = self._chain(plain)
            moments = measured.moments(measured.plain)
            for_each_sample = numpy.maximum(0, moments - alone.peak_bytes) / plain.microbatch
            shifts: Integers = extra - numpy.rint(candidate.microbatch * for_each_sample).astype(
                numpy.int64
            )
            found = self._chain(candidate).shifted(shifts)
            self._priced[key] = replace(found, floor=found.floor + extra)
        return self._priced[key]

    def _chain(self, candidate: Candidate) -> PricedChain:
        """Return the chain for a candidate, of the model alone, as its blocks predict it."""
        return chain_of(
            self.plain_steps(chunked=candidate.chunked_loss),
            self.menus or {},
            candidate.microbatch,
            accumulated=candidate.steps > 1,
            profile=self.profile,
            dtype=self.sketch.dtype_name,
        )

    def predict(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        """Return the chain's choice for a budget, or the one with the least peak if none fits."""
        chain = self.priced(candidate)
        return self._predicted(candidate, chain.fastest(budget_bytes) or chain.least())

    def plain(self, candidate: Candidate) -> Candidate:
        """Predict the model as it is, with the microbatch and the loss of a candidate."""
        return self._predicted(candidate, self.priced(candidate).plain)

    def _predicted(self, candidate: Candidate, options: dict[str, Option]) -> Candidate:
        found = replace(candidate, options=options)
        return replace(
            found,
            peak_bytes=self.priced(candidate).peak(options),
            step_seconds=self.seconds(found),
            flops=None,
            checked=False,
        )

    # The search.

    def fastest(
        self, candidate: Candidate, budget_bytes: int, best: Candidate | None = None
    ) -> Candidate | None:
        """Find the fastest options for the microbatch and the loss of a candidate that fit.

        If none are found, return the candidate with the least peak. Return None if none can be
        faster than `best`. With a kind of options more, the chain may be wrong where it was right
        without them. So the search is done without each kind too, and without several, as far as
        that leads to other choices: one more option never makes the plan slower.
        """
        chain = self.priced(candidate)
        kinds = {option.kind for block in chain.blocks for option in block.options}
        waiting = [frozenset(kinds - {NONE_KIND})]
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
            used = {option.kind for one in tried for option in one.options.values()}
            waiting += [allowed - {kind} for kind in sorted(used - {NONE_KIND})]
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
        seconds = self.seconds(replace(candidate, options=options))
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

    def least(self, candidate: Candidate) -> Candidate:
        """Find the options with the least peak for this microbatch, regardless of time.

        Of equal peaks the fewest FLOPs win.
        """
        chain = self.priced(candidate)
        found = self._poorest(replace(candidate, options=chain.least()), chain)
        return min(found, key=lambda one: (one.peak_bytes, one.flops))

    # Whole steps.

    def step(self, candidate: Candidate, *, alone: bool = False) -> StepEstimate:
        """Return the whole step of a candidate, which is estimated once.

        `alone`: of the model without its sharding.
        """
        key = self._key(candidate, alone=alone)
        if key not in self.known:
            self.known[key] = self.recorded(candidate, alone=alone)
        return self.known[key]

    def recorded(
        self, candidate: Candidate, *, anew: bool = False, alone: bool = False
    ) -> StepEstimate:
        """Estimate the whole step of a candidate.

        `anew`: also where the sketch has kept it, which it does with plain steps.
        """
        settings: dict[str, Any] = {"accumulated": candidate.steps > 1, "alone": alone}
        chunked: list[nn.Module] = []
        if candidate.is_plain and not anew:
            return self.sketch.step(candidate.microbatch, **settings)
        with Drop() as drop:
            offload = drop if self.sketch.why_real is None else None

            def change(module: nn.Module) -> None:
                apply_options(module, candidate.options, offload=offload)
                if candidate.chunked_loss:
                    primitives.apply_chunked_loss(module, chunk_tokens=self.chunk_tokens)
                    chunked.append(module)

            step = self.sketch.step(candidate.microbatch, change=change, **settings)
        # The sharding of a rank may read the logits of a loss in chunks as a whole.
        for module in chunked if alone else ():
            for name, use in primitives.chunked_loss_report(module).items():
                if not use.num_chunked:
                    raise ValueError(
                        f"the loss of {name} does not run in chunks ({use}): leave the loss whole"
                    )
        return step

    def plain_steps(self, *, chunked: bool) -> list[StepEstimate]:
        """Return the steps of the model as it is, without a sharding, of the measured sizes."""
        sizes = [Candidate(size, 1, chunked) for size in MEASURED_MICROBATCH_SIZES]
        return [self.step(size, alone=True) for size in sizes]

    def looked_at(self, candidate: Candidate) -> list[Candidate]:
        """List all choices for the same microbatch whose whole step was estimated."""
        same, _ = self._key(candidate)
        plain = self.priced(candidate).plain
        estimated = [plain | dict(options) for key, options in self.known if key == same]
        return [self.whole(replace(candidate, options=options)) for options in estimated]

    def whole(self, candidate: Candidate) -> Candidate:
        """Return a candidate with the peak, time and FLOPs of its whole step."""
        step = self.step(candidate)
        return replace(
            candidate,
            peak_bytes=self.bytes_needed(step),
            step_seconds=self.seconds(candidate),
            flops=candidate.steps * float(step.flops.sum()),
            checked=True,
        )

    def seconds(self, candidate: Candidate) -> float:
        """Predict the time of an optimizer step, of what the chain predicts for a microbatch."""
        if self.sketch.sharding.is_shared:
            return self.rank_seconds(candidate).total
        first = self.plain_steps(chunked=candidate.chunked_loss)[0]
        optimizer = self.profile.optimizer_seconds(first.fixed, first.gradients)
        return candidate.steps * self.priced(candidate).seconds(candidate.options) + optimizer

    def rank_seconds(self, candidate: Candidate) -> RankSeconds:
        """Predict the time of an optimizer step of one rank of several.

        It computes its part of what the chain predicts, and waits for collectives. A step that was
        not estimated waits as the plain step of the chain's size does.
        """
        measured = _as_it_is(candidate)
        plain = self.step(measured)
        step = self.known.get(self._key(candidate), plain)
        scale = candidate.microbatch / measured.microbatch if step is plain else 1.0
        # FSDP2 computes in the dtype of gathered parameters.
        dtype = self.sketch.sharding.precision or self.sketch.dtype_name
        window = functools.partial(
            time_of_window, profile=self.profile, links=self.links, dtype=dtype
        )

        # A rank has a part of the model, or its layers' copies besides, by the plain step.
        part = window(plain, steps=1).compute / self.priced(measured).plain_seconds
        found = window(step, steps=candidate.steps, scale=scale)
        of_microbatch = self.priced(candidate).seconds(candidate.options)
        return found._replace(compute=candidate.steps * part * of_microbatch)

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
            step = self.recorded(candidate, anew=True) if is_measured else self.step(candidate)
            even = self.bytes_needed(step)
            with routing.worst():
                worst = self.bytes_needed(self.recorded(candidate, anew=True))
        return {"even_bytes": even, "worst_bytes": worst} if is_measured or even < worst else None

    def communication(self, candidate: Candidate) -> dict[str, Any] | None:
        """Describe the time and the collectives of a candidate that was estimated.

        None for one rank.
        """
        step = self.step(candidate)
        if step.course is None:
            return None
        return self.rank_seconds(candidate).to_json() | {
            "collectives": count_window(step, candidate.steps),
            "links": self.links.to_json(),
            "text": f"Links: {self.links}.",
        }

    def _key(self, candidate: Candidate, *, alone: bool = False) -> StepKey:
        alone &= self.sketch.sharding.is_shared
        chain = candidate.microbatch, candidate.steps > 1, candidate.chunked_loss, alone
        changed = [item for item in candidate.options.items() if item[1].kind != NONE_KIND]
        return chain, tuple(changed)


def _as_it_is(candidate: Candidate) -> Candidate:
    """Return the plain step of the larger size that the chain is measured at."""
    return replace(candidate, microbatch=MEASURED_MICROBATCH_SIZES[-1], options={})


def order(candidate: Candidate) -> tuple[float, bool, float, int]:
    """Sort key: the fastest first, and candidates that do not fit last.

    Ties are broken by whole before chunked loss, then the lower peak, then the smaller microbatch.
    """
    seconds = candidate.step_seconds
    first = float("inf") if seconds is None else round(seconds, 9)
    return first, candidate.chunked_loss, candidate.peak_bytes, candidate.microbatch
