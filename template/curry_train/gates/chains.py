"""Gates of what blocks share: chains in segments, caches, storages on the host, and routers.

Chains and caches are planted, so that each form of them is judged whatever the user's model is.
A router is disturbed between forward and backward, and has to choose the same experts again.

Why so long: the tables of what blocks share are checked with the same planted blocks.

Proof: `python -m pytest tests/gates/test_recompute.py tests/gates/test_adapters.py`.
"""

import contextlib
import copy
import pickle
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import ref

import torch
from torch import Tensor, nn

from ..core.blocks import is_changed
from ..core.parity import Parity, StepRecord, check_comparable, compare, record
from ..core.rerun import seeded
from ..core.wording import unheard
from ..primitives import checkpointed, host_memory
from ..primitives.offload import OffloadReport, offload_blocks, offload_report, remove_offload
from ..primitives.recompute import ChainBroken, Recompute, recompute_segments, remove_segments
from ..workloads.workload import Case
from .fixtures import (
    SAVED_BYTES,
    SAVED_STORAGES,
    TENSOR_SIDE,
    SavingBlock,
    six_in_a_row,
    square_tensor,
)
from .planted_blocks import (
    BLOCK_WIDTH,
    NUM_SAMPLES,
    Act,
    ActingBlock,
    BlocksInOrder,
    Run,
    blocks_are_planted,
    built,
    in_order,
    judged_ways,
    same_values,
    two_steps,
)
from .verdict import Gate, Judged, Takes, Verdict, not_applicable, unrefused

# Chains whose blocks feed each other, and chains whose blocks do not.


def _with_arguments(model: Any, x: Tensor, notes: list[Any]) -> Tensor:
    for layer in model.layers:
        # A slice is another object each time, of the same memory.
        x = layer(x, model.mask[:NUM_SAMPLES], scale=0.5)
    return x.square().sum()


def _first_of_each(model: Any, x: Tensor, notes: list[Any]) -> Tensor:
    for layer in model.layers:
        outputs = layer(x)
        x = outputs[0]
    return x.square().sum() + outputs[1]


def _looked_at(model: Any, x: Tensor, notes: list[Any]) -> Tensor:
    for layer in model.layers:
        x = layer(x)
        notes.append([tuple(x.shape), x.dtype, str(x.device), x.layout, x.ndim, x.requires_grad])
        notes.append([tuple(x.size()), x.dim(), x.numel(), x.is_floating_point(), x.is_complex()])
        notes.append([len(x), len({x: 0})])
    return x.square().sum()


def _two_chains(model: Any, x: Tensor, notes: list[Any]) -> Tensor:
    x = model.first(x)
    for layer in model.second:
        x = layer(x)
    return x.square().sum()


