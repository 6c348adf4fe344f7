"""Find the lines of the user's that run, and those in which a pattern occurs.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import ast
import contextlib
import dis
import functools
import itertools
import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ..workloads.models import LIBRARIES


def users_frames(*inside: str) -> list[Any]:
    """Return the frames that are in no library, from the innermost on.

    Functions with these qualified names are left out, and what they have called.
    """
    found: list[Any] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_qualname in inside:
            found.clear()
        elif not frame.f_code.co_filename.startswith(LIBRARIES):
            found.append(frame)
        frame = frame.f_back
    return found


def users_lines(*inside: str) -> tuple[str, ...]:
    """Return files and lines of the user's, see `users_frames`."""
    return tuple(
        place_of(frame.f_code.co_filename, frame.f_lineno) for frame in users_frames(*inside)
    )


def users_line(*inside: str) -> str:
    """Return the innermost one of them."""
    return "".join(users_lines(*inside)[:1])


@functools.cache
def _instructions(code: Any) -> list[Any]:
    return [*dis.get_instructions(code)]


def loses(frame: Any) -> bool:
    """Return whether a frame of the user's throws the result of its current call away."""
    file = frame.f_code.co_filename
    if file.startswith(LIBRARIES):
        return False
    following = (one for one in _instructions(frame.f_code) if one.offset > frame.f_lasti)
    after = next(following)
    return after.opname == "POP_TOP" or (
        after.opname.startswith("STORE_") and (frame.f_lineno, after.argval) in _lost_in_loops(file)
    )


@functools.cache
def _nodes(file: str) -> list[ast.AST]:
    """Return the nodes of a file of Python; code may come from a file of another kind."""
    with contextlib.suppress(SyntaxError):
        return [*ast.walk(ast.parse("".join(linecache.getlines(file))))]
    return []


@functools.cache
def _lost_in_loops(file: str) -> set[tuple[int, str]]:
    """Return lines that set the variable of a loop, which the rest of its body does not name."""
    found = set[tuple[int, str]]()
    for loop in _nodes(file):
        if isinstance(loop, ast.For):
            for number, one in enumerate(loop.body, 1):
                match one:
                    case ast.Assign([ast.Name(name)]):
                        rest = "\n".join(map(ast.unparse, loop.body[number:]))
                        is_named = re.compile(rf"\b{name}\b").search
                        if is_named(ast.unparse(loop.target)) and not is_named(rest):
                            found.add((one.lineno, name))
    return found


def weights_kept(code: Any) -> Iterator[str]:
    """Yield lines of a loop that keep a model's state_dict(), loaded again after that loop."""
    own = {number for _, _, number in code.co_lines()}
    for loop in _nodes(code.co_filename):
        if not isinstance(loop, ast.For | ast.While):
            continue
        after = "".join(linecache.getlines(code.co_filename)[loop.end_lineno :])
        for one in ast.walk(loop):
            match one:
                case ast.Assign(
                    targets=[kept], value=ast.Call(ast.Attribute(model, "state_dict"))
                ) if one.lineno in own:
                    name, weights = (re.escape(ast.unparse(it)) for it in (model, kept))
                    if re.search(rf"\b{name}\.load_state_dict\(\s*{weights}\s*[,)]", after):
                        yield place_of(code.co_filename, one.lineno)


# Methods that a loop has to call, as in `loss.backward`.
METHODS = ("backward", "step", "zero_grad", "train", "eval", "update")


def only_named(code: Any) -> list[tuple[str, str]]:
    """Return places and names of methods that stand in a line of their own without a call."""
    return [
        (place_of(code.co_filename, one.positions.lineno), one.argval)
        for one, after in itertools.pairwise(_instructions(code))
        if after.opname == "POP_TOP" and one.opname == "LOAD_ATTR" and one.argval in METHODS
    ]


# A line that makes another optimizer or Trainer, or calls a function that trains.
OF_TRAINING = r"(Adam\w*|SGD|optim\.[A-Z]\w+|Trainer)\(|(train|fit|tune|distill)\w*\([^)]"


def later_stage() -> str:
    """Return a line further down in a function that runs, if it may train more."""
    for frame in users_frames():
        file = frame.f_code.co_filename
        for _, _, number in frame.f_code.co_lines():
            is_later = number and number > frame.f_lineno
            if is_later and re.search(OF_TRAINING, linecache.getline(file, number)):
                return place_of(file, number)
    return ""


def users_files() -> list[str]:
    files = [frame.f_code.co_filename for frame in users_frames()]
    # Python takes None in place of a module that nobody is to import.
    files += [str(vars(one).get("__file__")) for one in [*sys.modules.values()] if one]
    return [
        file
        for file in dict.fromkeys(files)
        if not file.startswith(LIBRARIES) and file.endswith(".py")
    ]


def place_of(file: str, number: int) -> str:
    return f"{file.rpartition(os.sep)[2]}:{number}"


def places_with(pattern: str, files: Iterable[str]) -> list[str]:
    """Return the places of lines in which a pattern occurs."""
    return [
        place_of(file, number)
        for file in files
        for number, line in enumerate(linecache.getlines(file), 1)
        if re.search(pattern, line)
    ]
