"""Odd models, optimizers and parts continue bit-equal, or are refused at the first save.

python -m pytest tests/runs/test_state_odd.py
"""

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn, randn
from torch.optim import AdamW

from curry_train.runs import StateMismatch, TrainingState

from ..store_models import (
    WIDTH,
    Holder,
    alike,
    equal,
    fail,
    new_state,
    save_new,
    tensors_of,
    train,
    unscheduled,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),
]


class Own(torch.Tensor):
    """A tensor with a class that only adds methods."""


class Packed(torch.Tensor):
    """A tensor that computes its elements, as those of quantised bases do."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (1,))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return args[0]


class Remembers(nn.Linear):
    """A layer with nested tensors in its extra state, whose shape grows."""

    def __init__(self):
        super().__init__(2, 2)
        self.seen = [randn(2)]

    def get_extra_state(self):
        return {"seen": self.seen, "scale": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}}

    def set_extra_state(self, state):
        self.seen = state["seen"]


class OddModel(nn.Module):
    """A model of one layer, with parameters and buffers of odd names and forms."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4)
        self.more = Remembers()
        parameters = {
            "__metadata__": randn(3),
            "with a/slash": randn(3),
            "of a class": randn(3).as_subclass(Own),
            "small": randn(4).to(torch.float8_e4m3fn),
        }
        for name, value in parameters.items():
            is_trained = value.dtype is torch.float32
            self.register_parameter(name, nn.Parameter(value, requires_grad=is_trained))
        values = randn(4)
        scale = float(values.abs().max()) / 100
        buffers = {
            "expanded": randn(3, 1).expand(3, 5),
            "empty": torch.zeros(0, 3),
            "sparse": randn(4, 4).relu().to_sparse(),
            "quantized": torch.quantize_per_tensor(values, scale, 0, torch.qint8),
            "complex": randn(2, dtype=torch.complex128),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.inner(x)


def tensors_of_model(state):
    return {name: one for name, one in tensors_of(state).items() if name.startswith("model.")}


@pytest.mark.parametrize("kind", ["rollback", "best-k"])
def test_odd_models_continue_bit_equal(store, kind):
    state, other = new_state(build=OddModel), new_state(seed=1, build=OddModel)
    train(state, 2)
    state.model.more.seen = [randn(3), randn(1)]
    saved = store.save(kind, 2, state, metric=("loss", 0.5) if kind == "best-k" else None)
    assert not any("tensors match" in note for note in store.load(saved, other))
    assert equal(tensors_of_model(other), tensors_of_model(state))
    if kind == "rollback":
        expected = train(state, 2)
        store.load(saved, other)
        assert train(other, 2) == expected


class OddOptimizer(torch.optim.SGD):
    """SGD with state of the kinds that other optimizers have; its steps depend on all of it."""

    def step(self, closure=None):
        loss = super().step(closure)
        self.state["k"] = self.state.get("k", torch.zeros(1)) + 1
        for group in self.param_groups:
            group.setdefault("seen", []).append(float(self.state["k"]))
            for number, parameter in enumerate(group["params"]):
                self._odd_step(parameter, self.state[parameter], number)
        return loss

    @torch.no_grad()
    def _odd_step(self, parameter, state, number):
        if not state.get("blocks"):
            state["blocks"] = {1: {"a.b": [torch.ones(2) * number], "1": torch.zeros(())}}
            state["blocks"]["1"] = torch.ones(0, 3)
            state[7] = torch.full(parameter.shape, 0.5)
            state["dotted.key"] = OrderedDict(b=torch.ones(1), a=(None, math.inf))
            state["mirror"] = state["blocks"][1]["a.b"][0]
            state["slow"] = parameter
        state["mirror"].add_(0.125)
        state[7].mul_(0.5)
        shift = state["blocks"][1]["a.b"][0].sum() + state[7].sum() + self.state["k"].sum()
        parameter.mul_(1 - 0.001 * float(shift))


OPTIMIZERS = {
    "adamw, fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "groups": lambda p: AdamW(
        [{"params": p[:1], "weight_decay": 0.0}, {"params": p[1:], "lr": 0.02}]
    ),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, line_search_fn="strong_wolfe"),
    "tensor betas": lambda p: AdamW(
        p,
        lr=torch.tensor(0.01),
        betas=(torch.tensor(0.9), torch.tensor(0.99)),
        foreach=False,
        capturable=False,
    ),
    "odd": lambda p: OddOptimizer(p, lr=0.01, momentum=0.9),
}


def step_with_closure(state, steps):
    losses = []
    for _ in range(steps):
        inputs = randn(6, WIDTH).to(state.model[0].weight)

        def closure(inputs=inputs):
            state.optimizers[0].zero_grad()
            loss = state.model(inputs).square().mean()
            loss.backward()
            return loss

        losses.append(state.optimizers[0].step(closure).item())
        state.step += 1
    return losses


# Of weights in bfloat16 an optimizer may keep state in float32.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_continues_bit_equal(store, name, steps, dtype):
    """Cover the time before the first step, when an optimizer has no state."""

    def made(seed):
        def build():
            return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)

        return unscheduled(seed, OPTIMIZERS[name], build)

    state = made(0)
    step_with_closure(state, steps)
    saved = store.save("rollback", steps, state)
    expected = tensors_of(state)
    ahead = step_with_closure(state, 3)
    for trained in (0, 2):
        other = made(1)
        step_with_closure(other, trained)
        store.load(saved, other)
        assert equal(tensors_of(other), expected)
        assert step_with_closure(other, 3) == ahead
        assert alike(other, state)


def test_a_model_without_memory_is_refused_with_the_reason(store):
    saved = save_new(store)
    with torch.device("meta"):
        other = new_state(seed=1)
    with pytest.raises(StateMismatch, match=r"nothing can be loaded into this model: .*meta"):
        store.load(saved, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.optimizers[0].register_state_dict_post_hook(lambda _, all: all | {"k": 1}),
            r"AdamW keeps k besides its state and groups",
        ),
        (
            lambda s: s.optimizers[0].param_groups[0].update(rule=print),
            r"optimizer.0/groups/#0/rule: a builtin",
        ),
        (
            lambda s: s.model.register_buffer("packed", Packed()),
            r"model.packed: a Packed, .* can.t .* pass the parameters that train as the model",
        ),
    ],
)
def test_what_a_load_could_not_restore_is_refused_at_the_first_save(store, change, message):
    state = new_state()
    change(state)
    with pytest.raises(ValueError, match=message):
        store.save("rollback", 1, state)
    assert store.committed("rollback") == []


def test_a_part_that_refuses_its_state_is_named(store, monkeypatch):
    state = new_state(extra={"odd": Holder({"x": 1})})
    saved = store.save("rollback", 1, state)
    monkeypatch.setattr(Holder, "load_state_dict", lambda *_: fail(KeyError("old name"))())
    with pytest.raises(StateMismatch, match=r"extra-odd \(Holder\) refused .*old name"):
        store.load(saved, state)


def test_adapters_are_saved_alone_where_the_parameters_that_train_are_the_model(store):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(WIDTH, 4).requires_grad_(False), nn.Linear(4, 1))
        model[0].register_buffer("packed", Packed())
        trained = nn.ParameterList(one for one in model.parameters() if one.requires_grad)
        return TrainingState(trained, AdamW(trained))

    state, other = build(0), build(1)
    state.model[0].sum().backward()
    state.optimizers[0].step()
    store.load(store.save("rollback", 1, state), other)
    assert alike(other, state)
