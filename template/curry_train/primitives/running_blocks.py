"""Find the blocks of a model by what one forward runs, and the bytes that it saves there.

    choice = choose_blocks(model, batch, loss)
    recompute_blocks(model, blocks=choice.blocks)

Modules in a container may never run themselves (a `ModuleList` of pairs), or hold all of the bytes
at once (a stage). So one forward is recorded, and the blocks are a cut through its calls.

Proof: `python -m pytest tests/primitives/test_running_blocks.py`.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ..core.blocks import Globs, NoBlocks, find_blocks, kind_of, refuse
from ..core.generators import seeded
from ..core.measure import Loss, as_trained
from ..core.measure_compiled import holds_compiled_code

# Blocks that run: record one forward, and choose among the modules that it calls.

# The fewest and largest blocks are taken whose peak is at most this much above the lowest one.
MOST_ABOVE_LOWEST_PEAK = 1.25
# The blocks that the model's containers give may also have this share of the saved bytes more.
CONTAINERS_MARGIN = 0.1
# The most of the saved bytes that may be alive at the peak for blocks to be worth changing.
MOST_PEAK_SHARE = 0.9
# Kinds of modules that would free less than this share of the saved bytes are no blocks.
LEAST_GAIN_SHARE = 0.01
# Kinds of modules that change neither the peak nor the coverage by this share are left out.
SMALL_SHARE = 0.05


@dataclass(eq=False)
class ModuleCall:
    """One call of a module in a recorded forward."""

    name: str

    # The calls that enclose this one, the outermost first.
    around: "tuple[ModuleCall, ...]"

    # The range of `ForwardRecord.log` that lists what the call saves.
    start: int
    end: int = -1

    # Storages that it is given, and whether it writes to one of them.
    inputs: frozenset[int] = frozenset()
    writes_input: bool = False

    # Whether it runs in training mode and with gradients, so that recompute is on.
    trains: bool = True

    # Whether modules with parameters run without gradients inside, as in a reversible network,
    # which recomputes by itself.
    hides: bool = False

    def is_inside(self, names: Collection[str]) -> bool:
        """Return whether a call of one of these modules encloses this one."""
        return any(caller.name in names for caller in self.around)


class ValuesNeeded(RuntimeError):
    """Raised if forward itself runs a backward, which needs the saved tensors."""


class HooksRefused(RuntimeError):
    """Raised if the forward runs where torch allows no saved-tensor hooks, on which all rests."""


class ForwardRecord:
    """The calls of one forward, and the storages that autograd saves in each.

    `running` is a context manager around the forward. Storages have numbers, so that no tensor
    stays alive. Without `runs_backward` no backward can run inside the forward: it raises
    `ValuesNeeded`.
    """

    def __init__(self, model: nn.Module, *, runs_backward: bool = False) -> None:
        named = dict(model.named_modules())
        self.kinds = {name: kind_of(module) for name, module in named.items()}
        self.refused = {name for name, module in named.items() if name and _cannot_change(module)}
        self.calls: dict[str, list[ModuleCall]] = {}
        # Numbers of the saved storages in order, and the bytes of each storage.
        self.log: list[int] = []
        self.sizes: list[int] = []
        # The calls that run now, one inside of the other.
        self._running: tuple[ModuleCall, ...] = ()
        self._named = named
        self.runs_backward = runs_backward
        self._known = WeakIdKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            self._number_storage(tensor)
        # Storages with lower numbers are the model's own, which recompute leaves.
        self._first_made = len(self.sizes)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if holds_compiled_code(self._named[""]):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            for name, module in self._named.items():
                if name and not isinstance(module, torch.jit.ScriptModule):
                    # As recompute does, and without hooks, which a direct call would skip.
                    forward = self._record_call(name, module, module.forward)
                    stack.enter_context(mock.patch.object(module, "forward", forward))
            yield

    @property
    def total_bytes(self) -> int:
        return self.bytes_of(set(self.log))

    def bytes_of(self, numbers: Iterable[int]) -> int:
        return sum(self.sizes[number] for number in numbers)

    def saved_in(self, call: ModuleCall) -> set[int]:
        return set(self.log[call.start : call.end])

    def most_inside(self, name: str) -> int:
        """Return the most bytes that a call of a module saves besides its inputs."""
        return max(self.bytes_of(self.saved_in(call) - call.inputs) for call in self.calls[name])

    def _record_call(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Any:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            versions = [(tensor, tensor._version) for tensor in _find_tensors((args, kwargs))]
            inputs = frozenset(
                number
                for tensor, _ in versions
                if (number := self._number_storage(tensor)) >= self._first_made
            )
            trains = module.training and torch.is_grad_enabled()
            around = self._running
            call = ModuleCall(name, around, len(self.log), inputs=inputs, trains=trains)
            if not torch.is_grad_enabled() and next(module.parameters(), None) is not None:
                for outer in around:
                    outer.hides = True
            calls = self.calls.setdefault(name, [])
            calls.append(call)
            self._latest = call
            self._running = (*around, call)
            try:
                return forward(*args, **kwargs)
            finally:
                self._running = around
                call.end = len(self.log)
                call.writes_input = any(tensor._version != before for tensor, before in versions)
                # The call is forgotten, because it skips what it holds, as in stochastic depth.
                calls_no_other = self._latest is call
                if trains and call.start == call.end and module._modules and calls_no_other:
                    calls.pop()
                    if not calls:
                        del self.calls[name]

        return run

    def _pack(self, tensor: Tensor) -> Any:
        number = self._number_storage(tensor)
        if number >= self._first_made:
            self.log.append(number)
        return tensor if self.runs_backward else None

    def _unpack(self, packed: Any) -> Any:
        if packed is None:
            raise ValuesNeeded("the forward runs a backward")
        return packed

    def _number_storage(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage."""
        try:
            storage: Any = tensor.untyped_storage()
            num_bytes = storage.nbytes()
        except (NotImplementedError, RuntimeError):
            # Sparse and nested tensors have several storages.
            storage = tensor
            num_bytes = int(tensor.numel()) * tensor.element_size()
        if storage not in self._known:
            self._known[storage] = len(self.sizes)
            self.sizes.append(num_bytes)
        number: int = self._known[storage]
        return number


