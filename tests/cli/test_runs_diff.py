"""The difference between two runs, from their journals: found, printed and written as JSON.

Run: `python -m pytest tests/cli/test_runs_diff.py`.
"""

import functools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from curry_train.cli.runs_diff import describe, difference
from curry_train.runs import Journal
from curry_train.runs.history import changes, read_history

from ..command_runs import flat, ran, require_narrow
from ..journals import clock, facts, loss_of, plant, plant_eventful, train


def change(name, a, b):
    return {"name": name, "a": a, "b": b}


def text_of(found):
    return flat(" ".join(describe(found)))


def compare(a, b):
    named = zip((a, b), "AB", strict=True)
    return difference(*(replace(read_history(run), name=name) for run, name in named))


run = functools.partial(ran, "runs diff")


def test_a_resume_of_the_other_run_is_the_first_line():
    plant("runs/first", last=30)
    shutil.copytree("runs/first", "runs/second")
    new_facts = facts(steps=40)
    new_facts["environment"]["world_size"] = 2
    new_facts["environment"]["packages"]["scipy"] = "x" * 60
    with Journal("runs/second", step=20, facts=new_facts) as journal:
        train(
            journal, range(21, 41), loss=lambda step: loss_of(step) + (0.5 if step >= 25 else 0.0)
        )
    assert [flat(line) for line in run("first second").output.splitlines()] == [
        "second resumed from first at step 20",
        "A B",
        "run first second",
        "steps 1 to 30 1 to 40",
        "attempts 1 2",
        "ended by steps no record",
        "events.save 3 5",
        "events.resume (none) 1",
        "config.steps 300 40",
        "environment.world_size 1 2",
        "environment.packages.scipy (none) " + "x" * 45,
        "x" * 15,
        "losses: 6 of 30 common steps, 1 to 30, differ",
        "first at step 25: A 4.04, B 4.54, by +0.5",
    ]
    assert run("second first").output.startswith("second resumed from first at step 20\n")


def test_attempts_of_one_run_are_compared_like_runs():
    folder = plant_eventful("run")
    back = compare(f"{folder}@1", f"{folder}@2")
    assert back["continued"] == "B rolled A back to step 10"
    assert (back["losses"]["first"]["step"], back["losses"]["num_different"]) == (11, 10)
    on = compare(f"{folder}@2", folder)
    assert on["continued"] == "B resumed from A at step 20"
    assert change("config.steps", 300, 40) in on["changes"]
    assert on["losses"]["first"]["step"] == 21
    same = compare(folder, folder)
    assert (same["continued"], same["changes"]) == (None, [change("run", "A", "B")])
    assert "equal to the bit in 40 common steps" in text_of(same)


@pytest.mark.parametrize(
    ("a", "b", "first", "largest"),
    [
        # The least difference that a figure can have.
        ((1.0, 3.0, 4.0), (1.0, math.nextafter(3.0, math.inf), 2.0), 2, 3),
        ((1.0, math.nan, 2.0), (1.0, math.nan, 2.0), None, None),
        ((1.0, math.nan, 2.0), (1.0, 1.0, 2.0), 2, 2),
        ((1.0, 3.0, math.inf), (1.0, 3.0, -math.inf), 3, 3),
    ],
)
def test_the_first_and_the_largest_difference_of_losses_are_found(a, b, first, largest):
    for name, losses in (("one", a), ("two", b)):
        plant(name, last=3, loss=dict(enumerate(losses, 1)).get)
    found = compare("one", "two")["losses"]
    assert [found[one] and found[one]["step"] for one in ("first", "largest")] == [first, largest]


def test_numbers_are_equal_by_value_and_a_truth_value_is_no_number():
    a = {"flag": True, "number": 1, "missing": math.nan, "inner": {"b": 1}}
    b = {"flag": 1, "number": 1.0, "missing": math.nan, "inner": 3}
    assert changes(a, b) == [change("flag", True, 1), change("inner", {"b": 1}, 3)]


def test_code_environment_and_costs_that_differ_are_named():
    other = facts()
    other["code"] |= {"dirty": True, "changes": "0f"}
    other["environment"] |= {"world_size": 8, "device": "NVIDIA H100"}
    other["command"] = "python train.py"
    for name, new_facts, seconds in (("one", facts(), 0.5), ("two", other, 1.25)):
        Path(name).mkdir()
        with Journal(name, facts=new_facts, clock=clock()) as journal:
            for step in range(1, 6):
                figures = {"loss": 1.0, "learning_rate": 1e-3, "peak_bytes": 2**30}
                journal.write("step", step=step, seconds=60.0 if step == 1 else seconds, **figures)
    assert {one["name"]: one["b"] for one in compare("one", "two")["changes"]} == {
        "run": "B",
        "median step": "1.25 s",
        "code.dirty": True,
        "code.changes": "0f",
        "environment.device": "NVIDIA H100",
        "environment.world_size": 8,
        "command": "python train.py",
    }


def test_facts_that_a_journal_lacks_are_named():
    plant("one")
    Path("two").mkdir()
    Journal("two").close()
    text = text_of(compare("one", "two"))
    assert "not recorded: config of B, code of B, environment of B" in text
    assert "losses: no step in common" in text


def test_dev_metrics_of_both_are_compared():
    folder = plant_eventful("run")
    plant("other", last=40)
    with Journal("other", step=40) as journal:
        journal.write("eval", step=40, metric="dev_loss", value=4.75)
    found = compare(folder, "other")["metrics"]["dev_loss"]["first"]
    assert found == {"step": 40, "a": 4.5, "b": 4.75}


def test_long_names_and_values_keep_to_80_columns():
    long = "n" * 100
    plant(f"runs/{long}", optimizer={"name": "x" * 200, long: {"deep": [1] * 50}})
    plant("runs/b", last=50, loss=lambda step: -1e300 * step)
    require_narrow(run(f"{long} b").output)


def test_json_is_complete_and_alone_on_standard_output():
    plant("runs/a", loss=lambda step: math.nan)
    plant("runs/b", seed=3)
    ended = run("a b --json -")
    found = json.loads(ended.stdout, parse_constant=lambda word: pytest.fail(word))
    assert found["losses"]["first"] == {"step": 1, "a": "nan", "b": 5.0}
    assert {"name": "config.seed", "a": "(none)", "b": 3} in found["changes"]
    assert "losses: 20 of 20 common steps" in ended.stderr


def test_control_characters_of_a_hostile_journal_do_not_reach_the_terminal():
    plant("runs/a")
    Path("runs/b").mkdir()
    hostile = {"config": {"\x1b[31m": "\x1b]0;x\x07", "\ud800": 1}}
    with Journal("runs/b", facts=hostile) as journal:
        journal.write("eval", step=1, metric="\x1b[2J", value=1.0)
        journal.write("stop", step=1, reason="\x1b[2J\n\n")
    ended = run("a b")
    assert "\x1b" not in ended.output
    assert r"\x1b[31m" in ended.output
