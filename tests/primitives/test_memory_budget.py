"""The compile memory budget: its contract, and the facts of torch that it relies on.

python -m pytest tests/primitives/test_memory_budget.py
"""

import shutil
import threading

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.nn import functional as F

from curry_train.core.blocks import plain_blocks
from curry_train.core.measure import FlopCount, LiveStorages
from curry_train.core.measure_compiled import BudgetUnsafe, CompileFailed, measure_allocated
from curry_train.core.parity import compare
from curry_train.primitives import compile_budget, memory_budget, remove_memory_budget
from curry_train.primitives.compile_budget import Budgeted, _compiled
from curry_train.workloads import Case, load_workload

from ..command_runs import in_python
from ..compiled_models import (
    TRACING,
    WIDTH,
    block_class,
    bounded,
    build,
    by_torch_alone,
    dropout,
    hidden,
    loss,
    rows,
    step,
)
from ..toy_steps import ON_DEVICES, copies_of

pytestmark = TRACING


def held_bytes(model, batch=None):
    return measure_allocated(model, rows() if batch is None else batch, loss).held_bytes


# Facts of torch, so that a version that changes them is noticed.


def test_saved_bytes_fall_in_steps_and_stay_within_the_share():
    budgets = (0.0, 0.3, 0.6, 1.0)
    saved = [held_bytes(bounded(block_class(), budget)) for budget in budgets]
    assert saved == sorted(saved)
    assert len(set(saved)) >= 3
    least, most = saved[0], saved[-1]
    for budget, value in zip(budgets, saved, strict=True):
        assert value <= least + budget * (most - least)


def test_a_budget_holds_for_its_model_alone():
    saved = [held_bytes(by_torch_alone(block_class(), 1.0))]
    model = bounded(block_class(), 0.0)
    saved.append(held_bytes(by_torch_alone(block_class(), 1.0)))
    assert held_bytes(model) < saved[0] == saved[1]
    assert functorch_config.activation_memory_budget == 1.0


def test_torch_fails_to_keep_an_operation_of_several_outputs_so_it_is_avoided(monkeypatch):
    def alone():
        class Noise(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(WIDTH))

            def forward(self, x):
                return torch.sin(dropout(torch.sin(x * self.scale)))

        return Noise

    assert compare(step(build(alone())), step(bounded(alone(), 0.5))).bit_equal
    monkeypatch.setattr(compile_budget, "_is_a_tuple_alone", lambda joint, drawing: False)
    if torch.__version__ < "2.14":
        with pytest.raises((CompileFailed, AssertionError), match="tuple"):
            step(bounded(alone(), 0.5))


def test_torch_ignores_kept_operations_at_zero_so_the_smallest_budget_replaces_it(monkeypatch):
    monkeypatch.setattr(compile_budget, "SMALLEST_BUDGET", 0.0)
    with pytest.raises(BudgetUnsafe, match="native_dropout again in backward"):
        step(bounded(block_class(dropout), 0.0))


# The contract.


def test_names_state_copies_and_pickles_are_those_of_the_bare_model():
    case = Case(load_workload("transformer"))
    plain, model = case.build(), case.build()

    def held(model):
        return measure_allocated(model, case.batch(), case.workload.mean_loss).held_bytes

    names = [f"layers.{index}" for index in range(4)]
    assert memory_budget(model, 0.5, backend="aot_eager") == names
    assert list(model.state_dict()) == list(plain.state_dict())
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert isinstance(model.layers[0], type(plain.layers[0]))
    for other in copies_of(model)[1:]:
        assert isinstance(other.layers[0], Budgeted)
        assert held(other) < 0.5 * held(plain)
        with plain_blocks():
            assert held(other) == held(plain)
        assert remove_memory_budget(other) == names
        assert type(other.layers[0]) is type(plain.layers[0])


