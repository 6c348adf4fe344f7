"""The first place where two recorded runs differ is named, whatever differs.

Run: `python -m pytest tests/runs/test_locate.py`.
"""

import copy
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import Linear
from torch.optim import SGD
from torch.utils.data import DataLoader

from curry_train.runs import record_run
from curry_train.runs.fingerprints import read_fingerprints
from curry_train.runs.locate import first_operation, locate

from ..plan_models import Runs
from ..toy_steps import activated
from .recorded_training import WrongBackward, located, recorded

# The fault, the step, the phase and the path of its place, and words of the text.
FAULTS = """
epsilon        | 1 | forward   | model.h.1.ln   | eps of model.h.1.ln is 1e-05 in A and 1e-06 in B
dropout        | 1 | forward   | model.h.1.drop | p of model.h.1.drop is 0.1 in A and 0.2 in B
operation      | 1 | forward   | model.h.1      | in its own code after model.h.1.ln, call 0
kernel         | 1 | forward   | model.h.1      | another input 0 of model.h.1.down, call 0
backward       | 1 | backward  | model.h.1      | another gradient of output 0 of model.h.1.up
weight         | 1 | state     | model.h.1.down.weight | before the first step (initialisation
seed           | 1 | state     | model.h.0.up.weight | before the first step (initialisation
tied           | 1 | state     | model.h.1.down.weight | before the first step (initialisation
frozen         | 1 | gradients | model.h.1.ln.bias | in A alone: gradient of model.h.1.ln.bias
stale weight   | 2 | state     | model.h.0.up.weight | since the step before (initialisation
made anew      | 2 | optimizer | model.h.0.down.bias | in A alone: exp_avg of model.h.0.down.bias
optimizer      | 1 | optimizer | model.h.0.ln.weight | eps of group 0 of AdamW is 1e-08 in A
flipped moment | 2 | optimizer | model.head.weight | exp_avg of model.head.weight differs
flipped weight | 2 | optimizer | model.head.weight | head.weight differs since the forward pass
other optimizer | 1 | optimizer | model.h.0.ln.weight | renamed: AdamW is Adam in B
two steps      | 3 | backward  | loss           | there are more backward calls in A than in B
clipped        | 1 | gradients | model.h.0.ln.weight | clipping or scaling
hooked         | 1 | gradients | model.head.bias | accumulation, a hook
loss           | 1 | loss      | loop           | the loss is
order          | 1 | data      | loader         | has other samples
same samples   | 2 | data      | loop           | has the same samples in another order
drawn          | 2 | forward   | model.h.0.drop | draws from a random generator that differs
drawn          | 2 | forward   | model.h.0.drop | generator of torch differs after the batch of
"""


def records_of(train, *variants):
    """Record a training from the same seed once for each variant."""
    records = []
    for number, variant in enumerate(variants):
        torch.manual_seed(0)
        with record_run(f"run {number}"):
            train(variant)
        records.append(read_fingerprints(f"run {number}"))
    return records


def cells_of(table):
    return [[cell.strip() for cell in row.split("|")] for row in table.strip().splitlines()]


@pytest.mark.parametrize(("fault", "step", "phase", "path", "text"), cells_of(FAULTS))
def test_the_first_difference_is_named(fault, step, phase, path, text):
    found, _ = located(fault)
    # A place has the number of a call too.
    assert found.place | {"step": int(step), "phase": phase, "path": path} == found.place, found
    assert text in "\n".join([found.headline, *found.notes])


@pytest.mark.parametrize("draws", [False, True])
def test_a_generator_that_nobody_draws_from_is_not_named(draws):
    records = []
    for seed in (0, 1):
        random.seed(seed)
        torch.manual_seed(seed)
        with record_run(f"run {seed}"):
            [random.random() for _ in range(draws)]
            # A loss comes first, with which no generator is noted.
            torch.ones(1, requires_grad=True).backward()
            nn.Dropout()(torch.ones(9))
        records.append(read_fingerprints(f"run {seed}"))
    notes = locate(*records).notes
    assert ("the random generator of python differs from the start" in notes) == draws
    assert "the random generator of torch differs from the start" in notes


