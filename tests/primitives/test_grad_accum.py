"""Windows of microbatches: what is read from a config, what is refused, and one step.

python -m pytest tests/primitives/test_grad_accum.py
"""

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from curry_train.primitives import GradientAccumulation, NonFiniteWindow, Window, train_window

from ..toy_steps import drawn, gradients_of, square_sum


def test_from_config_reads_an_omegaconf_node_and_the_attributes_of_an_object():
    node = OmegaConf.create({"gradient_accumulation_steps": 4, "later": "???"})
    assert GradientAccumulation.from_config(node).steps == 4
    assert GradientAccumulation.from_config(node, key="later").steps == 1
    OmegaConf.set_struct(node, True)
    assert GradientAccumulation.from_config(node, key="absent").steps == 1
    arguments = SimpleNamespace(gradient_accumulation_steps=4)
    assert GradientAccumulation.from_config(arguments) == GradientAccumulation(4)
    assert GradientAccumulation.from_config(SimpleNamespace()).steps == 1


# Windows.


def test_an_index_outside_the_window_is_refused():
    window = Window((1,), loss_divisor=1.0, num_terms=1)
    with pytest.raises(ValueError, match="index 1 is outside a window of 1 microbatches"):
        window.train_step_kwargs(1)
    one = GradientAccumulation()
    for indexed in (window.train_step_kwargs, one.is_first, one.is_last):
        with pytest.raises(ValueError, match="index must be a whole number of at least 0"):
            indexed(-1)
    assert one.is_first(torch.tensor(2))


# One step.


def linear_step(microbatches, **options):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    window = next(GradientAccumulation(len(microbatches)).windows(microbatches, count=len))
    loss = options.pop("loss", square_sum)
    return model, train_window(model, window, loss, optimizer, **options)


@pytest.mark.parametrize("clip_norm", [0, -1.0, float("nan")])
def test_a_clip_norm_that_would_erase_the_gradient_is_refused(clip_norm):
    with pytest.raises(
        ValueError, match=r"clip_norm must be above 0, got .*; None is no clipping$"
    ):
        linear_step([torch.ones(1, 2)], clip_norm=clip_norm)


def test_a_list_is_no_window():
    model = nn.Linear(1, 1)
    with pytest.raises(
        TypeError, match=r"^train_window takes a window, .*count=\.\.\.\)\); got list$"
    ):
        train_window(model, [], summed_loss, SGD(model.parameters()))


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^no parameter of the optimizer got a gradient: make the optimizer from the "
        r"parameters of the model that trains, after whatever replaces them \(adapters, "
        r"fully_shard\)$",
    ):
        linear_step([torch.ones(1, 2)], loss=lambda model, batch: batch.requires_grad_().sum())


def test_a_mean_loss_over_no_valid_term_raises_an_error_that_asks_for_count():
    message = (
        "window 0: loss nan, gradient norm 0.72[0-9]+; not finite: microbatch 1 of 2. "
        "The weights were not changed. Check that data; curry-train grad-flow names the layer that "
        "it begins in. Pass count= if a microbatch has no valid term"
    )
    with pytest.raises(NonFiniteWindow, match=f"^{message}$"):
        linear_step(
            [torch.ones(1, 2), torch.ones(0, 2)],
            loss=lambda model, batch: model(batch).square().mean(),
        )


# Ranks that would diverge or hang raise an error.


# The other rank has three microbatches, or has come to the end of its data, or this one has.
@pytest.mark.parametrize(("data", "others"), [([1, 2], 3), ([1], 0), ([], 1)])
def test_ranks_with_uneven_data_or_without_a_wrapper_raise_instead_of_hanging(
    data, others, pair_of_four_ranks, monkeypatch
):
    with pytest.raises(RuntimeError) as raised:
        linear_step([torch.ones(1, 2)])
    assert str(raised.value) == (
        "4 ranks are running, but Linear is wrapped in neither DistributedDataParallel nor "
        "fully_shard: the weights of the ranks would diverge silently. Wrap the whole model"
    )

    def all_reduce(sums, group):
        assert group is pair_of_four_ranks
        sums += torch.tensor([1, others, others**2])

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    message = (
        f"window 0 has {len(data)} microbatches on rank 0 and {len(data) + others} on all 2 ranks "
        "together: give every rank the same number of microbatches (a DistributedSampler pads or "
        "drops)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        next(GradientAccumulation(2).windows(data, group=pair_of_four_ranks))


# Terms of each microbatch.
SIZES = (3, 1, 4)
WIDTH = 6


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 5)).double()


def make_microbatches():
    return [drawn(2, size, WIDTH, seed=size).double().unbind() for size in SIZES]


def summed_loss(model, microbatch):
    return model(microbatch[0]).square().sum()