DRAWS = {
    "dropout": dropout,
    "normal": lambda h: h + torch.sigmoid(h) * torch.empty_like(h).normal_(),
    "attention": lambda h: F.scaled_dot_product_attention(
        *[h.unflatten(1, (4, -1))] * 3, dropout_p=0.5
    ).flatten(1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_drawn_once_without_a_budget(name):
    block = block_class(DRAWS[name])
    plain, model = build(block), bounded(block, 0.0)
    assert compare(step(plain), step(model)).bit_equal
    assert held_bytes(model) < 0.8 * held_bytes(plain)


def test_a_block_that_updates_its_statistics_may_run_twice():
    case = Case(load_workload("resnet"))
    plain, model = case.build(), case.build()
    memory_budget(model, 0.0, backend="aot_eager")
    for one in (plain, model):
        (case.mean_loss(one) + case.mean_loss(one)).backward()
    assert torch.equal(model[1][0].residual[1].running_mean, plain[1][0].residual[1].running_mean)
    assert torch.equal(model[0][0].weight.grad, plain[0][0].weight.grad)


def test_other_shapes_threads_and_resets_keep_the_budget_and_the_draws():
    block = block_class(dropout)
    plain = build(block)
    model = bounded(block, 0.2)
    saved = {}

    def check(size):
        assert compare(step(plain, rows(size)), step(model, rows(size))).bit_equal
        # The loss itself takes 16 bytes.
        saved[size] = held_bytes(model, rows(size)) // (16 * size)

    for size in (64, 16, 48):
        check(size)
    torch._dynamo.reset()
    check(24)
    thread = threading.Thread(target=check, args=(40,))
    thread.start()
    thread.join()
    assert len(saved) == 5
    assert len(set(saved.values())) == 1


def test_a_dispatch_mode_sees_eager_code_and_blocks_stay_compiled():
    block = block_class()
    plain, model = build(block), bounded(block, 0.2)
    before, seen = held_bytes(model), []
    for module in (plain, model):
        with LiveStorages() as storages, FlopCount() as flops:
            value = loss(module, rows())
            seen.append((storages.bytes_alive, flops.flops))
            del value
    assert seen[0] == seen[1]
    assert held_bytes(model) == before < held_bytes(plain)


def test_equal_blocks_share_code():
    block = block_class()
    model = bounded(block, 0.5)
    step(model)
    assert _compiled(block.forward, model.layers[0]._technique).num_graphs == 1


@pytest.mark.parametrize(
    ("budget", "options", "message"),
    [
        (1.5, {}, "between 0 and 1, got 1.5"),
        (0.5, {"backend": "eager"}, "backend must be one of inductor, aot_eager"),
        (0.5, {"batch": rows()}, "batch and loss both"),
    ],
)
def test_refused_with_what_to_do(budget, options, message):
    model = build(block_class())
    with pytest.raises(ValueError, match=message):
        memory_budget(model, budget, **options)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_a_block_that_cannot_be_compiled_or_wrapped_is_named():
    model = build(hidden())
    with pytest.raises(CompileFailed, match=r"Hidden_[0-9a-f]+ produced no compiled graph"):
        memory_budget(model, 0.5, backend="aot_eager", batch=rows(), loss=loss)
    model.layers[1].compile(backend="eager")
    with pytest.raises(ValueError, match="is compiled already"):
        memory_budget(model, 0.5)
    with pytest.raises(ValueError, match="0 is a RecursiveScriptModule, which"):
        memory_budget(nn.Sequential(torch.jit.script(nn.ReLU())), 0.5, blocks="0")
    assert not any(isinstance(module, Budgeted) for module in model.modules())


def test_an_error_of_the_compiler_is_reported_in_one_line(monkeypatch):
    def broken(*args, **kwargs):
        raise KeyError("no such kernel\nmore")

    monkeypatch.setattr(compile_budget, "partition", broken)
    with pytest.raises(
        CompileFailed,
        match=r"^aot_eager can't compile Block_\w+: KeyError: .*; leave the block out",
    ):
        step(bounded(block_class(), 0.5))


needs_cpp = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler"
)


@needs_cpp
@ON_DEVICES
def test_inductor_draws_once_at_zero_and_torchs_own_setting_draws_again(device):
    block = block_class(dropout)
    models = [build(block).to(device) for _ in range(2)]
    for model, budget in zip(models, (1.0, 0.0), strict=True):
        memory_budget(model, budget, batch=rows().to(device), loss=loss)
    batch = rows().to(device)
    assert compare(*[step(model, batch) for model in models]).holds
    assert held_bytes(models[1], batch) < 0.5 * held_bytes(models[0], batch)
    if device == "cpu":  # as long as this holds, draws must be kept
        alone = by_torch_alone(block_class(dropout), 0.0, backend="inductor")
        assert not compare(step(models[0]), step(alone), tolerance=0.05).holds


IN_A_PROCESS = """
import sys
import warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torch._dynamo.utils import counters
from curry_train.core.measure_compiled import measure_allocated
from curry_train.primitives.compile_budget import memory_budget

for budget in map(float, sys.argv[1:]):
    block = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16), nn.Sigmoid())
    model = nn.Sequential(block)
    memory_budget(model, budget, blocks="0")
    # The cache is written once backward is compiled too.
    model(torch.ones(64, 16)).sum().backward()
    batch = torch.ones(64, 16)
    print(measure_allocated(model, batch, lambda model, batch: model(batch).sum()).held_bytes)
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


@needs_cpp
def test_the_compilers_cache_distinguishes_budgets_across_processes(tmp_path):
    def run(*budgets):
        done = in_python("-c", IN_A_PROCESS, *budgets, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        return list(map(int, done.stdout.split()))

    most, least, hits = run("1.0", "0.0")
    assert most > least
    assert hits == 0
    assert run("0.0") == [least, 1]