class Pair(nn.Module):
    """Returns a vector and the state that it is computed from, as spiking neurons do.

    It uses the weight of a module without a call of it, as attention does.
    """

    def __init__(self):
        super().__init__()
        self.inner = Linear(4, 4)

    def forward(self, x, fault, more=0.0):
        state = x @ self.inner.weight + more
        if fault == "uncalled":
            state = WrongBackward.apply(state)
        return (WrongBackward.apply(state) if fault == "pair" else state).sin(), state


class Odd(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.norm = nn.BatchNorm1d(4)
        self.mlp = activated(4, nn.Tanh)
        self.pair = Pair()
        self.shared = Linear(4, 4)

    def forward(self, x):
        hidden = self.mlp(self.norm(x))
        if self.fault == "own code":
            hidden = WrongBackward.apply(hidden)
        more = [hidden] if self.fault == "one more" else []
        hidden, _ = self.pair(hidden, self.fault, *more)
        hidden = self.shared(hidden)
        return self.shared(WrongBackward.apply(hidden) if self.fault == "shared" else hidden)


class Stale(nn.BatchNorm1d):
    """Forgets what it has seen."""

    def forward(self, x):
        before = self.running_var.clone()
        output = super().forward(x)
        self.running_var.data.copy_(before)
        return output


def train_odd(fault):
    """Train by closures, as Lightning does, with two backward calls on each graph."""
    model = Odd(fault)
    if fault == "stale":
        model.norm.__class__ = Stale
    if fault == "inserted":
        # The layer that follows has the same class, so only the weights tell them apart.
        layer = copy.deepcopy(model.mlp[0]).requires_grad_(False)
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
        model.mlp.insert(0, layer)
    optimizer = SGD(model.parameters(), 0.1)
    criterion = nn.MSELoss()

    def closure():
        optimizer.zero_grad()
        output = model(torch.randn(8, 4))
        output = output * 1.01 if fault == "scaled" else output
        loss = criterion(output, torch.ones(8, 4))
        loss.backward(retain_graph=True)
        loss.backward()
        if fault == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return loss

    # It makes a step of zeros for the state.
    get_optimizer_state_dict(model, optimizer)
    for _ in range(3):
        optimizer.step(closure)


ODD_FAULTS = """
stale     | forward   | model.norm        | another output buffer running_var
own code  | backward  | model             | in its own code
pair      | backward  | model.pair        | another gradient of output 1
uncalled  | backward  | model.pair        | gradient of model.pair.inner.weight
one more  | forward   | model.pair        | is given input 2 in one run alone and another output 0
shared    | backward  | model             | another gradient of output 0 of model.shared
clipped   | gradients | model.norm.weight | clipping or scaling
scaled    | loop      | loop              | own code after model, call 0: another input of MSELoss
"""


@pytest.mark.parametrize(("fault", "phase", "path", "text"), cells_of(ODD_FAULTS))
def test_the_module_is_named_where_values_are_shared(fault, phase, path, text):
    first, other, again = records_of(train_odd, "none", fault, "none")
    found = locate(first, other)
    assert found.place == {"step": 1, "phase": phase, "path": path, "call": 0}, found
    assert text in found.headline
    assert sum(one.kind == "loss" for one in first) == 6
    assert locate(first, again).is_equal


def train_on_a_state(fault):
    """Compute a later output from the first one, on which alone the loss depends."""
    model = Pair()
    optimizer = SGD(model.parameters(), 0.1)
    _, state = model(torch.randn(8, 4), fault)
    state = WrongBackward.apply(state) if fault == "loop" else state
    state.square().sum().backward()
    optimizer.step()


def train_a_second_model(seed):
    first = Linear(4, 4)
    torch.manual_seed(seed)
    second = Linear(4, 1)
    optimizer = SGD([*first.parameters(), *second.parameters()], 0.1)
    for rows in DataLoader(torch.eye(64, 4), 4, shuffle=True):
        second(first(rows)).sum().backward()
        optimizer.step()


def train_two(more_steps):
    models = Linear(4, 1), Linear(4, 1)
    first, second = (SGD(one.parameters(), 0.1) for one in models)
    for number in range(4):
        for model, optimizer in zip(models, (first, second), strict=True):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        if number == 1 and more_steps:
            second.step()


def train_by_closures(rate):
    model = Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.LBFGS(model.parameters(), rate, max_iter=3)

    def closure():
        model.zero_grad()
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def train_side_by_side(fault):
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), Linear(3, 1))
    sparse = torch.optim.SparseAdam(model[0].parameters())
    adam = torch.optim.Adam(model[1].parameters())
    for number in range(1, 5):
        model(torch.arange(4)).sum().backward()
        sparse.step()
        if fault == "scaled" and number == 1:
            model[1].weight.grad.mul_(2)
        adam.step()
        model.zero_grad()
        if fault == "flipped" and number == 2:
            adam.state[model[1].bias]["exp_avg"].mul_(2)


