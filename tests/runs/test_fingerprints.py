"""A record of a run survives a kill, costs no change of the training, and has all of a step.

Run: `python -m pytest tests/runs/test_fingerprints.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from curry_train.runs import RunError, fingerprints, record_run
from curry_train.runs.fingerprints import read_fingerprints, users_line
from curry_train.runs.locate import locate, settings_of

from .recorded_training import Model, recorded, train


@dataclass(slots=True)
class Slots:
    one: object


def kinds(record):
    return {one.kind for one in record}


def entered(record):
    return [one.path for one in record if one.kind == "enter"]


def test_recording_changes_nothing():
    plain = train()
    with record_run("a", steps=9):
        assert train() == plain
        # A kill would lose nothing.
        assert read_fingerprints("a")[-1].kind == "step"
    assert train() == plain


def test_a_step_has_its_data_calls_gradients_and_updates():
    record = recorded("a")
    before = {"start", "settings", "batch", "state", "enter", "exit", "loss"}
    assert kinds(record) == before | {"gradient", "gradients", "update", "step", "end"}
    assert {one.step for one in record[1:]} == {1, 2, 3}
    update = next(one for one in record if one.kind == "update" and one.step == 2)
    assert {"gradient of model.head.bias", "exp_avg of model.head.bias"} <= update.digests.keys()
    assert update.values["lr of group 0"] == 1e-3
    assert record[0].environment["torch"] == torch.__version__
    # A version is one setting, so that `--bisect` changes it in one place.
    assert settings_of(record)["torch"] == torch.__version__
    assert "package torch" not in settings_of(record)


def test_level_modules_has_calls_alone():
    record = recorded("a", level="modules")
    assert "gradient" not in kinds(record)
    assert all(not one.digests for one in record if one.kind in ("state", "step"))
    assert sum(one.kind == "exit" for one in record) > 40
    with pytest.raises(ValueError, match="of level all in A and modules in B"):
        locate(recorded("b"), record)


def test_a_last_line_that_was_cut_off_is_left_out():
    whole = recorded("a")
    path = Path("a/rank-0.jsonl")
    path.write_text(path.read_text()[:-5])
    cut_off = read_fingerprints("a")
    assert cut_off == whole[:-1]
    assert locate(whole, cut_off[:99]).is_equal
    lines = path.read_text().splitlines()
    for damaged in ("\n".join([lines[0], lines[1][:9], *lines[2:]]), "\xff\n"):
        path.write_text(damaged, "latin-1")
        with pytest.raises(RunError, match="is damaged, record it again"):
            read_fingerprints("a")


def test_a_record_of_another_version_is_refused_and_not_written_over():
    Path("rank-0.jsonl").write_text('{"kind": "start", "version": 1}\n')
    with pytest.raises(RunError, match="was recorded by another version; record it again"):
        read_fingerprints(".")
    with pytest.raises(RunError, match="is there already"), record_run("."):
        pass
    with pytest.raises(RunError, match="record a run by"):
        read_fingerprints("b")


def test_a_line_of_a_package_whose_name_only_begins_as_ours_is_the_users():
    def step():
        return users_line()

    ours = Path(fingerprints.__file__).parents[1]
    step.__code__ = step.__code__.replace(co_filename=f"{ours}_of_mine/loop.py")
    assert step().startswith("loop.py:")


def test_wrappers_leave_no_trace_in_the_names():
    model = nn.DataParallel(Model(""))
    # A setting that is no number.
    model.module.sizes = (torch.ones(2),)
    with record_run("a"):
        model(torch.randn(2, 16))
        # While the training runs the lines are in the file.
        assert read_fingerprints("a")[-1].kind == "exit"
    assert entered(read_fingerprints("a"))[:2] == ["model", "model.h.0"]


def test_the_first_call_of_lazy_modules_is_left_out():
    model = nn.Sequential(nn.Identity(), nn.LazyLinear(4))
    with record_run("a"):
        for _ in "ab":
            model(torch.randn(2, 16))
    assert entered(read_fingerprints("a")) == ["model", "model.0", "model.1"]


def test_a_module_in_a_transform_and_one_without_values_run_as_they_do():
    model, given = nn.Linear(4, 1), torch.randn(2, 4)
    with record_run("a"):
        slopes = torch.func.vmap(torch.func.grad(lambda one: model(one).sum()))(given)
        nn.Linear(4, 2, device="meta")(given.to("meta"))
    assert slopes.equal(model.weight.expand(2, -1))
    assert entered(read_fingerprints("a")) == ["model"]


def test_workers_of_a_loader_note_operations_alone():
    def collate(rows):
        values = nn.Tanh()(rows[0])
        return SimpleNamespace(values=values, array=Slots(values.numpy()[::-1]))

    with record_run("a", operations_in_step=1):
        [_] = DataLoader(torch.ones(1, 2), num_workers=1, collate_fn=collate)
    record = read_fingerprints("a")
    assert kinds(record) == {"start", "batch", "operation"}
    assert "aten.tanh.default" in {one.name for one in record if vars(one).get("worker") == 0}
    assert "profiler" not in str(record)
    [batch] = [one for one in record if one.kind == "batch"]
    assert [*batch.digests] == ["values", "array.one"]


def test_compiled_models_are_recorded_from_outside():
    # This backend calls a module of its own.
    model = torch.compile(Model(""), backend="aot_eager")
    with record_run("a"):
        model(torch.randn(2, 16)).sum().backward()
    record = read_fingerprints("a")
    assert entered(record) == ["model"]
    assert "gradient" in kinds(record)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"steps": 0}, "at least 1 step, got 0"), ({"level": "some"}, "no level 'some'")],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        record_run("a", **options)
