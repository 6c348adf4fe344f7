"""Faults of a checkpoint store that the torture must find, planted by replacing parts of ours.

`python -m torture --plant NAME` runs the torture on one.
Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import contextlib
import io
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from curry_train.runs import SavingPolicy, Store, TrainingState, store, values
from curry_train.runs.background import Staging
from curry_train.runs.files import Files
from curry_train.runs.layout import MANIFEST_FILE_NAME
from curry_train.runs.retention import newest_first
from curry_train.runs.store import Writing


def generators_stay_as_they_are() -> Any:
    return mock.patch.object(TrainingState, "restore_random", return_value=[])


def renamed_before_it_is_whole() -> Any:
    """Write the manifest after the rename."""

    def commit(self: Store, writing: Writing, parts: Any) -> Any:
        def write_later(files: Files, key: str, data: bytes) -> None:
            rename(self, writing)
            write(files, f"{writing.saved.folder}/{MANIFEST_FILE_NAME}", data)

        with (
            mock.patch.object(Files, "write", write_later),
            mock.patch.object(Store, "_rename"),
        ):
            return whole(self, writing, parts)

    whole, rename, write = Store.commit, Store._rename, Files.write
    return mock.patch.object(Store, "commit", commit)


def the_older_goes_before_the_newer_is_whole() -> Any:
    def begin(self: Store, kind: str, *arguments: Any, **options: Any) -> Any:
        if kind != "best-k" and (newest := self.latest()) is not None:
            self.discard(newest)
        return whole(self, kind, *arguments, **options)

    whole = Store.begin
    return mock.patch.object(Store, "begin", begin)


def retention_deletes_the_newest() -> Any:
    def superseded(self: SavingPolicy) -> Any:
        gone, line = whole(self), newest_first(self.store.all_committed())
        return [*gone, *(one for one in line[:1] if one not in gone and len(line) > 2)]

    whole = SavingPolicy._superseded
    return mock.patch.object(SavingPolicy, "_superseded", superseded)


def the_optimizer_does_not_wait() -> Any:
    def slow(self: Staging, *, non_blocking: bool) -> None:
        time.sleep(0.05)
        whole(self, non_blocking=non_blocking)

    whole = Staging._copy_all
    return mock.patch.multiple(Staging, wait=lambda self: None, _copy_all=slow)


def hashes_are_not_compared() -> Any:
    return mock.patch.object(store, "verify_files")


def anything_is_unpickled() -> Any:
    def load(data: bytes) -> Any:
        return torch.load(io.BytesIO(data), weights_only=False)

    return mock.patch.object(values, "load", load)


def links_are_followed() -> Any:
    def kind(self: Files, key: str) -> str | None:
        path = self.path(key)
        if path.is_file():
            return "file"
        return "folder" if path.is_dir() else None

    return mock.patch.multiple(Files, kind=kind, open=lambda self, key: self.path(key).open("rb"))


FAULTS: dict[str, Callable[[], Any]] = {
    fault.__name__: fault
    for fault in (
        generators_stay_as_they_are,
        renamed_before_it_is_whole,
        the_older_goes_before_the_newer_is_whole,
        retention_deletes_the_newest,
        the_optimizer_does_not_wait,
        hashes_are_not_compared,
        anything_is_unpickled,
        links_are_followed,
    )
}


def plant(name: str | None) -> Any:
    """Return a context in which the fault is there, if a name is given."""
    return FAULTS[name]() if name else contextlib.nullcontext()
