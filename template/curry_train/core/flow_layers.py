"""Which modules of a model are probed as layers, and which parameters each of them answers for.

Proof: `python -m pytest tests/test_grad_flow_layers.py`.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from .blocks import NoBlocks, find_blocks, match_names

MOST = 400  # layers; a model with more is probed by blocks, and outside of them by modules that own parameters
ACTIVATIONS = (
    "activation",
    "activations",
)  # modules of torch and of Hugging Face that hold nothing but ReLU's kind


@dataclass(frozen=True)
class Layer:
    """`parameters` are this layer's by name, each counted once where several layers share it: `tied` are those that an
    earlier layer counts. `frozen` ones require no gradient."""

    name: str
    module: nn.Module
    is_block: bool
    parameters: tuple[str, ...]
    tied: tuple[str, ...]
    frozen: tuple[str, ...]


def choose_layers(
    model: nn.Module,
    layers: str | Sequence[str] | None = None,
    *,
    blocks: str | Sequence[str] | None = None,
) -> list[Layer]:
    """The layers that globs over module names take. Without globs: the blocks, the modules that own parameters, and
    activations, which own none but die; of a model with very many of them the blocks and what is around them."""
    named = {name: module for name, module in model.named_modules() if name}
    try:
        found = list(find_blocks(model, blocks))
    except NoBlocks:
        found = []
    if layers is None:
        taken = {
            name
            for name, module in named.items()
            if name in found or _owns(module) or _is_activation(module)
        }
        if len(taken) > MOST:
            taken = {name for name in taken if name in found or not _inside(name, found)}
    else:
        globs = [layers] if isinstance(layers, str) else layers
        taken = {name for glob in globs for name in match_names(list(named), glob, option="layers")}
    names = [name for name in named if name in taken]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no module with parameters to probe: name some with layers="
        )
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(f"{lazy[0]} has no shape yet: run one batch through the model first")
    return _with_parameters(model, names, found, named)


def _with_parameters(
    model: nn.Module, names: list[str], blocks: list[str], named: dict[str, nn.Module]
) -> list[Layer]:
    """Each parameter is the business of the first of its names that lies in a layer."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(alias)
    counted: dict[str, list[str]] = {name: [] for name in names}
    tied, frozen = copy.deepcopy(counted), copy.deepcopy(counted)
    for parameter, found in aliases.items():
        around = {alias: [name for name in _parents(alias) if name in counted] for alias in found}
        home = next((alias for alias in found if around[alias]), None)
        for alias in found:
            for name in around[alias]:
                if not parameter.requires_grad:
                    frozen[name].append(alias)
                elif home is not None and name in around[home]:
                    counted[name].append(found[0])
                else:
                    tied[name].append(home or alias)
    once = [
        {name: tuple(dict.fromkeys(found)) for name, found in kind.items()}
        for kind in (counted, tied, frozen)
    ]
    return [
        Layer(name, named[name], name in blocks, *(kind[name] for kind in once)) for name in names
    ]


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _inside(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _owns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _is_activation(module: nn.Module) -> bool:
    leaf = not any(True for _ in module.children())
    return leaf and type(module).__module__.rpartition(".")[2] in ACTIVATIONS
