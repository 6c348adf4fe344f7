"""Run a function on several gloo ranks of this machine, under torchrun, and get back what each rank returned.

Proof: `python -m pytest tests/test_ranks.py`.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

LAST_LINES = 12


def run_on_ranks(target: str, *, num_ranks: int = 2, timeout: float = 180.0, **arguments: Any) -> list[Any]:
    """Call the function that `load_function` finds on every rank; arguments and results travel as JSON.

    The ranks import from where this process imports. A rank that fails ends the others, and its last words are told.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command += ["-m", str(__spec__.name), target, json.dumps(arguments), folder]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        try:
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{target} on {num_ranks} ranks did not end within {timeout:.0f} s") from None
        results = [Path(folder, f"{rank}.json") for rank in range(num_ranks)]
        if ended.returncode or not all(path.exists() for path in results):
            said = "\n".join(ended.stderr.strip().splitlines()[-LAST_LINES:])
            errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
            raise RuntimeError(f"{target} on {num_ranks} ranks failed: {'; '.join(errors) or said}")
        return [json.loads(path.read_text()) for path in results]


class GradientSyncs(TorchDispatchMode):
    """Counts the all-reduces and reduce-scatters that backward passes send out while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.__name__.startswith(("allreduce_", "_reduce_scatter")):
            self.num_calls += torch._C._current_graph_task_id() >= 0  # inside a backward
        return func(*args, **(kwargs or {}))


def load_function(target: str) -> Callable[..., Any]:
    """The function that `package.module:function` or `path/to/file.py:function` names."""
    module, _, function = target.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), function)
    spec = importlib.util.spec_from_file_location(Path(module).stem, module)
    if spec is None or spec.loader is None:
        raise ValueError(f"can't load {module} as Python")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return getattr(loaded, function)


def _rank_main(target: str, arguments: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        result = load_function(target)(**json.loads(arguments))
        Path(folder, f"{rank}.json").write_text(json.dumps(result))
    except BaseException as error:
        Path(folder, f"{rank}.error").write_text(f"rank {rank}: {type(error).__name__}: {error}")
        raise
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch 2.13 aborts about one in four ends of a process that used DDP on gloo; 2.11 did not in 15


if __name__ == "__main__":
    _rank_main(*sys.argv[1:])
