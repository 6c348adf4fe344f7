"""Recompute chains of blocks (segments) in the backward, without editing the loop over them.

    recompute_segments(model, 4)    # all but the last of four runs of consecutive blocks

A segment is computed at its first block and saves only what that block is given. The blocks after
it return what was computed for them, if each is called with the output of the one before it. A
model whose loop does anything else raises `ChainBroken`, and needs `recompute_blocks`.

Proof: `python -m pytest tests/primitives/test_segments_in_any_loop.py`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..core.blocks import Derived, Globs, become, find_blocks, is_active, num_recomputed, restore
from ..core.measure import is_out_of_memory
from ..core.wording import require_whole
from .recompute import RecomputeOptions, run_checkpointed
from .rerun import Inputs

REMEDY = "recompute each block by itself (strategy full)"


class ChainBroken(ValueError):
    """Raised when the blocks of a segment do not feed each other directly."""


@dataclass
class Segment:
    """Consecutive blocks and, between the calls of one forward, their outputs."""

    names: list[str]
    blocks: list[nn.Module]
    options: RecomputeOptions
    running: bool = False
    # Outputs of the blocks that are still to be called.
    outputs: list[Any] = field(default_factory=list)
    arguments: tuple[Any, ...] = ()
    # The tensor that the next block must get, and what `_count_uses` counted for it.
    passed: Tensor | None = None
    uses: tuple[int, int] = 0, 0
    # The state of torch's generator after the last call.
    generator: Tensor | None = None

    def call(self, block: nn.Module, inputs: Inputs) -> Any:
        """Compute all blocks at the first one, and return the output of the called one."""
        position = self.blocks.index(block)
        if position == 0:
            self.outputs = run_checkpointed(
                self._run, inputs, modules=self.blocks, options=self.options
            )
            args, kwargs = inputs
            self.arguments = (args[1:], kwargs)
        else:
            self._check(position, inputs)
        output = self.outputs.pop(0)
        if self.outputs:
            self.passed = _stream(output, block)
            self.uses = _count_uses(self.passed)
            self.generator = _read_generator(self.passed)
        else:
            # The forward is over, and nothing of it stays alive here.
            self.passed = None
            self.arguments = ()
        return output

    def _run(self, *args: Any, **kwargs: Any) -> list[Any]:
        # A backward inside of the forward may recompute the segment while it runs.
        was_running = self.running
        self.running = True
        try:
            outputs: list[Any] = []
            rest = args[1:]
            for number, block in enumerate(self.blocks):
                try:
                    output = block(*args, **kwargs)
                except (
                    AttributeError,
                    LookupError,
                    RuntimeError,
                    TypeError,
                    ValueError,
                    torch.jit.Error,
                ) as error:
                    # An error of a recomputed forward has another cause: the first one passed.
                    if number == 0 or num_recomputed[0] or is_out_of_memory(error):
                        raise
                    raise ChainBroken(
                        f"{self.names[number]} can't take the output of {self.names[number - 1]}: "
                        f"{str(error).splitlines()[0] if str(error) else type(error).__name__}; "
                        f"{REMEDY}"
                    ) from error
                outputs.append(output)
                if number < len(self.blocks) - 1:
                    args = (_stream(output, block), *rest)
            return outputs
        finally:
            self.running = was_running

    def _check(self, position: int, inputs: Inputs) -> None:
        """Raise if the loop does not pass the output of the block before on as it is."""
        name = self.names[position]
        next_position = (len(self.blocks) - len(self.outputs)) % len(self.blocks)
        if position != next_position:
            raise ChainBroken(
                f"{name} is called where {self.names[next_position]} is next, so the blocks can't "
                f"share a segment; {REMEDY}"
            )
        args, kwargs = inputs
        taken = args[0] if args else None
        if taken is not self.passed or _count_uses(taken) != self.uses:
            raise ChainBroken(
                f"{name} does not take the output of {self.names[position - 1]} unchanged and "
                f"unused, so the two can't share a segment; {REMEDY}"
            )
        if self.generator is not None and not torch.equal(torch.get_rng_state(), self.generator):
            raise ChainBroken(
                f"random numbers are drawn between {self.names[position - 1]} and {name}, as where "
                f"layers are dropped at random, so the two can't share a segment; {REMEDY}"
            )
        if _describe_arguments((args[1:], kwargs)) != _describe_arguments(self.arguments):
            raise ChainBroken(
                f"{name} takes other arguments than {self.names[0]}, so the two can't share a "
                f"segment; {REMEDY}"
            )


class SegmentMember(Derived):
    """A block in a `Segment`; its hooks run where the block is computed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        segment: Segment = self._technique
        if segment.running or not (segment.options.enabled and is_active(self)):
            return super().__call__(*args, **kwargs)
        return segment.call(self, (args, kwargs))


