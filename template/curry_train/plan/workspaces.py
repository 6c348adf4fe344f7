"""Estimate the workspaces that cuDNN allocates for convolutions, from shapes.

    for workspace in convolutions_of(func, args): ...

Tensor cores read the channels of one pixel side by side. In backward, cuDNN's kernels therefore
copy what they read to that layout, in a workspace that lives for one call: output gradient and
weight for the gradient of the input, input and output gradient for that of the weight, which is
summed up there, too. Channels are padded to 16 bytes in it. Forward runs without a workspace of
this kind, and so does a model in `channels_last`. Where there is little to compute, as in a first
layer of few filters, copies take longer than they save: kernels without tensor cores and without a
workspace are the faster ones. For windows of one pixel there are kernels that use tensor cores
without a copy, if at a lower rate: copies pay for them with many channels alone.

With `torch.backends.cudnn.benchmark`, the first call of each shape tries all algorithms, after
which torch gives its whole cache back. What the later steps reserve depends on that.

This follows one A100 (evidence/gpumemnet.json). cuDNN may choose an algorithm with a larger
workspace, such as Winograd's, and needs up to several GiB for a moment while it tries them.

Proof: `python -m pytest tests/plan/test_cuda_step.py`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.measure import Life

ALIGNMENT_BYTES = 16
# Others have no tensor cores for convolutions.
TENSOR_CORE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Tensor cores pay above so many FLOPs for each byte that is copied, which is read and written. By
# the data sheet of an A100 with TF32: 2 / 1,555 GB/s against 1 / 19.5 - 1 / 156 TFLOP/s.
FLOPS_PER_COPIED_BYTE = 29
# The same for windows of one pixel, if the other layout halves the rate of tensor cores:
# 2 / 1,555 GB/s against 1 / 78 - 1 / 156 TFLOP/s.
POINTWISE_FLOPS_PER_COPIED_BYTE = 200


def convolutions_of(func: Any, args: Any) -> Iterator[Life]:
    """Yield the workspace of each call of cuDNN in an operation, in their order.

    Its owner is the call: what is computed from which shapes. Torch keeps its choice for each.
    """
    if func is torch.ops.aten.convolution.default:
        x, weight, *_, groups = args
        calls = [("forward", 0)]
    elif func is torch.ops.aten.convolution_backward.default:
        gradient, x, weight, *_, groups, mask = args
        copies = _layout_copies(x, gradient, weight)
        calls = [call for call, wanted in zip(copies, mask, strict=False) if wanted]
    else:
        return
    if 1 < groups == x.shape[1] and x.stride(1) > 1:
        return  # torch has kernels of its own for filters of one channel, unless channels are last
    settings = tuple(str(value) for value in args if isinstance(value, list | int))
    for kind, num_bytes in calls:
        yield Life(num_bytes, owner=(kind, x.shape, weight.shape, settings), born=0)


def _layout_copies(x: Tensor, gradient: Tensor, weight: Tensor) -> list[tuple[str, int]]:
    """Return both calls, with the bytes of their copies with channels side by side if they pay."""
    has_layout = x.stride(1) == 1 or not x.numel()
    if has_layout or x.dtype not in TENSOR_CORE_DTYPES:
        return [("input", 0), ("weight", 0)]
    of_x, of_gradient, of_weight = (
        tensor.numel()
        // tensor.shape[1]
        * (math.ceil(tensor.shape[1] * tensor.itemsize / ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        for tensor in (x, gradient, weight)
    )
    is_pointwise = math.prod(weight.shape[2:]) == 1
    least = POINTWISE_FLOPS_PER_COPIED_BYTE if is_pointwise else FLOPS_PER_COPIED_BYTE
    pixels = min(tensor.numel() // tensor.shape[1] for tensor in (x, gradient))
    pays = 2 * pixels * weight.numel() >= least * (of_x + of_gradient)
    of_input = of_gradient + of_weight
    return [("input", pays * of_input), ("weight", pays * (of_x + of_input))]
