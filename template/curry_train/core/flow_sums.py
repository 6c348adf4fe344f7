"""Counts of zero and nonfinite elements and sums of squares, on a tensor's own device.

Sums are float64, so that squares do not overflow and long sums do not drift (a float32 norm of
2**24 numbers is off by 6e-4 on the CPU). Tensors are processed in pieces to keep temporaries small.
Nothing here waits for an accelerator or draws random numbers.

Proof: `python -m pytest tests/test_grad_flow.py`.
"""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .flow_ranks import dense

SUMS = ("elements", "zeros", "nonfinite", "squares")
# Elements per piece on the CPU: small enough for its caches.
PIECE = 2**16
# Elements per piece elsewhere: enough to keep a device busy, with 32 MiB of temporaries.
LARGE_PIECE = 2**22


def wide(device: torch.device) -> torch.dtype:
    """Return the dtype of sums: float64, or float32 on Apple's devices, which lack float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def empty_sums(num_rows: int, device: torch.device) -> Tensor:
    return torch.zeros(num_rows, len(SUMS), dtype=wide(device), device=device)


def sums_of(tensor: Tensor) -> Tensor:
    """Return the four `SUMS` of a tensor's elements; a complex number counts as two elements."""
    tensor = dense(tensor.detach())
    elements = tensor.numel()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
        elements *= 2
    nonzero, bad, squares = (
        _counted_here(tensor) if tensor.device.type == "cpu" else _counted_there(tensor)
    )
    return torch.stack([torch.full_like(bad, elements), elements - nonzero, bad, squares])


def _counted_here(tensor: Tensor) -> Tensor:
    """Count nonzero and nonfinite elements and sum the squares, on the CPU.

    Reading a number costs nothing here, so nonfinite elements are counted only in pieces whose sum
    of squares is not finite.
    """
    nonzero = 0
    bad = 0
    squares = 0.0
    for piece in _pieces(tensor, PIECE):
        values = piece.to(torch.float64).flatten()
        nonzero += int(torch.count_nonzero(values).item())
        piece_squares = torch.dot(values, values).item()
        squares += piece_squares
        if not math.isfinite(piece_squares):
            bad += int(torch.count_nonzero(values - values).item())
    return torch.tensor([nonzero, bad, squares], dtype=torch.float64)


def _counted_there(tensor: Tensor) -> Tensor:
    """Count the same as `_counted_here`, without waiting for the device."""
    counted = torch.zeros(3, dtype=wide(tensor.device), device=tensor.device)
    for piece in _pieces(tensor, LARGE_PIECE):
        values = piece.to(counted.dtype).flatten()
        piece_sums = (
            torch.count_nonzero(values),
            # inf - inf and nan - nan are nan, which counts as nonzero.
            torch.count_nonzero(values - values),
            torch.dot(values, values),
        )
        counted += torch.stack([piece_sum.to(counted.dtype) for piece_sum in piece_sums])
    return counted


def squares_of(tensor: Tensor, *, less: Tensor | None = None) -> Tensor:
    """Return the sum of squares of a tensor, or of its difference from `less`.

    It is computed in float64, because an optimizer's update is often below the rounding error of
    half precision.
    """
    tensor = dense(tensor.detach())
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
        less = None if less is None else torch.view_as_real(less)

    most = PIECE if tensor.device.type == "cpu" else LARGE_PIECE
    dtype = wide(tensor.device)
    total = torch.zeros((), dtype=dtype, device=tensor.device)
    others: Iterator[Tensor | None] = (
        itertools.repeat(None) if less is None else _pieces(less, most)
    )
    for piece, other in zip(_pieces(tensor, most), others, strict=False):
        values = piece.to(dtype).flatten()
        if other is not None:
            values = values - other.to(dtype).flatten()
        total += torch.dot(values, values)
    return total


def _pieces(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Yield views of at most `most` elements, so that no strided tensor is copied as a whole."""
    if tensor.numel() <= most:
        if tensor.numel():
            yield tensor
        return
    longest = max(range(tensor.dim()), key=tensor.size)
    size = max(1, tensor.size(longest) * most // tensor.numel())
    for piece in tensor.split(size, longest):
        yield from _pieces(piece, most)
