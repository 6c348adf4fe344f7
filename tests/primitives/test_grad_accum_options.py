"""Joint losses and a sync after each microbatch give the gradients of the large batch.

python -m pytest tests/primitives/test_grad_accum_options.py
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from curry_train.gates.two_ranks import GradientSyncs, run_on_ranks
from curry_train.primitives import GradientAccumulation, NonFiniteWindow, train_window

# Terms of each microbatch of a rank, and the microbatches of both ranks.
SIZES = ((3, 1, 4), (2, 5, 2))
WIDTH = 6


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 5)).double()


def make_microbatches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [
        (
            torch.randn(size, WIDTH, dtype=torch.float64, generator=generator),
            torch.randn(size, WIDTH, dtype=torch.float64, generator=generator),
        )
        for size in SIZES[rank]
    ]


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
    """Gradients of the mean over all terms, of one large batch without ranks."""
    model = make_model()
    total = torch.zeros((), dtype=torch.float64)
    for of_rank in microbatches:
        if joint:
            inputs = tuple(map(torch.cat, zip(*of_rank, strict=True)))
            total = total + contrastive([both_views(model, inputs)])
        else:
            total = total + sum(summed_loss(model, microbatch) for microbatch in of_rank)
    num_terms = sum(len(microbatch[0]) for of_rank in microbatches for microbatch in of_rank)
    (total / num_terms).backward()
    return total.item() / num_terms, [parameter.grad for parameter in model.parameters()]


def window_of(microbatches, **options):
    accumulation = GradientAccumulation(len(microbatches), **options)
    (window,) = accumulation.windows(microbatches, count=lambda microbatch: len(microbatch[0]))
    return window


def train(model, window, *, joint, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if joint:
        return train_window(model, window, both_views, optimizer, joint_loss=contrastive, **options)
    return train_window(model, window, summed_loss, optimizer, **options)


def test_a_joint_loss_couples_the_microbatches_of_a_window():
    model = make_model()
    microbatches = make_microbatches(0)
    calls = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    model[0].weight.register_hook(lambda gradient: calls.append("backward"))
    loss, expected = large_batch_gradients([microbatches], joint=True)
    result = train(model, window_of(microbatches), joint=True)
    assert calls == ["forward"] * 6 + ["backward"]
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert result.num_terms == 8
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)


def test_a_joint_loss_that_is_not_finite_changes_no_weight():
    model = make_model()
    window = window_of(make_microbatches(0))
    with pytest.raises(NonFiniteWindow, match="not finite: the joint loss"):
        train_window(
            model,
            window,
            both_views,
            torch.optim.SGD(model.parameters(), lr=0.1),
            joint_loss=lambda outputs: contrastive(outputs) * float("nan"),
        )
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("sync_each_batch", [False, True])
def test_decisions_of_a_users_loop_sync_as_asked(sync_each_batch):
    window = window_of(make_microbatches(0), sync_each_batch=sync_each_batch)
    synced = [window.train_step_kwargs(index)["sync_gradients"] for index in range(3)]
    assert synced == [sync_each_batch, sync_each_batch, True]
    stepped = [window.train_step_kwargs(index)["step_optimizer"] for index in range(3)]
    assert stepped == [False, False, True]
    accumulation = GradientAccumulation.from_config(
        {"gradient_accumulation_steps": 2, "sync_each_batch": sync_each_batch}
    )
    assert accumulation.train_step_kwargs(0)["sync_gradients"] is sync_each_batch


def test_options_that_have_no_effect_are_refused():
    with pytest.raises(ValueError, match="sync_each_batch must be True or False"):
        GradientAccumulation(2, sync_each_batch="yes")
    window = window_of(make_microbatches(0), sync_each_batch=True)
    with pytest.raises(ValueError, match="no effect with joint_loss"):
        train(make_model(), window, joint=True)


# Settings and numbers of windows.


def test_a_parameter_outside_of_the_loss_does_not_decay():
    model = make_model()
    model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        model.unused.grad = torch.ones(3, dtype=torch.float64)  # of another loss
        train_window(
            model, window_of(make_microbatches(0)), lambda m, b: m[:3](b[0]).sum(), optimizer
        )
    assert model.unused.grad is None
    assert torch.equal(model.unused, torch.ones(3, dtype=torch.float64))


def test_terms_are_added_up_over_the_group_and_not_over_all_ranks(pair_of_four_ranks):
    windows = GradientAccumulation(2).windows(
        [torch.ones(3), torch.ones(5)], count=len, group=pair_of_four_ranks
    )
    assert next(windows).num_terms == 16


# Two gloo ranks.


def of_rank(kind):
    """Train this rank's window in each way; return errors and syncs, relative to one backward."""
    rank = dist.get_rank()
    found = {}
    for joint, sync_each_batch in ((False, False), (False, True), (True, False)):
        model = make_model()
        if kind == "DDP":
            model = DistributedDataParallel(model)
        else:
            for layer in (model[0], model[2]):
                fully_shard(layer)
            fully_shard(model)
        with GradientSyncs() as one:
            summed_loss(model, make_microbatches(rank)[0]).backward()
        expected_loss, expected = large_batch_gradients(
            [make_microbatches(0), make_microbatches(1)], joint=joint
        )
        window = window_of(make_microbatches(rank), sync_each_batch=sync_each_batch)
        with GradientSyncs() as syncs:
            result = train(model, window, joint=joint)
        assert result.loss == pytest.approx(expected_loss, rel=1e-12)
        error = 0.0
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            ours = parameter.grad
            ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
            error = max(error, ((ours - gradient).norm() / gradient.norm()).item())
        name = "joint" if joint else f"each {sync_each_batch}"
        found[name] = {"error": error, "syncs": syncs.num_calls / one.num_calls}
    return found


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_two_ranks_have_the_gradients_of_the_large_batch(kind):
    for found in run_on_ranks(f"{__file__}:of_rank", kind=kind):
        assert all(way["error"] < 1e-12 for way in found.values()), found
        assert found["each False"]["syncs"] == 1, found
        assert found["each True"]["syncs"] == 3, found
        assert found["joint"]["syncs"] == 1, found
