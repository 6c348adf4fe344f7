"""Delete the states beyond the step that a run resumes from, also across a kill.

A note in the run's folder lists these states before the first one is deleted, and each of them
until it is deleted.
Proof: `python -m pytest tests/test_saving_policy.py`.
"""

import json
from collections.abc import Iterable

from .files import Files, LocalFiles
from .ranks import Ranks
from .reading import is_being_read
from .store import Store

NOTE = "turned-back.json"


def given_up(files: Files) -> frozenset[str]:
    """Return the folders that were given up and may still exist."""
    if files.kind(NOTE) != "file":
        return frozenset()
    try:
        return frozenset(str(folder) for folder in json.loads(files.read(NOTE)))
    except (ValueError, TypeError):
        # The note was only partly written, on storage without rename: nothing was deleted yet.
        return frozenset()


def give_up(store: Store, folders: Iterable[str]) -> None:
    """Delete these folders for good; those that are being read are deleted later.

    All ranks call together.
    """
    added = set(folders)
    store.open()
    Ranks(store.group).agree(lambda: _write(store.files, given_up(store.files) | added))
    finish_giving_up(store)


def finish_giving_up(store: Store) -> None:
    """Delete the given-up folders that an earlier call left, because of a reader or a kill.

    All ranks call together.
    """
    ranks = Ranks(store.group)
    files = store.files

    def removable() -> list[str]:
        existing = [folder for folder in given_up(files) if files.kind(folder) is not None]
        return sorted(folder for folder in existing if not is_being_read(files, folder))

    def update_note() -> None:
        noted = given_up(files)
        remaining = {folder for folder in noted if files.kind(folder) is not None}
        if remaining != noted:
            _write(files, remaining)

    for folder in ranks.agree(removable):
        store.discard(folder)
    ranks.agree(update_note)


def _write(files: Files, folders: Iterable[str]) -> None:
    names = sorted(folders)
    if files.kind(NOTE) is not None and not (names and isinstance(files, LocalFiles)):
        files.remove_file(NOTE)
    if names:
        files.write(NOTE, json.dumps(names).encode())
    files.sync_folder("")
