"""Describe an error from the user's code, with the line of their code that it came from.

That is the last line of the traceback that is in no installed package and not in this one.

Proof: `python -m pytest tests/test_workload.py`.
"""

import inspect
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

OURS = Path(__file__).resolve().parents[1]
LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
INSTALLED = {"site-packages", "dist-packages"}


def describe_raised(error: Exception, *, called: Callable[..., Any] | None = None) -> str:
    """Format an error as `TypeError: its message (model.py:12)`.

    `called` is the user's function that was called, for an error in the call itself, before any
    line of the function ran.
    """
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    place = _place(error, called)
    return f"{type(error).__name__}: {message}" + (f" ({place})" if place else "")


def _place(error: Exception, called: Callable[..., Any] | None) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return _short(error.filename, error.lineno)
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    user_lines = [line for line in lines if _is_theirs(line[0])]
    if user_lines:
        return _short(*user_lines[-1])

    code = getattr(inspect.unwrap(called), "__code__", None) if called is not None else None
    if code is None:
        return ""
    in_called_file = [line for line in lines if line[0] == code.co_filename]
    if in_called_file:
        return _short(*in_called_file[-1])
    return _short(code.co_filename, code.co_firstlineno)


def _is_theirs(file: str) -> bool:
    path = Path(file).resolve()
    if file.startswith("<") or path.is_relative_to(OURS) or path.is_relative_to(LIBRARY):
        return False
    return INSTALLED.isdisjoint(path.parts)


def _short(file: str, line: int | None) -> str:
    path = Path(file).resolve()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"
