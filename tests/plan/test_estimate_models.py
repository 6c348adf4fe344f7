"""Estimates of models that skip layers, make masks, or have weights of other classes.

python -m pytest tests/plan/test_estimate_models.py
"""

import itertools

import pytest
import torch
from torch import nn

from curry_train.plan.planner import EVERY_LAYER_NOTE, plan
from curry_train.workloads.workload import Workload

from ..language_models import language_model
from ..plan_models import Coded, Runs, check_workload, measured, squares
from ..toy_steps import activated, stacked

SIZE = 4


def tokens(size):
    return torch.randint(3, 64, (size, 40))


BART = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}


def bart(*, padded):
    """Make a decoder mask from `torch.ones`, which the attention skips where nothing is masked."""

    def loss(module, batch):
        mask = (batch > 9).long() if padded else None
        return module(input_ids=batch, attention_mask=mask, labels=batch).loss

    return Workload("bart", lambda: language_model("Bart", d_model=32, **BART), tokens, loss)


@pytest.mark.parametrize("padded", [False, True])
def test_a_decoder_whose_mask_may_be_skipped_is_equal_to_the_byte(padded):
    assert check_workload(bart(padded=padded)) is None


def test_a_mask_that_was_written_to_has_no_known_values():
    def loss(module, x):
        mask = torch.ones(len(x), 8)
        mask[:, 4:] = 0
        return (module(x) * mask.bool().float()).square().sum()

    check_workload(squares(lambda: nn.Linear(8, 8), 8, loss=loss))


def of_rows(inner, x):
    return inner[0](torch.nested.as_nested_tensor([*x], layout=torch.jagged)).values()


@pytest.mark.parametrize("run", [of_rows, lambda inner, x: torch.vmap(inner[0])(x)])
def test_nested_and_batched_tensors_are_equal_to_the_byte(run):
    def build():
        nn.LayerNorm(8).to("meta")
        return Runs(run, nn.LayerNorm(8))

    assert check_workload(squares(build, 2, 8)) is None


# Layers that a model skips at random are planned as if they always ran.


def opt(layerdrop):
    sizes = {"num_hidden_layers": 4, "ffn_dim": 64, "word_embed_proj_dim": 32}
    return Workload(
        "opt",
        lambda: language_model("OPT", layerdrop=layerdrop, **sizes),
        tokens,
        lambda module, batch: module(input_ids=batch, labels=batch, use_cache=False).loss,
    )


def skipping(runs):
    """Return a workload whose layers run where a function of their number returns so."""

    def run(inner, x):
        *layers, head = inner
        for number, layer in enumerate(layers):
            if runs(number):
                x = x + layer(x)
        return head(x)

    def build():
        return Runs(run, *(activated(16) for _ in range(6)), nn.Linear(16, 4))

    return squares(build, 16)


def kept_by_chance(probability):
    """Skip a layer where the drawn number is above a probability, not below one."""

    return skipping(lambda number: torch.rand(1).item() < probability)


@pytest.mark.parametrize(("make", "runs_all"), [(opt, 1e-12), (kept_by_chance, 1.1)])
def test_skipped_layers_are_planned_as_if_they_always_ran(make, runs_all):
    real = measured(make(runs_all), SIZE)
    options = {"without": ["sac", "regions"], "chunked_loss": False}
    sizes = {"microbatch": SIZE, "global_batch": SIZE}
    found = plan(make(0.5), 2 * real.peak.bytes_alive, **sizes, **options)
    assert found.peak_bytes == real.peak.bytes_alive
    assert found.why.endswith(EVERY_LAYER_NOTE)


def test_layers_that_run_by_chance_in_some_measurements_alone_do_not_end_the_planner():
    # Each layer is skipped in every fourth call, whatever the seed.
    calls = itertools.count()
    workload = skipping(lambda number: (next(calls) // 6 + number) % 4)
    assert plan(workload, 2**20, global_batch=SIZE).peak_bytes <= 2**20


# Weights of other classes.


class CodedWeight(Coded):
    """A frozen weight as codes, a scale, and a table of numbers as NF4 has it."""

    inner = ("codes", "scale", "table")

    def values(self):
        return self.table[self.codes] * self.scale


def on_codes():
    """Return a linear layer with a coded weight, and an adapter."""

    def run(inner, x):
        (weight,), down, up = inner
        return (nn.functional.linear(x, weight) + up(down(x))).tanh()

    drawn = torch.randn(16, 16)
    codes = (drawn > 0).long() + (drawn > 1).long()
    weight = CodedWeight(codes, drawn.abs().max(), torch.tensor([-1.0, 0.5, 1.5]))
    frozen = nn.ParameterList([nn.Parameter(weight, requires_grad=False)])
    return Runs(run, frozen, nn.Linear(16, 2), nn.Linear(2, 16))


def test_a_base_of_codes_with_a_table_that_keeps_its_values_is_estimated_from_shapes():
    assert check_workload(squares(lambda: stacked(on_codes, 2), 16)) is None
