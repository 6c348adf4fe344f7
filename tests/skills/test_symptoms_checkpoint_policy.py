"""Symptoms of skill `checkpoint-policy`: reproduced, cured, not cured by the wrong fix.

python -m pytest tests/skills/test_symptoms_checkpoint_policy.py
"""

import os

import pytest
import torch
from store_models import WIDTH, network, new_state, train
from symptoms import rows_of, rows_with_a_test, symptom

from curry_train.runs import LockedRun, StateMismatch, Store


def test_every_row_has_a_test():
    assert sorted(rows_with_a_test("checkpoint_policy")) == sorted(rows_of("checkpoint-policy"))


@symptom("losses jump after a resume, without an error")
def test_state_left_out_of_a_save_changes_the_losses(tmp_path):
    state, bare, whole = new_state(), new_state(seed=1), new_state(seed=1)
    train(state, 3)
    with Store(tmp_path) as store:
        saved = store.save("recovery", 3, state)
        weights = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
        ahead = train(state, 3)
        bare.model.load_state_dict(weights)
        assert train(bare, 3) != ahead
        store.load(saved, whole)
        assert train(whole, 3) == ahead


@symptom("`StateMismatch`: ... of ... tensors match")
def test_a_state_that_does_not_fit_is_refused_and_a_partial_load_is_a_fresh_start(tmp_path):
    def wider():
        return torch.nn.Sequential(*list(network())[:3], torch.nn.Linear(16, 5))

    state = new_state()
    with Store(tmp_path) as store:
        saved, other = store.save("recovery", 3, state), new_state(seed=1, build=wider)
        with pytest.raises(StateMismatch, match="tensors match"):
            store.load(saved, other)
        before = other.model[3].weight.detach().clone()
        store.load(saved, other, strict=False)
        assert torch.equal(other.model[3].weight, before)
        store.load(saved, new_state(seed=1))
    assert other.model(torch.ones(2, WIDTH)).shape == (2, 5)


@symptom("`LockedRun`: ... is held by process ...")
def test_a_second_writer_is_refused_until_the_first_ends(tmp_path):
    with Store(tmp_path):
        with pytest.raises(LockedRun, match=f"held by process {os.getpid()}"):
            Store(tmp_path).open()
        (tmp_path / "writer.lock").unlink()
        with Store(tmp_path) as second:  # the wrong fix: now two processes write
            assert second
    with Store(tmp_path):
        pass


@symptom("`ValueError`: `extra.stats.state_dict()['x']`: ... can't be saved")
def test_a_value_that_no_load_could_restore_is_named_at_the_first_save(tmp_path):
    class Stats:
        """Part of a training with a value that no file can hold."""

        x = object()

        def state_dict(self):
            return {"x": self.x}

        def load_state_dict(self, state):
            self.x = state["x"]

    stats = Stats()
    state = new_state(extra={"stats": stats})
    with Store(tmp_path) as store:
        with pytest.raises(ValueError, match=r"extra.stats.state_dict\(\)\['x'\]"):
            store.save("recovery", 1, state)
        stats.x = [1.5, "text"]
        store.save("recovery", 1, state)
        stats.x = None
        store.load(store.latest(), state)
    assert stats.x == [1.5, "text"]
