"""Record CUDA's memory, and write a snapshot where a device is full.

    with memory_record("run/oom"):
        train()

The owners of the snapshot are printed by `curry-train memory --snapshot`, in a process of its own:
this one is out of memory, and a training imports no tool.

Proof: `python -m pytest tests/core/test_memory_record.py`.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

# Allocations that are kept; older ones are left out of the snapshot.
MOST_RECORDED_EVENTS = 200_000
MOST_SECONDS_TO_DESCRIBE = 300
SNAPSHOT_COMMAND = ("-m", "curry_train", "memory", "--snapshot")


@contextlib.contextmanager
def memory_record(path: str | Path) -> Iterator[None]:
    """Record CUDA's memory; on an out-of-memory error write a snapshot and print what holds it.

        with memory_record("run/oom"):
            train()

    The snapshot is `run/oom.pickle`, or `run/oom-rank-3.pickle` of rank 3 of several; only a rank
    that is out of memory writes one, and an earlier file stays as it is. The error is raised
    again. Open it before the model is built, so that the snapshot has where each tensor was made.
    Without a CUDA device nothing is recorded.
    """
    if not torch.cuda.is_available():
        print(f"{path}: no CUDA device, so no memory is recorded", file=sys.stderr)
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=MOST_RECORDED_EVENTS)
    try:
        yield
    except Exception as error:
        if _is_full_device(error):
            _write_snapshot(Path(path))
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _is_full_device(error: BaseException) -> bool:
    """Check whether CUDA's out-of-memory error is this error, or the cause of it."""
    chain = [error]
    # An error may be its own cause: stop at one that was seen already.
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    return any(isinstance(one, torch.OutOfMemoryError) for one in chain)


def _write_snapshot(path: Path) -> None:
    """Write the snapshot of this rank, and print its owners from a process of its own."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        path = path.with_name(f"{path.name}-rank-{os.environ.get('RANK', '0')}")
    number = 1
    target = path.with_name(f"{path.name}.pickle")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}-{number}.pickle")
    unfinished = target.with_suffix(".unfinished")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(unfinished))
        unfinished.replace(target)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        print(f"out of memory, and {target} can't be written: {error}", file=sys.stderr)
        return
    print(f"out of memory: the snapshot is {target}", file=sys.stderr, flush=True)
    try:
        described = subprocess.run(
            [sys.executable, *SNAPSHOT_COMMAND, str(target)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=MOST_SECONDS_TO_DESCRIBE,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        described = f"see what holds it: curry-train memory --snapshot {target}"
    print(described, file=sys.stderr, flush=True)
