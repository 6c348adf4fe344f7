"""A step estimated from shapes is exact to the byte, or names the operation to measure.

python -m pytest tests/plan/test_estimate.py
"""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curry_train.plan.estimate import Sketch
from curry_train.plan.planner import EVERY_LAYER_NOTE, plan
from curry_train.primitives import apply_regions, apply_sac, recompute_blocks, recompute_segments
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, mlp
from curry_train.workloads.workload import Workload, default_workload

from ..language_models import language_model
from ..plan_models import Coded, Runs, check, check_workload, estimated, measured, squares
from ..toy_steps import activated, stacked


def two_segments(module):
    recompute_segments(module, 2)


def from_factory(factory):
    return default_workload(factory.__name__, lambda: parted(factory()), factory())


def parted(made):
    return made if isinstance(made, nn.Module) else made[0]


# Equal to the byte.


SMALL = {"transformer": {"depth": 2}, "resnet": {"depth": 3}, "snn": {"timesteps": 6}}


@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_built_in_workloads_with_every_way_to_recompute(name):
    changes = (None, recompute_blocks, apply_sac, *([] if name == "snn" else [two_segments]))
    assert check_workload(BUILTIN_WORKLOADS[name](**SMALL.get(name, {})), changes=changes) is None


def llama():
    return language_model("Llama", vocab_size=256, num_key_value_heads=2)


def bert():
    return language_model("Bert")


@pytest.mark.parametrize("factory", [llama, bert])
def test_hugging_face_models(factory):
    changes = (None, recompute_blocks, apply_sac, apply_regions) if factory is llama else (None,)
    assert check_workload(from_factory(factory), changes=changes) is None


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_a_causal_model_is_estimated_with_the_loss_that_it_computes(kind):
    """It reads the logits of the last token too, which predict nothing."""
    workload = from_factory(lambda: language_model(kind, vocab_size=2048, use_cache=False))
    own = replace(workload, loss=lambda module, batch: module(**batch).loss, count=lambda _: 1)
    with Sketch(workload) as sketch:
        check(sketch, measured(own, 3), 3)


class Averages(nn.Module):
    """A model with a buffer that it assigns, and a cache that the first step makes."""

    def __init__(self):
        super().__init__()
        self.linear, self.places = nn.Linear(16, 16), None
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        if self.places is None:
            self.places = torch.arange(12.0)[:, None]
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))
        return y - self.mean + self.places


def attention(inner, x):
    query, key, value = (layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in inner)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.1).flatten(
        1
    )


def autocast(inner, x):
    with torch.autocast("cpu", torch.bfloat16):
        return inner[1](F.gelu(inner[0](x))).float()


ROWS, IMAGES = torch.randn(8, 12, 16), torch.randn(8, 4, 16, 16)
MODELS = {
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2
    ),
    "averages": Averages,
    "attention": lambda: Runs(attention, *(nn.Linear(16, 16) for _ in range(3))),
    "autocast": lambda: Runs(autocast, nn.Linear(16, 32), nn.Linear(32, 16)),
    "channels-last": lambda: nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)
    ).to(memory_format=torch.channels_last),
}


# Workloads of tests/gates/constructs.py, of which the gates estimate all.
CONSTRUCTS = ["checkpoints_all", "derivative_in_loss", "drops_layers", "partly_frozen"]


def named(name):
    if name in CONSTRUCTS:
        return load_workload(f"tests.gates.constructs:{name}")
    batch = IMAGES if name == "channels-last" else ROWS
    return from_factory(lambda: (MODELS[name](), batch))


@pytest.mark.parametrize("name", [*MODELS, *CONSTRUCTS])
def test_models_of_many_kinds(name):
    assert check_workload(named(name)) is None