def both_views(model, microbatch):
    """Two forwards of a microbatch, before any backward."""
    return model(microbatch[0]), model(microbatch[1])


def contrastive(outputs):
    """Each sample against the others of the window: no sum over microbatches."""
    first, second = (torch.cat(views) for views in zip(*outputs, strict=True))
    return F.cross_entropy(first @ second.t(), torch.arange(len(first)), reduction="sum")


def large_batch_gradients(microbatches, *, joint):
    """The loss and the gradients of the mean over all terms, of one large batch."""
    model = make_model()
    inputs = tuple(map(torch.cat, zip(*microbatches, strict=True)))
    total = contrastive([both_views(model, inputs)]) if joint else summed_loss(model, inputs)
    mean = total / sum(SIZES)
    mean.backward()
    return mean.item(), gradients_of(model)


def window_of(microbatches, **options):
    accumulation = GradientAccumulation(len(microbatches), **options)
    (window,) = accumulation.windows(microbatches, count=lambda microbatch: len(microbatch[0]))
    return window


def train(model, window, *, joint, **options):
    optimizer = SGD(model.parameters(), lr=0.0)
    if joint:
        return train_window(model, window, both_views, optimizer, joint_loss=contrastive, **options)
    return train_window(model, window, summed_loss, optimizer, **options)


def test_a_joint_loss_that_is_not_finite_changes_no_weight():
    model = make_model()
    window = window_of(make_microbatches())
    with pytest.raises(NonFiniteWindow, match="not finite: the joint loss"):
        train_window(
            model,
            window,
            both_views,
            SGD(model.parameters(), lr=0.1),
            joint_loss=lambda outputs: contrastive(outputs) * float("nan"),
        )
    assert all(parameter.grad is None for parameter in model.parameters())


# The wrappers of torch have either; a gate trains both kinds on two ranks.
@pytest.mark.parametrize("switch", ["no_sync", "set_requires_gradient_sync"])
@pytest.mark.parametrize(
    ("joint", "each", "expected"),
    [(False, False, [0, 0, 1]), (False, True, [1, 1, 1]), (True, False, [0, 0, 1])],
)
def test_equal_ranks_sync_as_asked_and_have_the_figures_of_one(
    pair_of_four_ranks, switch, joint, each, expected
):
    model, microbatches, synced = make_model(), make_microbatches(), []
    if switch == "no_sync":
        model.no_sync = lambda: contextlib.nullcontext(synced.append(0))
        expected = [syncs for syncs in expected if not syncs]
    else:
        model.set_requires_gradient_sync = synced.append
    calls = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    model[0].weight.register_hook(lambda gradient: calls.append("backward"))
    result = train(model, window_of(microbatches, sync_each_batch=each), joint=joint)
    assert synced == expected
    # A joint loss couples the microbatches of a window.
    assert calls == (["forward"] * 6 + ["backward"] if joint else ["forward", "backward"] * 3)
    loss, gradients = large_batch_gradients(microbatches, joint=joint)
    norm = torch.cat([one.flatten() for one in gradients]).norm().item()
    assert (result.loss, result.grad_norm) == pytest.approx((loss, norm), rel=1e-12)
    torch.testing.assert_close(gradients_of(model), gradients, rtol=1e-12, atol=1e-14)
    assert result.num_terms == 4 * 8


@pytest.mark.parametrize("sync_each_batch", [False, True])
def test_decisions_of_a_users_loop_sync_as_asked(sync_each_batch):
    window = window_of(make_microbatches(), sync_each_batch=sync_each_batch)
    synced = [window.train_step_kwargs(index)["sync_gradients"] for index in range(3)]
    assert synced == [sync_each_batch, sync_each_batch, True]
    assert window.train_step_kwargs(0)["zero_grad"]
    accumulation = GradientAccumulation.from_config(
        {"gradient_accumulation_steps": 2, "sync_each_batch": sync_each_batch}
    )
    assert accumulation.train_step_kwargs(0)["sync_gradients"] is sync_each_batch


def test_options_that_have_no_effect_are_refused():
    window = window_of(make_microbatches(), sync_each_batch=True)
    with pytest.raises(
        ValueError,
        match=r"^sync_each_batch has no effect with joint_loss, which has one backward in a "
        "window: leave one of them out$",
    ):
        train(make_model(), window, joint=True)


# Settings and numbers of windows.


def test_a_parameter_outside_of_the_loss_does_not_decay():
    model = make_model()
    model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        model.unused.grad = torch.ones(3, dtype=torch.float64)  # of another loss
        train_window(
            model, window_of(make_microbatches()), lambda m, b: m[:3](b[0]).sum(), optimizer
        )
    assert model.unused.grad is None
    assert torch.equal(model.unused, torch.ones(3, dtype=torch.float64))
