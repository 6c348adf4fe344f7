"""Token datasets: fixed-length stretches of text, or documents, from memory or files.

    data = open_tokens("data/*.npy", length=1024, layout=layout)
    data = Tokens([array], length=1024, layout=layout, masks=[answers], documents=[starts])

A sample of `length` tokens has as many targets, each of them the next token. A target is left out
of the loss where the mask is 0, and past the end of a shorter document.
Proof: `python -m pytest tests/test_data_tokens.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from ..core.adapt import IGNORED
from .layout import Layout

Array = NDArray[Any]
# The dtype of a .bin file; an .npy file records its own.
RAW = numpy.dtype("uint16")


class Tokens:
    """A dataset over arrays of tokens; no sample spans two arrays.

    `documents` holds the start positions of the documents in each array; a long document becomes
    several samples. `masks` holds a 1 for every token of each array that counts in the loss.
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        *,
        length: int,
        layout: Layout,
        documents: Sequence[Array] | None = None,
        masks: Sequence[Array] | None = None,
        vocabulary: int | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1 token, got {length}")
        self.arrays = list(arrays)
        self.length = length
        self.layout = layout
        self.masks = masks
        self.vocabulary = vocabulary
        self.names = list(names or (f"array {number}" for number in range(len(self.arrays))))
        for number, name in enumerate(self.names):
            if masks is not None and len(masks[number]) != len(self.arrays[number]):
                raise ValueError(
                    f"{name} has {len(self.arrays[number])} tokens, but its mask has "
                    f"{len(masks[number])}: write a mask of the same length"
                )

        starts = [self._starts(number, documents) for number in range(len(self.arrays))]
        self._starts_of = starts
        self._ends = numpy.cumsum([len(begin) for begin, _ in starts])
        if not len(self):
            sizes = ", ".join(
                f"{name} {len(array)}" for name, array in zip(self.names, self.arrays, strict=True)
            )
            raise ValueError(
                f"no array is long enough for a sample of {length} tokens and a target: "
                f"{sizes or 'no files'}; use more text or a shorter length"
            )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def batch(self, samples: Sequence[int]) -> Any:
        """Return a batch of these samples, padded to the longest of them."""
        rows = [self._sample(int(sample)) for sample in samples]
        longest = max(len(tokens) for tokens, _ in rows) - 1
        inputs = torch.zeros(len(rows), longest, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORED)
        present = torch.zeros_like(inputs, dtype=torch.bool)

        for row, (tokens, learned) in enumerate(rows):
            sequence = torch.from_numpy(tokens.astype(numpy.int64))
            size = len(sequence) - 1
            inputs[row, :size] = sequence[:-1]
            present[row, :size] = True
            row_targets = sequence[1:]
            if learned is not None:
                row_targets = row_targets.masked_fill(~learned, IGNORED)
            targets[row, :size] = row_targets
        return self.layout(inputs, targets, present)

    def _starts(
        self, number: int, documents: Sequence[Array] | None
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the start of every sample of an array, and the end of its last target."""
        size = len(self.arrays[number])
        if documents is None:
            count = max(0, (size - 1) // self.length)
            begins = range(0, count * self.length, self.length)
            return begins, range(self.length + 1, (count + 1) * self.length + 1, self.length)

        edges = numpy.append(numpy.asarray(documents[number], dtype=numpy.int64), size)
        if edges[0] < 0 or (numpy.diff(edges) < 0).any():
            raise ValueError(
                f"the documents of {self.names[number]} must begin in rising order inside its "
                f"{size} tokens"
            )

        # The number of samples of each document: its targets divided by the length, rounded up.
        counts = numpy.maximum(0, -((1 - numpy.diff(edges)) // self.length))
        first: Array = numpy.repeat(edges[:-1], counts)
        within = numpy.arange(counts.sum()) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
        starts: Any = first + within * self.length
        return starts, numpy.minimum(starts + self.length + 1, numpy.repeat(edges[1:], counts))

    def _sample(self, sample: int) -> tuple[Array, torch.Tensor | None]:
        number = int(numpy.searchsorted(self._ends, sample, side="right"))
        begins, ends = self._starts_of[number]
        place = sample - (int(self._ends[number - 1]) if number else 0)
        span = slice(int(begins[place]), int(ends[place]))
        tokens = self.arrays[number][span]
        if self.vocabulary is not None and (largest := int(tokens.max())) >= self.vocabulary:
            raise ValueError(
                f"{self.names[number]} has token {largest} at "
                f"{span.start + int(tokens.argmax())}, but the model's vocabulary has "
                f"{self.vocabulary} tokens: use text that was tokenized for this model"
            )
        if self.masks is None:
            return tokens, None
        return tokens, torch.from_numpy(self.masks[number][span][1:].astype(bool))


def open_tokens(
    pattern: str,
    *,
    length: int,
    layout: Layout,
    documents: bool = False,
    mask: bool = False,
    **options: Any,
) -> Tokens:
    """Open the token files that match a glob, memory-mapped.

    They are `.npy` files, or `.bin` files of unsigned 16-bit numbers. With `documents` and `mask`,
    `a.documents.npy` and `a.mask.npy` are opened with `a.npy`. `options` are those of `Tokens`.
    """
    root = Path(Path(pattern).anchor or ".")
    matches = sorted(root.glob(str(Path(pattern).relative_to(root))))
    paths = [path for path in matches if not _beside(path)]
    if not paths:
        raise ValueError(
            f"no token file matches {pattern!r}: write one with numpy.save('data/0.npy', ids)"
        )

    arrays = [_mapped(path) for path in paths]
    document_starts = None
    if documents:
        document_starts = [_mapped(path.with_suffix(".documents.npy")) for path in paths]
    masks = None
    if mask:
        masks = [_mapped(path.with_suffix(".mask.npy")) for path in paths]
    return Tokens(
        arrays,
        length=length,
        layout=layout,
        documents=document_starts,
        masks=masks,
        names=[str(path) for path in paths],
        **options,
    )


def _beside(path: Path) -> bool:
    return path.name.endswith((".documents.npy", ".mask.npy"))


def _mapped(path: Path) -> Array:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: write it next to its token file")
    array: Array
    try:
        if path.suffix == ".bin":
            array = numpy.memmap(path, dtype=RAW, mode="r")
        else:
            array = numpy.load(path, mmap_mode="r")
    except ValueError as error:
        raise ValueError(
            f"{path} holds no array that can be mapped ({error}): write it with numpy.save"
        ) from error
    if array.ndim != 1 or array.dtype.kind not in "uib":
        raise ValueError(
            f"{path} holds {array.dtype} of shape {array.shape}: tokens must be a one-dimensional "
            f"array of whole numbers"
        )
    return array
