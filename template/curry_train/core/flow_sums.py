"""What is counted of a tensor's elements, on its own device: zeros, non-finite ones, the sum of squares.

Sums are float64, so that no square overflows and no long sum drifts (a float32 norm of 2**24 numbers is off by 6e-4 on
the CPU), and a tensor is taken piece by piece, so that temporaries stay small. Nothing here waits for the device, and
nothing draws. Proof: `python -m pytest tests/test_grad_flow.py`.
"""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .flow_ranks import dense

SUMS = ("elements", "zeros", "nonfinite", "squares")
PIECE = 2**16  # elements at a time on the CPU: small enough for its caches
LARGE_PIECE = 2**22  # and elsewhere large enough to keep a device busy, in 32 MiB of temporaries


def wide(device: torch.device) -> torch.dtype:
    """What sums are kept in; Apple's devices have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def empty_sums(num_rows: int, device: torch.device) -> Tensor:
    return torch.zeros(num_rows, len(SUMS), dtype=wide(device), device=device)


def sums_of(tensor: Tensor) -> Tensor:
    """The four sums of one tensor's elements, as a tensor on its device. A complex number is two elements."""
    tensor = dense(tensor.detach())
    elements = tensor.numel()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor, elements = torch.view_as_real(tensor), 2 * elements
    nonzero, bad, squares = (
        _counted_here(tensor) if tensor.device.type == "cpu" else _counted_there(tensor)
    )
    return torch.stack([torch.full_like(bad, elements), elements - nonzero, bad, squares])


def _counted_here(tensor: Tensor) -> Tensor:
    """Nonzero elements, non-finite ones, the sum of squares, where looking at a number costs nothing: a finite sum has
    finite elements only."""
    nonzero, bad, squares = 0, 0, 0.0
    for piece in _pieces(tensor, PIECE):
        values = piece.to(torch.float64).flatten()
        part = torch.dot(values, values).item()
        nonzero += int(torch.count_nonzero(values).item())
        bad += 0 if math.isfinite(part) else int(torch.count_nonzero(values - values).item())
        squares += part
    return torch.tensor([nonzero, bad, squares], dtype=torch.float64)


def _counted_there(tensor: Tensor) -> Tensor:
    """The same, without waiting for the device."""
    counted = torch.zeros(3, dtype=wide(tensor.device), device=tensor.device)
    for piece in _pieces(tensor, LARGE_PIECE):
        values = piece.to(counted.dtype).flatten()
        parts = (
            torch.count_nonzero(values),
            torch.count_nonzero(values - values),
            torch.dot(values, values),
        )
        counted += torch.stack([part.to(counted.dtype) for part in parts])
    return counted


def squares_of(tensor: Tensor, *, less: Tensor | None = None) -> Tensor:
    """The sum of squares alone, of a tensor or of how far it is from another; in float64, since an optimizer's step is
    often below the rounding of half precision."""
    tensor = dense(tensor.detach())
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor, less = (
            torch.view_as_real(tensor),
            None if less is None else torch.view_as_real(less),
        )
    most, dtype = PIECE if tensor.device.type == "cpu" else LARGE_PIECE, wide(tensor.device)
    total = torch.zeros((), dtype=dtype, device=tensor.device)
    others: Iterator[Tensor | None] = (
        itertools.repeat(None) if less is None else _pieces(less, most)
    )
    for piece, other in zip(_pieces(tensor, most), others, strict=False):
        values = piece.to(dtype).flatten()
        values = values if other is None else values - other.to(dtype).flatten()
        total += torch.dot(values, values)
    return total


def _pieces(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Views, so that a tensor with any strides is read without a copy of the whole."""
    if tensor.numel() <= most:
        if tensor.numel():
            yield tensor
        return
    longest = max(range(tensor.dim()), key=tensor.size)
    size = max(1, tensor.size(longest) * most // tensor.numel())
    for part in tensor.split(size, longest):
        yield from _pieces(part, most)
