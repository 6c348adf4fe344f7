"""The journal of a training run.

Run with `python -m pytest tests/trainer/test_journal_hook.py`.
"""

from journals import column, lines_of
from training_models import opened

from curry_train.trainer import train_run

WORDS = (
    "model=training_models:tiny",
    "steps=6",
    "batch_size=4",
    "microbatch=2",
    "evaluate={every: 4, samples: 4}",
)


def test_the_journal_has_the_facts_of_the_run_each_step_and_its_end(tmp_path):
    with opened(tmp_path, *WORDS) as run:
        done = train_run(run)
    lines = lines_of(done.folder)
    assert [line["kind"] for line in lines if line["kind"] != "save"] == [
        "start", "step", "step", "step", "step", "eval", "step", "step", "eval", "stop",
    ]  # fmt: skip
    saves = {
        line["checkpoint"].split("-")[-1]: line["num_bytes"]
        for line in lines
        if line["kind"] == "save"
    }
    assert set(saves) == {"00000004.dcp", "00000006.dcp"}
    assert all(size > 2**17 for size in saves.values())
    assert lines[0]["config"]["steps"] == 6
    assert lines[0]["environment"]["world_size"] == 1
    assert lines[-1]["reason"] == "steps"
    last = [line for line in lines if line["kind"] == "step"][-1]
    report = done.report.last
    assert (last["loss"], last["grad_norm"], last["terms"]) == (
        report.loss,
        report.grad_norm,
        report.num_terms,
    )
    assert (last["learning_rate"], last["seconds"]) == (report.learning_rate, report.seconds)
    assert 0 < last["epoch"] < 1
    assert last["peak_bytes"] > 2**20
    assert column(done.folder, "eval", "value")[-1] == report.dev_loss
