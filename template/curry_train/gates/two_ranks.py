"""Run a check on two ranks, under DDP and FSDP2.

The ranks are processes on the CPU that gloo connects. They load the workload, and what is judged,
by name.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import datetime
import functools
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ..core.blocks import find_blocks
from ..core.measure import OperationMode
from ..workloads.workload import Case
from .verdict import NotApplicable, Outcome, RankFailed, error_in_a_line, where_to_look

# Makes a model of the same values each time under DDP or FSDP2; `change` changes it before that,
# and with `seeds_further` it has the values of another seed.
Wrapped = Callable[..., nn.Module]
# The measured figure and whether it is right, or the reason why the model is refused and None.
Measured = tuple[str, bool | None]
OUTCOMES = (None, False, True)
# The figures of a rank, by "DDP" and "FSDP2".
Found = Mapping[str, Measured]
# Ranks that take longer than this, and so many times a step of this process, wait for each other.
LEAST_SECONDS = 180.0
MOST_STEPS = 300
# Lines of a failed rank's log that go into the error.
LAST_LINES = 12
# In the error of a rank whose peer has ended.
LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer")
# So long such a rank waits, so that the error of the one that ended is taken.
SECONDS_TO_NOTICE = 5.0
# The interpreter that runs the ranks.
PYTHON_EXECUTABLE: str | os.PathLike[str] = sys.executable


def compare_on_ranks(
    check: Callable[..., Found], case: Case, *, required: str, hint: str, **arguments: Any
) -> Outcome:
    """Call `check(case, **arguments)` on two ranks, and join what they found.

    A wrapper that refuses the model on any rank is named.
    """
    results = _run_on_two_ranks(check, case, arguments)
    figures = []
    refused = []
    outcomes = []
    for kind in results[0]:
        of_ranks = enumerate(found[kind] for found in results)
        # The first rank that refuses the model, else the first that is wrong.
        rank, (text, is_right) = min(of_ranks, key=lambda found: OUTCOMES.index(found[1][1]))
        outcomes.append(is_right)
        if is_right is None:
            refused.append(text)
            text = f"not compared: {text}"
        elif not is_right:
            text = f"{text} on rank {rank}"
        figures.append(f"{kind} {text}")
    if len(refused) == len(figures):
        raise NotApplicable("; ".join(dict.fromkeys(refused)))
    return "; ".join(figures), required, hint if False in outcomes else ""


def _run_on_two_ranks(
    check: Callable[..., Found], case: Case, arguments: Mapping[str, Any]
) -> list[Found]:
    if not case.workload.spec:
        raise NotApplicable("the workload has no name, by which other processes could load it")
    started = time.monotonic()
    case.mean_loss(case.build()).backward()
    step_seconds = time.monotonic() - started
    # The ranks serve all gates, because starting them takes longer than most steps.
    if _ranks and (_ranks[0].working_folder != Path.cwd() or not _ranks[0].is_running):
        _ranks.pop().close()
    if not _ranks:
        _ranks.append(RankProcesses(2))
    job = functools.partial(check, replace(case, device=torch.device("cpu")), **arguments)
    return _ranks[0].call(job, timeout=LEAST_SECONDS + MOST_STEPS * step_seconds)


# The ranks of all gates, once one was called.
_ranks: list["RankProcesses"] = []


def measure_under_both(
    case: Case,
    batches: Sequence[Any],
    measure: Callable[[Wrapped, str], Measured],
    *,
    unused: bool = False,
    training: bool = False,
) -> Found:
    """Measure the model under DDP and under FSDP2, where torch accepts it.

    `measure` gets a function that makes it. `unused` tells that batches other than these may use
    only a part of the parameters, and `training` that layers drop out; the ranks have to drop the
    same ones then.
    """
    # DDP takes no reentrant checkpoint where it has to look for unused parameters.
    num_unused = torch.tensor(int(unused))
    with GradientSyncs() as plain:
        for batch in batches:
            model = case.build().train(training)
            case.mean_loss(model, batch).backward()
            num_unused += sum(one.requires_grad and one.grad is None for one in model.parameters())
    dist.all_reduce(num_unused)
    if plain.num_in_forward:
        why = "the model itself communicates between ranks, which computes another function"
        return dict.fromkeys(("DDP", "FSDP2"), (why, None))

    found: dict[str, Measured] = {}
    for kind, wraps in _list_wrappings(case, unused=bool(num_unused)).items():
        for wrap in wraps:
            make = functools.partial(_wrap, case, wrap)
            try:
                # FSDP2 compares dtypes in the first forward, and DDP counts gradients in backward.
                wrapped = make().train(training)
                # A loss of derivatives may leave parameters unused, as DDP finds in a second step.
                for _ in range(2):
                    case.mean_loss(wrapped, batches[0]).backward()
            except Exception as error:  # noqa: BLE001 the user's loss may raise anything here
                found[kind] = error_in_a_line(error), None
            else:
                found[kind] = measure(make, kind)
                break
    return found


def _list_wrappings(case: Case, *, unused: bool) -> dict[str, list[Callable[[nn.Module], Any]]]:
    """Return ways to wrap a model by kind, of which the first that torch accepts is used."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded_by_block(model: nn.Module) -> Any:
        for block in find_blocks(model, case.blocks).values():
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return {
        "DDP": [functools.partial(DistributedDataParallel, find_unused_parameters=unused)],
        "FSDP2": [sharded_by_block, functools.partial(fully_shard, mesh=mesh)],
    }


