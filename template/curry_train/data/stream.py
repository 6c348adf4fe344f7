"""The stream of microbatches on one rank, which resumes from one integer position.

    stream = Stream(
        dataset, batch_size=64, microbatch=8, rank=rank, ranks=ranks, position=saved_position
    )
    for microbatch in stream: ...
    stream.position    # of the next window, the same on every rank and for any number of ranks

A window is one optimizer step: `batch_size` samples over all ranks, in microbatches of `microbatch`
samples each.
Proof: `python -m pytest tests/test_data_stream.py`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from .dataset import Dataset
from .order import Order

# The positions from the first one up to, but not including, the second.
Range = tuple[int, int]


class Stream:
    """An endless iterable over the microbatches of one rank.

    Ranks take the microbatches of a window in turns, so another number of ranks trains on the same
    samples. Positions inside a range of `skipped` are left out; later samples keep their positions.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        microbatch: int,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        ranks: int = 1,
        skipped: Sequence[Range] = (),
        position: int = 0,
    ) -> None:
        if microbatch < 1 or ranks < 1 or batch_size < 1 or batch_size % (microbatch * ranks):
            raise ValueError(
                f"a window of {batch_size} samples can't be cut into microbatches of {microbatch} "
                f"on {ranks} ranks: make batch_size a multiple of {microbatch} x {ranks} = "
                f"{microbatch * ranks}"
            )
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not one of {ranks} ranks, which count from 0")
        if position < 0:
            raise ValueError(f"position must be at least 0, got {position}")
        self.dataset = dataset
        self.order = Order(len(dataset), seed=seed, shuffle=shuffle)
        self.batch_size = batch_size
        self.microbatch = microbatch
        self.rank = rank
        self.ranks = ranks
        self.skipped = _merged(skipped)
        self.position = position

    @property
    def microbatches_per_window(self) -> int:
        """The number of microbatches of this rank in a window."""
        return self.batch_size // (self.microbatch * self.ranks)

    @property
    def epoch(self) -> float:
        """The number of passes over the data so far."""
        return self.position / len(self.dataset)

    def window(self, position: int) -> tuple[NDArray[numpy.int64], int]:
        """Return the positions in the window at `position`, and the start of the next window.

        The positions are those of all ranks.
        """
        stretches: list[NDArray[numpy.int64]] = []
        missing = self.batch_size
        for start, stop in [*self.skipped, (None, None)]:
            if stop is not None and stop <= position:
                continue
            length = missing if start is None else max(0, min(missing, start - position))
            stretches.append(numpy.arange(position, position + length))
            missing -= length
            position += length
            if not missing:
                break
            if stop is not None:
                position = max(position, stop)
        return numpy.concatenate(stretches), position

    def after(self, position: int, *, windows: int) -> int:
        """Return the start of the window that is `windows` windows after the one at `position`."""
        for _ in range(windows):
            position = self.window(position)[1]
        return position

    def skip(self, start: int, stop: int) -> None:
        """Leave out the positions from `start` up to `stop`, from the next window on."""
        self.skipped = _merged([*self.skipped, (start, stop)])

    def samples_between(self, start: int, stop: int) -> list[int]:
        """Return the samples at the positions from `start` up to `stop` that are not skipped."""
        positions = []
        for position in range(start, stop):
            if not any(first <= position < end for first, end in self.skipped):
                positions.append(position)
        return [int(sample) for sample in self.order(positions)]

    def samples(self, position: int) -> NDArray[numpy.int64]:
        """Return the samples of all ranks in the window that starts at `position`."""
        return self.order(self.window(position)[0])

    def __iter__(self) -> Iterator[Any]:
        """Yield microbatches without end; `position` moves with the last one of a window."""
        while True:
            positions, after = self.window(self.position)
            mine = self.order(positions).reshape(-1, self.ranks, self.microbatch)[:, self.rank]
            for number, samples in enumerate(mine, start=1):
                batch = self.dataset.batch(samples)
                if number == len(mine):
                    self.position = after
                yield batch


def _merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Return the ranges in order, with adjacent and overlapping ones merged."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if not 0 <= start < stop:
            raise ValueError(
                f"can't skip positions {start} to {stop}: the first must be at least 0 and below "
                f"the second"
            )
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)