def _scaled(layer: Any, x: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    return x * mask * scale


def _backward_inside(layer: Any, x: Tensor) -> Tensor:
    """Use a gradient that a backward inside of the forward computes."""
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(layer.linear(inner).square().sum(), inner)
    return x + 0.1 * gradient


def _two_containers() -> nn.Module:
    first = nn.Sequential(*(ActingBlock() for _ in range(5)))
    return nn.ModuleDict({"first": first, "second": nn.ModuleList(ActingBlock() for _ in range(3))})


@dataclass(frozen=True)
class LoopOverBlocks:
    """A model of blocks that feed each other, and how its forward runs."""

    make: Callable[[], nn.Module]
    run: Run
    # The blocks that recompute, by the number of segments.
    recomputed: Mapping[int, Sequence[str]]
    dtype: torch.dtype = torch.float32
    # Whether a backward inside of the forward runs a segment once more.
    nests: bool = False


def _chain(act: Act | None, run: Run, *settings: Any) -> LoopOverBlocks:
    names = [f"layers.{index}" for index in range(4)]
    by_number = {1: [], 2: names[:3], 3: names[:4], 5: names}
    make = partial(BlocksInOrder, partial(ActingBlock, act), 5)
    return LoopOverBlocks(make, run, by_number, *settings)


CHAINS = {
    "blocks in a loop": _chain(None, in_order),
    "blocks with arguments": _chain(_scaled, _with_arguments),
    "blocks that return a tuple": _chain(lambda layer, x: (x, x.mean()), _first_of_each),
    "blocks that return a list": _chain(lambda layer, x: [x, x.mean()], _first_of_each),
    "outputs that are looked at": _chain(None, _looked_at, torch.float64),
    "a backward inside": _chain(_backward_inside, in_order, torch.float32, True),
    "two containers": LoopOverBlocks(
        _two_containers,
        lambda model, x, notes: _two_chains(
            SimpleNamespace(first=model["first"], second=model["second"]), x, notes
        ),
        {
            2: ["first.0", "first.1", "first.2", "second.0", "second.1"],
            4: ["first.0", "first.1", "first.2", "first.3", "second.0", "second.1"],
        },
    ),
}


def _layer(model: Any, index: int, x: Any, *args: Any) -> Any:
    return model.layers[index](x, *args)


def _blocks_then(end: Callable[[Any, Tensor], Any], *indices: int) -> Run:
    """Return a loop over some blocks, and then what `end` makes of their last output."""

    def run(model: Any, x: Tensor, notes: list[Any]) -> Any:
        for index in indices:
            x = model.layers[index](x)
        return end(model, x)

    return run


# Wrong chains of five blocks in two segments: of each what the error has to name.
BROKEN_CHAINS: dict[str, tuple[Act | None, Callable[..., Any], Sequence[str]]] = {
    "an output with a term": (
        None,
        _blocks_then(lambda model, x: _layer(model, 1, x + 1), 0),
        ("layers.0", "layers.1", "add"),
    ),
    "a copied output": (
        None,
        _blocks_then(lambda model, x: _layer(model, 2, x.clone()), 0, 1),
        ("layers.1", "layers.2", "clone"),
    ),
    "a block left out": (
        None,
        _blocks_then(lambda model, x: x, 0, 2, 3, 4),
        ("layers.2 is called where layers.1 is next",),
    ),
    "no first block": (
        None,
        _blocks_then(lambda model, x: x, 1, 2, 3, 4),
        ("layers.1 is called where layers.0 is next",),
    ),
    "the first block twice": (
        None,
        _blocks_then(lambda model, x: x, 0, 0),
        ("layers.0 takes the output of layers.0", "layers.1"),
    ),
    "an early end": (None, _blocks_then(lambda model, x: x.sum(), 0, 1), ("layers.1", "sum")),
    "a value that is read": (None, _blocks_then(lambda model, x: x.item(), 0), ("layers.0",)),
    "another input": (
        None,
        lambda model, x, notes: _layer(model, 0, x) is _layer(model, 1, x),
        ("layers.1 does not take the output of layers.0 unchanged",),
    ),
    "other arguments": (
        lambda layer, x, mask: x * mask,
        lambda model, x, notes: _layer(
            model, 1, _layer(model, 0, x, model.mask[:4]), model.mask[4:]
        ),
        ("layers.1 takes other arguments than layers.0",),
    ),
    "another number": (
        lambda layer, x, scale: x * scale,
        lambda model, x, notes: _layer(model, 1, _layer(model, 0, x, 1.0), 2.0),
        ("layers.1 takes other arguments than layers.0",),
    ),
    "another shape of an argument": (
        lambda layer, x, mask: x * mask,
        lambda model, x, notes: _layer(
            model, 1, _layer(model, 0, x, model.mask[:4]), model.mask[:1]
        ),
        ("layers.1 takes other arguments than layers.0",),
    ),
    "an argument left out": (
        lambda layer, x, mask=1: x * mask,
        lambda model, x, notes: _layer(model, 1, _layer(model, 0, x, 1)),
        ("layers.1 takes other arguments than layers.0",),
    ),
    "a dictionary": (lambda layer, x: {"x": x}, in_order, ("ActingBlock returns dict",)),
    "nothing": (lambda layer, x: (), in_order, ("ActingBlock returns tuple",)),
    "an output that does not fit": (
        lambda layer, x: x[:, :2],
        in_order,
        ("layers.1 can't take the output of layers.0",),
    ),
}


def _raises(kind: type[Exception], text: str, number: int) -> Act:
    """Return an `act` that raises in its call of this number, counted over all blocks."""
    calls = deque[int]()

    def act(layer: Any, x: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) == number:
            raise kind(text)
        return x

    return act


# Errors of the user's own blocks, which pass through: kind, text and the call that raises it.
OWN_ERRORS: tuple[tuple[type[Exception], str, int], ...] = (
    (RuntimeError, "of the first block", 1),
    (KeyError, "of the second block", 2),
    (torch.OutOfMemoryError, "of the second block", 2),
    (RuntimeError, "can't allocate memory", 2),
    (RuntimeError, "of the second run", 7),
)
# Wrong numbers of segments, and options, of five blocks.
WRONG_SEGMENTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no segment": (0, {}, "0"),
    "half a segment": (1.5, {}, "1.5"),
    "True segments": (True, {}, "True"),
    "more than the blocks": (6, {}, "6 segments are more than the 5 blocks"),
    "reentrant segments": (2, {"use_reentrant": True}, "use_reentrant"),
    "a pattern without blocks": (2, {"blocks": "no.*"}, "no.*"),
    "an option of another kind": (2, {"preserve_rng_state": 1}, "preserve_rng_state"),
}


