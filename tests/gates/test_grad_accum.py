"""Tests of gradient accumulation and of its gates, which fail on planted faults.

python -m pytest tests/gates/test_grad_accum.py
"""

import types
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from faulty_accumulation import right_by_hand
from saboteurs import case_of, faults
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from curry_train.gates import grad_accum
from curry_train.gates.two_ranks import run_on_ranks
from curry_train.primitives.grad_accum import (
    GradientAccumulation,
    NonFiniteWindow,
    Window,
    train_window,
)
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case, Workload

IN_PROCESS = [gate.check for gate in grad_accum.GATES if gate.check is not grad_accum.two_ranks]


# The interface.


def test_kwargs_name_the_first_and_the_last_microbatch_of_a_window():
    accumulation = GradientAccumulation(steps=3)
    assert [accumulation.train_step_kwargs(index) for index in range(4)] == [
        dict(
            zero_grad=True,
            sync_gradients=False,
            step_optimizer=False,
            loss_divisor=3.0,
            collect_metrics=False,
        ),
        dict(
            zero_grad=False,
            sync_gradients=False,
            step_optimizer=False,
            loss_divisor=3.0,
            collect_metrics=False,
        ),
        dict(
            zero_grad=False,
            sync_gradients=True,
            step_optimizer=True,
            loss_divisor=3.0,
            collect_metrics=True,
        ),
        dict(
            zero_grad=True,
            sync_gradients=False,
            step_optimizer=False,
            loss_divisor=3.0,
            collect_metrics=False,
        ),
    ]


def test_a_window_of_one_microbatch_does_not_accumulate():
    accumulation = GradientAccumulation()
    assert not accumulation.enabled
    assert accumulation.is_first(5)
    assert accumulation.is_last(5)
    assert GradientAccumulation(2).enabled


@dataclass
class Config:
    gradient_accumulation_steps: int = 4


@pytest.mark.parametrize(
    "config",
    [
        {"gradient_accumulation_steps": 4},
        Config(),
        types.SimpleNamespace(gradient_accumulation_steps=4),
    ],
    ids=["mapping", "dataclass", "namespace"],
)
def test_from_config_reads_mappings_dataclasses_and_namespaces(config):
    assert GradientAccumulation.from_config(config).steps == 4


def test_from_config_reads_an_omegaconf_node_and_its_missing_value():
    omegaconf = pytest.importorskip("omegaconf", reason="omegaconf is not installed")
    node = omegaconf.OmegaConf.create({"gradient_accumulation_steps": 4, "later": "???"})
    assert GradientAccumulation.from_config(node).steps == 4
    assert GradientAccumulation.from_config(node, key="later").steps == 1
    omegaconf.OmegaConf.set_struct(node, True)
    assert GradientAccumulation.from_config(node, key="absent").steps == 1


def test_from_config_names_the_key_that_is_wrong():
    assert GradientAccumulation.from_config({}).steps == 1
    with pytest.raises(
        ValueError, match=r"microsteps must be a whole number of at least 1, got '4'"
    ):
        GradientAccumulation.from_config({"microsteps": "4"}, key="microsteps")


@pytest.mark.parametrize(
    "steps", [0, -1, True, 2.0, "4", None, float("nan"), torch.tensor(2.0), torch.tensor(True)]
)
def test_steps_that_are_not_a_positive_whole_number_are_refused(steps):
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got"):
        GradientAccumulation(steps=steps)


@pytest.mark.parametrize("index", [-1, 0.5, True])
def test_an_index_that_is_not_a_whole_number_is_refused(index):
    with pytest.raises(ValueError, match="index must be a whole number of at least 0"):
        GradientAccumulation(2).train_step_kwargs(index)


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


def test_empty_data_is_an_error():
    with pytest.raises(ValueError, match="the data are empty"):
        next(GradientAccumulation(2).windows([]))


def test_a_window_without_a_valid_term_is_an_error_that_names_it():
    windows = GradientAccumulation(2).windows([[1], [1], [], []], count=len)
    next(windows)
    with pytest.raises(ValueError, match="window 1: none of its 2 microbatches has a valid term"):
        next(windows)


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


