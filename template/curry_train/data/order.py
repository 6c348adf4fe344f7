"""Which sample comes at which position: a pure function of the seed and the position, shuffled anew each epoch.

    order = Order(num_samples=1_000_000, seed=0)
    order([0, 1, 2])          # the first three samples of the run
    order([5_000_000])        # at once, and without a table: any position costs the same

Nothing is kept, so the place in the data is one integer, whatever the number of ranks. Positions are scrambled by a
Feistel network over the next power of four, and again until they fall among the samples.
Proof: `python -m pytest tests/test_data_order.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

ROUNDS = 4  # three are the least that mix a Feistel network; the test looks at what four leave


@dataclass(frozen=True)
class Order:
    """Each epoch has every sample once; `shuffle=False` takes them as they stand."""

    num_samples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"there are {self.num_samples} samples: an order needs at least one")

    def __call__(self, positions: Sequence[int] | NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        """The samples at these positions, which count from 0 and go on through the epochs."""
        wanted = numpy.asarray(positions, dtype=numpy.int64)
        if wanted.size and wanted.min() < 0:
            raise ValueError(f"positions count from 0, got {wanted.min()}")
        epochs, places = numpy.divmod(wanted, self.num_samples)
        if not self.shuffle:
            return places
        samples = numpy.empty_like(places)
        for epoch in numpy.unique(epochs):
            inside = epochs == epoch
            samples[inside] = permute(
                places[inside], self.num_samples, keys=_round_keys(self.seed, int(epoch))
            )
        return samples


def permute(
    places: NDArray[numpy.int64], size: int, *, keys: NDArray[numpy.uint64]
) -> NDArray[numpy.int64]:
    """A permutation of `range(size)` at these places."""
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    found = places.astype(numpy.uint64)
    outside = numpy.ones(found.shape, dtype=bool)
    while (
        outside.any()
    ):  # at most three of four values are outside, and each walk ends, because the network permutes
        found[outside] = _feistel(found[outside], half, keys)
        outside = found >= size
    return found.astype(numpy.int64)


def _feistel(
    values: NDArray[numpy.uint64], half: int, keys: NDArray[numpy.uint64]
) -> NDArray[numpy.uint64]:
    bits, mask = numpy.uint64(half), numpy.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << bits) | right


def _round_keys(seed: int, epoch: int) -> NDArray[numpy.uint64]:
    """A key for each round, other ones for every seed and epoch."""
    start = _mixed(numpy.array([seed % 2**64], dtype=numpy.uint64))
    start = _mixed(start + numpy.uint64(epoch))
    return _mixed(start + numpy.array(range(1, ROUNDS + 1), dtype=numpy.uint64))


def _mixed(values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    """Every bit of the result depends on every bit of the value: the finalizer of the generator splitmix64."""
    values = values + numpy.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return values ^ (values >> numpy.uint64(31))
