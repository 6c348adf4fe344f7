"""An fsspec file system as strict as object stores are, where `memory://` is lenient.

Objects appear whole when they are closed, and never if they are discarded. There are no folders, no
rename, no copy, no append, no seeking back. A checkpoint's objects are written once. Each client
caches listings until it forgets
them, as s3fs does. Proof: `python -m pytest tests/runs/test_store_objects.py`.
"""

import io
from typing import Any, ClassVar

import fsspec
from fsspec import AbstractFileSystem


class StrictObjects(AbstractFileSystem):
    """The file system of `strict://bucket/key`; all instances in a process share the objects."""

    protocol = "strict"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._listed: dict[str, list[dict[str, Any]]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("strict://").strip("/")

    def invalidate_cache(self, path: str | None = None) -> None:
        self._listed.clear()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: a folder exists while a key begins with its name."""

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Do nothing."""

    def rmdir(self, path: str) -> None:
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self._listed:
            self._listed[path] = self._list(path)
        found = self._listed[path]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [entry["name"] for entry in found]

    def _list(self, path: str) -> list[dict[str, Any]]:
        if path in self.objects:
            return [{"name": path, "size": len(self.objects[path]), "type": "file"}]
        found = {}
        for key, data in self.objects.items():
            if key.startswith(f"{path}/"):
                name, deeper, _ = key.removeprefix(f"{path}/").partition("/")
                entry = (
                    {"size": 0, "type": "directory"}
                    if deeper
                    else {"size": len(data), "type": "file"}
                )
                found[name] = {"name": f"{path}/{name}", **entry}
        return [found[name] for name in sorted(found)]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        self.ls(path)
        return {"name": path, "size": 0, "type": "directory"}

    def rm_file(self, path: str) -> None:
        del self.objects[self._existing(path)]

    def _existing(self, path: str) -> str:
        path = self._strip_protocol(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return path

    def mv(self, *paths: Any, **options: Any) -> None:
        raise NotImplementedError("an object can't be renamed")

    def cp_file(self, *paths: Any, **options: Any) -> None:
        raise NotImplementedError("a copy goes through the client")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(self.objects[self._existing(path)])
        if mode != "wb":
            raise NotImplementedError(f"an object can't be opened for {mode}")
        path = self._strip_protocol(path)
        if ".dcp/" in path and path in self.objects:
            raise AssertionError(f"{path} is of a checkpoint, and would be written twice")
        return _Upload(self, path)


class _Upload(io.RawIOBase):
    """An upload, which becomes an object when it is closed."""

    def __init__(self, files: StrictObjects, path: str) -> None:
        super().__init__()
        self._files = files
        self._path = path
        self._parts = list[bytes]()
        self._count = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        self._count += len(self._parts[-1])
        return len(self._parts[-1])

    def tell(self) -> int:
        return self._count

    def discard(self) -> None:
        self._parts = []
        self._path = ""
        super().close()

    def close(self) -> None:
        if not self.closed and self._path:
            self._files.objects[self._path] = b"".join(self._parts)
        super().close()


fsspec.register_implementation("strict", StrictObjects, clobber=True)
