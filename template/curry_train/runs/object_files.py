"""A run's files in an object store, through fsspec: no rename, no links, and an object is there once it is whole.

Proof: `python -m pytest tests/test_store_objects.py`.
"""

import contextlib
from typing import Any, BinaryIO

from .files import Files, checked


class ObjectFiles(Files):
    """Anything that fsspec opens by a URL: s3://, gs://, memory://. `options` go to fsspec."""

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
            raise FileExistsError(f"{self.location(key)} is there")
        stream: BinaryIO = self._files.open(self._path(key), "wb")
        return stream

    def finish(self, stream: BinaryIO) -> None:
        stream.close()  # an object is there once it is whole

    def abandon(self, stream: BinaryIO) -> None:
        with contextlib.suppress(OSError):
            getattr(stream, "discard", stream.close)()

    def sync_folder(self, key: str) -> None:
        """Nothing: there are no folders."""

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError("an object store can't rename a folder at once")

    def remove_folder(self, key: str) -> None:
        for path in self._files.find(
            self._path(key)
        ):  # not `rm`, which takes [ and * in a name for a pattern
            self._files.rm_file(path)
        with contextlib.suppress(FileNotFoundError):  # many stores have no empty folders
            self._files.rmdir(self._path(key))

    def remove_file(self, key: str) -> None:
        self._files.rm_file(self._path(key))

    def names(self, key: str) -> list[str]:
        self._files.invalidate_cache()
        path = self._path(key)
        found = self._files.ls(path, detail=False) if self._files.isdir(path) else []
        return sorted(str(name).rstrip("/").rsplit("/", 1)[-1] for name in found)

    def kind(self, key: str) -> str | None:
        self._files.invalidate_cache()
        path = self._path(key)
        return "file" if self._files.isfile(path) else "folder" if self._files.isdir(path) else None

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
