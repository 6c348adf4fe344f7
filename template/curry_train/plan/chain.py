"""A model as a chain of blocks: bytes and seconds at any microbatch size, and the fastest options.

Backward runs from the last block to the first. In the backward of a block, the blocks up to it
still hold their bytes, and it needs its transient and standing bytes on top. Before the first
backward, all blocks hold their bytes, and the head needs its own on top.

Blocks and whole steps are measured at two sizes; figures of other sizes lie on the line through
them, because bytes and FLOPs are linear in the microbatch.

Proof: `python -m pytest tests/plan/test_chain.py tests/plan/test_plan.py`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import nn

from .. import primitives
from .costs import MEASURED_MICROBATCH_SIZES, Measured, Menu, measure_menus
from .device import DeviceProfile
from .estimate import Sketch, StepEstimate
from .saved import NONE_KIND, Option

# States that the search keeps after each block; its time is proportional to them.
MOST_STATES = 2048

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]


# The chain at one microbatch size, and the search of its options.


@dataclass(frozen=True)
class PricedBlock:
    """A block of the chain, with bytes and seconds of each of its options."""

    name: str
    options: tuple[Option, ...]
    held: Integers  # bytes after forward
    transient: Integers  # the most bytes on top of them during its own backward
    seconds: Floats  # above the block as it is
    standing: int = 0  # bytes in memory whenever the block is in backward, such as gradients

    def only(self, kinds: Collection[str]) -> "PricedBlock":
        """Return the block with the options of these kinds, and with itself as it is."""
        places = [
            place
            for place, option in enumerate(self.options)
            if option.kind == NONE_KIND or option.kind in kinds
        ]
        return replace(
            self,
            options=tuple(self.options[place] for place in places),
            held=self.held[places],
            transient=self.transient[places],
            seconds=self.seconds[places],
        )


@dataclass(frozen=True)
class PricedChain:
    """The blocks of a model in their order, at one microbatch size."""

    blocks: tuple[PricedBlock, ...]
    head: int = 0  # bytes besides the held ones before the first backward
    floor: int = 0  # bytes that the step takes whatever the blocks do
    plain_seconds: float = 0.0  # of forward and backward without recompute

    def fastest(self, room: int) -> dict[str, Option] | None:
        """Return the fastest options whose peak is within `room`; None if and only if none are.

        This is a dynamic program from the first block to the last. A state is a number of held
        bytes with the least seconds that lead to it. A state is dropped if another one holds no
        more and takes no longer. Where more than `MOST_STATES` are left, the fastest one of each
        range of bytes stays, and the one that holds least.
        """
        if room < self.floor:
            return None
        held: Integers = numpy.zeros(1, dtype=numpy.int64)
        seconds: Floats = numpy.zeros(1)
        ways = []
        for block in self.blocks:
            after = held[:, None] + block.held
            before, chosen = numpy.nonzero(after + block.transient + block.standing <= room)
            if not len(before):
                return None
            after = after[before, chosen]
            total = seconds[before] + block.seconds[chosen]
            states = _states_to_keep(after, total)
            held = after[states]
            seconds = total[states]
            ways.append((before[states], chosen[states]))

        # The states are in order of their bytes, and the more they hold the faster they are.
        state = int(numpy.searchsorted(held, room - self.head, side="right")) - 1
        if state < 0:
            return None
        options = {}
        for block, (before, chosen) in zip(reversed(self.blocks), reversed(ways), strict=True):
            options[block.name] = block.options[chosen[state]]
            state = before[state]
        return dict(reversed(options.items()))

    def least(self) -> dict[str, Option]:
        """Return the options with the least peak, and of those the ones that hold least.

        Time plays no part, so the choice is the same for every device.
        """
        # By bytes in place of seconds a single state is left after each block.
        by_bytes = [replace(block, seconds=block.held.astype(float)) for block in self.blocks]
        chain = replace(self, blocks=tuple(by_bytes))
        too_small = -1
        enough = self.peak({block.name: block.options[0] for block in self.blocks})
        while enough - too_small > 1:
            middle = (too_small + enough) // 2
            if chain.fastest(middle) is None:
                too_small = middle
            else:
                enough = middle
        found = chain.fastest(enough)
        assert found is not None, "the least peak fits itself"
        return found

    def moments(self, options: Mapping[str, Option]) -> Integers:
        """Predict the bytes in the backward of each block, and at last those before all."""
        chosen = [(block, block.options.index(options[block.name])) for block in self.blocks]
        held: Integers = numpy.cumsum(
            [block.held[place] for block, place in chosen], dtype=numpy.int64
        )
        on_top = [block.transient[place] + block.standing for block, place in chosen]
        last = held[-1:].sum() + self.head
        return numpy.append(held + numpy.array(on_top, dtype=numpy.int64), last)

    def peak(self, options: Mapping[str, Option]) -> int:
        return max(int(self.moments(options).max()), self.floor)

    def seconds(self, options: Mapping[str, Option]) -> float:
        """Predict the time of forward and backward under these options."""
        places = [block.options.index(options[block.name]) for block in self.blocks]
        extra = zip(self.blocks, places, strict=True)
        return self.plain_seconds + sum(float(block.seconds[place]) for block, place in extra)

    def only(self, kinds: Collection[str]) -> "PricedChain":
        """Return the chain with the options of these kinds alone."""
        return replace(self, blocks=tuple(block.only(kinds) for block in self.blocks))

    def shifted(self, shifts: Integers) -> "PricedChain":
        """Return the chain with so many bytes more at each of its moments."""
        blocks = [
            replace(block, standing=block.standing + int(shift))
            for block, shift in zip(self.blocks, shifts[:-1], strict=True)
        ]
        return replace(self, blocks=tuple(blocks), head=self.head + int(shifts[-1]))

    def shifts_to(self, options: Mapping[str, Option], peak: int) -> Integers:
        """Return the shifts with which the peak of these options is the given one.

        Moments above it are lowered to it. If all are below it, all rise by the same number.
        """
        above = self.moments(options) - peak
        return numpy.where(above > 0, -above, max(0, -int(above.max())))


def _states_to_keep(held: Integers, seconds: Floats) -> Integers:
    """Return the states that no other one beats, in order of their bytes, at most so many."""
    order = numpy.lexsort((seconds, held))
    quickest = numpy.minimum.accumulate(seconds[order])
    is_quicker = numpy.append(True, seconds[order][1:] < quickest[:-1])
    states: Integers = order[is_quicker]
    if len(states) <= MOST_STATES:
        return states
    ranges = held[states] * MOST_STATES // (held[states][-1] + 1)
    is_last = numpy.append(ranges[1:] != ranges[:-1], True)
    is_last[0] = True
    return states[is_last]


# What blocks and whole steps cost, as it was measured.


@dataclass(frozen=True)
class Chain:
    """Measured costs of a model's blocks and whole steps."""

    sketch: Sketch
    profile: DeviceProfile
    steps: tuple[StepEstimate, ...]  # plain whole steps, one for each of the measured sizes
    kinds: tuple[tuple[tuple[str, ...], Menu], ...]  # names of blocks, and what each option costs
    left_out: tuple[str, ...] = ()  # options that could not run, with the reason
    chunk_tokens: int | None = None

    def at(self, microbatch: int, *, accumulated: bool) -> PricedChain:
        """Return the chain at a microbatch size.

        `accumulated`: all gradients of earlier microbatches are in memory.
        """
        first = self.steps[0]
        menus = {name: menu for names, menu in self.kinds for name in names}

        # Backward runs from the last block to the first: gradients of later blocks exist already.
        gradients = {}
        later = first.head_gradients
        for name in reversed([*first.blocks]):
            gradients[name] = later
            later += first.blocks[name].gradients

        standing = self._bytes(microbatch, lambda step: step.fixed + step.rest)
        blocks = []
        for name, block in first.blocks.items():
            if name in menus:
                others = first.gradients - block.gradients if accumulated else gradients[name]
                priced = self._price(name, menus[name], microbatch, block.calls)
                blocks.append(replace(priced, standing=standing + others))

        if blocks:
            head = self._bytes(microbatch, lambda step: step.fixed + step.head)
            head += first.gradients if accumulated else 0
        else:
            head = self._bytes(microbatch, lambda step: step.peak_bytes)
        floor = self._bytes(microbatch, lambda step: step.step)
        return PricedChain(tuple(blocks), head, floor, self.plain_seconds(microbatch))

    def _price(self, name: str, menu: Menu, microbatch: int, calls: int) -> PricedBlock:
        """Price a menu for a microbatch size."""
        options = tuple(option for option, _ in menu)
        sized = [_sized(measured, microbatch) for _, measured in menu]
        figures = [
            (one.held, one.transient, one.seconds(option, self.profile, self._dtype))
            for option, one in zip(options, sized, strict=True)
        ]
        held, transient, seconds = numpy.array(figures).T
        # The first option is the block as it is.
        extra = numpy.maximum(0.0, calls * (seconds - seconds[0]))
        return PricedBlock(name, options, calls * _whole(held), _whole(transient), extra)

    def plain_seconds(self, microbatch: int) -> float:
        """Predict the time of forward and backward without recompute."""
        flops = at_size(microbatch, [step.flops for step in self.steps])
        moved = at_size(microbatch, [step.moved for step in self.steps])
        return self.profile.work_seconds(flops, moved, dtype=self._dtype)

    @property
    def optimizer_seconds(self) -> float:
        step = self.steps[0]
        return self.profile.optimizer_seconds(step.fixed, step.gradients)

    @property
    def _dtype(self) -> str:
        return str(self.sketch.case.dtype).removeprefix("torch.")

    def _bytes(self, microbatch: int, figure: Callable[[StepEstimate], int]) -> int:
        """Extrapolate a figure of the whole step to a microbatch size."""
        return round(float(at_size(microbatch, [figure(step) for step in self.steps])))


