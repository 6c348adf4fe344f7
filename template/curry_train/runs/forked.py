"""What a process holds and its forked children let go of: workers of a DataLoader live on when it was killed.

A kernel lock belongs to an open file, which a fork shares: it ends when the last process closes it. A child that closes
takes nothing from its parent. Programs that are started close by themselves what Python opened.
Proof: `python -m pytest tests/test_store_lock.py`.
"""

import contextlib
import os
import weakref
from typing import Protocol

_descriptors: set[int] = set()


class LeftBehind(Protocol):
    """Something that belongs to the process that made it."""

    def leave_behind(self) -> None:
        """In a child that was forked: this is the parent's."""


_holders: "weakref.WeakSet[LeftBehind]" = weakref.WeakSet()


def keep_from_children(holder: LeftBehind) -> None:
    """Call its `leave_behind` in every child."""
    _holders.add(holder)


def open_here(path: str | os.PathLike[str], flags: int, mode: int = 0o644) -> int:
    """A descriptor that is closed in every child; close it with `close_here`."""
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), mode)
    _descriptors.add(descriptor)
    return descriptor


def close_here(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


def _after_fork() -> None:
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):  # some programs close all descriptors that they see
            os.close(descriptor)
    _descriptors.clear()
    for holder in list(_holders):
        holder.leave_behind()
    _holders.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)
