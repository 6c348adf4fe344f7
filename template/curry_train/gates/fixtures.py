"""Fixtures of gates: a simulated machine, planted hosts, counted copies, and ranks.

The machine slows down over time, is slow before it is warm, stalls now and then, and returns from a
launch before the work is done. Its time depends only on the work given to it, so the right result
of a measurement is known, whatever else runs on the real machine.

Proof: `python -m pytest tests/gates/test_ranks.py tests/gates/test_bench.py`.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
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


# What autograd saves in blocks, and the bytes that are copied, for the gates of offload.

LEAST_BYTES = 4096  # smaller storages stay on the device


class SavedTensors:
    """The tensors that autograd saves while some modules run, as `save_on_cpu` would copy them."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.model = model
        self.modules = [model.get_submodule(name) for name in names]
        self.tensors: list[Tensor] = []
        self.open: list[saved_tensors_hooks] = []

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        handles = [module.register_forward_pre_hook(self._enter) for module in self.modules]
        handles += [module.register_forward_hook(self._leave) for module in self.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            while self.open:  # a module raised
                self._leave()

    def num_bytes(self, *, sure: bool = False) -> int:
        """Count the bytes of the storages that are large enough and not of parameters or buffers.

        With `sure` only storages that must move are counted: those with a saved tensor that
        requires a gradient or fills at least half of the storage, unless it is a cast of a
        parameter. The others may stay on the device.
        """
        owned = {_address(tensor) for tensor in [*self.model.parameters(), *self.model.buffers()]}
        groups: dict[int, list[Tensor]] = {}
        for tensor in self.tensors:
            if tensor.untyped_storage().nbytes() >= LEAST_BYTES and _address(tensor) not in owned:
                groups.setdefault(_address(tensor), []).append(tensor)
        sizes = {address: group[0].untyped_storage().nbytes() for address, group in groups.items()}
        return sum(
            size
            for address, size in sizes.items()
            if not sure or any(map(_is_sure, groups[address]))
        )

    def _enter(self, *_: Any) -> None:
        self.open.append(saved_tensors_hooks(self._keep, lambda tensor: tensor))
        self.open[-1].__enter__()

    def _leave(self, *_: Any) -> None:
        self.open.pop().__exit__()

    def _keep(self, tensor: Tensor) -> Tensor:
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
            self.tensors.append(tensor)  # held alive, so that no address is reused
        return tensor.detach()


class CopiedBytes(TorchDispatchMode):
    """Count the bytes that copies write: to the host on CUDA, all of them on CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.nbytes = 0
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in COPY_OPERATIONS and isinstance(out, Tensor):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if self.device.type == source.device.type and out.device.type == "cpu":
                self.nbytes += out.nbytes
        return out


COPY_OPERATIONS = (
    torch.ops.aten.copy_.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_sure(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    sources = [] if base.grad_fn is None else [node for node, _ in base.grad_fn.next_functions]
    if len(sources) == 1:
        parameter = getattr(sources[0], "variable", base)
        if getattr(parameter, "dtype", base.dtype) != base.dtype:  # a cast of a parameter
            return False
    return tensor.requires_grad or 2 * tensor.nbytes >= tensor.untyped_storage().nbytes()


# Blocks whose saved tensors are known: what moves to the host, and what stays.

TENSOR_SIDE = 64  # of the square tensors that planted blocks save
SAVED_BYTES = 4 * TENSOR_SIDE * TENSOR_SIDE


def square_tensor(start: float) -> Tensor:
    """Return a tensor of `SAVED_BYTES`, with numbers from `start` to 1."""
    return torch.linspace(start, 1, TENSOR_SIDE**2).reshape(TENSOR_SIDE, TENSOR_SIDE)


class SavingBlock(nn.Module):
    """A block whose `act` makes autograd save tensors of `SAVED_BYTES`."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.weight = nn.Parameter(square_tensor(-1))
        self.register_buffer("factors", square_tensor(0))
        self.data = torch.ones(8 * TENSOR_SIDE, TENSOR_SIDE)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return self.act(self, x, *given)


def _views(block: Any, x: Tensor) -> Tensor:
    y = x.exp()
    if hasattr(block, "saved"):
        block.saved.append(ref(y))
    return y.view(-1).sin().view(TENSOR_SIDE, TENSOR_SIDE) + y[:, :1].cos() + y.t().cos()


def _detached(block: Any, x: Tensor) -> Tensor:
    y = x.exp()
    return y + y.detach().requires_grad_().sin()


def _in_bfloat16(block: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear((x * 1).bfloat16(), block.weight).float()


def _sparse(block: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(TENSOR_SIDE).to_sparse(), x)


def six_in_a_row(block: Any, x: Tensor) -> Tensor:
    for _ in range(6):
        x = (0.1 * x).exp()
        if hasattr(block, "note"):
            x.register_hook(block.note)
    return x


PARAMETER_REASON = "parameter or buffer"
# Of each: what a block does, how many storages move, and the tensors that stay, by the reason.
SAVED_STORAGES: dict[str, tuple[Callable[..., Tensor], int, dict[str, tuple[int, int]]]] = {
    "one tensor": (lambda block, x: x.exp(), 1, {}),
    "views": (_views, 1, {"duplicate": (3, 2 * SAVED_BYTES + 4 * TENSOR_SIDE)}),
    "a detached tensor": (_detached, 1, {"alias of what moved": (1, SAVED_BYTES)}),
    "a weight": (lambda block, x: x @ block.weight, 1, {PARAMETER_REASON: (1, SAVED_BYTES)}),
    "a buffer": (lambda block, x: x * block.factors, 0, {PARAMETER_REASON: (1, SAVED_BYTES)}),
    "few numbers": (
        lambda block, x: x.exp() + x[:2].t().exp().sum(),
        1,
        {"too small": (1, 4 * 2 * TENSOR_SIDE)},
    ),
    "a slice of data": (
        lambda block, x, given: x * given,
        0,
        {"slice of data": (1, SAVED_BYTES)},
    ),
    "a copy of a weight": (_in_bfloat16, 1, {"cast of a parameter": (1, SAVED_BYTES // 2)}),
    "a sparse tensor": (_sparse, 0, {"no plain tensor of the device": (1, 0)}),
    "few numbers and a weight": (
        lambda block, x: x[:2].exp().sum() + x @ block.weight,
        1,
        {"too small": (1, 4 * 2 * TENSOR_SIDE), PARAMETER_REASON: (1, SAVED_BYTES)},
    ),
    "six in a row": (six_in_a_row, 6, {}),
}


# Planted hosts: files below a folder, and the bytes that a process may still allocate.

MEMINFO_TEXT = "MemTotal: 900 kB\nMemFree: 10 kB\nMemAvailable: 800 kB\n"


def _group(folder: str, limit: object, used: int, stat: str | None = None) -> dict[str, str]:
    """Return the files of a control group of the second version."""
    files = {f"{folder}/memory.max": f"{limit}\n", f"{folder}/memory.current": f"{used}\n"}
    return files if stat is None else files | {f"{folder}/memory.stat": stat}


SECOND_ROOT = "sys/fs/cgroup"
FIRST_ROOT = "sys/fs/cgroup/memory"
FIRST_GROUP = {
    f"{FIRST_ROOT}/memory.limit_in_bytes": "7000\n",
    f"{FIRST_ROOT}/memory.usage_in_bytes": "3000\n",
    f"{FIRST_ROOT}/memory.stat": "inactive_file 9\ntotal_inactive_file 500\n",
}
JOB_FILES = {"proc/self/cgroup": "0::/user/job\n", "proc/meminfo": MEMINFO_TEXT}
PLANTED_HOSTS: dict[str, tuple[dict[str, str], int | None]] = {
    "no files": ({}, None),
    "a kernel": ({"proc/meminfo": MEMINFO_TEXT}, 800 * 1024),
    "a kernel that does not report it": ({"proc/meminfo": "MemFree: 10 kB\n"}, None),
    "a group without files": (JOB_FILES, 800 * 1024),
    "a group": (JOB_FILES | _group(f"{SECOND_ROOT}/user/job", 9000, 4000), 5000),
    "a group above": (
        JOB_FILES
        | _group(f"{SECOND_ROOT}/user/job", "max", 4000)
        | _group(f"{SECOND_ROOT}/user", 6000, 5000, "anon 3\ninactive_file 700\n"),
        1700,
    ),
    "the root group of a container": (
        JOB_FILES | _group(SECOND_ROOT, 5000, 4000, "anon 3\n"),
        1000,
    ),
    "a group with a wide limit": (JOB_FILES | _group(f"{SECOND_ROOT}/user", 2**40, 0), 800 * 1024),
    "a limit without its use": (JOB_FILES | {f"{SECOND_ROOT}/user/memory.max": "5"}, 800 * 1024),
    "the first version": ({"proc/self/cgroup": "4:hugetlb,memory:/a/b\n"} | FIRST_GROUP, 4500),
    "both versions": (
        {"proc/self/cgroup": "3:cpu:/a\n4:memory:/a:b\n0::/c\n"}
        | FIRST_GROUP
        | _group(f"{SECOND_ROOT}/c", 4000, 1000),
        3000,
    ),
}


# The sizes that reports print.
PLANTED_SIZES = {
    0: "0 B",
    1023: "1023 B",
    1024: "1.00 KiB",
    10 * 1024: "10.0 KiB",
    500 * 2**20: "500 MiB",
    3 * 2**29: "1.50 GiB",
    2**40: "1.00 TiB",
    2**51: "2048 TiB",
}


class PlantedStream:
    """A stream of copies on no device, whose copies are done once `done` says so."""

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.done: list[bool] = []
        self.calls: list[Any] = []
        self.wait_stream = self.wait_event = self.calls.append

    def record_event(self, event: Any = None) -> Any:
        """Return an event of the last copy."""
        number = len(self.done)
        self.done.append(False)
        return SimpleNamespace(query=lambda: self.done[number], number=number)


# Functions that run on several ranks.


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
