"""A state with NaN is never saved, and a sound one always is.

python -m pytest tests/runs/test_sound_states.py
"""

from math import inf, nan

import pytest
import torch
from torch import nn

from curry_train.runs import PolicyConfig, SavingPolicy, TrainingState, saving

from ..store_models import WIDTH, Holder, new_state, train

EACH_STEP = PolicyConfig(rollback_every=1, recovery_every=None, best_k=1)


def odd_network():
    """Return a network with an infinite mask, and with float8, sparse and empty tensors."""
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.full((2, 2), -inf))
    model.register_buffer("table", torch.eye(3).to_sparse())
    model.register_buffer("nothing", torch.zeros(0, 3))
    model.register_buffer("unset", torch.full((2,), nan))
    small = torch.ones(4).to(torch.float8_e4m3fn)
    model.register_parameter("small", nn.Parameter(small, requires_grad=False))
    large = torch.full((4,), 60000.0, dtype=torch.float16)
    model.register_parameter("large", nn.Parameter(large, requires_grad=False))
    return model


def moment(state):
    return state.optimizers[0].state[state.model[0].weight]["exp_avg_sq"]


DAMAGE = {
    "parameter": (lambda s: s.model[0].weight.data, inf, "0.weight is not finite"),
    "float8": (lambda s: s.model.small.data, nan, "small is not finite"),
    "statistic": (lambda s: s.model[1].running_mean, -inf, "1.running_mean is not finite"),
    "mask": (lambda s: s.model.mask, nan, "mask has NaN"),
    "sparse buffer": (lambda s: s.model.table._values(), nan, "table has NaN"),
    "moment": (moment, nan, "optimizer.0.0.weight/exp_avg_sq has NaN"),
    "part": (lambda s: s.parts["extra-x"].kept["x"], nan, "part.extra-x/x has NaN"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_nan_in_any_tensor_is_not_saved_and_masks_and_nan_by_design_are(store, name, caplog):
    find, value, message = DAMAGE[name]
    state = new_state(build=odd_network, extra={"x": Holder({"x": torch.ones(2)})})
    train(state, 1)
    policy = SavingPolicy(store, EACH_STEP)
    policy.resume(state)
    assert [one.step for one in policy.after_step(1, state, {"loss": 1.0})] == [1]
    # Torch can't write a single element of float8.
    find(state).view(-1)[:1] = torch.tensor([value]).to(find(state).dtype)
    assert policy.after_step(2, state, {"loss": 1.0}) == []
    assert policy.save_now(2, state) == []
    assert caplog.messages == [f"step 2 was not saved: {message}"] * 2


def test_what_is_nan_before_a_new_run_is_no_damage(tmp_path):
    with saving(odd_network(), runs=tmp_path, resume=None) as run:
        run.step()
    assert run.store.latest()


def test_a_state_that_can_not_be_saved_yet_is_reported_before_the_first_step(store, caplog):
    model = nn.Sequential(nn.LazyLinear(2))
    held = Holder({"x": print})
    state = TrainingState(model, torch.optim.SGD(model.parameters()), extra={"x": held})
    policy = SavingPolicy(store, EACH_STEP)
    policy.resume(state)
    assert "a save at this moment would fail: " in caplog.text
    model(torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"part.extra-x/x: a builtin_function_or_\w+ can't"):
        policy.after_step(1, state, {})
    held.kept = {"x": torch.ones(1)}
    assert [one.step for one in policy.after_step(1, state, {})] == [1]


@pytest.mark.parametrize(
    ("metrics", "wrong"),
    [
        ({"loss": inf}, "loss is inf"),
        ({"dev_loss": nan}, "dev_loss is nan"),
        ({"loss": 1.0, "grad_norm": inf}, None),
        ({"loss": 1.0, "perplexity": torch.tensor(inf)}, None),
        ({"loss": None}, None),
    ],
)
def test_an_infinite_side_metric_does_not_keep_a_state_from_being_saved(
    store, caplog, metrics, wrong
):
    saved = SavingPolicy(store, EACH_STEP).after_step(1, new_state(), metrics)
    assert ("rollback" in [one.kind for one in saved]) == (wrong is None)
    assert caplog.messages == ([f"step 1 was not saved: {wrong}"] if wrong else [])
