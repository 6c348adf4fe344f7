"""Kill a process that saves at every change of the disk, and check its folder.

A child is forked for each kill, from a process that has only one thread.
Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import itertools
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

from store_models import At, CountedFiles, die, equal, new_state, tensors_of, train

from curry_train.runs.store import Store

STEPS = 3  # the first is committed before; the child may die in the others


def states() -> dict[int, Any]:
    """Train without a kill and return the expected tensors of each step."""
    found = {}
    state = new_state()
    for step in range(1, STEPS + 1):
        train(state, 1)
        found[step] = tensors_of(state)
    return found


def child(folder: Path, files: Any) -> None:
    """Save steps 2 and 3 over a run that has step 1, and remove step 1."""
    state = new_state()
    train(state, 1)
    with Store(folder, files=files) as store:
        for step in range(2, STEPS + 1):
            train(state, 1)
            store.save("rollback", step, state)
        store.discard("rollback/step-00000001.dcp")


def in_child(folder: Path, files: Any) -> int:
    """Fork, and return the child's number."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        child(folder, files)
        status = 0
    finally:
        traceback.print_exc(file=sys.stderr) if status else None
        os._exit(status)


def judge(folder: Path, expected: dict[int, Any]) -> str:
    """Return the first violation in the folder that a killed child left, or an empty text."""
    with Store(folder) as store:
        found = store.committed("rollback")
        if not found or store.damaged("rollback"):
            return (
                f"committed {[saved.step for saved in found]}, damaged {store.damaged('rollback')}"
            )
        for saved in found:
            other = new_state(seed=9)
            store.load(saved, other)
            if not equal(tensors_of(other), expected[saved.step]):
                return f"step {saved.step} is not what was saved"
        if max(saved.step for saved in found) < STEPS and all(saved.step != 1 for saved in found):
            return "a step is gone"
        left = {path.name for path in (folder / "rollback").iterdir()} - {
            Path(saved.folder).name for saved in found
        }
        return f"not swept: {left}" if left else ""


def prepare(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    state = new_state()
    train(state, 1)
    with Store(folder) as store:
        store.save("rollback", 1, state)


def at_every_change(folder: Path, expected: dict[int, Any], *, every: int) -> dict[str, Any]:
    """Kill a child at each change, or at every n-th one, until a child finishes."""
    wrong: list[str] = []
    killed: list[int] = []
    for number in itertools.count(1, every):
        prepare(folder)
        files = CountedFiles(folder, ask=At(number, die))
        _, status = os.waitpid(in_child(folder, files), 0)
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                wrong.append(
                    f"the child failed with {os.WEXITSTATUS(status)} before change {number}"
                )
            break
        killed.append(number)
        if fault := judge(folder, expected):
            wrong.append(f"killed at change {number}: {fault}")
    return {"kills": len(killed), "wrong": wrong}
