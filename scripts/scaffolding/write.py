"""Puts a plan on disk so that a kill at any moment leaves nothing half-written.

A new project is made in a hidden folder beside its place and renamed; an added file is made beside its place and
renamed, and the lock comes last. What a kill left over goes with the next write.
Proof: `python -m pytest tests/cli/test_scaffold_kill.py`.
"""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from .plan import Plan, State, destination

LEFTOVER = re.compile(r"\..+\.curry-train-(\d{1,9})")  # .<name>.curry-train-<process id>


def write_project(plan: Plan) -> None:
    """Make the whole project, or nothing."""
    sweep(plan.root.parent)
    staging = _beside(plan.root)
    with _unwind_on_signals():
        try:
            staging.mkdir()
            for entry in plan.entries:
                place = staging / entry.path
                place.parent.mkdir(parents=True, exist_ok=True)
                _write(place, entry.content)
            staging.rename(plan.root)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def write_files(plan: Plan) -> None:
    """Write what the plan creates and replaces into a project that exists."""
    assert not plan.having(State.CONFLICT), "refuse_conflicts comes first"
    with _unwind_on_signals():
        places = [(destination(plan.root, entry.path), entry.content) for entry in plan.writes]
        for folder in {place.parent for place, _ in places}:
            folder.mkdir(parents=True, exist_ok=True)
            sweep(folder)
        for place, content in places:
            staging = _beside(place)
            try:
                _write(staging, content)
                if place.exists():
                    shutil.copymode(place, staging)
                staging.replace(place)
            finally:
                staging.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what writes that were killed left in `folder`; those of processes that live are not touched."""
    for path in folder.iterdir():
        match = LEFTOVER.fullmatch(path.name)
        if match is None or _is_alive(int(match[1])):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _beside(place: Path) -> Path:
    return place.with_name(f".{place.name}.curry-train-{os.getpid()}")


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return False  # a leftover with our own number is from a process before us
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, and someone else's
    return True


def _write(place: Path, content: bytes) -> None:
    try:
        with place.open("xb") as file:
            file.write(content)
    except OSError as error:  # a full disk names no file
        error.filename = error.filename or str(place)
        raise


@contextlib.contextmanager
def _unwind_on_signals() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM run the clean-up on their way out."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, unwind) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
