"""Every change since the save is found before anything is loaded.

python -m pytest tests/runs/test_store_damage.py
"""

import os
import random
import shutil

import pytest

from curry_train.runs import DamagedCheckpoint

from ..store_models import equal, new_state, tensors_of

KINDS = {"rollback": None, "best-k": ("dev_loss", 0.25)}


@pytest.fixture(params=KINDS)
def saved(request, store, tmp_path):
    """Return a store, a checkpoint in it, and its folder."""
    found = store.save(request.param, 7, new_state(), metric=KINDS[request.param])
    return store, found, tmp_path / found.folder


def refused(store, saved, message=""):
    """Check that `verify` and `load` find it, and that `load` changes nothing."""
    state = new_state(seed=1)
    before = tensors_of(state)
    with pytest.raises(DamagedCheckpoint, match=message):
        store.verify(saved)
    with pytest.raises(DamagedCheckpoint, match=message):
        store.load(saved, state)
    assert equal(tensors_of(state), before)


def test_every_flipped_bit_is_found(saved):
    """Flip bits all over each file, its first and last bytes included."""
    store, found, folder = saved
    generator = random.Random(0)
    missed = []
    flips = 0
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        places = {0, len(data) - 1, *(generator.randrange(len(data)) for _ in range(100))}
        for place in places:
            bit = generator.randrange(8)
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            flips += 1
            try:
                store.verify(found)
            except DamagedCheckpoint:
                continue
            missed.append((path.name, place, bit))
        path.write_bytes(data)
    assert (missed, flips >= 250) == ([], True)
    store.verify(found)


def shortened(folder):
    path = folder / "state.pt"
    path.write_bytes(path.read_bytes()[:-1])


def swapped(folder):
    names = sorted(path for path in folder.iterdir() if path.name != "manifest.json")[:2]
    names[0].rename(folder / "x")
    names[1].rename(names[0])
    (folder / "x").rename(names[1])


def linked(folder):
    shutil.move(folder / "state.pt", folder.parent / "elsewhere.json")
    (folder / "state.pt").symlink_to("../elsewhere.json")


def hidden_whitespace(folder):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes() + b"\n")


def piped(folder):
    (folder / "state.pt").unlink()
    os.mkfifo(folder / "state.pt")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shortened, "bytes, and"),
        (lambda folder: (folder / "state.pt").unlink(), "state.pt is missing"),
        (lambda folder: (folder / "more.bin").touch(), "more.bin is not in the manifest"),
        (
            lambda folder: (folder / "manifest.json").unlink(),
            "no manifest.json: its save was not finished",
        ),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "manifest can't be read"),
        (
            lambda folder: (folder / "manifest.json").write_bytes(b"[" * 100_000),
            "manifest can't be read",
        ),
        (hidden_whitespace, "own hash does not match"),
        (swapped, "bytes, and|another hash"),
        (linked, "state.pt is a link"),
        (piped, "state.pt is a link or device"),
    ],
)
def test_a_checkpoint_that_changed_does_not_count(saved, damage, message):
    store, found, folder = saved
    damage(folder)
    refused(store, found, message)
    assert store.committed(found.kind) == []
    assert found.folder in store.scan(found.kind)[1]


def test_a_checkpoint_under_another_name_is_not_that_step(saved):
    store, found, folder = saved
    other = found.folder.replace("00000007", "00000008")
    shutil.copytree(folder, folder.parent / other.partition("/")[2])
    with pytest.raises(DamagedCheckpoint, match=f"holds the manifest of {found.folder}"):
        store.verify(other)
    assert store.committed(found.kind) == [found]


def test_a_link_in_place_of_a_checkpoint_is_not_followed(saved, tmp_path):
    store, found, folder = saved
    shutil.move(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    refused(store, found, "is not the folder of a checkpoint")
    store.discard(found)
    assert (tmp_path / "elsewhere/manifest.json").is_file()