@blocks_are_planted()
def chains(case: Case, *, segments: Callable[..., Any] = recompute_segments) -> Verdict:
    """Train chains of blocks in segments, and break them; compare with the plain chain."""
    wrong = [why for name, chain in CHAINS.items() for why in _wrong_chain(name, chain, segments)]
    for name, (act, run, texts) in BROKEN_CHAINS.items():
        model = built(partial(BlocksInOrder, partial(ActingBlock, act), 5))
        segments(model, 2)
        x = torch.ones(NUM_SAMPLES, BLOCK_WIDTH)
        if why := unrefused(ChainBroken, partial(run, model, x, []), *texts):
            wrong.append(f"{name}: {why}")
    wrong += _own_errors(segments)
    for name, (number, options, text) in WRONG_SEGMENTS.items():
        model = built(partial(BlocksInOrder, ActingBlock, 5))
        if why := unrefused(ValueError, partial(segments, model, number, **options), text):
            wrong.append(f"{name}: {why}")
        elif any(map(is_changed, model.modules())):
            wrong.append(f"{name}: blocks are changed in spite of the error")
    num_ways = sum(len(chain.recomputed) for chain in CHAINS.values())
    num_ways += len(BROKEN_CHAINS) + len(OWN_ERRORS) + len(WRONG_SEGMENTS)
    what = "chain trains as the plain one, or is an error that names the blocks"
    return judged_ways("recompute/chains", num_ways, wrong, what=what)


def _wrong_chain(name: str, chain: LoopOverBlocks, segments: Callable[..., Any]) -> list[str]:
    """Return what differs from the plain chain, for each number of segments."""
    wrong = []
    plain, calls = two_steps(built(chain.make, chain.dtype), chain.run, chain.dtype)
    for number, expected in chain.recomputed.items():
        model = built(chain.make, chain.dtype)
        names = segments(model, number)
        found, counted = two_steps(model, chain.run, chain.dtype)
        again = [
            layer.removesuffix(".linear")
            for layer in calls
            if layer.endswith(".linear") and counted[layer] > calls[layer]
        ]
        if not same_values(plain, found):
            wrong.append(f"{name} in {number} segments train otherwise")
        elif names != expected or again != expected:
            wrong.append(f"{name} in {number} segments: {names} named, {again} run again")
        elif any(counted[layer] > 2 * calls[layer] and not chain.nests for layer in calls):
            wrong.append(f"{name} in {number} segments run a third time")
    return wrong


