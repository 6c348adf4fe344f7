"""The records of a CUDA device are written at toy size, and a call goes on where one stopped.

python -m pytest tests/benchmarks/test_evidence_cuda.py
"""

import subprocess

import pytest
import torch

import cuda_traces
import evidence_cuda
from curry_train.plan.cuda_step import TrainingReplay, cuda_memory

from ..command_runs import read_json
from ..plan_models import trace_of
from ..snapshot_files import Recorder
from ..tree import ROOT


def test_the_numbers_of_a_history_are_replayed_exactly():
    trace = trace_of(evidence_cuda.toy())
    recorder = Recorder()
    training = TrainingReplay(trace, recorder)
    for _ in range(2):
        training.step()
    found = cuda_memory(trace, num_steps=2)
    recorded = {
        "reserved_peak": found.reserved_bytes,
        "reserved_end": recorder.allocator.reserved,
        "peak_blocks": found.allocated_bytes,
    }
    replayed = cuda_traces.Replay(evidence_cuda.trace_numbers(recorder.snapshot()) | recorded)
    assert replayed.exact, (replayed.computed, replayed.recorded)
    assert replayed.num_allocations > 100


@pytest.mark.parametrize("lever", ["full", "chunked_loss"])
def test_memory_is_predicted_with_a_lever(lever):
    config = evidence_cuda.MemoryConfig("toy", 16, lever)
    found = evidence_cuda.predicted(
        evidence_cuda.toy(), config, card="NVIDIA H200", dtype=torch.float32
    )
    assert 0 < found["allocated_bytes"] <= found["reserved_bytes"]


def test_a_call_goes_on_where_the_last_one_stopped(tmp_path, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    for name in ("mlp", "resnet", "snn"):
        (tmp_path / f"gates-{name}.json").touch()
    assert evidence_cuda.main(["--dry-run", "--folder", str(tmp_path), "--only", "gates"]) == 1
    assert capsys.readouterr().out == "gates-transformer: status 1\n"


def test_what_an_h200_reserved_is_predicted_from_shapes():
    record = read_json(ROOT / "evidence/cuda_memory.json")
    name = "memory-llama_1b-2048-none-adamw"
    (row,) = [row for row in record["trainings"] if row["name"] == name]
    config = evidence_cuda.MEMORY_CONFIGS[name]
    found = evidence_cuda.predicted(config.workload, config, card=row["device"])
    measured = row["measured"]
    assert found["reserved_bytes"] == measured["reserved_bytes"]
    assert found["first_step_reserved_bytes"] == measured["first_step_reserved_bytes"]
    assert found["allocated_bytes"] == pytest.approx(measured["allocated_bytes"], rel=1e-5)


def test_every_record_is_written_at_toy_size(tmp_path):
    assert evidence_cuda.main(["--dry-run", "--folder", str(tmp_path)]) == 0
    assert {path.stem for path in tmp_path.glob("*.json")} == set(evidence_cuda.records(dry=True))
    assert all(map(read_json, tmp_path.glob("*.json")))
