"""Where a function could keep something from one call to the next: modules, objects and variables that it reaches.

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

BARE = frozenset(vars(nn.Module()))  # hooks, submodules and the like, which every module has
DEEPEST = 3  # functions and objects on the way from a function to a module


@dataclass(frozen=True)
class Place:
    """Named values: the attributes of a module or an object, a module's buffers, or a function's variables.

    `statistics` are those of BatchNorm, which matter to no forward in training mode. A module's tensors are small
    enough to be copied; a variable may be a whole data set.
    """

    name: str
    kind: str
    where: str
    values: MutableMapping[str, Any]
    statistics: frozenset[str] = frozenset()

    @property
    def is_module(self) -> bool:
        return self.where == "buffer" or self.values.keys() >= BARE

    def names(self) -> list[str]:
        return [name for name in self.values if self.where != "attribute" or name not in BARE]


class Variables(MutableMapping[str, Any]):
    """What a function took from the one around it, less what can hold no values of its own."""

    def __init__(self, cells: dict[str, Any]) -> None:
        own = (nn.Module, type, FunctionType, ModuleType)
        self._cells = {
            name: cell for name, cell in cells.items() if not isinstance(cell.cell_contents, own)
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
    """What stays the same where a method, lambda or partial is made anew for each use."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def roots_of(function: Any) -> dict[str, nn.Module]:
    """The modules that a function reaches, by the name it knows them by; "" is the one that it is a method of."""
    return {
        name: found for name, found in _reached(function).items() if isinstance(found, nn.Module)
    }


def places_of(function: Any) -> list[Place]:
    """Every place where a function could keep something."""
    places: list[Place] = []
    for name, found in _reached(function).items():
        if isinstance(found, Variables):
            places.append(Place(name, "function", "variable", found))
        elif not isinstance(found, nn.Module):
            places.append(Place(name, type(found).__name__, "attribute", vars(found)))
    for name, module in _modules_of(roots_of(function)).items():
        kind, statistics = type(module).__name__, frozenset[str]()
        if isinstance(module, _NormBase):
            statistics = frozenset(module._buffers)
        places.append(Place(name, kind, "attribute", vars(module)))
        places.append(Place(name, kind, "buffer", module._buffers, statistics))
    return places


def _modules_of(roots: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """All modules by name, with those in lists and dicts, where neurons without parameters are often kept."""
    waiting, found, seen = list(roots.items()), dict[str, nn.Module](), set[int]()
    while waiting:
        root, module = waiting.pop(0)
        for path, part in module.named_modules():
            if id(part) in seen:
                continue
            seen.add(id(part))
            found[name := _join(root, path)] = part
            for key, value in vars(part).items():
                if key not in BARE and isinstance(value, list | tuple | dict):
                    waiting += [
                        (_join(name, each), inner) for each, inner in _modules_in(key, value)
                    ]
    return found


def _modules_in(name: str, container: Any) -> list[tuple[str, nn.Module]]:
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    return [(_join(name, key), part) for key, part in pairs if isinstance(part, nn.Module)]


def _reached(function: Any) -> dict[str, Any]:
    """Modules, objects and variables by name, nearest first."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any, int]] = [("", function, 0)]
    seen = set[int]()
    while waiting:
        name, value, depth = waiting.pop(0)
        if id(value) in seen or depth > DEEPEST:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found[name] = value
        elif isinstance(value, functools.partial):
            parts: dict[Any, Any] = {
                "": value.func,
                **dict(enumerate(value.args)),
                **value.keywords,
            }
            waiting += [(_join(name, key), part, depth) for key, part in parts.items()]
        elif inspect.ismethod(value):
            waiting += [(name, value.__self__, depth), (name, value.__func__, depth)]
        elif isinstance(value, FunctionType):
            cells = _filled_cells(value)
            if len(variables := Variables(cells)):
                found[_join(name, value.__name__)] = variables
            waiting += [(key, cell.cell_contents, depth + 1) for key, cell in cells.items()]
            waiting += [(key, part, depth + 1) for key, part in _globals_of(value).items()]
        elif isinstance(value, list | tuple | dict):
            waiting += [(key, part, depth + 1) for key, part in _modules_in(name, value)]
        elif is_object(value):
            found[name or type(value).__name__] = value
            parts = vars(value)
            waiting += [
                (_join(name, key), parts[key], depth + 1)
                for key in parts
                if isinstance(parts[key], nn.Module)
            ]
    return found


def _filled_cells(function: FunctionType) -> dict[str, Any]:
    """A variable that is not set yet has a cell without contents."""
    names = function.__code__.co_freevars
    filled = inspect.getclosurevars(function).nonlocals if names else {}
    return {
        name: cell
        for name, cell in zip(names, function.__closure__ or (), strict=True)
        if name in filled
    }


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """Modules and neighbouring functions that a function finds in the file that it is written in."""
    used = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    return {
        name: part
        for name, part in used.items()
        if isinstance(part, nn.Module)
        or (isinstance(part, FunctionType) and part.__globals__ is function.__globals__)
    }


def _join(name: str, key: Any) -> str:
    return ".".join(part for part in (name, str(key)) if part)


def is_object(value: Any) -> bool:
    """Somebody's own object with attributes, and nothing of Python's or torch's."""
    own = type(value).__module__.split(".")[0] not in {"torch", *sys.stdlib_module_names} - {
        "__main__"
    }
    return own and hasattr(value, "__dict__") and not isinstance(value, type | Tensor | nn.Module)
