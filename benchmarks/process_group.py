"""Run a command for a limited time, and end all processes that it started.

Proof: `python -m pytest tests/evals/test_evals.py -k ended_in_time`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


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


def run_python(
    folder: Path, *words: str, seconds: float | None = None, **variables: str
) -> tuple[int | None, str]:
    """Run this Python in a folder, with one thread; return its status and output."""
    command = [sys.executable, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return run_group(command, seconds=seconds, cwd=folder, env=environment)
