"""Tests of the recompute gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_recompute.py
"""

import functools
import itertools
import random

import numpy
import pytest
import torch
import torch.distributed as dist
from faulty_recompute import no_op
from saboteurs import case_of, faults
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from curry_train.core.blocks import find_blocks
from curry_train.gates import recompute
from curry_train.gates.two_ranks import run_on_ranks
from curry_train.primitives.recompute import recompute_blocks
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case, Workload

# The gates hold on the right implementation.


CHECKS = {gate.name: gate.check for gate in recompute.RECOMPUTE_GATES}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, check):
    verdict = CHECKS[check](Case(load_workload(name)))
    if verdict.passed is None:
        assert name in ("snn", "mlp"), verdict
    else:
        assert verdict.passed, verdict


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_hold_with_dropout_in_both_precisions(device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    case = Case(transformer(dropout=0.1, depth=2), device=torch.device(device), dtype=dtype)
    for check in CHECKS.values():
        verdict = check(case)
        assert verdict.passed is not False, verdict


@pytest.mark.long
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_the_thorough_gate_holds_on_built_in_workloads(name):
    (gate,) = recompute.THOROUGH_GATES
    assert gate.run(Case(load_workload(name))).passed


def test_a_long_run_of_one_strategy_holds(monkeypatch):
    monkeypatch.setattr(recompute, "LONG_RUN_STRATEGIES", ("sac",))
    verdict = recompute.long_run(case_of("small"))
    assert verdict.passed, verdict
    assert verdict.measured == "sac: 12 steps"


class Wide(nn.Module):
    """A block whose forward makes copies that it does not save."""

    def __init__(self, num_copies):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)
        self.num_copies = num_copies

    def forward(self, x):
        copies = torch.sigmoid(self.up(x)).repeat(1, self.num_copies)
        return x + self.down(copies.view(-1, self.num_copies, 64).mean(1))


def keep_gradients(module, sample):
    """Recompute, and keep copies of the gradient of each block's output."""
    copies = []

    def keep(block, args, output):
        output.register_hook(lambda gradient: copies.append(gradient.repeat(1, 6)))

    for block in module:
        block.register_forward_hook(keep)
    return recompute_blocks(module)


def test_a_peak_inside_of_one_block_is_not_held_against_recompute():
    def build():
        return nn.Sequential(Wide(5), *(Wide(1) for _ in range(3)))

    workload = Workload(
        "wide",
        build,
        lambda size: torch.randn(64 * size, 16),
        lambda module, batch: module(batch).square().sum(),
    )
    verdict = recompute.recompute_memory(Case(workload))
    assert verdict.passed is None, verdict
    assert "what one block needs while it runs owns the peak" in verdict.hint
    verdict = recompute.recompute_memory(Case(workload), apply=keep_gradients)
    assert verdict.passed is False
    assert "under torch's own checkpoint" in verdict.hint
    assert recompute.recompute_memory(Case(workload), apply=no_op).passed is False


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return torch.sigmoid(x * self.scale)


def test_the_flops_gate_does_not_hold_without_flops():
    workload = Workload(
        "no products",
        lambda: nn.Sequential(Scale(), Scale()),
        lambda size: torch.randn(size, 8),
        lambda module, batch: module(batch).sum(),
    )
    assert recompute.recomputed_flops(Case(workload)).passed is None
    assert recompute.recompute_parity(Case(workload), strategy="full").passed


# Saboteurs that are faulty techniques.


def parity(case, *, apply):
    return recompute.recompute_parity(case, strategy="full", apply=apply)


def profiler(case, *, apply):
    return recompute.profiler(case, profiled=apply)


def list_of(make, call=lambda layer, x: layer(x)):
    """Build a model that runs a ModuleList of three layers."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([make() for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = call(layer, x)
            return x

    return Workload(
        "list",
        Chain,
        lambda size: torch.randn(size, 8),
        lambda module, batch: module(batch).square().sum(),
    )


@pytest.mark.parametrize("apply", [None, no_op], ids=["recompute", "no-op"])
def test_gates_do_not_apply_to_blocks_of_a_single_layer(apply):
    case = Case(list_of(lambda: nn.Linear(8, 8)), blocks="layers.*")
    for strategy in ("full", "selective"):
        verdict = recompute.recompute_parity(case, strategy=strategy, apply=apply)
        assert verdict.passed is None, verdict
    assert "checkpoint of each block frees nothing" in parity(case, apply=apply).hint


def past_the_block(layer, x):
    return nn.functional.gelu(nn.functional.linear(x, layer[0].weight, layer[0].bias))


@pytest.mark.parametrize(
    ("workload", "saboteur"),
    [
        # Recompute would free memory.
        (list_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU())), no_op),
        # Recompute would free nothing, but run the block again.
        (list_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU())), no_op),
        # The block never runs.
        (list_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()), past_the_block), None),
        (list_of(lambda: nn.Linear(8, 8), lambda layer, x: x * layer.weight.sum()), None),
    ],
    ids=["gelu", "relu", "bypassed", "lone and bypassed"],
)
def test_a_no_op_fails_if_recompute_would_free_memory_or_the_block_never_runs(workload, saboteur):
    verdict = parity(Case(workload, blocks="layers.?"), apply=saboteur)
    assert verdict.passed is False, verdict
    assert "nothing ran twice or was freed" in verdict.hint


@pytest.mark.parametrize("gate", recompute.RECOMPUTE_GATES, ids=lambda gate: gate.name)
def test_the_verdict_names_the_single_layers_that_a_model_repeats(gate):
    verdict = gate.run(Case(list_of(lambda: nn.Linear(8, 8))))
    assert verdict.passed is None, verdict
    assert "lone layers" in verdict.hint or "nothing worth changing" in verdict.hint


# Saboteurs that are models: right without recompute, wrong with it.


class Faulty(nn.Module):
    """A block that `disturb` makes unfit for recompute."""

    def __init__(self, disturb):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.disturb = disturb
        self.cache = []
        self.calls = 0

    def forward(self, x):
        return x + torch.sin(self.disturb(self, torch.sigmoid(self.inner(x))))


def python_random(block, x):
    return x * random.random()


def numpy_random(block, x):
    return x * float(numpy.random.rand())


def growing_cache(block, x):
    keys = torch.cat([*block.cache, x])
    block.cache.append(x.detach())
    return torch.sigmoid(keys).mean(0) * x


def counter(block, x):
    block.calls += 1
    return x * block.calls


def routing(block, x):
    block.calls += 1
    return torch.sigmoid(x[: len(x) // block.calls]).sum(0) * x


def in_backward():
    return torch._C._current_graph_task_id() >= 0


def other_in_backward(block, x):
    return x * (2 if in_backward() else 1)


def shorter_in_backward(block, x):
    return torch.sigmoid(x[: len(x) // (2 if in_backward() else 1)]).sum(0) * x


def by_torch(model, sample):
    """Recompute with torch's checkpoint around each block, as many scripts do."""
    found = find_blocks(model, sample.blocks)
    for block in found.values():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return list(found)


