"""Atomic checkpoint store: `runs/<run-id>/{rollback,recovery,best-k}/step-00000500.dcp`.

A checkpoint is committed when its manifest verifies. All ranks make a store of the same folder and
call together.
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
    """A run that this process writes.

    The first write takes the run's lock and removes the leftovers of interrupted saves.
    """

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
        # A save in the background may commit while this thread discards or sweeps.
        self._commits = threading.RLock()
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
        """Take the lock, and sweep.

        Raises LockedRun, which names the holder, if it is still locked after `wait_seconds`.
        """
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
        """Release the lock."""
        self._lock.release()
        self._opened = False

    def save(
        self, kind: str, step: int, state: State, *, metric: tuple[str, float] | None = None
    ) -> Saved:
        """Write a checkpoint and commit it; after an error, nothing new is committed."""
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
        """Prepare a save on all ranks together; afterwards each rank writes its part alone."""
        ranks = Ranks(self.group)
        checked_metric = None if metric is None else Metric(*metric)
        final = folder_name(kind, step, checked_metric)
        folder = ""
        try:
            self.open()
            folder = ranks.agree(lambda: self._prepare(final))
            return Writing(
                self.files,
                ranks,
                kind,
                step,
                checked_metric,
                state.snapshot(),
                folder=folder,
                algorithm=self.algorithm,
            )
        except (OSError, OtherRank, ValueError) as error:
            failed = self._failed(ranks, final, folder, error)
            raise error if isinstance(error, ValueError) else failed from error

    def commit(self, writing: Writing, parts: list[Part]) -> Saved:
        """Commit a checkpoint and update `latest`; called on the first rank."""
        with self._commits:
            manifest = writing.commit(parts)
            self._unfinished.discard(writing.folder)
            if writing.kind in RESUMABLE:
                self._point()
        return self._saved(writing.final, manifest)

    def failed(self, writing: Writing, error: Exception) -> SaveError:
        """Remove the files of a failed save; the returned error names the newest checkpoint."""
        return self._failed(writing.ranks, writing.final, writing.folder, error)

    def _failed(self, ranks: Ranks, final: str, folder: str, error: Exception) -> SaveError:
        if ranks.first and folder:
            # The next sweep removes what is left after an error.
            with contextlib.suppress(OSError):
                unfinished = folder != final or self.files.kind(f"{final}/{MANIFEST}") is None
                if unfinished and self.files.kind(folder) is not None:
                    self.files.remove_folder(folder)
            self._unfinished.discard(folder)
        return SaveError(self._words(final, error))

    def _words(self, folder: str, error: Exception) -> str:
        try:
            newest = self.latest()
        except OSError:
            newest = None
        remaining = "nothing else is saved"
        if newest:
            remaining = f"the newest intact checkpoint is step {newest.step} ({newest.kind})"
        return (
            f"{folder} in {self.files.location('')} was not saved: "
            f"{error or type(error).__name__}; {remaining}"
        )

    def discard(self, checkpoint: Saved | str | os.PathLike[str]) -> None:
        """Delete a checkpoint for good, so that a partly deleted one is never taken for intact."""
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
        """Make an empty folder to write into, and return it.

        A damaged checkpoint of the same name is removed; a valid one raises StepExists.
        """
        if self.files.kind(final) is not None:
            try:
                self.verify(final)
            except DamagedCheckpoint as error:
                logger.warning("a new save replaces a damaged checkpoint: %s", error)
            else:
                raise StepExists(
                    f"{self.files.location(final)} is saved already: if it is stale, discard it "
                    f"first"
                )
            self._remove(final)

        folder = final
        if self.files.renames:
            folder = f"{final.replace('/', '/.')}.partial-{secrets.token_hex(8)}"
        self._unfinished.add(folder)
        self.files.make_folder(folder)
        return folder

    def sweep(self) -> list[str]:
        """Remove the leftovers of interrupted saves and deletions, and return their names.

        Damaged checkpoints stay.
        """
        self.open()
        return Ranks(self.group).agree(self._sweep)

    def _sweep(self) -> list[str]:
        swept = []
        with self._commits:
            folders = [f"{kind}/{name}" for kind in KINDS for name in self.files.names(kind)]
            for folder in folders:
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
