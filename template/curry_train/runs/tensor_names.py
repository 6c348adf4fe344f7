"""Names of a model's tensors as the bare model has them: no wrapper's prefix reaches the disk.

`torch.compile`, DistributedDataParallel, DataParallel and checkpoint wrappers each put a module around another, and
its attribute into every name. Proof: `python -m pytest tests/test_state.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def bare_name(model: nn.Module, name: str) -> str:
    """A name of `model.state_dict()` or `named_parameters()` without what wrappers put into it."""
    module: Any = model
    kept = []
    for part in name.split("."):
        while (
            module is not None
            and part not in module._modules
            and (inner := _wrapped(module)) is not None
        ):
            module = inner[1]  # a wrapper whose own hooks cleaned the name
        inner = _wrapped(module) if module is not None else None
        if inner is None or part != inner[0]:
            kept.append(part)
        module = module._modules.get(part) if module is not None else None
    return ".".join(kept)


def _wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """The attribute under which a wrapper holds a module, and the module."""
    names = ("module",) if isinstance(module, _PARALLEL) else _ATTRIBUTES
    for name in names:
        if isinstance(inner := module._modules.get(name), nn.Module):
            return name, inner
    return None


def bare_names(model: nn.Module, names: Mapping[str, Any]) -> dict[str, Any]:
    """The same mapping under bare names."""
    renamed = {bare_name(model, name): value for name, value in names.items()}
    if len(renamed) != len(names):
        raise ValueError(
            "two of the model's tensors have one name once wrappers are left out: rename one of them"
        )
    return renamed


def split_ties(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, under its first name, and which further names stand for it."""
    first: dict[Any, str] = {}
    own, ties = {}, {}
    for name, tensor in tensors.items():
        identity = _identity(tensor)
        if identity in first:
            ties[name] = first[identity]
        else:
            own[name] = tensor
            first[identity] = name
    return own, ties


def same_memory(first: Tensor, second: Tensor) -> bool:
    """Whether a change of one is a change of the other."""
    return first is second or _identity(first) == _identity(second) or not first.numel()


def _identity(tensor: Tensor) -> Any:
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    held = local() if local else tensor
    if not held.numel() or held.is_meta:
        return object()
    return (
        held.device,
        held.untyped_storage().data_ptr(),
        held.storage_offset(),
        held.shape,
        held.stride(),
        held.dtype,
    )
