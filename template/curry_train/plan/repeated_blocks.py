"""Record a step of equal consecutive blocks by running only some of them.

    runs = equal_runs(kinds, options, order)
    step = sketch.step(4, change=change, make=functools.partial(RepeatedLives, runs=runs))

Of each run of equal blocks the first three and the last are executed. The others return their
input, and the record of the third block is inserted for each of them, in forward and in backward.
The second and third block must have equal records, operation by operation; otherwise the step does
not repeat and `NotRepeated` is raised.

Proof: `python -m pytest tests/plan/test_repeated_blocks.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from ..core.measure import Life, RunningLayers, tensors_in
from .estimate import PricedLives, StepEstimate
from .saved import Option
from .timeline import ASKS_FOR_DEVICE

# Blocks of a run that are executed: the first, two whose records are compared, and the last.
NUM_FIRST = 3
LEAST_RUN = 6

# Positions of the executed blocks, by which records name the owners of storages.
FIRST_BLOCK = 0  # and all that comes before it in forward, or after it in backward
SECOND_BLOCK = 1
THIRD_BLOCK = 2
LAST_BLOCK = 3  # and all that comes after it in forward, or before it in backward

# The makers of storages that the first and the last of these positions may make or free.
REACHED_POSITIONS = {
    FIRST_BLOCK: (FIRST_BLOCK, SECOND_BLOCK, LAST_BLOCK),
    LAST_BLOCK: (FIRST_BLOCK, THIRD_BLOCK, LAST_BLOCK),
}


class NotRepeated(Exception):
    """The record of a step does not repeat from block to block, so all blocks must run."""


def equal_runs(
    kinds: Sequence[Sequence[str]], options: Mapping[str, Option], order: Sequence[str]
) -> list[tuple[str, ...]]:
    """List the runs of consecutive blocks of one kind and option that are worth shortening."""
    kind_of = {name: index for index, names in enumerate(kinds) for name in names}
    runs: list[list[str]] = []
    latest = None
    for name in order:
        key = (kind_of.get(name), options.get(name))
        if key != latest or key[0] is None:
            runs.append([])
        runs[-1].append(name)
        latest = key
    return [tuple(run) for run in runs if len(run) >= LEAST_RUN and run[0] in kind_of]


def same_record(one: StepEstimate, other: StepEstimate) -> bool:
    """Check that two estimates are equal in every operation and every byte."""
    return replace(one, flops=None, moved=None) == replace(other, flops=None, moved=None) and all(
        numpy.array_equal(getattr(one, name), getattr(other, name)) for name in ("flops", "moved")
    )


@dataclass
class _Mark:
    """A moment of a record: numbers of operations, events and priced operations before it."""

    operation: int
    event: int
    priced: int

    def __sub__(self, other: "_Mark") -> "_Mark":
        return _Mark(
            self.operation - other.operation, self.event - other.event, self.priced - other.priced
        )


@dataclass
class _Calls:
    """Calls of the blocks in forward, and the first operation of each in backward."""

    order: list[str] = field(default_factory=list)
    forward: dict[str, _Mark] = field(default_factory=dict)
    backward: dict[str, _Mark] = field(default_factory=dict)
    inputs: dict[str, list[Any]] = field(default_factory=dict)  # layouts of all inputs
    outputs: dict[str, tuple[list[Any], Any]] = field(default_factory=dict)  # layouts, structure
    nodes: dict[str, tuple[int, int]] = field(default_factory=dict)  # autograd nodes of the block


class _Blocks(RunningLayers):
    """Call the record when a layer begins and ends."""

    record: "RepeatedLives"

    def entered(self, layer: str, inputs: Any) -> None:
        self.record.entered(layer, inputs)

    def left(self, layer: str, output: Any) -> None:
        self.record.left(layer, output)


class RepeatedLives(PricedLives):
    """Record a step in which only some blocks of each run are executed."""

    def __init__(
        self,
        module: nn.Module,
        device: Any,
        layers: Mapping[str, nn.Module],
        *args: Any,
        runs: Sequence[Sequence[str]],
        **kwargs: Any,
    ) -> None:
        super().__init__(module, device, layers, *args, **kwargs)
        self.running = _Blocks(module, layers)
        self.running.record = self
        self.runs = runs
        self.calls = _Calls()
        self._block = ""
        self._names = {name for run in runs for name in run}
        for run in runs:
            for name in run[NUM_FIRST:-1]:
                block = module.get_submodule(name)
                block.forward = self._passing_on(name, run[THIRD_BLOCK])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_FOR_DEVICE:
            return args[0].device
        self.settle()
        now = self._now()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.phase == "backward" and self.lives and self.lives[-1].born == now.operation:
            self._mark_backward(self.lives[-1].node, now)
        return out

    def _now(self) -> _Mark:
        return _Mark(self.num_operations, len(self.events), len(self.flops))

    def _mark_backward(self, node: int | None, now: _Mark) -> None:
        """Mark the begin of a block's backward if an autograd node of another block runs."""
        if node is None:
            return
        for name, (first, last) in self.calls.nodes.items():
            if first < node <= last and name != self._block:
                if name in self.calls.backward:
                    raise NotRepeated(f"the backward of {name} is interrupted by another block's")
                self._block = name
                self.calls.backward[name] = now

    def entered(self, layer: str, inputs: Any) -> None:
        """Mark the begin of a block's forward."""
        if self.phase != "forward" or layer not in self._names:
            return
        if layer in self.calls.forward:
            raise NotRepeated(f"{layer} is called twice")
        self.calls.order.append(layer)
        self.calls.forward[layer] = self._now()
        self.calls.inputs[layer] = [_layout(leaf) for leaf in tree_iter(inputs)]
        self.calls.nodes[layer] = _latest_node(inputs), _latest_node(inputs)

    def left(self, layer: str, output: Any) -> None:
        """Remember what a block returns, and the autograd nodes that it made."""
        if self.phase != "forward" or layer not in self._names:
            return
        leaves, structure = tree_flatten(output)
        self.calls.outputs[layer] = [_layout(leaf) for leaf in leaves], structure
        before, _ = self.calls.nodes[layer]
        self.calls.nodes[layer] = before, _latest_node(output)

    def _passing_on(self, name: str, like: str) -> Any:
        """Return a forward that returns its input in the place of an equal block's output."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if like not in self.calls.outputs:
                raise NotRepeated(f"{like} does not run before {name}")
            layouts, structure = self.calls.outputs[like]
            given = list(tree_iter((args, kwargs)))
            wanted = [layout for layout in layouts if isinstance(layout, tuple)]
            if any(isinstance(layout, type) for layout in layouts):
                raise NotRepeated(f"{like} returns an object")
            if len(wanted) != 1 or [_layout(leaf) for leaf in given] != self.calls.inputs[like]:
                raise NotRepeated(f"{name} has other inputs or outputs than one tensor")
            passed = [leaf for leaf in given if _layout(leaf) == wanted[0]]
            if not passed:
                raise NotRepeated(f"{name} returns another layout than it gets")
            values = [passed[0] if isinstance(layout, tuple) else layout for layout in layouts]
            return tree_unflatten(values, structure)

        return forward

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Insert the records of the blocks that did not run, then replay the optimizer step."""
        stand_ins: dict[int, tuple[Tensor, list[Life]]] = {}
        for run in self.runs:
            stand_ins |= _Insertion(self, run).insert()
        self.gradients = []
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                self.gradients += self.lives_of(parameter.grad)
            elif id(parameter) in stand_ins:
                self.gradients += stand_ins[id(parameter)][1]
        gradients = {key: gradient for key, (gradient, _) in stand_ins.items()}
        key = None if self.steps is None else self.steps.key(optimizer, gradients)
        if self.steps is None or key not in self.steps.recorded:
            raise NotRepeated("the optimizer step was not recorded before")
        self.repeat(*self.steps.recorded[key])

    def change(self, begin: _Mark, end: _Mark, length: _Mark, number: int, source: _Mark) -> None:
        """Put copies of the operations from `source` on in the place of those from begin to end.

        `length` is that of one copy. Marks and phases at `end` or later move.
        """
        changed: list[tuple[list[Any], str]] = [
            (self.flops, "priced"),
            (self.moved, "priced"),
            (self.phases, "operation"),
            (self.allocated, "operation"),
        ]
        for figures, name in changed:
            first = getattr(source, name)
            copied = figures[first : first + getattr(length, name)] * number
            figures[getattr(begin, name) : getattr(end, name)] = copied

        def moved(place: int, name: str) -> int:
            if place < getattr(end, name):
                return place
            inserted = number * getattr(length, name)
            return int(place + inserted - getattr(end, name) + getattr(begin, name))

        self.ends = {phase: moved(place, "operation") for phase, place in self.ends.items()}
        self.event_ends = {phase: moved(place, "event") for phase, place in self.event_ends.items()}
        self.products = {thread: moved(place, "event") for thread, place in self.products.items()}
        self.num_operations = moved(self.num_operations, "operation")
        for marks in (self.calls.forward, self.calls.backward):
            for block, mark in marks.items():
                names = ("operation", "event", "priced")
                marks[block] = _Mark(*(moved(getattr(mark, name), name) for name in names))


