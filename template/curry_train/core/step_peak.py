"""The fullest moment of a whole training step: what is there before it, and the most that it adds.

    peak_of_step(step, [*model.parameters(), *model.buffers(), *batch], torch.device("cpu"))

Beside it, other models may be alive: they do not count. Proof: `python -m pytest tests/test_bench_steps.py -k peak`.
"""

import gc
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .measure import LiveStorages

BLOCK = 512  # bytes, of which the allocator of CUDA gives whole ones


def peak_of_step(step: Callable[[], object], there: Iterable[Tensor], device: torch.device) -> int:
    """Bytes. `there` are the tensors that stay through the step; on the CPU the step runs slower than by itself.

    Not yet measured on CUDA.
    """
    before = bytes_of(there, device)
    if device.type != "cuda":
        with LiveStorages() as storages:
            step()
        return before + storages.bytes_peak
    gc.collect()  # what would be freed meanwhile counts as there
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return before + torch.cuda.max_memory_allocated(device) - allocated


def bytes_of(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Of what lies on the device; a storage that several share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    block = BLOCK if device.type == "cuda" else 1
    return sum(
        {storage._cdata: -(-storage.nbytes() // block) * block for storage in storages}.values()
    )
