"""Symptoms of skill `checkpoint-policy`: reproduced, cured, not cured by the wrong fix.

python -m pytest tests/skills/test_symptoms_checkpoint_policy.py
"""

import os
import pickle

import pytest
import torch
from store_models import WIDTH, network, new_state
from symptoms import symptom

from curry_train.runs import StateMismatch, Store


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


@symptom("a checkpoint loads without an error, and the model is at chance")
def test_names_with_wrappers_load_nothing_unless_all_are_stripped():
    wrapped = {f"module._orig_mod.{name}": one for name, one in network().state_dict().items()}
    model = network()
    before = model[0].weight.detach().clone()
    one_prefix = {name.removeprefix("module."): tensor for name, tensor in wrapped.items()}
    for weights in (wrapped, one_prefix):  # the second is the wrong fix
        model.load_state_dict(weights, strict=False)
        assert torch.equal(model[0].weight, before)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(weights)
    bare = {name.removeprefix("_orig_mod."): tensor for name, tensor in one_prefix.items()}
    model.load_state_dict(bare)
    assert not torch.equal(model[0].weight, before)


class Settings:
    """Class that a trainer puts into its files."""


class Call:
    """Object whose unpickling calls a function."""

    def __reduce__(self):
        return os.mkdir, ("was-run",)


@symptom("`UnpicklingError`: Weights only load failed, and the file is whole")
def test_a_class_is_allowed_by_name_and_code_of_a_file_never_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(2), "settings": Settings()}, "known.pt")
    torch.save({"weight": torch.ones(2), "call": Call()}, "hostile.pt")
    for name in ("known.pt", "hostile.pt"):
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            torch.load(name)
    with torch.serialization.safe_globals([Settings]):
        assert torch.equal(torch.load("known.pt")["weight"], torch.ones(2))
        with pytest.raises(pickle.UnpicklingError):
            torch.load("hostile.pt")
    assert not (tmp_path / "was-run").exists()
    torch.load("hostile.pt", weights_only=False)  # the wrong fix
    assert (tmp_path / "was-run").exists()
