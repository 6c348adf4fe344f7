"""Where a step can keep state: what is searched, recorded, compared and restored.

python -m pytest tests/primitives/test_hidden_state.py
"""

import functools
from collections import deque, namedtuple

import pytest
import torch
from torch import nn

from curry_train.primitives.hidden_state import (
    HiddenState,
    ValueSnapshot,
    check_step,
    code_of,
    contents_of,
    fill,
    holders_of,
    roots_of,
    take_step,
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


def test_the_same_code_has_the_same_key_however_it_is_called():
    cell = Cell()
    assert code_of(cell.step) is code_of(Cell().step) is Cell.step.__code__
    assert code_of(functools.partial(functools.partial(cell.step), state=1)) is Cell.step.__code__
    assert code_of(lambda x, state: 0) is not code_of(lambda x, state: 0)
    assert code_of(cell) is Cell


def test_holders_are_found_through_methods_partials_and_variables():
    cell = Cell()
    other = Counter()

    def step(x, state):
        return cell.step(x, state), other

    found = holders_of(step)
    assert list(found) == ["step", "cell", "other", "cell.layer"]
    assert [found["cell"], found["other"]] == [cell, other]
    assert roots_of(functools.partial(cell.step, state=1)) == {"": cell}
    assert list(holders_of(step, submodules=False)) == ["step", "cell", "other"]


def test_a_function_behind_three_others_is_the_last_that_is_searched():
    cell = Cell()

    def nested(depth):
        if depth == 0:
            return lambda: cell
        inner = nested(depth - 1)
        return lambda: inner

    assert cell in holders_of(nested(2)).values()
    assert cell not in holders_of(nested(3)).values()


@pytest.mark.parametrize(
    ("value", "contents"),
    [
        ([1, 2], {0: 1, 1: 2}),
        ((1,), {0: 1}),
        (deque([3]), {0: 3}),
        ({"a": 1}, {"a": 1}),
        (torch.ones(2), None),
        (5, None),
    ],
)
def test_containers_hold_their_entries_and_nothing_else_does(value, contents):
    assert contents_of(value) == contents


def test_values_that_were_changed_replaced_added_and_deleted_are_put_back():
    cell = Cell()
    counter = cell.counter
    cell.pairs = {"one": Pair([1], torch.ones(2))}
    cell.gone = 1
    before = ValueSnapshot({"cell": cell, "counter": counter})
    trace = cell.trace
    cell.trace.add_(5)
    cell.history.append("x")
    cell.pairs["one"].low.append(2)
    cell.pairs["two"] = 2
    cell.added = 1
    del cell.gone
    counter.count = 7
    after = ValueSnapshot({"cell": cell, "counter": counter})
    assert set(before.changed(after)) == {
        ("cell", "trace"),
        ("cell", "history"),
        ("cell", "pairs"),
        ("cell", "gone"),
        ("cell", "added"),
        ("cell", "counter"),
        ("counter", "count"),
    }
    before.put_back()
    assert cell.trace is trace
    assert torch.equal(trace, torch.zeros(2))
    assert (cell.history, cell.gone, counter.count) == ([], 1, 0)
    assert list(cell.pairs) == ["one"]
    assert cell.pairs["one"].low == [1]
    assert not hasattr(cell, "added")


def test_values_are_rebuilt_with_a_change_and_share_nothing_with_the_original():
    cell = Cell()
    cell.pairs = [Pair(1, torch.ones(2)), (2, {"a": 3})]
    rebuilt = ValueSnapshot({"cell": cell}).rebuilt(
        [("cell", "pairs"), ("cell", "none")], lambda value: value + 1
    )
    (key,) = rebuilt
    assert key == ("cell", "pairs")
    pair, (number, inner) = rebuilt[key]
    assert type(pair) is Pair
    assert pair.low == 2
    assert torch.equal(pair.high, torch.full((2,), 2.0))
    assert (number, inner) == (3, {"a": 4})
    assert cell.pairs[1] == (2, {"a": 3})


def test_a_long_container_is_recorded_by_its_length():
    cell = Cell()
    cell.history = list(range(1001))
    before = ValueSnapshot({"cell": cell})
    cell.history[0] = "other"
    assert before.changed(ValueSnapshot({"cell": cell})) == []
    cell.history.append(1)
    assert before.changed(ValueSnapshot({"cell": cell})) == [("cell", "history")]


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


def test_filling_with_the_same_contents_changes_nothing():
    history = deque([1, 2], maxlen=2)
    fill(history, {0: 1, 1: 2, 2: 3})
    assert history == deque([2, 3])
    shared = {"a": 1}
    fill(shared, dict(shared))
    fill(shared, {"b": 2})
    assert shared == {"b": 2}


@pytest.mark.parametrize("returned", [(1,), (1, 2, 3), 4, "ab"])
def test_a_step_returns_a_pair(returned):
    with pytest.raises(ValueError, match="step must return a pair"):
        take_step(lambda x, state: returned, 0, 0)
    assert take_step(lambda x, state: [x, state], 1, 2) == (1, 2)


TIMESTEPS = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).unbind()


def test_a_state_that_is_not_a_number_anywhere_is_sound():
    layer = nn.Linear(2, 2)

    def step(x, state):
        return layer(x), torch.stack([state[0] * x[0] / 0 * 0, layer(state)[1]])

    assert check_step(step, TIMESTEPS, torch.zeros(2)) == set()


def test_a_state_that_is_passed_through_is_sound():
    layer = nn.Linear(2, 2)
    assert check_step(lambda x, state: (layer(x), state), TIMESTEPS, torch.zeros(2)) == set()


class Silent(torch.autograd.Function):
    """A neuron that never spikes, with a gradient as if it did."""

    @staticmethod
    def forward(ctx, potential):
        return torch.zeros_like(potential)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_value_that_only_gradients_reach_is_refused():
    cell = Cell()
    cell.potential = torch.zeros(2)

    def step(x, state):
        cell.potential = cell.potential + cell.layer(x)
        return Silent.apply(cell.potential), cell.layer(state)

    with pytest.raises(HiddenState, match="attribute 'potential'"):
        check_step(step, TIMESTEPS, torch.zeros(2))


def test_a_counter_that_is_only_counted_is_restored_and_named():
    cell = Cell()

    def step(x, state):
        cell.counter.count += 1
        return cell.step(x, cell.layer(state))

    assert check_step(step, TIMESTEPS, torch.zeros(2)) == {"cell"}
    assert cell.counter.count == 0


def test_a_counter_that_takes_effect_every_tenth_time_is_refused():
    cell = Cell()

    def step(x, state):
        cell.number = getattr(cell, "number", 0) + 1
        output, state = cell.step(x, cell.layer(state))
        return output * (cell.number % 10 == 0), state

    with pytest.raises(HiddenState, match="attribute 'number'") as caught:
        check_step(step, TIMESTEPS, torch.zeros(2))
    assert (caught.value.module, caught.value.attribute) == ("cell", "number")
    assert not hasattr(cell, "number")