class _Insertion:
    """Insert the record of a run's third block for each block of the run that did not run."""

    def __init__(self, record: RepeatedLives, run: Sequence[str]) -> None:
        self.record = record
        self.run = run
        self.number = len(run) - NUM_FIRST - 1
        self.names = [*run[:NUM_FIRST], run[-1]]
        calls = record.calls
        places = [calls.order.index(name) for name in run if name in calls.order]
        if len(places) < len(run) or places != [*range(places[0], places[0] + len(run))]:
            raise NotRepeated(f"the blocks from {run[0]} to {run[-1]} do not run in this order")
        if any(name not in calls.backward for name in self.names[:LAST_BLOCK]):
            raise NotRepeated(f"the backward of the blocks from {run[0]} makes no tensor")
        self._drop_arguments()
        self.forward = [calls.forward[name] for name in self.names]
        self.backward = [calls.backward[name] for name in self.names[:LAST_BLOCK]]
        # Storages by the block that made them, and the place of each.
        self.made: list[list[Life]] = [[], [], [], []]
        self.home: dict[int, tuple[int, int]] = {}
        for position, begin, end in self._pieces():
            for life, is_made in record.events[begin:end]:
                if is_made:
                    self.home[id(life)] = position, len(self.made[position])
                    self.made[position].append(life)

    def _drop_arguments(self) -> None:
        """Drop what the model computes to call the blocks that do not run."""
        record = self.record
        begin = record.calls.forward[self.run[NUM_FIRST]]
        end = record.calls.forward[self.run[-1]]
        dropped = record.events[begin.event : end.event]
        made = {id(life) for life, is_made in dropped if is_made}
        freed = {id(life) for life, is_made in dropped if not is_made}
        if made != freed:
            raise NotRepeated(
                f"the model makes or frees storages between {self.run[THIRD_BLOCK]} and its next"
            )
        length = end - begin
        for life, is_made in record.events[end.event :]:
            if is_made:
                life.born -= length.operation
            elif life.died is not None:
                life.died -= length.operation
        record.lives = [life for life in record.lives if id(life) not in made]
        record.change(begin, end, length, 0, begin)
        del record.events[begin.event : end.event]

    def _pieces(self) -> list[tuple[int, int, int]]:
        """List the parts of the record in order: a position, and numbers of events."""
        cuts = [0, *(mark.event for mark in self.forward[SECOND_BLOCK:])]
        cuts += [
            self.backward[position].event for position in (THIRD_BLOCK, SECOND_BLOCK, FIRST_BLOCK)
        ]
        cuts.append(len(self.record.events))
        if cuts != sorted(cuts):
            raise NotRepeated(f"the blocks from {self.run[0]} do not run backward in order")
        positions = (
            FIRST_BLOCK,
            SECOND_BLOCK,
            THIRD_BLOCK,
            LAST_BLOCK,
            THIRD_BLOCK,
            SECOND_BLOCK,
            FIRST_BLOCK,
        )
        return [
            (position, begin, end)
            for position, begin, end in zip(positions, cuts, cuts[1:], strict=False)
        ]

    def insert(self) -> dict[int, tuple[Tensor, list[Life]]]:
        """Change the record; return gradient and storages for each parameter that has none."""
        self._compare()
        record = self.record
        forward = self.forward[LAST_BLOCK] - self.forward[THIRD_BLOCK]
        backward = self.backward[SECOND_BLOCK] - self.backward[THIRD_BLOCK]
        pieces = self._pieces()
        copies: list[list[Life]] = [[] for _ in range(self.number)]
        events: list[tuple[Life, bool, int]] = []

        for place, (position, begin, end) in enumerate(pieces):
            shift = self.number * forward.operation if place > 2 else 0
            if place == 4:  # the third block's backward, after those of the copies
                for index in reversed(range(self.number)):
                    first = self.backward[THIRD_BLOCK].operation + shift
                    first += (self.number - 1 - index) * backward.operation
                    events += self._copy(index, copies, place, first)
            if place > 3:
                shift += self.number * backward.operation
            for number in range(begin, end):
                life, is_made = record.events[number]
                operation = life.born if is_made else life.died
                assert operation is not None
                other = self._relinked(life, position, number, copies)
                events.append((other, is_made, operation + shift))
            if place == 2:  # the third block's forward, before those of the copies
                for index in range(self.number):
                    first = self.forward[LAST_BLOCK].operation + index * forward.operation
                    events += self._copy(index, copies, place, first)

        for life, is_made, operation in events:
            if is_made:
                life.born = operation
            else:
                life.died = operation
        record.lives += [life for lives in copies for life in lives]
        record.events = [(life, is_made) for life, is_made, _ in events]
        self._repeat_operations(forward, backward)
        return self._gradients(copies)

    def _compare(self) -> None:
        """Raise an error unless the records of the second and third block are equal."""
        record = self.record
        second = (self.forward[SECOND_BLOCK], self.forward[THIRD_BLOCK])
        third = (self.forward[THIRD_BLOCK], self.forward[LAST_BLOCK])
        second_back = (self.backward[SECOND_BLOCK], self.backward[FIRST_BLOCK])
        third_back = (self.backward[THIRD_BLOCK], self.backward[SECOND_BLOCK])
        for one, other in ((second, third), (second_back, third_back)):
            same = one[1] - one[0] == other[1] - other[0] and all(
                figures[one[0].priced : one[1].priced] == figures[other[0].priced : other[1].priced]
                for figures in (record.flops, record.moved)
            )
            if not same or self._events(SECOND_BLOCK, *one) != self._events(THIRD_BLOCK, *other):
                raise NotRepeated(
                    f"{self.names[THIRD_BLOCK]} does not run as {self.names[SECOND_BLOCK]}"
                )
        for position, begin, end in self._pieces():
            for life, _ in record.events[begin:end] if position in REACHED_POSITIONS else ():
                if self.home[id(life)][0] not in REACHED_POSITIONS[position]:
                    raise NotRepeated(
                        f"storages of {self.run[SECOND_BLOCK]} outlive the next block"
                    )

    def _events(self, position: int, begin: _Mark, end: _Mark) -> list[Any]:
        """Describe the events of a block so that those of an equal block are the same."""
        found: list[Any] = []
        for life, is_made in self.record.events[begin.event : end.event]:
            home, index = self.home[id(life)]
            distance = home - position
            if abs(distance) > 1:
                raise NotRepeated(f"{self.names[position]} frees what no neighbour made")
            operation = (life.born if is_made else life.died or 0) - begin.operation
            owner = self._owner(life.owner, position) if is_made else None
            own = index if distance == 0 else None
            found.append((is_made, life.nbytes, operation, distance, own, owner))
        return found

    def _owner(self, owner: Any, position: int) -> tuple[str, int | str]:
        """Describe an owner, with a layer of the run as the distance to it."""
        group, layer = owner
        return group, self.names.index(layer) - position if layer in self.names else layer

    def _copy(
        self, index: int, copies: list[list[Life]], place: int, first: int
    ) -> list[tuple[Life, bool, int]]:
        """Return the third block's events in one part of the record for a block that did not run.

        `first` is the number of the block's first operation there.
        """
        _, begin, end = self._pieces()[place]
        start = (self.forward if place == 2 else self.backward)[THIRD_BLOCK].operation
        events = []
        for number in range(begin, end):
            life, is_made = self.record.events[number]
            operation = life.born if is_made else life.died
            assert operation is not None
            if is_made:
                group, layer = self._owner(life.owner, THIRD_BLOCK)
                if isinstance(layer, int):
                    layer = self.run[NUM_FIRST + index + layer]
                made = Life(life.nbytes, (group, layer), 0, node=life.node)
                copies[index].append(made)
            else:
                made = self._of_copy(index, life, number, copies)
            events.append((made, is_made, operation - start + first))
        return events

    def _of_copy(self, index: int, life: Life, number: int, copies: list[list[Life]]) -> Life:
        """Return the storage that a copy frees where the third block frees `life`."""
        position, place = self.home[id(life)]
        if position == THIRD_BLOCK:
            return copies[index][place]
        if position == SECOND_BLOCK:
            return (copies[index - 1] if index else self.made[THIRD_BLOCK])[place]
        if index == self.number - 1:
            return life
        return copies[index + 1][self._place_in_next(number)]

    def _place_in_next(self, number: int) -> int:
        """Return the number of a storage in the next block, from the second block's event."""
        offset = self.backward[SECOND_BLOCK].event - self.backward[THIRD_BLOCK].event
        if number < self.forward[LAST_BLOCK].event:
            offset = self.forward[SECOND_BLOCK].event - self.forward[THIRD_BLOCK].event
        life, _ = self.record.events[number + offset]
        return self.home[id(life)][1]

    def _relinked(self, life: Life, position: int, number: int, copies: list[list[Life]]) -> Life:
        """Return the storage of an event of an executed block, once the copies are there."""
        home, place = self.home[id(life)]
        if position == LAST_BLOCK and home == THIRD_BLOCK:
            return copies[-1][place]
        if position == THIRD_BLOCK and home == LAST_BLOCK:
            return copies[0][self._place_in_next(number)]
        return life

    def _repeat_operations(self, forward: _Mark, backward: _Mark) -> None:
        """Repeat the operations of the third block, and move all that comes later."""
        begin = self.backward[THIRD_BLOCK]
        self.record.change(begin, begin, backward, self.number, begin)
        begin = self.forward[LAST_BLOCK]
        self.record.change(begin, begin, forward, self.number, self.forward[THIRD_BLOCK])

    def _gradients(self, copies: list[list[Life]]) -> dict[int, tuple[Tensor, list[Life]]]:
        """Map each parameter without a gradient to that of the third block, and to its storages."""
        record = self.record
        third = dict(record.module.get_submodule(self.names[THIRD_BLOCK]).named_parameters())
        found = {}
        for index in range(self.number):
            block = record.module.get_submodule(self.run[NUM_FIRST + index])
            for name, parameter in block.named_parameters():
                gradient = third[name].grad
                if parameter.grad is not None or gradient is None:
                    continue
                lives = []
                for life in record.lives_of(gradient):
                    position, place = self.home[id(life)]
                    if position != THIRD_BLOCK:
                        raise NotRepeated(f"the gradient of {name} is made by another block")
                    lives.append(copies[index][place])
                found[id(parameter)] = gradient, lives
        return found


def _layout(value: Any) -> Any:
    """Describe a tensor by its layout, in a tuple; a plain value is itself, others are types."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value)


def _latest_node(value: Any) -> int:
    """Return the number of the latest autograd node that made one of the tensors, or 0."""
    nodes = [tensor.grad_fn for tensor in tensors_in(value)]
    return max((node._sequence_nr() for node in nodes if node is not None), default=0)
