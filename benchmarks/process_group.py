"""Run a command for a limited time, and end all processes that it started.

Proof: `python -m pytest tests/evals/test_evals.py -k ended_in_time`.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence


def run_group(words: Sequence[str], *, seconds: float | None, **options) -> tuple[int | None, str]:
    """Run a command, and end all that it started; return its status and output.

    The status is None where its time was over. `options` are those of `subprocess.Popen`.
    """
    # A file, because a process that stays would hold a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        status = process.returncode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        return status, log.read()
