"""Tests of the recompute gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_recompute.py
"""

import itertools
import random
from dataclasses import replace

import foreign_recompute as foreign
import numpy
import pytest
import torch
import torch.distributed as dist
from saboteurs import case_of, claims_by_name, faults, gates
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from curry_train.gates import recompute
from curry_train.gates.implementation import load_implementation
from curry_train.gates.two_ranks import run_on_ranks
from curry_train.primitives.recompute import recompute_blocks
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case, Workload


def squares(kind, batch=lambda size: torch.randn(size, 16)):
    """Return a workload with the sum of the squares of a model's outputs as its loss."""
    return Workload("squares", kind, batch, lambda module, x: module(x).square().sum())


# The gates hold on the right implementation.


# Those of offload have a file of their own, and long runs and ranks are tried on fewer models.
OTHERS = ("recompute/long-run", "recompute/two-ranks", "recompute/routing")
GATES = {
    gate.name: gate
    for gate in recompute.GATES
    if gate not in recompute.OFFLOAD_GATES and gate.name not in OTHERS
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, gate):
    verdict = GATES[gate].run(Case(load_workload(name)))
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
    for gate in GATES.values():
        verdict = gate.run(case)
        assert verdict.passed is not False, verdict


@pytest.mark.long
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_the_thorough_gate_holds_on_built_in_workloads(name):
    assert recompute.compare_long_run(Case(load_workload(name))).passed


def test_a_long_run_of_one_strategy_holds(monkeypatch):
    monkeypatch.setattr(recompute, "LONG_RUN_STRATEGIES", ("sac",))
    verdict = recompute.compare_long_run(case_of("small"))
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


def keep_gradients(model, *, blocks):
    """Recompute, and keep copies of the gradient of each block's output."""
    copies = []

    def keep(block, args, output):
        output.register_hook(lambda gradient: copies.append(gradient.repeat(1, 6)))

    for name in recompute_blocks(model, blocks=blocks):
        model.get_submodule(name).register_forward_hook(keep)


def test_a_peak_inside_of_one_block_is_not_held_against_recompute():
    def build():
        return nn.Sequential(Wide(5), *(Wide(1) for _ in range(3)))

    case = Case(squares(build, lambda size: torch.randn(64 * size, 16)))
    verdict = recompute.compare_memory(case)
    assert verdict.passed is None, verdict
    assert "what one block needs while it runs owns the peak" in verdict.hint
    verdict = recompute.compare_memory(case, recompute_blocks=keep_gradients)
    assert verdict.passed is False
    assert "under torch's own checkpoint" in verdict.hint
    assert recompute.compare_memory(case, recompute_blocks=foreign.nothing).passed is False


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return torch.sigmoid(x * self.scale)


def test_the_flops_gate_does_not_hold_without_flops():
    workload = squares(lambda: nn.Sequential(Scale(), Scale()), lambda size: torch.randn(size, 8))
    case = Case(replace(workload, loss=lambda module, batch: module(batch).sum()))
    assert recompute.compare_flops(case).passed is None
    assert recompute.compare_training(case).passed


# Blocks in which nothing would run again, and blocks that do not run.


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


@pytest.mark.parametrize("change", [recompute_blocks, foreign.nothing])
def test_gates_do_not_apply_to_blocks_of_a_single_layer(change):
    case = Case(list_of(lambda: nn.Linear(8, 8)), blocks="layers.*")
    assert recompute.compare_selection(case).passed is None
    verdict = recompute.compare_training(case, recompute_blocks=change)
    assert verdict.passed is None, verdict
    assert "checkpoint of each block frees nothing" in verdict.hint


def past_the_block(layer, x):
    return nn.functional.gelu(nn.functional.linear(x, layer[0].weight, layer[0].bias))


