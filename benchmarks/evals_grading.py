"""Run an agent's files in forks for the graders of eval cases: measure, kill, compare.

A grader is `graders/grade.py` of a case. Each of its functions marked with `point(weight)` judges
one named point and raises `AssertionError` where the point is missed. The agent's code runs in
forks of a process that has imported torch, so that it can neither change the grader nor end it.

    make evals ARGS='--grade grad-accum-uneven-lengths --folder DIR'

Proof: `python -m pytest tests/evals/test_evals.py`.
"""

import contextlib
import gc
import importlib
import importlib.util
import io
import json
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

# Imported before the first fork, since each fork would import them again, in seconds.
READY = (
    "numpy",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.utils.checkpoint",
    "curry_train.core.measure",
)
LONGEST_CALL = 60.0  # seconds for one call of the agent's code, unless a grader gives another limit
Action = Callable[[], None]
Check = Callable[["Work"], None]


class Broken(AssertionError):
    """Raised when the agent's code ends with an exception, a signal, or not at all."""


@dataclass(frozen=True)
class Ended:
    """Exit status of a script, negative for a signal, and its output."""

    status: int
    output: str
    errors: str

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()

    def values(self, start: str) -> list[str]:
        """Return the last word of every printed line that starts so."""
        return [line.split()[-1] for line in self.lines if line.startswith(start)]


@dataclass(frozen=True)
class Grade:
    """The result of one point: its name, weight, and the reason where it was missed."""

    name: str
    says: str
    weight: int
    guard: bool
    passed: bool
    reason: str


def point(weight: int, *, guard: bool = False) -> Callable[[Check], Check]:
    """Mark a function of a grader as the check of one point; its docstring states the point."""

    def mark(check: Check) -> Check:
        vars(check).update(weight=weight, guard=guard)
        return check

    return mark


# The check of something that must stay; it counts only if another point is reached.
guard = partial(point, guard=True)


@dataclass
class Work:
    """The folder that an agent worked in, and the untouched fixture that it started from."""

    folder: Path
    fixture: Path
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def call(self, function: Callable[..., Any], *args, seconds: float = LONGEST_CALL):
        """Return the result of a grader's function, run in a fork inside the agent's folder."""
        return _finish(_start(self.folder, partial(function, *args)), seconds)

    def original(self, function: Callable[..., Any], *args):
        """Return the result of a grader's function, run in a fork inside the fixture."""
        return _finish(_start(self._untouched, partial(function, *args)))

    def ranks(self, count: int, function: Callable[..., Any], *args) -> list[Any]:
        """Run a grader's function on several gloo ranks; return the result of each."""
        meeting = self._new_folder() / "meeting"

        def body(rank: int):
            import torch.distributed as dist

            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count
            )
            try:
                return function(*args)
            finally:
                dist.destroy_process_group()

        started = [_start(self.folder, partial(body, rank)) for rank in range(count)]
        return [_finish(one) for one in started]

    def run(self, script: str, *words: str, at: Mapping[str, Action] | None = None) -> Ended:
        """Run a script of the agent as a program; act when it prints a line that starts so."""

        def body() -> None:
            sys.argv[:] = [script, *words]
            sys.stdout = _Watched(sys.stdout, dict(at or {}))
            runpy.run_path(script, run_name="__main__")

        status, written = _wait(_start(self.folder, body))
        return Ended(status, written["output"], written["errors"])

    def copy(self) -> "Work":
        """Return the same work in a new folder, so that files of one run stay out of the next."""
        target = self._new_folder() / "work"
        shutil.copytree(self.folder, target)
        return Work(target, self.fixture, self.opened)

    def answer(self):
        """Return what the agent wrote into `answer.json`."""
        try:
            return json.loads((self.folder / "answer.json").read_text())
        except ValueError as error:
            raise AssertionError(f"answer.json: {error}") from error

    def assert_unchanged(self, *names: str) -> None:
        """Raise where a file of the fixture was changed or removed."""
        for name in names:
            path = self.folder / name
            assert path.is_file(), f"{name} is gone"
            same = path.read_bytes() == (self.fixture / name).read_bytes()
            assert same, f"{name} was changed"

    @cached_property
    def _untouched(self) -> Path:
        target = self._new_folder() / "fixture"
        shutil.copytree(self.fixture, target)
        return target

    def _new_folder(self) -> Path:
        return Path(self.opened.enter_context(tempfile.TemporaryDirectory(prefix="eval")))


# Graders


