"""The command `runs diff`: its text and its JSON.

Run: `python -m pytest tests/cli/test_runs_diff_command.py`.
"""

import json
import math

import pytest
from click.testing import CliRunner
from journals import facts, loss_of, plant, plant_eventful, train

from curry_train.cli.runs_diff import runs_diff_command
from curry_train.runs.journal import Journal


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(runs_diff_command, words)


def test_the_first_line_names_the_checkpoint_that_b_resumed_from(run, tmp_path):
    plant(tmp_path / "runs/first", last=30)
    (tmp_path / "runs/second").mkdir()
    new_facts = facts(steps=40)
    new_facts["environment"]["world_size"] = 2
    with Journal(tmp_path / "runs/second") as journal:
        journal.resume(20, facts={**new_facts, "from_run": "first"})
        train(
            journal, range(21, 41), loss=lambda step: loss_of(step) + (0.5 if step >= 25 else 0.0)
        )
    ended = run("first", "second")
    assert ended.exit_code == 0
    assert ended.output == (
        "second resumed from first at step 20\n"
        "\n"
        "A  first: steps 1 to 30, ended by steps\n"
        "B  second: steps 21 to 40, no record of its end\n"
        "\n"
        "config   A    B\n"
        "  steps  300  40\n"
        "\n"
        "code: the same\n"
        "\n"
        "environment   A  B\n"
        "  world_size  1  2\n"
        "\n"
        "losses: 6 of 10 common steps, 21 to 30, differ\n"
        "  part at step 25: A 4.04, B 4.54, by +0.5 (0.12 of A)\n"
        "\n"
        "peak of process  A 1.00 GiB, B 1.00 GiB, 1 of A\n"
        "median step      A 100 ms, B 100 ms, 1 of A\n"
        "\n"
        "events\n"
        "  resume  A none; B 1 at 20\n"
        "  save    A 3 at 10, 20, 30; B 2 at 30, 40\n"
        "  stop    A 1 at 30; B none\n"
    )


def test_the_memory_and_time_of_both_runs_are_compared(run, tmp_path):
    new_facts = facts()
    new_facts["environment"]["device"] = "NVIDIA H100"
    for name, factor in (("plain", 1.0), ("recompute", 0.25)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        with Journal(tmp_path / "runs" / name) as journal:
            journal.start(facts=new_facts)
            for step in range(1, 6):
                peak, slow = int(factor * 2**32) + step - 5, 60.0 if step == 1 else 1.5 - factor
                journal.step(step, loss=1.0, learning_rate=1e-3, seconds=slow, peak_bytes=peak)
    ended = run("plain", "recompute", "--json", "diff.json")
    assert "peak memory      A 4.00 GiB, B 1.00 GiB, 0.25 of A\n" in ended.output
    assert "median step      A 500 ms, B 1.25 s, 2.5 of A\n" in ended.output
    assert json.loads((tmp_path / "diff.json").read_text())["costs"]["seconds"] == [0.5, 1.25]


def test_an_attempt_of_a_run_is_selected_with_an_at_sign(run, tmp_path):
    plant_eventful(tmp_path / "runs/run")
    assert run("run@1", "run@2").output.startswith("run@2 rolled run@1 back to step 10\n\n")
    assert run("run@2", "run").output.startswith("run resumed from run@2 at step 20\n\n")
    printed = " ".join(run("run", "runs/run").output.split())
    assert printed == (
        "run and runs/run are the same journal, so nothing differs. "
        "To compare its attempts: run@1 run@2."
    )


def test_long_names_and_values_keep_to_80_columns(run, tmp_path):
    long = "n" * 100
    plant(
        tmp_path / f"runs/{long}",
        optimizer={"name": "x" * 200, long: {"deep": [1] * 50}},
        other={"a": 1},
    )
    plant(
        tmp_path / "runs/b",
        last=50,
        loss=lambda step: -1e300 * step,
        **{f"key{k}": k for k in range(60)},
    )
    ended = run(long, "b")
    assert ended.exit_code == 0
    assert max(map(len, ended.output.splitlines())) <= 80
    assert "and 24 more: --json has all" in ended.output
    assert "  optimizer.name                     xxx" in ended.output


def test_json_is_complete_and_alone_on_standard_output(run, tmp_path):
    plant(tmp_path / "runs/a", loss=lambda step: math.nan)
    plant(tmp_path / "runs/b", seed=3)
    ended = run("a", "b", "--json", "-")
    found = json.loads(ended.stdout, parse_constant=lambda word: pytest.fail(word))
    assert found["losses"]["parted"] == {
        "step": 1,
        "a": "nan",
        "b": 5.0,
        "amount": "nan",
        "relative": "inf",
    }
    assert found["config"] == [{"name": "seed", "a": "(none)", "b": 3}]
    assert "losses: 20 of 20 common steps" in ended.stderr
    assert run("a", "b", "--json", "out.json").exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text()) == found


def test_damage_is_reported(run, tmp_path):
    plant(tmp_path / "runs/a", last=10)
    path = plant(tmp_path / "runs/b", last=10) / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"garbage\n", *lines[3:5], b"\xff\n", *lines[5:]]))
    output = " ".join(run("a", "b").output.split())
    assert "ended by steps, 2 damaged lines, the first is 4" in output
    assert "losses: equal to the bit in 10 common steps, 1 to 10" in output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no run b; runs has a"),
        (b"", "holds no event: the run died while it started, or is starting just now"),
        (b"\x89PNG\r\n" * 200, "is not a journal of a run: line 1 is no event"),
        (b'{"v":7}\n', "is not a journal of a run: line 1 is no event"),
    ],
)
def test_bad_input_is_status_2_and_no_traceback(run, tmp_path, content, message):
    plant(tmp_path / "runs/a")
    if content is not None:
        (tmp_path / "runs/b").mkdir()
        (tmp_path / "runs/b/journal.jsonl").write_bytes(content)
    for words in (("a", "b"), ("b", "a")):
        ended = run(*words)
        assert (ended.exit_code, ended.stdout) == (2, "")
        assert message in " ".join(ended.stderr.split())


def test_control_characters_of_a_hostile_journal_do_not_reach_the_terminal(run, tmp_path):
    plant(tmp_path / "runs/a")
    (tmp_path / "runs/b").mkdir()
    with Journal(tmp_path / "runs/b") as journal:
        journal.start(facts={"config": {"\x1b[31m": "\x1b]0;x\x07", "\ud800": 1}})
        journal.write("eval", step=1, metric="\x1b[2J", value=1.0)
        journal.write("stop", step=1, reason="\x1b[2J\n\n")
    ended = run("a", "b")
    assert ended.exit_code == 0
    assert "\x1b" not in ended.output
    assert r"\x1b[31m" in ended.output