def recompute_segments(
    model: nn.Module,
    num_segments: int,
    *,
    blocks: Globs | None = None,
    **options: Any,
) -> list[str]:
    """Recompute each chain of blocks in segments, in place, and return the blocks' names.

    A chain is the blocks of one container. It is split into `num_segments` segments, and all but
    the last are recomputed. `blocks` is a glob over module names, or several. Each block must take
    the previous block's output as its first argument, which no operation in between may save for
    its backward, no random number may be drawn in between, and the other arguments must be the same
    for all; otherwise the forward raises `ChainBroken`. The options are those of `Recompute`,
    except `use_reentrant`.
    """
    settings = RecomputeOptions(**options)
    if settings.use_reentrant:
        raise ValueError("segments are not recomputed reentrantly: leave use_reentrant at False")
    require_whole("the number of segments", num_segments, least=1)
    found = find_blocks(model, blocks)
    recomputed = []
    chains = chains_of(list(found))
    longest = max(map(len, chains))
    if num_segments > longest:
        raise ValueError(
            f"{num_segments} segments are more than the {longest} blocks of the longest chain"
        )

    for chain in chains:
        for names in _split(chain, num_segments)[:-1]:
            segment = Segment(names, [found[name] for name in names], settings)
            for block in segment.blocks:
                become(SegmentMember, block, segment)
            recomputed += names
    return recomputed


def remove_segments(model: nn.Module) -> None:
    """Undo `recompute_segments`."""
    restore(model, SegmentMember)


def chains_of(names: Sequence[str]) -> list[list[str]]:
    """Group block names by their container, in order."""
    chains = itertools.groupby(names, key=lambda name: name.rpartition(".")[0])
    return [list(chain) for _, chain in chains]


def _split(chain: list[str], num_segments: int) -> list[list[str]]:
    """Split into non-empty segments whose lengths differ by at most one.

    The last, which is not recomputed, is never longer than another.
    """
    count = min(num_segments, len(chain))
    ends = [-(-len(chain) * index // count) for index in range(count + 1)]
    return [chain[start:end] for start, end in itertools.pairwise(ends)]


def _count_uses(tensor: Any) -> tuple[int, int]:
    """Return how often a tensor was changed in place, and how many nodes of autograd hold it.

    An operation between two blocks that saves the tensor for its backward would run after both
    blocks here, so the gradients of the tensor would be added in another order. Torch counts the
    holders of a tensor outside of Python. Compiled code is not counted.
    """
    return (0, 0) if torch.compiler.is_compiling() else (tensor._version, tensor._use_count())


def _read_generator(output: Tensor) -> Tensor | None:
    """Return the state of torch's generator; compiled code and fake tensors can't compare it."""
    is_plain = type(output) is Tensor and not torch.compiler.is_compiling()
    return torch.get_rng_state() if is_plain else None


def _stream(output: Any, block: nn.Module) -> Tensor:
    """Return the tensor for the next block: the output, or its first element."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        raise ChainBroken(
            f"{type(block).__name__} returns {type(output).__name__}; segments need blocks that "
            "return a tensor, or a tuple that starts with one"
        )
    return first


def _describe_arguments(arguments: Any) -> Any:
    """Return arguments with the memory of each tensor in place of it.

    Slices of one buffer are new tensors each time.
    """
    return tree_map_only(
        Tensor, lambda leaf: (leaf.data_ptr(), leaf.shape, leaf.stride()), arguments
    )
