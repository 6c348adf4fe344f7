"""Write, verify and load the checkpoints of one run; a checkpoint is whole or absent.

A checkpoint is committed when its manifest verifies. All ranks make a store of the same folder and
call together.

Proof: `python -m pytest tests/runs/test_store.py`.
"""

import contextlib
import dataclasses
import errno
import functools
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .files import (
    MOST_SMALL_BYTES,
    StrPath,
    making,
    point,
    read,
    remove_folder,
    sync_folder,
    write,
)
from .format import (
    Contents,
    SafetensorsSave,
    ShardedSave,
    Snapshot,
    Writing,
    checked_index,
    copy_into,
    read_best,
    read_tensors,
    readable,
)
from .layout import (
    BEST_KIND,
    CHECKPOINT_KINDS,
    MANIFEST_FILE_NAME,
    Metric,
    SavedCheckpoint,
    folder_name,
    read_manifest,
    step_of,
    verify_files,
)
from .lock import RunLock
from .ranks import DamagedCheckpoint, OtherRank, Ranks, SaveError, StepExists, reading
from .retention import newest_first
from .state import Load, TrainingState
from .values import dump, load_foreign

# Write and commit one checkpoint: its folder, the part of each rank, and the manifest.

# The store saves the state of a training, or a snapshot of it.
Savable = TrainingState | Snapshot

STATE_FILE_NAME = "state.pt"
# The values beside the tensors, and the tensors' index; large arrays are among the tensors.
MOST_STATE_BYTES = 2**28
# The names of an uncommitted folder, and of one that is being removed.
LEFTOVER_PATTERN = re.compile(r"\..+\.(?:partial|removed)-[0-9a-f]+")


# Read-only access to a run: list, verify and load its checkpoints.

# A checkpoint of a run, or its folder in the run's folder.
Which = SavedCheckpoint | str


def folder_of(checkpoint: Which) -> str:
    folder = checkpoint if isinstance(checkpoint, str) else checkpoint.folder
    if step_of(folder) is None:
        raise DamagedCheckpoint(f"{folder!r} is not the folder of a checkpoint")
    return folder


class SavedRun:
    """The checkpoints of the run at `root`, a folder."""

    def __init__(self, root: StrPath) -> None:
        if "://" in str(root) or root == "":
            raise ValueError(
                f"{root or 'an empty text'} is no folder: write the run to one on a disk; its "
                "committed checkpoints can be copied elsewhere with fsspec"
            )
        self.root = Path(root).absolute()

    def steps(self, *kinds: str) -> dict[str, int]:
        """Return the step of each folder of a checkpoint of these kinds, damaged or not."""
        found = {}
        for path in [one for kind in kinds for one in sorted((self.root / kind).glob("*"))]:
            folder = f"{path.parent.name}/{path.name}"
            if (step := step_of(folder)) is not None:
                found[folder] = step
        return found

    def scan(self, *kinds: str) -> tuple[list[SavedCheckpoint], dict[str, str]]:
        """Return the checkpoints of these kinds, or all, by step, and why others are damaged.

        Damage inside a file of the right size is found by `verify` only.
        """
        kinds = kinds or CHECKPOINT_KINDS
        committed = []
        damaged = {}
        for folder in self.steps(*kinds):
            try:
                committed.append(read_manifest(self.root, folder))
            except DamagedCheckpoint as error:
                damaged[folder] = str(error)
        return sorted(committed, key=lambda one: (kinds.index(one.kind), one.step)), damaged

    def committed(self, *kinds: str) -> list[SavedCheckpoint]:
        """Return the checkpoints, of all kinds or these, whose manifests and sizes are valid."""
        return self.scan(*kinds)[0]

    def states(self) -> list[SavedCheckpoint]:
        """Return the rollbacks and recoveries that training can resume from, newest first."""
        return newest_first(self.committed())

    def latest(self) -> SavedCheckpoint | None:
        """Return the newest checkpoint that training can resume from."""
        return next(iter(self.states()), None)

    def verify(self, checkpoint: Which) -> SavedCheckpoint:
        """Read and hash every file; raise DamagedCheckpoint with the difference."""
        manifest = read_manifest(self.root, folder_of(checkpoint))
        verify_files(manifest, manifest.files)
        return manifest

    def load(
        self, checkpoint: Which, state: TrainingState, *, strict: bool = True
    ) -> Sequence[str]:
        """Verify a checkpoint, compare it with the state, and only then change the state.

        The ranks share the reading for the verification, and an error on one of them is raised on
        all. After an error while values are restored, the state has to be loaded again. Returns
        notes on how the state differs from what was saved.
        """
        ranks = Ranks()

        def check() -> Contents:
            manifest = read_manifest(self.root, folder_of(checkpoint))
            verify_files(manifest, sorted(manifest.files)[ranks.rank :: ranks.size])
            return self.open_content(manifest)

        contents = ranks.all_do(check)
        loading = ranks.all_do(lambda: Load(state, contents, strict=strict))

        ranks.all_do(lambda: contents.fill(loading.targets))
        ranks.all_do(loading.finish)
        return loading.notes

    def open_content(self, manifest: SavedCheckpoint) -> Contents:
        """Return what a verified checkpoint holds."""
        folder = manifest.location
        path = folder / STATE_FILE_NAME
        with reading(f"{path} can't be read"):
            found = load_foreign(read(path, most_bytes=MOST_STATE_BYTES))
            values, ranks = found["values"], found["ranks"]
            if not isinstance(values, dict) or not isinstance(ranks, list):
                raise ValueError("it does not hold the values of a state")
        if manifest.kind == BEST_KIND:
            best = read_best(folder, found.get("others"))
            copy = functools.partial(copy_into, values=best)
            return Contents(best, values, ranks, copy, model_only=True)
        with reading("the index of the tensors can't be read"):
            tensors, metadata = checked_index(found.get("index"), manifest)
        fill = functools.partial(read_tensors, folder, metadata)
        return Contents(tensors, values, ranks, fill)


