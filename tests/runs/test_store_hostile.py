"""Nothing in a checkpoint is executed, and nothing outside of it is read.

python -m pytest tests/runs/test_store_hostile.py
"""

import dataclasses
import io
import operator
import os
import pickle
import zipfile

import pytest
import torch

from curry_train.runs import DamagedCheckpoint, StateMismatch, load_chosen
from curry_train.runs.files import MOST_SMALL_BYTES
from curry_train.runs.layout import FileEntry, hash_bytes, parse_manifest
from curry_train.runs.values import Stored, dump, load
from torture_shapes import Call

from ..store_models import alike, equal, new_state, save_best, save_new, tensors_of


@pytest.fixture
def saved(store):
    return save_new(store)


def forge_entry(store, saved, name, entry):
    """Replace what the manifest has of a file."""
    path = saved.location / "manifest.json"
    manifest = parse_manifest(path.read_bytes())
    path.write_bytes(dataclasses.replace(manifest, files={**manifest.files, name: entry}).render())


def forge(store, saved, name, data):
    """Replace a file and its manifest: hashes find damage, not forgery."""
    (saved.location / name).write_bytes(data)
    forge_entry(store, saved, name, FileEntry(len(data), hash_bytes(data)))
    store.verify(saved)


def refused(store, saved, message="."):
    with pytest.raises(DamagedCheckpoint, match=message):
        store.load(saved, new_state())


def forge_index(store, saved, change):
    """Forge the index of the tensors: `change` gets it, and the entry of one tensor."""
    content = load((saved.location / "state.pt").read_bytes())
    change(content["index"], content["index"]["model.0.bias"])
    forge(store, saved, "state.pt", dump(content))


def test_a_call_in_torchs_index_is_not_executed(store, saved, tmp_path):
    forge(store, saved, ".metadata", pickle.dumps(Call(os.system, f"touch {tmp_path}/trace")))
    state = new_state(seed=1)
    store.load(saved, state)
    assert alike(state, new_state())
    assert not (tmp_path / "trace").exists()


def test_a_pickle_in_place_of_a_tensor_is_not_executed(store, saved, tmp_path):
    """Rely on torch, which reads tensors with weights_only and refuses anything else."""
    stream = io.BytesIO()
    torch.save(Call(os.mkdir, str(tmp_path / "trace")), stream)
    forge(store, saved, "__0_0.distcp", stream.getvalue().ljust(60_000, b"\0"))
    place = [0, len(stream.getvalue())]
    forge_index(store, saved, lambda _, entry: operator.setitem(entry[2][0], slice(3, 5), place))
    refused(store, saved)
    assert not (tmp_path / "trace").exists()


STATES = [
    # No index, and no ranks.
    {"values": {}, "ranks": [{}]},
    {"values": {}, "ranks": []},
    # Values that are a number, ranks left out, and a list.
    {"values": 3, "ranks": []},
    {"values": {"step": 1}},
    [],
]


@pytest.mark.parametrize("data", [*map(dump, STATES), b"{", b"", pickle.dumps({})])
def test_invalid_state_values_are_damage(store, saved, data):
    forge(store, saved, "state.pt", data)
    refused(store, saved)


def test_a_call_in_the_state_is_refused_and_not_executed(store, saved, tmp_path):
    forge(store, saved, "state.pt", dump({"values": Call(os.system, f"touch {tmp_path}/trace")}))
    refused(store, saved)
    assert not (tmp_path / "trace").exists()


def test_a_state_that_would_take_for_ever_or_much_memory_is_refused(store, saved, monkeypatch):
    monkeypatch.setattr("curry_train.core.unpickle.MOST_SECONDS", 3)
    whole = io.BytesIO((saved.location / "state.pt").read_bytes())
    for bomb in (b"})" + b"2\x86" * 60 + b"K\x01s.", b"]r\xff\xff\xff\x7f."):
        forged = io.BytesIO()
        with zipfile.ZipFile(whole) as archive, zipfile.ZipFile(forged, "w") as made:
            for one in archive.namelist():
                made.writestr(one, bomb if one.endswith("data.pkl") else archive.read(one))
        forge(store, saved, "state.pt", forged.getvalue())
        refused(store, saved, "memory, time or stack")


