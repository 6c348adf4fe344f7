"""The most memory that training has had so far, for the journal of a run and its progress bar.

    peak_bytes(torch.device("cuda"))

Proof: `python -m pytest tests/test_attached_journal.py -k peak`.
"""

import resource
import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """The most that was allocated on the device; on the CPU, the most that the process had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
