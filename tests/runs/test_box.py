"""A box keeps a bad step whole, within its bounds, and runs nothing when it is read.

Run: `python -m pytest tests/runs/test_box.py`.
"""

import json
import logging
import math
import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from curry_train.primitives import NonFiniteWindow
from curry_train.runs import DamagedCheckpoint, RunError, SavedRun, saving
from curry_train.runs.box import BoxFacts, read_facts, read_rank
from curry_train.runs.fingerprints import Observation, value_range
from curry_train.runs.replay import examine, makes_not_finite
from torture_shapes import Call

STEPS = 12


class Samples:
    """Data that resume from one integer, and hand out each batch."""

    def __init__(self):
        self.position = 0
        self.on_batch = lambda batch: batch

    def __iter__(self):
        while True:
            self.position += 1
            yield self.on_batch(torch.full((4, 3), float(self.position)))


class Own:
    """A batch of the user's own class."""

    def __init__(self, tensor):
        self.tensor = tensor


def train(folder, bad, *, steps=STEPS, change=None, wrap=lambda batch: batch, **options):
    """Train on random batches, of which those of the steps in `bad` make NaN."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    batches = [{"inputs": torch.randn(4, 3), "step": step} for step in range(1, steps + 1)]
    with saving(model, optimizer, runs=folder, rollback_every=3, **options) as run:
        for batch in run.batches([wrap(one) for one in batches]):
            inputs = batch.tensor if isinstance(batch, Own) else batch["inputs"]
            loss = F.mse_loss(model(inputs), torch.zeros(4, 2))
            # The weights stay finite, so that later steps are good ones.
            bad_loss = loss * math.nan if run.steps + 1 in bad else loss
            loss.backward()
            if change is not None:
                change(batch)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=bad_loss)
    return Path(folder, "boxes")


def box_of_step_11(folder, **options):
    return train(folder, [11], box=True, **options) / "step-00000011"


def test_a_box_has_the_state_before_the_step_its_batch_and_its_generators(tmp_path):
    box = box_of_step_11(tmp_path)
    facts = read_facts(box)
    assert (facts.step, facts.checkpoint) == (11, "rollback/step-00000009.dcp")
    assert facts.losses["11"] == "nan"
    assert float.fromhex(facts.losses["10"]) > 0
    assert SavedRun(box).latest().step == 9
    found = read_rank(box, 0)
    assert [one["step"] for one in found["batches"]] == [11]
    assert found["batches"][0]["inputs"].shape == (4, 3)
    assert found["generators"].keys() >= {"torch", "python"}


def test_the_state_of_a_box_takes_no_space_and_outlives_its_checkpoint(tmp_path):
    box = box_of_step_11(tmp_path, retention={"rollback_keep": 1, "recovery_keep": 1})
    assert not (tmp_path / "rollback/step-00000009.dcp").exists()
    run = SavedRun(box)
    assert run.verify(run.latest()).step == 9
    again = box_of_step_11(tmp_path / "second")
    files = [one for one in (again / "rollback").rglob("*") if one.is_file()]
    assert {one.stat().st_nlink for one in files} == {2}


def test_the_newest_boxes_are_kept_within_their_number_and_size(caplog):
    boxes = train("number", [5, 8, 11], box={"keep": 2})
    assert sorted(one.name for one in boxes.iterdir()) == ["step-00000008", "step-00000011"]
    boxes = train("size", [8, 11], box={"most_bytes": 100})
    assert not list(boxes.iterdir())
    assert "was not kept in a box: its state takes" in caplog.text
    assert not train("none", [8], box={"keep": 0}).exists()
    assert not train("sound", [], box=True).exists()


def test_a_step_before_the_first_save_is_kept_without_a_state(tmp_path):
    assert read_facts(train(tmp_path, [2], box=True) / "step-00000002").checkpoint is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"wrap": lambda batch: Own(batch["inputs"])}, "a Own can't be saved"),
        ({"change": lambda batch: batch["inputs"].zero_()}, "the loop has changed it in place"),
    ],
)
def test_a_batch_that_can_not_be_kept_is_named_and_the_rest_is_kept(
    options, reason, tmp_path, caplog
):
    box = box_of_step_11(tmp_path, **options)
    assert reason in caplog.text
    assert "A replay takes it from the script's own data" in caplog.text
    found = read_rank(box, 0)
    assert found["batches"] is None
    assert found["generators"] is not None


def test_a_step_that_is_not_finite_is_kept_before_its_error_ends_the_loop(tmp_path):
    model = torch.nn.Linear(3, 2)
    stream = Samples()
    run = saving(model, torch.optim.SGD(model.parameters()), runs=tmp_path, stream=stream, box=True)
    for batch in stream:
        assert run.continues(until=9)
        if stream.position == 4:
            break
        run.step(loss=batch.sum())
    with pytest.raises(NonFiniteWindow):
        run.not_finite(NonFiniteWindow("step 4: the gradient is nan"))
    box = tmp_path / "boxes/step-00000004"
    assert read_facts(box).reason == "step 4: the gradient is nan"
    assert read_rank(box, 0)["batches"][0][0, 0] == 4


def test_a_step_whose_batch_was_not_handed_out_is_kept_without_it(tmp_path, caplog):
    stream = Samples()
    del stream.on_batch
    run = saving(torch.nn.Linear(3, 2), runs=tmp_path, stream=stream, box=True)
    assert run.continues(until=9)
    with pytest.raises(NonFiniteWindow):
        run.not_finite(NonFiniteWindow("step 1: the gradient is nan"))
    assert "is not in its box: no batch was handed out" in caplog.text
    assert read_rank(tmp_path / "boxes/step-00000001", 0)["batches"] is None


def test_the_line_of_a_box_can_be_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train it.py", "--rate", "0.1"])
    with caplog.at_level(logging.WARNING):
        box = box_of_step_11(tmp_path)
    assert f"curry-train runs replay {box} --script 'train it.py' -- --rate 0.1" in caplog.text


# Reading what somebody else may have made.


def test_a_forged_box_runs_nothing():
    box = box_of_step_11("run")
    torch.save({"tensors": {}, "batches": [Call(os.mkdir, "ran")]}, box / "rank-0.pt")
    with pytest.raises(DamagedCheckpoint):
        read_rank(box, 0)
    assert not Path("ran").exists()


FACTS = BoxFacts(11, "why", "rollback/step-00000009.dcp", {"11": "nan"}, None, 1, "train.py")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step": 0}, "a damaged box .*step 0"),
        ({"checkpoint": "../../secret"}, "is no checkpoint"),
        ({"checkpoint": "rollback/step-00000006.dcp"}, "has lost its state"),
        ({"losses": {"11": "much"}}, "a damaged box"),
        ({"world_size": 10**9}, "of 1000000000 ranks"),
    ],
)
def test_facts_that_are_not_those_of_a_box_are_refused(changed, message, tmp_path):
    (tmp_path / "rollback/step-00000009.dcp").mkdir(parents=True)
    path = tmp_path / "box.json"
    with pytest.raises(RunError, match=r"is no box: .*runs/run-001/boxes/step-00000180"):
        read_facts(tmp_path)
    path.write_text(json.dumps(vars(FACTS)))
    assert read_facts(tmp_path) == FACTS
    path.write_text(json.dumps(vars(FACTS) | changed))
    with pytest.raises(RunError, match=message):
        read_facts(tmp_path)


# What makes NaN and infinity.


def test_only_what_makes_infinity_or_nan_is_a_source():
    finite, infinite, nan = (0.0, 1.0), (-math.inf, 0.0), (math.nan, math.nan)
    assert makes_not_finite([finite], [infinite])
    # A mask: infinity is passed on. A softmax of nothing else makes NaN.
    assert not makes_not_finite([finite, infinite], [infinite])
    assert makes_not_finite([infinite], [nan])
    assert not makes_not_finite([nan], [nan])


def test_the_range_of_a_number_and_of_complex_values_is_read():
    values = torch.tensor([-2.0, 4.0])
    assert value_range(torch.complex(values, values)) == (-2.0, 4.0)
    assert value_range(3.0) == (3.0, 3.0)
    assert [*map(value_range, (math.nan, -math.inf))] == [None, None]


def test_an_infinite_argument_is_named_where_the_step_before_had_none():
    fill = {"kind": "operation", "name": "fill_", "line": "", "given": []}
    good = Observation(step=1, values={}, **fill)
    bad = Observation(step=2, values={0: math.inf}, ranges={0: (0, math.inf)}, **fill)
    assert examine([good, bad])["origin"]
    # Without the step before it may be a mask.
    assert not examine([bad])["origin"]
