"""The microbatches of a run on one rank, from any position; what is left to remember is one integer.

    stream = Stream(dataset, batch_size=64, microbatch=8, rank=rank, ranks=ranks, position=saved_position)
    for microbatch in stream: ...
    stream.position    # of the next window, the same on every rank and for any number of ranks

A window is one optimizer step: `batch_size` samples over all ranks, in microbatches of `microbatch` samples each.
Proof: `python -m pytest tests/test_data_stream.py`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from .dataset import Dataset
from .order import Order

Range = tuple[int, int]  # positions from the first one up to, but not including, the second


class Stream:
    """Ranks take the microbatches of a window in turns, so that another number of ranks trains on the same samples.

    Positions inside a range of `skipped` are passed over: later samples keep their positions.
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
                f"a window of {batch_size} samples can't be cut into microbatches of {microbatch} on {ranks} ranks: "
                f"make batch_size a multiple of {microbatch} x {ranks} = {microbatch * ranks}"
            )
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not one of {ranks} ranks, which count from 0")
        if position < 0:
            raise ValueError(f"position must be at least 0, got {position}")
        self.dataset, self.order = dataset, Order(len(dataset), seed=seed, shuffle=shuffle)
        self.batch_size, self.microbatch, self.rank, self.ranks = (
            batch_size,
            microbatch,
            rank,
            ranks,
        )
        self.skipped, self.position = _merged(skipped), position

    @property
    def microbatches_per_window(self) -> int:
        """Of this rank."""
        return self.batch_size // (self.microbatch * self.ranks)

    @property
    def epoch(self) -> float:
        """How often the data have been gone through."""
        return self.position / len(self.dataset)

    def window(self, position: int) -> tuple[NDArray[numpy.int64], int]:
        """The positions of the samples of all ranks in the window that begins at `position`, and where the next one
        begins."""
        parts: list[NDArray[numpy.int64]] = []
        missing = self.batch_size
        for start, stop in [*self.skipped, (None, None)]:
            if stop is not None and stop <= position:
                continue
            room = missing if start is None else max(0, min(missing, start - position))
            parts.append(numpy.arange(position, position + room))
            missing, position = missing - room, position + room
            if not missing:
                break
            if stop is not None:
                position = max(position, stop)
        return numpy.concatenate(parts), position

    def after(self, position: int, *, windows: int) -> int:
        """Where the window begins that comes so many windows after the one at `position`."""
        for _ in range(windows):
            position = self.window(position)[1]
        return position

    def skip(self, start: int, stop: int) -> None:
        """Pass over these positions as well, from the next window on."""
        self.skipped = _merged([*self.skipped, (start, stop)])

    def samples_between(self, start: int, stop: int) -> list[int]:
        """The samples at these positions that are not skipped."""
        held = [
            place
            for place in range(start, stop)
            if not any(low <= place < high for low, high in self.skipped)
        ]
        return [int(sample) for sample in self.order(held)]

    def samples(self, position: int) -> NDArray[numpy.int64]:
        """The samples of all ranks in the window that begins at `position`."""
        return self.order(self.window(position)[0])

    def __iter__(self) -> Iterator[Any]:
        """Without an end. `position` moves on with the last microbatch of a window."""
        while True:
            positions, after = self.window(self.position)
            mine = self.order(positions).reshape(-1, self.ranks, self.microbatch)[:, self.rank]
            for number, samples in enumerate(mine, start=1):
                batch = self.dataset.batch(samples)
                if number == len(mine):
                    self.position = after
                yield batch


def _merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """In order, those that touch as one."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if not 0 <= start < stop:
            raise ValueError(
                f"can't skip positions {start} to {stop}: the first must be at least 0 and below the second"
            )
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)
