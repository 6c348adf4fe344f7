"""Run the user's script or trainer in a process of its own, and check its loop.

The process ends at the last step that was asked for, without the rest of the loop. The files that
it made or changed are put back after it.

Proof: `python -m pytest tests/gates/test_loop_run.py`.
"""

import contextlib
import functools
import getpass
import json
import multiprocessing
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock
from uuid import uuid4

import click
import safetensors.torch
import torch
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..core.measure import is_out_of_memory
from ..core.replaced_calls import replaced_calls
from ..workloads.from_script import advice_on, launcher_variables, run_as_main
from ..workloads.models import load_object
from ..workloads.shrink import shrunk_configurations
from ..workloads.workload import WorkloadError
from .loop import DEFAULT_STEPS, judge, verdict_of
from .loop_events import Trace, world_size
from .loop_ranks import REQUIRED, faults_of_ranks, rank_facts
from .loop_trace import observe
from .loop_weights import instances_of
from .verdict import Verdict, error_in_a_line, not_applicable, where_to_look

# Services that a loop may report to.
OFFLINE = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "COMET_MODE": "disabled"}
# A rank that has made no step for so long, after another one has ended, waits for it.
SECONDS_TO_FOLLOW = 30.0
# Time for a save in the background, so that the step of a resume does not depend on the disk.
SECONDS_BEFORE_KILL = 1.0
SMALLER = "give it a smaller model; preflight builds the same one with two layers by --shrink 2"
NOT_SHRUNK = (
    "--shrink: no model is built from a configuration with more layers than that: leave it out, "
    "and give your script its own option for a smaller model"
)
# Of files, in bytes.
LARGEST_COPY = 2**30
# Of places that a loop has changed, in a folder with copies of what was there.
CHANGES = "changes.jsonl"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class LoopFailed(RuntimeError):
    """The user's training raised an error before it could be checked; the text says where."""


def preflight_program(
    kind: str,
    words: Sequence[str],
    *,
    num_steps: int = DEFAULT_STEPS,
    num_ranks: int = 1,
    num_layers: int = 0,
) -> list[Verdict]:
    """Check the loop of a `script` with its arguments, or of a `trainer` factory.

    With a number of layers the configurations of the user's models are changed to it.
    """
    job = functools.partial(_check_loop, num_steps, num_layers)
    found = run_ranks(job, [kind, *words], num_ranks=num_ranks)
    verdicts = [one["verdicts"] for one in found if one]
    # The first rank with a fault has the verdict.
    merged: list[Verdict] = [
        min(of_ranks, key=lambda one: one.passed is not False)
        for of_ranks in zip(*verdicts, strict=True)
    ]
    if num_ranks > 1:
        faults = faults_of_ranks([one.get("ranks") for one in found])
        merged.append(verdict_of("ranks", REQUIRED, faults))
    return merged


Found = dict[str, Any]
# Writes what was found, and ends the process.
End = Callable[[Found], NoReturn]


# Work in another process, to which it is pickled. It runs the user's program by calling its first
# argument, and calls the second when enough is known. If it does not, {"ended": True} is found.
Job = Callable[[Callable[[], None], End], None]


