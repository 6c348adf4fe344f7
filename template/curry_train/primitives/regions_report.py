"""Report what blocks with regions hold, and the edits of the source that would free more.

    apply_regions(model)
    print(report_regions(model, batch, loss).table())

Proof: `python -m pytest tests/primitives/test_regions.py`.
"""

import contextlib
import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..core.blocks import CONTAINER_TYPES, class_as_written
from ..core.generators import untouched
from .regions import REGIONS_ATTRIBUTE, Regions

EXPENSIVE_NODES = (
    "Mm",
    "Addmm",
    "Bmm",
    "Baddbmm",
    "Convolution",
    "ScaledDotProduct",
    "Linear",
    "Embedding",
    "Native",
)


def can_be_made(node: Any, kept: Container[Any]) -> bool:
    """Return whether cheap operations alone can compute a node's output from saved outputs."""
    if node.name().startswith(EXPENSIVE_NODES):
        return False
    makers = [maker for maker, _ in node.next_functions if maker is not None]
    if not makers:
        return False
    return all(
        maker in kept or hasattr(maker, "variable") or can_be_made(maker, kept) for maker in makers
    )


@dataclass(frozen=True)
class Unreached:
    """A saved tensor that could be recomputed from other saved tensors, and the edit to do so."""

    # The module that ran when the tensor was saved.
    module: str
    # The autograd node that computed it.
    made_by: str
    nbytes: int
    # The change of the source that would free it.
    edit: str


@dataclass(frozen=True)
class RegionReport:
    """Bytes held by blocks with regions, and how many an edit of the source would free."""

    # After the forward, without parameters.
    kept_bytes: int
    unreached: tuple[Unreached, ...]

    def table(self) -> str:
        """Render one entry per kind of tensor, summed over the blocks, in 80 columns."""
        free = sum(row.nbytes for row in self.unreached)
        lines = [
            f"held in the blocks: {self.kept_bytes / 2**20:,.2f} MiB, "
            f"of which {free / 2**20:,.2f} not reached"
        ]
        groups: dict[tuple[str, str, str], int] = {}
        for row in self.unreached:
            key = re.sub(r"\d+", "*", row.module), row.made_by, row.edit
            groups[key] = groups.get(key, 0) + row.nbytes
        for (module, made_by, edit), nbytes in sorted(groups.items(), key=lambda group: -group[1]):
            lines.append(f"  {nbytes / 2**20:,.2f} MiB in {module}, computed by {made_by}")
            lines.append(f"    {edit}")
        return "\n".join(lines)


def report_regions(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]
) -> RegionReport:
    """Run one forward and report the bytes that the blocks hold and those not reached."""
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, Regions)}
    if not blocks:
        raise ValueError("no block of this model has regions: call apply_regions(model) first")

    owned = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    # Holds the tensors alive, so that no new storage gets the address of a freed one.
    saved: dict[int, tuple[str, Tensor]] = {}

    all_hooks = [block.__dict__[REGIONS_ATTRIBUTE] for block in blocks.values()]
    with untouched(model), _running_modules(model) as running:

        def note(tensor: Tensor, base: Tensor) -> None:
            if _storage(tensor) not in owned:
                saved.setdefault(_storage(tensor), (running[-1], base))

        for hooks in all_hooks:
            hooks.note = note
        try:
            value = loss(model, batch)
        finally:
            for hooks in all_hooks:
                hooks.note = None
        makers = {base.grad_fn for _, base in saved.values() if base.grad_fn is not None}
        rows = tuple(
            _unreached(model, where, base)
            for where, base in saved.values()
            if base.grad_fn is not None and can_be_made(base.grad_fn, makers - {base.grad_fn})
        )
        del value  # the graph was needed until here
    return RegionReport(sum(base.untyped_storage().nbytes() for _, base in saved.values()), rows)


@contextlib.contextmanager
def _running_modules(model: nn.Module) -> Iterator[list[str]]:
    """Yield the names of the modules that run at the moment, innermost last."""
    running = [""]
    handles: list[Any] = []
    for name, module in model.named_modules():

        def enter(*_: Any, name: str = name) -> None:
            running.append(name)

        def leave(*_: Any) -> None:
            running.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unreached(model: nn.Module, where: str, base: Tensor) -> Unreached:
    """Choose the edit that would free a tensor saved while the module `where` ran."""
    node: Any = base.grad_fn
    module = model.get_submodule(where)
    has_matrix = any(weight.dim() > 1 for weight in module.parameters(recurse=False))
    if torch_class := _of_torch(module, model.get_submodule(where.rpartition(".")[0])):
        edit = f"torch's {torch_class} computes it: replace that module"
    elif has_matrix:  # the tensor is the module's input, computed outside of it
        where, _, name = where.rpartition(".")
        edit = f"compute the input of {name} in its own module, and name that with also=[...]"
    elif any(True for _ in module.children()):
        edit = "move the expression into its own module, and name that with also=[...]"
    else:
        edit = (
            f'also=["*.{where.rpartition(".")[2]}"] if it is cheap, draws no random numbers '
            "and holds no state"
        )
    return Unreached(where, node.name(), base.untyped_storage().nbytes(), edit)


def _of_torch(*modules: nn.Module) -> str | None:
    """Name the first module class of torch with children, other than containers, if any."""
    for module in modules:
        if not list(module.children()):
            continue
        kind = class_as_written(module)
        if kind.__module__.startswith("torch.") and kind not in CONTAINER_TYPES:
            return kind.__name__
    return None
