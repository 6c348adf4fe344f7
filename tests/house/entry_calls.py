"""Run one entry call of the package and print which of its files execute, as JSON.

    python tests/house/entry_calls.py apply_sac_and_step template

`hops.py` starts one fresh process for each call. A file counts when a function of it is called by
the entry call, directly or through any number of other functions, in any thread of this process.
These are not counted:

- what runs while a module of the package is imported, also when the entry call imports it: module
  level code, class bodies, and the functions that they call are loading and not a hop;
- what the preparation of an entry runs: its imports, and making the model;
- generated code without a file of its own, such as the `__init__` of a dataclass;
- other processes.

Proof: `python -m pytest tests/house/test_hops.py`.
"""

import contextlib
import io
import json
import runpy
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE_NAME = "curry_train"
BUDGET_BYTES = 15 * 2**20  # two samples of the built-in transformer need recompute to fit

Call = Callable[[], object]


def apply_sac_and_step(_model_name: str) -> Call:
    """Prepare `apply_sac` on a model of torch's own layers, and one training step of it."""
    import torch

    from curry_train.primitives import apply_sac

    model, optimizer = _model()
    batch = torch.randn(2, 8)

    def call() -> None:
        apply_sac(model)
        model(batch).square().mean().backward()
        optimizer.step()

    return call


def save_and_resume(_model_name: str) -> Call:
    """Prepare a run of one step that `saving` saves, and a second run that resumes it."""
    import torch

    from curry_train.runs import saving

    folder = tempfile.TemporaryDirectory()

    def call() -> None:
        with folder:
            for _ in range(2):
                model, optimizer = _model()
                run = saving(model, optimizer, runs=folder.name)
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                run.step()
                run.close()
            if run.steps != 2:
                raise RuntimeError(f"the second run has {run.steps} steps: it resumed nothing")

    return call


def plan_memory(model_name: str) -> Call:
    """Prepare a plan for a built-in model."""
    from curry_train.plan import plan

    return lambda: plan(model_name, BUDGET_BYTES, global_batch=2, microbatch=2)


ENTRIES: dict[str, Callable[[str], Call]] = {
    entry.__name__: entry for entry in (apply_sac_and_step, save_and_resume, plan_memory)
}


def _model() -> tuple[Any, Any]:
    """Return a model that repeats a block, and its optimizer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
    model = nn.Sequential(*blocks)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def executed_files(call: Call, package: Path) -> list[str]:
    """Return the files below `package` whose functions `call` runs, relative to it."""
    found: set[str] = set()
    done: set[str] = set()  # most calls are in files that were seen before
    inside = f"{package.resolve()}/"

    def record(frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        file = frame.f_code.co_filename
        if file in done:
            return
        if not file.startswith(inside):
            done.add(file)
        elif not _is_loading(frame, inside):
            done.add(file)
            found.add(file)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(file.removeprefix(inside) for file in found)


def _is_loading(frame: FrameType | None, inside: str) -> bool:
    """Return whether a frame runs because a module of the package is being imported."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(inside):
            return True
        frame = frame.f_back
    return False


def loaded_modules(arguments: list[str]) -> list[str]:
    """Run a command of the package and return the modules of it that are loaded at its end.

    These are the names in `sys.modules`, packages included.
    """
    sys.argv = [PACKAGE_NAME, *arguments]
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            runpy.run_module(PACKAGE_NAME, run_name="__main__")
    except SystemExit as end:
        if end.code:
            command = " ".join(sys.argv)
            sys.exit(f"{command} ended with {end.code}:\n{output.getvalue()}")
    return sorted(name for name in sys.modules if name.partition(".")[0] == PACKAGE_NAME)


def main(name: str, search_path: str, *arguments: str) -> None:
    """Print the files that an entry call executes, or the modules that a command loads."""
    sys.path[0] = str(Path(search_path).resolve())
    if name == "command":
        found = loaded_modules([*arguments])
    else:
        found = executed_files(ENTRIES[name](*arguments), Path(search_path) / PACKAGE_NAME)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
