"""Samples of tokens: windows of a text, or documents of different lengths, from memory or from files.

    data = open_tokens("data/*.npy", length=1024, layout=layout)
    data = Tokens([array], length=1024, layout=layout, masks=[answers], documents=[starts])

A sample of `length` tokens has as many targets, each the token that follows. A target is left out of the loss where the
mask is 0, and past the end of a document that is shorter. Proof: `python -m pytest tests/test_data_tokens.py`.
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
RAW = numpy.dtype("uint16")  # what a .bin file holds; an .npy file says it itself


class Tokens:
    """Arrays of tokens, which samples do not cross. `documents` has for each array where its documents begin; long
    ones become several samples. `masks` has for each array a 1 for every token that is to be learned."""

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
        self.arrays, self.length, self.layout, self.masks = list(arrays), length, layout, masks
        self.vocabulary = vocabulary
        self.names = list(names or (f"array {number}" for number in range(len(self.arrays))))
        for number, name in enumerate(self.names):
            if masks is not None and len(masks[number]) != len(self.arrays[number]):
                raise ValueError(
                    f"{name} has {len(self.arrays[number])} tokens and its mask {len(masks[number])}: they go together"
                )
        starts = [self._starts(number, documents) for number in range(len(self.arrays))]
        self._starts_of = starts
        self._ends = numpy.cumsum([len(begin) for begin, _ in starts])
        if not len(self):
            sizes = ", ".join(
                f"{name} {len(array)}" for name, array in zip(self.names, self.arrays, strict=True)
            )
            raise ValueError(
                f"there is no sample of {length} tokens and a target: {sizes or 'no files'}"
            )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def batch(self, samples: Sequence[int]) -> Any:
        """As long as the longest of these samples."""
        found = [self._sample(int(sample)) for sample in samples]
        longest = max(len(tokens) for tokens, _ in found) - 1
        inputs = torch.zeros(len(found), longest, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORED)
        there = torch.zeros_like(inputs, dtype=torch.bool)
        for row, (tokens, learned) in enumerate(found):
            whole = torch.from_numpy(tokens.astype(numpy.int64))
            size = len(whole) - 1
            inputs[row, :size], there[row, :size] = whole[:-1], True
            targets[row, :size] = (
                whole[1:] if learned is None else whole[1:].masked_fill(~learned, IGNORED)
            )
        return self.layout(inputs, targets, there)

    def _starts(
        self, number: int, documents: Sequence[Array] | None
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Where the samples of an array begin, and where each one's last target ends."""
        size = len(self.arrays[number])
        if documents is None:
            count = max(0, (size - 1) // self.length)
            begins = range(0, count * self.length, self.length)
            return begins, range(self.length + 1, (count + 1) * self.length + 1, self.length)
        edges = numpy.append(numpy.asarray(documents[number], dtype=numpy.int64), size)
        if edges[0] < 0 or (numpy.diff(edges) < 0).any():
            raise ValueError(
                f"the documents of {self.names[number]} must begin in rising order inside its {size} tokens"
            )
        counts = numpy.maximum(
            0, -((1 - numpy.diff(edges)) // self.length)
        )  # ceil of a document's targets
        first: Array = numpy.repeat(edges[:-1], counts)
        within = numpy.arange(counts.sum()) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
        starts: Any = first + within * self.length
        return starts, numpy.minimum(starts + self.length + 1, numpy.repeat(edges[1:], counts))

    def _sample(self, sample: int) -> tuple[Array, torch.Tensor | None]:
        number = int(numpy.searchsorted(self._ends, sample, side="right"))
        begins, ends = self._starts_of[number]
        place = sample - (int(self._ends[number - 1]) if number else 0)
        part = slice(int(begins[place]), int(ends[place]))
        tokens = self.arrays[number][part]
        if self.vocabulary is not None and (largest := int(tokens.max())) >= self.vocabulary:
            raise ValueError(
                f"{self.names[number]} has token {largest} at {part.start + int(tokens.argmax())}, and the model knows "
                f"{self.vocabulary}: it was written for another vocabulary"
            )
        mask = None if self.masks is None else self.masks[number][part][1:]
        return tokens, None if mask is None else torch.from_numpy(mask.astype(bool))


def open_tokens(
    pattern: str,
    *,
    length: int,
    layout: Layout,
    documents: bool = False,
    mask: bool = False,
    **options: Any,
) -> Tokens:
    """The files of a glob, memory-mapped: `.npy`, or `.bin` of unsigned 16-bit numbers. Beside `a.npy` stand, where
    asked for, `a.documents.npy` and `a.mask.npy`; `options` are those of `Tokens`."""
    root = Path(Path(pattern).anchor or ".")
    paths = [
        path
        for path in sorted(root.glob(str(Path(pattern).relative_to(root))))
        if not _beside(path)
    ]
    if not paths:
        raise ValueError(
            f"no token file matches {pattern!r}: write one with numpy.save('data/0.npy', ids)"
        )
    arrays = [_mapped(path) for path in paths]
    return Tokens(
        arrays,
        length=length,
        layout=layout,
        documents=[_mapped(path.with_suffix(".documents.npy")) for path in paths]
        if documents
        else None,
        masks=[_mapped(path.with_suffix(".mask.npy")) for path in paths] if mask else None,
        names=[str(path) for path in paths],
        **options,
    )


def _beside(path: Path) -> bool:
    return path.name.endswith((".documents.npy", ".mask.npy"))


def _mapped(path: Path) -> Array:
    if not path.is_file():
        raise ValueError(f"{path} is not there: it goes with the token file beside it")
    try:
        array = (
            numpy.memmap(path, dtype=RAW, mode="r")
            if path.suffix == ".bin"
            else numpy.load(path, mmap_mode="r")
        )
    except ValueError as error:
        raise ValueError(
            f"{path} holds no array that can be mapped ({error}): write it with numpy.save"
        ) from error
    if array.ndim != 1 or array.dtype.kind not in "uib":
        raise ValueError(
            f"{path} holds {array.dtype} of shape {array.shape}: tokens are one row of whole numbers"
        )
    return array
