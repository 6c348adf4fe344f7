"""Tests of the same model with fewer layers.

Run: `python -m pytest tests/workloads/test_shrink.py`.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from curry_train.workloads import WorkloadError, load_workload
from curry_train.workloads.shrink import Shrink

from ..language_models import language_model
from ..plan_models import Runs, in_turn, squares
from ..toy_steps import stacked


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return x


class Config:
    def __init__(self, num_layers):
        self.num_layers = num_layers
        self.kinds = ["even", "odd"] * (num_layers // 2)


class Configured(Runs):
    num_built = 0

    def __init__(self, config):
        super().__init__(in_turn, *(Block(4) for _ in config.kinds))
        type(self).num_built += config.num_layers
        self.config = config


def test_a_model_with_a_configuration_is_built_with_fewer_layers():
    ids = torch.arange(32).reshape(2, 16)

    def factory():
        return language_model("GPT2", num_hidden_layers=8), {"input_ids": ids, "labels": ids}

    module, batch = Shrink(2).factory(factory)()
    assert len(module.transformer.h) == module.config.n_layer == 2
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())
    assert batch["input_ids"] is ids
    module(**batch).loss.backward()
    # Torch copies a parametrized module by its own `__new__`.
    copy.deepcopy(spectral_norm(nn.Linear(2, 2)))


def test_lists_of_a_configuration_get_shorter_and_weights_are_made_once():
    shrink = Shrink(2)
    small = shrink.factory(lambda: Configured(Config(num_layers=6)))
    first, again = small(), small()
    assert first.config.kinds == ["even", "odd"]
    assert Configured.num_built == 6 + 2
    assert "Configured with 2 of 6 layers, by num_layers of its Config;" in shrink.note
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one is not other


def test_what_a_factory_does_to_its_model_stays():
    module = Shrink(2).factory(lambda: Configured(Config(num_layers=6)).requires_grad_(False))()
    assert len(module.inner) == 2
    assert not any(parameter.requires_grad for parameter in module.parameters())


class Indexed(Configured):
    def forward(self, x):
        for number in range(self.config.num_layers):
            x = self.inner[number](x)
        return x


WEIGHTS = Indexed(Config(num_layers=6)).state_dict()


def loads_all_weights(module):
    module.load_state_dict(WEIGHTS)


def reads_each_layer(module):
    for number in range(6):
        module.inner[number].requires_grad_(number > 0)


@pytest.mark.parametrize("use", [loads_all_weights, reads_each_layer])
def test_a_factory_that_needs_all_layers_gets_them_and_the_first_and_last_stay(use):
    config = Config(num_layers=6)

    def factory():
        module = Indexed(config)
        use(module)
        return module

    shrink = Shrink(2)
    module = shrink.factory(factory)()
    assert len(module.inner) == module.config.num_layers == 2
    module(torch.ones(2, 4)).sum().backward()
    assert "2 of 6 Block: the first and last" in shrink.note


def test_a_factory_that_raises_anyway_raises_its_own_error():
    def factory():
        raise KeyError(len(Indexed(Config(num_layers=6)).inner))

    with pytest.raises(KeyError, match="6"):
        Shrink(2).factory(factory)()


def test_of_a_model_without_configuration_the_first_and_last_blocks_stay():
    stages = nn.Sequential(*[Block(4) for _ in range(5)], nn.Linear(4, 8), *[Block(8)] * 3)
    marked = stages[4]
    shrink = Shrink(2)
    module = shrink.factory(lambda: stages)()
    assert [type(layer).__name__ for layer in module] == [
        "Block",
        "Block",
        "Linear",
        "Block",
        "Block",
    ]
    assert len(module[0].inner) == 3  # of a block that stays nothing is cut
    torch.testing.assert_close(module[1].inner[0].weight, marked.inner[0].weight)
    assert "2 of 5 Block, 2 of 3 Block" in shrink.note


def test_a_workload_is_shrunk_by_its_own_build():
    small = Shrink(1).factory(lambda: squares(lambda: stacked(lambda: Block(4), 4), 4))()
    assert len(small.build()) == 1
    assert "1 of 4 Block" in small.notes[0]


def test_a_builtin_model_is_loaded_smaller_by_its_text():
    small = load_workload("shrink=2:transformer")
    assert small.spec == "shrink=2:transformer"
    assert sum(type(one).__name__ == "Block" for one in small.build().modules()) == 2


def test_a_model_that_repeats_nothing_is_an_error():
    with pytest.raises(WorkloadError, match="no ModuleList or Sequential with more than 2 equal"):
        Shrink(2).factory(lambda: nn.Linear(4, 4))()
