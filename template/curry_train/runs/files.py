"""Reach a run's files on a disk or in an object store.

Keys are paths relative to the run's folder, separated by `/`. Every change on the disk goes through
a method of `Files`, so that a test can kill a process at any of them.

Proof: `python -m pytest tests/runs/test_store.py tests/runs/test_store_objects.py`.
"""

import contextlib
import itertools
import logging
import os
import shutil
import stat
import time
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from .ranks import DamagedCheckpoint, HostileCheckpoint

# File access for a run: the storage interface and its implementation for local folders.


MOST_POINTER_BYTES = 4096
logger = logging.getLogger(__name__)


class Files(ABC):
    """The file operations that a store needs from any storage."""

    # Whether a whole folder can be renamed atomically. Otherwise the manifest, written last,
    # commits a checkpoint.
    renames: bool

    @abstractmethod
    def location(self, key: str) -> str:
        """Return the path or URL under which other programs open this key."""

    @abstractmethod
    def make_folder(self, key: str) -> None: ...

    @abstractmethod
    def create(self, key: str) -> BinaryIO:
        """Create and open a new file; raise FileExistsError if it exists."""

    @abstractmethod
    def finish(self, stream: BinaryIO) -> None:
        """Close a written file; its content is on the disk when this returns."""

    @abstractmethod
    def sync_folder(self, key: str) -> None:
        """Sync a folder; the names in it are on the disk when this returns."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None: ...

    @abstractmethod
    def remove_folder(self, key: str) -> None:
        """Remove a folder and its contents; of a link to a folder remove only the link."""

    @abstractmethod
    def remove_file(self, key: str) -> None: ...

    @abstractmethod
    def names(self, key: str) -> list[str]:
        """List the names in a folder; empty if the folder does not exist."""

    @abstractmethod
    def kind(self, key: str) -> str | None:
        """Return "file", "folder" or "other" (a link, a device), or None if nothing exists."""

    @abstractmethod
    def size(self, key: str) -> int: ...

    @abstractmethod
    def open(self, key: str) -> BinaryIO: ...

    @abstractmethod
    def point(self, key: str, target: str) -> None:
        """Atomically make a name point to a folder."""

    @abstractmethod
    def pointed(self, key: str) -> str | None:
        """Return the folder that a name points to, or None."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Replace a small file that need not survive a crash of the machine."""

    def free_bytes(self) -> int | None:
        """Return the free bytes of the storage, or None where that is unknown."""
        return None

    def read(self, key: str, *, most_bytes: int | None = None) -> bytes:
        """Return the content of a file; raise DamagedCheckpoint if it is longer than allowed."""
        with self.open(key) as stream:
            if most_bytes is None:
                return stream.read()
            data = stream.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise DamagedCheckpoint(
                f"{self.location(key)} is larger than {most_bytes:,} bytes, the most that is read"
            )
        return data

    def write(self, key: str, data: bytes) -> None:
        """Write a small new file; it is on the disk when this returns."""
        stream = self.create(key)
        try:
            stream.write(data)
            self.finish(stream)
        except BaseException:
            self.abandon(stream)
            raise

    def abandon(self, stream: BinaryIO) -> None:
        """Close an incomplete file, ignoring errors so that the original error is raised."""
        with contextlib.suppress(OSError):
            stream.close()


def checked(key: str) -> str:
    """Return the key if it stays inside of the folder, or raise HostileCheckpoint."""
    has_dots = any(name in ("", ".", "..") for name in key.split("/"))
    if has_dots or key.startswith("/") or "\\" in key or "\0" in key:
        raise HostileCheckpoint(
            f"{key!r} leads out of the run's folder: don't load this checkpoint"
        )
    return key