def _own_errors(segments: Callable[..., Any]) -> list[str]:
    """Return what is wrong with errors of blocks, and with the forward after one."""
    wrong = []
    for kind, text, number in OWN_ERRORS:
        model = built(partial(BlocksInOrder, partial(ActingBlock, _raises(kind, text, number)), 5))
        plain = built(partial(BlocksInOrder, partial(ActingBlock, lambda layer, x: x), 5))
        expected, _ = two_steps(plain, in_order)
        segments(model, 2)
        why = unrefused(kind, partial(two_steps, model, in_order), text)
        for parameter in model.parameters():
            parameter.grad = None
        if why or not same_values(expected, two_steps(model, in_order)[0]):
            wrong.append(f"{kind.__name__} {text}: {why or 'the next forward differs'}")
    model = built(partial(BlocksInOrder, ActingBlock, 5))
    plain_calls = two_steps(built(partial(BlocksInOrder, ActingBlock, 5)), in_order)[1]
    segments(model, 2)
    x = torch.ones(NUM_SAMPLES, BLOCK_WIDTH, requires_grad=True)
    outputs = list[Any]()
    model.layers[2].register_forward_hook(lambda block, args, output: outputs.append(ref(output)))
    in_order(model, x, [])
    if outputs[-1]() is not None:
        wrong.append("the output of a segment stays alive after its loss is gone")
    if two_steps(model.eval(), in_order)[1] != plain_calls:
        wrong.append("segments recompute in eval mode")
    remove_segments(model.train())
    if two_steps(model, in_order)[1] != plain_calls or any(map(is_changed, model.modules())):
        wrong.append("removed segments still recompute")
    return wrong


# Caches of keys and values, as Hugging Face models fill them.


@contextlib.contextmanager
def _planted_caches() -> Iterator[type]:
    """Put a stand-in for the caches of Hugging Face models in place of their module."""

    class PlantedCache:
        def __init__(self, *layers: Any, **others: Any) -> None:
            self.layers = layers
            self.__dict__.update(others)

    module: Any = SimpleNamespace(Cache=PlantedCache)
    modules = {"transformers.cache_utils": module}
    with mock.patch.dict(sys.modules, modules), unheard(checkpointed.__name__):
        yield PlantedCache


EMPTY_LAYER: dict[str, Any] = {"keys": None}
FILLED_LAYER: dict[str, Any] = {"keys": 1}
# Attributes of the layers of a cache that a block of index 1 may take, and whether it is refused.
CACHE_LAYERS: dict[str, tuple[Sequence[dict[str, Any]], bool]] = {
    "no layer": ((), False),
    "empty layers": ((EMPTY_LAYER, EMPTY_LAYER), False),
    "its own layer filled": ((EMPTY_LAYER, FILLED_LAYER), True),
    "another layer filled": ((FILLED_LAYER, EMPTY_LAYER, FILLED_LAYER), False),
    "a layer that says so": ((EMPTY_LAYER, {"is_initialized": True}), True),
    "a layer made but empty": ((EMPTY_LAYER, {"is_initialized": False, "keys": 1}), False),
    "an earlier state": ((EMPTY_LAYER, EMPTY_LAYER | {"has_previous_state": True}), True),
    "an earlier state of one": (
        (EMPTY_LAYER, EMPTY_LAYER | {"has_previous_state": {0: False, 1: 1}}),
        True,
    ),
    "no earlier state": ((EMPTY_LAYER, EMPTY_LAYER | {"has_previous_state": {0: False}}), False),
}


class DummyLayer(SimpleNamespace):
    """A layer of a cache with the name of one that blocks share."""