def test_a_microbatch_without_a_valid_term_adds_nothing():
    full = torch.ones(3, 2)
    empty = torch.ones(0, 2)
    model, result = linear_step([full])
    model_with_empty, result_with_empty = linear_step([full, empty])
    assert torch.equal(model.weight, model_with_empty.weight)
    assert result == result_with_empty


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


def test_a_loss_per_sample_is_refused():
    with pytest.raises(
        ValueError, match=r"must be one number, the sum over its terms; got shape \(3, 1\)"
    ):
        linear_step([torch.ones(3, 2)], loss=lambda model, batch: model(batch))


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


# The gates hold on the right implementation.


@pytest.mark.parametrize("check", IN_PROCESS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, check):
    verdict = check(Case(load_workload(name)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gates_hold_with_dropout_and_on_the_device(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    case = Case(transformer(dropout=0.1), device=torch.device(device))
    for check in IN_PROCESS:
        verdict = check(case)
        assert verdict.passed, verdict


def test_two_ranks_hold():
    verdict = grad_accum.two_ranks(Case(load_workload("transformer")))
    assert verdict.passed, verdict


def test_a_model_that_is_random_in_eval_is_named():
    workload = replace(
        transformer(), loss=lambda module, batch: module(batch["tokens"]).sum() * torch.rand(())
    )
    with pytest.raises(ValueError, match="the same batch in eval mode"):
        grad_accum.equal_windows(Case(workload))


# The saboteurs: faults seen in practice, each with the gate that must catch it.


def synced_each_microstep(model, window, loss, optimizer):
    return right_by_hand(model, window, loss, optimizer)


def never_synced(model, window, loss, optimizer):
    if not isinstance(model, DistributedDataParallel):
        model.set_requires_gradient_sync(False)
        return right_by_hand(model, window, loss, optimizer)
    with model.no_sync():
        return right_by_hand(model, window, loss, optimizer)


def weighed_by_own_tokens(model, window, loss, optimizer):
    own = sum(int((microbatch["targets"] != -100).sum()) for microbatch in window)
    return train_window(model, replace(window, loss_divisor=float(own)), loss, optimizer)


def norm_of_half_the_ranks(model, window, loss, optimizer):
    result = train_window(model, window, loss, optimizer)
    return replace(result, grad_norm=result.grad_norm / 2)


@pytest.mark.parametrize(
    "saboteur",
    [synced_each_microstep, never_synced, weighed_by_own_tokens, norm_of_half_the_ranks],
    ids=lambda value: value.__name__,
)
def test_two_ranks_catch(saboteur):
    verdict = grad_accum.two_ranks(
        Case(load_workload("transformer")), train=f"{__file__}:{saboteur.__name__}"
    )
    assert verdict.passed is False, verdict


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


@pytest.mark.parametrize("saboteur", faults("faulty_accumulation"), ids=str)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_gate_catches(saboteur):
    saboteur.check()


def test_the_dtype_that_is_asked_for_changes_the_figures():
    small = case_of("small")
    for check in (grad_accum.equal_windows, grad_accum.scaled_window, grad_accum.random_numbers):
        exact = check(small)
        rounded = check(replace(small, dtype=torch.bfloat16))
        assert exact.passed, exact
        assert rounded.passed, rounded
        assert exact.required != rounded.required
    assert grad_accum.equal_windows(small).measured != (
        grad_accum.equal_windows(replace(small, dtype=torch.bfloat16)).measured
    )


class Steep(nn.Module):
    """A product of layers, whose gradients are thousands of times as large as its weights."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return 100 * self.layer(x) ** 3


def test_a_model_with_large_gradients_trains_through_several_windows():
    workload = Workload(
        "steep",
        Steep,
        lambda size: torch.randn(size, 8),
        lambda module, x: module(x).square().sum(),
    )
    for check in (grad_accum.short_window, grad_accum.once_per_window):
        verdict = check(Case(workload))
        assert verdict.passed, verdict
