"""Recognize errors that mean that the device is out of memory.

Proof: `python -m pytest tests/test_savings.py -k does_not_work`.
"""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Recognize CUDA's out-of-memory error by type, and that of the CPU allocator by its text."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
