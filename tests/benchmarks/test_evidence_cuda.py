"""The pieces of a CUDA device's figures run at toy size, and go on where they stopped.

python -m pytest tests/benchmarks/test_evidence_cuda.py
"""

import json
from dataclasses import replace

import pytest
import torch

import cuda_peaks
import cuda_pieces
import cuda_setting
import cuda_strategies
import cuda_traces
import evidence_cuda
from cuda_setting import Row
from curry_train.plan.cuda_step import PredictedTraining, cuda_memory
from curry_train.plan.device import find_profile
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


def test_forty_trainings_are_predicted_and_measured():
    configs = cuda_peaks.memory_configs(cuda_setting.EVIDENCE)
    assert len(configs) == len({config.key for config in configs}) == 40
    assert {config.expandable for config in configs} == {True, False}
    known = {config.key for config in configs}
    for config in cuda_peaks.flash_configs(cuda_setting.EVIDENCE):
        assert config.key.removesuffix(" flash") in known - {config.key}


def test_a_piece_goes_on_after_the_rows_that_are_there(dry, piece):
    measured = []
    piece(**{key: lambda key=key: measured.append(key) or {"figure": key} for key in "abc"})
    assert cuda_pieces.run_piece("loss", replace(dry, until=0.0)) == cuda_pieces.LEFT_STATUS
    assert measured == []
    for _ in range(2):
        assert cuda_pieces.run_piece("loss", dry) == 0
        assert measured == ["a", "b", "c"]
    assert rows_of(dry, "loss")["c"]["figure"] == "c"


def test_a_row_that_does_not_fit_the_time_is_left_for_the_next_call(dry, piece):
    piece(a=dict)
    long = replace(dry, is_dry=False)
    brief = replace(long, until=cuda_setting.time.monotonic() + 10)
    assert cuda_pieces.run_piece("loss", brief) == cuda_pieces.LEFT_STATUS
    assert cuda_pieces.run_piece("loss", long) == 0


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


