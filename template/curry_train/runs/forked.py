"""Close locks and files of a process in its forked children.

DataLoader workers can outlive a killed process. A kernel lock belongs to an open file, which a fork
shares: the lock ends when the last process closes the file. A child that closes the file does not
take the lock from its parent. Started programs need no help: Python closes its files for them.
Proof: `python -m pytest tests/test_store_lock.py`.
"""

import contextlib
import os
import weakref
from typing import Protocol

_descriptors: set[int] = set()


class LeftBehind(Protocol):
    """An object that belongs to the process that made it."""

    def leave_behind(self) -> None:
        """Give up the object; called in a forked child, because the parent owns it."""


_holders: "weakref.WeakSet[LeftBehind]" = weakref.WeakSet()


def keep_from_children(holder: LeftBehind) -> None:
    """Call `holder.leave_behind()` in every forked child."""
    _holders.add(holder)


def open_here(path: str | os.PathLike[str], flags: int, mode: int = 0o644) -> int:
    """Open a descriptor that every forked child closes; close it here with `close_here`."""
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), mode)
    _descriptors.add(descriptor)
    return descriptor


def close_here(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


def _after_fork() -> None:
    for descriptor in _descriptors:
        # Some programs have already closed all descriptors that they inherited.
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
    for holder in list(_holders):
        holder.leave_behind()
    _holders.clear()


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