class LocalFiles(Files):
    """A folder on a local or mounted file system."""

    def __init__(self, root: str | os.PathLike[str], *, renames: bool = True) -> None:
        self.root = Path(root).absolute()
        self.renames = renames

    def path(self, key: str) -> Path:
        return self.root / checked(key) if key else self.root

    def location(self, key: str) -> str:
        return str(self.path(key))

    def make_folder(self, key: str) -> None:
        self.path(key).mkdir(parents=True, exist_ok=True)

    def create(self, key: str) -> BinaryIO:
        return self.path(key).open("xb")

    def finish(self, stream: BinaryIO) -> None:
        try:
            stream.flush()
            os.fsync(stream.fileno())
        finally:
            stream.close()

    def write(self, key: str, data: bytes) -> None:
        folder, _, name = key.rpartition("/")
        new = f"{folder}/.{name}.new".lstrip("/")
        # A process that was killed while writing leaves this file behind.
        self.path(new).unlink(missing_ok=True)
        super().write(new, data)
        self.path(new).replace(self.path(key))

    def put(self, key: str, data: bytes) -> None:
        folder, _, name = key.rpartition("/")
        new = self.path(f"{folder}/.{name}.put".lstrip("/"))
        new.write_bytes(data)
        new.replace(self.path(key))

    def sync_folder(self, key: str) -> None:
        descriptor = os.open(self.path(key), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        self.path(old).rename(self.path(new))

    def remove_folder(self, key: str) -> None:
        path = self.path(key)
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)

    def remove_file(self, key: str) -> None:
        self.path(key).unlink()

    def names(self, key: str) -> list[str]:
        path = self.path(key)
        if not path.is_dir():
            return []
        return sorted(entry.name for entry in path.iterdir())

    def kind(self, key: str) -> str | None:
        try:
            mode = self.path(key).lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISREG(mode):
            return "file"
        return "folder" if stat.S_ISDIR(mode) else "other"

    def size(self, key: str) -> int:
        return self.path(key).lstat().st_size

    def open(self, key: str) -> BinaryIO:
        def without_following(path: str, flags: int) -> int:
            return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))

        # Path.open has no parameter `opener`.
        return open(self.path(key), "rb", opener=without_following)

    def point(self, key: str, target: str) -> None:
        new = self.path(f".{key}.new")
        new.unlink(missing_ok=True)
        try:
            new.symlink_to(checked(target), target_is_directory=True)
        except (OSError, NotImplementedError):
            # The file system has no symbolic links, or this user may not create them.
            new.write_text(target + "\n", encoding="utf-8")
        self._move_folder_aside(key)
        new.replace(self.path(key))
        self.sync_folder("")

    def _move_folder_aside(self, key: str) -> None:
        """Rename a folder in place of a link: a copy with `cp -rL`, which may be the only one."""
        path = self.path(key)
        if path.is_dir() and not path.is_symlink():
            number = 1
            while (aside := self.path(f"{key}-was-a-folder-{number}")).exists():
                number += 1
            path.rename(aside)
            logger.warning(
                "%s was a folder and is %s now: a copy of a run that follows links makes one; "
                "delete it if you need no second copy",
                path,
                aside.name,
            )

    def pointed(self, key: str) -> str | None:
        path = self.path(key)
        if path.is_symlink():
            return str(path.readlink())
        if not path.is_file():
            return None
        with self.open(key) as stream:
            return stream.read(MOST_POINTER_BYTES).decode("utf-8", errors="replace").strip()

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.root).free


# A run's files in an object store, through fsspec.