def test_an_error_that_breaks_the_device_asks_for_a_new_process(dry, piece, monkeypatch):
    def broken():
        monkeypatch.setattr(cuda_setting.StandInCuda, "synchronize", refuse)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def refuse(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    piece(a=broken, b=dict)
    assert cuda_pieces.run_piece("loss", dry) == cuda_pieces.ANEW_STATUS
    assert [*rows_of(dry, "loss")] == ["a"]


def test_a_row_in_which_the_process_ends_twice_is_an_error(dry, piece):
    def killed():
        raise KeyboardInterrupt

    piece(a=killed, b=dict)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            cuda_pieces.run_piece("loss", dry)
    assert cuda_pieces.run_piece("loss", dry) == 0
    assert "2 times" in rows_of(dry, "loss")["a"]["error"]
    assert "error" not in rows_of(dry, "loss")["b"]


def test_a_file_of_another_kind_of_run_is_not_continued(dry, piece):
    piece(a=dict)
    assert cuda_pieces.run_piece("loss", dry) == 0
    with pytest.raises(SystemExit, match="has rows of dry_run True"):
        cuda_pieces.run_piece("loss", replace(dry, is_dry=False))


def test_predictions_of_another_version_of_torch_stay(dry):
    path = dry.folder / "predict.json"
    facts = {"dry_run": True, "device": "cpu", "torch": "2.0", "starts": {}}
    path.write_text(json.dumps(facts | {"rows": {"a row": {}}}))
    assert cuda_pieces.PieceFile("predict", dry, again=False).rows == {"a row": {}}


def test_a_row_that_leaves_memory_behind_gets_a_new_process_for_the_next(dry, monkeypatch):
    monkeypatch.setattr(cuda_setting.StandInCuda, "memory_reserved", lambda self: 2**21)
    assert cuda_pieces.run_piece("memory", dry) == cuda_pieces.ANEW_STATUS
    assert cuda_pieces.run_piece("memory", dry) == cuda_pieces.ANEW_STATUS
    assert cuda_pieces.run_piece("memory", replace(dry, until=0.0)) == cuda_pieces.LEFT_STATUS


def test_predictions_need_no_device(dry, monkeypatch):
    monkeypatch.setattr(cuda_setting.cuda, "api", torch.cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda_peaks, "memory_configs", lambda setting: configs)
    configs = [cuda_peaks.MemoryConfig("toy", 16, "full")]
    assert cuda_pieces.run_piece("predict", replace(dry, is_dry=False)) == 0
    (row,) = rows_of(dry, "predict").values()
    assert row["card"] == "NVIDIA H200"


def test_memory_is_predicted_and_measured_at_toy_size(dry, monkeypatch):
    monkeypatch.setattr(cuda_peaks, "memory_configs", lambda setting: configs)
    monkeypatch.setattr(cuda_peaks, "flash_configs", lambda setting: flash)
    configs = [cuda_peaks.MemoryConfig("toy", 16, "full")]
    flash = [replace(configs[0], flash=True)]
    for piece in ("predict", "memory"):
        assert cuda_pieces.run_piece(piece, dry) == 0
    rows = rows_of(dry, "memory")
    assert [*rows] == ["toy 16 full adamw", "toy 16 full adamw flash"]
    assert all(row["allocated_bytes"] == 2**20 for row in rows.values())  # the stand-in's
    (trace, _) = evidence_cuda.read_traces(dry.folder).values()
    assert trace["trace"] == [{"s": 2**21, "at": 0}, 2**20, -1, {"r": 2**21}]
    (predicted,) = rows_of(dry, "predict").values()
    off = predicted["allocated_bytes"] / 2**20 - 1
    line = next(evidence_cuda.goals(dry.folder))
    assert line.startswith(f"allocated_bytes with flash_attention: 2 steps, worst {off:.2%}")
    assert line.endswith("goal 0.3%")


def test_nothing_is_allocated_between_a_fresh_device_and_the_record(dry, monkeypatch):
    order = []
    api = cuda_setting.cuda.api
    monkeypatch.setattr(cuda_peaks, "attention_kernel", lambda *given: order.append("kernel"))
    monkeypatch.setattr(cuda_peaks, "fresh_device", lambda: order.append("fresh"))
    monkeypatch.setattr(
        api.memory, "_record_memory_history", lambda **given: order.append("record")
    )
    monkeypatch.setattr(cuda_peaks, "_peaks_of_steps", lambda *given: (1, (2, 3)))
    cuda_peaks._measured(dry, cuda_peaks.MemoryConfig("toy", 16, "full"))
    assert order == ["kernel", "fresh", "record", "record"]


def test_a_trace_that_is_cut_off_costs_no_other(tmp_path):
    for number in (1, 2, 3):
        numbers = {"source": f"row {number % 2}", "trace": [number]}
        cuda_peaks._add_trace(tmp_path / cuda_peaks.TRACES_NAME, numbers)
    path = tmp_path / cuda_peaks.TRACES_NAME
    path.write_bytes(path.read_bytes()[:-4])
    assert [*evidence_cuda.read_traces(tmp_path)] == ["row 1", "row 0"]
    assert evidence_cuda.read_traces(tmp_path)["row 0"]["trace"] == [2]


def test_a_step_that_is_out_of_memory_leaves_the_largest_batch_below(dry, monkeypatch):
    tried = []

    class Step:
        def __init__(self, case, lever):
            self.samples = case.batch_size

        def __call__(self):
            tried.append(self.samples)
            if self.samples > 5:
                raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_pieces, "TrainingStep", Step)
    found = cuda_pieces._largest_batch(replace(dry, most_samples=256), 1, "none")
    assert found["samples"] == 5
    assert set(tried) == {1, 2, 4, 8, 6, 5}

    monkeypatch.setattr(Step, "__call__", lambda self: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        cuda_pieces._largest_batch(dry, 1, "none")


def test_what_is_out_of_memory_is_left_out_of_a_table(dry, monkeypatch):
    freed = []
    monkeypatch.setattr(cuda_setting, "fresh_device", lambda: freed.append(len(errors)))
    errors = {}
    with cuda_setting.recorded(errors, "a"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    with cuda_setting.recorded(errors, "b"):
        pass
    assert errors == {"a": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"}
    assert freed == [0, 1]  # before each, when the frames of the error before it are gone


def test_plans_of_a_table_are_compared_with_their_peers(dry, monkeypatch):
    names = ("none", "regions")
    peers = {name: cuda_strategies.find_lever(name) for name in names}
    monkeypatch.setattr(cuda_strategies, "_peers", lambda blocks: peers)
    monkeypatch.setattr(cuda_strategies, "PLANNED_FOR", ("regions", "full"))
    table = cuda_strategies._strategies(dry, dry.timed[0])
    plan = table["rows"][2]
    assert plan["name"] == "plan at the peak of regions"
    assert plan["peak_of_peer"] <= 1
    assert plan["time_of_peer"]["median"] > 0
    assert table["not_measured"] == {}


def test_plans_are_made_for_the_card_that_torch_names(dry, monkeypatch):
    """A profile is not found by the name of a card, `NVIDIA H200`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    evidence = cuda_setting.EVIDENCE
    table = cuda_strategies.Comparison.__new__(cuda_strategies.Comparison)
    table.setting, table.planned = evidence, dry.models["toy"].workload(16)
    assert table._planner(()).profile is evidence.profile is find_profile("h200")
    assert dry.profile is find_profile("cpu")


def test_the_least_peak_at_equal_time_is_that_of_a_plan_as_fast():
    def row(name, seconds, peak, **more):
        return {"name": name, "seconds": {"median": seconds}, "peak_bytes": peak, **more}

    rows = [
        row("none", 1.0, 100),
        row("full", 1.3, 40),
        row("plan at the peak of full", 1.2, 40, peer="full"),
        row("plan at the peak of half", 1.3, 30, peer="half"),
        row("plan at the peak of all", 1.4, 20, peer="all"),
    ]
    assert [*evidence_cuda.at_equal_time(rows)] == [("full", "plan at the peak of half", 0.75)]


def test_a_reentrant_checkpoint_of_each_layer_trains_alike(dry):
    case = cuda_setting.case_of(dry, "toy", 16, 2)
    plain, ours = case.build(), case.build()
    changed = cuda_strategies.checkpoint_each(ours, None, use_reentrant=True)
    assert changed == ["layers.0", "layers.1"]
    for model in (plain, ours):
        case.workload.loss(model, case.batch()).backward()
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_process_that_asks_for_a_new_one_gets_it_and_a_slow_one_is_ended(
    tmp_path, monkeypatch, capsys
):
    calls = []

    def run(words, *, env, timeout):
        calls.append((words, env))
        if len(calls) == 3:
            raise evidence_cuda.subprocess.TimeoutExpired(words, timeout)
        return evidence_cuda.subprocess.CompletedProcess(words, 4 if len(calls) == 1 else 0)

    monkeypatch.setattr(evidence_cuda.subprocess, "run", run)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    options = ["--folder", str(tmp_path), "--again", "--piece", "expandable", "memory"]
    assert evidence_cuda.main(options) == evidence_cuda.STATUS_LEFT
    assert ["--again" in words for words, _ in calls] == [True, False, True]
    settings = [env.get("PYTORCH_CUDA_ALLOC_CONF") for _, env in calls]
    assert settings == ["expandable_segments:True", "expandable_segments:True", None]
    assert "left: memory" in capsys.readouterr().out


def test_backends_that_are_missing_are_recorded_beside_the_loss(dry):
    assert cuda_pieces.run_piece("loss", dry) == 0
    (row,) = rows_of(dry, "loss").values()
    assert [way["name"] for way in row["rows"]][:2] == ["whole", "chunks"]
    assert {"liger", "cce"} <= set(row["not_measured"])
    assert evidence_cuda.errors(dry.folder) == []


def test_a_stall_counts_once_and_saves_do_not_meet(dry, monkeypatch):
    monkeypatch.setattr(cuda_pieces, "LONGEST_INTERVAL_SECONDS", 0.05)
    assert cuda_pieces.run_piece("saving", dry) == 0
    (row,) = rows_of(dry, "saving").values()
    assert row["steps_between_saves"] >= 2
    longest = row["worst_step"] * row["plain_seconds"]["median"]
    assert row["stalled_seconds_per_save"] < longest * cuda_pieces.NUM_SAVES


def test_gates_run_on_the_device_and_their_figures_stay(dry, monkeypatch):
    seen = []

    def run(words, **options):
        seen.append(words)
        written = words[words.index("--json") + 1]
        rows = [{"gate": name, "passed": passed, "measured": "1"} for name, passed in verdicts]
        if "resnet" not in words:
            cuda_pieces.Path(written).write_text(json.dumps({"results": rows}))
        return cuda_pieces.subprocess.CompletedProcess(words, 1, "", "no device")

    verdicts = [("a", True), ("b", False), ("c", None)]
    monkeypatch.setattr(cuda_pieces.subprocess, "run", run)
    on_cuda = replace(dry, device=torch.device("cuda"), is_dry=False)
    rows = {row.key: row for row in cuda_pieces.gates(on_cuda)}
    found = rows["transformer"].measure()
    assert seen[0][seen[0].index("--device") + 1] == "cuda"
    assert "--gate" not in seen[0]
    assert (found["held"], found["failed"], found["not_applicable"]) == (1, ["b"], 1)
    with pytest.raises(RuntimeError, match="ended with 1: no device"):
        rows["resnet"].measure()


def test_a_plan_is_made_for_the_largest_batch_of_a_limit(dry, monkeypatch):
    monkeypatch.setattr(cuda_pieces, "_trains", lambda case, lever: case.batch_size == 2)
    assert cuda_pieces.run_piece("batch", replace(dry, until=0.0)) == cuda_pieces.LEFT_STATUS
    known = {"1 GiB, none": {"samples": 1}, "1 GiB, full": {"samples": 2}}
    (dry.folder / "batch.json").write_text(json.dumps({"rows": known}))
    found = cuda_pieces._plan_within(dry, 1, [*known, "1 GiB, regions"])
    assert (found["samples"], found["planned_samples"]) == (2, 2)


def test_the_numbers_of_a_history_are_replayed_exactly():
    with Sketch(cuda_setting.TOYS["toy"].workload(16), kernels="cuda") as sketch:
        trace = sketch.step(1).trace
    training = PredictedTraining(trace)
    for _ in range(2):
        training.step()
    found = cuda_memory(trace, num_steps=2)
    numbers = cuda_peaks.trace_numbers(
        training.snapshot(),
        source="toy",
        reserved=found.reserved_bytes,
        allocated=found.allocated_bytes,
    )
    numbers["reserved_end"] = training.allocator.reserved
    replayed = cuda_traces.replay(numbers)
    assert replayed.exact, replayed
    assert replayed.allocations > 100


@pytest.mark.parametrize("name", evidence_cuda.PIECES)
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