def train_wide(width):
    model = nn.Module()
    model.add_module(f"body{width}", Linear(4, width))
    model.add_module("head" if width == 4 else "last", Linear(4, 1))
    optimizer = SGD(model.parameters(), 0.1)
    first, last = model.children()
    model.forward = lambda inputs: last(first(inputs)[:, :4])
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def train_critic(goes_on):
    maker, critic = Linear(2, 2), Linear(2, 1)
    optimizer = SGD(critic.parameters(), 0.1)
    made = maker(torch.ones(1, 2))
    critic(made if goes_on else made.detach()).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("train", "a", "b", "texts"),
    [
        # The gradient of an output that the loop alone reads is of the loop.
        (train_on_a_state, "none", "loop", ["step 1, backward: loop, call 0, in its own code"]),
        # Initial weights come before the data.
        (train_a_second_model, 0, 1, ["step 1, state: model-1.weight"]),
        # A step that one run alone makes.
        (train_two, False, True, ["step 3, optimizer: SGD-1 makes more steps in B than in A"]),
        # Settings of an optimizer with several closures in a step.
        (
            train_by_closures,
            0.5,
            1.0,
            [
                "step 1, optimizer: LBFGS gets equal gradients and leaves another model.w",
                "lr of group 0 of LBFGS is 0.5 in A and 1.0 in B",
            ],
        ),
        # Layers of other shapes are no renamed ones.
        (
            train_wide,
            4,
            8,
            ["renamed: model.head is model.last in B", "called in A alone: model.body4"],
        ),
        # Layers behind an inserted one are those of the other run.
        (
            train_odd,
            "none",
            "inserted",
            [
                "equal: ",
                "called in B alone: model.mlp.0 of B",
                "renamed: model.mlp.0 is model.mlp.1 in B, model.mlp.1 is model.mlp.2 in B",
            ],
        ),
        # Two optimizers that step side by side are in one step.
        (train_side_by_side, "", "", ["equal: ", " in 3 steps"]),
        (train_side_by_side, "", "flipped", ["step 3, optimizer: "]),
        (train_side_by_side, "", "scaled", ["step 1, gradients: "]),
        # A gradient that only one run makes.
        (
            train_critic,
            False,
            True,
            ["step 1, gradients: in B alone: gradient of model.bias and 1 more"],
        ),
    ],
)
def test_what_differs_in_an_odd_training_is_named(train, a, b, texts):
    found = locate(*records_of(train, a, b))
    answer = "\n".join([found.headline, *found.notes])
    assert all(text in answer for text in texts), found


