"""How long a save will take, before one was made: a small file is written where the checkpoints go, and timed.

Proof: `python -m pytest tests/test_cadence.py -k disk`.
"""

import contextlib
import time

from .files import Files

NAME = ".speed-of-the-disk"
LEAST_BYTES, MOST_BYTES = 2**20, 2**29
PART = 16  # of a save's bytes so many times less are written, so that asking costs little beside what is asked
FIXED_SECONDS = (
    0.1  # what a save of hardly any bytes takes: names, index, manifest, and a sync of each
)


def expected_seconds(files: Files, num_bytes: int) -> float:
    """Of a save of so many bytes by this process. The file is gone afterwards."""
    data = memoryview(bytearray(min(max(num_bytes // PART, LEAST_BYTES), MOST_BYTES)))
    with contextlib.suppress(FileNotFoundError):  # left by a process that was killed just then
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
