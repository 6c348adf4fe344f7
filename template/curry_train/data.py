"""Serve samples by position: a shuffled order, tokens from files, shared by ranks.

Proof: `python -m pytest tests/trainer`.
"""

import bisect
import functools
import itertools
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from .primitives.cross_entropy import IGNORED_TARGET
from .runs.random_state import Range, SkippedPositions

# The dataset interface: a length, and batches of chosen samples.


class Dataset(Protocol):
    """A number of samples, and batches of any of them."""

    def __len__(self) -> int: ...

    def batch(self, samples: Sequence[int]) -> Any: ...


@dataclass(frozen=True)
class Samples:
    """A map-style dataset, such as one of torch's, whose samples `default_collate` stacks."""

    source: Any

    def __post_init__(self) -> None:
        if not hasattr(self.source, "__len__"):
            raise ValueError(
                f"a dataset has a length and samples by number; got {type(self.source).__name__}"
            )

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, samples: Sequence[int]) -> Any:
        return default_collate([self.source[int(sample)] for sample in samples])


@dataclass(frozen=True)
class DatasetSlice:
    """The samples from `start` up to `stop` of a dataset, for a train and test split."""

    dataset: Dataset
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def batch(self, samples: Sequence[int]) -> Any:
        return self.dataset.batch([self.start + int(sample) for sample in samples])


def split_dev(dataset: Dataset, dev_fraction: float) -> tuple[Dataset, Dataset | None]:
    """Return the training samples, and the dev samples at the end (None without any)."""
    size = len(dataset)
    num_dev = round(size * dev_fraction)
    if dev_fraction and not 0 < num_dev < size:
        raise ValueError(
            f"data.dev_fraction={dev_fraction} of {size} samples leaves none to train on "
            "or to measure: use more data, shorter samples (data.length), or data.dev_fraction=0"
        )
    num_trained = size - num_dev
    dev = DatasetSlice(dataset, num_trained, size) if num_dev else None
    return DatasetSlice(dataset, 0, num_trained), dev


# Lay out tokens and targets as the batch that a model takes, copied from an example batch.

# Makes a batch from tokens and targets.
Layout = Callable[[Tensor, Tensor], Any]


def layout_of(example: Any) -> tuple[Layout, int]:
    """Return a layout for batches like `example`, and the length of its sequences.

    It supports batches of `tokens` and `targets`, and Hugging Face's `input_ids` and `labels`,
    which the model shifts itself.
    """
    keys = example.keys() if isinstance(example, Mapping) else set()
    if {"tokens", "targets"} <= keys:
        return (
            lambda tokens, targets: {"tokens": tokens, "targets": targets},
            example["tokens"].shape[1],
        )

    if not {"input_ids", "labels"} <= keys:
        raise ValueError(
            "text needs a model whose batches hold tokens and targets, or input_ids and labels; "
            f"this one takes {', '.join(map(str, keys)) or type(example).__name__}: use "
            "data.source=workload, or your own data with data.source=pkg.module:factory"
        )

    settings = {key: value for key, value in example.items() if not isinstance(value, Tensor)}

    def hugging_face(tokens: Tensor, targets: Tensor) -> dict[str, Any]:
        labels = torch.cat(
            [torch.full_like(targets[:, :1], IGNORED_TARGET), targets[:, :-1]], dim=1
        )
        # No token is padding.
        mask = {"attention_mask": torch.ones_like(tokens)} if "attention_mask" in keys else {}
        return settings | {"input_ids": tokens, "labels": labels} | mask

    return hugging_face, example["input_ids"].shape[1]


# Training text without a download: the sources of Python's standard library, as bytes.