def _takes_cache(layer: Any, x: Tensor, cache: Any = None, *, other: Any = None) -> Tensor:
    layer.seen((cache, other))
    return x


@blocks_are_planted()
def caches(case: Case, *, wrap: Callable[..., Any] = Recompute) -> Verdict:
    """Give planted caches of keys to a block that recomputes; it gets none, or it is an error."""
    called = partial(_block_with_cache, wrap)
    wrong = []
    with _planted_caches() as make:
        for name, (layers, is_refused) in CACHE_LAYERS.items():
            made = [SimpleNamespace(**attributes) for attributes in layers]
            for kind in ("layers", "self_attention_cache", "cross_attention_cache"):
                cache = make(*made) if kind == "layers" else make(**{kind: make(*made)})
                if why := _wrong_cache(called, cache, is_refused=is_refused, other=make()):
                    wrong.append(f"a cache with {name} in {kind} {why}")
        filled = make(SimpleNamespace(**FILLED_LAYER))
        if why := _wrong_cache(called, filled, is_refused=True, index=None):
            wrong.append(f"a filled cache of a block without an index {why}")
        twice = partial(called, make(), times=2)
        if why := unrefused(ValueError, twice, "given before", "ActingBlock"):
            wrong.append(f"a cache that is given twice: {why}")
        shared = make(DummyLayer(**FILLED_LAYER))
        if called(shared) != (shared, None) or called(7, other=filled, reads=True) != (7, filled):
            wrong.append("a cache that the block reads only is left out")
        if called(7, other=make()) != (7, None):
            wrong.append("an argument beside a cache is left out")
    what = "is left out, or is an error where the block would read it"
    return judged_ways("recompute/caches", 3 * len(CACHE_LAYERS) + 4, wrong, what=what)


def _block_with_cache(
    wrap: Callable[..., Any],
    *args: Any,
    index: int | None = 1,
    times: int = 1,
    reads: bool = False,
    **kwargs: Any,
) -> Any:
    """Return the arguments that a block gets which is the layer of this index."""
    block = wrap(ActingBlock(_takes_cache))
    if index is not None:
        block.linear.layer_idx = index
    found: list[Any] = []
    block.seen = found.append
    block._can_checkpoint_with_cache = reads
    for _ in range(times):
        block(torch.ones(1, BLOCK_WIDTH), *args, **kwargs)
    return found[-1]


def _wrong_cache(
    called: Callable[..., Any], cache: Any, *, is_refused: bool, **options: Any
) -> str:
    if is_refused:
        texts = ["holds keys already", "ActingBlock"]
        return unrefused(ValueError, partial(called, cache, **options), *texts)
    return "" if called(cache, **options) == (None, None) else "is given to the block"


# Storages that blocks save, and the report of those that offload moves.


# The sizes that reports print.
PLANTED_SIZES = {
    0: "0 B",
    1023: "1023 B",
    1024: "1.00 KiB",
    10 * 1024: "10.0 KiB",
    500 * 2**20: "500 MiB",
    3 * 2**29: "1.50 GiB",
    2**40: "1.00 TiB",
    2**51: "2048 TiB",
}


class PlantedStream:
    """A stream of copies on no device, whose copies are done once `done` says so."""

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.done: list[bool] = []
        self.calls: list[Any] = []
        self.wait_stream = self.wait_event = self.calls.append

    def record_event(self, event: Any = None) -> Any:
        """Return an event of the last copy."""
        number = len(self.done)
        self.done.append(False)
        return SimpleNamespace(query=lambda: self.done[number], number=number)


def _offloaded_step(
    model: Any, *, times: int = 1, change: Callable[[], Any] = lambda: None
) -> list[Any]:
    """Run a block and its backward; return the result, and copies of it and of all gradients."""
    x = square_tensor(-1).requires_grad_()
    block = model[0]
    takes_data = "given" in block.act.__code__.co_varnames
    given = [block.data[TENSOR_SIDE : 2 * TENSOR_SIDE]] if takes_data else []
    y = block(x, *given)
    change()
    for left in reversed(range(times)):
        y.square().sum().backward(retain_graph=left > 0 or times > 1)
    gradients = [x.grad, block.weight.grad]
    block.weight.grad = None
    return [y, y.detach(), *gradients]


