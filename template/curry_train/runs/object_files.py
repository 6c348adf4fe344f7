"""A run's files in an object store, through fsspec.

An object store has no rename and no links; an object becomes visible when it is complete.
Proof: `python -m pytest tests/test_store_objects.py`.
"""

import contextlib
from typing import Any, BinaryIO

from .files import Files, checked


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
        with self._files.open(self._path(key), "wb") as stream:
            stream.write(f"{target}\n".encode())

    def pointed(self, key: str) -> str | None:
        return self.read(key).decode("utf-8").strip() if self.kind(key) == "file" else None
