"""`memory --snapshot` prints who owns the peak of a recorded training, and what lowers it.

python -m pytest tests/cli/test_memory_snapshot.py
"""

import functools

import pytest

from ..command_runs import flat, ran, require_narrow, results
from ..snapshot_files import Recorder, Training, trained, write

MIB = 2**20


run = functools.partial(ran, "memory")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Write a snapshot with paths of Windows, which are shown as those of Linux."""
    snapshot = trained(windows=True).snapshot()
    return write(tmp_path_factory.mktemp("snapshot") / "run.pickle", snapshot)


def test_owners_add_up_to_the_peak_in_text_of_80_columns(recorded):
    ended = run("--snapshot", recorded)
    require_narrow(ended.output)
    for part in (
        "run.pickle, device 0: 423 events, 2 steps",
        "optimizer state ",
        "attention train.py:41 < train_step train",
        "free blocks (reserved, not allocated)",
        "expandable_segments:True",
    ):
        assert part in ended.output
    assert len(ended.output.splitlines()) <= 30
    found = results("memory --snapshot", recorded)
    assert sum(size for _, size in found["owners"]) == found["peak_allocated_bytes"]
    reserved = sum(size for _, size in found["owners"]) + found["reserved_free_bytes"]
    assert reserved == found["reserved_at_peak_bytes"] <= found["peak_reserved_bytes"]
    assert [row["allocated"] for row in found["steps"]][1] == found["peak_allocated_bytes"]


def test_an_out_of_memory_error_is_named_with_what_was_free():
    training = trained()
    training.recorder.event("oom", 120 * MIB, 2048 * MIB)
    path = write("oom.pickle", training.snapshot())
    ended = run("--snapshot", path)
    assert "out of memory at event 423: 2.00 GiB asked for" in ended.output
    assert "120 MiB of the device free" in ended.output
    (error,) = results("memory --snapshot", path)["out_of_memory"]
    assert error["requested_bytes"] == 2048 * MIB


def test_a_cut_record_says_what_is_missing():
    snapshot = trained().snapshot()
    snapshot["device_traces"][0] = snapshot["device_traces"][0][200:]
    ended = run("--snapshot", write("cut.pickle", snapshot))
    assert "the record holds the last 223 events only" in flat(ended.output)
    snapshot["device_traces"] = [[]]
    ended = run("--snapshot", write("none.pickle", snapshot))
    assert "no events were recorded" in ended.output
    assert "were dropped" not in ended.output


def test_several_devices_are_reported_with_the_fullest_first():
    first, second = trained(foreach=False), Training(recorder=Recorder(device=1))
    second.build()
    snapshot = first.snapshot()
    other = second.snapshot()
    snapshot["segments"] += other["segments"]
    snapshot["device_traces"].append(other["device_traces"][1])
    found = results("memory --snapshot", write("two.pickle", snapshot))
    assert [row["device"] for row in found["devices"]] == [0, 1]
    assert found["device"] == 0


def test_names_from_the_file_are_escaped():
    path = write("a.pickle", trained(code="/x/\x1b[2J\n.py").snapshot())
    output = run("--snapshot", path).output
    assert "\x1b" not in output
    assert "\\x1b[2J\\n.py" in output


def test_a_step_with_convolutions_names_their_workspace():
    line = "--model resnet --batch-size 2 --on-shapes"
    assert "convolution workspace on a GPU, estimated: " in run(line).output
    assert results("memory", line)["convolution_workspace_bytes"] > 0
    assert results("memory --model mlp")["convolution_workspace_bytes"] == 0
