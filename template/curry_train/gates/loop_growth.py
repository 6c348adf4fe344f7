"""Find what a loop keeps from step to step, tensors or other large objects, and the line.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import gc
import inspect
import linecache
import re
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .loop_events import Blank
from .loop_lines import place_of, places_with, users_files, users_frames
from .loop_loss import nodes_behind
from .loop_weights import instances_of

# Steps after which containers are looked at: the first one makes the optimizer's state.
FIRST_STEP = 2
LAST_STEP = 8
# Growth over so many steps is taken for one that has no end.
FEWEST_INTERVALS = 4
# Objects other than tensors may grow by so much in a step, as texts of a log do.
FEWEST_BYTES = 2**16
# Hooks are in an ordered dictionary.
CONTAINERS = (list, dict, set, deque, OrderedDict)
HOLDERS = (dict, types.CellType)


class Growth(Blank):
    """Containers that have more entries after each step."""

    # Numbers of entries when they were counted first and last, by the ids of the containers that
    # have grown each time. The id 0 stands for the nodes of all graphs.
    first: dict[int, int]
    sizes: dict[int, int]
    num_steps: int
    # Place and description of containers that grow without end, by their ids.
    found: dict[int, tuple[str, str]]
    # Lines that keep tensors with the graphs of earlier steps.
    graphs: list[str]

    def count(self, num_steps: int) -> None:
        found = self.found
        is_late = num_steps > LAST_STEP and not found
        if is_late or num_steps < FIRST_STEP or num_steps <= self.num_steps:
            return
        objects = gc.get_objects()
        num_nodes = len(nodes_behind(*_select_with_graphs(objects)))
        # A dictionary of arrays alone is not tracked.
        objects += gc.get_referents(*(one for one in objects if type(one) in HOLDERS))
        objects += [one for _, one, _ in _iterate_variables()]
        containers = {
            id(one): one
            for one in objects
            if type(one) in CONTAINERS and getattr(one, "maxlen", None) is None
        }
        sizes = {key: len(one) for key, one in containers.items()} | {0: num_nodes}
        if not self.num_steps:
            self.first = sizes
            self.sizes = dict.fromkeys(sizes, -1)
        before = self.sizes
        # Past the first epoch it is seen whether they are emptied again.
        by_least = num_steps <= LAST_STEP
        self.sizes = {
            key: sizes[key] for key in before if sizes.get(key, -1) >= before[key] + by_least
        }
        for key in found.keys() - self.sizes:
            del found[key]
        self.num_steps = num_steps
        if num_steps == FIRST_STEP + FEWEST_INTERVALS:
            if self.sizes.pop(0, 0):
                # Not of what waits to be collected.
                gc.collect()
                graphs = _select_with_graphs(gc.get_objects())
                if len(nodes_behind(*graphs)) > before[0]:
                    holders = _find_containers(graphs)
                    # A container may be kept in another one.
                    kept = [*holders, *_find_containers(holders), *graphs]
                    lines = (_find_keeping_line(one, is_emptied=True) for one in kept)
                    self.graphs = [next(filter(None, lines), "")]
            for key, size in self.sizes.items():
                one = containers[key]
                measured = _describe_growth(one, (size - self.first[key]) / FEWEST_INTERVALS)
                if place := _find_registering_line(one):
                    found[key] = place, "registers a hook in each step that is never removed"
                elif measured and (place := _find_keeping_line(one)):
                    found[key] = place, measured


def _find_registering_line(container: Any) -> str | None:
    """Return the line of the user's that registers hooks, if the newest one is the user's own."""
    newest = [*container.values()][-1] if type(container) is OrderedDict else None
    name = getattr(newest, "__name__", "").strip("<>")
    files = users_files() if callable(newest) else []
    is_users = getattr(inspect.getmodule(newest), "__file__", "") in files
    places = places_with(rf"\.register\w*_hook\((.*\b{name}|$)", files)
    return places[0] if is_users and places else None


def _describe_growth(container: Any, num_entries: float) -> str:
    """Describe what a container keeps in each step; nothing if that is little."""
    values = list(container.values() if isinstance(container, dict) else container)
    newest = tree_leaves(values[-1:])
    shapes = [
        list(one.shape)
        for one in newest
        # An entry of several vectors is one sample, as of a replay memory.
        if isinstance(one, Tensor | numpy.ndarray)
        and (
            one.ndim > (len(newest) > 1 or isinstance(one, numpy.ndarray))
            or getattr(one, "grad_fn", None)
        )
    ]
    num_bytes = num_entries * sum(getattr(one, "nbytes", 0) or sys.getsizeof(one) for one in newest)
    if shapes:
        return f"keeps a tensor of shape {shapes[0]} more in each step"
    if num_bytes < FEWEST_BYTES:
        return ""
    return (
        f"keeps {num_bytes / 2**20:.2g} MiB more in each step, of objects such as "
        f"{type(newest[0]).__name__}"
    )


def _select_with_graphs(objects: Iterable[Any]) -> list[Tensor]:
    return [one for one in objects if issubclass(type(one), Tensor) and one.grad_fn is not None]


def _find_containers(objects: list[Any]) -> list[Any]:
    return [one for one in gc.get_referrers(*objects) if type(one) in CONTAINERS]


def _find_keeping_line(container: Any, *, is_emptied: bool = False) -> str | None:
    """Return the line of the user's that adds to a container; nothing where one empties it.

    What begins anew in each epoch is known to keep graphs where these are too many.
    """
    lines = (_find_adding_line(name, code, is_emptied) for name, code in _iterate_names(container))
    return next((line for line in lines if line is not None), None)


def _iterate_variables() -> Iterator[tuple[str, Any, Any]]:
    """Yield the names of the user's variables, with their values and the code that has them."""
    for frame in users_frames():
        own = frame.f_locals
        yield from [(name, one, frame.f_code) for name, one in own.items()]
        # A copy of a function's variables would keep them alive.
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(own, dict):
            own.clear()