def _saving(act: Callable[..., Tensor]) -> Any:
    return nn.Sequential(SavingBlock(act))


def host_report(case: Case, *, offload: Callable[..., Any] = offload_blocks) -> Verdict:
    """Compare the report of planted blocks with what they save, and their steps with plain ones."""
    wrong = []
    for name, (act, num_moved, stays) in SAVED_STORAGES.items():
        plain, model = _saving(act), _saving(act)
        offload(model, blocks="0", keep_last=0)
        graphs = []
        for times in (1, 2, 1):
            expected = _offloaded_step(plain, times=times)
            graphs.append(_offloaded_step(model, times=times))
            if not same_values(expected[1:], graphs[-1][1:]):
                wrong.append(f"{name} trains otherwise")
        moved = num_moved * SAVED_BYTES // (2 if name == "a copy of a weight" else 1)
        found = replace(offload_report(model), reserved_bytes=0)
        if found != OffloadReport(moved, moved, 0, num_moved, stays):
            wrong.append(f"{name} is reported as {found}")
        rows = [line.split(": ")[-1] for line in found.table().splitlines()[3:]]
        expected = sorted(stays, key=lambda reason: -stays[reason][1])
        if rows != expected or f"in {num_moved} storages" not in found.table():
            wrong.append(f"the table of {name} is {found.table()}")
    wrong += _wrong_order(offload)
    wrong += _wrong_after_offload(offload)
    what = "moves the storages that its blocks save, and trains as the plain model"
    return judged_ways("recompute/host-report", 3 * len(SAVED_STORAGES) + 6, wrong, what=what)


def _wrong_order(offload: Callable[..., Any]) -> list[str]:
    """Note what has come back before each step of backward: two storages ahead of the last."""
    model = _saving(six_in_a_row)
    offload(model, blocks="0", keep_last=0)
    found: list[int] = []
    model[0].note = lambda _: found.append(offload_report(model).brought_back_bytes // SAVED_BYTES)
    _offloaded_step(model)
    expected = [0, 3, 4, 5, 6, 6]
    return [] if found == expected else [f"{found} storages have come back, not {expected}"]


def _wrong_after_offload(offload: Callable[..., Any]) -> list[str]:
    """Copy, restore and change a model with offload; return what is not as without."""
    wrong = []
    alive: list[bool] = []
    act = SAVED_STORAGES["views"][0]
    expected = _offloaded_step(_saving(act))
    model = _saving(act)
    offload(
        model,
        blocks="0",
        keep_last=0,
        batch=torch.ones(TENSOR_SIDE, TENSOR_SIDE, requires_grad=True),
        loss=lambda module, batch: module(batch).sum(),
    )
    counted = offload_report(model)
    if (counted.reserved_bytes, counted.num_moved) != (SAVED_BYTES, 0):
        wrong.append(f"after the count the report is {counted}")
    for copier in (copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))):
        other = copier(model)
        if not same_values(expected[1:], _offloaded_step(other)[1:]):
            wrong.append("a copy trains otherwise")
        if offload_report(other).num_moved != 1 or offload_report(model).num_moved:
            wrong.append("a copy has no report of its own")
    _offloaded_step(model.eval())
    if offload_report(model.train()).num_moved:
        wrong.append("a block in eval mode moves what it saves")
    model[0].saved = []
    _offloaded_step(model, change=lambda: alive.append(model[0].saved[0]() is not None))
    if alive != [False]:
        wrong.append("a storage that has moved stays alive on the device")
    small = _saving(act)
    offload(small, blocks="0", keep_last=0, min_bytes=SAVED_BYTES + 1)
    _offloaded_step(small)
    if offload_report(small).num_moved or list(offload_report(small).skipped) != ["too small"]:
        wrong.append(f"with a larger min_bytes the report is {offload_report(small)}")
    if remove_offload(model) != ["0"] or not same_values(expected[1:], _offloaded_step(model)[1:]):
        wrong.append("a model without offload again trains otherwise")
    text = "no block of this model is offloaded"
    if why := unrefused(ValueError, partial(offload_report, model), text):
        wrong.append(f"a report without offload: {why}")
    return wrong + _unseen_changes(offload)


