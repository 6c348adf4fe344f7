"""Tables, JSON and exit statuses of `runs`.

Run: `python -m pytest tests/cli/test_runs_command.py`.
"""

from pathlib import Path

import pytest

from curry_train.runs import Journal, Store

from ..command_runs import call, flat, read_json
from ..journals import plant
from ..store_models import flip, new_state, save_best, train


@pytest.fixture
def runs():
    state = new_state()
    with Store("runs/first-001") as store:
        for step in (100, 200):
            train(state, 1)
            store.save("rollback", step, state)
        store.save("recovery", 200, state)
        save_best(store, 200, state, 0.25)
    Path("runs/empty").mkdir()
    return Path("runs")


def test_list_shows_the_checkpoints_of_each_run(runs):
    output = call("list", runs, "--json list.json")
    assert output.splitlines()[1].split()[:5] == ["first-001", "200", "2", "1", "1"]
    assert len(output.splitlines()) == 2
    (row,) = read_json("list.json")["runs"]
    assert (row["run"], row["latest"], row["rollback"], row["damaged"]) == ("first-001", 200, 2, 0)


def test_show_lists_each_checkpoint_and_marks_damage(runs):
    output = call("show", runs / "first-001")
    assert [line.split()[:2] for line in output.splitlines()[1:5]] == [
        ["rollback", "100"], ["rollback", "200"], ["recovery", "200"], ["best-k", "200"]
    ]  # fmt: skip
    assert "dev_loss 0.25" in output
    assert output.splitlines()[-1] == "latest: recovery/step-00000200.dcp"
    (runs / "first-001/rollback/step-00000100.dcp/manifest.json").unlink()
    output = call("show", runs / "first-001", status=1)
    assert "was not finished" in flat(output)


def test_verify_reads_every_byte(runs):
    assert call("verify", runs / "first-001") == "4 of 4 checkpoints intact\n"
    flip(next((runs / "first-001/rollback/step-00000200.dcp").glob("*.distcp")), 50)
    call("show", runs / "first-001")  # a look at the manifests does not show it
    output = call("verify", runs / "first-001", status=1)
    assert "damaged: rollback/step-00000200.dcp" in output
    assert "3 of 4 checkpoints intact" in output
    assert call("verify", runs / "first-001", "best") == "1 of 1 checkpoints intact\n"
    call("verify", runs / "first-001", "rollback/step-00000200.dcp", status=1)
    output = call("verify", runs / "first-001", "step-3", status=2)
    assert "is neither a checkpoint nor a run" in flat(output)


def test_a_run_that_has_saved_nothing_yet_is_shown_by_its_journal():
    plant("runs/young", last=5)
    for name in ("young", "runs/young"):
        output = call("show", name)
        assert "nothing to resume from" in output
        assert "start at step 0, up to 5" in output
    assert "young" in call("list")


def test_show_lists_the_attempts_with_their_events():
    folder = Path("run-001")
    (folder / "rollback").mkdir(parents=True)
    with Journal(folder) as journal:
        write = journal.write
        write("step", step=12, loss=9.0, learning_rate=1e-3)
        write("spike", step=12, reason="loss 9 at step 12")
        write("rollback", step=10, from_step=12, reason="loss 9 at step 12")
        write("skip", step=10, reason="positions 40 to 47 of the data")
        for step in range(11, 24):
            write("warning", step=step, reason="a word " * 20)
        write("stop", step=24, reason="steps")
    lines = call("show", folder, "--json facts.json").splitlines()
    begin = lines.index("attempt 1: start at step 0, up to 12, no record of its end")
    assert lines[begin : begin + 4] == [
        "attempt 1: start at step 0, up to 12, no record of its end",
        "  step 12, spike: loss 9 at step 12",
        "attempt 2: rollback at step 10, up to 24, ended by steps",
        "  step 10, skip: positions 40 to 47 of the data",
    ]
    assert lines[-1] == "  and 2 more events, which --json has"
    attempts = read_json("facts.json")["attempts"]
    found = [(row["began"], row["from_step"], len(row["events"])) for row in attempts]
    assert found == [("start", 0, 1), ("rollback", 10, 14)]


def test_show_reports_an_unreadable_journal_and_shows_the_rest():
    Path("rollback").mkdir()
    Path("journal.jsonl").write_bytes(b"\0\xff" * 100 + b"\n")
    output = call("show .")
    assert "nothing to resume from" in output
    assert "is not a journal" in flat(output)
