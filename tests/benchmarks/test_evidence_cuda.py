"""The pieces of a CUDA device's figures run at toy size, and go on where they stopped.

python -m pytest tests/benchmarks/test_evidence_cuda.py
"""

import json
from dataclasses import replace

import pytest
from snapshot_files import Recorder

import cuda_peaks
import cuda_pieces
import cuda_setting
import cuda_traces
import evidence_cuda
from cuda_setting import Row
from curry_train.plan.cuda_step import TrainingReplay, cuda_memory
from curry_train.plan.estimate import Sketch


@pytest.fixture
def dry(monkeypatch, tmp_path):
    """The setting of a dry run with its stand-in for torch.cuda, and one lever."""
    monkeypatch.setattr(cuda_setting.cuda, "api", cuda_setting.StandInCuda())
    monkeypatch.setattr(cuda_peaks, "MEMORY_LEVERS", ("full",))
    return replace(cuda_setting.DRY_RUN, folder=tmp_path)


@pytest.fixture
def piece(monkeypatch):
    """Make the piece `loss` of the given rows."""

    def rows(**measures):
        listed = [Row(key, measure, seconds=20) for key, measure in measures.items()]
        monkeypatch.setitem(cuda_pieces.PIECES, "loss", lambda setting: iter(listed))

    return rows


def rows_of(setting, piece):
    return json.loads((setting.folder / f"{piece}.json").read_text())["rows"]


def test_a_piece_goes_on_after_the_rows_that_are_there(dry, piece):
    measured = []
    piece(**{key: lambda key=key: measured.append(key) or {"figure": key} for key in "abc"})
    assert cuda_pieces.run_piece("loss", replace(dry, until=0.0)) == cuda_pieces.LEFT_STATUS
    assert measured == []
    for _ in range(2):
        assert cuda_pieces.run_piece("loss", dry) == 0
        assert measured == ["a", "b", "c"]
    assert rows_of(dry, "loss")["c"]["figure"] == "c"


def test_a_row_that_fails_is_recorded_and_measured_again_on_request(dry, piece):
    def broken():
        raise RuntimeError("no kernel image")

    piece(a=broken, b=dict)
    assert cuda_pieces.run_piece("loss", dry) == 0
    assert rows_of(dry, "loss")["a"]["error"] == "RuntimeError: no kernel image"
    assert "error" not in rows_of(dry, "loss")["b"]
    assert evidence_cuda.errors(dry.folder) == ["loss: a: RuntimeError: no kernel image"]
    piece(a=dict, b=broken)
    assert cuda_pieces.run_piece("loss", dry) == 0
    assert "error" in rows_of(dry, "loss")["a"]
    assert cuda_pieces.run_piece("loss", dry, again=True) == 0
    assert evidence_cuda.errors(dry.folder) == []


def test_the_numbers_of_a_history_are_replayed_exactly():
    with Sketch(cuda_setting.TOYS["toy"].workload(16), kernels="cuda") as sketch:
        trace = sketch.step(1).trace
    recorder = Recorder()
    training = TrainingReplay(trace, recorder)
    for _ in range(2):
        training.step()
    found = cuda_memory(trace, num_steps=2)
    numbers = cuda_peaks.trace_numbers(
        recorder.snapshot(),
        source="toy",
        reserved=found.reserved_bytes,
        allocated=found.allocated_bytes,
    )
    numbers["reserved_end"] = recorder.allocator.reserved
    replayed = cuda_traces.replay(numbers)
    assert replayed.exact, replayed
    assert replayed.allocations > 100


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long][name in ("gates",) :])
        for name in evidence_cuda.PIECES
    ],
)
def test_each_piece_runs_at_toy_size(dry, name):
    assert cuda_pieces.run_piece(name, dry) == 0
    rows = rows_of(dry, name)
    assert rows
    assert evidence_cuda.errors(dry.folder) == []
    if name == "strategies":
        (table,) = rows.values()
        names = [row["name"] for row in table["rows"]]
        assert {"none", "full", "regions", "plan at the peak of full"} <= set(names)


def test_the_command_runs_a_piece_in_a_process(tmp_path):
    words = ["--dry-run", "--folder", str(tmp_path), "--minutes", "20"]
    assert evidence_cuda.main([*words, "--piece", "expandable"]) == 0
    assert {path.stem for path in tmp_path.glob("*.json")} == {"expandable"}
    assert set(evidence_cuda.PIECES) == set(cuda_pieces.PIECES)


@pytest.mark.long
def test_every_piece_runs_at_toy_size(tmp_path):
    status = evidence_cuda.main(["--dry-run", "--folder", str(tmp_path), "--minutes", "20"])
    assert status == 0, evidence_cuda.errors(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.json")} == set(evidence_cuda.PIECES)
