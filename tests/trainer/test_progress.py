"""The output of a run: lines, and TensorBoard.

Run with `python -m pytest tests/trainer/test_progress.py`.
"""

import contextlib
import io

import pytest
from training_models import opened

from curry_train.cli.train import show_progress, write_tensorboard
from curry_train.trainer import train_run

WORDS = ("model=training_models:tiny", "steps=25", "batch_size=4", "microbatch=2")


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
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="not installed"
    )
    with opened(tmp_path, *WORDS, "steps=3") as run:
        trained = train_run(run, watch=[write_tensorboard])
    read = events.EventAccumulator(str(run.folder / "tensorboard"))
    read.Reload()
    assert [event.step for event in read.Scalars("loss")] == [1, 2, 3]
    assert read.Scalars("loss")[-1].value == pytest.approx(trained.report.last.loss)
