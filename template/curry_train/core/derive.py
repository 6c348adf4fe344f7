"""The same module under a subclass that changes how it runs: names, hooks, copies and pickles stay what they were.

`fully_shard` swaps a module's class in the same way. Proof: `python -m pytest tests/test_recompute_contract.py`.
"""

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy


class Derived(nn.Module):
    """Base of the mixins that `derive` and `become` put in front of a module's own class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        mixin, original = _parts(type(self))
        return (
            _rebuild,
            (mixin, original),
            self.__getstate__(),
        )  # the derived class has no name to be pickled by


def derive(mixin: type[Derived], module: nn.Module, **attributes: Any) -> Any:
    """A second module over the same parameters, buffers, submodules and hooks, of a class that `mixin` leads."""
    refuse(module)
    new: Any = object.__new__(_derived_class(mixin, type(module)))
    object.__setattr__(new, "__dict__", {**module.__dict__, **attributes})
    return new


def become(mixin: type[Derived], module: nn.Module, **attributes: Any) -> None:
    """Turn the module itself, so that whoever holds it holds the changed one."""
    refuse(module)
    module.__class__ = _derived_class(mixin, type(module))
    module.__dict__.update(attributes)


def restore(module: nn.Module, *attributes: str) -> None:
    """Undo `become`."""
    if "_parts" not in vars(type(module)):
        raise ValueError(
            f"{type(module).__name__} was wrapped again since (by fully_shard?), so this can't be undone"
        )
    module.__class__ = _parts(type(module))[1]
    for name in attributes:
        module.__dict__.pop(name, None)


def refuse(module: nn.Module) -> None:
    """Say why this module can't be derived from."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"a module is needed, got {type(module).__name__}")
    name, own = type(module).__name__, module.__dict__
    if isinstance(module, Derived):
        raise ValueError(
            f"{name} is wrapped already, and twice would run its forward three times; wrap it once"
        )
    if "forward" in own:
        raise ValueError(
            f"{name} has a forward of its own on the instance (compiled, or hooked): wrap it before that"
        )
    if own.get("_compiled_call_impl") is not None:
        raise ValueError(
            f"{name} is compiled already, and would run as compiled: wrap first, compile afterwards"
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ValueError("wrap the blocks before DistributedDataParallel wraps the model")
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        raise ValueError(f"{name} has no parameters yet: run one batch through it first")


_classes: dict[tuple[type, type], Any] = {}


def class_as_written(module: nn.Module) -> type:
    """The class that the model's source gives the module, whatever was derived from it."""
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
    """Others, such as `fully_shard`, may have derived a class from ours."""
    ours: Any = next(kind for kind in derived.__mro__ if "_parts" in vars(kind))
    parts: tuple[type, type] = ours._parts
    return parts


def _rebuild(mixin: type, original: type) -> Any:
    return object.__new__(_derived_class(mixin, original))
