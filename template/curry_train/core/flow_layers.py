"""Selection of the layers that grad-flow probes, and assignment of parameters to them.

Proof: `python -m pytest tests/test_grad_flow_layers.py`.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from .blocks import NoBlocks, find_blocks, match_names

# Maximum number of layers by default. If there were more, modules inside of blocks are not probed.
MOST = 400
# Python modules of torch and Hugging Face that contain only activations such as ReLU.
ACTIVATIONS = ("activation", "activations")


@dataclass(frozen=True)
class Layer:
    """A probed module and the names of its parameters."""

    # Qualified name in the model.
    name: str
    module: nn.Module
    # Whether it is one of the model's repeated blocks.
    is_block: bool
    # Trainable parameters that count for this layer; a shared one counts for one layer only.
    parameters: tuple[str, ...]
    # Trainable parameters that count for an earlier layer.
    tied: tuple[str, ...]
    # Parameters that require no gradient.
    frozen: tuple[str, ...]


def choose_layers(
    model: nn.Module,
    layers: str | Sequence[str] | None = None,
    *,
    blocks: str | Sequence[str] | None = None,
) -> list[Layer]:
    """Return the layers to probe: those that match the globs over module names, or a default.

    The default is the blocks, the modules that own parameters, and activations, which own none but
    can be dead. If that is more than `MOST`, modules inside of blocks are left out.
    """
    named = {name: module for name, module in model.named_modules() if name}
    try:
        block_names = list(find_blocks(model, blocks))
    except NoBlocks:
        block_names = []

    if layers is None:
        chosen = {
            name
            for name, module in named.items()
            if name in block_names or _owns(module) or _is_activation(module)
        }
        if len(chosen) > MOST:
            chosen = {
                name for name in chosen if name in block_names or not _inside(name, block_names)
            }
    else:
        globs = [layers] if isinstance(layers, str) else layers
        chosen = {
            name for glob in globs for name in match_names(list(named), glob, option="layers")
        }

    names = [name for name in named if name in chosen]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no module with parameters to probe: "
            "name modules with layers="
        )
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(f"{lazy[0]} has no shape yet: run one batch through the model first")
    return _with_parameters(model, names, block_names, named)


def _with_parameters(
    model: nn.Module, names: list[str], blocks: list[str], named: dict[str, nn.Module]
) -> list[Layer]:
    """Assign each parameter to the layers around the first of its names that is in a layer."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(alias)

    counted: dict[str, list[str]] = {name: [] for name in names}
    tied = copy.deepcopy(counted)
    frozen = copy.deepcopy(counted)
    for parameter, parameter_names in aliases.items():
        around: dict[str, list[str]] = {}
        for alias in parameter_names:
            around[alias] = [name for name in _parents(alias) if name in counted]
        home = next((alias for alias in parameter_names if around[alias]), None)
        for alias in parameter_names:
            for name in around[alias]:
                if not parameter.requires_grad:
                    frozen[name].append(alias)
                elif home is not None and name in around[home]:
                    counted[name].append(parameter_names[0])
                else:
                    tied[name].append(home or alias)

    return [
        Layer(
            name,
            named[name],
            is_block=name in blocks,
            parameters=tuple(dict.fromkeys(counted[name])),
            tied=tuple(dict.fromkeys(tied[name])),
            frozen=tuple(dict.fromkeys(frozen[name])),
        )
        for name in names
    ]


def _parents(name: str) -> list[str]:
    """Return the qualified names of all modules around a parameter, outermost first."""
    segments = name.split(".")
    return [".".join(segments[:end]) for end in range(1, len(segments))]


def _inside(name: str, modules: Sequence[str]) -> bool:
    """Return whether a name lies below one of the modules."""
    return any(name.startswith(f"{module}.") for module in modules)


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _is_activation(module: nn.Module) -> bool:
    is_leaf = next(module.children(), None) is None
    return is_leaf and type(module).__module__.rpartition(".")[2] in ACTIVATIONS
