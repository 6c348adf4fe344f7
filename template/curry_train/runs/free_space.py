"""Is there room for a checkpoint, on the volume that it goes to? Asked before anything is written.

Proof: `python -m pytest tests/test_free_space.py`.
"""

import shutil

from .errors import SaveError
from .files import Files, LocalFiles
from .snapshot import MODEL, Snapshot

MARGIN = 2**20  # manifest, index, and blocks of the file system that are not full


class NoRoom(SaveError):
    """The volume can't take one more checkpoint; nothing was written."""


def bytes_of(snapshot: Snapshot, *, model_only: bool = False) -> int:
    """What a save writes, of all ranks together: a sharded tensor counts whole."""
    held = {
        name: tensor
        for name, tensor in snapshot.tensors.items()
        if not model_only or name.startswith(MODEL)
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


def free_bytes(files: Files, kind: str) -> int | None:
    """Room on the volume of the folder of this kind, which may be a link to another volume than the run's; None where
    that can't be asked."""
    if not isinstance(files, LocalFiles):
        return files.free_bytes()
    path = files.path(kind).resolve()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def require_room(files: Files, kind: str, num_bytes: int) -> None:
    """Raise NoRoom, with what is missing and what to lower.

    The old checkpoint goes after the new one is whole, so all of the new one has to fit beside it.
    """
    free, needed = free_bytes(files, kind), num_bytes + MARGIN
    if free is None or free >= needed:
        return
    keep = {"rollback": "retention.rollback_keep", "recovery": "retention.recovery_keep"}.get(
        kind, "best_k"
    )
    raise NoRoom(
        f"{files.location(kind)} has {_size(free)} free and the next checkpoint needs {_size(needed)} beside the "
        f"old ones: {_size(needed - free)} are missing. Free them, lower {keep}, set rollback_parameters_only, or move "
        f"the run to a larger volume; nothing was written"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 10**9:.2f} GB" if num_bytes >= 10**7 else f"{num_bytes:,} bytes"
