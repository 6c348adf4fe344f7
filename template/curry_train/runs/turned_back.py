"""A run that goes on from an earlier step gives up the states beyond it; a kill in between does not bring them back.

A note names them before the first goes, and each until it is gone.
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
    """The folders of a line that was given up, as far as they are still there."""
    if files.kind(NOTE) != "file":
        return frozenset()
    try:
        return frozenset(str(folder) for folder in json.loads(files.read(NOTE)))
    except (ValueError, TypeError):
        return frozenset()  # torn, where no rename is: nothing was removed yet


def give_up(store: Store, folders: Iterable[str]) -> None:
    """Remove these for good; what somebody reads goes later. All ranks together."""
    found = set(folders)
    store.open()
    Ranks(store.group).agree(lambda: _write(store.files, given_up(store.files) | found))
    finish_giving_up(store)


def finish_giving_up(store: Store) -> None:
    """Remove what an earlier call had to leave, or was killed before. All ranks together."""
    ranks, files = Ranks(store.group), store.files

    def removable() -> list[str]:
        there = [folder for folder in given_up(files) if files.kind(folder) is not None]
        return sorted(folder for folder in there if not is_being_read(files, folder))

    def forget() -> None:
        noted = given_up(files)
        left = {folder for folder in noted if files.kind(folder) is not None}
        if left != noted:
            _write(files, left)

    for folder in ranks.agree(removable):
        store.discard(folder)
    ranks.agree(forget)


def _write(files: Files, folders: Iterable[str]) -> None:
    found = sorted(folders)
    if files.kind(NOTE) is not None and not (found and isinstance(files, LocalFiles)):
        files.remove_file(NOTE)
    if found:
        files.write(NOTE, json.dumps(found).encode())
    files.sync_folder("")
