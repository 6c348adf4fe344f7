"""Windows of microbatches: what is read from a config, what is refused, and one step.

python -m pytest tests/primitives/test_grad_accum.py
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curry_train.gates.two_ranks import run_on_ranks
from curry_train.primitives.grad_accum import (
    GradientAccumulation,
    NonFiniteWindow,
    Window,
    train_window,
)

# The interface.


def test_kwargs_name_the_first_and_the_last_microbatch_of_a_window():
    accumulation = GradientAccumulation(steps=3)
    decisions = [accumulation.train_step_kwargs(index) for index in range(4)]
    assert [one["zero_grad"] for one in decisions] == [True, False, False, True]
    assert all(one["loss_divisor"] == 3.0 for one in decisions)
    for name in ("sync_gradients", "step_optimizer", "collect_metrics"):
        assert [one[name] for one in decisions] == [False, False, True, False]


def test_from_config_reads_an_omegaconf_node_and_its_missing_value():
    omegaconf = pytest.importorskip("omegaconf", reason="omegaconf is not installed")
    node = omegaconf.OmegaConf.create({"gradient_accumulation_steps": 4, "later": "???"})
    assert GradientAccumulation.from_config(node).steps == 4
    assert GradientAccumulation.from_config(node, key="later").steps == 1
    omegaconf.OmegaConf.set_struct(node, True)
    assert GradientAccumulation.from_config(node, key="absent").steps == 1


@pytest.mark.parametrize(
    "steps", [0, -1, True, 2.0, "4", None, float("nan"), torch.tensor(2.0), torch.tensor(True)]
)
def test_steps_that_are_not_a_positive_whole_number_are_refused(steps):
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got"):
        GradientAccumulation(steps=steps)


# Windows.


@pytest.mark.parametrize("num_microbatches", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("steps", [1, 2, 4, 16])
def test_every_microbatch_is_in_one_window_in_order(num_microbatches, steps):
    windows = list(GradientAccumulation(steps).windows(range(num_microbatches)))
    assert [microbatch for window in windows for microbatch in window] == list(
        range(num_microbatches)
    )
    assert all(len(window) == steps for window in windows[:-1])
    for window in windows:
        assert window.loss_divisor == len(window)
        assert window.train_step_kwargs(len(window) - 1)["step_optimizer"]


def test_a_window_divides_by_its_own_valid_terms():
    windows = GradientAccumulation(2).windows([[1, 1, 1], [], [1, 1], [1]], count=len)
    assert [(window.loss_divisor, window.num_terms) for window in windows] == [(3.0, 3), (3.0, 3)]


@pytest.mark.parametrize("terms", [-1, 2.5, True, None])
def test_a_count_that_is_not_a_whole_number_is_refused(terms):
    with pytest.raises(ValueError, match="count\\(microbatch\\) must be a whole number"):
        next(GradientAccumulation(2).windows([1, 2], count=lambda _: terms))


def test_an_index_outside_the_window_is_refused():
    with pytest.raises(ValueError, match="index 1 is outside a window of 1"):
        Window((1,), loss_divisor=1.0, num_terms=1).train_step_kwargs(1)


# One step.


def linear_step(microbatches, **options):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    window = next(GradientAccumulation(len(microbatches)).windows(microbatches, count=len))
    loss = options.pop("loss", lambda model, batch: model(batch).square().sum())
    return model, train_window(model, window, loss, optimizer, **options)


def test_the_result_is_the_mean_loss_and_the_norm_before_clipping():
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    window = next(
        GradientAccumulation(2).windows([torch.ones(1, 2), 2 * torch.ones(1, 2)], count=len)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    result = train_window(
        model, window, lambda model, batch: model(batch).sum(), optimizer, clip_norm=0.1
    )
    assert result.loss == 3.0  # (2 + 4) / 2
    assert result.grad_norm == pytest.approx((1.5**2 + 1.5**2 + 1) ** 0.5, rel=1e-6)
    assert torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters()]
    ).item() == pytest.approx(0.1, rel=1e-4)
    assert result.stepped


@pytest.mark.parametrize("clip_norm", [0, -1.0, float("nan")])
def test_a_clip_norm_that_would_erase_the_gradient_is_refused(clip_norm):
    with pytest.raises(ValueError, match="clip_norm must be above 0"):
        linear_step([torch.ones(1, 2)], clip_norm=clip_norm)


def test_a_mean_loss_over_no_valid_term_raises_an_error_that_asks_for_count():
    def mean(model, batch):
        return model(batch).square().mean()

    with pytest.raises(NonFiniteWindow, match=r"microbatch 1 of 2.*pass count="):
        linear_step([torch.ones(1, 2), torch.ones(0, 2)], loss=mean)


def test_a_scaler_skips_the_step_and_the_schedule_stays():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    window = next(GradientAccumulation(1).windows([torch.full((1, 2), 100.0)], count=len))
    before = model.weight.clone()

    def step():
        return train_window(
            model,
            window,
            lambda model, batch: model(batch).sum(),
            optimizer,
            scaler=scaler,
            scheduler=scheduler,
        )

    assert not step().stepped
    assert torch.equal(model.weight, before)
    assert scheduler.last_epoch == 0
    scaler.update(1.0)
    assert step().stepped
    assert scheduler.last_epoch == 1


# Ranks that would diverge or hang raise an error.


def uneven_data_on_rank():
    rank = dist.get_rank()
    results = []
    for ends in (4, 2, 0):  # on rank 1: as many microbatches, one window less, and none
        data = range(4 if rank == 0 else ends)
        try:
            results.append(sum(len(window) for window in GradientAccumulation(2).windows(data)))
        except ValueError as error:
            results.append(str(error))
    model = nn.Linear(2, 1)
    window = next(GradientAccumulation(1).windows([torch.ones(1, 2)]))
    try:
        train_window(model, window, lambda m, b: m(b).sum(), torch.optim.SGD(model.parameters()))
    except RuntimeError as error:
        results.append(str(error))
    return results


def test_ranks_with_uneven_data_or_without_a_wrapper_raise_instead_of_hanging():
    for results in run_on_ranks(f"{__file__}:uneven_data_on_rank", timeout=60):
        assert results[0] == 4
        assert "window 1 has" in results[1]
        assert "window 0 has" in results[2]
        assert "wrapped in neither" in results[3]