def _iterate_names(container: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names of a container, of variables with their code, attributes and cells."""
    yield from [(name, code) for name, one, code in _iterate_variables() if one is container]
    for one in gc.get_referrers(container):
        attributes = one if isinstance(one, dict) else getattr(one, "__dict__", {})
        yield from [(k, None) for k, v in attributes.items() if v is container and type(k) is str]
        for function in instances_of(types.FunctionType) if type(one) is types.CellType else ():
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            yield from [(name, None) for name, cell in cells if cell is one]


def _find_adding_line(name: str, code: Any, is_emptied: bool) -> str | None:
    """Return the line that adds to a container, from which none of its file takes anything out."""
    word = rf"\b{re.escape(name)}\b"
    adds = re.compile(
        rf"{word}[\"'\]]*(\.(append|add|extend|insert|appendleft|update|setdefault)\("
        rf"|\[.*\](\.append\(|\s*\+?=[^=])|\s*\+=|\s*=.*{word}\s*\+)"
    )
    # Lines that keep a container from growing without end: they remove entries, look for a key
    # first, or add up to a limit.
    takes = re.compile(
        rf"\bdel .*{word}|{word}(\.(pop|popleft|popitem|remove|clear)\(|(\[:\])? = {word}\[)"
        rf"|\bnot in .*{word}|\blen\(.*{word}\) <.*\n?.*{word}\.append\("
    )
    # So does a line that makes a variable anew within a loop, or a method that is called at the
    # begin of an epoch, and that adds nothing itself.
    resets = re.compile(
        rf"^([ \t]+)[\w ,.]*{word}[\w ,.]*= (\[\]|\{{\}}|\w+\(\))"
        if code
        else rf"def (?!__init__)(?:(?!\bdef\b)[\s\S])*?\.{word} = (\[\]|\{{\}})"
        rf"(?:(?!\bdef\b|\.{word}\.)[\s\S])*(\bdef\b|\Z)",
        re.MULTILINE,
    )
    own = {number for _, _, number in code.co_lines()} if code else None
    for file in [code.co_filename] if code else users_files():
        lines = {
            number: line
            for number, line in enumerate(linecache.getlines(file), 1)
            if own is None or number in own or number - 1 in own
        }
        text = "".join(lines.values())
        for reset in () if is_emptied else resets.finditer(text):
            shallower = rf"^(?!{reset[1]})[ \t]*(for|while)\b"
            if not code or re.search(shallower, text[: reset.start()], re.MULTILINE):
                return ""
        is_taken = takes.search(text)
        # The variables of a module are the entries of a dictionary, too.
        if is_taken and code:
            return ""
        for number, line in () if is_taken else lines.items():
            if adds.search(line):
                return place_of(file, number)
    return None
