"""Recompute blocks, chains of blocks (segments) or a module in the backward.

model.layers[3] = Recompute(model.layers[3])    # one block
    recompute_blocks(model)                         # every block that the model repeats, in place

A recomputing block is the same module under a subclass: its parameter names, state dict, hooks,
attributes, copies and pickles are those of the original block.

Proof: `python -m pytest tests/gates/test_gates.py tests/primitives/test_recompute_contract.py`.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..core.blocks import Derived, become, derive, find_blocks, is_active, restore
from ..core.blocks import plain_blocks as plain_blocks
from .checkpointed import RecomputeOptions, run_checkpointed

# Recompute a block's activations in backward instead of keeping them.

RECOMPUTE_ATTRIBUTE = "_recompute"


class Recompute(Derived):
    """A block, or a plain function, that keeps only its inputs for backward.

    It trains the same. Nothing is recomputed in eval mode, without grad mode, inside
    `plain_blocks()`, or while `enabled` is False. The other keywords are those of
    `torch.utils.checkpoint.checkpoint`: `use_reentrant`, `preserve_rng_state`,
    `determinism_check`, `context_fn`, `debug` and `early_stop`. BatchNorm statistics are updated
    once. The given module stays as it was and shares all its state with the block.
    """

    def __new__(
        cls, module: nn.Module | Callable[..., Any], enabled: bool = True, **options: Any
    ) -> Any:
        settings = RecomputeOptions(enabled=enabled, **options)
        if not isinstance(module, nn.Module) and callable(module):
            return _recomputing_function(module, settings)
        return derive(cls, module, **{RECOMPUTE_ATTRIBUTE: settings})

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: the module passed to `__new__` is initialised already."""

    @property
    def recomputes(self) -> bool:
        """Return whether backward would recompute a forward that runs now."""
        return bool(getattr(self, RECOMPUTE_ATTRIBUTE).enabled and is_active(self))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recomputes:
            return super().forward(*args, **kwargs)
        return run_checkpointed(
            super().forward,
            args,
            kwargs,
            modules=[self],
            options=getattr(self, RECOMPUTE_ATTRIBUTE),
        )


def _recomputing_function(function: Callable[..., Any], options: RecomputeOptions) -> Any:
    """Return the function, so that it recomputes whenever grad mode is on, as in torch."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not (options.enabled and is_active()):
            return function(*args, **kwargs)
        modules: list[nn.Module] = []
        if not torch.compiler.is_compiling():
            modules = [
                value
                for value in (*args, *kwargs.values(), *_used_by(function))
                if isinstance(value, nn.Module)
            ]
        return run_checkpointed(function, args, kwargs, modules=modules, options=options)

    return call


def _used_by(function: Any) -> Iterator[Any]:
    """Yield the objects that a function is bound to, or finds outside of its arguments."""
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    yield getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        outside = inspect.getclosurevars(function)
        yield from (*outside.nonlocals.values(), *outside.globals.values())


class CheckpointWrapper(Recompute):
    """`Recompute` with the name and the arguments of torch's own wrapper."""

    def __new__(
        cls, module: nn.Module, use_reentrant: bool = False, preserve_rng_state: bool = True
    ) -> Any:
        options = RecomputeOptions(
            use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state
        )
        return derive(cls, module, **{RECOMPUTE_ATTRIBUTE: options})


def recompute_blocks(
    model: nn.Module, *, blocks: str | Sequence[str] | None = None, **options: Any
) -> list[str]:
    """Make the blocks of a model recompute, in place, and return their names.

    `blocks` is a glob over module names, or several; without it these are the blocks that the model
    repeats. The options are those of `Recompute`. Call this before DDP, `fully_shard` and
    `torch.compile`.
    """
    found = find_blocks(model, blocks)
    for block in found.values():
        become(Recompute, block, **{RECOMPUTE_ATTRIBUTE: RecomputeOptions(**options)})
    return list(found)


def remove_recompute(model: nn.Module) -> list[str]:
    """Undo `recompute_blocks` and return the names of the modules that were recomputing."""
    names = [name for name, module in model.named_modules() if isinstance(module, Recompute)]
    for name in names:
        restore(model.get_submodule(name), RECOMPUTE_ATTRIBUTE)
    return names


# Recompute segments of consecutive blocks without editing the loop that calls them.