class ObjectFiles(Files):
    """Files under any URL that fsspec opens: s3://, gs://, memory://.

    `options` are passed to fsspec.
    """

    renames = False

    def __init__(self, url: str, **options: Any) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise RuntimeError(
                f"{url} needs fsspec, which is missing: pip install fsspec"
            ) from error
        self.url = url.rstrip("/")
        self._files, root = url_to_fs(self.url, **options)
        self._root = root.rstrip("/")

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked(key)}" if key else self._root

    def location(self, key: str) -> str:
        return f"{self.url}/{checked(key)}" if key else self.url

    def make_folder(self, key: str) -> None:
        self._files.makedirs(self._path(key), exist_ok=True)

    def create(self, key: str) -> BinaryIO:
        if self.kind(key) is not None:
            raise FileExistsError(f"{self.location(key)} already exists")
        stream: BinaryIO = self._files.open(self._path(key), "wb")
        return stream

    def finish(self, stream: BinaryIO) -> None:
        # Closing the stream makes the object visible.
        stream.close()

    def abandon(self, stream: BinaryIO) -> None:
        with contextlib.suppress(OSError):
            getattr(stream, "discard", stream.close)()

    def sync_folder(self, key: str) -> None:
        """Do nothing: an object store has no folders to sync."""

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError("an object store can't rename a folder at once")

    def remove_folder(self, key: str) -> None:
        # `rm` would treat [ and * in a name as a pattern.
        for path in self._files.find(self._path(key)):
            self._files.rm_file(path)
        # Many stores have no empty folders.
        with contextlib.suppress(FileNotFoundError):
            self._files.rmdir(self._path(key))

    def remove_file(self, key: str) -> None:
        self._files.rm_file(self._path(key))

    def names(self, key: str) -> list[str]:
        self._files.invalidate_cache()
        path = self._path(key)
        entries = self._files.ls(path, detail=False) if self._files.isdir(path) else []
        return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in entries)

    def kind(self, key: str) -> str | None:
        self._files.invalidate_cache()
        path = self._path(key)
        if self._files.isfile(path):
            return "file"
        return "folder" if self._files.isdir(path) else None

    def size(self, key: str) -> int:
        return int(self._files.size(self._path(key)))

    def open(self, key: str) -> BinaryIO:
        stream: BinaryIO = self._files.open(self._path(key), "rb")
        return stream

    def point(self, key: str, target: str) -> None:
        self.put(key, f"{target}\n".encode())

    def put(self, key: str, data: bytes) -> None:
        with self._files.open(self._path(key), "wb") as stream:
            stream.write(data)

    def pointed(self, key: str) -> str | None:
        if self.kind(key) != "file":
            return None
        with self.open(key) as stream:
            return stream.read(MOST_POINTER_BYTES).decode("utf-8", errors="replace").strip()


# Estimate the duration of a save by timing a small write on the same volume.

DISK_TRIAL_FILE_NAME = ".speed-of-the-disk"
LEAST_TRIAL_BYTES = 2**20
MOST_TRIAL_BYTES = 2**29
# The trial writes 1/16 of the bytes of a save, so that it costs little in comparison.
DISK_TRIAL_DIVISOR = 16
# Duration of a save of almost no bytes: naming, writing and syncing the index and the manifest.
FIXED_SAVE_SECONDS = 0.1


def expected_save_seconds(files: Files, num_bytes: int) -> float:
    """Return the expected seconds of a save of this many bytes by this process.

    The trial file is removed afterwards.
    """
    data = memoryview(
        bytearray(min(max(num_bytes // DISK_TRIAL_DIVISOR, LEAST_TRIAL_BYTES), MOST_TRIAL_BYTES))
    )
    # A process that was killed during the trial leaves its file behind.
    with contextlib.suppress(FileNotFoundError):
        files.remove_file(DISK_TRIAL_FILE_NAME)

    began = time.perf_counter()
    stream = files.create(DISK_TRIAL_FILE_NAME)
    try:
        stream.write(data)
        files.finish(stream)
    except BaseException:
        files.abandon(stream)
        raise
    seconds = time.perf_counter() - began

    files.remove_file(DISK_TRIAL_FILE_NAME)
    return FIXED_SAVE_SECONDS + seconds * max(1.0, num_bytes / len(data))


# Close locks and files of a process in its forked children.

_descriptors: set[int] = set()


class LeftBehind(Protocol):
    """An object that belongs to the process that made it."""

    def leave_behind(self) -> None:
        """Give up the object; called in a forked child, because the parent owns it."""


# By the order in which they were made.
_holders: "weakref.WeakValueDictionary[int, LeftBehind]" = weakref.WeakValueDictionary()
_holder_numbers = itertools.count()


def keep_from_children(holder: LeftBehind) -> None:
    """Call `holder.leave_behind()` in every forked child, of the last one first."""
    _holders[next(_holder_numbers)] = holder


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
    for holder in reversed([*_holders.values()]):
        holder.leave_behind()
    _holders.clear()


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
