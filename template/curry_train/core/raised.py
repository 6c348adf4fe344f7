"""What the user's code raised, and the line of theirs it came from: the last one that is neither installed nor ours.

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
    """`TypeError: what it said (model.py:12)`; `called` is what of theirs was called, which may never have run."""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    place = _place(error, called)
    return f"{type(error).__name__}: {said}" + (f" ({place})" if place else "")


def _place(error: Exception, called: Callable[..., Any] | None) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return _short(error.filename, error.lineno)
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    code = getattr(inspect.unwrap(called), "__code__", None) if called is not None else None
    begins = [(code.co_filename, code.co_firstlineno)] if code is not None else []
    inside = [line for line in lines if any(line[0] == file for file, _ in begins)]
    theirs = [line for line in lines if _is_theirs(line[0])] or inside or begins
    return _short(*theirs[-1]) if theirs else ""


def _is_theirs(file: str) -> bool:
    path = Path(file).resolve()
    known = file.startswith("<") or path.is_relative_to(OURS) or path.is_relative_to(LIBRARY)
    return not known and INSTALLED.isdisjoint(path.parts)


def _short(file: str, line: int | None) -> str:
    path, here = Path(file).resolve(), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"