SEGMENT_ATTRIBUTE = "_segment"


class ChainBroken(ValueError):
    """Raised when the blocks of a segment do not feed each other directly."""


# What code may ask of an output between two blocks: nothing that depends on its values.
METADATA_ATTRIBUTES = {
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "size",
    "dim",
    "numel",
    "is_floating_point",
    "is_complex",
    "__len__",
    "__hash__",
}


class PendingOutput(Tensor):
    """Output of a block inside a segment, which only the next block may take.

    The whole segment is computed at its first block, so the values between its blocks are not
    there. Shape, dtype and device can be read; anything else raises `ChainBroken`. Without this, a
    loop that adds to the output, skips a block, ends early or collects hidden states would compute
    with the result of the segment instead, and no error would show it.
    """

    block: str
    following: str
    place: torch.device

    @staticmethod
    def of(tensor: Tensor, block: str, following: str) -> "PendingOutput":
        """Make a stand-in without storage for the output of `block`."""
        # Neither a tensor without values nor an operation that a measurement counts.
        with _disable_current_modes():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            pending = empty.requires_grad_(tensor.requires_grad).as_subclass(PendingOutput)
        pending.block = block
        pending.following = following
        pending.place = tensor.device
        return pending

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"PendingOutput(of {self.block}, for {self.following})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if name == "device":
            return args[0].place
        if name in METADATA_ATTRIBUTES:
            return super().__torch_function__(func, types, args, kwargs or {})
        pending = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise ChainBroken(
            f"the output of {pending.block} is used by {name or func} and not only by "
            f"{pending.following}, so the two can't share a segment; recompute each block by "
            "itself (strategy full)"
        )


@dataclass
class Segment:
    """Consecutive blocks and, between the calls of one forward, their result."""

    names: list[str]
    blocks: list[nn.Module]
    options: RecomputeOptions
    running: bool = False
    # Whether the first forward runs, and not the recomputed one.
    starting: bool = False
    # Position of the block that must be called next; 0 between two forwards.
    position: int = 0
    output: Any = None
    arguments: tuple[Any, ...] = ()
    # What the block before returned: the only first argument that the next block may get.
    pending: Any = None

    def call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the segment at its first block, and return its result at its last one."""
        position = next(index for index, other in enumerate(self.blocks) if other is block)
        if position == 0:
            self._start(args, kwargs)
        else:
            self._check(position, args, kwargs)
        if position == len(self.blocks) - 1 or torch.compiler.is_compiling():
            output = self.output
            if position == len(self.blocks) - 1:
                self._end()
            return output

        self.position = position + 1
        names = self.names[position], self.names[position + 1]
        self.pending = tree_map(
            lambda leaf: PendingOutput.of(leaf, *names) if isinstance(leaf, Tensor) else leaf,
            self.output,
        )
        return self.pending

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A forward that raised an error may have left a segment unfinished.
        self._end()
        for value in args[:1]:
            if isinstance(value, PendingOutput):
                raise ChainBroken(
                    f"{self.names[0]} takes the output of {value.block}, and {value.following} has "
                    "to; recompute each block by itself (strategy full)"
                )
        self.starting = True
        try:
            self.output = run_checkpointed(
                self._run, args, kwargs, modules=self.blocks, options=self.options
            )
        finally:
            self.starting = False
        self.arguments = (args[1:], kwargs)

    def _end(self) -> None:
        self.position = 0
        self.output = None
        self.arguments = ()
        self.pending = None

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        # A backward inside of the forward may recompute the segment while it runs.
        was_running = self.running
        self.running = True
        try:
            output = None
            rest = args[1:]
            for number, block in enumerate(self.blocks):
                try:
                    output = block(*args, **kwargs)
                except (
                    AttributeError,
                    RuntimeError,
                    TypeError,
                    ValueError,
                    torch.jit.Error,
                ) as error:
                    if number == 0 or not self.starting or _lacks_memory(error):
                        raise
                    raise ChainBroken(
                        f"{self.names[number]} can't take the output of {self.names[number - 1]}: "
                        f"{str(error).splitlines()[0] if str(error) else type(error).__name__}; "
                        "recompute each block by itself (strategy full)"
                    ) from error
                args = (_stream(output, block), *rest)
            return output
        finally:
            self.running = was_running

    def _check(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self.names[position]
        if self.output is None or position != self.position:
            expected = self.names[self.position]
            raise ChainBroken(
                f"{name} is called where {expected} is next, so the blocks can't share a segment; "
                "recompute each block by itself (strategy full)"
            )
        taken = args[0] if args else None
        passed = self.output if torch.compiler.is_compiling() else self.pending
        if taken is not _stream(passed, self.blocks[position - 1]):
            raise ChainBroken(
                f"{name} does not take the output of {self.names[position - 1]} unchanged, so the "
                "two can't share a segment; recompute each block by itself (strategy full)"
            )
        if not _same((args[1:], kwargs), self.arguments):
            raise ChainBroken(
                f"{name} takes other arguments than {self.names[0]}, so the two can't share a "
                "segment; recompute each block by itself (strategy full)"
            )


class SegmentMember(Derived):
    """A block in a `Segment`; its hooks run where the block is computed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        segment: Segment = self.__dict__[SEGMENT_ATTRIBUTE]
        if segment.running or not (segment.options.enabled and is_active(self)):
            return super().__call__(*args, **kwargs)
        return segment.call(self, args, kwargs)


