"""The pieces of a CUDA device's figures run at toy size, and go on where they stopped.

python -m pytest tests/benchmarks/test_evidence_cuda.py
"""

import json
from dataclasses import replace

import pytest

import cuda_pieces
import cuda_traces
import evidence_cuda
from curry_train.plan.cuda_step import PredictedTraining, cuda_memory
from curry_train.plan.estimate import Sketch


@pytest.fixture
def dry(monkeypatch, tmp_path):
    """The setting of a dry run with its stand-in for torch.cuda, and one lever."""
    monkeypatch.setattr(cuda_pieces, "cuda", cuda_pieces.StandInCuda())
    monkeypatch.setattr(cuda_pieces, "MEMORY_LEVERS", ("full",))
    return replace(cuda_pieces.DRY_RUN, folder=tmp_path)


def rows_of(setting, piece):
    return json.loads((setting.folder / f"{piece}.json").read_text())["rows"]


def test_forty_trainings_are_predicted_and_measured():
    configs = cuda_pieces.memory_configs(cuda_pieces.EVIDENCE)
    assert len(configs) == len({config.key for config in configs}) == 40
    assert {config.expandable for config in configs} == {True, False}


def test_a_piece_goes_on_after_the_rows_that_are_there(dry, monkeypatch):
    measured = []

    def piece(setting):
        for key in "abc":
            yield key, lambda key=key: measured.append(key) or {"figure": key}

    monkeypatch.setitem(cuda_pieces.PIECES, "loss", piece)
    assert not cuda_pieces.run_piece("loss", dry, seconds=-1)
    assert measured == []
    assert cuda_pieces.run_piece("loss", dry, seconds=60)
    assert measured == ["a", "b", "c"]
    assert cuda_pieces.run_piece("loss", dry, seconds=60, again=["b"])
    assert measured == ["a", "b", "c", "b"]
    assert rows_of(dry, "loss")["c"]["figure"] == "c"


def test_a_row_that_fails_is_recorded_and_costs_no_other(dry, monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: unknown")

    monkeypatch.setitem(
        cuda_pieces.PIECES, "gates", lambda setting: iter([("a", broken), ("b", dict)])
    )
    assert cuda_pieces.run_piece("gates", dry, seconds=60)
    assert rows_of(dry, "gates")["a"]["error"] == "RuntimeError: CUDA error: unknown"
    assert "error" not in rows_of(dry, "gates")["b"]
    assert evidence_cuda.errors(dry.folder) == ["gates: a: RuntimeError: CUDA error: unknown"]


def test_memory_is_predicted_and_measured_at_toy_size(dry, monkeypatch):
    monkeypatch.setattr(cuda_pieces, "memory_configs", lambda setting: configs)
    configs = [cuda_pieces.MemoryConfig("toy", 16, "full")]
    for piece in ("predict", "memory"):
        assert cuda_pieces.run_piece(piece, dry, seconds=60)
    (row,) = rows_of(dry, "memory").values()
    assert row["measured"]["allocated_bytes"] == 2**20  # the stand-in's
    (predicted,) = rows_of(dry, "predict").values()
    assert row["ratio"]["allocated_bytes"] == predicted["allocated_bytes"] / 2**20
    assert row["trace"]["trace"] == [{"s": 2**21, "at": 0}, 2**20, -1, {"r": 2**21}]
    lines = [*evidence_cuda.goals(dry.folder)]
    assert lines[0].startswith("allocated_bytes: 1 steps, worst 6")
    assert lines[0].endswith("goal 0.3%")


def test_the_numbers_of_a_history_are_replayed_exactly():
    with Sketch(cuda_pieces.TOYS["toy"].workload(16), kernels="cuda") as sketch:
        trace = sketch.step(1).trace
    training = PredictedTraining(trace)
    for _ in range(2):
        training.step()
    found = cuda_memory(trace, num_steps=2)
    numbers = cuda_pieces.trace_numbers(
        training.snapshot(),
        source="toy",
        reserved=found.reserved_bytes,
        allocated=found.allocated_bytes,
    )
    numbers["reserved_end"] = training.allocator.reserved
    replayed = cuda_traces.replay(numbers)
    assert replayed.exact, replayed
    assert replayed.allocations > 100


@pytest.mark.long
def test_every_piece_runs_at_toy_size(tmp_path):
    status = evidence_cuda.main(["--dry-run", "--folder", str(tmp_path), "--minutes", "20"])
    assert status == 0, evidence_cuda.errors(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.json")} == set(evidence_cuda.PIECES)
    (table,) = evidence_cuda.read(tmp_path, "strategies").values()
    names = [row["name"] for row in table["rows"]]
    assert {"none", "full", "regions", "plan at the peak of full"} <= set(names)
