"""Tests of the SAC gates, on our and others' policies, right and wrong.

python -m pytest tests/gates/test_sac.py
"""

import random

import pytest
import torch
from faulty_sac import squared
from saboteurs import case_of, faults
from torch import nn

from curry_train.gates import sac
from curry_train.gates.implementation import load_implementation
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case

GATES = {gate.name: gate for gate in sac.GATES}


def stack(block, num_blocks=3):
    return lambda: nn.Sequential(*[block() for _ in range(num_blocks)])


class Dense(nn.Module):
    """A block that appends to the list it gets, where torch's SAC raises."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, before):
        before.append(self.layers(self.norm(torch.cat(before, -1))))
        return before


class DenseModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Dense(8 * (depth + 1)) for depth in range(3))

    def forward(self, x):
        outputs = [x]
        for block in self.blocks:
            outputs = block(outputs)
        return torch.cat(outputs, -1)


class Block(nn.Module):
    """A block that refuses batches of one sample, runs in training alone, or is left out."""

    def __init__(self, *, trains_only=False, drops=None, statistics=False):
        super().__init__()
        self.norm = nn.BatchNorm1d(8) if statistics else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.trains_only = trains_only
        self.drops = drops

    def forward(self, x):
        if self.trains_only and not self.training:
            raise RuntimeError("no weights to infer with")
        if self.drops and self.training and self.drops() < 0.5:
            return x
        return x + self.layers(self.norm(x))


class Dropping(nn.Module):
    """A model that leaves out blocks at random in training."""

    def __init__(self, draw):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.draw = draw

    def forward(self, x):
        for block in self.blocks:
            if not (self.training and self.draw() < 0.5):
                x = block(x)
        return x


class Shared(nn.Module):
    """A model whose blocks share a weight under autocast, which casts it once for all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, bias=False), nn.SiLU()) for _ in range(3)
        )
        for layer in self.layers:
            layer[0].weight = self.layers[0][0].weight

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            for layer in self.layers:
                x = layer(x)
        return x.float()


class UsesALayerOfABlock(nn.Module):
    """A model that calls a layer of a block once more, outside of the block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        layers = self.blocks[0].layers
        for block in self.blocks:
            x = block(x)
        return x + layers[2](layers[0](x))


def compiled_blocks():
    model = stack(Block)()
    for block in model:
        block.compile(backend="eager")
    return model


# Of each model: gates that do not apply, and a part of the reason. All others hold.
MODELS = {
    "a list that grows": (DenseModel, {}),
    "batch norm": (stack(lambda: Block(statistics=True)), {}),
    "a shared weight": (Shared, {}),
    "a layer of a block": (UsesALayerOfABlock, {}),
    "lone layers": (stack(lambda: nn.Linear(8, 8)), dict.fromkeys(GATES, "lone layers")),
    "no eval mode": (
        stack(lambda: Block(trains_only=True)),
        {"sac/off": "raises RuntimeError in eval mode: no weights to infer with"},
    ),
    "compiled": (lambda: torch.compile(stack(Block)(), backend="aot_eager"), {}),
    "compiled blocks": (compiled_blocks, dict.fromkeys(GATES, "0: Block is compiled already")),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_gates_hold_or_do_not_apply_for_a_reason(name):
    build, reasons = MODELS[name]
    case = Case(squared(name, build, 8), batch_size=16)
    verdicts = {name: gate.run(case) for name, gate in GATES.items()}
    for name, verdict in verdicts.items():
        assert verdict.passed is (None if name in reasons else True), verdict
        assert reasons.get(name, "") in verdict.hint, verdict


@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name):
    for gate in GATES.values():
        verdict = gate.run(Case(load_workload(name)))
        assert verdict.passed in ((True,) if name == "transformer" else (True, None)), verdict


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_hold_with_dropout_in_both_precisions(device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    case = Case(transformer(dropout=0.1, depth=2), device=torch.device(device), dtype=dtype)
    for gate in GATES.values():
        verdict = gate.run(case)
        assert verdict.passed is not False, verdict


@pytest.mark.parametrize("generator", [torch, random])
def test_a_model_that_drops_all_layers_while_bytes_are_counted_does_not_fail(generator):
    draw = {torch: lambda: torch.rand(()), random: random.random}[generator]
    set_seed = {torch: torch.manual_seed, random: random.seed}[generator]
    model = Dropping(draw)

    def drops_all(seed):
        set_seed(seed)
        return all(draw() < 0.5 for _ in model.blocks)

    set_seed(next(filter(drops_all, range(1000))))
    case = Case(squared("dropping", lambda: Dropping(draw), 8), batch_size=16)
    for gate in GATES.values():
        verdict = gate.run(case)
        assert verdict.passed is not False, verdict


# Implementations of others.


def verdicts_of(function, case):
    given = [load_implementation(f"apply_sac=foreign_sac:{function}")]
    return {name: gate.run(case, given) for name, gate in GATES.items() if gate.takes}


@pytest.mark.parametrize("model", ["small", "dropout", "mlp"])
@pytest.mark.parametrize("function", ["save_products", "every_second_product"])
def test_selective_checkpointing_by_torch_passes(function, model):
    verdicts = verdicts_of(function, case_of(model))
    assert list(verdicts) == ["sac/parity-sac", "sac/products", "sac/off"]
    for verdict in verdicts.values():
        assert verdict.passed, verdict


def test_an_implementation_is_checked_where_ours_refuses_the_model():
    draws = stack(lambda: Block(drops=lambda: torch.rand(())))
    case = Case(squared("skipping", draws, 8), batch_size=16)
    assert "saves no output" in GATES["sac/parity-sac"].run(case).hint
    assert verdicts_of("save_products", case)["sac/parity-sac"].passed


@pytest.mark.parametrize("saboteur", faults("faulty_sac"), ids=str)
def test_gate_catches(saboteur):
    saboteur.check()
