"""Find the blocks that a model repeats, and select modules by pattern.

python -m pytest tests/core/test_blocks.py
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from curry_train.core.blocks import NoBlocks, find_blocks, tensors_in
from curry_train.workloads import load_workload

from ..language_models import language_model
from ..peers.peer_table import Block
from ..toy_steps import stacked


def encoder_and_decoder():
    model = nn.Module()
    model.encoder = nn.ModuleList(Block() for _ in range(2))
    model.decoder = nn.ModuleDict({"a": Block(), "b": Block()})
    return model


def stages(*depths):
    return nn.Sequential(*(stacked(Block, depth) for depth in depths))


@pytest.mark.parametrize(
    ("build", "blocks"),
    [
        # Block 10 is not inside of block 1.
        (lambda: stacked(Block, 11), [str(number) for number in range(11)]),
        (load_workload("resnet").build, [f"1.{number}" for number in range(6)]),
        (lambda: language_model("Llama"), ["model.layers.0", "model.layers.1"]),
        (lambda: stages(3, 3), ["0", "1"]),
        (lambda: stages(2, 3), ["0.0", "0.1", "1.0", "1.1", "1.2"]),
        (encoder_and_decoder, ["encoder.0", "encoder.1", "decoder.a", "decoder.b"]),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 2)),
            ["1", "2"],
        ),
        # Recurrent layers are single layers that keep every step.
        (
            lambda: nn.Sequential(*[nn.LSTM(4, 4) for _ in "01"], *[nn.GRU(4, 4) for _ in "23"]),
            ["0", "1", "2", "3"],
        ),
    ],
)
def test_blocks_are_the_outermost_modules_that_repeat(build, blocks):
    module = build()
    found = find_blocks(module)
    assert list(found) == blocks
    assert all(module.get_submodule(name) is block for name, block in found.items())


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        # One block, and blocks without parameters.
        nn.Sequential(Block(), nn.Linear(4, 2)),
        nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())),
    ],
)
def test_a_model_without_repeats_raises_an_error_that_lists_modules_to_name(model):
    with pytest.raises(
        ValueError,
        match=r"repeats no block in a ModuleList or Sequential that .* name the blocks.*--blocks",
    ):
        find_blocks(model)


def test_single_layers_are_not_blocks_and_the_message_gives_the_reason():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    with pytest.raises(NoBlocks, match=r"would save more than its input"):
        find_blocks(model)
    assert list(find_blocks(model, "layers.*")) == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]  # named, they are taken
    model.blocks = nn.ModuleList([Block(), Block()])
    assert list(find_blocks(model)) == ["blocks.0", "blocks.1"]


def test_a_pattern_selects_the_outermost_matching_modules():
    module = load_workload("transformer").build()
    assert list(find_blocks(module, "layers.[12]")) == ["layers.1", "layers.2"]
    assert list(find_blocks(module, "layers.*.feed_forward")) == [
        f"layers.{i}.feed_forward" for i in range(4)
    ]
    assert list(find_blocks(module, "layers.0*")) == ["layers.0"]
    assert list(find_blocks(module, ["layers.3", "layers.0.attention"])) == [
        "layers.0.attention",
        "layers.3",
    ]


def test_a_pattern_without_a_match_raises_an_error_that_lists_the_names():
    module = load_workload("snn").build()
    with pytest.raises(
        ValueError, match=r"the pattern 'nothing' matches no module; there are layers, layers\.0"
    ):
        find_blocks(module, iter(["layers.*", "nothing"]))
    for wrong in (module.layers, 3):
        with pytest.raises(ValueError, match=r"patterns of names, .*got (ModuleList|int)$"):
            find_blocks(module, wrong)


@dataclass
class Node:
    value: Any
    others: list["Node"] = field(default_factory=list)


def test_tensors_are_found_in_dataclasses_that_refer_to_each_other():
    first, second, third = torch.ones(1), torch.ones(2), torch.ones(3)
    one = Node(first)
    two = Node({"inside": (second, "text")}, [one])
    one.others.append(two)
    found = list(tensors_in([two, Node, third]))
    assert [len(tensor) for tensor in found] == [2, 1, 3]
    assert all(any(tensor is one for one in (first, second, third)) for tensor in found)
