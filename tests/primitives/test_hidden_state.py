"""Where a step can keep state: what is searched, recorded, compared and restored.

python -m pytest tests/primitives/test_hidden_state.py
"""

from collections import namedtuple

import torch
from torch import nn

from curry_train.primitives.hidden_state import (
    ValueSnapshot,
    check_step,
)

Pair = namedtuple("Pair", ["low", "high"])


class Counter:
    def __init__(self):
        self.count = 0


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("trace", torch.zeros(2))
        self.history = []
        self.counter = Counter()

    def step(self, x, state):
        return self.layer(x), state + x


def test_containers_that_hold_themselves_and_deep_ones_are_recorded_to_a_depth():
    cell = Cell()
    cell.loop = []
    cell.loop.append(cell.loop)
    cell.deep = [[[[[[0]]]]]]
    before = ValueSnapshot({"cell": cell})
    cell.deep[0][0][0][0][0][0] = 1
    assert before.changed(ValueSnapshot({"cell": cell})) == []
    cell.deep[0][0][0][0] = 1
    assert before.changed(ValueSnapshot({"cell": cell})) == [("cell", "deep")]


TIMESTEPS = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).unbind()


def test_a_state_that_is_not_a_number_anywhere_is_sound():
    layer = nn.Linear(2, 2)

    def step(x, state):
        return layer(x), torch.stack([state[0] * x[0] / 0 * 0, layer(state)[1]])

    assert check_step(step, TIMESTEPS, torch.zeros(2)) == set()


def test_a_state_that_is_passed_through_is_sound():
    layer = nn.Linear(2, 2)
    assert check_step(lambda x, state: (layer(x), state), TIMESTEPS, torch.zeros(2)) == set()


def test_a_counter_that_is_only_counted_is_restored_and_named():
    cell = Cell()

    def step(x, state):
        cell.counter.count += 1
        return cell.step(x, cell.layer(state))

    assert check_step(step, TIMESTEPS, torch.zeros(2)) == {"cell"}
    assert cell.counter.count == 0