def _cannot_change(module: nn.Module) -> bool:
    """Return whether a module is compiled, scripted or wrapped, so that no technique changes it."""
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        return True
    try:
        refuse(module)
    except ValueError:
        # A container without a forward holds modules that may be changed.
        return type(module).forward is not nn.Module.forward
    return False


def _find_tensors(given: Any, depth: int = 2) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also those in attributes of plain objects."""
    for leaf in tree_leaves(given):
        if isinstance(leaf, Tensor):
            if not leaf.is_inference():
                yield leaf
        elif depth and hasattr(leaf, "__dict__") and not (isinstance(leaf, type) or callable(leaf)):
            yield from _find_tensors(list(vars(leaf).values()), depth - 1)


# Choose the cut through the calls with the fewest blocks whose peak is near the lowest one.


def estimate_peak(record: ForwardRecord, names: Iterable[str]) -> tuple[int, int]:
    """Estimate the most saved bytes alive if blocks recompute, and the bytes saved inside of them.

    Alive are the blocks' inputs, what is saved outside, and one block.
    """
    chosen = set(names)
    calls = [
        call
        for name in chosen
        for call in record.calls.get(name, ())
        if call.trains and not call.is_inside(chosen)
    ]
    kept = set[int]()
    covered = set[int]()
    held = peak = position = 0
    for call in sorted(calls, key=lambda call: call.start):
        new = (set(record.log[position : call.start]) | call.inputs) - kept
        kept |= new
        held += record.bytes_of(new)
        inside = record.saved_in(call)
        covered |= inside
        peak = max(peak, held + record.bytes_of(inside - kept))
        position = max(position, call.end)
    held += record.bytes_of(set(record.log[position:]) - kept)
    return max(peak, held), record.bytes_of(covered)


def _can_be_block(record: ForwardRecord, name: str) -> bool:
    """Return whether a module can recompute: it trains, saves, and leaves its inputs alone."""
    calls = record.calls[name]
    return (
        any(call.trains and call.end > call.start for call in calls)
        and not any(call.trains and (call.writes_input or call.hides) for call in calls)
        and not _runs_inside(record, name, {name})
        and name not in record.refused
        and not _is_below(name, record.refused)
    )


def _find_lowest_cut(record: ForwardRecord) -> tuple[list[str], float]:
    """Return the first cut near the lowest peak, and the most that containers' may have.

    The cuts go from the model's children downwards.
    """
    kinds = record.kinds
    left = [name for name in record.calls if _can_be_block(record, name)]
    cuts: list[tuple[int, list[str]]] = []
    while names := _select_outermost(record, left):
        cuts.append((estimate_peak(record, names)[0], names))
        largest = kinds[max(names, key=record.most_inside)]
        left = [name for name in left if kinds[name] != largest]
    total = record.total_bytes
    lowest = min((peak for peak, _ in cuts), default=total)
    near = lowest * MOST_ABOVE_LOWEST_PEAK
    limit = min(near, total * MOST_PEAK_SHARE)
    names = next((names for peak, names in cuts if peak <= limit), [])
    most = max(near, lowest + CONTAINERS_MARGIN * total)

    # Leave out kinds that cover little and do not lower the peak, such as norms.
    peak, covered = estimate_peak(record, names)
    most_peak = peak * (1 + SMALL_SHARE)
    least_covered = covered - SMALL_SHARE * total
    for kind in dict.fromkeys(map(kinds.__getitem__, names)):
        fewer = [name for name in names if kinds[name] != kind]
        peak, covered = estimate_peak(record, fewer)
        if peak <= most_peak and covered >= least_covered:
            names = fewer
    chosen = {kinds[name] for name in names}
    # Also modules of these kinds that did not run this time, such as a dropped layer.
    with_idle = [
        name
        for name, kind in kinds.items()
        if name in names
        or (kind in chosen and name and name not in record.calls and not _is_below(name, names))
    ]
    return with_idle, most


def _select_outermost(record: ForwardRecord, names: list[str]) -> list[str]:
    """Leave out modules that others call or hold, and kinds that save hardly more than inputs."""
    chosen = set(names)
    apart = [name for name in names if not _runs_inside(record, name, chosen)]
    names = [name for name in apart if not _is_below(name, apart)]
    gain = Counter[Any]()
    for name in names:
        for call in record.calls[name]:
            saved = record.bytes_of(record.saved_in(call))
            gain[record.kinds[name]] += saved - record.bytes_of(call.inputs)
    least = LEAST_GAIN_SHARE * record.total_bytes
    return [name for name in names if gain[record.kinds[name]] > least]


def _runs_inside(record: ForwardRecord, name: str, others: Collection[str]) -> bool:
    return any(call.is_inside(others) for call in record.calls[name])


def _is_below(name: str, others: Iterable[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


# The choice, with what it covers and why.


class ChosenBlocks(tuple[str, ...]):
    """Names of blocks that no user named, so that work on the whole model may disregard them."""

    __slots__ = ()


@dataclass(frozen=True)
class BlockChoice:
    """The blocks of a model, and how far they cover what a forward saves."""

    names: tuple[str, ...]

    # What a technique takes as `blocks`: None where the containers give these blocks anyway.
    blocks: Globs | None

    # Share of the saved bytes that are saved inside the blocks; None where nothing was recorded.
    coverage: float | None

    # Sentences on what the user would not expect of the blocks.
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """Describe the blocks in a line: how many, which, and what they hold."""
        number = len(self.names)
        blocks = f"{number} block{'s' * (number > 1)}, {listed(self.names)}"
        if self.coverage is None:
            return blocks
        return f"{blocks}, hold{'s' * (number == 1)} {self.coverage:.0%} of what forward saves"

    def lines(self) -> list[str]:
        """Return the description and the notes; without blocks the notes give the reason."""
        return [*([self.describe()] if self.names else []), *self.notes]

    def to_json(self) -> dict[str, Any]:
        return {"names": self.names, "coverage": self.coverage, "notes": self.notes}


def choose_blocks(
    model: nn.Module, batch: Any, loss: Loss, *, blocks: Globs | None = None
) -> BlockChoice:
    """Choose the blocks of a model by what one forward runs and saves.

    The blocks that the model's containers give are kept where each runs and none other would have a
    much lower peak. With `blocks`, names or globs, nothing is chosen and the notes are on these.
    Raises `NoBlocks` if there are none.
    """
    try:
        record = record_forward(model, batch, loss)
    except HooksRefused as refusal:
        return BlockChoice(tuple(find_blocks(model, blocks)), blocks, None, (str(refusal),))
    if blocks is not None:
        return _make_choice(record, list(find_blocks(model, blocks)), blocks)
    best, limit = _find_lowest_cut(record)
    try:
        static = list(find_blocks(model))
    except NoBlocks:
        if not best:
            raise
        return _make_choice(record, best, ChosenBlocks(best))
    why = _explain_choice(record, static, best, limit)
    if not why:
        return _make_choice(record, static, None)
    return _make_choice(record, best, ChosenBlocks(best), why)


def _make_choice(
    record: ForwardRecord,
    names: list[str],
    blocks: Globs | None,
    *why: str,
) -> BlockChoice:
    notes = [sentence for sentence, _ in unusual_blocks(record, names).values()]
    return BlockChoice(tuple(names), blocks, _measure_coverage(record, names), (*why, *notes))


def record_forward(model: nn.Module, batch: Any, loss: Loss) -> ForwardRecord:
    """Record one forward, after which buffers and random generators are as before."""
    with as_trained(model), seeded(0):
        record = ForwardRecord(model)
        try:
            with record.running():
                loss(model, batch)
        except ValuesNeeded:
            record = ForwardRecord(model, runs_backward=True)
            with record.running():
                loss(model, batch)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise HooksRefused(
                "forward or loss takes derivatives with torch.func, under which neither recompute "
                "nor offload works: take them with torch.autograd.grad"
            ) from error
    return record


def _measure_coverage(record: ForwardRecord, names: Sequence[str]) -> float:
    return estimate_peak(record, names)[1] / max(1, record.total_bytes)


def _explain_choice(record: ForwardRecord, static: list[str], best: list[str], limit: float) -> str:
    """Explain why the blocks that the containers give are not taken; empty if they are."""
    if not best:
        return ""
    if idle := _find_never_called(record, static):
        return f"the containers give {listed(idle)}, of which none is called"
    broken = [name for name in static if name in record.calls and not _can_be_block(record, name)]
    if broken:
        is_compiled = any(name in record.refused for name in broken)
        if is_compiled and _measure_coverage(record, best) < _measure_coverage(record, static):
            return ""
        return f"the containers give {listed(broken)}, which hold nothing or can't be recomputed"
    peak, _ = estimate_peak(record, static)
    if peak <= limit:
        return ""
    total = record.total_bytes
    better, _ = estimate_peak(record, best)
    return (
        f"chosen by bytes: the {len(static)} blocks that the containers give leave "
        f"{peak / total:.0%} of the saved bytes at the peak, these {better / total:.0%}"
    )


# Notes on blocks that a technique can't change, or that may surprise the user.
TRAITS = {
    "idle": "never called, so nothing has an effect; name blocks that run (--blocks)",
    "off": "run in eval mode or without gradients, where recompute is off",
    "repeated": "called several times in a step",
    "writing": (
        "the input is overwritten, as by an in-place activation at the start, and recompute would "
        "find another one: set inplace=False"
    ),
    "refused": "compiled, scripted or wrapped already: apply techniques before that",
    "checkpointed": "nothing is saved in forward: the model checkpoints by itself",
}


def unusual_blocks(record: ForwardRecord, names: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
    """Return a sentence and the blocks for each of `TRAITS` that some blocks have."""
    calls = {name: record.calls[name] for name in names if name in record.calls}
    found = {
        "idle": _find_never_called(record, names),
        "off": [name for name in calls if not any(call.trains for call in calls[name])],
        "repeated": [name for name in calls if len(calls[name]) > 1],
        "writing": [name for name in calls if any(call.writes_input for call in calls[name])],
        "refused": [name for name in names if name in record.refused],
        "checkpointed": [
            name
            for name in calls
            if all(call.trains and call.start == call.end for call in calls[name])
        ],
    }
    return {
        trait: (f"{listed(blocks)}: {TRAITS[trait]}", blocks)
        for trait, blocks in found.items()
        if blocks
    }


def _find_never_called(record: ForwardRecord, names: Sequence[str]) -> list[str]:
    """Return the blocks that did not run, unless others of their kind did."""
    running_kinds = {record.kinds[name] for name in names if name in record.calls}
    return [name for name in names if record.kinds[name] not in running_kinds]


def listed(names: Sequence[str]) -> str:
    """Write one name, two names, or the first and the last of more."""
    if len(names) < 3:
        return " and ".join(names)
    return f"{names[0]} to {names[-1]}"
