"""The state is restored bit-equal under any wrapper, and one that does not fit is refused.

python -m pytest tests/runs/test_state.py
"""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import SGD, AdamW, lr_scheduler

from curry_train.primitives import recompute_blocks
from curry_train.runs import StateMismatch, TrainingState
from curry_train.runs.parameters import bare_name

from ..store_models import WIDTH, alike, equal, network, new_state, save_best, tensors_of, train


def tied():
    embed, head = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    head.weight = embed.weight
    return nn.Sequential(embed, nn.Tanh(), head)


def frozen():
    model = network()
    model[0].requires_grad_(False)
    return model


def with_one_cycle(seed):
    """Return a state whose schedule changes more settings than the rate."""
    state = new_state(seed)
    (optimizer,) = state.optimizers
    state.parts["scheduler-0"] = lr_scheduler.OneCycleLR(optimizer, 0.1 + seed, 30)
    return state


@pytest.mark.parametrize(
    "make",
    [new_state, partial(new_state, build=tied), partial(new_state, build=frozen), with_one_cycle],
)
def test_every_state_continues_bit_equal(store, make):
    state, other = make(0), make(1)
    train(state, 2)
    # A load clears gradients.
    other.model(torch.randn(6, WIDTH)).sum().backward()
    saved = store.save("rollback", 1, state)
    expected, ahead = tensors_of(state), train(state, 3)
    assert not store.load(saved, other)
    assert equal(tensors_of(other), expected)
    assert train(other, 3) == ahead
    assert alike(other, state)


def test_a_tied_weight_is_stored_once(store):
    state = new_state(build=tied)
    values = state.snapshot().values["content"]
    assert values["model.2.weight"].name == values["model.0.weight"].name
    assert "model.2.weight" not in state.snapshot().tensors
    saved = store.save("rollback", 1, state)

    def untied():
        model = tied()
        model[2].weight = nn.Parameter(model[0].weight.detach().clone())
        return model

    with pytest.raises(
        StateMismatch, match=r"2.weight was one tensor with model.0.weight and is \[8, 8\]"
    ):
        store.load(saved, new_state(build=untied))


def wrapped(kind):
    def build():
        model = network()
        if kind == "compiled":
            return torch.compile(model, backend="eager")
        if kind == "compiled block":
            model[0] = torch.compile(model[0], backend="eager")
        if kind == "data parallel":
            return nn.DataParallel(model)
        if kind == "torch's checkpoint wrapper":
            model[3] = checkpoint_wrapper(model[3])
        if kind == "recompute":
            recompute_blocks(model, blocks="[03]")
        return model

    return build


@pytest.mark.parametrize(
    "kind",
    ["compiled", "compiled block", "data parallel", "torch's checkpoint wrapper", "recompute"],
)
def test_no_wrapper_is_in_a_name(store, kind):
    """Use bare names, so that a state saved under one wrapper loads under any other."""
    plain, state = new_state(), new_state(build=wrapped(kind))
    train(state, 1)
    train(plain, 1)
    assert state.snapshot().tensors.keys() == plain.snapshot().tensors.keys()
    saved = store.save("rollback", 1, state)
    store.load(saved, plain)
    assert alike(plain, state)
    store.load(saved, new_state(seed=1, build=wrapped(kind)))
    store.load(save_best(store, 1, state), new_state(seed=1))


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_a_name_that_a_module_makes_up_for_its_own_state_is_kept():
    for model in nn.Linear(2, 2), nn.Sequential(torch.jit.script(nn.Identity())):
        assert bare_name(model, "0.module.weight") == "0.module.weight"


def test_scaler_extra_objects_and_generators_continue(store):
    def make(seed):
        state = new_state(seed)
        average = torch.optim.swa_utils.AveragedModel(state.model)
        generator = torch.Generator().manual_seed(seed)
        return TrainingState(
            state.model,
            state.optimizers,
            [state.parts["scheduler-0"]],
            torch.amp.GradScaler("cpu", init_scale=float(2 ** (seed + 3))),
            extra={"average": average},
            generators={"data": generator},
        )

    state, other = make(0), make(1)
    train(state, 2)
    state.parts["extra-average"].update_parameters(state.model)
    torch.rand(3, generator=state.generators["data"])
    average = other.parts["extra-average"].module[0]
    held = average.weight
    store.load(store.save("recovery", 2, state), other)
    assert alike(other, state)
    # Filled in place.
    assert average.weight is held
    assert other.parts["scaler"].state_dict() == state.parts["scaler"].state_dict()
    assert (other.step, other.position) == (2, 12)


