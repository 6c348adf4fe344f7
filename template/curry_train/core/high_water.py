"""The most memory that training has had so far, for the journal of a run and its progress bar.

    peak_bytes(torch.device("cuda"))

Proof: `python -m pytest tests/test_attached_journal.py -k peak`.
"""

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_bytes(device: torch.device) -> int:
    """The most that was allocated on the device; on the CPU, the most that the process had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (
        _STATUS.is_file()
    ):  # the kernel's other figure begins with that of the process which started this one
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
