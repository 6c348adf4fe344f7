"""Name a model's tensors the same under any wrapper.

Names leave out the prefixes of wrappers such as DDP and `torch.compile`, so that a checkpoint loads
into a model that is wrapped differently, or not at all.

Proof: `python -m pytest tests/runs/test_state.py`.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

# Tensor names without the prefixes of wrappers such as DDP and `torch.compile`.

_WRAPPED_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_PARALLEL_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def bare_name(model: nn.Module, name: str) -> str:
    """Return a name of `model.state_dict()` or `named_parameters()` without wrapper prefixes."""
    module: Any = model
    bare_path = []
    for step in name.split("."):
        # Some wrappers remove their attribute from the name with hooks of their own.
        while (
            module is not None
            and step not in module._modules
            and (wrapped := _wrapped(module)) is not None
        ):
            module = wrapped[1]

        wrapped = _wrapped(module) if module is not None else None
        if wrapped is None or step != wrapped[0]:
            bare_path.append(step)
        # A scripted module has no dict of its parts.
        module = module._modules[step] if module is not None and step in module._modules else None
    return ".".join(bare_path)


def _wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the attribute in which a wrapper holds a module, and the module."""
    names = ("module",) if isinstance(module, _PARALLEL_WRAPPERS) else _WRAPPED_ATTRIBUTES
    for name in names:
        if isinstance(inner := getattr(module, name, None), nn.Module):
            return name, inner
    return None


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Return the module that wrappers such as DDP and `torch.compile` hold."""
    while (wrapped := _wrapped(module)) is not None:
        module = wrapped[1]
    return module


def bare_names(model: nn.Module, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same mapping with bare names as keys."""
    renamed = {bare_name(model, name): value for name, value in names.items()}
    if len(renamed) != len(names):
        raise ValueError(
            "two of the model's tensors have the same name without the prefixes of wrappers: "
            "rename one of them"
        )
    return renamed


def parameter_names(model: nn.Module) -> dict[Any, str]:
    """Map each parameter to its name without wrapper prefixes."""
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "FSDP1 keeps parameters in flat pieces without names: use fully_shard (FSDP2)"
            )
    return {parameter: bare_name(model, name) for name, parameter in model.named_parameters()}
