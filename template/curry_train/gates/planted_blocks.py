"""Gates of recompute on planted blocks: ways to wrap, state of blocks, wrong uses.

They judge what the user's model may not do today: blocks of another form, an option that is off,
an error that must come. Each table below has a row for each way.

Why so long: the tables of right and of wrong uses share their blocks and the training of them.

Proof: `python -m pytest tests/gates/test_recompute.py`.
"""

import contextlib
import copy
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..core.blocks import NoBlocks, find_blocks, plain_blocks
from ..core.rerun import Generators, seeded
from ..primitives.recompute import CheckpointWrapper, Recompute, recompute_blocks, remove_recompute
from ..workloads.workload import Case
from .same_training import calls_by_module
from .verdict import Gate, Verdict, unrefused

# Blocks of three numbers, and a training of two steps that records all that must be equal.

BLOCK_WIDTH = 3
NUM_SAMPLES = 4
NUM_STEPS = 2
Act = Callable[..., Any]
Run = Callable[..., Tensor]


class ActingBlock(nn.Module):
    """A layer with dropout; `act` makes the output of it, and may keep values in `kept`.

    Backward needs nothing of `tail`, so a second run that stops early does not reach it.
    """

    def __init__(self, act: Act | None = None, kept: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(BLOCK_WIDTH, BLOCK_WIDTH)
        self.tail = nn.Identity()
        self.register_module("absent", None)
        self.act = act
        if isinstance(kept, nn.Buffer):
            self.register_buffer("kept", kept)
        else:
            self.kept = kept

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = F.dropout(torch.tanh(self.linear(x)), 0.3, self.training)
        return self.tail(x if self.act is None else self.act(self, x, *args, **kwargs))


class BlocksInOrder(nn.Module):
    """A model whose blocks are in `layers`; the loop over them stands outside."""

    def __init__(self, make: Callable[[], nn.Module], num_blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(num_blocks))
        self.register_buffer("mask", torch.linspace(0.5, 1.5, 8)[:, None])


def in_order(model: Any, x: Tensor, notes: list[Any]) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x.square().sum()


def two_steps(
    model: nn.Module, run: Run, dtype: torch.dtype = torch.float32
) -> tuple[list[Any], dict[str, int]]:
    """Return losses, gradients, notes and states of a short training, and calls by layer."""
    found: list[Any] = []
    rows = (
        torch.linspace(-1, 1, NUM_SAMPLES * BLOCK_WIDTH).to(dtype).reshape(NUM_SAMPLES, BLOCK_WIDTH)
    )
    with seeded(0), calls_by_module(model) as calls:
        for step in range(NUM_STEPS):
            x = (rows + 0.1 * step).requires_grad_()
            loss = run(model, x, found)
            loss.backward()
            found += [loss.detach(), x.grad]
            for parameter in model.parameters():
                found.append(None if parameter.grad is None else parameter.grad.clone())
                parameter.grad = None
                parameter.data = 0.9 * parameter.data
            found += [buffer.clone() for buffer in model.buffers()]
        found.append(torch.get_rng_state())
    found += [_values(getattr(block, "kept", None)) for block in model.modules()]
    return found, calls


def _values(kept: Any) -> Any:
    if isinstance(kept, torch.Generator):
        return kept.get_state()
    return copy.deepcopy(kept) if isinstance(kept, Tensor | int | list | dict | deque) else None


def same_values(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple | deque) and type(one) is type(other):
        return len(one) == len(other) and all(map(same_values, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_values(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def built(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Any:
    with seeded(1):
        return make().to(dtype)


@contextlib.contextmanager
def blocks_are_planted() -> Iterator[None]:
    """Raise where no block is found: a gate on planted blocks applies to every model."""
    try:
        yield
    except NoBlocks as error:
        raise AssertionError(f"the blocks of a planted model are not found: {error}") from error


def judged_ways(gate: str, num_ways: int, wrong: Sequence[str], *, what: str) -> Verdict:
    measured = f"{num_ways} ways, {len(wrong)} wrong"
    return Verdict(gate, not wrong, measured, f"each {what}", "; ".join(wrong[:4]))


# Ways to wrap blocks, and blocks that keep and take what a second run must find again.

Ways = Mapping[str, tuple[Callable[[Any], Any], Sequence[int]]]


def _wraps(index: int, **options: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        block = model.layers[index]
        model.layers[index] = wrapped = Recompute(block, **options)
        assert list(wrapped.state_dict()) == list(block.state_dict())
        assert type(wrapped).__module__ == type(block).__module__

    return change


def _wraps_as_torch_does(reentrant: bool) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.layers[1] = CheckpointWrapper(model.layers[1], use_reentrant=reentrant)

    return change


def _copied(copier: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        recompute_blocks(model)
        return copier(model)

    return change


def _removed(model: Any) -> None:
    attributes = [{*vars(layer)} for layer in model.layers]
    names = recompute_blocks(model, blocks=["layers.0", "layers.2"])
    assert remove_recompute(model) == names
    assert not remove_recompute(model)
    assert {type(layer) for layer in model.layers} == {ActingBlock}
    assert attributes == [{*vars(layer)} for layer in model.layers]


def _both_contexts() -> tuple[Any, Any]:
    """Return contexts of the two runs that give the same result only in this order."""
    return _Times(1.0), _Times(1.0)


class _Times(TorchFunctionMode):
    """A function mode that multiplies what `tanh` returns."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        return self.factor * output if func is torch.tanh else output


# These run a block again to its end.
WITHOUT_EARLY_STOP = ("without early stop", "torch's wrapper, reentrant")
# Each changes a model of three blocks, and may return another; with the blocks that run again.
WAYS_TO_WRAP: Ways = {
    "all blocks": (recompute_blocks, (0, 1, 2)),
    "one block": (_wraps(1), (1,)),
    "one block by a pattern": (partial(recompute_blocks, blocks="*.1"), (1,)),
    "two blocks by name": (partial(recompute_blocks, blocks=["layers.2", "layers.0"]), (0, 2)),
    "a block that is off": (_wraps(1, enabled=False), ()),
    "without early stop": (_wraps(0, early_stop=False), (0,)),
    "without a check": (_wraps(0, determinism_check="none"), (0,)),
    "with contexts": (_wraps(0, context_fn=_both_contexts), (0,)),
    "torch's wrapper": (_wraps_as_torch_does(False), (1,)),
    "torch's wrapper, reentrant": (_wraps_as_torch_does(True), (1,)),
    "a deep copy": (_copied(copy.deepcopy), (0, 1, 2)),
    "a pickled copy": (_copied(lambda model: pickle.loads(pickle.dumps(model))), (0, 1, 2)),
    "blocks that are restored": (_removed, ()),
    "eval mode": (lambda model: [recompute_blocks(model), model.eval()][1], ()),
}


def _times(x: Tensor, number: Any) -> Tensor:
    """Multiply with a tensor, which backward needs and a second run makes again."""
    return x * torch.full_like(x, float(number))


def _counts(layer: Any, x: Tensor) -> Tensor:
    layer.kept += 1
    return _times(x, layer.kept)


def _appends_to(layer: Any, x: Tensor) -> Tensor:
    layer.kept.append(len(layer.kept))
    return _times(x, sum(layer.kept) + len(layer.kept))


def _maps(layer: Any, x: Tensor) -> Tensor:
    layer.kept[len(layer.kept)] = 1
    return _times(x, len(layer.kept))


def _makes_once(layer: Any, x: Tensor) -> Tensor:
    if layer.kept is None:
        layer.kept = torch.rand_like(x)
    return x * layer.kept


def _names_anew(layer: Any, x: Tensor) -> Tensor:
    layer.made = getattr(layer, "made", 0) + 1
    return _times(x, layer.made)


def _draws_from(layer: Any, x: Tensor) -> Tensor:
    return x * torch.rand(BLOCK_WIDTH, generator=layer.kept)


def _draws_from_given(layer: Any, x: Tensor, generator: torch.Generator) -> Tensor:
    return x * torch.rand(BLOCK_WIDTH, generator=generator)


def _takes_options(layer: Any, x: Tensor, *, debug: Any, run: Any) -> Tensor:
    return x * debug["factors"].pop() if run is None and debug["name"] == "own" else x


@dataclass
class Holding:
    """A dataclass in a dataclass, with a tensor in a container."""

    value: Any
    inner: Any = None


def _holding_itself(value: Any) -> Holding:
    inner = Holding(value)
    inner.inner = inner
    return Holding(2.0, inner)


def _takes_dataclasses(layer: Any, x: Tensor, given: Any) -> Tensor:
    factor = given[0].inner.value["factor"]
    return x * factor + given[0].value


def _options_of(model: Any) -> dict[str, Any]:
    factors = [model.layers[0].linear.bias * 2]
    return {"debug": {"factors": factors, "name": "own"}, "run": None}


# Of each: `act`, what the block keeps, and how the block is called.
Calls = Callable[[Any, Any, Tensor], Any]
STATES: dict[str, tuple[Act, Callable[[], Any], Calls]] = {
    "a number": (_counts, lambda: 0, lambda model, layer, x: layer(x)),
    "a tensor in place": (_counts, lambda: torch.zeros(()), lambda model, layer, x: layer(x)),
    "a buffer in place": (
        _counts,
        lambda: nn.Buffer(torch.zeros(())),
        lambda model, layer, x: layer(layer(x)),
    ),
    "a list": (_appends_to, list, lambda model, layer, x: layer(layer(x))),
    "a deque": (_appends_to, partial(deque, maxlen=3), lambda model, layer, x: layer(x)),
    "a dictionary": (_maps, dict, lambda model, layer, x: layer(x)),
    "a value that is made once": (_makes_once, lambda: None, lambda model, layer, x: layer(x)),
    "an attribute that is made": (_names_anew, lambda: None, lambda model, layer, x: layer(x)),
    "a generator": (
        _draws_from,
        lambda: torch.Generator().manual_seed(3),
        lambda model, layer, x: layer(x),
    ),
    "a generator that is given": (
        _draws_from_given,
        lambda: None,
        lambda model, layer, x: layer(x, torch.Generator().manual_seed(4)),
    ),
    "options by name": (
        _takes_options,
        lambda: None,
        lambda model, layer, x: layer(x, **_options_of(model)),
    ),
    "dataclasses": (
        _takes_dataclasses,
        lambda: None,
        lambda model, layer, x: layer(x, [_holding_itself({"factor": model.mask[:4]})]),
    ),
    "a function mode": (
        lambda layer, x: torch.tanh(x),
        lambda: None,
        lambda model, layer, x: _under(_Times(3.0), layer, x),
    ),
    "another weight": (
        lambda layer, x: x,
        lambda: None,
        lambda model, layer, x: torch.func.functional_call(
            layer, {"linear.weight": layer.linear.weight * 2, "linear.bias": x[0]}, (x,)
        ),
    ),
}


def _under(context: contextlib.AbstractContextManager[Any], layer: Any, x: Tensor) -> Any:
    with context:
        return layer(x)


def _calling(calls: Calls) -> Run:
    def run(model: Any, x: Tensor, notes: list[Any]) -> Tensor:
        for layer in model.layers:
            x = calls(model, layer, x)
        return x.square().sum()

    return run


# Found by its name in the globals of a function.
GLOBAL_LAYER: Any = None


def _of_globals(x: Tensor) -> Any:
    return GLOBAL_LAYER(x)


def _functions(layer: ActingBlock) -> dict[str, Callable[..., Any]]:
    """Return functions that find the same layer in another place each."""
    return {
        "a closure": lambda x: layer(x),
        "a partial": partial(lambda used, x: used(x), layer),
        "a partial by name": partial(lambda x, used: used(x), used=layer),
        "a bound method": layer.forward,
        "a partial of a closure": partial(lambda factor, x: layer(x) * factor, 1.0),
        "a global name": FunctionType(_of_globals.__code__, {"GLOBAL_LAYER": layer}),
    }


def _calling_twice(function: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Run:
    """Return a forward that calls a function without gradients, and then with them."""

    def run(model: Any, x: Tensor, notes: list[Any]) -> Tensor:
        with torch.no_grad():
            notes.append(function(x, *args, **named))
        return function(x, *args, **named).square().sum()

    return run


def _wrong_functions() -> list[str]:
    """Return the functions that do not run again, or not from the state of their layer."""
    wrong = []
    for name in (*_functions(ActingBlock()), "an argument", "an argument by name"):
        records = []
        for change in (lambda function: function, Recompute, partial(Recompute, enabled=False)):
            layer = built(partial(ActingBlock, _counts, 0))
            function = change(_functions(layer).get(name, lambda x, used: used(x)))
            args = [layer] if name == "an argument" else []
            named = {"used": layer} if name == "an argument by name" else {}
            records.append(two_steps(layer, _calling_twice(function, args, named)))
        plain, ours, off = records
        if not same_values(plain[0], ours[0]) or not same_values(plain[0], off[0]):
            wrong.append(f"{name} trains otherwise")
        elif ours[1]["linear"] != 3 * NUM_STEPS or off[1] != plain[1]:
            wrong.append(f"{name} runs {ours[1]['linear']} times in place of {3 * NUM_STEPS}")
    return wrong


def _linear_calls(calls: Mapping[str, int]) -> int:
    return sum(number for name, number in calls.items() if name.endswith(".linear"))


def _wrong_while_plain(wrap: Callable[..., Any]) -> list[str]:
    """Count the runs of blocks under `plain_blocks`, after it, and in a backward inside of it."""
    model = built(partial(BlocksInOrder, ActingBlock, 3))
    wrap(model)
    x = torch.ones(NUM_SAMPLES, BLOCK_WIDTH)
    counted = []
    with calls_by_module(model) as calls:
        in_order(model, x, []).backward()
        counted.append(_linear_calls(calls))
        with plain_blocks():
            in_order(model, x, []).backward()
            counted.append(_linear_calls(calls))
        loss = in_order(model, x, [])
        with plain_blocks():
            loss.backward()
        counted.append(_linear_calls(calls))
        with plain_blocks(), plain_blocks():
            in_order(model, x, []).backward()
        with torch.no_grad():
            in_order(model, x, [])
        counted.append(_linear_calls(calls))
    outer = nn.ModuleList([Recompute(nn.Sequential(*model.layers), early_stop=False)])
    with calls_by_module(outer) as calls:
        loss = in_order(SimpleNamespace(layers=outer), x, [])
        with plain_blocks():
            loss.backward()
        counted.append(_linear_calls(calls))
    expected = [6, 9, 15, 21, 9]
    return [] if counted == expected else [f"blocks run {counted} times in place of {expected}"]


def _wrong_states(wrap: Callable[..., Any]) -> list[str]:
    """Return the kinds of state with which wrapped blocks train otherwise."""
    wrong = []
    for name, (act, kept, calls) in STATES.items():
        records = []
        for is_wrapped in (False, True):
            with seeded(1):
                model = BlocksInOrder(partial(_stateful, act, kept), 3)
            if is_wrapped:
                wrap(model)
            try:
                records.append(two_steps(model, _calling(calls))[0])
            except Exception as error:  # noqa: BLE001
                # The implementation under test may raise anything.
                records.append([str(error)])
        if not same_values(*records):
            wrong.append(name)
    return wrong


def _stateful(act: Act, kept: Callable[[], Any]) -> nn.Module:
    return ActingBlock(act, kept())


@blocks_are_planted()
def wraps(case: Case, *, wrap: Callable[..., Any] = recompute_blocks) -> Verdict:
    """Train blocks that are wrapped in each way, and with each kind of state, and compare.

    The blocks that are wrapped, and no other, must run again, and only while they are active.
    """
    wrong = []
    make = partial(BlocksInOrder, ActingBlock, 3)
    for name, (change, blocks) in WAYS_TO_WRAP.items():
        plain = built(make)
        expected, calls = two_steps(plain.eval() if name == "eval mode" else plain, in_order)
        model = built(make)
        changed = change(model)
        model = changed if isinstance(changed, nn.Module) else model
        found, counted = two_steps(model, in_order)
        again = [f"layers.{index}.linear" for index in blocks]
        if name in WITHOUT_EARLY_STOP:
            again += [f"layers.{index}.tail" for index in blocks]
        if not same_values(expected, found):
            wrong.append(f"{name} trains otherwise")
        elif [layer for layer in calls if counted[layer] == 2 * calls[layer]] != again:
            wrong.append(f"{name}: not {again} alone run again")
    wrong += [f"blocks with {name} train otherwise" for name in _wrong_states(wrap)]
    wrong += _wrong_functions()
    wrong += _wrong_while_plain(wrap)
    wrong += _wrong_generators()
    num_ways = len(WAYS_TO_WRAP) + len(STATES) + 12
    return judged_ways("recompute/wraps", num_ways, wrong, what="trains as the plain blocks")


def _wrong_generators() -> list[str]:
    """Return the generators that a snapshot does not find again or see move."""
    wrong = []
    draws: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.rand(3).tolist(),
        "Python": lambda: random.gauss(0, 1),
        "NumPy": lambda: sys.modules["numpy"].random.randn(3).tolist(),
    }
    for name, draw in draws.items():
        if name == "NumPy" and "numpy" not in sys.modules:
            continue
        with seeded(0):
            snapshot = Generators([ONES])
            rested = snapshot.moved()
            first = draw()
            moved = snapshot.moved() and not snapshot.are_as(Generators([ONES]))
            second = draw()
            with snapshot.again():
                again = draw()
            third = draw()
            snapshot.restore()
            repeated = [draw(), draw(), draw()]
        if rested or not moved or again != first or repeated != [first, second, third]:
            wrong.append(f"the generator of {name} is not found again")
    return wrong


# Steps of a loop over time that keep state and are no module.


class PlantedObject:
    """An object of a class of the user, with a value inside."""

    def __init__(self) -> None:
        self.total: Any = 0.0


class PlantedCells(PlantedObject):
    """An object of the user with a step, which adds to a value inside."""

    def __call__(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        self.total = 0.5 * self.total + x
        return self.total, state + x

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self(x, state)


def _closure() -> Callable[..., Any]:
    total = [torch.zeros(1)]

    def counting(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        total[0] = 0.5 * total[0] + x
        return total[0], state + x

    return counting


_count_here = _closure()


def _calls_here(x: Tensor, state: Tensor) -> Any:
    return _count_here(x, state)


# Steps that are no module and keep state, and how the error has to name it.
HIDING_STEPS: dict[str, tuple[Callable[[], Any], str]] = {
    "a closure": (_closure, "counting (function) keeps state from one timestep to the next in "),
    "a function of this file": (lambda: _calls_here, "_count_here.counting (function) keeps state"),
    "a method": (lambda: PlantedCells().step, "PlantedCells (PlantedCells) keeps state"),
    "an object": (PlantedCells, "PlantedCells (PlantedCells) keeps state"),
    "a partial": (lambda: partial(PlantedCells.step, PlantedCells()), "0 (PlantedCells) keeps"),
    "a partial by name": (
        lambda: partial(lambda x, state, cells: cells(x, state), cells=PlantedCells()),
        "cells (PlantedCells) keeps",
    ),
}


# Wrong uses: each is an error that names what is wrong, and leaves the model as it was.


def _model_of(change: Callable[[Any], Any]) -> Any:
    """Return a model of blocks after a change to it."""
    model = built(partial(BlocksInOrder, ActingBlock, 3))
    change(model)
    return model


def _own_forward(model: Any) -> None:
    model.layers[1].forward = model.layers[1].forward


def _compiled(model: Any) -> None:
    model.layers[1]._compiled_call_impl = model.layers[1].forward


def _lazy(model: Any) -> None:
    model.layers[1] = nn.LazyLinear(BLOCK_WIDTH)


def _as_ddp(model: Any) -> None:
    replica = object.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(replica)
    model.layers[1] = replica


def _again(model: Any) -> None:
    recompute_blocks(model)


def _nothing(model: Any) -> None:
    pass


ONES = torch.ones(1, BLOCK_WIDTH)
_reentrant = _wraps(0, use_reentrant=True)
# A change of a model of blocks, a call with it, and what the error has to name.
WRONG_USES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "a wrapped block": (_again, recompute_blocks, "wrapped already"),
    "a forward on the block": (_own_forward, _wraps(1), "on the instance"),
    "a compiled block": (_compiled, _wraps(1), "compiled already"),
    "a lazy block": (_lazy, _wraps(1), "one batch"),
    "a model in DDP": (_as_ddp, _wraps(1), "DistributedDataParallel"),
    "a container": (_nothing, lambda model: Recompute(model.layers), "never runs"),
    "a number": (_nothing, lambda model: Recompute(3), "a module is needed, got int"),
    "no such block": (_nothing, partial(recompute_blocks, blocks="no.*"), "the pattern 'no.*'"),
    "no second block": (
        _nothing,
        partial(recompute_blocks, blocks=["layers.0", "other"]),
        "matches no module; there are layers, layers.0, layers.0.linear, ",
    ),
    "an unknown check": (_nothing, _wraps(0, determinism_check="some"), "determinism_check"),
    "debug": (_nothing, _wraps(0, use_reentrant=True, debug=True), "no debug"),
    "contexts": (
        _nothing,
        _wraps(0, use_reentrant=True, context_fn=_both_contexts),
        "no context_fn",
    ),
    "no gradient": (_reentrant, lambda model: model.layers[0](ONES), "no input of Recompute"),
    "a gradient by name": (
        _reentrant,
        lambda model: model.layers[0](x=ONES.clone().requires_grad_()),
        "RecomputeActingBlock gets",
    ),
    "a gradient in a list": (
        _reentrant,
        lambda model: model.layers[0](ONES, [ONES.clone().requires_grad_()]),
        "inside a container",
    ),
}
WRONG_USES |= {
    f"{option} of 1": (_nothing, _wraps(0, **{option: 1}), option)
    for option in ("enabled", "use_reentrant", "preserve_rng_state", "debug", "early_stop")
}


def _changed_before_backward(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(model: Any) -> None:
        recompute_blocks(model)
        loss = in_order(model, torch.ones(NUM_SAMPLES, BLOCK_WIDTH), [])
        with torch.no_grad():
            change(model)
        loss.backward()

    return call


# For each tensor: how to change it between forward and backward, and the words by which the error
# must name it.
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a weight": (lambda model: model.layers[1].linear.weight.mul_(2), "linear.weight of"),
    "a bias": (lambda model: model.layers[2].linear.bias.zero_(), "linear.bias of"),
    "a tensor of the block": (lambda model: model.layers[0].kept.add_(1), "kept of"),
}


class Lone(nn.Module):
    """A module without children, of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _pair(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def _mixed() -> nn.Module:
    """Build a model with blocks in each kind of container, and modules that are no block."""
    shared = ActingBlock()
    deep = nn.ModuleDict({"x": ActingBlock(), "y": nn.ReLU(), "z": ActingBlock()})
    return nn.ModuleDict(
        {
            "stem": nn.Linear(2, 2),
            "in_order": _pair(ActingBlock(), Lone(), ActingBlock(), nn.ReLU(), nn.ReLU()),
            "by_name": deep,
            "nested": nn.ModuleList(_pair(ActingBlock(), ActingBlock()) for _ in range(2)),
            "other_pairs": nn.ModuleList([_pair(Lone()), _pair(ActingBlock())]),
            "recurrent": nn.ModuleList(nn.LSTM(2, 2) for _ in range(2)),
            "shared": nn.ModuleList([shared, shared, ActingBlock()]),
            "lone": nn.ModuleList(nn.Linear(2, 2) for _ in range(3)),
            "head": _pair(Lone(), Lone()),
        }
    )


# Blocks that are found in `_mixed`, by pattern.
FOUND_BLOCKS: tuple[tuple[Any, str], ...] = (
    (
        None,
        "in_order.0 in_order.2 by_name.x by_name.z nested.0 nested.1 recurrent.0 recurrent.1 "
        "shared.0 shared.2 head.0 head.1",
    ),
    (
        "*.0",
        "in_order.0 nested.0 nested.1.0 other_pairs.0 other_pairs.1.0 recurrent.0 shared.0 lone.0 "
        "head.0",
    ),
    (("head", "head.*", "by_name.y"), "by_name.y head"),
    ("stem", "stem"),
)
# Models without blocks, and what the error has to name.
WITHOUT_BLOCKS: dict[str, tuple[Callable[[], nn.Module], Sequence[str]]] = {
    "lone layers": (
        lambda: _pair(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)),
        ("lone layers (Linear; 0 to 2)", "Sequential", "--blocks"),
    ),
    "two kinds of lone layers": (
        lambda: _pair(*(_pair(kind(2, 2), kind(2, 2)) for kind in (nn.Linear, nn.GRUCell))),
        ("(GRUCell, Linear; 0.0 to 1.1)",),
    ),
    "layers and activations": (
        lambda: _pair(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        ("repeats no block", "0 (Linear), 1 (ReLU), 2 (Linear)", "--blocks"),
    ),
    "one block": (lambda: _pair(ActingBlock()), ("0 (ActingBlock)",)),
    "no child": (Lone, ("Lone repeats no block", "none")),
}


def _wrongly_found() -> list[str]:
    wrong = []
    for pattern, expected in FOUND_BLOCKS:
        names = " ".join(find_blocks(built(_mixed), pattern))
        if names != expected:
            wrong.append(f"blocks={pattern!r} finds {names} in place of {expected}")
    for name, (make, texts) in WITHOUT_BLOCKS.items():
        if why := unrefused(ValueError, partial(find_blocks, built(make)), *texts):
            wrong.append(f"a model of {name}: {why}")
    return wrong


@blocks_are_planted()
def refused(case: Case) -> Verdict:
    """Check that wrong uses are errors that name what is wrong, and which blocks are found."""
    wrong = []
    for name, (change, call, text) in WRONG_USES.items():
        model = _model_of(change)
        before = [*map(type, model.modules())]
        if why := unrefused(ValueError, partial(call, model), text):
            wrong.append(f"{name}: {why}")
        elif before != [*map(type, model.modules())]:
            wrong.append(f"{name}: blocks are changed in spite of the error")
    for name, (change, text) in CHANGES.items():
        model = built(partial(BlocksInOrder, lambda: ActingBlock(kept=torch.zeros(2)), 3))
        call = partial(_changed_before_backward(change), model)
        if why := unrefused(RuntimeError, call, text, "ActingBlock", "in place"):
            wrong.append(f"{name} changed before backward: {why}")
    wrong += _wrongly_found()
    num_ways = len(WRONG_USES) + len(CHANGES)
    num_ways += len(FOUND_BLOCKS) + len(WITHOUT_BLOCKS)
    return judged_ways("recompute/refused", num_ways, wrong, what="refused by name, or found")


PLANTED_GATES = (
    Gate("recompute/wraps", wraps),
    Gate("recompute/refused", refused),
)
