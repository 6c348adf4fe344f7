"""Check candidates of a plan against an estimate of the whole step, on one rank or several.

The chain of blocks predicts a peak from blocks measured alone. `WholeSteps` estimates the step of a
candidate from shapes, corrects the chain by the difference, and searches for the fastest options
that fit. With several ranks, the whole step is that of one rank in its wrapping.

Proof: `python -m pytest tests/plan/test_plan.py tests/plan/test_plan_refusals.py`.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import primitives
from .chain import Chain
from .costs import MEASURED_MICROBATCH_SIZES, drop_saved
from .cuda_step import StepTrace
from .estimate import Sketch, StepEstimate
from .parallel import Sharding, offload_note
from .rank_step import ForcedRouting
from .saved import (
    FULL_KIND,
    NONE_KIND,
    Candidate,
    Option,
    apply_options,
)

if TYPE_CHECKING:
    from .rank_time import Links, RankSeconds

# Check candidates against an estimate of the whole step, and correct the chain of blocks.

# Limits of the search for one candidate.
MOST_STEPS = 6  # whole steps that are estimated
MOST_SOLVED = 24  # times that the chain is solved

# Fractions of the budget.
CLOSE_BUDGET_FRACTION = (
    0.985  # a peak above this ends the search if the chain offers nothing better
)
BOUNDS_GAP_FRACTION = 0.002  # the search ends once its bounds are closer than this
NEAR_BUDGET_RATIO = 1.1  # up to this peak, a choice other than the chain's may still fit

CHAIN_OVERESTIMATE_RATIO = 1.35  # the chain may overestimate a whole step by up to this factor

# Microbatch, accumulated, chunked loss, and options.
PlanKey = tuple[int, bool, bool, tuple[tuple[str, Option], ...]]


@dataclass
class _BudgetSearch:
    """State of the search for the chain's budget whose plan uses the real budget best."""

    budget_bytes: int
    room: int  # the chain's budget
    best: Candidate | None  # the fastest candidate that fits
    least: Candidate | None = None  # the candidate with the least peak
    low: int = 0  # largest budget of the chain whose plan fits
    high: int = 0  # smallest budget of the chain whose plan does not fit, 0 if none is known

    def offer(self, whole: Candidate) -> None:
        """Take a candidate that fits if it is faster than the best one."""
        if self.best is None or order(whole) < order(self.best):
            self.best = whole

    def restart(self, room: int) -> None:
        """Drop the bounds, because the chain was corrected."""
        self.low = 0
        self.high = 0
        self.room = room

    def next_room(self, wanted: int, slack: int) -> int | None:
        """Return the chain's next budget, given the wanted one; None ends the search."""
        close = (
            self.best is not None
            and self.best.peak_bytes >= CLOSE_BUDGET_FRACTION * self.budget_bytes
        )
        if self.high:
            if close or self.high - self.low < BOUNDS_GAP_FRACTION * self.budget_bytes:
                return None
            if not self.low < wanted < self.high:
                wanted = (self.low + self.high) // 2
        elif wanted <= self.room:
            if close:
                return None
            wanted = self.room + max(slack, round(5 * BOUNDS_GAP_FRACTION * self.budget_bytes))
        return max(1, wanted)


