"""A run's checkpoints on the disk: `runs/<run-id>/{rollback,recovery,best-k}/step-00000500.dcp`, whole or not there.

A checkpoint is committed when its manifest verifies. All ranks make a store of the same folder and call together.
Proof: `python -m pytest tests/test_store.py`.
"""

import contextlib
import logging
import os
import secrets
import threading
import time
from types import TracebackType
from typing import Any

from .digests import default_algorithm
from .errors import DamagedCheckpoint, LockedRun, SaveError, StepExists
from .files import Files
from .hashing_writer import Part
from .lock import RunLock
from .manifest import MANIFEST
from .names import KINDS, RESUMABLE, Metric, Saved, folder_name, is_leftover, step_of
from .ranks import OtherRank, Ranks
from .saved_run import SavedRun
from .snapshot import State
from .writing import Writing

LATEST = "latest"
logger = logging.getLogger(__name__)


class Store(SavedRun):
    """A run that this process writes. The first write takes the run's lock and removes what interrupted saves left."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        files: Files | None = None,
        algorithm: str | None = None,
        group: Any = None,
    ) -> None:
        super().__init__(root, files=files, group=group)
        self.algorithm = algorithm or default_algorithm()
        self._lock = RunLock(self.files)
        self._opened = False
        self._commits = (
            threading.RLock()
        )  # a save in the background commits while this thread discards or sweeps
        self._unfinished: set[str] = set()

    def __enter__(self) -> "Store":
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def open(self, *, wait_seconds: float = 0.0) -> None:
        """Take the lock, and sweep. Raises LockedRun, which names who holds it still after so many seconds."""
        self._lock.require_own()
        if not self._opened:
            Ranks(self.group).agree(lambda: self._open_first(until=time.monotonic() + wait_seconds))
            self._opened = True

    def _open_first(self, *, until: float) -> None:
        for kind in KINDS:
            self.files.make_folder(kind)
        self.files.sync_folder("")
        while True:
            try:
                self._lock.acquire()
                break
            except LockedRun:
                if time.monotonic() >= until:
                    raise
            time.sleep(0.25)
        self._sweep()

    def close(self) -> None:
        """Give the lock back."""
        self._lock.release()
        self._opened = False

    def save(
        self, kind: str, step: int, state: State, *, metric: tuple[str, float] | None = None
    ) -> Saved:
        """Write a checkpoint and commit it. On an error nothing counts that did not count before."""
        ranks = Ranks(self.group)
        writing = self.begin(kind, step, state, metric=metric)

        def commit(parts: list[Part]) -> list[Saved]:
            return [self.commit(writing, parts)] * ranks.size

        try:
            return ranks.exchange(writing.write, commit)
        except (OSError, RuntimeError) as error:
            raise self.failed(writing, error) from error

    def begin(
        self, kind: str, step: int, state: State, *, metric: tuple[str, float] | None = None
    ) -> Writing:
        """What the ranks have to do together before each writes its part alone."""
        ranks, found, folder = Ranks(self.group), None if metric is None else Metric(*metric), ""
        final = folder_name(kind, step, found)
        try:
            self.open()
            folder = ranks.agree(lambda: self._prepare(final))
            return Writing(
                self.files,
                ranks,
                kind,
                step,
                found,
                state.snapshot(),
                folder=folder,
                algorithm=self.algorithm,
            )
        except (OSError, OtherRank, ValueError) as error:
            failed = self._failed(ranks, final, folder, error)
            raise error if isinstance(error, ValueError) else failed from error

    def commit(self, writing: Writing, parts: list[Part]) -> Saved:
        """On the first rank: make a checkpoint count, and let `latest` point to it."""
        with self._commits:
            manifest = writing.commit(parts)
            self._unfinished.discard(writing.folder)
            if writing.kind in RESUMABLE:
                self._point()
        return self._saved(writing.final, manifest)

    def failed(self, writing: Writing, error: Exception) -> SaveError:
        """Remove what was written of a save; the error says what is on the disk."""
        return self._failed(writing.ranks, writing.final, writing.folder, error)

    def _failed(self, ranks: Ranks, final: str, folder: str, error: Exception) -> SaveError:
        if ranks.first and folder:
            with contextlib.suppress(OSError):  # the next sweep removes the rest
                unfinished = folder != final or self.files.kind(f"{final}/{MANIFEST}") is None
                if unfinished and self.files.kind(folder) is not None:
                    self.files.remove_folder(folder)
            self._unfinished.discard(folder)
        return SaveError(self._words(final, error))

    def _words(self, what: str, error: Exception) -> str:
        try:
            newest = self.latest()
        except OSError:
            newest = None
        rest = (
            f"step {newest.step} ({newest.kind}) is the newest that is whole"
            if newest
            else "nothing else is saved"
        )
        return f"{what} in {self.files.location('')} was not saved: {error or type(error).__name__}; {rest}"

    def discard(self, checkpoint: Saved | str | os.PathLike[str]) -> None:
        """Remove a checkpoint for good; at no moment is a part of it taken for the whole."""
        folder = self.folder_of(checkpoint)
        self.open()
        Ranks(self.group).agree(lambda: self._discard_first(folder))

    def _discard_first(self, folder: str) -> None:
        with self._commits:
            if self.files.kind(folder) is not None:
                self._remove(folder)
                self._point()

    def _remove(self, folder: str) -> None:
        if not self.files.renames:
            if self.files.kind(f"{folder}/{MANIFEST}") is not None:
                self.files.remove_file(f"{folder}/{MANIFEST}")
            self.files.remove_folder(folder)
            return
        removed = f"{folder.replace('/', '/.')}.removed-{secrets.token_hex(8)}"
        self.files.rename(folder, removed)
        self.files.sync_folder(folder.partition("/")[0])
        self.files.remove_folder(removed)

    def _prepare(self, final: str) -> str:
        """An empty folder to write into. A damaged checkpoint in the way is removed, a valid one never."""
        if self.files.kind(final) is not None:
            try:
                self.verify(final)
            except DamagedCheckpoint as error:
                logger.warning("replaced by a new save: %s", error)
            else:
                raise StepExists(
                    f"{self.files.location(final)} is saved already: if it is stale, discard it first"
                )
            self._remove(final)
        folder = (
            f"{final.replace('/', '/.')}.partial-{secrets.token_hex(8)}"
            if self.files.renames
            else final
        )
        self._unfinished.add(folder)
        self.files.make_folder(folder)
        return folder

    def sweep(self) -> list[str]:
        """Remove what interrupted saves and removals left; returns its names. What is damaged stays as it is."""
        self.open()
        return Ranks(self.group).agree(self._sweep)

    def _sweep(self) -> list[str]:
        swept = []
        with self._commits:
            for folder in [f"{kind}/{name}" for kind in KINDS for name in self.files.names(kind)]:
                if folder not in self._unfinished and self._left_over(folder):
                    self.files.remove_folder(folder)
                    swept.append(folder)
            self._point()
        return swept

    def _left_over(self, folder: str) -> bool:
        kind, _, name = folder.partition("/")
        unfinished = (
            step_of(kind, name) is not None and self.files.kind(f"{folder}/{MANIFEST}") is None
        )
        return is_leftover(name) or (unfinished and not self.files.renames)

    def _point(self) -> None:
        newest = self.latest()
        if newest is not None and self.files.pointed(LATEST) != newest.folder:
            self.files.point(LATEST, newest.folder)
        elif newest is None and self.files.pointed(LATEST) is not None:
            self.files.remove_file(LATEST)
