"""Sample order: a pure function of seed and position, reshuffled each epoch.

    order = Order(num_samples=1_000_000, seed=0)
    order([0, 1, 2])          # the first three samples of the run
    order([5_000_000])        # computed directly, without a table: every position costs the same

There is no state, so the position in the data is one integer for any number of ranks. A Feistel
network over the next power of four permutes the positions, repeatedly until they are below the
number of samples.
Proof: `python -m pytest tests/test_data_order.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

# Three rounds are the least that mix in a Feistel network; a test measures the order after four.
ROUNDS = 4


@dataclass(frozen=True)
class Order:
    """An order with every sample once in each epoch; `shuffle=False` keeps the dataset's order."""

    num_samples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {self.num_samples}")

    def __call__(self, positions: Sequence[int] | NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        """Return the samples at these positions, which count from 0 across epochs."""
        wanted = numpy.asarray(positions, dtype=numpy.int64)
        if wanted.size and wanted.min() < 0:
            raise ValueError(f"positions count from 0, got {wanted.min()}")
        epochs, places = numpy.divmod(wanted, self.num_samples)
        if not self.shuffle:
            return places
        samples = numpy.empty_like(places)
        for epoch in numpy.unique(epochs):
            inside = epochs == epoch
            keys = _round_keys(self.seed, int(epoch))
            samples[inside] = permute(places[inside], self.num_samples, keys=keys)
        return samples


def permute(
    places: NDArray[numpy.int64], size: int, *, keys: NDArray[numpy.uint64]
) -> NDArray[numpy.int64]:
    """Return the values at these places of a permutation of `range(size)`."""
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    values = places.astype(numpy.uint64)
    outside = numpy.ones(values.shape, dtype=bool)

    # At most three of four values are outside of the range. The loop ends, because the network is
    # a permutation: applied again and again, it returns to the place inside the range.
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys)
        outside = values >= size
    return values.astype(numpy.int64)


def _feistel(
    values: NDArray[numpy.uint64], half: int, keys: NDArray[numpy.uint64]
) -> NDArray[numpy.uint64]:
    bits = numpy.uint64(half)
    mask = numpy.uint64((1 << half) - 1)
    left = values >> bits
    right = values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << bits) | right


def _round_keys(seed: int, epoch: int) -> NDArray[numpy.uint64]:
    """Return one key for each round, different for every seed and epoch."""
    start = _mixed(numpy.array([seed % 2**64], dtype=numpy.uint64))
    start = _mixed(start + numpy.uint64(epoch))
    return _mixed(start + numpy.array(range(1, ROUNDS + 1), dtype=numpy.uint64))


def _mixed(values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    """Mix all bits of each value with the finalizer of the splitmix64 generator."""
    values = values + numpy.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return values ^ (values >> numpy.uint64(31))