def read_library_text(folder: Path | None = None) -> NDArray[numpy.uint8]:
    """Read the top-level modules of the standard library, joined in the order of their names.

    Another version of Python has different text.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    if not text:
        raise RuntimeError(
            f"{folder} holds no Python sources to train on (this interpreter has its library in an "
            "archive, or without sources): name a token file with data.source=tokens data.path=FILE"
        )
    return numpy.frombuffer(text, dtype=numpy.uint8)


# Vocabulary of text, where each byte is a token.
BYTE_VOCABULARY_SIZE = 256


# Sample order: a pure function of seed and position, reshuffled each epoch.


def ordered(
    positions: Sequence[int] | NDArray[numpy.int64],
    num_samples: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
) -> NDArray[numpy.int64]:
    """Return the samples at these positions, which count from 0 across epochs.

    Each epoch has every sample once; without `shuffle` in the dataset's order.
    """
    epochs, places = numpy.divmod(numpy.asarray(positions, dtype=numpy.int64), num_samples)
    if not shuffle:
        return places
    samples = numpy.empty_like(places)
    for epoch in numpy.unique(epochs):
        inside = epochs == epoch
        samples[inside] = _permutation(num_samples, seed, int(epoch))[places[inside]]
    return samples


@functools.lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> NDArray[numpy.int64]:
    """Return the order of an epoch, from the generator whose streams NumPy keeps for ever."""
    words = [seed >> shift & 0xFFFFFFFF for shift in (0, 32, 64)]
    return numpy.random.RandomState([*words, epoch]).permutation(size)


# The stream of microbatches on one rank, which resumes from one integer position.


class Stream(SkippedPositions):
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
        if not len(dataset):
            raise ValueError("the data has no sample to train on")
        self.dataset = dataset
        self.order = functools.partial(
            ordered, num_samples=len(dataset), seed=seed, shuffle=shuffle
        )
        self.batch_size = batch_size
        self.microbatch = microbatch
        self.rank = rank
        self.ranks = ranks
        for start, stop in skipped:
            self.skip(start, stop)
        self.position = position
        # What `saving(..., box=True)` does with each microbatch; it returns the one to use.
        self.on_batch: Callable[[Any], Any] | None = None

    @property
    def microbatches_per_window(self) -> int:
        """The number of microbatches of this rank in a window."""
        return self.batch_size // (self.microbatch * self.ranks)

    @property
    def epoch(self) -> float:
        """The number of passes over the data so far."""
        return self.position / len(self.dataset)

    def after(self, position: int, *, windows: int) -> int:
        """Return the start of the window that is `windows` windows after the one at `position`."""
        if not windows:
            return position
        return int(self.positions(position, windows * self.batch_size)[-1]) + 1

    def __iter__(self) -> Iterator[Any]:
        """Yield microbatches without end; `position` moves with the last one of a window."""
        while True:
            positions = self.positions(self.position, self.batch_size)
            mine = self.order(positions).reshape(-1, self.ranks, self.microbatch)[:, self.rank]
            for number, samples in enumerate(mine, start=1):
                batch = self.dataset.batch(samples)
                if number == len(mine):
                    self.position = int(positions[-1]) + 1
                yield batch if self.on_batch is None else self.on_batch(batch)


# Token datasets: fixed-length stretches of text, from memory or files.

Array = NDArray[Any]
# The dtype of a .bin file; an .npy file records its own.
BIN_FILE_DTYPE = numpy.dtype("uint16")


class Tokens:
    """A dataset over arrays of tokens; no sample spans two arrays."""

    def __init__(
        self,
        arrays: Sequence[Array],
        *,
        length: int,
        layout: Layout,
        vocabulary: int | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.arrays = list(arrays)
        self.length = length
        self.layout = layout
        self.vocabulary = vocabulary
        self.names = list(names or (f"array {number}" for number in range(len(self.arrays))))
        # The last token of an array is a target alone.
        counts = [max(0, (len(array) - 1) // length) for array in self.arrays]
        # The number of the first sample of each array, and of all samples.
        self._firsts = [0, *itertools.accumulate(counts)]
        if not len(self):
            raise ValueError(
                f"no array is long enough for a sample of {length} tokens and a target, the "
                f"longest has {max(map(len, self.arrays), default=0)}: use more text or a shorter "
                "length"
            )

    def __len__(self) -> int:
        return self._firsts[-1]

    def batch(self, samples: Sequence[int]) -> Any:
        """Return a batch of these samples."""
        rows = [self._sample(int(sample)) for sample in samples]
        inputs, targets = zip(*rows, strict=True)
        return self.layout(torch.stack(inputs), torch.stack(targets))

    def _sample(self, sample: int) -> tuple[Tensor, Tensor]:
        """Return the inputs of a sample and their targets."""
        number = bisect.bisect_right(self._firsts, sample) - 1
        place = sample - self._firsts[number]
        span = slice(place * self.length, (place + 1) * self.length + 1)
        tokens = self.arrays[number][span]
        if self.vocabulary is not None and (largest := int(tokens.max())) >= self.vocabulary:
            raise ValueError(
                f"{self.names[number]} has token {largest} at "
                f"{span.start + int(tokens.argmax())}, but the model's vocabulary has "
                f"{self.vocabulary} tokens: use text that was tokenized for this model"
            )
        sequence = torch.from_numpy(tokens.astype(numpy.int64))
        return sequence[:-1], sequence[1:]


def open_tokens(pattern: str, *, length: int, layout: Layout, **options: Any) -> Tokens:
    """Open the token files that match a glob, memory-mapped.

    They are `.npy` files, or `.bin` files of unsigned 16-bit numbers. `options` are those of
    `Tokens`.
    """
    root = Path(Path(pattern).anchor or ".")
    paths = sorted(root.glob(str(Path(pattern).relative_to(root))))
    if not paths:
        raise ValueError(
            f"no token file matches {pattern!r}: write one with numpy.save('data/0.npy', ids)"
        )

    arrays = [_mapped(path) for path in paths]
    return Tokens(
        arrays, length=length, layout=layout, names=[str(path) for path in paths], **options
    )


def _mapped(path: Path) -> Array:
    array: Array
    try:
        if path.suffix == ".bin":
            array = numpy.memmap(path, dtype=BIN_FILE_DTYPE, mode="r")
        else:
            array = numpy.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} holds no array that can be mapped ({error}): write it with numpy.save"
        ) from error
    if array.ndim != 1 or array.dtype.kind not in "uib":
        raise ValueError(
            f"{path} holds {array.dtype} of shape {array.shape}: tokens must be a one-dimensional "
            f"array of whole numbers"
        )
    return array
