"""Repeat the choices of a router where a block with experts is recomputed.

    recompute_blocks(model)
    keep_routing(model)          # after it, and before DDP and `fully_shard`

A router chooses experts by the largest scores. A recomputed forward may choose others: at a tie,
with another kernel, or after the bias that balances the load was updated. Then tokens meet experts
in backward that they have not met in forward, and torch's checkpoint notices it only if a shape
differs. These blocks keep the choices and the scores of the first run for the recomputed one.

Proof: `python -m pytest tests/primitives/test_routing.py`.
"""

import contextlib
import dataclasses
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from ..core.blocks import Globs, find_modules, match_names, tensors_in
from .recompute import Checkpointed, RecomputeOptions
from .rerun import Pair, written_names
from .segments import Segment, SegmentMember

# Functions and methods that choose: their outputs are indices, alone or beside the values at them.
CHOOSING_NAMES = (
    "topk",
    "argmax",
    "argmin",
    "sort",
    "argsort",
    "max",
    "min",
    "kthvalue",
    "multinomial",
    "bucketize",
)
# A top-k over more entries is not taken for a router: its scores would take memory.
MOST_EXPERTS = 1024
# Names of modules that route, and of their classes.
ROUTING_NAME = re.compile(r"router|routing|gating|moe|expert|top.?[kn]", re.IGNORECASE)


# The scores, or None, and the outputs.
Choice = tuple[Tensor | None, list[Tensor]]


class Choices(TorchFunctionMode):
    """The choices of one run of a block: kept in the first run, repeated in later ones.

    It can be entered again for a second backward. `others` are the other contexts of the run.
    """

    # A nested block that runs again does so without it.
    ends_with_run = True

    def __init__(self, kept: list[Choice], others: Any, *, repeats: bool) -> None:
        super().__init__()
        self.kept = kept
        self.others = others
        self.repeats = repeats
        # The place of the next choice to repeat.
        self.position = 0

    def __enter__(self) -> Any:
        self.position = 0
        super().__enter__()
        self.others.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        try:
            return self.others.__exit__(*raised)
        finally:
            super().__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in CHOOSING_NAMES:
            return func(*args, **kwargs)
        scores = args[0] if args and _are_router_scores(args[0]) else None
        following = None
        if self.repeats and self.position < len(self.kept):
            following = self.kept[self.position]
            if following[0] is not None and scores is not None:
                self._overwrite(scores, following[0])
        # Also where its choice is repeated: autograd saves the indices, which share memory with the
        # output.
        found = func(*args, **kwargs)
        outputs = list(tensors_in(found))
        if not all(output.is_floating_point() for output in outputs):
            if self.repeats:
                self.position += 1
                # Overwrite what the function chose on the kept scores.
                shapes = [output.shape for output in outputs]
                if following is None or [kept.shape for kept in following[1]] != shapes:
                    raise RuntimeError(
                        f"the recomputed forward chooses by {name} where the "
                        "first one did not: the block takes another way the second time, so leave "
                        "it out with blocks="
                    )
                for output, kept in zip(outputs, following[1], strict=True):
                    self._overwrite(output, kept)
            else:
                with torch.no_grad(), self._leave_policy():
                    kept_scores = None if scores is None else scores.detach().clone()
                    self.kept.append((kept_scores, [output.detach().clone() for output in outputs]))
        return found

    def _overwrite(self, tensor: Tensor, value: Tensor) -> None:
        """Write a value into a tensor and into what autograd saved of it, unnoticed by both."""
        with self._leave_policy():
            tensor.data.copy_(value)

    def _leave_policy(self) -> contextlib.AbstractContextManager[Any]:
        """Leave the policy's dispatch mode, which counts operations, if the block has one."""
        has_policy = isinstance(self.others, TorchDispatchMode)
        return _pop_mode_temporarily() if has_policy else contextlib.nullcontext()


def _are_router_scores(scores: Any) -> bool:
    """Check for scores that this run computed and backward needs, of few experts."""
    return (
        isinstance(scores, Tensor)
        and scores.grad_fn is not None
        and scores.is_floating_point()
        and scores.dim() > 0
        and scores.shape[-1] <= MOST_EXPERTS
    )


def routed_contexts(others: Pair) -> Pair:
    """Return the contexts of the first and of the recomputed run, around others."""
    first, second = others
    kept: list[Choice] = []
    return Choices(kept, first, repeats=False), Choices(kept, second, repeats=True)


def keep_routing(model: nn.Module, *, blocks: Globs | None = None) -> list[str]:
    """Let the blocks of a model that recompute repeat the choices of their routers, in place.

    Call this after `recompute_blocks`, `recompute_segments` or `apply_sac`. Return the names of the
    blocks; a model without experts has none. `blocks` is a glob over module names, or several, for
    experts that are named otherwise than router, gating, MoE, experts or top-k. Small
    buffers of these blocks, such as a bias that balances the load, may change between forward and
    backward.
    """
    # The blocks that run a second time.
    found = find_modules(model, Checkpointed | SegmentMember)
    if blocks is None:
        names = [name for name, block in found.items() if has_router(block)]
    else:
        names = match_names([*found], blocks, option="blocks")
    for name in names:
        block = found[name]
        technique = block._technique
        if isinstance(technique, Segment):
            technique.options = _add_routing(technique.options)
        else:
            block._technique = _add_routing(technique)
        for module in block.modules():
            # Each call keeps the values of small buffers, so that they may be written after it.
            buffers = dict(module.named_buffers(recurse=False))
            if buffers and all(buffer.numel() <= MOST_EXPERTS for buffer in buffers.values()):
                tensors = [key for key, value in vars(module).items() if isinstance(value, Tensor)]
                written_names.setdefault(module, set()).update(buffers, tensors)
    return names


def has_router(block: nn.Module) -> bool:
    """Check the classes and the attributes of a block, such as `experts`, for names of routers."""
    found = [(name, type(module).__name__) for name, module in block.named_modules()]
    return any(ROUTING_NAME.search(name) for names in found for name in names)


def _add_routing(options: RecomputeOptions) -> RecomputeOptions:
    return dataclasses.replace(options, change_contexts=routed_contexts)
