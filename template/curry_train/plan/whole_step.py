"""Candidates held against the whole step: what the chain of blocks says of a plan is checked, and corrected.

The chain leaves out what two blocks share and what is gone by the time a block is in backward. So the whole step of
what it chose is estimated, and the chain is solved again for the budget that this leaves, up or down, until the budget
is used or nothing better is found. Proof: `python -m pytest tests/test_plan.py`.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from .. import primitives
from .block_costs import drop_saved
from .chain_of_blocks import Chain
from .estimate import Sketch
from .menu import SIZES
from .options import FULL, NONE, Option, apply_options
from .saved_plan import Candidate
from .sharding import Sharding

MOST_STEPS = 6  # whole steps for one candidate
MOST_SOLVED = 24
CLOSE = 0.985  # of the budget: more than that is not asked for where the chain sees nothing better
FINE = 0.002  # of the budget: closer bounds are not looked between
NEAR = 1.1  # what is so far above the budget may fit with another choice than the chain's
DOUBTFUL = 1.35  # so much more than the whole step may the chain say
Key = tuple[
    int, bool, bool, tuple[tuple[str, Option], ...]
]  # microbatch, accumulated, chunked loss, and options


class WholeSteps:
    """Whole steps from shapes, each estimated once. `chain` has what a candidate's blocks cost, `solve` gives the
    chain's choice for another budget."""

    def __init__(
        self,
        sketch: Sketch,
        sharding: Sharding,
        *,
        chain: Callable[[Candidate], Chain],
        solve: Callable[[Candidate, int], Candidate],
    ) -> None:
        self.sketch, self.sharding, self.chain, self.solve = sketch, sharding, chain, solve
        self.known: dict[Key, tuple[int, float]] = {}
        self.less: defaultdict[tuple[bool, bool], dict[str, float]] = defaultdict(
            dict
        )  # as `Chain.solve` takes it
        self.seen: set[tuple[bool, bool]] = set()  # where the chain's least peak was checked

    def start(self, chain: Chain, *, chunked: bool) -> None:
        """What is known from the steps as they are."""
        plain = Candidate(SIZES[-1], 1, chunked, 0, None, dict.fromkeys(chain.names, Option(NONE)))
        step = chain.steps[-1]
        peak = step.peak_bytes + self.sharding.extra_bytes(step, accumulated=False)
        self.known[self._key(plain)] = peak, float(step.flops.sum())
        self._learn(replace(plain, peak_bytes=peak))

    def peak(self, candidate: Candidate) -> tuple[int, float]:
        """The peak of the whole step, and the FLOPs of a microstep."""
        if (key := self._key(candidate)) not in self.known:
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

                step = self.sketch.step(
                    candidate.microbatch, accumulated=candidate.steps > 1, change=change
                )
            extra = self.sharding.extra_bytes(step, accumulated=candidate.steps > 1)
            self.known[key] = step.peak_bytes + extra, float(step.flops.sum())
        return self.known[key]

    def may_fit(self, candidate: Candidate, budget_bytes: int) -> bool:
        """Whether the chain's choice is worth checking: it may say too much, until it was corrected."""
        doubt = NEAR if _way(candidate) in self.seen else DOUBTFUL
        return (
            candidate.peak_bytes <= doubt * budget_bytes
            or self._known_to_fit(candidate, budget_bytes) is not None
        )

    def _known_to_fit(self, candidate: Candidate, budget_bytes: int) -> Candidate | None:
        """The fastest of what was looked at before, for whatever budget."""
        fitting = [one for one in self.looked_at(candidate) if one.peak_bytes <= budget_bytes]
        return min(fitting, key=order, default=None)

    def looked_at(self, candidate: Candidate) -> list[Candidate]:
        """All choices of the same microbatch of which the whole step was estimated."""
        *same, _ = self._key(candidate)
        options = [key[-1] for key in self.known if [*key[:-1]] == same]
        return [self._whole(replace(candidate, options=dict(each))) for each in options]

    def check(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        """The fastest of the same microbatch that was found to fit, or else what has the least peak."""
        best, least = self._known_to_fit(candidate, budget_bytes), None
        low, high, room = (
            0,
            0,
            budget_bytes,
        )  # what the chain may take: it fits with `low`, it does not with `high`
        most = len(self.known) + MOST_STEPS
        for _ in range(MOST_SOLVED):
            if len(self.known) >= most and self._key(candidate) not in self.known:
                break
            whole = self._whole(candidate)
            least = whole if least is None or whole.peak_bytes < least.peak_bytes else least
            slack, poorest = budget_bytes - whole.peak_bytes, candidate.peak_bytes > room
            room = max(room, candidate.peak_bytes)
            if slack >= 0:
                best = whole if best is None or order(whole) < order(best) else best
                low = max(low, room)
                if self._is_fastest(whole):
                    break
            else:
                high = min(high or room, room)
                other = (
                    self._last_as_it_is(whole, budget_bytes)
                    if whole.peak_bytes <= NEAR * budget_bytes
                    else whole
                )
                if other.peak_bytes <= budget_bytes and (
                    best is None or order(other) < order(best)
                ):
                    best = other
            if poorest:
                self.seen.add(_way(whole))
            if poorest and best is None and whole.peak_bytes > NEAR * budget_bytes:
                self._learn(whole)
                break
            if (error := self._learn(whole)) is not None:  # the chain says something else now
                low, high, room = 0, 0, max(1, budget_bytes - error)
                candidate = self.solve(candidate, room)
                continue
            if poorest and slack < 0 and best is None:
                break
            wanted, close = (
                candidate.peak_bytes + slack,
                best is not None and best.peak_bytes >= CLOSE * budget_bytes,
            )
            if high and (close or high - low < FINE * budget_bytes):
                break
            if high and not low < wanted < high:
                wanted = (low + high) // 2
            elif not high and wanted <= room:
                if close:
                    break
                wanted = room + max(slack, round(5 * FINE * budget_bytes))
            room = max(1, wanted)
            candidate = self.solve(candidate, room)
        assert least is not None
        if best is None and least.peak_bytes <= NEAR * budget_bytes:
            found = self._poorest(least)
            return min(found, key=lambda one: order(one.within(budget_bytes)))
        return least if best is None else self._last_as_it_is(best, budget_bytes)

    def _last_as_it_is(self, best: Candidate, budget_bytes: int) -> Candidate:
        """The last block comes into backward when nothing was freed: recomputing it may save nothing."""
        last = [*best.options][-1:]
        if not last or best.options[last[0]].kind == NONE:
            return best
        other = self._whole(replace(best, options={**best.options, last[0]: Option(NONE)}))
        return min(best, other, key=lambda one: order(one.within(budget_bytes)))

    def least(self, candidate: Candidate, *, near: float | None = None) -> Candidate:
        """What peaks least of this microbatch, of equal ones what computes least: no time has a say in it. Where the
        chain's figure is far above `near`, it has to do."""
        chain, many = self.chain(candidate), candidate.steps > 1
        options, peak = chain.least(candidate.microbatch, accumulated=many)
        peak += self.sharding.extra_bytes(chain.steps[-1], accumulated=many)
        poorest = replace(
            candidate,
            options=options,
            peak_bytes=peak,
            step_seconds=None,
            flops=None,
            checked=False,
        )
        if near is not None and peak > DOUBTFUL * near:
            return poorest
        found = self._poorest(poorest)
        return min(found, key=lambda one: (one.peak_bytes, one.flops))

    def _learn(self, whole: Candidate) -> int | None:
        """At no moment is there more than at the peak: the chain says so from now on. What it still says too little;
        None where it has nothing to learn."""
        chain, less, many = self.chain(whole), self.less[_way(whole)], whole.steps > 1
        if not whole.options:
            return None
        extra = self.sharding.extra_bytes(chain.steps[-1], accumulated=many)
        found = chain.moments(whole.microbatch, whole.options, accumulated=many, less=less)
        above = {name: there + extra - whole.peak_bytes for name, there in found.items()}
        wrong = {name: most for name, most in above.items() if most > whole.microbatch}
        for name, most in wrong.items():
            less[name] = less.get(name, 0.0) + most / whole.microbatch
        return max(0, -max(above.values())) if wrong else None

    def _poorest(self, candidate: Candidate) -> list[Candidate]:
        """This and all blocks recomputed whole, and both with other choices for the last block, which is in backward
        while nothing was freed."""
        found, names = [self._whole(candidate)], list(candidate.options)
        if names and self.chain(candidate).offers(Option(FULL)):
            full = dict.fromkeys(names, Option(FULL))
            ways = [
                {**whole, names[-1]: Option(kind)}
                for whole in (full, candidate.options)
                for kind in (NONE, FULL)
            ]
            found += [self._whole(replace(candidate, options=options)) for options in ways]
        return found

    def _is_fastest(self, candidate: Candidate) -> bool:
        chain = self.chain(candidate)
        least = (
            candidate.steps * chain.plain_seconds(candidate.microbatch) + chain.optimizer_seconds
        )
        return candidate.step_seconds is None or candidate.step_seconds <= least

    def _whole(self, candidate: Candidate) -> Candidate:
        peak, flops = self.peak(candidate)
        chain, steps = self.chain(candidate), candidate.steps
        seconds = (
            steps * chain.seconds(candidate.microbatch, candidate.options) + chain.optimizer_seconds
        )
        return replace(
            candidate, peak_bytes=peak, step_seconds=seconds, flops=steps * flops, checked=True
        )

    @staticmethod
    def _key(candidate: Candidate) -> Key:
        return (
            candidate.microbatch,
            candidate.steps > 1,
            candidate.chunked_loss,
            tuple(candidate.options.items()),
        )


def _way(candidate: Candidate) -> tuple[bool, bool]:
    return candidate.chunked_loss, candidate.steps > 1


def order(candidate: Candidate) -> tuple[float, bool, float, int]:
    """Fastest first; of equal ones the plainer, and what has more room; what does not fit last, by how much."""
    if candidate.step_seconds is None:
        return float("inf"), candidate.chunked_loss, candidate.peak_bytes, candidate.microbatch
    return (
        round(candidate.step_seconds, 9),
        candidate.chunked_loss,
        candidate.peak_bytes,
        candidate.microbatch,
    )
