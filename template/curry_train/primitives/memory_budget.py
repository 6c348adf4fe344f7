"""Compile blocks with a memory budget: the compiler chooses which activations to recompute.

    memory_budget(model, 0.5)    # save half of the bytes that compiled code saves by default
    # Compile now, on this batch, and check the gradients:
    memory_budget(model, 0.5, batch=batch, loss=loss)

Names, state dict, copies and pickles are those of the original model. The blocks run compiled in
training with gradients, and uncompiled in eval mode and without grad mode.

Proof: `python -m pytest tests/test_memory_budget.py`.
"""

import contextlib
import functools
import hashlib
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.blocks import find_blocks
from ..core.compiled import BudgetUnsafe, CompileFailed, warnings_of_the_compiler_ignored
from ..core.derive import Derived, become, restore
from ..core.operations import draws
from ..core.parity import StepRecord, compare, record_step
from ..core.partition import BACKENDS, Compiled
from ..core.untouched import seeded, untouched

__all__ = ["BudgetUnsafe", "Budgeted", "CompileFailed", "memory_budget", "remove_memory_budget"]

BUDGET = "_budget"
# Rounding in half precision stays below this. A different random number also shows as a generator
# in a different state.
AT_MOST = 0.05
Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Budget:
    """How a block is compiled; stored on the block, and copied with it."""

    share: float
    backend: str
    # Blocks of the same kind share their compiled code.
    kind: str


class Budgeted(Derived):
    """A block that runs compiled with its budget in training, also inside a compiled model."""

    runs_compiled_code = True

    @property
    def runs_compiled(self) -> bool:
        """Whether a forward would run compiled now."""
        return bool(self.training and torch.is_grad_enabled())

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="the block is compiled by itself, with its memory budget"
    )
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.runs_compiled:
            return super().forward(*args, **kwargs)
        return _compiled(_bare_forward(self), self.__dict__[BUDGET])(self, *args, **kwargs)


def _bare_forward(block: nn.Module) -> Callable[..., Any]:
    """Return the forward of the block's original class."""
    forward: Any = super(Budgeted, block).forward  # type: ignore[misc]
    return forward.__func__


@functools.cache
def _compiled(forward: Callable[..., Any], budget: Budget) -> Compiled:
    return Compiled(forward, budget=budget.share, backend=budget.backend, name=budget.kind)


def memory_budget(
    model: nn.Module,
    budget: float,
    *,
    blocks: str | Sequence[str] | None = None,
    backend: str = "inductor",
    batch: Any = None,
    loss: Loss | None = None,
) -> list[str]:
    """Compile the blocks of a model with a memory budget, in place, and return their names.

    `budget` is a share of the bytes that a compiled block saves by default, between 0.0 (only the
    block's inputs) and 1.0; the saved bytes fall with it in steps. Random numbers are drawn once at
    every budget. `blocks` is a glob over module names, or several; without it these are the blocks
    that the model repeats. Call this before DDP and `fully_shard`.

    With `batch` and `loss` one step compiles the blocks now and drops its gradients. If the blocks
    draw random numbers, that step is compared with the same code at budget 1.0, and a difference
    raises `BudgetUnsafe`.
    """
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
        raise ValueError(
            f"the budget is a share of the saved bytes between 0 and 1, got {budget!r}"
        )
    if backend not in BACKENDS:
        raise ValueError(
            f"backend must be one of {', '.join(BACKENDS)}, which support budgets; got {backend!r}"
        )
    if (batch is None) != (loss is None):
        raise ValueError("give batch and loss both, to compile and check now, or neither")

    found = find_blocks(model, blocks)
    with contextlib.ExitStack() as undo:
        for name, block in found.items():
            if not isinstance(type(block).forward, types.FunctionType):
                raise ValueError(
                    f"{name} is a {type(block).__name__}, which torch.compile can't trace: "
                    "leave it out"
                )
            become(Budgeted, block, **{BUDGET: Budget(float(budget), backend, _kind(block))})
            undo.callback(restore, block, BUDGET)
        if loss is not None:
            _check(model, list(found.values()), batch, loss)
        undo.pop_all()
    return list(found)


def remove_memory_budget(model: nn.Module) -> list[str]:
    """Undo `memory_budget` and return the names of the blocks that were compiled."""
    names = [name for name, module in model.named_modules() if isinstance(module, Budgeted)]
    for name in names:
        restore(model.get_submodule(name), BUDGET)
    return names


def _kind(block: nn.Module) -> str:
    """Name a block by its class, tensor shapes and dtypes, which decide its compiled code."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    return f"{type(block).__name__}_{hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]}"


def _check(model: nn.Module, blocks: Sequence[nn.Module], batch: Any, loss: Loss) -> None:
    """Compile by running one step, and check it if the blocks draw random numbers."""
    bounded = _recorded(model, batch, loss)
    for block in blocks:
        code = _compiled(_bare_forward(block), block.__dict__[BUDGET])
        if not code.num_graphs:
            raise CompileFailed(
                f"{code.name} produced no compiled graph: check that the forward runs it in "
                "training mode"
            )

    drawn = _drawn(model, blocks, batch, loss)
    if not drawn:
        return

    before = {block: block.__dict__[BUDGET] for block in blocks}
    try:
        for block, budget in before.items():
            block.__dict__[BUDGET] = replace(budget, share=1.0)
        found = compare(_recorded(model, batch, loss), bounded, tolerance=AT_MOST)
    finally:
        for block, budget in before.items():
            block.__dict__[BUDGET] = budget
    if not found.holds:
        share = next(iter(before.values())).share
        raise BudgetUnsafe(
            f"with budget {share:g} a step differs from the same code at 1.0: {found.describe()}; "
            f"the blocks draw random numbers ({', '.join(sorted(drawn))}): "
            "take those out of the blocks, or use recompute_blocks"
        )


def _recorded(model: nn.Module, batch: Any, loss: Loss) -> StepRecord:
    with untouched(model), seeded(0), warnings_of_the_compiler_ignored():
        return record_step(model, batch, loss)


class _Draws(TorchDispatchMode):
    """Record operations that draw random numbers; under it compiled code runs uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth and draws(func, args, kwargs or {}):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def _drawn(model: nn.Module, blocks: Sequence[nn.Module], batch: Any, loss: Loss) -> set[str]:
    """List the operations in the blocks that draw random numbers on this batch."""
    draws_mode = _Draws()

    def enter(*_: Any) -> None:
        draws_mode.depth += 1

    def leave(*_: Any) -> None:
        draws_mode.depth -= 1

    handles = [block.register_forward_pre_hook(enter) for block in blocks]
    handles += [block.register_forward_hook(leave) for block in blocks]
    try:
        with untouched(model), draws_mode:
            loss(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return draws_mode.names