# Atomic checkpoint store: `runs/<run-id>/{rollback,recovery,best-k}/step-00000500.dcp`.

LATEST_POINTER = "latest"
logger = logging.getLogger(__name__)


class Store(SavedRun):
    """A run that this process writes.

    The first write takes the run's lock and removes the leftovers of interrupted saves.
    """

    # Folders of checkpoints that are removed when the next state is committed.
    given_up: Sequence[str] = ()
    _opened = False

    def __init__(self, root: StrPath) -> None:
        super().__init__(root)
        self._lock = RunLock(self.root)

    def __enter__(self) -> "Store":
        self.open()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def open(self, *, wait_seconds: float = 0.0) -> None:
        """Take the lock, and remove what interrupted saves left.

        Raises LockedRun, which names the holder, if it is still locked after `wait_seconds`.
        """
        self._lock.require_own()
        if not self._opened:
            Ranks().agree(lambda: self._open_first(wait_seconds))
            self._opened = True

    def _open_first(self, wait_seconds: float) -> None:
        with making(self.root):
            for kind in CHECKPOINT_KINDS:
                (self.root / kind).mkdir(parents=True, exist_ok=True)
            sync_folder(self.root)
            self._lock.acquire(wait_seconds=wait_seconds)
        # Leftovers of interrupted saves and deletions go, and damaged checkpoints stay.
        for kind in CHECKPOINT_KINDS:
            for path in [*(self.root / kind).iterdir()]:
                if LEFTOVER_PATTERN.fullmatch(path.name):
                    remove_folder(path)
        self._write_latest()

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()
        self._opened = False

    def save(
        self, kind: str, step: int, state: Savable, *, metric: Metric | None = None
    ) -> SavedCheckpoint:
        """Write a checkpoint and commit it; after an error, nothing new is committed."""
        writing = self.begin(kind, step, state, metric=metric)
        return self.finish(writing, writing.write)

    def begin(
        self, kind: str, step: int, state: Savable, *, metric: Metric | None = None
    ) -> Writing:
        """Prepare a save on all ranks together; afterwards each rank writes its part alone."""
        ranks = Ranks()
        final = folder_name(kind, step, metric)
        folder: Path | None = None
        try:
            # An error on one rank must reach the others before they wait for it in a collective.
            snapshot = ranks.all_do(state.snapshot)
            self.open()
            saved = SavedCheckpoint(kind, step, {}, metric, location=self.root / final)
            folder = ranks.agree(lambda: self._prepare(final))
            prepare = SafetensorsSave if kind == BEST_KIND else ShardedSave
            return prepare(saved, snapshot, folder, ranks)
        except Exception as error:
            # A user's state may raise anything, and the unfinished folder has to go.
            failed = self.failed(ranks, final, folder, error)
            if isinstance(error, OSError | OtherRank):
                raise failed from error
            raise

    def finish(self, writing: Writing, write: Callable[[], Any]) -> SavedCheckpoint:
        """Let each rank `write` its tensors, and commit the checkpoint."""
        ranks = writing.ranks
        try:
            return ranks.collect(
                lambda: (write(), writing.entries, writing.snapshot.rank_values),
                lambda parts: self.commit(writing, *zip(*parts, strict=True)),
            )
        except Exception as error:  # a part of the user's state may raise anything
            raise self.failed(ranks, writing.saved.folder, writing.folder, error) from error

    def commit(
        self, writing: Writing, places: Sequence[Any], files: Sequence[Any], values: Sequence[Any]
    ) -> SavedCheckpoint:
        """Write the manifest and rename the folder; called on the first rank.

        The ranks have written their tensors to `places` in `files`, and have these `values`.
        """
        # After a takeover: the new writer has removed the folder, or this raises.
        self._lock.require_held()
        content = {
            "values": writing.snapshot.values,
            "ranks": [*values],
            **writing.join(places),
        }
        data = readable(dump(content), MOST_STATE_BYTES, "the state beside its tensors")
        with writing.create_stream(STATE_FILE_NAME) as stream:
            stream.write(data)
        for entries in files:
            writing.entries |= entries
        saved = dataclasses.replace(writing.saved, files=writing.entries)
        rendered = readable(saved.render(), MOST_SMALL_BYTES, "the manifest")
        write(writing.folder / MANIFEST_FILE_NAME, rendered)

        given_up = self.given_up if saved.is_state else ()
        removed = [self._set_aside(folder) for folder in {saved.folder, *given_up}]
        writing.folder.rename(saved.location)
        if given_up:
            self.given_up = ()
        # From here on the checkpoint is committed, and an error does not undo it.
        try:
            sync_folder(self.root / saved.kind)
            self._write_latest()
            for path in removed:
                remove_folder(path)
        except OSError as error:
            logger.warning("%s is saved, but an error followed: %s", saved.location, error)
        return saved

    def failed(self, ranks: Ranks, what: str, folder: Path | None, error: Exception) -> SaveError:
        """Remove the files of a failed save; the returned error names the newest checkpoint."""
        if ranks.first and folder:
            # The next opening removes what is left after an error.
            with contextlib.suppress(OSError):
                remove_folder(folder)
        remaining = "nothing else is saved"
        with contextlib.suppress(OSError):
            if newest := self.latest():
                remaining = f"the newest intact checkpoint is step {newest.step} ({newest.kind})"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            remaining += "; free some space, or keep fewer checkpoints"
        return SaveError(
            f"{what} in {self.root} was not saved: {error or type(error).__name__}; {remaining}"
        )

    def discard(self, checkpoint: Which) -> None:
        """Delete a checkpoint for good, so that a partly deleted one is never taken for intact."""
        folder = folder_of(checkpoint)
        self.open()
        Ranks().agree(lambda: self._discard_first(folder))

    def _discard_first(self, folder: str) -> None:
        self._lock.require_held()
        removed = self._set_aside(folder)
        sync_folder(removed.parent)
        remove_folder(removed)
        self._write_latest()

    def _set_aside(self, folder: str) -> Path:
        """Hide a folder that is to be removed, if there is one; the next opening removes it too."""
        path = self.root / folder
        removed = path.with_name(f".{path.name}.removed-{secrets.token_hex(8)}")
        if path.exists():
            path.rename(removed)
        return removed

    def _prepare(self, final: str) -> Path:
        """Make an empty folder to write into, and return it.

        An incomplete checkpoint of the same name, or one that was given up, stays until the new
        one is written; any other raises StepExists.
        """
        with contextlib.suppress(DamagedCheckpoint):
            saved = read_manifest(self.root, final)
            if final not in self.given_up:
                raise StepExists(
                    f"{saved.location} is saved already: if it is stale, discard it first"
                )
        path = self.root / final
        folder = path.with_name(f".{path.name}.partial-{secrets.token_hex(8)}")
        folder.mkdir(parents=True)
        return folder

    def _write_latest(self) -> None:
        newest = self.latest()
        point(self.root / LATEST_POINTER, None if newest is None else newest.folder)
