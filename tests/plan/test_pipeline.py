"""Peaks of the stages of pipelines equal those of real processes.

python -m pytest tests/plan/test_pipeline.py
"""

from pathlib import Path

import pipelines
import pytest
from pipelines import PIPELINES, predict_pipeline, small
from torch import nn

from curry_train.gates.fixtures import run_on_ranks
from curry_train.plan.pipeline import (
    PipelinePeaks,
    StageBoard,
    StagePeak,
    first_ranks,
    pipeline_peaks,
    samples_of_pipeline,
)


def real_peaks(names, world):
    target = f"{Path(pipelines.__file__).resolve()}:measure_pipelines"
    return run_on_ranks(target, num_ranks=world, names=names)


def compare(names, world):
    real = real_peaks(names, world)
    for name in names:
        found = predict_pipeline(name, world)
        assert [one.peak_bytes for one in found.ranks] == [rank[name] for rank in real]
        yield found


def test_each_stage_of_an_interleaved_schedule_peaks_as_a_real_process_does():
    (found,) = compare(["interleaved"], 2)
    assert [one.stages for one in found.ranks] == [(0, 2), (1, 3)]
    assert (found.first.rank, found.last.rank) == (0, 1)
    model = small().build()
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(one.parameter_bytes for one in found.ranks) == held


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_stages_of_each_schedule_peak_as_real_processes_do(world):
    names = [name for name in PIPELINES if name != "interleaved" or world == 2]
    found = dict(zip(names, compare(names, world), strict=True))
    # GPipe holds the activations of all microbatches, 1F1B those of as many as stages follow.
    for stages in zip(found["1f1b"].ranks, found["gpipe"].ranks, strict=True):
        assert stages[0].peak_bytes < stages[1].peak_bytes
    least = found["1f1b, recompute"].first.peak_bytes
    assert least < found["1f1b"].first.peak_bytes


def test_shapes_that_were_assumed_of_a_stage_are_compared_when_it_runs():
    board = StageBoard(outputs={0: "four rows"})
    assert board.output_of(1, rank=0) == "four rows"
    assert board.is_wrong(0)
    board.outputs[1] = "four rows"
    assert not board.is_wrong(0)
    board.outputs[1] = "two rows"
    assert board.is_wrong(0)
    assert not board.is_wrong(1)


def test_the_table_names_the_first_last_and_heaviest_rank():
    ranks = (StagePeak(0, (0,), 4, 2048), StagePeak(2, (1,), 4, 4096), StagePeak(4, (2,), 4, 1024))
    found = PipelinePeaks("decoder", 8, {"pp": 3, "dp": 2}, ranks)
    lines = found.table(3072).splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = [line.split("B  ")[-1] for line in lines if line.startswith("    ")]
    assert rows == ["first", "heaviest", "last"]
    assert "-1.00 KiB" in next(line for line in lines if "heaviest" in line and "4.00" in line)
    assert found.to_json()["heaviest"] == 2


def test_a_rank_at_each_place_counts_and_the_global_batch_is_shared_by_pipelines():
    assert first_ranks({"pp": 2, "dp": 4}) == [0, 4]
    assert first_ranks({"dp": 4, "pp": 2}) == [0, 1]
    assert samples_of_pipeline({"pp": 2, "dp": 4}, 16) == 4
    with pytest.raises(ValueError, match="a global batch of 6 can't be shared by 4 ranks"):
        samples_of_pipeline({"pp": 2, "dp": 4}, 6)


def test_a_pipeline_without_stages_or_a_mesh_for_them_is_refused():
    def not_a_pair(model, mesh):
        return nn.Linear(2, 2)

    with pytest.raises(ValueError, match="the pipeline returned Linear: return the modules"):
        pipeline_peaks(small(), not_a_pair, mesh={"pp": 2}, batch_size=4)
    with pytest.raises(ValueError, match="has a dimension pp in its mesh"):
        pipeline_peaks(small(), not_a_pair, mesh={"dp": 2}, batch_size=4)