def checks(case: Path, *, ready: bool = False) -> dict[str, Check]:
    """Return the marked functions of a case's grader by the names of their points.

    With `ready` everything is imported that the forks need, and what the grader's `IMPORTS` names.
    """
    spec = importlib.util.spec_from_file_location(f"grade_{case.name}", case / "graders/grade.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if ready:
        for name in (*READY, *getattr(module, "IMPORTS", ())):
            importlib.import_module(name)
        gc.freeze()
    found = {name: one for name, one in vars(module).items() if hasattr(one, "weight")}
    return {name.replace("_", "-"): check for name, check in found.items()}


def grade(case: Path, folder: Path) -> list[Grade]:
    """Judge the agent's folder by every point of the case."""
    grades = []
    with contextlib.ExitStack() as opened:
        work = Work(folder.resolve(), (case / "fixture").resolve(), opened)
        for name, check in checks(case, ready=True).items():
            try:
                check(work)
                reason = ""
            except AssertionError as missed:
                reason = str(missed) or "the condition does not hold"
            says = (check.__doc__ or "").strip().splitlines()[0]
            grades.append(Grade(name, says, passed=not reason, reason=reason, **vars(check)))
    return grades


def score(grades: Sequence[Grade]) -> float:
    """Return the share of the weights that was reached; guards alone are worth nothing."""
    if not any(one.passed for one in grades if not one.guard):
        return 0.0
    return sum(one.weight for one in grades if one.passed) / sum(one.weight for one in grades)


# Measuring, called inside of `Work.call`


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the most bytes of tensors alive at any moment that were made inside the call."""
    from curry_train.core.measure import LiveStorages

    with LiveStorages() as storages:
        function()
    return storages.bytes_peak


def flops(function: Callable[[], Any]) -> int:
    """Return the FLOPs of matrix products, convolutions and attention of a call."""
    from curry_train.core.measure import FlopCount

    with FlopCount() as count:
        function()
    return count.flops


def step_on_card(rows: int, **given: Mapping[str, int]) -> dict[str, float]:
    """Return the MiB that steps of `train.py` reserve on a card in bfloat16, and the FLOPs of one.

    The card is not here: a step runs on shapes, and its allocations in the model of the allocator.
    `given` are more arguments of the script's functions `build`, `batch` and `loss_of`.
    """
    import train
    from curry_train.plan.cuda_step import cuda_memory
    from curry_train.plan.estimate import Sketch
    from curry_train.workloads.workload import Workload

    build, batch, loss_of = (
        partial(getattr(train, name), **given.get(name, {}))
        for name in ("build", "batch", "loss_of")
    )
    workload = Workload(
        "train",
        build,
        batch,
        lambda model, rows: loss_of(model, rows)[0],
        count=lambda rows: 1,
        optimizer=train.make_optimizer,
    )
    with Sketch(workload, kernels="cuda", dtype=torch.bfloat16) as sketch:
        step = sketch.step(rows)
    assert step.trace is not None, sketch.why_real
    reserved = cuda_memory(step.trace).reserved_bytes
    return {"reserved": reserved / 2**20, "flops": float(step.flops.sum())}


def assert_largest(
    number, reserved: Callable[[int], float], *, card: float, step: int, most: int
) -> None:
    """Raise unless a number, such as of rows, reserves what a card has, and a step more does not.

    All are in MiB; numbers above `most` are not tried.
    """
    assert isinstance(number, int), f"it is {number!r}"
    assert 0 < number <= most, f"it is {number}"
    size = reserved(number)
    assert size <= card, f"{number} reserve {size:,.0f} MiB"
    size = reserved(number + step)
    assert size > card, f"{number + step} reserve {size:,.0f} MiB and fit as well"


def assert_figures(
    given: Mapping[str, Any], required: Mapping[str, float], *, within: float
) -> None:
    """Raise where a figure of an answer is missing, or wrong by more than this share."""
    for name, right in required.items():
        mine = given.get(name)
        assert isinstance(mine, int | float), f"{name} is {mine!r}"
        assert abs(mine - right) <= within * right, f"{name} is {mine:,}, and {right:,} is right"


def assert_close(measured: Sequence[float], required: Sequence[float], within: float) -> None:
    """Raise where two sequences differ in length, or in a value by more than this share."""
    assert len(measured) == len(required), f"{len(measured)} values, and {len(required)} required"
    for place, (one, other) in enumerate(zip(measured, required, strict=True)):
        close = abs(one - other) <= within * max(abs(other), 1e-12)
        assert close, f"value {place} is {one!r}, and {other!r} is required"


# Actions at a line that a script prints


def kill() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_writing(num_bytes: int) -> Action:
    """Let the kernel end this process in the first file that grows beyond so many bytes."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    return limit


class _Watched(io.TextIOBase):
    """Standard output that acts at the end of lines with a given start, once for each start."""

    def __init__(self, inner, actions: dict[str, Action]) -> None:
        self.inner = inner
        self.actions = actions
        self.line = ""

    def write(self, text: str) -> int:
        self.inner.write(text)
        self.inner.flush()
        *ended, self.line = (self.line + text).split("\n")
        for line in ended:
            for start in [start for start in self.actions if line.startswith(start)]:
                self.actions.pop(start)()
        return len(text)

    def flush(self) -> None:
        self.inner.flush()

    def fileno(self) -> int:
        return self.inner.fileno()


# Forks


FORK = multiprocessing.get_context("fork")


# A process, and the folder of its output and its result.
Fork = tuple[multiprocessing.process.BaseProcess, tempfile.TemporaryDirectory[str]]


def _start(folder: Path, body: Callable[[], Any]) -> Fork:
    """Run a function in a fork, in a folder, with its own output and importable modules."""
    place = tempfile.TemporaryDirectory(prefix="eval")

    def become() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number, name in ((1, "output"), (2, "errors")):
            file = os.open(f"{place.name}/{name}", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, number)
        # No `with`: the fork writes to them until it ends.
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        sys.dont_write_bytecode = True
        torch.set_num_threads(1)
        Path(place.name, "result").write_text(json.dumps(body()))

    process = FORK.Process(target=become)
    process.start()
    return process, place


def _wait(fork: Fork, seconds: float = LONGEST_CALL) -> tuple[int, dict[str, str]]:
    """Return the status of a fork, negative for a signal that ended it, and what it wrote."""
    process, place = fork
    with place as folder:
        process.join(seconds)
        status = process.exitcode
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if status is None:
            process.join()
            raise Broken(f"did not end within {seconds:.0f} s")
        files = Path(folder).iterdir()
        return status, {path.name: path.read_text(errors="replace") for path in files}


def _finish(fork: Fork, seconds: float = LONGEST_CALL):
    status, written = _wait(fork, seconds)
    if status == 0 and "result" in written:
        return json.loads(written["result"])
    *_, last = ["no message", *written["errors"].strip().splitlines()]
    raise Broken(f"ended with status {status}: {last.strip()}")
