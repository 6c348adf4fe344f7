"""Snapshots are read to the byte, and files that are none are refused in one line.

python -m pytest tests/plan/test_snapshot.py
"""

import os
import pickle
import random

import pytest

from curry_train.plan.snapshot import UnusableSnapshot, read_snapshot
from torture_shapes import Call

from ..snapshot_files import Recorder, trained, write

MIB = 2**20


def history_of(snapshot, tmp_path):
    (history,) = read_snapshot(write(tmp_path / "a.pickle", snapshot)).devices
    return history


@pytest.mark.parametrize("recorded_from", [0, 100])
@pytest.mark.parametrize("expandable", [False, True])
def test_a_record_has_the_peaks_of_its_allocator_to_the_byte(tmp_path, expandable, recorded_from):
    for seed in range(10):
        draw = random.Random(seed)
        recorder = Recorder(expandable=expandable)
        allocator = recorder.allocator
        blocks = []
        for number in range(300):
            if number == recorded_from:
                recorder.events.clear()
                before = allocator.reserved
                allocator.peak_reserved = before
                allocator.peak_allocated = allocator.allocated
            num_bytes = draw.randint(1, 2 ** draw.randint(1, 26))
            blocks.append(recorder.allocate(num_bytes, stream=draw.randint(0, 1)))
            if draw.random() < 0.5:
                recorder.free(blocks.pop(draw.randrange(len(blocks))))
            if draw.random() < 0.05:
                recorder.empty_cache()
        history = history_of(recorder.snapshot(), tmp_path)
        assert history.peak_reserved == allocator.peak_reserved
        assert (history.reserved[0], history.reserved[-1]) == (before, allocator.reserved)
        assert history.peak_allocated == allocator.peak_allocated
        alive = history.alive_at(history.peak_index)
        assert sum(life.num_bytes for life in alive) == history.peak_allocated
        assert history.contradictions == 0


def test_a_block_of_the_start_gets_the_rest_that_was_not_split_off(tmp_path):
    recorder = Recorder()
    held = recorder.allocate(20 * MIB - 4096)  # in a segment of 20 MiB
    recorder.events.clear()
    recorder.free(held)
    recorder.empty_cache()
    recorder.top += 20 * MIB  # the address is given out again
    recorder.allocate(20 * MIB - 4096)
    history = history_of(recorder.snapshot(), tmp_path)
    assert history.peak_allocated == history.allocated[0] == 20 * MIB


def test_devices_without_memory_are_left_out(tmp_path):
    recorder = Recorder(device=2)
    recorder.allocate(3 * MIB)
    history = history_of(recorder.snapshot(), tmp_path)
    assert history.device == 2
    assert history.peak_allocated == 3 * MIB
    assert history.peak_reserved == 20 * MIB


# Files that are no snapshot.


def wrong_fields():
    good = trained(foreach=False).snapshot()
    segment = good["segments"][0]
    event = good["device_traces"][0][0]
    yield good | {"segments": 3}
    yield good | {"device_traces": [["alloc"]]}
    yield {"segments": [], "device_traces": []}
    yield {"model": {"weight": [1.0]}}
    yield "text"
    for changed in ({"addr": "7"}, {"size": -1}, {"frames": [5]}, {"action": 3}):
        yield good | {"device_traces": [[event | changed]]}
    for changed in ({"address": None}, {"total_size": -5}, {"blocks": 1}):
        yield good | {"segments": [segment | changed]}


def hostile_files(folder):
    # Forged pickles are in tests/core/test_unpickle.py.
    yield b""
    yield b"PK\x03\x04" + bytes(100)
    yield pickle.dumps({"segments": [Call(os.mkdir, str(folder / "made"))]})
    yield from (pickle.dumps(value) for value in wrong_fields())
    whole = pickle.dumps(trained(foreach=False).snapshot(), protocol=4)
    yield from (whole[: len(whole) * part // 8] for part in (1, 4, 7))


def test_hostile_files_run_nothing_and_are_refused_in_one_line(tmp_path):
    path = tmp_path / "hostile.pickle"
    for data in hostile_files(tmp_path):
        path.write_bytes(data)
        with pytest.raises(UnusableSnapshot) as caught:
            read_snapshot(path)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600
    assert not (tmp_path / "made").exists()


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "large.pickle"
    with path.open("wb") as file:
        file.truncate(600 * MIB)
    with pytest.raises(UnusableSnapshot, match=r"is too large: 600 MiB, and 512 MiB can be read"):
        read_snapshot(path)
