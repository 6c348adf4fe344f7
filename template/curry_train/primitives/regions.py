"""Keep matrix products and attention, compute norms, activations and their products again: without a dispatch mode.

    apply_regions(model)
    print(report_regions(model, batch, loss).table())    # what is kept, and what an edit of the source could free

Nothing that multiplies matrices runs twice, and no code of the model's own does: a tensor whose making is cheap is made
again from what autograd has kept of its making. Proof: `python -m pytest tests/test_regions.py`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.blocks import CONTAINERS, find_blocks, match_inside
from ..core.derive import Derived, become, class_as_written, restore
from ..core.layers import RunningLayers
from ..core.recipes import Keeper, can_be_made
from ..core.replay import Replay
from ..core.untouched import generator_states, untouched

KEEPER, NAMED = "_regions", "_regions_name"
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class Regions(Derived):
    """A block whose cheap tensors are made again in backward; in eval mode and without grad mode the bare block."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not _active(self):
            return super().forward(*args, **kwargs)
        with self.__dict__[KEEPER].hooks():
            return super().forward(*args, **kwargs)


class Replayed(Derived):
    """A norm, or a module that was named, inside of such a block: it is run once more in backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not _active(self):
            return super().forward(*args, **kwargs)
        name = self.__dict__[NAMED]
        before = generator_states(self) if name else []
        output = Replay(super().forward, args, kwargs).first()
        if name and not all(map(torch.equal, before, generator_states(self))):
            raise ValueError(
                f"{name} draws random numbers, and would draw others the second time: leave it out of also"
            )
        return output


def _active(module: nn.Module) -> bool:
    """The compiler computes cheap operations again by its own choice, so there is nothing to add."""
    return module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def apply_regions(
    model: nn.Module, *, blocks: str | Sequence[str] | None = None, also: Sequence[str] = ()
) -> list[str]:
    """Make the blocks of a model keep products and attention, and the rest as far as it can't be made again; in place.

    Norms inside the blocks are run once more, and modules that `also` names by globs, such as an activation of your
    own: they must draw no random numbers, remember nothing, and be cheap. Returns the blocks' names. Before DDP,
    `fully_shard` and `torch.compile`; compiled code does this by itself.
    """
    found = find_blocks(model, blocks)
    inside = {
        f"{name}.{path}": module
        for name, block in found.items()
        for path, module in block.named_modules()
        if path
    }
    named = match_inside(found, also, option="also")
    for block in found.values():
        become(Regions, block, **{KEEPER: Keeper()})
    for name, module in inside.items():
        if (name in named or _is_norm(module)) and not isinstance(
            module, Replayed
        ):  # a shared one has several names
            become(Replayed, module, **{NAMED: name if name in named else None})
    return list(found)


def remove_regions(model: nn.Module) -> list[str]:
    """Undo `apply_regions`, and return the names of the blocks that had been changed."""
    names = [name for name, module in model.named_modules() if isinstance(module, Regions)]
    for module in list(model.modules()):
        if isinstance(module, Regions | Replayed):
            restore(module, KEEPER, NAMED)
    return names


def _is_norm(module: nn.Module) -> bool:
    """A norm without statistics of its own, by class or, like those of Hugging Face models, by name."""
    named = type(module).__name__.endswith("Norm") and not any(True for _ in module.children())
    bare = not any(True for _ in module.buffers()) and all(
        weight.dim() <= 1 for weight in module.parameters()
    )
    return isinstance(module, NORMS) or (named and bare)


@dataclass(frozen=True)
class Unreached:
    """A tensor that is kept though what it was made of is kept as well: where, by which operation, and the edit."""

    module: str
    made_by: str
    nbytes: int
    edit: str


@dataclass(frozen=True)
class RegionReport:
    """`kept_bytes` of the blocks after forward, parameters aside, and what of it an edit of the source would free."""

    kept_bytes: int
    unreached: tuple[Unreached, ...]

    def table(self) -> str:
        """A line for each kind of tensor, the same in all blocks together; readable at 80 columns."""
        free = sum(row.nbytes for row in self.unreached)
        lines = [
            f"kept in the blocks: {self.kept_bytes / 2**20:,.2f} MiB, of it {free / 2**20:,.2f} not reached"
        ]
        groups: dict[tuple[str, str, str], int] = {}
        for row in self.unreached:
            key = re.sub(r"\d+", "*", row.module), row.made_by, row.edit
            groups[key] = groups.get(key, 0) + row.nbytes
        for (module, made_by, edit), nbytes in sorted(groups.items(), key=lambda group: -group[1]):
            lines += [f"  {nbytes / 2**20:,.2f} MiB in {module}, made by {made_by}", f"    {edit}"]
        return "\n".join(lines)


def report_regions(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]
) -> RegionReport:
    """What the blocks of a model with regions keep, found in one forward, and what they could not reach."""
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, Regions)}
    if not blocks:
        raise ValueError("no block of this model has regions: call apply_regions(model) first")
    owned = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    running = RunningLayers(model, {name: module for name, module in model.named_modules() if name})
    kept: dict[
        int, tuple[str, Tensor]
    ] = {}  # alive, so that no other storage takes the place of one

    def note(tensor: Tensor, base: Tensor) -> None:
        if _storage(tensor) not in owned:
            kept.setdefault(_storage(tensor), (running.current, base))

    keepers = [block.__dict__[KEEPER] for block in blocks.values()]
    with untouched(model), running:
        for keeper in keepers:
            keeper.note = note
        try:
            value = loss(model, batch)
        finally:
            for keeper in keepers:
                keeper.note = None
        makers = {base.grad_fn for _, base in kept.values() if base.grad_fn is not None}
        rows = tuple(
            _unreached(model, where, base)
            for where, base in kept.values()
            if base.grad_fn is not None and can_be_made(base.grad_fn, makers - {base.grad_fn})
        )
        del value  # the graph was needed until here
    return RegionReport(sum(base.untyped_storage().nbytes() for _, base in kept.values()), rows)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unreached(model: nn.Module, where: str, base: Tensor) -> Unreached:
    """The edit that would reach a tensor which was saved while the module `where` ran."""
    node: Any = base.grad_fn
    module = model.get_submodule(where)
    if theirs := _of_torch(module, model.get_submodule(where.rpartition(".")[0])):
        edit = f"{theirs} of torch computes it: replace that module"
    elif any(
        weight.dim() > 1 for weight in module.parameters(recurse=False)
    ):  # its own input; who made it is outside
        where, _, name = where.rpartition(".")
        edit = f"make the input of {name} in a module of its own, and name that with also=[...]"
    elif any(True for _ in module.children()):
        edit = "put the expression into a module of its own, and name that with also=[...]"
    else:
        edit = f'also=["*.{where.rpartition(".")[2]}"] if it is cheap, draws nothing and remembers nothing'
    return Unreached(where, node.name(), base.untyped_storage().nbytes(), edit)


def _of_torch(*modules: nn.Module) -> str | None:
    """The first that has code of torch's own around modules of its own, by its class; containers have none."""
    kinds = [class_as_written(module) for module in modules if any(True for _ in module.children())]
    return next(
        (
            kind.__name__
            for kind in kinds
            if kind.__module__.startswith("torch.") and kind not in CONTAINERS
        ),
        None,
    )
