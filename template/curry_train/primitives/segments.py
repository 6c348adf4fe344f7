"""Recompute runs of blocks, one checkpoint each, without an edit of the loop that calls them.

    recompute_segments(model, 4)
    choose_segments(model, batch, loss)    # measures which count has the lowest peak

The first block of a run computes the whole run under one checkpoint; the others hand its result on. The last run is
kept, as in `torch.utils.checkpoint.checkpoint_sequential`, because backward would need it first. Proof:
`python -m pytest tests/test_recompute_contract.py`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..core.blocks import find_blocks
from ..core.checkpointed import Options, run_checkpointed
from ..core.derive import Derived, become, restore
from ..core.measure import measure_memory

SEGMENT = "_segment"


class ChainBroken(ValueError):
    """Blocks that do not follow each other can't share a checkpoint."""


@dataclass
class Segment:
    """A run of blocks and, between the calls of one forward, what it computed."""

    names: list[str]
    blocks: list[nn.Module]
    options: Options
    running: bool = False
    output: Any = None
    arguments: tuple[Any, ...] = ()

    def call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first block of the run computes it, the others hand its result on, and the last lets go of it."""
        position = next(index for index, other in enumerate(self.blocks) if other is block)
        if position == 0:
            self.arguments = (args[1:], kwargs)
            self.output = run_checkpointed(
                self._run, args, kwargs, modules=self.blocks, options=self.options
            )
        else:
            self._check(position, args, kwargs)
        output = self.output
        if position == len(self.blocks) - 1:
            self.output, self.arguments = None, ()
        return output

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.running = True
        try:
            output, rest = None, args[1:]
            for block in self.blocks:
                output = block(*args, **kwargs)
                args = (_stream(output, block), *rest)
            return output
        finally:
            self.running = False

    def _check(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self.names[position]
        if self.output is None or not args or args[0] is not _stream(self.output, self.blocks[0]):
            raise ChainBroken(
                f"{name} does not take the output of {self.names[position - 1]} as it is, so the two can't share a "
                "checkpoint; recompute each block by itself (strategy full)"
            )
        if not _same((args[1:], kwargs), self.arguments):
            raise ChainBroken(
                f"{name} takes other arguments than {self.names[0]}, so the two can't share a checkpoint; recompute "
                "each block by itself (strategy full)"
            )


class SegmentMember(Derived):
    """A block in a `Segment`. Its hooks run where it is really computed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        segment: Segment = self.__dict__[SEGMENT]
        if segment.running or not (self.training and torch.is_grad_enabled()):
            return super().__call__(*args, **kwargs)
        return segment.call(self, args, kwargs)


def recompute_segments(
    model: nn.Module,
    num_segments: int,
    *,
    blocks: str | Sequence[str] | None = None,
    preserve_rng_state: bool = True,
) -> list[str]:
    """Put each chain of blocks under `num_segments` checkpoints less the last, in place; return the blocks' names.

    Chains are the blocks of one container; `blocks` is a glob over module names, or several. Each block's first
    argument must be the previous one's output, and the others the same, or `ChainBroken` is raised as the model runs.
    """
    if isinstance(num_segments, bool) or not isinstance(num_segments, int) or num_segments < 1:
        raise ValueError(
            f"the number of segments must be a whole number of at least 1, got {num_segments!r}"
        )
    found, recomputed = find_blocks(model, blocks), []
    longest = max(len(chain) for chain in _chains(list(found)))
    if num_segments > longest:
        raise ValueError(
            f"{num_segments} segments are more than the {longest} blocks of the longest chain"
        )
    options = Options(preserve_rng_state=preserve_rng_state)
    for chain in _chains(list(found)):
        for names in _split(chain, num_segments)[:-1]:
            segment = Segment(names, [found[name] for name in names], options)
            for block in segment.blocks:
                become(SegmentMember, block, **{SEGMENT: segment})
            recomputed += names
    return recomputed


def remove_segments(model: nn.Module) -> None:
    """Undo `recompute_segments`."""
    for module in list(model.modules()):
        if isinstance(module, SegmentMember):
            restore(module, SEGMENT)


def choose_segments(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    blocks: str | Sequence[str] | None = None,
) -> int:
    """The number of segments with the lowest measured peak; of equal ones the fewest, which recompute least."""
    longest = max(len(chain) for chain in _chains(list(find_blocks(model, blocks))))
    peaks = {}
    for count in sorted({-(-longest // size) for size in range(1, longest + 1)}):
        recompute_segments(model, count, blocks=blocks)
        try:
            peaks[count] = measure_memory(model, batch, loss).peak_bytes
        except ChainBroken:
            continue  # runs of one block are always whole, and one run is never checkpointed
        finally:
            remove_segments(model)
    return min(peaks, key=lambda count: (peaks[count], count))


def _chains(names: list[str]) -> list[list[str]]:
    """Blocks of one container, in order."""
    chains: dict[str, list[str]] = {}
    for name in names:
        chains.setdefault(name.rpartition(".")[0], []).append(name)
    return list(chains.values())


def _split(chain: list[str], parts: int) -> list[list[str]]:
    """Runs whose lengths differ by one at most, the longer ones first, none empty."""
    parts = min(parts, len(chain))
    size, longer = divmod(len(chain), parts)
    starts = [index * size + min(index, longer) for index in range(parts + 1)]
    return [chain[start:end] for start, end in itertools.pairwise(starts)]


def _stream(output: Any, block: nn.Module) -> Tensor:
    """What the next block takes: the output, or the first of several."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        raise ChainBroken(
            f"{type(block).__name__} returns {type(output).__name__}; segments need blocks that return "
            "a tensor, or a tuple that opens with it"
        )
    return first


def _same(arguments: Any, others: Any) -> bool:
    leaves, shape = tree_flatten(arguments)
    other_leaves, other_shape = tree_flatten(others)
    return shape == other_shape and all(map(_is_the_same, leaves, other_leaves))


def _is_the_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(
        other, Tensor
    ):  # slices of one buffer are new tensors each time
        return (
            value.data_ptr() == other.data_ptr()
            and value.shape == other.shape
            and value.stride() == other.stride()
        )
    return value is other or bool(value == other)