# Optimizers and accumulation.


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "optimizer", ["adamw", "sgd", "sgd-momentum", "adamw-master", "adamw-8bit", 6]
)
def test_optimizers_are_torchs_own(optimizer, kernels):
    """Estimate as for CUDA, where optimizers step all parameters at once."""
    workload = mlp(depth=2, width=32)
    real = measured(workload, 3, optimizer=optimizer, cuda=kernels == "cuda")
    with Sketch(workload, optimizer=optimizer, kernels=kernels) as sketch:
        check(sketch, real, 3)


def test_optimizer_state_by_arithmetic():
    numbers = 2 * (32 * 32 + 32) + 32 * 10 + 10
    parameters = 4 * numbers
    for optimizer, state in {
        "adamw-master": 12 * numbers,
        "adamw-8bit": 2 * numbers,
        "6.5": 13 * numbers // 2,
    }.items():
        step = estimated(mlp(depth=2, width=32), 3, optimizer=optimizer)
        assert step.timeline.owners["optimizer state"][0] == state
        assert (step.gradients, step.fixed) == (parameters, parameters + state + 3 * 32 * 4 + 3 * 8)


# Steps that depend on values are measured for real, with the reason.


def linear(run):
    return lambda: Runs(run, nn.Linear(16, 16))


def sparse(inner, x):
    return torch.sparse.mm(torch.eye(12).to_sparse(), inner[0](x)[0])


def looked_up(kind, **options):
    return lambda: Runs(lambda inner, x: inner[0]((x[..., 0] > 0).long()), kind(4, 8, **options))


TOLD = {
    "chosen rows": (
        linear(lambda inner, x: inner[0](x[(x[:, 0, 0] < 9).nonzero()[:, 0]])),
        "aten.nonzero.*of Runs, .*py:",
    ),
    "item": (
        linear(lambda inner, x: inner[0](x) * inner[0](x).sum().item()),
        "_local_scalar_dense.*of Runs",
    ),
    "numpy": (
        linear(lambda inner, x: inner[0](x) * float(x.numpy().mean())),
        "Tensor.numpy.*of Runs",
    ),
    "lstm": (
        lambda: Runs(lambda inner, x: inner[0](x)[0], nn.LSTM(16, 16, 2, batch_first=True)),
        "lstm in the forward of LSTM.*kernel keeps a state",
    ),
    "sparse product": (linear(sparse), "sparse.*of Runs"),
    "fold": (
        linear(lambda inner, x: F.fold(F.unfold(inner[0](x)[:, None], 3), (12, 16), 3)),
        "col2im",
    ),
    "sparse rows": (looked_up(nn.Embedding, sparse=True), "aten.embedding.*sparse tensor"),
    "bag": (looked_up(nn.EmbeddingBag), "_embedding_bag.*of EmbeddingBag"),
}


@pytest.mark.parametrize("name", TOLD)
def test_steps_that_depend_on_values_are_measured_with_the_reason(name):
    build, message = TOLD[name]
    optimizer = (
        "sgd-momentum" if name == "sparse rows" else "adamw"
    )  # Adam takes no sparse gradient
    why_real = check_workload(from_factory(lambda: (build(), ROWS)), optimizer=optimizer)
    assert re.search(message, why_real), why_real


def test_token_ids_have_values_and_shapes_may_depend_on_them():
    """Batches of integers alone are drawn as in the real step, so they have values."""

    workload = Workload(
        "tokens",
        lambda: nn.Sequential(nn.Embedding(32, 8)),
        lambda size: torch.randint(1, 12, (size, 12)),
        lambda module, tokens: module(tokens[tokens > 3])[: int(tokens.max())].square().sum(),
    )
    assert check_workload(workload) is None


def test_errors_of_the_user_are_raised_unchanged():
    def raises(module, batch):
        raise KeyError("planted")

    with (
        pytest.raises(KeyError, match="planted"),
        Sketch(Workload("own", Averages, lambda n: ROWS[:n], raises)),
    ):
        pass
    assert type(torch.zeros(2)) is torch.Tensor


# Models that skip layers, make masks, or have weights of other classes.


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
