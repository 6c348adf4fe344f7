"""Check for enough free disk space before a checkpoint is written.

Proof: `python -m pytest tests/test_free_space.py`.
"""

import shutil

from .errors import SaveError
from .files import Files, LocalFiles
from .snapshot import MODEL, Snapshot

# Space for the manifest, the index and partly filled blocks of the file system.
MARGIN = 2**20


class NoRoom(SaveError):
    """The volume has no room for another checkpoint; nothing was written."""


def bytes_of(snapshot: Snapshot, *, model_only: bool = False) -> int:
    """Return the bytes that a save writes on all ranks together; sharded tensors count whole."""
    return sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in snapshot.tensors.items()
        if not model_only or name.startswith(MODEL)
    )


def free_bytes(files: Files, kind: str) -> int | None:
    """Return the free bytes on the volume of this kind's folder, or None where that is unknown.

    The folder may be a link to another volume than that of the run.
    """
    if not isinstance(files, LocalFiles):
        return files.free_bytes()
    path = files.path(kind).resolve()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def require_room(files: Files, kind: str, num_bytes: int) -> None:
    """Raise NoRoom if the next checkpoint does not fit beside the old ones.

    An old checkpoint is deleted only after the new one is complete, so both have to fit.
    """
    free = free_bytes(files, kind)
    needed = num_bytes + MARGIN
    if free is None or free >= needed:
        return
    settings = {"rollback": "retention.rollback_keep", "recovery": "retention.recovery_keep"}
    setting = settings.get(kind, "best_k")
    raise NoRoom(
        f"{files.location(kind)} has {_size(free)} free and the next checkpoint needs "
        f"{_size(needed)} beside the old ones: {_size(needed - free)} are missing. Free them, "
        f"lower {setting}, set rollback_parameters_only, or move the run to a larger volume; "
        f"nothing was written"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 10**9:.2f} GB" if num_bytes >= 10**7 else f"{num_bytes:,} bytes"
