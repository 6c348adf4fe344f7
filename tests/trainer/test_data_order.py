"""The order of samples: a permutation per epoch, computed from seed and position.

Run with `python -m pytest tests/trainer/test_data_order.py`.
"""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curry_train.data import Order


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_every_epoch_has_every_sample_once(size, seed, epoch):
    found = Order(size, seed=seed)(numpy.arange(epoch * size, (epoch + 1) * size))
    assert sorted(found) == list(range(size))


def test_a_position_has_the_same_sample_in_any_range():
    order = Order(1000, seed=3)
    positions = numpy.arange(5000)
    together = order(positions)
    alone = [int(order([position])[0]) for position in positions[::97]]
    assert alone == together[::97].tolist()


def test_order_of_a_seed_never_changes():
    """Keep the order, so that a run resumed with a later version sees the same samples."""
    assert Order(100, seed=0)(range(10)).tolist() == [17, 69, 51, 12, 86, 31, 40, 19, 74, 58]
    assert Order(100, seed=0)(range(100, 110)).tolist() == [70, 69, 82, 30, 89, 39, 96, 95, 27, 58]
    assert Order(10**9, seed=7)([0, 123_456_789, 10**12]).tolist() == [
        412257092,
        242325257,
        426953696,
    ]


def test_epochs_and_seeds_differ():
    orders = {
        tuple(Order(50, seed=seed)(range(epoch * 50, epoch * 50 + 50)))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_neighbours_are_separated_and_every_place_is_equally_likely():
    """Expect about two of 10,000 samples to keep a neighbour, and even places."""
    size = 10_000
    found = Order(size, seed=1)(numpy.arange(size))
    neighbours = (numpy.abs(numpy.diff(found)) == 1).sum()
    assert neighbours <= 12  # 2 on average; 12 has a chance below one in 100,000
    quarters = numpy.histogram2d(numpy.arange(size), found, bins=4)[0]
    assert abs(quarters - size / 16).max() < 6 * (size / 16) ** 0.5
    assert abs(numpy.corrcoef(numpy.arange(size), found)[0, 1]) < 0.05


def test_unshuffled_data_keeps_its_order():
    assert Order(3, shuffle=False)(range(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_empty_data_and_negative_positions_are_refused():
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        Order(0)
    with pytest.raises(ValueError, match="positions count from 0, got -1"):
        Order(5)([-1])
