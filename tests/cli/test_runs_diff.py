"""The difference between two runs, from their journals.

Run: `python -m pytest tests/cli/test_runs_diff.py`.
"""

import math
from dataclasses import asdict

import pytest
from journals import clock, facts, loss_of, plant, plant_eventful, train

from curry_train.cli.runs_diff import (
    ABSENT_VALUE,
    Continuation,
    SettingChange,
    changes,
    difference,
)
from curry_train.runs.history import read_history
from curry_train.runs.journal import Journal


def compare(a, b):
    return difference(read_history(a, name="A"), read_history(b, name="B"))


def test_a_resume_from_the_other_run_is_reported_with_its_step(tmp_path):
    plant(tmp_path / "first", last=30)
    (tmp_path / "second").mkdir()
    with Journal(tmp_path / "second") as journal:
        journal.resume(20, facts={**facts(), "from_run": "first"})
        train(
            journal, range(21, 41), loss=lambda step: loss_of(step) + (0.5 if step >= 25 else 0.0)
        )
    found = compare(tmp_path / "first", tmp_path / "second")
    assert found.resumed == Continuation("A", "B", 20)
    assert compare(tmp_path / "second", tmp_path / "first").resumed == Continuation("B", "A", 20)
    assert (found.losses.first_common, found.losses.last_common, found.losses.num_common) == (
        21,
        30,
        10,
    )
    assert (found.losses.parted.step, found.losses.parted.amount) == (25, pytest.approx(0.5))
    assert found.config == []


def test_a_resume_beyond_the_end_of_the_other_run_is_doubted(tmp_path):
    """Do not take run-001 of another folder for the origin because of its name."""
    plant(tmp_path / "first", last=10)
    (tmp_path / "second").mkdir()
    with Journal(tmp_path / "second") as journal:
        journal.resume(500, facts={"from_run": "first"})
    assert compare(tmp_path / "first", tmp_path / "second").resumed == Continuation(
        "A", "B", 500, reached=False
    )


def test_attempts_of_one_run_are_compared_like_runs(tmp_path):
    folder = plant_eventful(tmp_path / "run")
    back = compare(f"{folder}@1", f"{folder}@2")
    assert back.resumed == Continuation("A", "B", 10, how="rollback")
    assert (back.losses.parted.step, back.losses.num_different) == (11, 10)
    on = compare(f"{folder}@2", folder)
    assert (on.resumed, on.same) == (Continuation("A", "B", 20), False)
    assert on.config == [SettingChange("steps", 300, 40)]
    assert on.losses.parted.step == 21
    assert on.losses.parted.amount == pytest.approx(0.001)


def test_runs_without_a_common_step_are_reported_with_their_steps(tmp_path):
    plant(tmp_path / "one", last=10)
    (tmp_path / "two").mkdir()
    with Journal(tmp_path / "two") as journal:
        journal.resume(10)
        train(journal, range(11, 21))
    losses = compare(tmp_path / "one", tmp_path / "two").losses
    assert (losses.num_common, losses.parted, losses.spans) == (0, None, ((1, 10), (11, 20)))
    (tmp_path / "three").mkdir()
    with Journal(tmp_path / "three") as journal:
        journal.start()
    assert compare(tmp_path / "one", tmp_path / "three").losses.spans == ((1, 10), None)


def test_the_first_step_with_different_losses_is_found_by_a_single_bit(tmp_path):
    """Plant the least difference that a figure can have, then a visible one, then the largest."""
    plant(tmp_path / "one", last=40)

    def other(step):
        loss = loss_of(step)
        if step == 7:
            return math.nextafter(loss, math.inf)
        return loss * 1.02 if step == 20 else loss - 2.0 if step == 30 else loss

    plant(tmp_path / "two", last=40, loss=other)
    losses = compare(tmp_path / "one", tmp_path / "two").losses
    assert (losses.num_common, losses.num_different) == (40, 3)
    assert losses.parted.step == 7
    assert 0 < losses.parted.amount < 1e-15
    assert (losses.visibly.step, losses.visibly.relative) == (20, pytest.approx(0.02))
    assert (losses.largest.step, losses.largest.amount) == (30, -2.0)


