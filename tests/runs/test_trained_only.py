"""Adapters are saved without their frozen base, and load onto that base alone.

python -m pytest tests/runs/test_trained_only.py
"""

import pytest
import torch
from torch import nn

from curry_train.runs import StateMismatch, Store, TrainingState

WIDTH = 32


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank, and a buffer."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.base(x) + self.up(self.down(x))


def adapted(base_seed=0, seed=0):
    torch.manual_seed(base_seed)
    model = nn.Sequential(Adapted(), nn.Tanh(), Adapted())
    torch.manual_seed(seed)
    for one in (model[0], model[2]):
        nn.init.normal_(one.down.weight)
        nn.init.normal_(one.up.weight)
    return model


def state_of(model, *, trained_only=True):
    trained = [one for one in model.parameters() if one.requires_grad]
    return TrainingState(model, torch.optim.AdamW(trained), trained_only=trained_only)


def train(state, steps=2):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        state.model(torch.randn(4, WIDTH, generator=generator)).square().sum().backward()
        state.optimizers[0].step()
        state.optimizers[0].zero_grad()


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("kind", ["rollback", "best-k"])
def test_adapters_are_saved_alone_and_go_on_alike(store, kind):
    state = state_of(adapted())
    train(state)
    taken = state.snapshot()
    assert not any("base" in name for name in taken.tensors)
    saved = store.save(kind, 1, state, metric=("loss", 0.5) if kind == "best-k" else None)

    other = state_of(adapted(seed=1))
    assert store.load(saved, other).exact
    assert all(map(torch.equal, state.model.state_dict().values(), _values(other)))
    if kind == "rollback":
        for one in (state, other):
            train(one)
        assert all(map(torch.equal, _values(state), _values(other)))


def _values(state):
    return list(state.model.state_dict().values())


def test_another_base_is_refused_before_anything_changes(store):
    state = state_of(adapted())
    train(state)
    saved = store.save("rollback", 1, state)
    other = state_of(adapted(base_seed=5, seed=1))
    before = [value.clone() for value in _values(other)]
    with pytest.raises(StateMismatch, match="trained on another base: the hash") as caught:
        store.load(saved, other)
    assert "\n" not in str(caught.value)
    assert all(map(torch.equal, _values(other), before))


@pytest.mark.parametrize("change", ["one element", "another name"])
def test_the_hash_is_of_values_and_names(store, change):
    saved = store.save("rollback", 1, state_of(adapted()))
    model = adapted()
    if change == "one element":
        with torch.no_grad():
            model[2].base.bias[3] += 1e-3
    else:
        bias = model[2].base.bias
        del model[2].base.bias
        model[2].base.register_parameter("offset", bias)
    with pytest.raises(StateMismatch, match="another base"):
        store.load(saved, state_of(model))


def test_a_hash_is_computed_again_once_the_base_was_written_to():
    state = state_of(adapted())
    first = state.base.content()
    assert state.base.content() == first
    with torch.no_grad():
        state.model[0].base.weight += 1.0
    second = state.base.content()
    assert second["hash"] != first["hash"]
    # Another parameter may be at the same version.
    state.model[2].base.weight = adapted(base_seed=1)[2].base.weight
    assert state.base.content()["hash"] != second["hash"]


def test_the_option_has_to_be_the_same_or_the_checkpoint_be_whole(store):
    alone = store.save("rollback", 1, state_of(adapted()))
    whole = store.save("rollback", 2, state_of(adapted(), trained_only=False))
    with pytest.raises(StateMismatch, match="pass trained_only=True"):
        store.load(alone, state_of(adapted(), trained_only=False))
    assert store.load(whole, state_of(adapted(base_seed=5))).exact