@pytest.mark.parametrize(
    ("workload", "change"),
    [
        # Recompute would free memory.
        (list_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU())), foreign.nothing),
        # Recompute would free nothing, but run the block again.
        (list_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU())), foreign.nothing),
        # The block never runs.
        (list_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()), past_the_block), None),
        (list_of(lambda: nn.Linear(8, 8), lambda layer, x: x * layer.weight.sum()), None),
    ],
    ids=["gelu", "relu", "bypassed", "lone and bypassed"],
)
def test_a_no_op_fails_if_recompute_would_free_memory_or_the_block_never_runs(workload, change):
    case = Case(workload, blocks="layers.?")
    verdict = recompute.compare_training(case, recompute_blocks=change or recompute_blocks)
    assert verdict.passed is False, verdict
    assert "nothing ran twice or was freed" in verdict.hint


@pytest.mark.parametrize("gate", GATES.values(), ids=lambda gate: gate.name)
def test_the_verdict_names_the_single_layers_that_a_model_repeats(gate):
    verdict = gate.run(Case(list_of(lambda: nn.Linear(8, 8))))
    assert verdict.passed is None, verdict
    assert "lone layers" in verdict.hint or "nothing worth changing" in verdict.hint


# Models that are right without recompute, and wrong with it.


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


def disturbed(disturb):
    """Build a workload whose second block of three is disturbed."""

    def build():
        clean = [Faulty(lambda block, x: x) for _ in range(2)]
        return nn.Sequential(nn.Linear(8, 8), nn.ModuleList(clean)[0], Faulty(disturb), clean[1])

    return squares(build, lambda size: torch.randn(size, 8))


@pytest.mark.parametrize("disturb", [growing_cache, counter, routing])
def test_a_recomputed_block_sees_its_state_of_the_first_call(disturb):
    verdict = recompute.compare_training(Case(disturbed(disturb)))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("disturb", "in_hint", "change"),
    [
        (python_random, "2 draws from python's generator", recompute_blocks),
        (numpy_random, "2 draws from numpy's generator", recompute_blocks),
        (other_in_backward, "2 computes another value the second time", recompute_blocks),
        (shorter_in_backward, "2 computes other tensors the second time", recompute_blocks),
        (growing_cache, "computes other tensors the second time", foreign.by_checkpoint),
        (counter, "keeps state between calls", foreign.by_checkpoint),
        (routing, "computes other tensors the second time", foreign.by_checkpoint),
    ],
)
def test_parity_names_the_block_that_is_unfit(disturb, in_hint, change):
    verdict = recompute.compare_training(Case(disturbed(disturb)), recompute_blocks=change)
    assert verdict.passed is False, verdict
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
    verdict = recompute.compare_profile(Case(squares(MaskedBlocks)))
    assert verdict.passed, verdict


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
    verdict = recompute.compare_training(Case(squares(UnevenUnderAutocast)))
    assert verdict.passed, verdict
    assert "without autocast: the plain model does not repeat itself" in verdict.measured


# Implementations that are not ours, as `--impl` gives them, and planted faults.


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("by_checkpoint", "transformer"),
        ("by_reentrant_checkpoint", "transformer"),
        ("by_wrapper", "transformer"),
        ("by_transformers", f"{foreign.__file__}:gpt2"),
        ("by_reentrant_transformers", f"{foreign.__file__}:gpt2"),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_recompute_on_torchs_own_calls_passes_every_gate(name, model):
    given = [load_implementation(f"recompute_blocks=foreign_recompute:{name}")]
    case = Case(load_workload(model))
    verdicts = [gate.run(case, given) for gate in recompute.GATES if given[0].name in gate.takes]
    assert [verdict.passed for verdict in verdicts] == [True] * 5, verdicts


def test_the_names_go_to_an_implementation_under_two_ranks_too():
    verdict = recompute.compare_ranks(Case(load_workload("mlp"), blocks="[12]"))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    "saboteur",
    [
        one
        for one in faults("faulty_recompute")
        if gates()[claims_by_name()[one.claim].gate] not in recompute.OFFLOAD_GATES
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gate_catches(saboteur):
    saboteur.check()