@pytest.mark.parametrize(
    ("a", "b", "parted"),
    [
        ((1.0, math.nan, 2.0), (1.0, math.nan, 2.0), None),
        ((1.0, math.inf, 2.0), (1.0, math.inf, 2.0), None),
        ((1.0, math.nan, 2.0), (1.0, 1.0, 2.0), 2),
        ((1.0, 0.0, 2.0), (1.0, 1.0, 2.0), 2),
        ((1.0, 3.0, math.inf), (1.0, 3.0, -math.inf), 3),
    ],
)
def test_losses_that_are_not_finite_are_compared_too(tmp_path, a, b, parted):
    for name, losses in (("one", a), ("two", b)):
        plant(tmp_path / name, last=3, loss=lambda step, losses=losses: losses[step - 1])
    found = compare(tmp_path / "one", tmp_path / "two").losses
    assert (found.parted and found.parted.step) == parted
    assert (found.parted is None) or found.parted.relative == math.inf


def test_nested_configurations_are_compared_leaf_by_leaf():
    a = {
        "x": {"y": {"z": 1, "same": [1, {"a": 2}]}, "gone": {"deep": 1}},
        "flag": True,
        "n": 1,
        "none": None,
    }
    b = {"x": {"y": {"z": 2, "same": [1, {"a": 2}]}}, "flag": 1, "n": 1.0, "new": "v"}
    assert changes(a, b) == [
        SettingChange("x.y.z", 1, 2),
        SettingChange("x.gone", {"deep": 1}, ABSENT_VALUE),
        SettingChange("flag", True, 1),
        SettingChange("none", None, ABSENT_VALUE),
        SettingChange("new", ABSENT_VALUE, "v"),
    ]
    assert changes({"a": {"b": 1}}, {"a": 3}) == [SettingChange("a", {"b": 1}, 3)]
    assert changes({"a": float("nan")}, {"a": float("nan")})[0].name == "a"  # JSON keys are text


def test_code_and_environment_that_differ_are_named(tmp_path):
    for name, more in (("one", {}), ("two", {"dirty": True, "changes": "0f"})):
        (tmp_path / name).mkdir()
        new_facts = facts()
        new_facts["code"] |= more
        if name == "two":
            new_facts["environment"] |= {"world_size": 8, "device": "NVIDIA H100"}
            new_facts["environment"]["packages"] = {
                "torch": "2.11.0",
                "numpy": "2.0.0",
                "xxhash": "3.4",
            }
            new_facts["command"] = "python train.py"
        with Journal(tmp_path / name, clock=clock()) as journal:
            journal.start(facts=new_facts)
    found = compare(tmp_path / "one", tmp_path / "two")
    assert [(change.name, change.b) for change in found.code] == [
        ("dirty", True),
        ("changes", "0f"),
    ]
    assert [change.name for change in found.environment] == [
        "command",
        "device",
        "world_size",
        "packages.torch",
        "packages.xxhash",
    ]
    assert found.resumed is None


def test_events_and_dev_metrics_of_each_are_there(tmp_path):
    folder = plant_eventful(tmp_path / "run")
    plant(tmp_path / "other", last=40)
    with Journal(tmp_path / "other") as journal:
        journal.resume(40)
        journal.write("eval", step=40, metric="dev_loss", value=4.75)
    found = compare(folder, tmp_path / "other")
    assert (found.events["spike"][0].steps, found.events["spike"][1].num) == ((20,), 0)
    assert (found.metrics["dev_loss"].parted.step, found.metrics["dev_loss"].parted.amount) == (
        40,
        0.25,
    )
    shown = asdict(found)
    assert shown["metrics"]["dev_loss"]["parted"]["amount"] == 0.25
    assert shown["losses"]["parted"]["step"] == 11