def _saves_and_keeps(kept: list[Tensor], block: Any, x: Tensor, *, without: bool) -> Tensor:
    """Let autograd save an exponential, with a gradient of its own or without one."""
    kept.append((x.detach() if without else x).exp())
    return x * kept[0] if without else kept[0] * 2


def _unseen_changes(offload: Callable[..., Any]) -> list[str]:
    """Write into saved tensors before backward, on the host and on the device."""
    wrong = []
    for name, min_bytes in (("moved", 1), ("moved without a gradient", 1), ("left", 10**9)):
        kept: list[Tensor] = []
        model = _saving(partial(_saves_and_keeps, kept, without="without" in name))
        offload(model, blocks="0", keep_last=0, min_bytes=min_bytes)
        x = torch.ones(TENSOR_SIDE, TENSOR_SIDE, requires_grad=True)
        loss = model(x).sum()
        kept[0].detach().mul_(2)
        if why := unrefused(RuntimeError, loss.backward, "modified by an inplace operation"):
            wrong.append(f"a tensor that was {name}, and is written: {why}")
    with mock.patch.object(host_memory, "available_host_bytes", return_value=100):
        model = _saving(SAVED_STORAGES["views"][0])
        batch = torch.ones(TENSOR_SIDE, TENSOR_SIDE, requires_grad=True)
        given = {"batch": batch, "loss": lambda module, batch: module(batch).sum()}
        call = partial(offload, model, blocks="0", keep_last=0, **given)
        if why := unrefused(host_memory.HostMemoryShort, call, "16.0 KiB"):
            wrong.append(f"too little memory: {why}")
        if type(model[0]) is not SavingBlock:
            wrong.append("a block is offloaded in spite of too little memory")
    return wrong


# A gate of recompute: a router that is disturbed between forward and backward.

Keep = Callable[[nn.Module], Any]
TOP_CHOICE = "topk"
# How far a bias that balances the load moves; scores of a softmax are at most 1.
BUFFER_SHIFT = 1.0


def routing(case: Case, *, keep: Keep | None = None) -> Verdict:
    """Compare a step whose routers are disturbed before backward with the plain one.

    Buffers with a number for each expert move, as a bias that balances the load does, and `topk`
    takes the smallest scores, as another kernel does at a tie. Counters must count forward alone.
    """
    gate = "recompute/routing"
    required = "bit-equal though each router is disturbed before backward"
    # Imported here because steps in backward need no recompute.
    from ..primitives.recompute import recompute_blocks
    from ..primitives.routing import keep_routing

    probe = case.build()
    recompute_blocks(probe, blocks=case.blocks)
    routed = keep_routing(probe)
    if not routed:
        why = "no block that recomputes has a router or experts"
        return not_applicable(gate, required=required, why=why)

    plain, again = (_step(case, case.build()) for _ in range(2))
    check_comparable(plain)
    if not compare(plain, again).bit_equal:
        why = "the plain step does not repeat itself bit for bit"
        return not_applicable(gate, required=required, why=why)
    counts = _expert_counts(case)
    without = _compared(case, plain, routed, counts, keep=None)
    if isinstance(without, Parity) and without.holds:
        why = "the gradients do not depend on what was disturbed: topk, and a bias of its experts"
        return not_applicable(gate, required=required, why=why)

    found = _compared(case, plain, routed, counts, keep=keep or keep_routing)
    hint = ""
    if isinstance(found, str):
        hint = "the recomputed run takes another way: repeat each choice of the first run"
    elif any(one.kind == "buffer" for one in found.differences):
        hint = "a counter of the load moves in the recomputed run too: restore it, or count once"
    elif not found.holds:
        hint = "the recomputed run chooses others: keep what was chosen, and the scores of it"
    described = found if isinstance(found, str) else found.describe()
    measured = f"{described}; {len(routed)} blocks with a router"
    return Verdict(gate, not hint, measured, required, hint)


