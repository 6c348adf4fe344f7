"""A model as a chain of blocks: bytes and seconds at any microbatch size, and the fastest options.

Backward runs from the last block to the first. In the backward of a block, the blocks up to it
still hold their bytes, and it needs its transient and standing bytes on top. Before the first
backward, all blocks hold their bytes, and the head needs its own on top.

Whole steps are estimated at two sizes; figures of other sizes lie on the line through them, because
bytes and FLOPs are linear in the microbatch.

Proof: `python -m pytest tests/plan/test_chain.py tests/plan/test_plan.py`.
"""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from numpy.typing import NDArray

from .costs import Menu, at_size, work_of
from .device import DeviceProfile
from .estimate import StepEstimate
from .saved import OFFLOAD_KIND, Option

# States that the search keeps after each block; its time is proportional to them.
MOST_STATES = 2048

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]


# The chain at one microbatch size, and the search of its options.


@dataclass(frozen=True)
class PricedBlock:
    """A block of the chain, with bytes and seconds of each of its options."""

    name: str
    options: tuple[Option, ...]  # the first one is the block as it is
    held: Integers  # bytes after forward
    transient: Integers  # the most bytes on top of them during its own backward
    seconds: Floats  # above the block as it is


@dataclass(frozen=True)
class PricedChain:
    """The blocks of a model in their order, at one microbatch size."""

    blocks: tuple[PricedBlock, ...]
    # Bytes besides those of the blocks, in the backward of each one, and at last before all.
    standing: Integers
    floor: int = 0  # bytes that the step takes whatever the blocks do
    plain_seconds: float = 0.0  # of forward and backward without recompute

    @property
    def plain(self) -> dict[str, Option]:
        """The options of the model as it is."""
        return {block.name: block.options[0] for block in self.blocks}

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
        for block, standing in zip(self.blocks, self.standing[:-1], strict=True):
            after = held[:, None] + block.held
            before, chosen = numpy.nonzero(after + block.transient + standing <= room)
            if not len(before):
                return None
            after = after[before, chosen]
            total = seconds[before] + block.seconds[chosen]
            states = _states_to_keep(after, total)
            held = after[states]
            seconds = total[states]
            ways.append((before[states], chosen[states]))

        # The states are in order of their bytes, and the more they hold the faster they are.
        state = int(numpy.searchsorted(held, room - self.standing[-1], side="right")) - 1
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
        rooms = range(self.peak(self.plain))
        room = bisect.bisect_left(rooms, True, key=lambda room: chain.fastest(room) is not None)
        found = chain.fastest(room)
        assert found is not None, "the least peak fits itself"
        return found

    def moments(self, options: Mapping[str, Option]) -> Integers:
        """Predict the bytes in the backward of each block, and at last those before all."""
        chosen = [(block, block.options.index(options[block.name])) for block in self.blocks]
        held: Integers = numpy.cumsum(
            [block.held[place] for block, place in chosen], dtype=numpy.int64
        )
        on_top = numpy.array([block.transient[place] for block, place in chosen], numpy.int64)
        return numpy.append(held + on_top, held[-1:].sum()) + self.standing

    def peak(self, options: Mapping[str, Option]) -> int:
        return max(int(self.moments(options).max()), self.floor)

    def seconds(self, options: Mapping[str, Option]) -> float:
        """Predict the time of forward and backward under these options."""
        places = [block.options.index(options[block.name]) for block in self.blocks]
        extra = zip(self.blocks, places, strict=True)
        return self.plain_seconds + sum(float(block.seconds[place]) for block, place in extra)

    def shifted_to(self, options: Mapping[str, Option], peak: int) -> "PricedChain":
        """Return the chain with other standing bytes, so that these options have the given peak.

        Moments above it are lowered to it. If all are below it, all rise by the same number.
        """
        above = self.moments(options) - peak
        shifts = numpy.where(above > 0, -above, max(0, -int(above.max())))
        return replace(self, standing=self.standing + shifts)


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


# Its figures, from what blocks and plain whole steps of two sizes cost.


def chain_of(
    steps: Sequence[StepEstimate],
    menus: Mapping[str, Menu],
    microbatch: int,
    *,
    like: StepEstimate,
    more: int,
    profile: DeviceProfile,
) -> PricedChain:
    """Return the chain at a microbatch size, of the menus of blocks by their names.

    `steps` are plain ones of the measured sizes. `like` is one of the larger size with gradients of
    earlier microbatches, or of one rank of several; for it a device needs `more` than its tensors.
    """
    last = steps[-1]

    def at(figure: Callable[[StepEstimate], Any]) -> Any:
        return numpy.maximum(0.0, at_size(microbatch, *map(figure, steps)))

    def moment(figure: Callable[[StepEstimate], int]) -> float:
        return float(at(figure)) + figure(like) - figure(last) + more

    blocks = []
    standing = []
    held = 0.0
    for name in last.blocks:
        if name in menus:

            def peak(step: StepEstimate, name: str = name) -> int:
                # A rank may not have a block.
                return step.blocks.get(name, last.blocks[name]).peak

            blocks.append(_price(name, menus[name], microbatch, steps, profile))
            held += float(blocks[-1].held[0])
            standing.append(moment(peak) - held)
    standing.append(moment(lambda step: step.head) - held)
    flops, moved = at(lambda step: step.flops), at(lambda step: step.moved)
    return PricedChain(
        tuple(blocks),
        _whole(standing),
        round(moment(lambda step: step.tail)),
        profile.work_seconds(flops, moved, dtype=last.dtype),
    )


def _price(
    name: str, menu: Menu, microbatch: int, steps: Sequence[StepEstimate], profile: DeviceProfile
) -> PricedBlock:
    """Price the menu of a block for a microbatch size."""
    work = zip(*(work_of(step, name) for step in steps), strict=True)
    flops, moved = (numpy.maximum(0.0, at_size(microbatch, *sizes)) for sizes in work)
    plain = profile.work_seconds(flops, moved, dtype=steps[-1].dtype)
    whole = at_size(microbatch, *(step.blocks[name].held for step in steps))
    held, transient, seconds = [], [], []
    for option, cost in menu.items():
        more, besides = at_size(microbatch, cost.small, cost.large)
        held.append(max(0.0, whole + more))
        transient.append(besides)
        # Copies to the host and back overlap with the computation.
        copied = -2 * more if option.kind == OFFLOAD_KIND else 0.0
        copies = copied / (profile.host_bytes_per_second or math.inf)
        seconds.append(max(0.0, cost.slowdown * plain - plain, copies - plain))
    return PricedBlock(name, tuple(menu), _whole(held), _whole(transient), numpy.array(seconds))


def _whole(figures: Any) -> Integers:
    return numpy.rint(figures).astype(numpy.int64)
