"""Peak memory of the training process so far, for a run's journal and progress bar.

    peak_bytes(torch.device("cuda"))

Proof: `python -m pytest tests/test_attached_journal.py -k peak`.
"""

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_bytes(device: torch.device) -> int:
    """Return peak allocated bytes on CUDA, or the peak resident memory of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)

    # Linux keeps the peak of the parent process in `ru_maxrss` across fork and exec, but not in
    # VmHWM.
    if _STATUS.is_file():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
