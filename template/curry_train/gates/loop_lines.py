"""Find the lines of the user's that run, and those in which a pattern occurs.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import ast
import contextlib
import dis
import functools
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


def users_text(num_lines: int = 1) -> str:
    """Return the innermost line, with some of those that follow it."""
    return "".join(
        line
        for frame in users_frames()[:1]
        for line in linecache.getlines(frame.f_code.co_filename)[frame.f_lineno - 1 :][:num_lines]
    )


@functools.cache
def _next_instruction(code: Any, offset: int) -> Any:
    return next(one for one in dis.get_instructions(code) if one.offset > offset)


def loses(frame: Any) -> bool:
    """Return whether a frame of the user's throws the result of its current call away."""
    file = frame.f_code.co_filename
    if file.startswith(LIBRARIES):
        return False
    after = _next_instruction(frame.f_code, frame.f_lasti)
    return after.opname == "POP_TOP" or (
        after.opname.startswith("STORE_")
        and (frame.f_lineno, after.argval) in _find_unused_loop_variables(file)
    )


@functools.cache
def _parse_nodes(file: str) -> list[ast.AST]:
    """Return the nodes of a file of Python; code may come from a file of another kind."""
    with contextlib.suppress(SyntaxError):
        return [*ast.walk(ast.parse("".join(linecache.getlines(file))))]
    return []


@functools.cache
def _find_unused_loop_variables(file: str) -> set[tuple[int, str]]:
    """Return lines that set the variable of a loop, which the rest of its body does not name."""
    found = set[tuple[int, str]]()
    for loop in _parse_nodes(file):
        if isinstance(loop, ast.For):
            for number, one in enumerate(loop.body, 1):
                match one:
                    case ast.Assign([ast.Name(name)]):
                        rest = "\n".join(map(ast.unparse, loop.body[number:]))
                        is_named = re.compile(rf"\b{name}\b").search
                        if is_named(ast.unparse(loop.target)) and not is_named(rest):
                            found.add((one.lineno, name))
    return found


# Methods that a loop has to call, as in `loss.backward`.
METHODS = ("backward", "step", "zero_grad", "train", "eval", "update")


def mistakes(code: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield what the lines of a function show to be wrong: the check, advice and the place."""
    lines = linecache.getlines(code.co_filename)
    own = {number for _, _, number in code.co_lines()}
    ends = dict[ast.AST, int | None]()
    for one in _parse_nodes(code.co_filename):
        place = place_of(code.co_filename, getattr(one, "lineno", 0))
        match one:
            case ast.Expr(ast.Attribute(attr=name)) if name in METHODS and one.lineno in own:
                yield "results", f"{name} is named, not called", f"write {name}()", place
            case ast.For() | ast.While():
                ends |= dict.fromkeys(ast.walk(one), one.end_lineno)
            case ast.Assign([kept], ast.Call(ast.Attribute(model, "state_dict"))) if (
                one in ends and one.lineno in own
            ):
                name, weights = (re.escape(ast.unparse(it)) for it in (model, kept))
                loads = rf"\b{name}\.load_state_dict\(\s*{weights}\s*[,)]"
                if re.search(loads, "".join(lines[ends[one] :])):
                    measured = "the weights that are kept for later change with the model"
                    yield "moves", measured, "keep copy.deepcopy(model.state_dict())", place


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
