"""Regions: what they free, cost and cannot reach, on our own and Hugging Face's models.

python -m pytest tests/primitives/test_regions.py
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curry_train.bench.steps import python_calls
from curry_train.core.measure import count_flops, measure_memory
from curry_train.core.parity import compare, record_step
from curry_train.gates.sac import compare_regions, torch_sac
from curry_train.primitives.recompute import recompute_blocks
from curry_train.primitives.regions import apply_regions
from curry_train.workloads.models import Block, transformer
from curry_train.workloads.workload import Case, Workload

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TOKENS = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(0))


def llama():
    size = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **size)
    )


def gpt2(dropout=0.1):
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    tokens = {"bos_token_id": 1, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=3, n_head=4, **drop, **tokens)
    )


def lm_loss(model, tokens):
    return F.cross_entropy(
        model(input_ids=tokens, use_cache=False).logits.flatten(0, 1).float(), tokens.flatten()
    )


def autocast_loss(model, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        return lm_loss(model, tokens)


def figures(build, loss, apply=lambda model: None, batch=TOKENS):
    torch.manual_seed(0)
    model = build().train()
    apply(model)
    torch.manual_seed(0)
    record = record_step(model, batch, loss)
    return record, measure_memory(model, batch, loss), count_flops(model, batch, loss)


# The figures.


def test_a_block_of_llamas_shape_holds_at_most_56_percent_with_no_product_again():
    def build():
        return nn.Sequential(Once(Block(128, 4, 2, 352, 0.0), rotations))

    rotations = torch.randn(64, 16)
    x = torch.randn(4, 64, 128, requires_grad=True)
    plain = figures(build, lambda model, x: model(x).sum(), batch=x)
    changed = figures(
        build,
        lambda model, x: model(x).sum(),
        lambda model: apply_regions(model, blocks="0.block"),
        x,
    )
    assert compare(plain[0], changed[0]).bit_equal
    assert changed[1].held_bytes / plain[1].held_bytes <= 0.56
    assert changed[1].peak_bytes < plain[1].peak_bytes
    assert changed[2] == plain[2]


class Once(nn.Module):
    """A block with its further arguments bound."""

    def __init__(self, block, rotations):
        super().__init__()
        self.block, self.rotations = block, rotations

    def forward(self, x):
        return self.block(x, self.rotations, self.rotations)


def test_regions_hold_as_much_as_torchs_policy_for_a_fraction_of_its_calls():
    case = Case(transformer())
    changes = (lambda model: None, apply_regions, torch_sac)
    held = [
        figures(case.build, case.workload.mean_loss, change, case.batch())[1].held_bytes
        for change in changes[1:]
    ]
    assert held[0] == held[1]
    counts = [python_calls(case, lambda model, case, change=one: change(model)) for one in changes]
    assert 0 < counts[1] - counts[0] <= 0.4 * (counts[2] - counts[0])


@pytest.mark.parametrize("loss", [lm_loss, autocast_loss])
@pytest.mark.parametrize(
    ("build", "also", "at_most"), [(llama, (), 0.6), (gpt2, ("*.mlp.act",), 0.65)]
)
def test_hugging_face_blocks_are_reached_without_an_edit(build, also, at_most, loss):
    plain = figures(build, loss)
    changed = figures(build, loss, lambda model: apply_regions(model, also=also))
    assert compare(plain[0], changed[0]).bit_equal
    assert changed[1].held_bytes / plain[1].held_bytes <= at_most
    assert changed[2] == plain[2]


# Tensors without a recipe, and modules that are named to give them one.


def test_naming_a_cheap_module_frees_its_tensors():
    held = []
    for also in ((), ("*.mlp.act",)):
        model = gpt2(0.0)
        apply_regions(model, also=also)
        held.append(measure_memory(model, TOKENS, lm_loss).held_bytes)
    assert held[1] < held[0]


class Functional(nn.Module):
    """A block with its activation written as an expression; `Edited` has it in a module."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def activation(self, x):
        return torch.sin(x) + x

    def forward(self, x):
        return x + self.down(self.activation(self.up(x)))


class Wave(nn.Module):
    def forward(self, x):
        return torch.sin(x) + x


class Edited(Functional):
    def __init__(self):
        super().__init__()
        self.wave = Wave()

    def activation(self, x):
        return self.wave(x)


def chain(block):
    torch.manual_seed(0)
    return nn.Sequential(*[block() for _ in range(3)])


def square(model, x):
    return model(x).square().sum()


def test_moving_an_expression_into_a_module_gives_it_a_recipe():
    x = torch.randn(32, 16)
    model = chain(Functional)
    apply_regions(model)
    edited = chain(Edited)
    apply_regions(edited, also=["*.wave"])
    saved = (
        measure_memory(model, x, square).held_bytes - measure_memory(edited, x, square).held_bytes
    )
    assert saved == 3 * 32 * 64 * 4
    assert compare(record_step(model, x, square), record_step(edited, x, square)).bit_equal


def test_a_named_module_that_draws_is_refused():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2)])
    apply_regions(model, also=["*.1"])
    with pytest.raises(ValueError, match=r"0\.1 draws random numbers"):
        model(torch.randn(2, 8))


def test_a_pattern_of_modules_without_a_match_is_an_error():
    with pytest.raises(
        ValueError, match=r"also '\*.act' matches no module; there are 0.up, 0.down"
    ):
        apply_regions(chain(Functional), also=["*.act"])


# The same training in every respect.


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up, self.down = (
            nn.LayerNorm(16),
            *(nn.Linear(16, 16) for _ in range(3)),
        )

    def forward(self, x):
        n = self.norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


def both():
    plain = chain(Gated)
    changed = copy.deepcopy(plain)
    apply_regions(changed)
    return plain, changed


def test_regions_and_recompute_share_a_model_but_not_a_block():
    plain, _ = both()
    changed = copy.deepcopy(plain)
    recompute_blocks(changed, blocks="0")
    apply_regions(changed, blocks="[12]")
    x = torch.randn(4, 16)
    assert compare(record_step(plain, x, square), record_step(changed, x, square)).bit_equal
    with pytest.raises(ValueError, match="is wrapped already"):
        apply_regions(changed, blocks="0")


def test_a_model_with_a_norm_of_its_own_class_and_with_statistics():
    class ScaleNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale

    class WithStatistics(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = ScaleNorm()
            self.linear = nn.Linear(16, 16)
            self.other = nn.BatchNorm1d(16)

        def forward(self, x):
            return x + self.other(self.linear(self.norm(x)))

    workload = Workload(
        "own norms",
        functools.partial(chain, WithStatistics),
        lambda size: torch.randn(size, 16),
        lambda module, batch: module(batch).square().sum(),
    )
    _, _, hint = compare_regions(Case(workload, batch_size=8))
    assert not hint


class Bend(nn.Module):
    def forward(self, x, factor, shift=None):
        return torch.sin(factor * x) if shift is None else torch.sin(factor * x + shift)


class Bent(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.bend, self.down = nn.Linear(16, 32), Bend(), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.bend(self.up(x), 2.0, shift=None))


def test_a_named_module_may_take_other_values_than_tensors():
    x = torch.randn(4, 16)
    plain, changed = chain(Bent), chain(Bent)
    apply_regions(changed, also=["*.bend"])
    assert compare(record_step(plain, x, square), record_step(changed, x, square)).bit_equal