@pytest.mark.parametrize("name", ["../state.pt", "a/b", "/etc/passwd", "..", ""])
def test_names_in_a_manifest_may_not_lead_outside(store, saved, name):
    forge_entry(store, saved, name, FileEntry(1, "00"))
    refused(store, saved)


def entry(number, value):
    return lambda _, entry: operator.setitem(entry, number, value)


def piece(number, value):
    return lambda _, entry: operator.setitem(entry[2][0], number, value)


FORGED_INDICES = {
    "a piece beyond the tensor": piece(0, [1]),
    "a smaller piece": piece(1, [3]),
    "a file outside": piece(2, "../../../secret"),
    "before its file": piece(3, -1),
    "behind its file": piece(3, 10**12),
    "a dtype that is text": entry(0, "float32"),
    "a larger tensor": entry(1, [10**12]),
    "too many dimensions": entry(1, [1] * 100_000),
    "pieces that are no list": entry(2, 3),
    "an entry less": lambda index, _: index.pop("model.0.bias"),
    "a generator of another size": lambda index, _: operator.setitem(
        index["rank-0.random/torch"], 1, [3]
    ),
    "many tensors in the same place": lambda index, entry: index.update(
        {f"part.{number}": entry for number in range(1000)}
    ),
}


@pytest.mark.parametrize("name", FORGED_INDICES)
def test_a_forged_index_is_refused_before_anything_changes(store, saved, name):
    forge_index(store, saved, FORGED_INDICES[name])
    state = new_state(seed=1)
    before = tensors_of(state)
    with pytest.raises((DamagedCheckpoint, StateMismatch)):
        store.load(saved, state)
    assert equal(tensors_of(state), before)


@pytest.mark.parametrize("name", ["manifest.json", "state.pt"])
def test_a_huge_file_is_refused_unread_and_an_older_checkpoint_loads(
    store, saved, name, monkeypatch
):
    """Make files of 8 GiB without content: reading one whole would end the test's process."""
    newer = save_new(store, 2)
    os.truncate(newer.location / name, 2**33)
    if name != "manifest.json":
        forge_entry(store, newer, name, FileEntry(2**33, "00"))
        # Hashing 8 GiB takes seconds.
        monkeypatch.setattr("curry_train.runs.store.verify_files", lambda *_: None)
    assert MOST_SMALL_BYTES < 2**33
    resumed = load_chosen(store, new_state(seed=1))
    assert (resumed.saved, list(resumed.damaged)) == (saved, [newer.folder])


WRONG_VALUES = {
    "a step that is text": lambda values, _: values.update(step="7"),
    "a negative position": lambda values, _: values.update(position=-1),
    "an optimizer without class": lambda values, _: values["content"]["optimizer.0"].pop("class"),
    "a tensor that is not saved": lambda values, _: values["content"].update(
        {"part.scheduler-0": Stored("part.gone")}
    ),
    "a part that its object refuses": lambda values, _: values["content"].update(
        {"part.scheduler-0": 3}
    ),
    "a group that is no mapping": lambda values, _: values["content"]["optimizer.0"].update(
        groups=[1]
    ),
    "a generator of python": lambda _, random: random.update(python=(1, 2)),
    "a generator of numpy": lambda _, random: random.update(numpy=(1, 2)),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_are_refused(store, saved, name):
    content = load((saved.location / "state.pt").read_bytes())
    WRONG_VALUES[name](content["values"], content["ranks"][0]["random"])
    forge(store, saved, "state.pt", dump(content))
    with pytest.raises((DamagedCheckpoint, StateMismatch)):
        store.load(saved, new_state(seed=1))


def test_a_best_checkpoint_with_a_false_header_is_damage(store):
    found = save_best(store, 1, new_state())
    data = (found.location / "model.safetensors").read_bytes()
    for forged in (
        (2**40).to_bytes(8, "little") + data[8:],
        data.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1),
        data.replace(b'"shape":[16', b'"shape":[99', 1),
        data[:8] + b"[" + data[9:],
        b"",
    ):
        forge(store, found, "model.safetensors", forged)
        refused(store, found)
