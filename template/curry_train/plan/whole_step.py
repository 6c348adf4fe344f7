"""Find the fastest options that fit: the chain proposes, and whole steps check, on any rank.

The chain of blocks predicts a peak from steps of two sizes. `WholeSteps` estimates the step of a
candidate from shapes, corrects the chain by the difference, and searches for the fastest options
that fit. With several ranks, the whole step is that of one rank in its wrapping.

Proof: `python -m pytest tests/plan/test_plan.py tests/plan/test_never_slower.py`.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from .. import primitives
from .card import Card
from .chain import PricedChain, chain_of
from .costs import MEASURED_MICROBATCH_SIZES, Menu, drop_saved_tensors, measure_menus
from .estimate import Sketch, StepEstimate, count_window, time_of_window
from .rank_time import OTHER_LINKS, Links, RankSeconds
from .saved import FULL_KIND, NONE_KIND, Candidate, Option, apply_options

MOST_STEPS = 6  # whole steps that are estimated in one search
# The chain may predict too much by these factors: of another microbatch than those measured, and of
# blocks that run several times.
NEAR_RATIOS = (1.05, 1.35)

# Microbatch, accumulated, chunked loss and alone among ranks, then options.
ChainKey = tuple[int, bool, bool, bool]
StepKey = tuple[ChainKey, tuple[tuple[str, Option], ...]]


class WholeSteps:
    """Estimate whole steps from shapes, each of them once, and search among them.

    Set `chunk_tokens` for a loss in chunks, and call `measure` before a search.
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
        """Return the chain for a candidate, with the bytes that a device needs.

        Its times are those of the model alone. With several ranks, and for accumulated gradients,
        its bytes are corrected by a plain step of the larger size that the chain is measured at.
        """
        key, _ = self._key(candidate)
        if key not in self._priced:
            plain = self.step(_drop_sharding(candidate))
            self._priced[key] = chain_of(
                self.plain_steps(chunked=candidate.chunked_loss),
                self.menus or {},
                candidate.microbatch,
                like=plain,
                more=self.bytes_needed(plain) - plain.timeline.peak.bytes_alive,
                profile=self.profile,
            )
        return self._priced[key]

    def measure(self, *, chunked: bool, **options: Any) -> None:
        """Measure what the options of blocks cost; those that can't run are `left_out`.

        `options` are those of `measure_menus`.
        """

        def step_of(size: int, changes: Mapping[str, Option]) -> StepEstimate:
            return self.recorded(Candidate(size, 1, chunked, options=changes), alone=True)

        self.menus, self.left_out = measure_menus(
            step_of,
            self.sketch.blocks(self.sketch.build()),
            self.plain_steps(chunked=chunked),
            profile=self.profile,
            **options,
        )

    def predict(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        """Return the chain's choice for a budget, or the one with the least peak if none fits."""
        chain = self.priced(candidate)
        return self._predict(candidate, chain.fastest(budget_bytes) or chain.least())

    def plain(self, candidate: Candidate) -> Candidate:
        """Predict the model as it is, with the microbatch and the loss of a candidate."""
        return self._predict(candidate, self.priced(candidate).plain)

    def _predict(self, candidate: Candidate, options: dict[str, Option]) -> Candidate:
        found = replace(candidate, options=options)
        return replace(
            found,
            peak_bytes=self.priced(candidate).peak(options),
            step_seconds=self.seconds(found),
            checked=False,
        )

    # The search.

    def fastest(
        self, candidate: Candidate, budget_bytes: int, best: Candidate | None = None
    ) -> Candidate | None:
        """Find the fastest options for the microbatch and the loss of a candidate that fit.

        After each whole step the chain predicts its peak, until it proposes the same again. If
        nothing fits, return the candidate with the least peak. Return None where the chain expects
        nothing faster than `best`.
        """
        chain = self.priced(candidate)
        near, far = (round(ratio * budget_bytes) for ratio in NEAR_RATIOS)
        expected = chain.fastest(near) or chain.fastest(far)
        blocks = self.plain_steps(chunked=candidate.chunked_loss)[-1].blocks
        # Of blocks that run several times, the chain may predict far too much.
        if expected is None and all(block.calls <= 1 for block in blocks.values()):
            return None
        if expected is not None and best is not None:
            seconds = self.seconds(replace(candidate, options=expected))
            if order(replace(candidate, step_seconds=seconds)) >= order(best):
                return None
        tried: list[Candidate] = []
        while len(tried) < MOST_STEPS:
            options: Mapping[str, Option] | None = chain.fastest(budget_bytes)
            if options is None:
                options = chain.least() if tried else self.least(candidate).options
            if any(options == one.options for one in tried):
                break
            tried.append(self.whole(replace(candidate, options=options)))
            chain = chain.shifted_to(options, tried[-1].peak_bytes)
        seen = [one for one in self.looked_at(candidate) if one.peak_bytes <= budget_bytes]
        return min(seen, key=order, default=min(tried, key=lambda one: one.peak_bytes))

    def least(self, candidate: Candidate) -> Candidate:
        """Return the options with the least peak for this microbatch, regardless of time."""
        chain, full = self.priced(candidate), Option(FULL_KIND)
        least = chain.least()
        # The chain has measured an option in one of several blocks that cost about the same.
        every = {block.name: full for block in chain.blocks if full in block.options}
        tried = [replace(candidate, options=options) for options in (least, least | every)]
        seen = [*map(self.whole, tried), *self.looked_at(candidate)]
        return min(seen, key=lambda one: one.peak_bytes)

    # Whole steps.

    def step(self, candidate: Candidate, *, alone: bool = False) -> StepEstimate:
        """Return the whole step of a candidate, which is estimated once.

        `alone`: of the model without its sharding.
        """
        key = self._key(candidate, alone=alone)
        if key not in self.known:
            self.known[key] = self.recorded(candidate, alone=alone)
        return self.known[key]

    def recorded(self, candidate: Candidate, *, alone: bool = False) -> StepEstimate:
        """Estimate the whole step of a candidate."""
        chunked: list[nn.Module] = []
        offload = drop_saved_tensors if self.sketch.why_real is None else None

        def change(module: nn.Module) -> None:
            apply_options(module, candidate.options, offload=offload)
            if candidate.chunked_loss:
                primitives.apply_chunked_loss(module, chunk_tokens=self.chunk_tokens)
                chunked.append(module)

        step = self.sketch.step(
            candidate.microbatch, accumulated=candidate.steps > 1, change=change, alone=alone
        )
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
        """Return a candidate with the peak and the time of its whole step."""
        step = self.step(candidate)
        return replace(
            candidate,
            peak_bytes=self.bytes_needed(step),
            step_seconds=self.seconds(candidate),
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
        measured = _drop_sharding(candidate)
        plain = self.step(measured)
        step = self.known.get(self._key(candidate), plain)
        scale = candidate.microbatch / measured.microbatch if step is plain else 1.0
        window = functools.partial(time_of_window, profile=self.profile, links=self.links)

        # A rank has a part of the model, or its layers' copies besides, by the plain step.
        part = window(plain, steps=1).compute / self.priced(measured).plain_seconds
        found = window(step, steps=candidate.steps, scale=scale)
        of_microbatch = self.priced(candidate).seconds(candidate.options)
        return found._replace(compute=candidate.steps * part * of_microbatch)

    def communication(self, candidate: Candidate) -> dict[str, Any] | None:
        """Describe the time and the collectives of a candidate that was estimated.

        None for one rank.
        """
        step = self.step(candidate)
        if step.course is None:
            return None
        return self.rank_seconds(candidate).to_json() | {
            "collectives": count_window(step, candidate.steps),
            "links": vars(self.links),
            "text": f"Links: {self.links}.",
        }

    def _key(self, candidate: Candidate, *, alone: bool = False) -> StepKey:
        alone &= self.sketch.sharding.is_shared
        chain = candidate.microbatch, candidate.steps > 1, candidate.chunked_loss, alone
        changed = [item for item in candidate.options.items() if item[1].kind != NONE_KIND]
        return chain, tuple(changed)


def _drop_sharding(candidate: Candidate) -> Candidate:
    """Return the plain step of the larger size that the chain is measured at."""
    return replace(candidate, microbatch=MEASURED_MICROBATCH_SIZES[-1], options={})


def order(candidate: Candidate) -> tuple[float, bool, float, int]:
    """Sort key: the fastest first, and candidates that do not fit last.

    Ties are broken by whole before chunked loss, then the lower peak, then the smaller microbatch.
    """
    seconds = candidate.step_seconds
    first = float("inf") if seconds is None else round(seconds, 9)
    return first, candidate.chunked_loss, candidate.peak_bytes, candidate.microbatch
