"""Whether an error means that the device is full.

Proof: `python -m pytest tests/test_savings.py -k does_not_work`.
"""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """On CUDA, or by the words of the CPU's allocator."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
