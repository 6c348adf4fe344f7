"""Held bytes of each layer: by hand, against the total, and against real recompute.

python -m pytest tests/plan/test_profiler.py
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from curry_train.core.measure import measure_memory
from curry_train.plan import LayerMemory, MemoryProfiler, ProfileReport
from curry_train.primitives import recompute_blocks
from curry_train.workloads.models import BUILTIN_WORKLOADS

from ..command_runs import require_narrow
from ..plan_models import Runs, built, in_turn
from ..toy_steps import ON_DEVICES, activated, stacked
from ..unchanged import unchanged

MIB = 2**20


class Residual(nn.Module):
    """Hold the sigmoid's output (4 x 16 floats) and its own (4 x 8), which the next layer saves."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.narrow(torch.sigmoid(self.wide(x)).view(4, 16))


class Tower(nn.Module):
    """Run blocks, then the model's own tanh, which saves its output and not its input."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(x))


TOWER = {  # held bytes, and those that stay when the layer is recomputed
    "blocks.0": (256 + 128, 128),
    "blocks.1": (256 + 128, 128),
    "blocks.2": (256, 0),
    "(rest)": (128 + 4, 128 + 4),  # the tanh, and the loss
    "stem": (128, 128),
    "head": (0, 0),
}


def figures(report):
    return {layer.name: (layer.bytes, layer.boundary_bytes) for layer in report.layers}


def profile(model, batch, **options):
    return MemoryProfiler(model).profile(batch, 1, **options)


def test_held_bytes_of_every_layer_by_hand():
    report = MemoryProfiler(Tower()).profile(torch.randn(4, 8))
    # Sorted by bytes, equal ones in the model's order.
    assert [*figures(report).items()] == [*TOWER.items()]
    assert [layer.class_name for layer in report.layers][:5] == ["Residual"] * 3 + [
        "Tower",
        "Linear",
    ]


@ON_DEVICES
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_the_layers_add_up_to_what_the_model_holds_and_repeat(name, device):
    size = 4 if device == "cpu" else 32
    module, batch, loss = built(name, device=torch.device(device), batch_size=size)
    report = MemoryProfiler(module, device).profile(batch, loss=loss)
    assert report.held_bytes == sum(layer.bytes for layer in report.layers)
    assert report.held_bytes == measure_memory(module, batch, loss).held_bytes
    assert report.spread == 0 if device == "cpu" else report.spread < 0.1


@pytest.mark.parametrize("name", ["mlp", "transformer", "resnet"])
def test_recomputing_the_recommended_layers_frees_the_predicted_bytes(name):
    module, batch, loss = built(name)
    report = profile(module, batch, loss=loss)
    budget = 0.8 * report.held_bytes
    names = report.recommend_layers(budget / MIB)
    predicted = report.held_bytes - sum(
        layer.saving_bytes for layer in report.layers if layer.name in names
    )
    recompute_blocks(
        module, blocks=names, preserve_rng_state=False
    )  # the state would be 5056 bytes more on CPU
    assert measure_memory(module, batch, loss).held_bytes == predicted <= budget


def test_a_layer_that_is_recomputed_already_is_not_recommended():
    module, batch, loss = built("transformer")
    recompute_blocks(module, blocks=["layers.0", "layers.1"])
    saving = [
        layer.name for layer in profile(module, batch, loss=loss).layers if layer.saving_bytes > 0
    ]
    assert set(saving) & {f"layers.{index}" for index in range(4)} == {"layers.2", "layers.3"}


# How a model may be built and called.


def borrowing():
    """Return a model with a layer that runs a module which is registered elsewhere."""
    model = nn.Sequential(activated(8, nn.Sigmoid), nn.Identity())
    model.append(Runs(lambda own, x: torch.sigmoid(own[0](model[0](x))), nn.Linear(8, 8)))
    return model


def sharing():
    """Return a model with a layer that its blocks run, too."""
    shared = activated(8, nn.Sigmoid)
    blocks = stacked(lambda: nn.Sequential(shared, nn.Sigmoid()), 2)
    return Runs(lambda inner, x: inner[0](inner[1](x)), shared, blocks)


@pytest.mark.parametrize(
    ("build", "calls", "held"),
    [
        (
            lambda: Runs(lambda inner, x: in_turn([inner[0]] * 3, x), Residual()),
            3,
            {"inner.0": 3 * 256 + 2 * 128, "(rest)": 4},
        ),
        (borrowing, 2, {"0": 2 * 128, "2": 128, "1": 0, "(rest)": 4}),
        (sharing, 1, {"inner.1.0": 256, "inner.1.1": 256, "inner.0": 128, "(rest)": 4}),
    ],
)
def test_bytes_belong_to_the_innermost_layer_that_runs(build, calls, held):
    layers = profile(build(), torch.randn(4, 8)).layers
    assert {layer.name: layer.bytes for layer in layers} == held
    assert layers[0].calls == calls


def test_an_input_that_experts_share_is_held_once():
    def run(inner, x):
        x = inner[0](x)
        return sum(expert(x).sum() for expert in inner[1])

    experts = nn.ModuleList(nn.Sequential(nn.Sigmoid(), nn.Tanh()) for _ in range(4))
    layers = profile(Runs(run, nn.Linear(8, 8), experts), torch.randn(4, 8)).layers
    shared = [layer.boundary_bytes for layer in layers if layer.name.startswith("inner.1.")]
    assert shared == [128 + 128, 128, 128, 128]


def test_a_list_never_called_is_divided_and_a_sequential_of_called_members_not_recommended():
    def run(inner, x):
        return in_turn([*inner[0], *inner[1]], x)

    many = nn.ModuleList(activated(8, nn.Sigmoid))
    parts = nn.Sequential(*activated(8, nn.Sigmoid), *activated(8, nn.Sigmoid))
    report = profile(Runs(run, many, parts), torch.randn(4, 8))
    assert figures(report) == {
        "inner.1": (256, 256),
        "inner.0.1": (128, 256),
        "(rest)": (4, 4),
        "inner.0.0": (0, 0),
    }
    with pytest.raises(ValueError, match=r"0\.000 MiB with the 0 layers"):
        report.recommend_layers(1 / MIB)


def test_a_pattern_names_the_blocks():
    report = profile(Tower(), torch.randn(4, 8), blocks="blocks.*.wide")
    assert {layer.name for layer in report.layers} == {
        *[f"blocks.{index}.{part}" for index in range(3) for part in ("wide", "narrow")],
        "stem",
        "head",
        "(rest)",
    }


# The model is left as it was.


def test_a_model_in_eval_mode_is_profiled_as_it_trains():
    model = stacked(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout()), 2)
    assert profile(model.eval(), torch.randn(4, 8)) == profile(model.train(), torch.randn(4, 8))


# Errors.


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda _: MemoryProfiler(nn.Linear(2, 2).requires_grad_(False)),
            "Linear has no parameter that requires grad",
        ),
        (
            lambda _: MemoryProfiler(nn.Linear(2, 2), "cuda"),
            "the model is on cpu, not on cuda: move it first",
        ),
        (lambda one: one.profile(torch.ones(2, 2), 0), "num_runs must be .* got 0"),
        (
            lambda one: one.profile(torch.ones(2, 3)),
            "raised RuntimeError.*positional arguments as a tuple",
        ),
        (lambda one: one.profile({"text": 1}), "raised TypeError.*keywords as a mapping"),
        (lambda one: one.recommend_layers(1), "call profile.sample_input. first"),
        (
            lambda one: one.profile(torch.ones(2, 2), loss=lambda m, x: m(x).sum().detach()),
            "depends on no parameter",
        ),
    ],
)
def test_wrong_input_is_refused(use, message):
    with pytest.raises(ValueError, match=message):
        use(MemoryProfiler(nn.Linear(2, 2)))


def test_a_lack_of_memory_is_not_taken_for_wrong_input():
    def loss(model, sample):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        profile(nn.Linear(2, 2), torch.ones(2, 2), loss=loss)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_generators_are_unchanged(training, fails):
    model = stacked(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()), 2)
    model.train(training)
    model[0][1].eval()
    error = pytest.raises(ValueError, match="raised RuntimeError") if fails else nullcontext()
    with unchanged(model), error:
        MemoryProfiler(model).profile(torch.ones(4, 3 if fails else 8))


# Recommendations of a report, and its text.


def report_of(*layers, rest=10):
    made = [LayerMemory(name, "Block", held * MIB, stays * MIB, 1) for name, held, stays in layers]
    made.append(LayerMemory("(rest)", "Model", rest * MIB, rest * MIB, 0))
    made.sort(key=lambda layer: -layer.bytes)
    return ProfileReport("Model", "cpu", tuple(made), sum(layer.bytes for layer in made), 0.0, 1)


@pytest.mark.parametrize(
    ("budget", "names"),
    [
        (100, []),  # 100 MiB are held
        (99, ["d"]),  # saves 1, which closes the gap
        (98.5, ["c"]),  # saves 10
        (80, ["b"]),  # 25 closes the gap of 20 with fewer bytes than 40 does
        (50, ["a", "c"]),  # 40 first, because none closes 50; then the smallest that closes 10
        (24, ["a", "b", "c", "d"]),
    ],
)
def test_recommended_layers_save_as_few_bytes_as_the_budget_needs(budget, names):
    report = report_of(("a", 45, 5), ("b", 30, 5), ("c", 11, 1), ("d", 2, 1), ("e", 2, 3))
    assert report.held_bytes == 100 * MIB
    assert report.recommend_layers(budget) == names


def test_a_budget_that_nothing_fits_is_an_error_with_the_figures():
    report = report_of(("a", 45, 5), ("b", 30, 5))
    with pytest.raises(
        ValueError, match=r"holds 85\.000 MiB.*20\.000 MiB with the 2 layers.*does not fit 19 MiB"
    ):
        report.recommend_layers(19)


@pytest.mark.parametrize("budget", [0, float("nan"), float("inf"), True, "512"])
def test_an_invalid_budget_is_refused(budget):
    with pytest.raises(ValueError, match="memory_budget_mb must be a number above 0, got"):
        report_of(("a", 45, 5)).recommend_layers(budget)


def test_the_table_fits_80_columns_with_any_names():
    layers = [
        (f"model.language_model.decoder.transformer.layers.{index}", 200000 - index, 1)
        for index in range(40)
    ]
    text = report_of(*layers).table()
    require_narrow(text)
    assert "transformer.layers.7 " in text
    assert "21 smaller layers" in text
    assert report_of(("holds nothing", 0, 0), rest=0).table()
    assert len(text.splitlines()) == 23
