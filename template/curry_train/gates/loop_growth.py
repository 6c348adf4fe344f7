"""Find tensors and hooks that a loop keeps from step to step, and the line that keeps them.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import contextlib
import gc
import inspect
import itertools
import linecache
import re
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .verdict import LIBRARIES

# Steps after which tensors are counted: the first one makes the optimizer's state.
FIRST_STEP = 2
LAST_STEP = 8
# Growth over so many steps is taken for one that has no end.
FEWEST_INTERVALS = 4

Kind = tuple[tuple[int, ...], torch.dtype]


class LiveTensors:
    """Tensors by shape and type at equal points of the steps, and hooks that were registered."""

    def __init__(self) -> None:
        self.counts: dict[int, Counter[Kind]] = {}
        self.places: dict[Kind, str] = {}
        self.hooks: list[tuple[weakref.ref[Any], int, str, int]] = []
        self._is_ours = False

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Leave out hooks of ours."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False

    def add_hook(self, handle: RemovableHandle, place: str, num_steps: int) -> None:
        if place and not self._is_ours:
            self.hooks.append((handle.hooks_dict_ref, handle.id, place, num_steps))

    def count(self, num_steps: int) -> None:
        if not FIRST_STEP <= num_steps <= LAST_STEP or num_steps in self.counts:
            # Past the first epoch it is seen whether they are let go again.
            if num_steps > LAST_STEP and self.places:
                now = _tensors_by_kind()
                most = self.counts[max(self.counts)]
                self.places = {k: place for k, place in self.places.items() if now[k] >= most[k]}
            return
        self.counts[num_steps] = _tensors_by_kind()
        if len(self.counts) == FEWEST_INTERVALS + 1:
            for kind in self._growing_kinds():
                if place := _line_that_keeps(kind):
                    self.places[kind] = place

    def _growing_kinds(self) -> list[Kind]:
        counts = [self.counts[number] for number in sorted(self.counts)]
        if len(counts) <= FEWEST_INTERVALS:
            return []
        pairs = list(itertools.pairwise(counts))
        return [kind for kind in counts[-1] if all(new[kind] > old[kind] for old, new in pairs)]

    def growing(self) -> list[tuple[str, str]]:
        """Return the place and a description of what grew in each step."""
        kinds = set(self._growing_kinds())
        found = [
            (place, f"keeps a tensor of shape {list(kind[0])} more in each step")
            for kind, place in self.places.items()
            if kind in kinds
        ]
        steps: dict[str, set[int]] = {}
        for reference, number, place, num_steps in self.hooks:
            hooks = reference()
            if hooks is not None and number in hooks:
                steps.setdefault(place, set()).add(num_steps)
        found += [
            (place, "registers a hook in each step that is never removed")
            for place, of_place in steps.items()
            if len(of_place) >= FEWEST_INTERVALS
        ]
        return list(dict.fromkeys(found))


def _tensors_by_kind() -> Counter[Kind]:
    # Numbers are left out: a history of losses may grow.
    return Counter(_kind(one) for one in _tensors() if one.dim())


def _kind(one: Tensor) -> Kind:
    return tuple(one.shape), one.dtype


def _tensors() -> list[Tensor]:
    return [one for one in gc.get_objects() if type(one) is Tensor]


def _line_that_keeps(kind: Kind) -> str | None:
    """Return the line of the user's that puts tensors of a kind into a container."""
    containers: Counter[int] = Counter()
    objects: dict[int, Any] = {}
    for tensor in _tensors():
        if _kind(tensor) != kind or not tensor.dim():
            continue
        for container in _containers(tensor):
            containers[id(container)] += 1
            objects[id(container)] = container
    for key, number in containers.most_common(3):
        one = objects[key]
        if number > 2 and not (isinstance(one, deque) and one.maxlen is not None):
            for name in _names(one):
                if place := _line_that_adds_to(name):
                    return place
    return None


def _containers(tensor: Tensor) -> Iterator[Any]:
    for one in gc.get_referrers(tensor):
        if isinstance(one, list | deque | dict | set):
            yield one
        elif type(one) is tuple:
            yield from (o for o in gc.get_referrers(one) if isinstance(o, list | deque | dict))


def _names(container: Any) -> Iterator[str]:
    """Yield the names under which a container is known: of variables, attributes and cells."""
    found: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(LIBRARIES):
            own = frame.f_locals
            found += [name for name, one in own.items() if one is container]
            # A copy of a function's variables would keep them alive.
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(own, dict):
                own.clear()
        frame = frame.f_back
    yield from found
    for one in gc.get_referrers(container):
        attributes = one if isinstance(one, dict) else getattr(one, "__dict__", {})
        yield from [k for k, v in attributes.items() if v is container and isinstance(k, str)]
        if isinstance(one, types.CellType):
            for closure in gc.get_referrers(one):
                for function in gc.get_referrers(closure) if isinstance(closure, tuple) else ():
                    if isinstance(function, types.FunctionType) and function.__closure__ == closure:
                        index = closure.index(one)
                        yield function.__code__.co_freevars[index]


def _line_that_adds_to(name: str) -> str | None:
    adds = re.compile(
        rf"\b{re.escape(name)}\b(\.(append|add|extend|insert|appendleft|update|setdefault)\("
        r"|\[.*\](\.append\(|\s*=[^=])|\s*\+=)"
    )
    for file in _files_of_the_user():
        for number, line in enumerate(linecache.getlines(file), 1):
            if adds.search(line):
                return f"{Path(file).name}:{number}"
    return None


def _files_of_the_user() -> list[str]:
    files: dict[str, None] = {}
    frame: Any = sys._getframe(1)
    while frame is not None:
        files[frame.f_code.co_filename] = None
        frame = frame.f_back
    files |= dict.fromkeys(
        str(file) for one in list(sys.modules.values()) if (file := vars(one).get("__file__"))
    )
    return [file for file in files if not file.startswith(LIBRARIES) and file.endswith(".py")]
