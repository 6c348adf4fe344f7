"""Modules whose class is replaced by a subclass that changes how they run.

Names, hooks, copies and pickles keep working. `fully_shard` replaces a module's class in the same
way.

Proof: `python -m pytest tests/test_recompute_contract.py`.
"""

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy


class Derived(nn.Module):
    """Base of mixins that `derive` and `become` put before a module's own class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        mixin, original = _parts(type(self))
        # The derived class can't be imported by name, so pickle rebuilds it from its two bases.
        return _rebuild, (mixin, original), self.__getstate__()


def derive(mixin: type[Derived], module: nn.Module, **attributes: Any) -> Any:
    """Return a module of a class led by `mixin`, sharing parameters, submodules and hooks.

    Buffers are shared too. `attributes` are set on the new module only.
    """
    refuse(module)
    new: Any = object.__new__(_derived_class(mixin, type(module)))
    object.__setattr__(new, "__dict__", {**module.__dict__, **attributes})
    return new


def become(mixin: type[Derived], module: nn.Module, **attributes: Any) -> None:
    """Change the class of the module in place, which applies to all references to it."""
    refuse(module)
    module.__class__ = _derived_class(mixin, type(module))
    module.__dict__.update(attributes)


def restore(module: nn.Module, *attributes: str) -> None:
    """Undo `become`."""
    if "_parts" not in vars(type(module)):
        raise ValueError(
            f"{type(module).__name__} was wrapped again afterwards (by fully_shard?), "
            "so its class can't be restored"
        )
    module.__class__ = _parts(type(module))[1]
    for name in attributes:
        module.__dict__.pop(name, None)


def refuse(module: nn.Module) -> None:
    """Raise an error if the class of this module can't be replaced."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"a module is needed, got {type(module).__name__}")
    name = type(module).__name__
    attributes = module.__dict__
    if isinstance(module, Derived):
        raise ValueError(
            f"{name} is wrapped already, and a second wrapper would run its forward three times; "
            "wrap it once"
        )
    if "forward" in attributes:
        raise ValueError(
            f"{name} has a forward of its own on the instance (compiled, or hooked): "
            "wrap the module before forward is replaced"
        )
    if attributes.get("_compiled_call_impl") is not None:
        raise ValueError(
            f"{name} is compiled already, and its compiled code would bypass the wrapper: "
            "wrap first, compile afterwards"
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ValueError("wrap the blocks before DistributedDataParallel wraps the model")
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        raise ValueError(f"{name} has no parameters yet: run one batch through it first")


_classes: dict[tuple[type, type], Any] = {}


def class_as_written(module: nn.Module) -> type:
    """Return the module's class as the model defines it, before any `derive` or `become`."""
    kind = type(module)
    while issubclass(kind, Derived):
        kind = _parts(kind)[1]
    return kind


def _derived_class(mixin: type, original: type) -> Any:
    key = mixin, original
    if key not in _classes:
        space = {"__module__": original.__module__, "__doc__": original.__doc__, "_parts": key}
        _classes[key] = type(f"{mixin.__name__}{original.__name__}", key, space)
    return _classes[key]


def _parts(derived: Any) -> tuple[type, type]:
    """Return the mixin and the original class, also if `fully_shard` subclassed the result."""
    ours: Any = next(kind for kind in derived.__mro__ if "_parts" in vars(kind))
    mixin_and_original: tuple[type, type] = ours._parts
    return mixin_and_original


def _rebuild(mixin: type, original: type) -> Any:
    return object.__new__(_derived_class(mixin, original))