class WholeSteps:
    """Estimate whole steps from shapes, each of them once.

    `chain` returns the chain for a candidate, with what its blocks cost. `solve` returns the
    chain's choice for another budget. `overhead` returns the bytes that a device needs beside the
    tensors of a step.
    """

    def __init__(
        self,
        sketch: Sketch,
        *,
        chain: Callable[[Candidate], Chain],
        solve: Callable[[Candidate, int], Candidate],
        overhead: Callable[[StepEstimate], int] = lambda step: 0,
        links: "Links | None" = None,
    ) -> None:
        # None for those of the device.
        self._links = links
        self.sketch = sketch
        self.overhead = overhead
        self.chain = chain
        self.solve = solve

        # Peak and FLOPs of each whole step that was estimated.
        self.known: dict[PlanKey, tuple[int, float]] = {}

        # Corrections of the chain, as `Chain.solve` takes them, by chunked loss and accumulated.
        self.less: defaultdict[tuple[bool, bool], dict[str, float]] = defaultdict(dict)

        # Traces of the whole steps, for the model of CUDA's allocator.
        self.traces: dict[PlanKey, StepTrace] = {}

        # The steps of one rank of several, for their times.
        self._rank_steps: dict[PlanKey, StepEstimate] = {}

        # Plain steps by tokens of a chunk, accumulated, and whether the model is alone.
        self._plain_steps: dict[tuple[int | None, bool, bool], StepEstimate] = {}

        # Chunked loss and accumulated, where the chain's least peak was checked.
        self.seen: set[tuple[bool, bool]] = set()

    def start(self, chain: Chain, *, chunked: bool) -> None:
        """Take the plain step of a chain as the first whole step, and correct the chain by it."""
        plain = _plain(chain, chunked=chunked)
        step = chain.steps[-1]
        if self.sketch.sharding.is_shared:
            step = self._plain_step(chain, accumulated=False, alone=False)
        peak = step.peak_bytes + self.overhead(step)
        self._remember(self._key(plain), step, peak)
        self._learn(replace(plain, peak_bytes=peak))

    def peak(self, candidate: Candidate) -> tuple[int, float]:
        """Return the peak of the whole step, and the FLOPs of one microbatch."""
        key = self._key(candidate)
        if key not in self.known:
            step = self.recorded(candidate)
            self._remember(key, step, step.peak_bytes + self.overhead(step))
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

    def _remember(self, key: PlanKey, step: StepEstimate, peak: int) -> None:
        self.known[key] = peak, float(step.flops.sum())
        if step.trace is not None:
            self.traces[key] = step.trace
        if step.course is not None:
            self._rank_steps[key] = step

    def trace(self, candidate: Candidate) -> StepTrace | None:
        """Return the trace of a candidate that was estimated, if it is one of CUDA."""
        return self.traces.get(self._key(candidate))

    def extra_bytes(self, candidate: Candidate) -> int:
        """Return the bytes of a device beside the tensors that the chain predicts.

        With several ranks, the chain is of the model alone, and this includes how much more or less
        one rank has, by the plain step of the same size as the chain's. What grows with the samples
        differs where ranks share a layer.
        """
        chain = self.chain(candidate)
        if not self.sketch.sharding.is_shared:
            return self.overhead(chain.steps[-1])
        accumulated = candidate.steps > 1
        of_rank = self._plain_step(chain, accumulated=accumulated, alone=False)
        alone = self._plain_step(chain, accumulated=accumulated, alone=True)
        return of_rank.peak_bytes - alone.peak_bytes + self.overhead(of_rank)

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

    def may_fit(self, candidate: Candidate, budget_bytes: int) -> bool:
        """Check whether a candidate may fit; until it is corrected, the chain may overestimate."""
        doubt = NEAR_BUDGET_RATIO if _way(candidate) in self.seen else CHAIN_OVERESTIMATE_RATIO
        return (
            candidate.peak_bytes <= doubt * budget_bytes
            or self._known_to_fit(candidate, budget_bytes) is not None
        )

    def _known_to_fit(self, candidate: Candidate, budget_bytes: int) -> Candidate | None:
        """Return the fastest fitting candidate of those estimated before, for any budget."""
        fitting = [one for one in self.looked_at(candidate) if one.peak_bytes <= budget_bytes]
        return min(fitting, key=order, default=None)

    def looked_at(self, candidate: Candidate) -> list[Candidate]:
        """List all choices for the same microbatch whose whole step was estimated."""
        *same, _ = self._key(candidate)
        estimated = [key[-1] for key in self.known if [*key[:-1]] == same]
        return [self._whole(replace(candidate, options=dict(options))) for options in estimated]

    def check(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        """Find the fastest options for the same microbatch whose whole step fits the budget.

        If none is found, return the candidate with the least peak.
        """
        search = _BudgetSearch(
            budget_bytes, room=budget_bytes, best=self._known_to_fit(candidate, budget_bytes)
        )
        most = len(self.known) + MOST_STEPS
        for _ in range(MOST_SOLVED):
            if len(self.known) >= most and self._key(candidate) not in self.known:
                break
            whole = self._whole(candidate)
            slack = budget_bytes - whole.peak_bytes
            # Above its own budget, the chain's choice is the one with the least peak.
            is_least_peak = candidate.peak_bytes > search.room
            self._compare(search, candidate, whole)
            if slack >= 0 and self._is_fastest(whole):
                break

            if is_least_peak:
                self.seen.add(_way(whole))
            nothing_fits = is_least_peak and search.best is None
            error = self._learn(whole)
            if nothing_fits and whole.peak_bytes > NEAR_BUDGET_RATIO * budget_bytes:
                break

            if error is not None:
                search.restart(max(1, budget_bytes - error))
            elif nothing_fits:
                break
            else:
                room = search.next_room(candidate.peak_bytes + slack, slack)
                if room is None:
                    break
                search.room = room
            candidate = self.solve(candidate, search.room)
        return self._result(search)

    def _result(self, search: _BudgetSearch) -> Candidate:
        """Return the best candidate of a search, after a try with other options for last blocks."""
        budget_bytes = search.budget_bytes
        if search.best is not None:
            return self._last_as_it_is(search.best, budget_bytes)
        least = search.least
        assert least is not None
        if least.peak_bytes <= NEAR_BUDGET_RATIO * budget_bytes:
            found = self._poorest(least)
            return min(found, key=lambda one: order(one.within(budget_bytes)))
        return least

    def _compare(self, search: _BudgetSearch, candidate: Candidate, whole: Candidate) -> None:
        """Update the search with the whole step of a candidate."""
        budget_bytes = search.budget_bytes
        if search.least is None or whole.peak_bytes < search.least.peak_bytes:
            search.least = whole
        search.room = max(search.room, candidate.peak_bytes)
        if whole.peak_bytes <= budget_bytes:
            search.offer(whole)
            search.low = max(search.low, search.room)
            return

        search.high = min(search.high or search.room, search.room)
        if whole.peak_bytes <= NEAR_BUDGET_RATIO * budget_bytes:
            other = self._last_as_it_is(whole, budget_bytes)
            if other.peak_bytes <= budget_bytes:
                search.offer(other)

    def _last_as_it_is(self, best: Candidate, budget_bytes: int) -> Candidate:
        """Try a candidate with its last block not recomputed, and return the better of the two.

        The last block is in backward while nothing is freed, so recomputing it may save nothing.
        """
        last = [*best.options][-1:]
        if not last or best.options[last[0]].kind == NONE_KIND:
            return best
        other = self._whole(replace(best, options={**best.options, last[0]: Option(NONE_KIND)}))
        return min(best, other, key=lambda one: order(one.within(budget_bytes)))

    def least(self, candidate: Candidate, *, near: float | None = None) -> Candidate:
        """Find the options with the least peak for this microbatch, regardless of time.

        Of equal peaks the fewest FLOPs win. If the chain's figure is far above `near`, it is
        returned without a check.
        """
        chain = self.chain(candidate)
        accumulated = candidate.steps > 1
        options, peak = chain.least(candidate.microbatch, accumulated=accumulated)
        peak += self.extra_bytes(candidate)
        poorest = replace(
            candidate,
            options=options,
            peak_bytes=peak,
            step_seconds=None,
            flops=None,
            checked=False,
        )
        if near is not None and peak > CHAIN_OVERESTIMATE_RATIO * near:
            return poorest
        found = self._poorest(poorest)
        return min(found, key=lambda one: (one.peak_bytes, one.flops))

    def _learn(self, whole: Candidate) -> int | None:
        """Correct the chain where it predicts more bytes than the peak of the whole step.

        Return by how much the chain's peak is too low; None if nothing was corrected.
        """
        chain = self.chain(whole)
        less = self.less[_way(whole)]
        accumulated = whole.steps > 1
        if not whole.options:
            return None
        extra = self.extra_bytes(whole)
        predicted = chain.moments(
            whole.microbatch, whole.options, accumulated=accumulated, less=less
        )
        above = {name: moment + extra - whole.peak_bytes for name, moment in predicted.items()}
        wrong = {name: excess for name, excess in above.items() if excess > whole.microbatch}
        for name, excess in wrong.items():
            less[name] = less.get(name, 0.0) + excess / whole.microbatch
        return max(0, -max(above.values())) if wrong else None

    def _poorest(self, candidate: Candidate) -> list[Candidate]:
        """List alternatives with a low peak, each with its whole step.

        These are the candidate, and both the candidate and full recompute of all blocks with `none`
        and `full` for the last block, which is in backward while nothing is freed.
        """
        found = [self._whole(candidate)]
        names = list(candidate.options)
        if names and self.chain(candidate).offers(Option(FULL_KIND)):
            full = dict.fromkeys(names, Option(FULL_KIND))
            alternatives = [
                {**base, names[-1]: Option(kind)}
                for base in (full, candidate.options)
                for kind in (NONE_KIND, FULL_KIND)
            ]
            found += [self._whole(replace(candidate, options=options)) for options in alternatives]
        return found

    def _is_fastest(self, candidate: Candidate) -> bool:
        """Check whether a candidate is as fast as the plain step."""
        chain = self.chain(candidate)
        least = self.seconds(candidate, chain.plain_seconds(candidate.microbatch))
        return candidate.step_seconds is None or candidate.step_seconds <= least

    def _whole(self, candidate: Candidate) -> Candidate:
        """Return a candidate with the peak, time and FLOPs of its whole step."""
        peak, flops = self.peak(candidate)
        chain = self.chain(candidate)
        steps = candidate.steps
        seconds = chain.seconds(candidate.microbatch, candidate.options)
        return replace(
            candidate,
            peak_bytes=peak,
            step_seconds=self.seconds(candidate, seconds),
            flops=steps * flops,
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

    def rank_seconds(self, candidate: Candidate, of_microbatch: float) -> "RankSeconds":
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
    ) -> "RankSeconds":
        # Imported here because a plan of one GPU needs no times of ranks.
        from .rank_time import time_of_window

        # FSDP2 computes in the dtype of gathered parameters.
        dtype = self.sketch.sharding.precision
        dtype = dtype or str(self.sketch.case.dtype).removeprefix("torch.")
        links = self._links_of(chain)
        return time_of_window(step, chain.profile, links, dtype=dtype, steps=steps, scale=scale)

    def _links_of(self, chain: Chain) -> "Links":
        from .rank_time import links_of

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
        from .rank_time import count_window

        chain = self.chain(candidate)
        links = self._links_of(chain)
        seconds = chain.seconds(candidate.microbatch, candidate.options)
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


def _plain(chain: Chain, *, chunked: bool) -> Candidate:
    """Return the plain step of a chain, at its larger size, as a candidate."""
    options = dict.fromkeys(chain.names, Option(NONE_KIND))
    return Candidate(MEASURED_MICROBATCH_SIZES[-1], 1, chunked, 0, None, options)


def _way(candidate: Candidate) -> tuple[bool, bool]:
    """Return the key under which corrections of the chain are stored."""
    return candidate.chunked_loss, candidate.steps > 1


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
