"""The output of a run: lines, TensorBoard, and its journal.

Run with `python -m pytest tests/trainer/test_progress.py`.
"""

import contextlib
import io

import pytest

from curry_train.cli.train import show_progress, write_tensorboard
from curry_train.trainer import train_run

from ..journals import column, lines_of
from ..training_models import opened

WORDS = ("model=tests.training_models:tiny", "steps=25", "batch_size=4", "microbatch=2")


def shown(runs, *words, resume=None):
    """Return the printed output."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        opened(runs, *WORDS, *words, resume=resume) as run,
    ):
        train_run(run, watch=[show_progress])
    return out.getvalue()


def test_lines_are_few_and_fit_into_80_columns(tmp_path):
    lines = shown(tmp_path, "evaluate={every: 12, samples: 4}").splitlines()[2:]
    assert [line.split()[1] for line in lines] == [
        "1/25",
        "10/25",
        "12/25",
        "20/25",
        "24/25",
        "25/25",
    ]
    assert all("loss" in line and "tokens/s" in line and "iB" in line for line in lines)
    assert ["dev" in line for line in lines] == [False, False, True, False, True, True]
    assert ["left" in line for line in lines] == [False, True, True, True, True, False]
    assert max(map(len, lines)) <= 80


def test_the_first_lines_say_what_is_trained_and_how(tmp_path):
    first, second, *_ = shown(tmp_path, "recompute.strategy=full", "steps=1").splitlines()
    assert "run-001: transformer, 0.04M parameters, " in first
    assert first.endswith(" samples")
    assert second == "2 x 2 samples a step, float32 on cpu, full on 2 layers"
    assert ", from step 1" in shown(tmp_path, "steps=2", resume="latest").splitlines()[0]


def test_tensorboard_gets_the_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with opened(tmp_path, *WORDS, "steps=3") as run:
        report = train_run(run, watch=[write_tensorboard])
    read = EventAccumulator(str(run.folder / "tensorboard"))
    read.Reload()
    assert [event.step for event in read.Scalars("loss")] == [1, 2, 3]
    assert read.Scalars("loss")[-1].value == pytest.approx(report.last.loss)


def test_the_journal_has_the_facts_of_the_run_each_step_and_its_end(tmp_path):
    with opened(tmp_path, *WORDS, "steps=6", "evaluate={every: 4, samples: 4}") as run:
        report = train_run(run).last
    lines = lines_of(run.folder)
    assert [line["kind"] for line in lines if line["kind"] != "save"] == [
        "start", "step", "step", "step", "step", "eval", "step", "step", "eval", "stop",
    ]  # fmt: skip
    checkpoints = column(run.folder, "save", "checkpoint")
    assert {name[-12:] for name in checkpoints} == {"00000004.dcp", "00000006.dcp"}
    assert min(column(run.folder, "save", "num_bytes")) > 2**17
    assert lines[0]["config"]["steps"] == 6
    assert lines[0]["environment"]["world_size"] == 1
    assert lines[-1]["reason"] == "steps"
    last = [line for line in lines if line["kind"] == "step"][-1]
    for name in ("loss", "grad_norm", "learning_rate", "seconds"):
        assert last[name] == getattr(report, name)
    assert last["terms"] == report.num_terms
    assert 0 < last["epoch"] < 1
    assert last["peak_bytes"] > 2**20
    assert column(run.folder, "eval", "value")[-1] == report.dev_loss
