"""Tests of gates on architectures: experts, convolutions and dropped layers.

python -m pytest tests/gates/test_architectures.py
"""

import pytest
import torch
import transformers as hf

from curry_train.gates import discover
from curry_train.primitives.chunked_loss import apply_chunked_loss
from curry_train.workloads.models import load_workload
from curry_train.workloads.workload import Case

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
)
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def words(model):
    tokens = torch.randint(3, 64, (4, 16))
    return model, {"input_ids": tokens, "labels": tokens}


def mixtral():
    config = hf.MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    return words(hf.MixtralForCausalLM(config))


def gpt_oss():
    more = dict(
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
    )
    return words(hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES | IDS, **more)))


def mamba():
    config = hf.MambaConfig(vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2, **IDS)
    return words(hf.MambaForCausalLM(config))


def bloom():
    return words(
        hf.BloomForCausalLM(
            hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=3, n_head=2, **IDS)
        )
    )


def opt_that_drops_layers():
    sizes = dict(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=4, num_attention_heads=2
    )
    return words(
        hf.OPTForCausalLM(hf.OPTConfig(**sizes, word_embed_proj_dim=32, layerdrop=0.5, **IDS))
    )


def vit():
    sizes = SIZES | {"image_size": 16, "patch_size": 4}
    del sizes["vocab_size"]
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes)), {
        "pixel_values": torch.randn(4, 3, 16, 16)
    }


def clip():
    text = dict(SIZES, max_position_embeddings=16, **IDS)
    vision = {key: size for key, size in SIZES.items() if key != "vocab_size"} | {
        "image_size": 16,
        "patch_size": 8,
    }
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    tokens = torch.randint(3, 64, (4, 8))
    return hf.CLIPModel(config), {
        "input_ids": tokens,
        "pixel_values": torch.randn(4, 3, 16, 16),
        "return_loss": True,
    }


class Unused(torch.nn.Module):
    """A model with a parameter that eval mode does not use, as for masked inputs in training."""

    def __init__(self):
        super().__init__()
        self.layer, self.mask = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.layer(x * self.mask if self.training else x)


def unused():
    return Unused(), torch.randn(4, 4)


class Scaled(torch.nn.Module):
    """A layer with a scalar parameter, which FSDP2 refuses."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * self.layer(x)


def scaled():
    return Scaled(), torch.randn(4, 4)


class Spectral(torch.nn.Module):
    """A layer with a complex parameter beside real ones, which FSDP2 refuses in its forward."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.ifft(self.scale * torch.fft.fft(self.layer(x))).real


def spectral():
    return Spectral(), torch.randn(4, 4)


class Communicating(torch.nn.Module):
    """A layer that sums its output over ranks, as expert parallel models do."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(y.detach())
        return y


def communicating():
    return Communicating(), torch.randn(4, 4)


def verdicts(factory, *names):
    case = Case(load_workload(f"{__file__}:{factory}"))
    return {gate.name: gate.run(case) for gate in discover() if gate.name in names}


@pytest.mark.parametrize(
    ("factory", "names"),
    [
        ("mixtral", ["memory-plan/estimate", "sac/products"]),
        ("mamba", ["sac/products"]),
        ("bloom", ["recompute/profiler"]),
        ("vit", ["memory-plan/estimate"]),
        (
            "opt_that_drops_layers",
            [
                "recompute/memory",
                "recompute/flops",
                "recompute/profiler",
                "recompute/off",
                "sac/products",
            ],
        ),
        ("unused", ["grad-accum/two-ranks"]),
    ],
)
def test_gates_hold_on_each_architecture(factory, names):
    found = verdicts(factory, *names)
    assert set(found) == set(names)
    assert {name: verdict for name, verdict in found.items() if not verdict.passed} == {}


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("spectral", "AssertionError: FSDP expects uniform original parameter dtype"),
        pytest.param(
            "scaled", "ValueError: fully_shard doesn't support scalar", marks=pytest.mark.long
        ),
    ],
)
def test_what_torch_refuses_of_a_model_is_said_and_the_rest_is_compared(factory, message):
    (verdict,) = verdicts(factory, "grad-accum/two-ranks").values()
    assert verdict.passed
    assert verdict.measured.startswith("DDP ")
    assert f"FSDP2 not compared: {message}" in verdict.measured


def test_ranks_of_a_model_that_communicates_by_itself_are_not_compared():
    (verdict,) = verdicts("communicating", "grad-accum/two-ranks").values()
    assert verdict.passed is None
    assert "the model itself communicates between ranks" in verdict.hint


def test_accumulation_does_not_apply_to_a_loss_that_couples_samples():
    names = ["equal", "uneven", "short-window", "once", "two-ranks"]
    found = verdicts("clip", *[f"grad-accum/{name}" for name in names])
    assert {verdict.passed for verdict in found.values()} == {None}
    assert all("couples samples" in verdict.hint for verdict in found.values())


def test_policies_do_not_apply_to_a_block_that_overwrites_its_outputs():
    (verdict,) = verdicts("gpt_oss", "sac/products").values()
    assert verdict.passed is None
    assert "overwrites in place an output" in verdict.hint


class Derivative(torch.nn.Module):
    """A block that takes a derivative inside of its forward."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU())

    def forward(self, x):
        energy = torch.func.grad(lambda value: self.layers(value).square().sum())
        return x + torch.func.vmap(energy)(x)


def derivatives():
    return torch.nn.Sequential(*[Derivative() for _ in range(3)]), torch.randn(4, 8)


def test_a_derivative_inside_of_a_block_is_named():
    names = ["parity-full", "flops", "memory", "off"]
    found = verdicts("derivatives", *[f"recompute/{name}" for name in names], "sac/regions")
    assert found.pop("recompute/off").passed
    for verdict in found.values():
        assert verdict.passed is None, verdict
        assert "use torch.autograd.grad with create_graph=True" in verdict.hint


def routed():
    """Return a model of experts whose router balances over the batch, as it is trained."""
    config = hf.MixtralConfig(
        **SIZES,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
    )
    return words(hf.MixtralForCausalLM(config))


def test_the_loss_of_routers_is_trained_and_couples_samples():
    workload = load_workload(f"{__file__}:routed")
    case = Case(workload)
    module = case.build().eval()
    batch = case.batch()
    own = module(**batch).loss.item()
    assert workload.mean_loss(module, batch).item() == pytest.approx(own, rel=1e-5)
    module.router_aux_loss_coef = 0.0
    assert own - workload.mean_loss(module, batch).item() > 0.01
    (verdict,) = verdicts("routed", "grad-accum/uneven").values()
    assert verdict.passed is None
    assert "couples samples" in verdict.hint


def test_the_loss_of_routers_stays_in_the_loss_where_the_head_runs_in_chunks():
    (verdict,) = verdicts("routed", "memory-plan/chunked-loss").values()
    assert verdict.passed, verdict
    case = Case(load_workload(f"{__file__}:routed"))
    plain, chunked, dropped = (case.build() for _ in range(3))
    apply_chunked_loss(chunked, chunk_tokens=5)
    dropped.router_aux_loss_coef = 0.0
    whole, ours, without = (
        case.workload.mean_loss(module, case.batch()).item() for module in (plain, chunked, dropped)
    )
    assert ours == pytest.approx(whole, rel=1e-6)
    assert whole - without > 0.01