def run_ranks(
    job: Job,
    program: Sequence[str],
    *,
    num_ranks: int = 1,
    saves: bool = False,
    undo: Path | None = None,
    ignored: Sequence[str | Path] = (),
) -> list[Found]:
    """Run a program, given by its kind and words, for each rank, and return what the jobs found.

    Several ranks are started as torchrun starts them. Files that were changed are put back when all
    processes have ended, except in the folders that are `ignored`. With `undo` a process is killed
    when it has found enough, its changes are noted in that folder, and the caller puts them back.
    Unless it `saves`, torch's functions that save do nothing.
    """
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        results = [Path(folder, f"found_{rank}") for rank in range(num_ranks)]
        Path(folder, "job").write_bytes(pickle.dumps((job, program, saves, undo, ignored)))
        port = get_free_port()
        processes = []
        for rank, result in enumerate(results):
            environment = os.environ | OFFLINE
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            if num_ranks > 1:
                environment |= launcher_variables(rank, num_ranks, port)
            command = [sys.executable, "-c", RUN_JOB, str(result)]
            # Standard output is for the result; the script prints to standard error.
            processes.append(subprocess.Popen(command, env=environment, stdout=2))
        try:
            with stopped_by_signals():
                _wait(Path(folder), processes)
        finally:
            for one in processes:
                one.kill()
                one.wait()
            if undo is None:
                put_back(Path(folder))
        found = [pickle.loads(one.read_bytes()) if one.exists() else {} for one in results]
    for one in found:
        if "error" in one:
            raise LoopFailed(one["error"])
    if not found[0]:
        status = processes[0].returncode
        if status == -signal.SIGKILL:
            raise LoopFailed(f"its process was killed, as where memory runs out: {SMALLER}")
        raise LoopFailed(
            f"its process ended itself with status {status} before it was judged: leave os._exit "
            "out, or give fewer --steps"
        )
    return found


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let the signals that end a process raise SystemExit, so that files are put back."""
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            # Windows has no SIGHUP, which comes where a terminal is closed.
            for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
                before = signal.signal(number, lambda one, _: sys.exit(128 + one))
                stack.callback(signal.signal, number, before)
        yield


def _wait(folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all ranks; once one has ended, for as long as the others make steps."""
    ended = time.time()
    while running := [one for one in processes if one.poll() is None]:
        if len(running) == len(processes):
            ended = time.time()
        steps = [one.stat().st_mtime for one in folder.glob("*.progress")]
        if time.time() - max([ended, *steps]) > SECONDS_TO_FOLLOW:
            for one in running:
                one.kill()
        time.sleep(0.05)


def loop_verdicts(spec: str) -> list[Verdict]:
    """Check the loop of a workload that was read off a script or trainer, by its spec."""
    kind, _, text = spec.partition("=")
    words = shlex.split(text) if kind == "script" else [text]
    try:
        return preflight_program(kind, words)
    except LoopFailed as error:
        return [not_applicable("loop/run", str(error))]


# The code of the process. `python -m` would import this module twice, under two names. Ctrl-C
# (signal 2) ends it without a traceback of its imports; its parent prints a line.
RUN_JOB = (
    "import signal, sys; signal.signal(2, signal.SIG_DFL); "
    f"from {__name__} import run_job; run_job(sys.argv[1])"
)


def run_job(result: str) -> NoReturn:
    """Run the job that lies next to the result that it will write, and end this process."""
    given = pickle.loads(Path(result).with_name("job").read_bytes())
    job, (kind, *words), saves, undo, ignored = given
    files = ChangedFiles(undo or Path(result).parent, *ignored)

    def end(found: Found) -> NoReturn:
        unfinished = Path(f"{result}.part")
        unfinished.write_bytes(pickle.dumps(found))
        unfinished.rename(result)
        if undo is not None:
            time.sleep(SECONDS_BEFORE_KILL)
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stdout.flush()
        # Torch, or the script, may raise an error in the main thread as soon as a worker ends; a
        # handler can be set in that thread alone.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Their temporary files are removed with those of this process.
        for one in multiprocessing.active_children() + instances_of(subprocess.Popen):
            one.kill()
        os._exit(0)

    run = _run_script if kind == "script" else train_by
    try:
        # For those who wait.
        register_optimizer_step_post_hook(lambda *_: Path(result).with_suffix(".progress").touch())
        with files.noticed(), _replace_saving(saves=saves):
            job(lambda: run(*words), end)
        end({"ended": True})
    except BaseException as error:  # noqa: BLE001 - the user's script may raise anything
        is_memory = isinstance(error, MemoryError) or is_out_of_memory(error)
        failure = f"{error_in_a_line(error)}: {SMALLER if is_memory else where_to_look(error)}"
        failure += advice_on(error)
        # Our own refusals say what to change.
        is_ours = isinstance(error, click.ClickException | WorkloadError)
        end({"error": str(error) if is_ours else failure})