def _wrap(
    case: Case,
    wrap: Callable[[nn.Module], nn.Module],
    *,
    change: Callable[[nn.Module], Any] = lambda model: None,
    seeds_further: int = 0,
) -> nn.Module:
    model = replace(case, seed=case.seed + seeds_further).build().eval()
    change(model)
    return wrap(model)


# Processes, one for each rank.


class RankProcesses:
    """Processes that gloo connects and that call functions together, until this is closed.

    They end when this process does, however it ends.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.working_folder = Path.cwd()
        # Only this user can write there, so that pickles in the store come from the ranks.
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        # The store passes jobs and results, and the ranks find each other through it.
        self._store = _store_in(self._folder.name)
        self._num_calls = 0
        self._processes = [self._start(rank) for rank in range(num_ranks)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        """Start a process in the environment of this one.

        With the variables that torchrun sets, a trainer would give each rank a part of the data.
        """
        paths = os.pathsep.join(filter(None, sys.path))
        arguments = (self._folder.name, str(rank), str(self.num_ranks))
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                [PYTHON_EXECUTABLE, "-m", str(__spec__.name), *arguments],
                env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name, f"{rank}.log")

    def call(self, job: Callable[[], Any], *, timeout: float) -> list[Any]:
        """Call a function on every rank and return the results; both are pickled.

        If a rank fails, the others are killed, and its error is raised; where it ended without one,
        the error quotes the end of its log. Where memory runs out the system kills a rank, which is
        a MemoryError.
        """
        self._num_calls += 1
        self._store.set(str(self._num_calls), pickle.dumps(job))
        results = [f"{rank}.{self._num_calls}" for rank in range(self.num_ranks)]
        until = time.monotonic() + timeout
        while not self._store.check(results):
            codes = [process.poll() for process in self._processes]
            if any(code is not None for code in codes) or time.monotonic() > until:
                self._raise(codes, timeout)
            time.sleep(0.01)
        return [pickle.loads(self._store.get(name)) for name in results]

    def _raise(self, codes: Sequence[int | None], timeout: float) -> NoReturn:
        ended = [rank for rank, code in enumerate(codes) if code is not None]
        error: Exception
        if not ended:
            error = RuntimeError(f"{self.num_ranks} ranks did not end within {timeout:.0f} s")
        elif -signal.SIGKILL in codes:
            error = MemoryError(f"the system ended one of {self.num_ranks} ranks")
        elif self._store.check(["error"]):
            error = pickle.loads(self._store.get("error"))
        else:
            log = self._log(ended[0]).read_text(errors="replace").strip().splitlines()
            error = RankFailed("\n".join([f"rank {ended[0]}:", *log[-LAST_LINES:]]))
            error.add_note("run it on one rank")
        self.close()
        raise error

    @property
    def is_running(self) -> bool:
        # The caller may have deleted its temporary folder.
        has_folder = Path(self._folder.name).is_dir()
        return has_folder and all(process.poll() is None for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            with process:
                process.kill()
        self._folder.cleanup()


def _store_in(folder: str) -> Any:
    # The class, and bytes as values, are documented by torch and missing in its stubs.
    store: Any = dist.FileStore(f"{folder}/store", -1)  # type: ignore[attr-defined]
    # A rank may wait for its next job as long as the other process runs.
    store.set_timeout(datetime.timedelta(days=30))
    return store


class GradientSyncs(OperationMode):
    """Mode that counts the all-reduces and reduce-scatters of backward passes.

    `num_in_forward` counts collectives of any kind outside of backward.
    """

    num_calls = 0
    num_in_forward = 0

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func.namespace == "c10d":
            # Imported here because a machine without ranks needs no probe.
            from ..primitives.grad_flow_probe import in_backward

            is_sync = func.__name__.startswith(("allreduce_", "_reduce_scatter"))
            self.num_calls += is_sync and in_backward()
            self.num_in_forward += not in_backward()
        return func(*args, **kwargs)


def _rank_main(folder: str, rank: int, num_ranks: int) -> None:
    """Call the jobs in the store, one after the other, until the other process ends."""
    torch.set_num_threads(1)

    def end_with_the_other() -> None:
        sys.stdin.read()
        # With torch 2.13, a process that used DDP on gloo aborts at about one in four ordinary
        # exits; with 2.11 it did not in 15.
        os._exit(0)

    Thread(target=end_with_the_other, daemon=True).start()
    store = _store_in(folder)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        for number in itertools.count(1):
            result = pickle.loads(store.get(str(number)))()
            sys.stdout.flush()
            store.set(f"{rank}.{number}", pickle.dumps(result))
    except BaseException as error:
        failure = RankFailed(error_in_a_line(error))
        failure.add_note(where_to_look(error))
        if any(text in str(failure) for text in LOST_CONNECTION):
            time.sleep(SECONDS_TO_NOTICE)
        if not store.check(["error"]):
            store.set("error", pickle.dumps(failure))
        raise


if __name__ == "__main__":
    _rank_main(sys.argv[1], *map(int, sys.argv[2:]))
