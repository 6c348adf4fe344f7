"""Estimate the duration of a save by timing a small write on the same volume.

Proof: `python -m pytest tests/test_cadence.py -k disk`.
"""

import contextlib
import time

from .files import Files

NAME = ".speed-of-the-disk"
LEAST_BYTES = 2**20
MOST_BYTES = 2**29
# The trial writes 1/16 of the bytes of a save, so that it costs little in comparison.
PART = 16
# Duration of a save of almost no bytes: naming, writing and syncing the index and the manifest.
FIXED_SECONDS = 0.1


def expected_seconds(files: Files, num_bytes: int) -> float:
    """Return the expected seconds of a save of this many bytes by this process.

    The trial file is removed afterwards.
    """
    data = memoryview(bytearray(min(max(num_bytes // PART, LEAST_BYTES), MOST_BYTES)))
    # A process that was killed during the trial leaves its file behind.
    with contextlib.suppress(FileNotFoundError):
        files.remove_file(NAME)

    began = time.perf_counter()
    stream = files.create(NAME)
    try:
        stream.write(data)
        files.finish(stream)
    except BaseException:
        files.abandon(stream)
        raise
    seconds = time.perf_counter() - began

    files.remove_file(NAME)
    return FIXED_SECONDS + seconds * max(1.0, num_bytes / len(data))
