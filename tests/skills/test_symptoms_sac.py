"""Symptoms of the skill `sac`: reproduced, cured, and not cured by the wrong fix.

python -m pytest tests/skills/test_symptoms_sac.py
"""

import copy
import functools

import pytest
import torch
from symptoms import linear, mean_square, rows, seeded, step, symptom
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

from curry_train.bench.steps import python_calls
from curry_train.core.measure import count_flops, measure_memory, recompute_flops
from curry_train.core.parity import compare
from curry_train.primitives.regions import apply_regions
from curry_train.primitives.sac import PolicyError, apply_sac
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case

aten = torch.ops.aten
CASE = Case(transformer(depth=2))


def torchs(model, policy, **options):
    """Apply torch's own selective checkpointing to each block of a chain."""
    changed = copy.deepcopy(model)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy, **options)
    for block in changed:
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, context_fn=contexts
        )
    return changed


def ours(model, policy="save_expensive"):
    changed = copy.deepcopy(model)
    apply_sac(changed, policy)
    return changed


def equal(first, second, batch):
    return compare(step(first, batch), step(second, batch)).bit_equal


class Block(nn.Module):
    """A block of three products of one shape; the last is never recomputed."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(linear(bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.linears[:2]:
            x = x + torch.sin(layer(x))
        return self.linears[2](x)


def chain(block=Block):
    return seeded(lambda: nn.Sequential(*[block() for _ in range(3)]))


@symptom("`PolicyError`: ... saves no output")
def test_a_list_of_composite_operations_keeps_nothing():
    named = [aten.linear.default, aten.scaled_dot_product_attention.default]
    plain, full = chain(), torchs(chain(), [])
    batch, flops = rows(), functools.partial(count_flops, batch=rows(), loss=mean_square)
    again = recompute_flops(flops(plain), flops(torchs(plain, named)))
    assert (
        again == recompute_flops(flops(plain), flops(full)) > 0
    )  # torch recomputes everything without an error
    with pytest.raises(PolicyError, match="saves no output of 0"):
        ours(plain, named)(batch)
    with pytest.raises(
        PolicyError, match="saves no output of 0"
    ):  # replaces one composite operation by another
        ours(plain, [*named, aten.matmul.default])(batch)
    assert recompute_flops(flops(plain), flops(ours(plain, ["aten.mm", "aten.addmm"]))) == 0


@symptom(
    "`PolicyError`: ... the wrong way round; or torch's own takes more memory than none at all"
)
def test_keeping_all_but_products_takes_more_memory_than_none():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return x + self.down(F.silu(self.up(self.norm(x))) * 2.0 + 0.1)

    def backwards(context, operation, *args, **kwargs):
        return operation is not aten.addmm.default and not operation._schema.is_mutable

    plain, batch = chain(Normed), rows(256)

    def held(model):
        return measure_memory(model, batch, mean_square).held_bytes

    assert held(torchs(plain, backwards)) > held(plain)
    with pytest.raises(PolicyError, match="wrong way round"):
        ours(plain, backwards)(batch)
    with pytest.raises(
        PolicyError, match="wrong way round"
    ):  # keeping less still recomputes all products
        ours(plain, ["aten.silu", "aten.mul"])(batch)
    assert held(ours(plain)) < held(plain)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear(bias=False)

    def forward(self, x):
        noisy = torch.sin(self.linear(x + 0.5 * torch.randn_like(x)))
        return x + F.dropout(noisy, 0.5) * noisy


@symptom("gradients are wrong with dropout, and no error")
def test_keeping_an_operation_that_draws_gives_wrong_gradients():
    plain, batch = chain(Noisy), rows()
    kept = [
        aten.mm.default,
        aten.randn_like.default,
    ]  # the operation of attention with dropout on CUDA
    assert not equal(plain, torchs(plain, kept), batch)
    assert not equal(
        plain, torchs(plain, [*kept, aten.native_dropout.default]), batch
    )  # a list with more operations that draw
    assert equal(plain, ours(plain, kept), batch)


class InPlace(nn.Module):
    def __init__(self, inplace=True):
        super().__init__()
        self.up, self.down, self.inplace = linear(bias=False), linear(bias=False), inplace

    def forward(self, x):
        return x + self.down(F.leaky_relu(self.up(x), 0.5, inplace=self.inplace))


@symptom("`RuntimeError`: Tensor cached during selective activation checkpoint has been mutated")
def test_a_kept_output_that_is_overwritten_is_an_error():
    plain, batch, kept = chain(InPlace), rows(), [aten.mm.default]
    expected = step(plain, batch)
    for model in (torchs(plain, kept), ours(plain)):
        with pytest.raises(RuntimeError, match="has been mutated"):
            step(model, batch)
    allowed = step(torchs(plain, kept, allow_cache_entry_mutation=True), batch)
    assert not compare(expected, allowed, tolerance=0.01).holds
    cured = chain(lambda: InPlace(inplace=False))
    assert compare(expected, step(ours(cured), batch)).bit_equal


@symptom("steps are much slower than the FLOPs say, in eager mode with small batches")
def test_a_policy_adds_overhead_to_every_operation():
    def calls(apply):
        return python_calls(CASE, lambda module, case: apply(module))

    plain, expensive = calls(lambda module: None), calls(apply_sac)
    fewer = calls(lambda module: apply_sac(module, "save_attention"))
    assert fewer - plain > 0.8 * (
        expensive - plain
    )  # the mode sees each operation, whatever it keeps
    assert calls(apply_regions) - plain < 0.4 * (expensive - plain)


class Wave(nn.Module):
    def forward(self, x):
        return torch.sin(x) * (1.0 + torch.tanh(x))


class Handmade(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.wave, self.dropout, self.down = linear(), Wave(), nn.Dropout(0.1), linear()

    def forward(self, x):
        return x + self.down(self.dropout(self.wave(self.up(x))))


@symptom("regions free less than a policy does")
def test_a_users_own_activation_must_be_a_module_for_regions():
    batch, held = rows(256), {}
    for name, apply in {
        "regions": apply_regions,
        "sac": apply_sac,
        "also": lambda model: apply_regions(model, also=["*.wave"]),
    }.items():
        model = chain(Handmade)
        apply(model)
        held[name] = measure_memory(model, batch, mean_square).held_bytes
    assert held["sac"] < held["regions"]
    assert held["also"] < held["regions"]
    model = chain(Handmade)
    apply_regions(model, also=["*.wave", "*.dropout"])
    with pytest.raises(ValueError, match="draws random numbers"):
        model(batch)
