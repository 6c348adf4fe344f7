"""Places where a function can keep state between calls: modules, objects and variables.

    for place in places_of(model.step):
        print(place.name, place.names())

Proof: `python -m pytest tests/test_snn_timesteps_refusals.py`.
"""

import functools
import inspect
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

# Attributes that every module has, such as hooks and submodules.
BARE = frozenset(vars(nn.Module()))
# Maximum number of functions and objects between the given function and what it reaches.
DEEPEST = 3


@dataclass(frozen=True)
class Place:
    """Named values of a module, an object or a function that may change between calls.

    A module's tensors are small enough to be copied; a variable may be a whole data set.
    """

    # Path of the module, object or function.
    name: str
    # Name of its class, or "function".
    kind: str
    # "attribute", "buffer" or "variable".
    where: str
    # The live mapping that holds the values.
    values: MutableMapping[str, Any]
    # Names of BatchNorm's running statistics, which no forward in training mode reads.
    statistics: frozenset[str] = frozenset()

    @property
    def is_module(self) -> bool:
        return self.where == "buffer" or self.values.keys() >= BARE

    def names(self) -> list[str]:
        return [name for name in self.values if self.where != "attribute" or name not in BARE]


class Variables(MutableMapping[str, Any]):
    """Closure variables of a function, less modules, classes, functions and imports."""

    def __init__(self, cells: dict[str, Any]) -> None:
        excluded = (nn.Module, type, FunctionType, ModuleType)
        self._cells = {
            name: cell
            for name, cell in cells.items()
            if not isinstance(cell.cell_contents, excluded)
        }

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def code_of(function: Any) -> Any:
    """Return a function's code, or an object's class.

    It stays the same where a method, lambda or partial is created anew for each use.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def roots_of(function: Any) -> dict[str, nn.Module]:
    """Return the modules that a function reaches, by name; "" is the module of a method."""
    return {
        name: value for name, value in _reached(function).items() if isinstance(value, nn.Module)
    }


def places_of(function: Any) -> list[Place]:
    """List every place where a function can keep state."""
    places: list[Place] = []
    for name, value in _reached(function).items():
        if isinstance(value, Variables):
            places.append(Place(name, "function", "variable", value))
        elif not isinstance(value, nn.Module):
            places.append(Place(name, type(value).__name__, "attribute", vars(value)))

    for name, module in _modules_of(roots_of(function)).items():
        kind = type(module).__name__
        is_norm = isinstance(module, _NormBase)
        statistics = frozenset(module._buffers) if is_norm else frozenset[str]()
        places.append(Place(name, kind, "attribute", vars(module)))
        places.append(Place(name, kind, "buffer", module._buffers, statistics))
    return places


def _modules_of(roots: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return all modules by name, also those in lists and dicts.

    Spiking neurons without parameters are often kept in plain containers.
    """
    waiting = list(roots.items())
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    while waiting:
        root, module = waiting.pop(0)
        for path, submodule in module.named_modules():
            if id(submodule) in seen:
                continue
            seen.add(id(submodule))
            name = _join(root, path)
            found[name] = submodule
            for key, value in vars(submodule).items():
                if key not in BARE and isinstance(value, list | tuple | dict):
                    waiting += [
                        (_join(name, inner_name), inner)
                        for inner_name, inner in _modules_in(key, value)
                    ]
    return found


def _modules_in(name: str, container: Any) -> list[tuple[str, nn.Module]]:
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    return [(_join(name, key), value) for key, value in pairs if isinstance(value, nn.Module)]


def _reached(function: Any) -> dict[str, Any]:
    """Return modules, objects and variables by name, nearest first."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any, int]] = [("", function, 0)]
    seen: set[int] = set()
    while waiting:
        name, value, depth = waiting.pop(0)
        if id(value) in seen or depth > DEEPEST:
            continue
        seen.add(id(value))

        if isinstance(value, nn.Module):
            found[name] = value
        elif isinstance(value, functools.partial):
            bound: dict[Any, Any] = {
                "": value.func,
                **dict(enumerate(value.args)),
                **value.keywords,
            }
            waiting += [(_join(name, key), member, depth) for key, member in bound.items()]
        elif inspect.ismethod(value):
            waiting += [(name, value.__self__, depth), (name, value.__func__, depth)]
        elif isinstance(value, FunctionType):
            cells = _filled_cells(value)
            variables = Variables(cells)
            if len(variables):
                found[_join(name, value.__name__)] = variables
            waiting += [(key, cell.cell_contents, depth + 1) for key, cell in cells.items()]
            waiting += [(key, member, depth + 1) for key, member in _globals_of(value).items()]
        elif isinstance(value, list | tuple | dict):
            waiting += [(key, member, depth + 1) for key, member in _modules_in(name, value)]
        elif is_object(value):
            found[name or type(value).__name__] = value
            waiting += [
                (_join(name, key), member, depth + 1)
                for key, member in vars(value).items()
                if isinstance(member, nn.Module)
            ]
    return found


def _filled_cells(function: FunctionType) -> dict[str, Any]:
    """Return a function's closure cells by name, without variables that are not set yet."""
    names = function.__code__.co_freevars
    filled = inspect.getclosurevars(function).nonlocals if names else {}
    return {
        name: cell
        for name, cell in zip(names, function.__closure__ or (), strict=True)
        if name in filled
    }


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """Return the global modules that a function uses, and functions of the same file."""
    used = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    return {
        name: value
        for name, value in used.items()
        if isinstance(value, nn.Module)
        or (isinstance(value, FunctionType) and value.__globals__ is function.__globals__)
    }


def _join(name: str, key: Any) -> str:
    return ".".join(segment for segment in (name, str(key)) if segment)


def is_object(value: Any) -> bool:
    """Return whether a value is an object of a class outside torch and the standard library."""
    libraries = {"torch", *sys.stdlib_module_names} - {"__main__"}
    is_foreign = type(value).__module__.split(".")[0] not in libraries
    has_attributes = hasattr(value, "__dict__")
    return is_foreign and has_attributes and not isinstance(value, type | Tensor | nn.Module)