def _sized(measured: Sequence[Measured], microbatch: int) -> Measured:
    """Return the costs of an option at a microbatch size."""
    pairs = zip(*(vars(size).values() for size in measured), strict=True)
    return Measured(*(at_size(microbatch, pair) for pair in pairs))


def _whole(figures: Floats) -> Integers:
    return numpy.rint(figures).astype(numpy.int64)


def at_size(microbatch: int, figures: Sequence[Any]) -> Any:
    """Extrapolate figures from their values at the measured sizes.

    If the two sizes run different numbers of operations, scale the larger one in proportion.
    """
    first, second = figures
    small, large = MEASURED_MICROBATCH_SIZES
    if numpy.shape(first) != numpy.shape(second):
        return second * (microbatch / large)
    slope = (second - first) / (large - small)
    return numpy.maximum(0.0, first + slope * (microbatch - small))


def measure_chain(
    sketch: Sketch,
    profile: DeviceProfile,
    *,
    chunk_tokens: int | None = None,
    like: Chain | None = None,
    without: Sequence[str] = (),
    tell: Callable[[str, float], None] = lambda message, done: None,
) -> Chain:
    """Measure whole steps and the costs of each block.

    With `like` the blocks' costs are taken from that chain. Options of the kinds in `without` are
    left out. `tell` gets a message and the part of the work that is done. Raises a ValueError if
    `chunk_tokens` is given and the loss does not run in chunks.
    """
    changed: list[nn.Module] = []

    def chunk(module: nn.Module) -> None:
        primitives.apply_chunked_loss(module, chunk_tokens=chunk_tokens)
        changed.append(module)

    steps = []
    for size in MEASURED_MICROBATCH_SIZES:
        loss = " with chunked loss" if chunk_tokens else ""
        tell(f"estimating a step of {size} samples{loss}", 0.0 if like is None else 1.0)
        steps.append(sketch.step(size, change=None if chunk_tokens is None else chunk, alone=True))
        for name, use in primitives.chunked_loss_report(changed[-1]).items() if changed else ():
            if not use.num_chunked:
                raise ValueError(
                    f"the loss of {name} does not run in chunks ({use}): leave the loss whole"
                )
    if like is not None:
        return Chain(sketch, profile, tuple(steps), like.kinds, like.left_out, chunk_tokens)

    offload = profile.host_bytes_per_second is not None and sketch.why_real is None
    kinds, left_out = measure_menus(sketch, steps, offload=offload, without=without, tell=tell)
    return Chain(sketch, profile, tuple(steps), kinds, left_out, chunk_tokens)
