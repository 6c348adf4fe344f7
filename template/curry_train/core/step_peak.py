"""Measure the peak memory of a whole training step, with the tensors that stay through it.

    peak_of_step(step, [*model.parameters(), *model.buffers(), *batch], torch.device("cpu"))

Other models that are alive meanwhile do not count.

Proof: `python -m pytest tests/test_bench_steps.py -k peak`.
"""

import gc
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .measure import LiveStorages

# CUDA's allocator hands out memory in multiples of this many bytes.
BLOCK = 512


def peak_of_step(step: Callable[[], object], there: Iterable[Tensor], device: torch.device) -> int:
    """Return the peak bytes of a step, including `there`, the tensors that stay through it.

    On the CPU the step runs slower than without the measurement. Not yet measured on CUDA.
    """
    before = bytes_of(there, device)
    if device.type != "cuda":
        with LiveStorages() as storages:
            step()
        return before + storages.bytes_peak

    # Garbage that is collected during the step would lower the figure.
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return before + torch.cuda.max_memory_allocated(device) - allocated


def bytes_of(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes of the tensors on the device; a shared storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    block = BLOCK if device.type == "cuda" else 1
    rounded = {storage._cdata: -(-storage.nbytes() // block) * block for storage in storages}
    return sum(rounded.values())
