"""Tests of grad-flow; torch and pytest are all they need.

A probe only reads, so training with it is compared bit for bit with training without it.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from curry_train.primitives.grad_flow import AFTER_BACKWARD, GradFlow


class Block(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.act = nn.ReLU()
        self.again = again

    def inner(self, x):
        return x + nn.functional.dropout(self.act(self.linear(x)), 0.1, self.training)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)


class Model(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(again) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def train(model, optimizer, *, steps=4, each=lambda step: None):
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(32, 16)).backward()
        each(step)
        optimizer.step()
    return [torch.get_rng_state(), *(value.clone() for value in model.state_dict().values())]


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("again", [False, True])
def test_training_is_unchanged_and_each_layer_is_counted_once(again):
    plain = Model(again)
    expected = train(plain, adam(plain))
    model = Model(again)
    optimizer = adam(model)
    with GradFlow(model, optimizer, every=2) as flow:
        ours = train(model, optimizer)
    assert all(map(torch.equal, expected, ours))
    assert [record.step for record in flow.records] == [0, 2]
    for record in flow.records:
        assert record.layers["layers.1.linear"].calls == 1
        assert record.layers["layers.1.linear"].activation.elements == 32 * 16


def test_norms_and_updates_are_those_computed_by_hand():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    weights = [*model.layers[1].linear.parameters()]
    norms = [nn.utils.get_total_norm(weights).item()]

    def note(step):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # the norm is read before
        norms.append(nn.utils.get_total_norm([one.grad for one in weights]).item())

    with GradFlow(model, optimizer, every=1) as flow:
        train(model, optimizer, steps=1, each=note)
    found = flow.records[0].layers["layers.1.linear"]
    assert found.update.weight_norm == pytest.approx(norms[0], rel=1e-6)
    assert found.gradient.norm > 0.01
    assert found.gradient.norm * flow.records[0].scaled == pytest.approx(norms[1], rel=1e-5)
    assert found.update.distance == pytest.approx(0.5 * norms[1], rel=1e-3)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)
        self.phase = nn.Linear(4, 3, dtype=torch.complex64)

    def forward(self, tokens):
        return self.phase(self.table(tokens).to(torch.complex64)).abs().sum()


def test_sparse_and_complex_gradients_have_their_norms():
    model = Odd()
    with GradFlow(model, every=1) as flow:
        model(torch.tensor([1, 1, 8])).backward()
        flow.step()
    rows = model.table.weight.grad.to_dense()
    of_table, of_phase = (flow.records[0].layers[name].gradient for name in ("table", "phase"))
    assert of_table.norm == pytest.approx(rows.norm().item(), rel=1e-6)
    parts = [parameter.grad.abs().norm() for parameter in model.phase.parameters()]
    assert of_phase.norm == pytest.approx(torch.stack(parts).norm().item(), rel=1e-6)
    assert of_phase.elements == 2 * (3 * 4 + 3)


def test_a_dead_layer_is_found():
    model = Model()
    with torch.no_grad():
        model.layers[1].linear.bias.fill_(-100.0)
    optimizer = adam(model)
    with GradFlow(model, optimizer, every=1) as flow:
        train(model, optimizer, steps=2)
    assert flow.records[0].layers["layers.1.act"].activation.zero == 1.0
    assert flow.records[0].layers["layers.0.act"].activation.zero < 1.0


def test_a_model_whose_layers_are_called_one_by_one_is_probed():
    model = Model()
    optimizer = adam(model)
    with GradFlow(model, optimizer, every=1) as flow:
        nn.Sequential(*model.layers)(torch.randn(8, 16)).sum().backward()
        optimizer.step()
    (record,) = flow.records
    assert record.forwards == 0
    assert record.layers["layers.1.linear"].calls == 1
    assert record.gradients_read == AFTER_BACKWARD


def test_no_hook_stays_behind():
    model = Model()
    optimizer = adam(model)
    with GradFlow(model, optimizer):
        train(model, optimizer, steps=1)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "zero_grad" not in optimizer.__dict__


def test_useless_settings_are_refused():
    with pytest.raises(ValueError, match=r"^every must be a whole number from 1 up, got 0$"):
        GradFlow(Model(), every=0)
    alone = GradFlow(Model())
    with pytest.raises(
        RuntimeError,
        match=r"^flow.step\(\) was called outside of `with GradFlow\(...\)`: open the context "
        "first$",
    ):
        alone.step()
    with (
        alone,
        pytest.raises(RuntimeError, match=r"^this GradFlow is open already: make another one$"),
    ):
        alone.__enter__()
    with (
        pytest.raises(
            ValueError,
            match=r"^GradFlow was given the optimizer, whose hooks end each step: remove "
            r"flow.step\(\)$",
        ),
        GradFlow(model := Model(), adam(model)) as flow,
    ):
        flow.step()