def _check_loop(num_steps: int, num_layers: int, run: Callable[[], None], end: End) -> None:
    """Judge the loop after so many steps, with so many layers of its models, or 0 for all."""
    notes: list[str] = []

    def when_enough(trace: Trace, *, has_ended: bool = False) -> None:
        if num_layers and not notes:
            end({"error": NOT_SHRUNK})
        remarks = [f"{note}; what the others need is not checked" for note in notes]
        made = trace.num_steps_made
        # A loop with an optimizer for each task makes few steps with each.
        if has_ended and 0 < made < num_steps:
            remarks.append(f"the loop ended after {made} of {num_steps} steps")
        if trace.error is not None:
            remarks.append(f"the loop ended with {error_in_a_line(trace.error)}")
        if idle := trace.idle_parameters & trace.names.keys():
            remarks.append(f"in an optimizer, but without a gradient: {trace.named(idle)}")
        if trace.unreached_line:
            remarks.append(
                f"{trace.unreached_line} was not reached; if it trains too, let the stages before "
                "it make fewer steps"
            )
        verdicts = judge(trace)
        for one in remarks:
            print(f"preflight: {one}", file=sys.stderr)
        end({"verdicts": verdicts, "ranks": rank_facts(trace)})

    with shrunk_configurations(num_layers, notes) if num_layers else contextlib.nullcontext():
        trace = observe(run, num_steps=num_steps, when_enough=when_enough)
    when_enough(trace, has_ended=True)


def _run_script(file: str, *arguments: str) -> None:
    """Run a file as `python FILE ARGUMENTS` does; a call of sys.exit ends the loop."""
    spawning: Any = sys.modules["torch.multiprocessing.spawn"]
    ranks = mock.patch.object(spawning, "start_processes", _run_rank)
    try:
        with ranks:
            run_as_main(file, arguments)
    except SystemExit as ended:
        # As Python does.
        if isinstance(ended.code, str):
            print(ended, file=sys.stderr)


def _run_rank(
    function: Callable[..., None], args: Sequence[Any] = (), nprocs: int = 1, *_: Any, **__: Any
) -> Any:
    """Run the function of torch.multiprocessing.spawn here, for the rank of this process."""
    if nprocs != world_size():
        raise click.UsageError(f"it starts {nprocs} ranks of its own: give --ranks {nprocs}")
    function(int(os.environ.get("RANK", "0")), *args)
    return SimpleNamespace(join=lambda *_: True)


def train_by(spec: str, *, resume_from: Callable[[], Path | None] | None = None) -> None:
    """Train by what a factory makes: a Trainer of Hugging Face, or of Lightning with its module.

    To resume, Lightning needs a checkpoint; Hugging Face's finds it.
    """
    made = load_object(spec)
    trainer, *rest = made if isinstance(made, tuple) else (made,)
    if hasattr(trainer, "fit"):
        more = {"ckpt_path": resume_from()} if resume_from else {}
        trainer.fit(*[one for one in rest if one is not None], **more)
    elif hasattr(trainer, "train") and not isinstance(trainer, nn.Module):
        trainer.train(**({"resume_from_checkpoint": True} if resume_from else {}))
    else:
        raise WorkloadError(f"{type(trainer).__name__} has no loop: give its script by --script")


@contextlib.contextmanager
def _replace_saving(*, saves: bool) -> Iterator[None]:
    """Let functions that write in C touch their file in Python, where `ChangedFiles` notices it.

    Without `saves` files that are there already stay as they are: they may be large. New ones may
    be loaded again by the loop.
    """
    import torch.distributed.checkpoint as dcp

    made = set[Path]()

    def noticed(save: Any, *args: Any, **options: Any) -> None:
        # torch names it `f`.
        target = [*args[1:], options.get("f")][0]
        if isinstance(target, str | os.PathLike):
            path = Path(target)
            if not saves and path not in made and path.exists():
                return
            made.add(path)
            path.open("ab").close()
        save(*args, **options)

    replaced: list[Any] = [(torch, "save", noticed), (safetensors.torch, "serialize_file", noticed)]
    replaced += [
        (dcp, name, mock.MagicMock()) for name in (() if saves else ("save", "async_save"))
    ]
    with replaced_calls(replaced):
        yield