@pytest.mark.parametrize(
    "fault", ["", "more modules", "renamed", "recompute", "inserted", "other loader"]
)
def test_equal_runs_are_equal_under_other_names_and_with_more_calls(fault):
    found, pair = located(fault)
    assert found.is_equal, found
    assert found.num_compared > 150
    # And in the other direction.
    assert locate(pair[1], pair[0]).is_equal
    cut_off = locate(pair[0], pair[1][:-20])
    assert cut_off.headline.endswith("; A ends after step 3, and B ends in step 3")
    text = "\n".join(found.notes)
    assert ("called in B alone: model.extra" in text) == (fault == "more modules")
    assert ("model.h.0.up is model.h.0.widen in B" in text) == (fault == "renamed")
    assert ("model.h.2 is model.h.3 in B" in text) == (fault == "inserted")
    assert ("switch attention" in text) == (fault == "other loader")


# The numbers of the steps that the second optimizer makes too, and the steps in which either does.
@pytest.mark.parametrize(
    ("steps", "made", "expected"),
    [(4, range(1, 9, 2), [1, 2, 2, 3, 4, 4]), (2, [0], [1, 1, 2, 3, 4])],
)
def test_an_optimizer_that_steps_now_and_then_shifts_no_step_and_ends_no_recording(
    steps, made, expected
):
    with record_run("run", steps=steps):
        model = nn.Sequential(Linear(2, 2), Linear(2, 1))
        first, second = (SGD(one.parameters(), 0.1) for one in model)
        for number in range(20):
            model(torch.ones(2)).sum().backward()
            first.step()
            if number in made:
                second.step()
    record = read_fingerprints("run")
    assert [one.step for one in record if one.kind == "update"] == expected
    assert [one.step for one in record if one.kind == "loss"] == [1, 2, 3, 4]
    assert record[-1].kind == "end"


def run_deep(name):
    """Run many equal layers under a name of their list, as a large model has."""

    def run(inner, x):
        before, lists = inner
        x = before(x) if name == "other" else x
        for layer in lists[name]:
            x = layer(x)
        return x

    layers = nn.ModuleList(nn.Tanh() for _ in range(200))
    Runs(run, nn.Identity(), nn.ModuleDict({name: layers}))(torch.ones(1, 2))


def test_all_layers_of_a_large_model_are_known_under_another_name():
    found = locate(*records_of(run_deep, "one", "other"))
    assert found.is_equal
    assert found.num_compared > 400


OPERATIONS = """
kernel    | aten.gelu.default (recorded_training.py:
backward  | aten.mul.Tensor (recorded_training.py:23)
hooked    | aten.mul_.Tensor (recorded_training.py:
loss      | aten.
optimizer | aten.
flipped weight | with aten.bitwise_xor_.Scalar
clipped   | (recorded_training.py:
weight    | aten.add_.Tensor (recorded_training.py:
drawn     | aten.bernoulli_.float (recorded_training.py:
moved     | aten.bernoulli_.float (recorded_training.py:
tied      | no operation differs there: an assignment
"""


@pytest.mark.parametrize(("fault", "text"), cells_of(OPERATIONS))
def test_the_operation_is_named(fault, text):
    step = 2 if fault in ("drawn", "flipped weight") else 1
    found, (a, b) = located(fault, operations_in_step=step)
    operation = first_operation(a, b, found)
    assert text in operation
    path = Path("b/rank-0.jsonl")
    path.write_text(path.read_text().replace("model.h.1", "model.other.1"))
    renamed = read_fingerprints(path.parent)
    assert first_operation(a, renamed, locate(a, renamed)) == operation


def test_operations_change_nothing_else():
    plain = recorded("plain")
    watched = recorded("watched", operations_in_step=2)
    in_place = [one.digests for one in watched if "_foreach_" in vars(one).get("name", "")]
    assert in_place
    assert all(in_place)
    assert locate(plain, watched).is_equal