def recompute_segments(
    model: nn.Module,
    num_segments: int,
    *,
    blocks: str | Sequence[str] | None = None,
    **options: Any,
) -> list[str]:
    """Recompute each chain of blocks in segments, in place, and return the blocks' names.

    A chain is the blocks of one container. It is split into `num_segments` segments, and all but
    the last are recomputed. `blocks` is a glob over module names, or several. Each block must take
    the previous block's output as its first argument, and the other arguments must be the same for
    all; otherwise the forward raises `ChainBroken`. The options are those of `Recompute`, except
    `use_reentrant`.
    """
    settings = RecomputeOptions(**options)
    if settings.use_reentrant:
        raise ValueError("segments are not recomputed reentrantly: leave use_reentrant at False")
    if isinstance(num_segments, bool) or not isinstance(num_segments, int) or num_segments < 1:
        raise ValueError(
            f"the number of segments must be a whole number of at least 1, got {num_segments!r}"
        )
    found = find_blocks(model, blocks)
    recomputed = []
    longest = max(len(chain) for chain in chains_of(list(found)))
    if num_segments > longest:
        raise ValueError(
            f"{num_segments} segments are more than the {longest} blocks of the longest chain"
        )

    for chain in chains_of(list(found)):
        for names in _split(chain, num_segments)[:-1]:
            segment = Segment(names, [found[name] for name in names], settings)
            for block in segment.blocks:
                become(SegmentMember, block, **{SEGMENT_ATTRIBUTE: segment})
            recomputed += names
    return recomputed


def remove_segments(model: nn.Module) -> None:
    """Undo `recompute_segments`."""
    for module in list(model.modules()):
        if isinstance(module, SegmentMember):
            restore(module, SEGMENT_ATTRIBUTE)


def chains_of(names: Sequence[str]) -> list[list[str]]:
    """Group block names by their container, in order."""
    chains: dict[str, list[str]] = {}
    for name in names:
        chains.setdefault(name.rpartition(".")[0], []).append(name)
    return list(chains.values())


def _split(chain: list[str], num_segments: int) -> list[list[str]]:
    """Split into non-empty segments whose lengths differ by at most one, longer ones first."""
    num_segments = min(num_segments, len(chain))
    size, num_longer = divmod(len(chain), num_segments)
    starts = [index * size + min(index, num_longer) for index in range(num_segments + 1)]
    return [chain[start:end] for start, end in itertools.pairwise(starts)]


def _stream(output: Any, block: nn.Module) -> Tensor:
    """Return the tensor for the next block: the output, or its first element."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        raise ChainBroken(
            f"{type(block).__name__} returns {type(output).__name__}; segments need blocks that "
            "return a tensor, or a tuple that starts with one"
        )
    return first


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _same(arguments: Any, others: Any) -> bool:
    leaves, shape = tree_flatten(arguments)
    other_leaves, other_shape = tree_flatten(others)
    return shape == other_shape and all(map(_is_the_same, leaves, other_leaves))


def _is_the_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        # Slices of one buffer are new tensor objects each time, so compare the memory.
        return (
            value.data_ptr() == other.data_ptr()
            and value.shape == other.shape
            and value.stride() == other.stride()
        )
    return value is other or bool(value == other)