class ChangedFiles:
    """Notes files and folders that Python code makes or changes, so that they can be put back.

    A folder gets the list, and copies of what was there. Several processes may share it, and it
    serves after they were killed. Where a change could not be put back it is refused: folders that
    were there before can't be moved or removed, nor large files changed.
    """

    def __init__(self, folder: Path, *ignored: str | Path) -> None:
        self.folder = folder.resolve()
        self.is_noticing = False
        # The cache of compiled code, which other processes use too.
        compiled = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
        stays = (str(self.folder), "/dev", "/proc", compiled, *ignored)
        # A copy of what was at a place before its first change, or None for nothing. Changes inside
        # of such a place are not noted: these folders, and those that the loop has made.
        self.before: dict[Path, Path | None] = {Path(os.path.abspath(one)): None for one in stays}

    def noticed(self) -> contextlib.AbstractContextManager[Any]:
        sys.addaudithook(self._audit)  # which can't be removed
        return mock.patch.object(self, "is_noticing", True)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_noticing:
            return
        match event, args:
            case "open", (path, _, int(flags)) if flags & WRITES:
                self._note(path, follows_links=True)
            case "os.mkdir" | "os.truncate", (path, *_):
                self._note(path)
            case "os.symlink" | "os.link", (_, path, *_):
                self._note(path)
            # A path that is relative to the descriptor of a folder is passed over.
            case "os.remove" | "os.rmdir" | "shutil.rmtree", (path, None | -1, *_):
                self._note(path, goes=True)
            case "os.rename", (*paths, _, _):
                for path in paths:
                    self._note(path, goes=True)

    def _note(self, path: Any, *, goes: bool = False, follows_links: bool = False) -> None:
        """Note what is at a path before its first change, or refuse the change."""
        if not isinstance(path, str | bytes | os.PathLike):
            return
        text = os.fsdecode(path)
        place = Path(os.path.realpath(text) if follows_links else os.path.abspath(text))
        if place not in self.before and all(self.before.get(one, one) for one in place.parents):
            self.before[place] = kept = self._back_up(place, goes=goes)
            with (self.folder / CHANGES).open("a") as stream:
                stream.write(json.dumps([str(place), kept and str(kept)]) + "\n")

    def _back_up(self, place: Path, *, goes: bool) -> Path | None:
        """Return a copy of the file or link that is there, a folder itself, or None."""
        if place.is_dir() and not place.is_symlink():
            if goes:
                raise RuntimeError(
                    f"the loop moves or removes the folder {place}, which was there before: give "
                    "it another one"
                )
            return place  # it stays
        if not os.path.lexists(place):
            return None
        if place.lstat().st_size > LARGEST_COPY:
            raise RuntimeError(
                f"the loop changes {place}, which is too large to be put back: give it another file"
            )
        return Path(shutil.copy2(place, self.folder / uuid4().hex, follow_symlinks=False))


def read_changes(folder: Path) -> dict[Path, Path | None]:
    """Return the places that were changed, with what was there before the first change."""
    log = folder / CHANGES
    lines = log.read_text().splitlines() if log.exists() else []
    # The first of several ranks that noted a place counts.
    changes = map(json.loads, reversed(lines))
    return {Path(place): kept and Path(kept) for place, kept in changes}


def put_back(folder: Path) -> None:
    """Put back what was changed, once the processes that changed it have ended."""
    for place, kept in read_changes(folder).items():
        if kept == place:
            continue
        with contextlib.suppress(OSError):
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            elif kept is None or place.is_symlink() or kept.is_symlink():
                place.unlink(missing_ok=True)
            # Over a file, which may have other names.
            if kept is not None:
                shutil.copy2(kept, place, follow_symlinks=False)
