"""Save to a full or read-only volume: committed checkpoints stay and load bit-equal.

The kernel itself refuses; nothing is simulated.
Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from curry_train.runs import policy
from curry_train.runs.files import Files
from torture_disk import AFTER, BEFORE, Trial, prepared
from torture_training import Expected


@contextmanager
def _volume(size: str) -> Iterator[Path | None]:
    """Mount a small file system in memory; return None without the permission to mount."""
    folder = Path(tempfile.mkdtemp(prefix="volume-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        mounted = not subprocess.run(command, capture_output=True).returncode
    except FileNotFoundError:
        mounted = False
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


class _Unaware(Files):
    """File access that reports unlimited space, so that the disk fills in the middle of a file."""

    def free_bytes(self, key: str = "") -> int:
        return 2**60


def full_disk(expected: Expected, *, most: int = 60) -> dict[str, Any]:
    """Save to a volume with 0, 1, 2, ... free blocks: the kernel ends the save at any place."""
    full = 0
    wrong = []
    cryptic = 0
    with _volume("3m") as volume, mock.patch.object(policy, "require_room"):
        if volume is None:
            return {"how": "not mounted: the process may not", "errors": 0, "wrong": []}
        for blocks in range(most):
            trial, filler = prepared(volume / "run", expected), volume / "filler"
            _fill(filler, leave=blocks * 4096)
            error_text = trial.train(
                BEFORE + 1, _Unaware(volume / "run"), in_background=bool(blocks % 2)
            )
            found = trial.judge() + trial.wrong_state()
            filler.unlink()
            full += error_text is not None
            cryptic += error_text is not None and "No space left" not in error_text
            if (later := trial.train(AFTER)) is not None:
                found.append(f"with room again: {later}")
            wrong += [
                f"{blocks} blocks left: {one}"
                for one in [*found, *trial.judge(), *trial.wrong_state()]
            ]
    with _volume("3m") as volume:
        assert volume is not None
        trial = prepared(volume / "run", expected)
        _fill(volume / "filler", leave=60_000)
        error_text = trial.train(AFTER)
        wrong += [f"too little room: {one}" for one in [*trial.judge(), *trial.wrong_state()]]
        wrong += (
            [] if "NoRoom" in (error_text or "") else [f"too little room was met with {error_text}"]
        )
    return {"how": "tmpfs of 3 MB", "errors": full, "without_its_reason": cryptic, "wrong": wrong}


def _fill(path: Path, *, leave: int) -> None:
    with path.open("wb") as stream:
        while (free := shutil.disk_usage(path.parent).free) > leave:
            stream.write(b"\0" * min(free - leave, 4096))
            stream.flush()


def read_only(expected: Expected) -> dict[str, Any]:
    """Save to a volume that is mounted read-only, and to a folder of another user."""
    wrong, tried = [], []
    with _volume("3m") as volume:
        if volume is not None:
            trial = prepared(volume / "run", expected)
            subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
            error_text = trial.train(AFTER)
            wrong += (
                []
                if "Read-only" in (error_text or "")
                else [f"a read-only volume was met with {error_text}"]
            )
            wrong += [f"read-only volume: {one}" for one in trial.wrong_state()]
            tried.append("volume remounted read-only")
    folder = Path(tempfile.mkdtemp(prefix="readonly-"))
    trial = prepared(folder / "run", expected)
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    code = os.fork()
    if not code:
        _as_somebody_else(trial)
    status = os.waitstatus_to_exitcode(os.waitpid(code, 0)[1])
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755) if path.is_dir() else None
    shutil.rmtree(folder)
    wrong += [] if status == 0 else [f"a folder without write permission: status {status}"]
    tried.append("folder of mode 0555" + (", as the user nobody" if os.geteuid() == 0 else ""))
    return {"how": tried, "wrong": wrong}


def _as_somebody_else(trial: Trial) -> None:
    """Exit with 0 if the save was refused and the state before loads; root may skip it."""
    status = 9
    try:
        if os.geteuid() == 0:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        error_text = trial.train(AFTER)
        if "Permission denied" not in (error_text or ""):
            status = 1
        elif trial.wrong_state():
            status = 2
        else:
            status = 0
    finally:
        os._exit(status)


def small_files(expected: Expected, folder: Path, *, every: int = 1) -> dict[str, Any]:
    """Limit file sizes in the kernel, in place of a full disk where nothing can be mounted."""
    wrong = []
    errors = 0
    first = prepared(folder.with_name("whole"), expected)
    for limit in (0, 1, 100, 1000, 5000, 8000)[::every]:
        trial = prepared(folder, expected, of=first)
        pid = os.fork()
        if not pid:
            status = 9
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                status = 3 if "File too large" in (trial.train(AFTER) or "") else 4
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        errors += status == 3
        found = ([] if status == 3 else [f"status {status}"]) + trial.judge() + trial.wrong_state()
        wrong += [f"files of at most {limit} bytes: {one}" for one in found]
    return {"errors": errors, "wrong": wrong}