def _step(
    case: Case, module: nn.Module, disturb: Callable[[], Any] = contextlib.nullcontext
) -> StepRecord:
    with seeded(case.seed):
        loss = case.workload.mean_loss(module, case.batch())
        with disturb():
            loss.backward()
        return record(module, loss.detach())


def _expert_counts(case: Case) -> set[int]:
    """Return among how many experts `topk` chooses in a step."""
    counts = set()

    def noted(choose: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
            counts.add(scores.shape[-1])
            return choose(scores, *args, **kwargs)

        return chosen

    with _replaced_topk(noted):
        _step(case, case.build())
    return counts


def _compared(
    case: Case,
    plain: StepRecord,
    routed: Sequence[str],
    counts: Collection[int],
    *,
    keep: Keep | None,
) -> Parity | str:
    """Compare a disturbed step under recompute with the plain one; an error is a string."""
    from ..primitives.recompute import recompute_blocks

    module = case.build()
    recompute_blocks(module, blocks=case.blocks)
    if keep is not None:
        keep(module)
    blocks = [module.get_submodule(name) for name in routed]
    try:
        return compare(plain, _step(case, module, lambda: _disturbed(blocks, counts)))
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


@contextlib.contextmanager
def _disturbed(blocks: Sequence[nn.Module], counts: Collection[int]) -> Iterator[None]:
    """Move buffers with a number for each expert, and let `topk` take the smallest scores.

    A buffer that nothing else has written gets its value back; another one differs then.
    """
    buffers = {
        buffer
        for block in blocks
        for buffer in block.buffers()
        if buffer.is_floating_point() and buffer.numel() in counts
    }
    values = {buffer: buffer.detach().clone() for buffer in buffers}
    moved = {}
    generator = torch.Generator().manual_seed(0)
    for buffer in buffers:
        shift = torch.rand(buffer.shape, generator=generator) * BUFFER_SHIFT
        buffer.data.add_(shift.to(buffer))
        moved[buffer] = buffer.detach().clone()
    with _replaced_topk(_reversed):
        yield
    for buffer, value in values.items():
        if torch.equal(buffer, moved[buffer]):
            buffer.data.copy_(value)


@contextlib.contextmanager
def _replaced_topk(replaced: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    with (
        mock.patch.object(torch, TOP_CHOICE, replaced(torch.topk)),
        mock.patch.object(Tensor, TOP_CHOICE, replaced(Tensor.topk)),
    ):
        yield


def _reversed(choose: Callable[..., Any]) -> Callable[..., Any]:
    from ..primitives.routing import MOST_EXPERTS

    def chosen(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not scores.is_floating_point() or scores.shape[-1] > MOST_EXPERTS:
            return choose(scores, *args, **kwargs)
        if scores.grad_fn is None:
            return choose(-scores, *args, **kwargs)
        # In place and unseen by autograd, as a kernel computes.
        scores.data.neg_()
        return choose(scores, *args, **kwargs)

    return chosen


ROUTING_JUDGED = (Judged("keep_routing", lambda model: None),)

CHAIN_GATES = (
    Gate("recompute/chains", chains),
    Gate("recompute/caches", caches),
    Gate("recompute/host-report", host_report),
    Gate("recompute/routing", routing, {"keep_routing": Takes("keep")}),
)
