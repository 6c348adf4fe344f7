"""Estimate the workspaces that cuDNN allocates for convolutions, from shapes.

    for workspace in convolutions_of(func, args, output): ...

Tensor cores read the channels of one pixel side by side. cuDNN's kernels therefore copy what they
read to that layout, in a workspace that lives for one call. In backward they copy output gradient
and weight for the gradient of the input, input and output gradient for that of the weight, which is
summed up there, too. Channels are padded to 16 bytes in it. A model in `channels_last` needs none.
Where there is little to compute, as in a first layer of few filters, copies take longer than they
save: kernels without tensor cores and without a workspace are the faster ones. For windows of one
pixel there are kernels that use tensor cores without a copy, if at a lower rate: copies pay for
them with many channels alone.

Larger windows over many channels run at the full rate. Forward then copies input and weight, and
writes its output in the usual layout: such kernels are named nhwckrsc_nchw. The kernels for the
gradient of the input, nhwckrsc_nhwc, write it with channels side by side, and it is copied back.
Their copy of the weight is not counted. With it, the workspaces of both gradients would have the
same size, and the second call would reuse the memory of the first, which the readings contradict.

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

# cuDNN computes the output, the gradient of the input, and that of the weight.
CALLS = ("forward", "input", "weight")
ALIGNMENT_BYTES = 16
# Others have no tensor cores for convolutions.
TENSOR_CORE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Tensor cores pay above so many FLOPs for each byte that is copied, which is read and written. By
# the data sheet of an A100 with TF32: 2 / 1,555 GB/s against 1 / 19.5 - 1 / 156 TFLOP/s.
FLOPS_PER_COPIED_BYTE = 29
# The same if kernels that need no copy, or fewer, have half the rate of tensor cores:
# 2 / 1,555 GB/s against 1 / 78 - 1 / 156 TFLOP/s.
FULL_RATE_FLOPS_PER_COPIED_BYTE = 200


def convolutions_of(func: Any, args: Any, output: Any) -> Iterator[Life]:
    """Yield the workspace of each call of cuDNN in an operation, in their order.

    Its owner is the call: what is computed from which shapes. Torch keeps its choice for each.
    """
    if func is torch.ops.aten.convolution.default:
        x, weight, *_, groups = args
        wanted = [True]
    elif func is torch.ops.aten.convolution_backward.default:
        output, x, weight, *_, groups, mask = args
        wanted = [False, *mask]
    else:
        return
    if 1 < groups == x.shape[1] and x.stride(1) > 1:
        return  # torch has kernels of its own for filters of one channel, unless channels are last
    settings = tuple(str(value) for value in args if isinstance(value, list | int))
    for kind, num_bytes, is_wanted in zip(
        CALLS, _layout_copies(x, output, weight), wanted, strict=False
    ):
        if is_wanted:
            yield Life(num_bytes, owner=(kind, x.shape, weight.shape, settings), born=0)


def _layout_copies(x: Tensor, output: Tensor, weight: Tensor) -> tuple[int, ...]:
    """Return the bytes that each call copies to channels side by side, if copies pay."""
    if x.stride(1) == 1 or not x.numel() or x.dtype not in TENSOR_CORE_DTYPES:
        return 0, 0, 0
    of_x, of_output, of_weight = (
        tensor.numel()
        // tensor.shape[1]
        * math.ceil(tensor.shape[1] * tensor.itemsize / ALIGNMENT_BYTES)
        * ALIGNMENT_BYTES
        for tensor in (x, output, weight)
    )
    both = of_x + of_output
    pixels = min(tensor.numel() // tensor.shape[1] for tensor in (x, output))
    flops_per_byte = 2 * pixels * weight.numel() / both
    is_pointwise = math.prod(weight.shape[2:]) == 1
    least = FULL_RATE_FLOPS_PER_COPIED_BYTE if is_pointwise else FLOPS_PER_COPIED_BYTE
    pays = flops_per_byte >= least
    has_full_rate = flops_per_byte >= FULL_RATE_FLOPS_PER_COPIED_BYTE and not is_pointwise
    of_input = both if has_full_rate else of_output + of_weight
    return has_full_rate * (of_x + of_weight), pays * of_input, pays * (both + of_weight)