def disturbed(disturb):
    """Build a workload whose second block of three is disturbed."""

    def build():
        clean = [Faulty(lambda block, x: x) for _ in range(2)]
        return nn.Sequential(nn.Linear(8, 8), nn.ModuleList(clean)[0], Faulty(disturb), clean[1])

    return Workload(
        "unfit", build, lambda size: torch.randn(size, 8), lambda module, batch: module(batch).sum()
    )


@pytest.mark.parametrize("disturb", [growing_cache, counter, routing])
def test_a_recomputed_block_sees_its_state_of_the_first_call(disturb):
    verdict = recompute.recompute_parity(Case(disturbed(disturb)), strategy="full")
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("disturb", "in_hint", "apply"),
    [
        (python_random, "draws from python's generator", None),
        (numpy_random, "draws from numpy's generator", None),
        (other_in_backward, "keeps state between calls", None),
        (shorter_in_backward, "computes other tensors the second time", None),
        (growing_cache, "computes other tensors the second time", by_torch),
        (counter, "keeps state between calls", by_torch),
        (routing, "computes other tensors the second time", by_torch),
    ],
)
def test_parity_names_the_block_that_is_unfit(disturb, in_hint, apply):
    workload = disturbed(disturb)
    verdict = recompute.recompute_parity(Case(workload), strategy="full", apply=apply)
    assert verdict.passed is False, verdict
    assert apply is not None or verdict.hint.startswith("2 "), verdict
    assert in_hint in verdict.hint


# Parts of a block may be sharded; whole blocks are in the gate on two ranks.


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def gradients_with_sharded_parts(*, recompute, reshard):
    torch.manual_seed(0)
    model = nn.Sequential(*[TwoParts() for _ in range(3)])
    if recompute:
        recompute_blocks(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        for part in block.children():
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    found = []
    for _ in range(2):
        model(x).square().mean().backward()
        found += [weight.grad.full_tensor().tolist() for weight in model.parameters()]
    return found


def sharded_parts_on_ranks():
    steps = [
        [gradients_with_sharded_parts(recompute=way, reshard=reshard) for way in (False, True)]
        for reshard in (True, False)
    ]
    return [plain == recomputed for plain, recomputed in steps]


def test_parts_of_a_recomputed_block_may_be_sharded():
    assert run_on_ranks(f"{__file__}:sharded_parts_on_ranks") == [[True, True]] * 2


@pytest.mark.parametrize("saboteur", faults("faulty_recompute"), ids=str)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gate_catches(saboteur):
    saboteur.check()


def squares(kind, batch=lambda size: torch.randn(size, 16)):
    """Return a workload with the sum of the squares of a model's outputs as its loss."""
    return Workload(kind.__name__, kind, batch, lambda module, x: module(x).square().sum())


class MaskedBlocks(nn.Module):
    """Blocks that share a mask, which the first forward makes and keeps."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x):
        if self.mask is None:
            self.register_buffer("mask", torch.rand(len(x), 16) > 0.2, persistent=False)
        for block in self.blocks:
            x = block(x) * self.mask
        return x


def test_the_profiler_holds_for_a_model_that_keeps_a_mask_of_its_first_step():
    workload = squares(MaskedBlocks)
    case = Case(workload)
    verdict = recompute.profiler(case)
    assert verdict.passed, verdict


class SavedOutside(nn.Module):
    """Layers whose inputs are saved by the activations between them too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_offload_of_what_is_saved_outside_of_the_blocks_too_is_not_judged():
    workload = squares(SavedOutside, lambda size: torch.randn(40, 32))
    verdict = recompute.offload_parity(Case(workload, blocks="layers.*"))
    assert verdict.passed is None
    assert "saved outside of them too" in verdict.hint


class UnevenUnderAutocast(nn.Module):
    """Blocks whose results under autocast differ each time, as of a kernel that reads too far."""

    calls = itertools.count()

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            x = x + next(self.calls)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_model_that_does_not_repeat_itself_under_autocast_is_judged_without_it():
    workload = squares(UnevenUnderAutocast)
    verdict = CHECKS["recompute/parity-full"](Case(workload))
    assert verdict.passed, verdict
    assert "without autocast: the plain model does not repeat itself" in verdict.measured
