"""Snapshots of attributes, containers and tensor contents, to compare and to restore.

    kept = keep(places_of(step))
    step(x, state)
    kept.put_back()

Proof: `python -m pytest tests/test_snn_timesteps_refusals.py`.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attributes import Place, is_object

# A longer container is data: its entries are not recorded, only its length.
LONGEST = 1000

PLAIN = (bool, int, float, complex, str, bytes, type(None))

# Copies by identity and version of the tensor, so that each tensor is copied once.
Copies = dict[tuple[int, int], tuple[Tensor, Tensor]]

# The name of a place, which of its values (`Place.where`), and the name of one value.
Key = tuple[str, str, str]


class Kept:
    """One recorded value and, if it `is_open`, everything in it.

    With `copies`, writes into a tensor can be undone. Containers that are long or deeply nested,
    and the objects that an object holds, are not recorded.
    """

    def __init__(self, value: Any, *, copies: Copies | None, depth: int = 4) -> None:
        holds_entries = is_container(value)
        self.value = value
        self.length = len(value) if holds_entries else 0
        self.version = version_of(value)
        self.copy: Tensor | None = None
        if copies is not None and isinstance(value, Tensor):
            self.copy = _copy(value, copies)

        min_depth = 0 if holds_entries else 2
        self.is_open = (
            (holds_entries or is_object(value)) and depth > min_depth and self.length <= LONGEST
        )
        contents = _parts(value) if self.is_open else {}
        inner_depth = depth - (1 if holds_entries else 2)
        self.inside = {
            key: Kept(entry, copies=copies, depth=inner_depth) for key, entry in contents.items()
        }

    def put_back(self) -> Any:
        """Restore the contents of the value and return it."""
        for entry in self.inside.values():
            entry.put_back()

        # Values are compared, because BatchNorm writes without counting up the version.
        if self.copy is not None and not _is_equal(self.value.detach(), self.copy):
            with torch.no_grad():
                if self.value.shape == self.copy.shape:
                    self.value.copy_(self.copy)
                else:
                    self.value.set_(self.copy.clone())
        if self.is_open and not _holds(self.value, self.inside):
            _fill(self.value, {key: entry.value for key, entry in self.inside.items()})
        return self.value

    def rebuilt(self, change: Callable[[Any], Any]) -> Any:
        """Build a separate value in which `change` is applied to every tensor and plain value."""
        if isinstance(self.value, Tensor):
            return change(self.value.detach().clone() if self.copy is None else self.copy.clone())
        if not self.is_open:
            return change(self.value)

        contents = {key: entry.rebuilt(change) for key, entry in self.inside.items()}
        if isinstance(self.value, tuple):
            tuple_type = type(self.value)
            if hasattr(tuple_type, "_fields"):
                return tuple_type(*contents.values())
            return tuple_type(contents.values())
        new = copy.copy(self.value)
        _fill(new, contents)
        return new

    def changed(self, later: "Kept") -> bool:
        """Return whether the later value is another one.

        A tensor that was replaced or written into counts as changed, whatever it holds.
        """
        if isinstance(self.value, PLAIN) and isinstance(later.value, PLAIN):
            return type(self.value) is not type(later.value) or bool(self.value != later.value)
        if self.value is not later.value or self.is_written(later) or self.length != later.length:
            return True
        if list(self.inside) != list(later.inside):
            return True
        return any(entry.changed(later.inside[key]) for key, entry in self.inside.items())

    def is_written(self, later: "Kept") -> bool:
        """Return whether a tensor in the value was written into."""
        if self.value is later.value and self.version != later.version:
            return True
        return any(
            entry.is_written(later.inside[key])
            for key, entry in self.inside.items()
            if key in later.inside
        )


def is_container(value: Any) -> bool:
    return isinstance(value, list | tuple | dict | deque)


def version_of(value: Any) -> int:
    """Return how often a tensor was written into; 0 for values that have no version."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    return dict(vars(value)) if is_object(value) else {}


def _is_equal(one: Any, other: Any) -> bool:
    """Compare two tensors, with NaN equal to NaN."""
    if one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _copy(tensor: Tensor, copies: Copies) -> Tensor:
    key = id(tensor), version_of(tensor)
    if key not in copies:
        copies[key] = tensor, tensor.detach().clone()
    return copies[key][1]


def _fill(value: Any, contents: dict[Any, Any]) -> None:
    """Replace everything in a container or an object with `contents`."""
    if isinstance(value, list | deque):
        value.clear()
        value.extend(contents.values())
    elif isinstance(value, dict) or is_object(value):
        mapping = value if isinstance(value, dict) else vars(value)
        mapping.clear()
        mapping.update(contents)


def _holds(value: Any, inside: dict[Any, Kept]) -> bool:
    contents = _parts(value)
    return list(contents) == list(inside) and all(
        contents[key] is entry.value for key, entry in inside.items()
    )


@dataclass
class KeptPlaces:
    """Recorded values of places; `whole` if every value of the places is recorded."""

    places: Sequence[Place]
    kept: dict[Key, Kept]
    whole: bool

    def put_back(self) -> None:
        """Restore the recorded values, and if `whole`, delete values that were added since."""
        for place in self.places:
            before = {
                key[2]: kept
                for key, kept in self.kept.items()
                if key[:2] == (place.name, place.where)
            }
            for key in place.names():
                if self.whole and key not in before:
                    del place.values[key]
            for key, kept in before.items():
                value = kept.put_back()
                if key not in place.values or place.values[key] is not value:
                    place.values[key] = value

    def changed(self, later: "KeptPlaces") -> list[Key]:
        """List the keys whose values differ later, or that only one of the two records."""
        keys = dict.fromkeys([*self.kept, *later.kept])
        common = self.kept.keys() & later.kept.keys()
        return [key for key in keys if key not in common or self.kept[key].changed(later.kept[key])]

    def is_lost(self, key: Key, later: "KeptPlaces") -> bool:
        """Return whether a tensor was written into that has no copy to restore it from."""
        copied = any(
            place.is_module for place in self.places if (place.name, place.where) == key[:2]
        )
        return not copied and key in later.kept and self.kept[key].is_written(later.kept[key])

    def rebuilt(
        self, keys: Sequence[Key], change: Callable[[Any], Any] = lambda value: value
    ) -> dict[Key, Any]:
        """Build separate values for some keys, with `change` applied to each."""
        return {key: self.kept[key].rebuilt(change) for key in keys if key in self.kept}


def keep(
    places: Sequence[Place], *, only: Mapping[Key, bool] | None = None, copies: Copies | None = None
) -> KeptPlaces:
    """Record the current values of places.

    `only` restricts this to some values, each with whether its tensors are copied. Without it, the
    tensors of modules are copied.
    """
    copies = {} if copies is None else copies
    recorded = {}
    for place in places:
        for name in place.names():
            key = place.name, place.where, name
            if only is None or key in only:
                copied = place.is_module if only is None else only[key]
                recorded[key] = Kept(place.values[name], copies=copies if copied else None)
    return KeptPlaces(places, recorded, whole=only is None)


@contextmanager
def put_back_later(
    places: Sequence[Place], *, only: Mapping[Key, bool] | None = None
) -> Iterator[None]:
    """Restore the values of places, or only some of them, on exit."""
    before = keep(places, only=only)
    try:
        yield
    finally:
        before.put_back()
