"""A predicted snapshot is read back to the byte, by our reader and by torch's.

python -m pytest tests/plan/test_predicted_snapshot.py
"""

import copy
import json

import pytest
import torch
from click.testing import CliRunner
from snapshot_files import write
from torch.cuda import _memory_viz

from curry_train.cli.main import main
from curry_train.plan.cuda_allocator import AllocatorSettings
from curry_train.plan.cuda_step import NUM_STEPS, cuda_memory, predicted_snapshot
from curry_train.plan.estimate import Sketch
from curry_train.plan.owners import OwnedBlocks
from curry_train.plan.snapshot import BlockHistory, read_snapshot
from curry_train.workloads.models import transformer


@pytest.fixture(scope="module")
def trace():
    with Sketch(transformer(), kernels="cuda") as sketch:
        return sketch.step(2).trace


SETTINGS = [
    AllocatorSettings(),
    AllocatorSettings(expandable_segments=True),
    AllocatorSettings(power_of_2_divisions=4),
]


# What torch writes and its documentation leaves out.
LATER_FIELDS = {"device", "is_expandable", "time_us", "compile_context", "user_metadata"}


def read(tmp_path, snapshot):
    (record,) = read_snapshot(write(tmp_path / "a.pickle", snapshot)).devices
    return BlockHistory(record)


@pytest.mark.parametrize("settings", SETTINGS, ids=["native", "expandable", "powers of 2"])
def test_the_reader_finds_the_predicted_figures(tmp_path, trace, settings):
    history = read(tmp_path, predicted_snapshot(trace, settings=settings))
    found = cuda_memory(trace, settings=settings)
    assert history.peak_allocated == found.allocated_bytes
    assert history.peak_reserved == found.reserved_bytes
    assert history.allocated[0] == history.reserved[0] == history.contradictions == 0


def test_the_owners_are_those_of_the_estimate(tmp_path, trace):
    owned = OwnedBlocks(read(tmp_path, predicted_snapshot(trace)))
    rounded = AllocatorSettings().rounded
    expected = {"parameters": 0, "buffers and batch": 0}
    for number in trace.given:
        expected[trace.owners[number][0]] += rounded(trace.sizes[number])
    at_peak = owned.owners
    assert at_peak["parameters"] == expected["parameters"] > 0
    assert at_peak["buffers and batch"] == expected["buffers and batch"] > 0
    state = sum(rounded(trace.sizes[number]) for number in trace.state)
    assert at_peak["optimizer state"] == state
    assert sum(at_peak.values()) == owned.history.peak_allocated
    assert len(owned.steps()) == NUM_STEPS
    assert {owned.line(life) for life in owned.history.lives} >= {"layers.0", "layers.3", "head"}


def test_torchs_own_viewer_reads_it_to_the_byte(tmp_path, trace):
    snapshot = predicted_snapshot(trace)
    history = read(tmp_path, snapshot)
    # The totals that torch prints are checked against the segments by an assertion of its own.
    text = _memory_viz.segsum(snapshot)
    assert f"total_reserved: {_memory_viz.Bytes(history.reserved[-1])}" in text
    for layout in (_memory_viz.segments, _memory_viz.memory):
        lines = layout(snapshot, format_flamegraph=str).splitlines()
        sizes = {"active_allocated": 0, "inactive": 0}
        for line in lines:
            name, size = line.rsplit(" ", 1)
            sizes[next(state for state in sizes if f";{state};" in name)] += int(size)
        assert sizes["active_allocated"] == history.allocated[-1]
        assert sum(sizes.values()) == history.reserved[-1]
    assert f"{len(snapshot['device_traces'][0])} entries" in _memory_viz.trace(snapshot)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(copy.deepcopy(snapshot))


def test_the_fields_are_those_of_torchs_documentation(trace):
    snapshot = predicted_snapshot(trace)
    segment = snapshot["segments"][0]
    block = next(block for block in segment["blocks"] if block["state"] == "active_allocated")
    event = snapshot["device_traces"][0][0]
    documented = torch.cuda.memory._snapshot.__doc__
    for record in (segment, block, event, event["frames"][0]):
        for name in {*record} - LATER_FIELDS:
            assert f" {name}:" in documented, name
    assert json.dumps(snapshot)


PLAN = ["plan", "--model", "mlp", "--budget", "1GiB", "--microbatch", "1"]
PLAN += ["--without", "full", "--without", "sac", "--without", "regions", "--without", "offload"]


def test_a_plan_writes_its_steps_as_a_snapshot_and_a_page(tmp_path):
    files = {name: tmp_path / name for name in ("plan.pickle", "plan.html", "plan.json")}
    options = ["--snapshot", files["plan.pickle"], "--html", files["plan.html"]]
    options += ["--json", files["plan.json"], "--target", "h100", "--whole-loss"]
    ended = CliRunner().invoke(main, [*PLAN, *map(str, options)])
    assert ended.exit_code == 0, ended.output
    words = ["memory", "--snapshot", files["plan.pickle"], "--against", files["plan.json"]]
    ended = CliRunner().invoke(main, [*map(str, words), "--json", "-"])
    found = json.loads(ended.stdout)["against"]
    assert found["allocated"]["this"] == found["allocated"]["other"] > 0
    assert found["reserved"]["this"] == found["reserved"]["other"] > 0
    assert "optimizer state" in files["plan.html"].read_text()


@pytest.mark.parametrize(
    "options",
    [
        ["--target", "cpu"],
        ["--target", "h100", "--global-batch", "2", "--parallel", "ddp", "--ranks", "2"],
    ],
)
def test_what_has_no_allocator_is_refused_before_the_work(tmp_path, options):
    path = tmp_path / "plan.pickle"
    ended = CliRunner().invoke(main, [*PLAN, *options, "--snapshot", str(path)])
    assert ended.exit_code == 2
    assert "a predicted snapshot is of one GPU" in " ".join(ended.output.split())
    assert not path.exists()


def test_a_plan_for_the_cpu_is_drawn_on_a_page_too(tmp_path):
    path = tmp_path / "plan.html"
    ended = CliRunner().invoke(main, [*PLAN, "--target", "cpu", "--html", str(path)])
    assert ended.exit_code == 0, ended.output
    assert "mlp on cpu, as planned" in path.read_text()
