"""Tensor names without the prefixes of wrappers such as DDP and `torch.compile`.

`torch.compile`, DistributedDataParallel, DataParallel and checkpoint wrappers each wrap a module in
another, whose attribute then appears in every name.
Proof: `python -m pytest tests/test_state.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


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
        module = module._modules.get(step) if module is not None else None
    return ".".join(bare_path)


def _wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the attribute in which a wrapper holds a module, and the module."""
    names = ("module",) if isinstance(module, _PARALLEL) else _ATTRIBUTES
    for name in names:
        if isinstance(inner := module._modules.get(name), nn.Module):
            return name, inner
    return None


def bare_names(model: nn.Module, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same mapping with bare names as keys."""
    renamed = {bare_name(model, name): value for name, value in names.items()}
    if len(renamed) != len(names):
        raise ValueError(
            "two of the model's tensors have the same name without the prefixes of wrappers: "
            "rename one of them"
        )
    return renamed


def split_ties(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor under its first name, and each further name with the first one."""
    first: dict[Any, str] = {}
    own: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors.items():
        identity = _identity(tensor)
        if identity in first:
            ties[name] = first[identity]
        else:
            own[name] = tensor
            first[identity] = name
    return own, ties


def same_memory(first: Tensor, second: Tensor) -> bool:
    """Return whether changing one tensor changes the other."""
    return first is second or _identity(first) == _identity(second) or not first.numel()


def _identity(tensor: Tensor) -> Any:
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    data = local() if local else tensor
    if not data.numel() or data.is_meta:
        return object()
    return (
        data.device,
        data.untyped_storage().data_ptr(),
        data.storage_offset(),
        data.shape,
        data.stride(),
        data.dtype,
    )
