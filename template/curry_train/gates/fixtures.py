"""Fixtures of gates: a simulated machine whose time is known, and functions run on ranks.

The machine slows down over time, is slow before it is warm, stalls now and then, and returns from a
launch before the work is done. Its time depends only on the work given to it, so the right result
of a measurement is known, whatever else runs on the real machine.

Proof: `python -m pytest tests/gates/test_ranks.py tests/gates/test_bench.py`.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class PlantedMachine:
    """Simulated machine: `launch` queues work, `wait` finishes it, `clock` reads the time.

    `steps` is the amount of work to come in all and `cold_steps` the amount that is slow at first,
    both in units of `unit`.
    """

    def __init__(
        self,
        *,
        unit: float,
        steps: float,
        cold_steps: float,
        drift: float = 1 / 3,
        cold: float = 10.0,
        stall_every: int = 11,
        stall_steps: float = 50.0,
    ) -> None:
        self.drift = drift
        self._unit = unit
        self._steps = steps
        self._cold_steps = cold_steps
        self._cold = cold
        self._stall_every = stall_every
        self._stall = stall_steps * unit
        self._launch = 0.001 * unit
        self._queued = 0.0
        self._done = 0.0
        self._time = 0.0
        self._num_waits = 0

    def launch(self, amount: float) -> None:
        """Queue work; the call itself takes almost no time."""
        self._queued += amount
        self._time += self._launch

    def wait(self) -> None:
        if not self._queued:
            return
        self._num_waits += 1
        slowness = 1 + self.drift * self._done / (self._steps * self._unit)
        if self._done < self._cold_steps * self._unit:
            slowness *= self._cold
        if self._num_waits % self._stall_every == 0:
            self._time += self._stall
        self._time += self._queued * slowness
        self._done += self._queued
        self._queued = 0.0

    def clock(self) -> float:
        return self._time

    def drift_of(self, steps: float) -> float:
        """Return how much slower the machine gets over so many steps, as a share."""
        return self.drift * steps / self._steps


# Run a function on several local gloo ranks and return the result of each rank.

# Lines of a failed rank's log that go into the error.
LAST_LINES = 12

# The interpreter that runs the ranks.
PYTHON_EXECUTABLE: str | os.PathLike[str] = sys.executable


def run_on_ranks(
    target: str, *, num_ranks: int = 2, timeout: float = 180.0, **arguments: Any
) -> list[Any]:
    """Call a function on every rank and return the results; both pass as JSON.

    `target` is in the form that `load_function` takes, and the ranks have this process's import
    path. If a rank fails, the others are killed, and the error quotes the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [
            _start(rank, num_ranks, [target, json.dumps(arguments), folder])
            for rank in range(num_ranks)
        ]
        try:
            ended = _wait(ranks, until=time.monotonic() + timeout)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if not ended:
            raise RuntimeError(f"{target} on {num_ranks} ranks did not end within {timeout:.0f} s")
        results = [Path(folder, f"{rank}.json") for rank in range(num_ranks)]
        if any(rank.returncode for rank in ranks) or not all(path.exists() for path in results):
            reports = [_last_words(Path(folder), rank) for rank in range(num_ranks)]
            reason = "; ".join(report for report in reports if report)
            raise RuntimeError(f"{target} on {num_ranks} ranks failed: {reason}")
        return [json.loads(path.read_text()) for path in results]


def _start(rank: int, num_ranks: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process with the environment variables that torchrun would set.

    Starting torchrun itself would take as long as starting a rank.
    """
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    with Path(arguments[-1], f"{rank}.log").open("wb") as log:
        command = [PYTHON_EXECUTABLE, "-m", str(__spec__.name), *arguments]
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], *, until: float) -> bool:
    """Wait until every rank has ended or one has failed; return False after the time limit."""
    while time.monotonic() < until:
        codes = [rank.poll() for rank in ranks]
        if any(codes) or None not in codes:
            return True
        time.sleep(0.02)
    return False


def _last_words(folder: Path, rank: int) -> str:
    error = folder / f"{rank}.error"
    log = folder / f"{rank}.log"
    if error.exists():
        return f"rank {rank}: {error.read_text()}"
    lines = log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
    return "\n".join([f"rank {rank}:", *lines]) if lines else ""


class GradientSyncs(TorchDispatchMode):
    """Mode that counts the all-reduces and reduce-scatters of backward passes.

    `num_in_forward` counts collectives of any kind outside of backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.num_in_forward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            # Imported here because a machine without ranks needs no probe.
            from ..primitives.grad_flow_probe import in_backward

            is_sync = func.__name__.startswith(("allreduce_", "_reduce_scatter"))
            self.num_calls += is_sync and in_backward()
            self.num_in_forward += not in_backward()
        return func(*args, **(kwargs or {}))


def load_function(target: str) -> Callable[..., Any]:
    """Load a function given as `package.module:function` or `path/to/file.py:function`."""
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
    rank = int(os.environ["RANK"])
    num_ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=num_ranks
    )
    try:
        result = load_function(target)(**json.loads(arguments))
        Path(folder, f"{rank}.json").write_text(json.dumps(result))
    except BaseException as error:
        Path(folder, f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
        raise
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()

    # With torch 2.13, a process that used DDP on gloo aborts at about one in four ordinary exits;
    # with 2.11 it did not in 15.
    os._exit(0)


if __name__ == "__main__":
    _rank_main(*sys.argv[1:])
