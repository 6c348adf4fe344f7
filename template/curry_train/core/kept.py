"""Values as they stand: attributes, what lists and dicts in them hold, and tensors' contents; compared, and put back.

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

LONGEST = 1000  # a longer container is data: nothing is looked for in it, but it is seen to grow
PLAIN = (bool, int, float, complex, str, bytes, type(None))

Copies = dict[
    tuple[int, int], tuple[Tensor, Tensor]
]  # by identity and version, so that a tensor is copied once
Key = tuple[
    str, str, str
]  # a place's name, which of its values (`Place.where`), and the name of one


class Kept:
    """One value and, where it `is_open`, all that is in it. With `copies` what is written into a tensor is put back.

    Long containers, deep ones, and the objects that an object holds are others' business, and are left alone.
    """

    def __init__(self, value: Any, *, copies: Copies | None, depth: int = 4) -> None:
        self.value, self.length = value, len(value) if is_container(value) else 0
        self.version = version_of(value)
        self.copy = (
            _copy(value, copies) if copies is not None and isinstance(value, Tensor) else None
        )
        deepest = 0 if is_container(value) else 2
        self.is_open = (
            (is_container(value) or is_object(value)) and depth > deepest and self.length <= LONGEST
        )
        parts = _parts(value) if self.is_open else {}
        inside = depth - (1 if is_container(value) else 2)
        self.inside = {key: Kept(part, copies=copies, depth=inside) for key, part in parts.items()}

    def put_back(self) -> Any:
        """The value, with its contents as they were."""
        for part in self.inside.values():
            part.put_back()
        if self.copy is not None and not _is_equal(
            self.value.detach(), self.copy
        ):  # BatchNorm counts no version
            with torch.no_grad():
                if self.value.shape == self.copy.shape:
                    self.value.copy_(self.copy)
                else:
                    self.value.set_(self.copy.clone())
        if self.is_open and not _holds(self.value, self.inside):
            _fill(self.value, {key: part.value for key, part in self.inside.items()})
        return self.value

    def rebuilt(self, change: Callable[[Any], Any]) -> Any:
        """A value of its own, with every tensor, number and the like in it changed."""
        if isinstance(self.value, Tensor):
            return change(self.value.detach().clone() if self.copy is None else self.copy.clone())
        if not self.is_open:
            return change(self.value)
        parts = {key: part.rebuilt(change) for key, part in self.inside.items()}
        if isinstance(self.value, tuple):
            own = type(self.value)
            return own(*parts.values()) if hasattr(own, "_fields") else own(parts.values())
        new = copy.copy(self.value)
        _fill(new, parts)
        return new

    def changed(self, later: "Kept") -> bool:
        """Whether the later value is another one. A tensor that was made anew or written into is, whatever it holds."""
        if isinstance(self.value, PLAIN) and isinstance(later.value, PLAIN):
            return type(self.value) is not type(later.value) or bool(self.value != later.value)
        if self.value is not later.value or self.is_written(later) or self.length != later.length:
            return True
        if list(self.inside) != list(later.inside):
            return True
        return any(part.changed(later.inside[key]) for key, part in self.inside.items())

    def is_written(self, later: "Kept") -> bool:
        """Whether a tensor in it was written into."""
        if self.value is later.value and self.version != later.version:
            return True
        return any(
            part.is_written(later.inside[key])
            for key, part in self.inside.items()
            if key in later.inside
        )


def is_container(value: Any) -> bool:
    return isinstance(value, list | tuple | dict | deque)


def version_of(value: Any) -> int:
    """How often a tensor was written into."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    return dict(vars(value)) if is_object(value) else {}


def _is_equal(one: Any, other: Any) -> bool:
    same = one.shape == other.shape
    return same and bool(
        torch.equal(one, other) or ((one == other) | (one.isnan() & other.isnan())).all()
    )


def _copy(tensor: Tensor, copies: Copies) -> Tensor:
    key = id(tensor), version_of(tensor)
    if key not in copies:
        copies[key] = tensor, tensor.detach().clone()
    return copies[key][1]


def _fill(value: Any, parts: dict[Any, Any]) -> None:
    """Let a container or an object hold these and nothing else."""
    if isinstance(value, list | deque):
        value.clear()
        value.extend(parts.values())
    elif isinstance(value, dict) or is_object(value):
        held = value if isinstance(value, dict) else vars(value)
        held.clear()
        held.update(parts)


def _holds(value: Any, inside: dict[Any, Kept]) -> bool:
    parts = _parts(value)
    return list(parts) == list(inside) and all(
        parts[key] is kept.value for key, kept in inside.items()
    )


@dataclass
class KeptPlaces:
    """Values of places; `whole` where it is all of them."""

    places: Sequence[Place]
    kept: dict[Key, Kept]
    whole: bool

    def put_back(self) -> None:
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
        """What is another value later, or is not in both."""
        keys = dict.fromkeys([*self.kept, *later.kept])
        both = self.kept.keys() & later.kept.keys()
        return [key for key in keys if key not in both or self.kept[key].changed(later.kept[key])]

    def is_lost(self, key: Key, later: "KeptPlaces") -> bool:
        """Whether a tensor was written into that there is no copy of."""
        copied = any(
            place.is_module for place in self.places if (place.name, place.where) == key[:2]
        )
        return not copied and key in later.kept and self.kept[key].is_written(later.kept[key])

    def rebuilt(
        self, keys: Sequence[Key], change: Callable[[Any], Any] = lambda value: value
    ) -> dict[Key, Any]:
        """Values of their own, changed, for some keys."""
        return {key: self.kept[key].rebuilt(change) for key in keys if key in self.kept}


def keep(
    places: Sequence[Place], *, only: Mapping[Key, bool] | None = None, copies: Copies | None = None
) -> KeptPlaces:
    """The values of places as they stand; or some of them, each with or without copies of its tensors."""
    found, copies = {}, {} if copies is None else copies
    for place in places:
        for name in place.names():
            key = place.name, place.where, name
            if only is None or key in only:
                copied = place.is_module if only is None else only[key]
                found[key] = Kept(place.values[name], copies=copies if copied else None)
    return KeptPlaces(places, found, whole=only is None)


@contextmanager
def put_back_later(
    places: Sequence[Place], *, only: Mapping[Key, bool] | None = None
) -> Iterator[None]:
    """Put the values of places, or some of them, back afterwards."""
    before = keep(places, only=only)
    try:
        yield
    finally:
        before.put_back()