def test_a_load_writes_into_the_optimizers_tensors(store):
    """Two sets of moments would not fit next to each other on a full GPU."""

    def trained(seed):
        state = new_state(seed=seed)
        (group,) = state.optimizers[0].param_groups
        group |= {"lr": torch.tensor(1e-3), "foreach": False}
        train(state, 2)
        return state

    def addresses(state):
        (optimizer,) = state.optimizers
        moments = [one["exp_avg"] for one in optimizer.state.values()]
        return [one.data_ptr() for one in (optimizer.param_groups[0]["lr"], *moments)]

    state, other = trained(0), trained(1)
    there = addresses(other)
    store.load(store.save("rollback", 1, state), other)
    assert addresses(other) == there
    assert alike(other, state)


@pytest.mark.parametrize(
    ("build", "num_fitting", "message"),
    [
        (
            lambda: nn.Sequential(*network()[:3], nn.Linear(16, 5)),
            "7 of 9",
            r"model.3.weight was \[4, 16\], torch.float32 and is \[5, 16\], .*model.3.bias was",
        ),
        (lambda: network()[:3], "7 of 7", "model.3.weight is only in the checkpoint"),
        (
            lambda: nn.Sequential(*network(), nn.Linear(4, 4)),
            "9 of 11",
            "model.4.weight is missing in the checkpoint",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["rollback", "best-k"])
def test_a_state_that_does_not_fit_is_loaded_in_part_where_that_is_asked_for_and_else_refused(
    store, build, num_fitting, message, kind
):
    state, other = new_state(), new_state(1, build=build)
    train(state, 2)
    saved = store.save(kind, 2, state, metric=("dev_loss", 1.0) if kind == "best-k" else None)
    before = tensors_of(other)
    with pytest.raises(StateMismatch, match=rf"\d+ of \d+ tensors match; {message}"):
        store.load(saved, other)
    assert equal(tensors_of(other), before)
    note, *_ = store.load(saved, other, strict=False)
    assert re.match(f"{num_fitting} tensors match; {message}", note)
    fitting = {
        name: value
        for name, value in tensors_of(state).items()
        if name.startswith("model.") and name in before and value.shape == before[name].shape
    }
    assert equal(tensors_of(other), before | fitting)
    assert other.step == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.parts.update(scaler=torch.amp.GradScaler("cpu")),
            "part.scaler is missing in the checkpoint",
        ),
        (
            lambda s: setattr(s, "optimizers", [SGD(s.model.parameters())]),
            "optimizer.0 was AdamW and is SGD",
        ),
        (
            lambda s: setattr(s, "optimizers", [AdamW([*s.model.parameters()][1:])]),
            "0.weight of optimizer.0 is only in the checkpoint",
        ),
        (lambda s: s.parts.update({"extra-average": nn.Linear(2, 3)}), "part.extra-average/"),
    ],
)
def test_different_components_than_the_saved_ones_are_refused_and_nothing_changes(
    store, change, message
):
    state, other = (new_state(seed, extra={"average": nn.Linear(2, 2)}) for seed in range(2))
    train(state, 1)
    saved = store.save("rollback", 1, state)
    change(other)
    before = tensors_of(other)
    with pytest.raises(StateMismatch, match=message):
        store.load(saved, other)
    assert equal(tensors_of(other), before)


def test_harmless_differences_are_reported(store, monkeypatch):
    state = new_state(config={"optimizer": {"lr": 0.1, "beta": 0.9}, "name": "a"})
    saved = store.save("rollback", 1, state)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    config = {"optimizer": {"lr": 0.2, "beta": 0.9}, "name": "a", "new": None}
    assert store.load(saved, new_state(config=config)) == [
        f"torch computes with {threads} threads, as at the save; {threads + 1} were set",
        "the configuration differs in optimizer.lr: 0.1 -> 0.2",
    ]


def test_a_parameter_that_the_model_does_not_have_is_refused():
    state = new_state()
    state.optimizers = [SGD([nn.Parameter(torch.ones(3))])]
    with pytest.raises(
        ValueError,
        match=r"group 0 of SGD has a parameter of shape \[3\] that the model does not have",
    ):
        state.snapshot()
