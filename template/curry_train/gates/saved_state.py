"""Gates of a run while it saves: what it syncs, waits for, locks, refuses, deletes, records.

They train a planted model of two layers, because none of these claims depends on the model. The
gates of `checkpoint_policy.py` save and load the state of the model itself.

Why so long: seven gates of one folder, with the threads, disks, hosts and forgeries they plant.

Proof: `python -m pytest tests/gates/test_saved_state.py`.
"""

import contextlib
import errno
import importlib.util
import json
import math
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.rerun import seeded
from ..core.wording import unheard
from ..runs import lock
from ..runs.attach import saving
from ..runs.background import BackgroundSaver
from ..runs.files import Files, LocalFiles
from ..runs.journal import JournalReading
from ..runs.lock import RunLock, is_being_read, reading, this_process
from ..runs.policy import SavingPolicy
from ..runs.policy_config import PolicyConfig, Retention
from ..runs.ranks import LockedRun
from ..runs.retention import finish_giving_up
from ..runs.state import TrainingState
from ..runs.store import SavedRun, Store
from ..workloads.workload import Case
from .trials import (
    given_up_at_once,
    given_up_once_saved,
    given_up_twice,
    same_bits,
    tensors_of,
)
from .verdict import (
    Gate,
    Judged,
    Takes,
    Trial,
    Verdict,
    attributes_set,
    first_of,
    judged_by,
    not_applicable,
    unlike,
    unrefused,
)

ROLLBACK_KIND = "rollback"


class PlantedModel(nn.Module):
    """Two layers, with running statistics and a mask that is infinite on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output


@contextlib.contextmanager
def planted_training(case: Case) -> Iterator[tuple[TrainingState, Path]]:
    """Yield the state of a small training after one step, and an empty folder."""
    with seeded(case.seed), tempfile.TemporaryDirectory(prefix="saved-state-gate-") as folder:
        model = PlantedModel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = TrainingState(model, optimizer)
        planted_backward(state)
        optimizer.step()
        yield state, Path(folder)


def planted_backward(state: TrainingState) -> None:
    """Replace the gradients by those of a new batch."""
    state.model.zero_grad()
    state.model(torch.randn(4, 2)).square().mean().backward()


# A save in the background is of one moment.

# The thread of a save begins so much later, and the next step would be over by then.
THREAD_DELAY_SECONDS = 0.1


@contextlib.contextmanager
def threads_delayed() -> Iterator[None]:
    """Let each thread that starts inside the context sleep before its first call."""

    def once(*_: Any) -> None:
        sys.setprofile(None)
        time.sleep(THREAD_DELAY_SECONDS)

    threading.setprofile(once)
    try:
        yield
    finally:
        threading.setprofile(None)


def background(case: Case, *, saver: Callable[[Store], Any] = BackgroundSaver) -> Verdict:
    """Take an optimizer step at once after a save in the background has begun; load the save.

    Two saves follow each other, so that the second must not overwrite the copies of the first.
    """
    gate = "checkpoint-policy/background"
    wrong = list[str]()
    with planted_training(case) as (state, folder):
        expected = {}
        with Store(folder) as store, threads_delayed(), saver(store) as saves:
            for step in (1, 2):
                planted_backward(state)
                expected[step] = tensors_of(state)
                saves.save(ROLLBACK_KIND, step, state)
                state.optimizers[0].step()
            saves.finish()
        reader = SavedRun(folder)
        committed = reader.committed(ROLLBACK_KIND)
        for saved in committed:
            reader.load(saved, state)
            found = tensors_of(state)
            wrong += [
                f"{name} of step {saved.step}"
                for name, tensor in expected[saved.step].items()
                # The generators are restored as well, and loading draws from none.
                if not same_bits(tensor, found.get(name))
            ]
    hint = ""
    if wrong:
        hint = f"{wrong[0]} is not that of the save: wait for the copies before the next step"
    elif len(committed) != 2:
        hint = "finish has to wait until the save is committed"
    measured = f"{len(committed)} of 2 saves committed, {len(wrong)} tensors of another moment"
    return Verdict(gate, not hint, measured, "2 committed, each of its own moment", hint)


# A checkpoint that is committed is on the disk.


@dataclass
class DiskEvents:
    """The syncs and renames of this process, in order."""

    # Number of the event, by inode: the last sync, with the size that the file had then.
    synced: dict[int, tuple[int, int]] = field(default_factory=dict)
    renamed: list[tuple[int, str]] = field(default_factory=list)
    num_events: int = 0

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        originals = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

        def fsync(descriptor: Any) -> None:
            originals["fsync"](descriptor)
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            status = os.fstat(number)
            self.num_events += 1
            self.synced[status.st_ino] = self.num_events, status.st_size

        def moved(name: str) -> Callable[..., None]:
            def move(old: Any, new: Any, **options: Any) -> None:
                originals[name](old, new, **options)
                self.num_events += 1
                self.renamed.append((self.num_events, os.fspath(new)))

            return move

        recording = {"fsync": fsync, "rename": moved("rename"), "replace": moved("replace")}
        for name, function in recording.items():
            setattr(os, name, function)
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(os, name, original)


def synced(case: Case, *, files: Callable[[Path], Files] = LocalFiles) -> Verdict:
    """Check that a save syncs every file and its folder before it is committed, and that after.

    What a power cut leaves is only what was synced.
    """
    gate = "checkpoint-policy/synced"
    events = DiskEvents()
    with planted_training(case) as (state, folder), events.recorded():
        with Store(folder, files=files(folder)) as store:
            saved = store.save(ROLLBACK_KIND, 1, state)
        place = folder / saved.folder
        commits = [number for number, name in events.renamed if name == str(place)]
        committed = commits[-1] if commits else 0
        unsynced = [
            path.name
            for path in [*sorted(place.iterdir()), place]
            if not _is_synced(path, events, until=committed)
        ]
        number, _ = events.synced.get(place.parent.stat().st_ino, (0, 0))
        if number <= committed:
            unsynced.append(f"{ROLLBACK_KIND}, after the rename")
    hint = ""
    if not committed:
        hint = "write into a temporary folder, and rename it when it is complete"
    elif unsynced:
        hint = f"not synced: {', '.join(unsynced[:3])}: fsync each file and each folder"
    measured = f"{len(events.synced)} files and folders synced, {len(unsynced)} missing"
    return Verdict(gate, not hint, measured, "every file and folder, before and after", hint)


def _is_synced(path: Path, events: DiskEvents, *, until: int) -> bool:
    status = path.stat()
    number, size = events.synced.get(status.st_ino, (0, -1))
    return 0 < number < until and (path.is_dir() or size == status.st_size)


# A state that is not finite is never saved.


def _nan_in_parameter(state: TrainingState) -> None:
    state.model.get_parameter("layers.2.weight").data[0, 0] = math.nan


def _inf_in_parameter(state: TrainingState) -> None:
    state.model.get_parameter("layers.0.bias").data[1] = math.inf


def _nan_in_buffer(state: TrainingState) -> None:
    state.model.get_buffer("layers.1.running_var")[2] = math.nan


def _nan_in_moment(state: TrainingState) -> None:
    entry = next(iter(state.optimizers[0].state.values()))
    entry["exp_avg_sq"].view(-1)[0] = math.nan


POISONS: dict[str, Callable[[TrainingState], None]] = {
    "NaN in a parameter": _nan_in_parameter,
    "infinity in a parameter": _inf_in_parameter,
    "NaN in a buffer": _nan_in_buffer,
    "NaN in a moment of the optimizer": _nan_in_moment,
    "NaN as the loss": lambda state: None,
}


def finite_states(
    case: Case, *, policy: Callable[[Store, PolicyConfig], Any] = SavingPolicy
) -> Verdict:
    """Save states that are not finite, and one that is, with an infinite mask in a buffer."""
    gate = "checkpoint-policy/finite"
    config = PolicyConfig(rollback_every=1, recovery_every=None, best_k=0)
    saved = []
    for name, poison in (POISONS | {"": lambda state: None}).items():
        with planted_training(case) as (state, folder), unheard(SavingPolicy.__module__):
            poison(state)
            loss = math.nan if "loss" in name else 1.0
            with Store(folder) as store:
                policy(store, config).after_step(1, state, {"loss": loss})
                saved += [name] * len(store.committed(ROLLBACK_KIND))
    wrong = [name for name in saved if name]
    hint = ""
    if wrong:
        hint = f"a state with {wrong[0]} was saved: look at all tensors before a save"
    elif not saved:
        hint = "a sound state was not saved: masks in buffers may be infinite"
    measured = f"{len(wrong)} of {len(POISONS)} broken states saved, {saved.count('')} of 1 sound"
    return Verdict(gate, not hint, measured, f"0 of {len(POISONS)}, 1 of 1", hint)


# The policy itself deletes what it should, and nothing else.

DEV_LOSSES = (5.0, 1.0, 4.0, 2.0, 3.0, 6.0)
KEPT_ROLLBACKS = 2
KEPT_BEST = 2
# The steps between which another process reads the first rollback.
READ_FROM_STEP = 1
READ_UNTIL_STEP = 4


def deletes(case: Case, *, policy: Callable[[Store, PolicyConfig], Any] = SavingPolicy) -> Verdict:
    """Save six steps with a dev loss, while the first rollback is read for some of them.

    After each step the folders have to be the two newest rollbacks, the one that is being read, and
    the two best.
    """
    gate = "checkpoint-policy/deletes"
    config = PolicyConfig(
        rollback_every=1,
        recovery_every=None,
        best_k=KEPT_BEST,
        retention=Retention(rollback_keep=KEPT_ROLLBACKS),
    )
    wrong = list[str]()
    with (
        planted_training(case) as (state, folder),
        Store(folder) as store,
        contextlib.ExitStack() as reader,
    ):
        saves = policy(store, config)
        for step, loss in enumerate(DEV_LOSSES, start=1):
            saves.after_step(step, state, {"loss": loss, config.best_k_metric: loss})
            found = {kind: _steps_of(store, kind) for kind in (ROLLBACK_KIND, "best-k")}
            if problem := _wrong_steps(step, found):
                wrong.append(problem)
            if step == READ_FROM_STEP and found[ROLLBACK_KIND]:
                first = store.committed(ROLLBACK_KIND)[0]
                reader.enter_context(reading(LocalFiles(folder), first.folder))
            if step == READ_UNTIL_STEP:
                reader.close()
    hint = f"{wrong[0]}: delete by the rules alone, and nothing that is read" if wrong else ""
    measured = f"{len(DEV_LOSSES) - len(wrong)} of {len(DEV_LOSSES)} steps right"
    required = "the newest 2, the best 2, and what is being read"
    return Verdict(gate, not wrong, measured, required, hint)


def _steps_of(store: Store, kind: str) -> list[int]:
    return [saved.step for saved in store.committed(kind)]


def _wrong_steps(step: int, found: dict[str, list[int]]) -> str:
    newest = list(range(max(1, step - KEPT_ROLLBACKS + 1), step + 1))
    is_read = READ_FROM_STEP < step <= READ_UNTIL_STEP
    rollbacks = sorted({*newest, 1}) if is_read else newest
    ranked = sorted(range(1, step + 1), key=lambda one: DEV_LOSSES[one - 1])
    best = sorted(ranked[:KEPT_BEST])
    if found[ROLLBACK_KIND] != rollbacks:
        return f"after step {step} the rollbacks are {found[ROLLBACK_KIND]}, not {rollbacks}"
    if found["best-k"] != best:
        return f"after step {step} the best are {found['best-k']}, not {best}"
    return ""


# The journal has every step, evaluation, save and deletion.

JOURNAL_STEPS = 4


def journal_events(case: Case, *, attach: Callable[..., Any] = saving) -> Verdict:
    """Train four steps with `saving`, evaluate two of them, and count the journal's events."""
    gate = "run-journal/events"
    keep = {"rollback_every": 1, "best_k": 1, "retention": {"rollback_keep": 1}}
    with planted_training(case) as (state, folder), unheard(SavingPolicy.__module__):
        runs = folder / "run"
        with attach(state.model, state.optimizers[0], runs=runs, journal=True, **keep) as run:
            for step in range(1, JOURNAL_STEPS + 1):
                evaluated = {"dev_loss": 1.0 / step} if step % 2 == 0 else {}
                run.step(loss=float(step), **evaluated)
        events = list(JournalReading(runs))
        kinds = {kind: _events_of(events, kind) for kind in ("step", "eval", "save", "prune")}
        there = [
            saved.folder
            for kind in (ROLLBACK_KIND, "recovery", "best-k")
            for saved in SavedRun(runs).committed(kind)
        ]

    recorded = {event.facts["checkpoint"] for event in kinds["save"]}
    pruned = {event.facts["checkpoint"] for event in kinds["prune"]}
    losses = [event.facts["loss"] for event in kinds["step"]]
    values = [event.facts["value"] for event in kinds["eval"]]
    hint = ""
    if losses != [float(step) for step in range(1, JOURNAL_STEPS + 1)]:
        hint = "write an event for each step"
    elif values != [0.5, 0.25]:
        hint = "write an event for each metric that is measured"
    elif recorded - pruned != set(there):
        hint = "write an event for each checkpoint that is committed, and for each that is deleted"
    measured = (
        f"{len(losses)} steps, {len(values)} evaluations, {len(recorded)} saves, "
        f"{len(pruned)} deletions; {len(there)} checkpoints left"
    )
    required = f"{JOURNAL_STEPS} steps, 2 evaluations, each save and each deletion"
    return Verdict(gate, not hint, measured, required, hint)


def _events_of(events: Sequence[Any], kind: str) -> list[Any]:
    return [event for event in events if event.kind == kind]


# One writer, and readers.


@contextlib.contextmanager
def waits_shortened() -> Iterator[None]:
    """Let a writer that is silent for a moment count as dead."""
    waits = {"SILENCE_SECONDS": 0.03, "SETTLE_SECONDS": 0.0}
    with attributes_set(lock, **waits):
        yield


@contextlib.contextmanager
def without_kernel_locks() -> Iterator[None]:
    """Refuse kernel locks, as a network file system without a lock daemon does."""
    import fcntl

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    with attributes_set(fcntl, flock=refuse), waits_shortened():
        yield


def _is_writer(folder: Path, make: Callable[..., Any]) -> bool:
    """Return whether the lock is free for another writer, which then gives it back."""
    other = make(LocalFiles(folder))
    try:
        other.acquire()
    except LockedRun:
        return False
    other.release()
    return True


def two_writers(folder: Path, make: Callable[..., Any]) -> str:
    """Refuse a second writer, with the name of the first, until the first has released."""
    pid = f"process {os.getpid()} on {socket.gethostname()}"
    problems = []
    for context, words in (
        (contextlib.nullcontext, "which is running"),
        (without_kernel_locks, "which is running"),
    ):
        with context():
            first = make(LocalFiles(folder))
            second = make(LocalFiles(folder))
            first.acquire()
            first.acquire()
            problems.append(unrefused(LockedRun, second.acquire, pid, words, lock.LOCK_FILE_NAME))
            problems.append("" if first.held and not second.held else "the second writer holds")
            second.release()
            problems.append("" if not _is_writer(folder, make) else "its release freed the lock")
            first.require_held()
            first.require_own()
            first.release()
            first.release()
            problems.append("" if _is_writer(folder, make) else "a release frees nothing")
            left = [path.name for path in folder.iterdir() if path.stat().st_size]
            problems.append(f"{left[0]} stays after a release" if left else "")
    return first_of(problems)


def _own_claim(**facts: Any) -> dict[str, Any]:
    """Return what a writer notes in the lock file."""
    return {**this_process(), "since": "2026-01-01", "beats": False, "token": "a" * 32, **facts}


# A number that no process has; and the start of a process that had the number of ours before.
NO_PROCESS = 2**30
CLAIMS: dict[str, tuple[dict[str, Any], bool]] = {
    "a process that lives": ({}, False),
    "a process that lives, of an unknown start": ({"started": None}, False),
    "a process of another user": ({"pid": 1, "started": None}, False),
    "a process that is dead": ({"pid": NO_PROCESS}, True),
    "another process of the same number": ({"started": "1"}, True),
    "a process on another host": ({"host": "elsewhere"}, False),
    "a process in another container": ({"machine": "another"}, False),
    "a process on another host that beats no more": ({"host": "elsewhere", "beats": True}, True),
    "no process": ({"pid": None}, True),
    "a number of no process": ({"pid": -1}, False),
    "a number beyond all": ({"pid": 2**31}, False),
    "a process without host": ({"host": None}, True),
}


def claims_of_others(folder: Path, make: Callable[..., Any]) -> str:
    """Find claims in the lock file, without a kernel lock; take over those of the dead alone."""
    problems = []
    for name, (facts, may) in CLAIMS.items():
        if "started" in facts and this_process()["started"] is None:
            continue  # this system does not tell when a process started
        (folder / lock.LOCK_FILE_NAME).write_text(json.dumps(_own_claim(**facts)))
        with without_kernel_locks():
            problems.append(_took_over(folder, make, name, may))
        (folder / lock.LOCK_FILE_NAME).write_text(json.dumps(_own_claim(**facts)))
        # A kernel lock that is free proves the death of a silent process on another host.
        with waits_shortened(), attributes_set(lock, kernel_locks_reach_all=lambda path: True):
            proved = may or bool({*facts} & {"host", "machine"}) or name.startswith("a number")
            problems.append(_took_over(folder, make, f"{name}, and a free kernel lock", proved))
    for text in ("", "{", "[]", "5", '{"pid": 1', "[" * 4000):
        (folder / lock.LOCK_FILE_NAME).write_text(text)
        problems.append(_took_over(folder, make, f"the torn claim {text!r:.9}", True))
        (folder / lock.LOCK_FILE_NAME).write_text(text)
        with without_kernel_locks():
            problems.append(_took_over(folder, make, f"the torn claim {text!r:.9}", True))
    return first_of(problems)


def _took_over(folder: Path, make: Callable[..., Any], name: str, may: bool) -> str:
    writer = make(LocalFiles(folder))
    for _ in range(9):
        # As a store that waits for a writer of which it is not known whether it lives.
        took = True
        try:
            writer.acquire()
            break
        except LockedRun:
            took = False
            if not writer.is_undecided:
                break
        time.sleep(0.01)
    writer.release()
    if took != may:
        return f"{name}: {'taken over' if took else 'not taken over'}"
    return ""


def announcements(folder: Path, make: Callable[..., Any]) -> str:
    """Without kernel locks, meet processes that announce themselves at the same moment."""
    problems = []
    for name, facts, may in (
        ("one that lives", {}, False),
        ("a dead one", {"pid": NO_PROCESS}, True),
        ("one on another host", {"host": "elsewhere"}, True),
    ):
        other = folder / f"{lock.LOCK_FILE_NAME}.{'b' * 32}"
        other.write_text(json.dumps(_own_claim(**facts)))
        (folder / "a file of theirs").touch()
        (folder / f"{lock.LOCK_FILE_NAME}.{'0' * 32}").write_text("{")
        with without_kernel_locks():
            problems.append(_took_over(folder, make, f"{name} announced itself", may))
        left = [path.name for path in folder.iterdir() if ".lock." in path.name]
        wanted = [other.name] if not may else []
        problems.append(unlike(f"announcements beside {name}", left, wanted) if may else "")
        for path in folder.glob("*.lock.*"):
            path.unlink()
    there = (folder / "a file of theirs").exists()
    return first_of([*problems, "" if there else "a file of theirs was removed"])


def taken_over(folder: Path, make: Callable[..., Any]) -> str:
    """Take the lock from a writer, remove its file, and fork: it has to notice before a commit."""
    place = folder / lock.LOCK_FILE_NAME
    problems = []
    for context in (contextlib.nullcontext, without_kernel_locks):
        with context():
            writer = make(LocalFiles(folder))
            writer.acquire()
            place.unlink()
            writer.require_held()
            problems.append("" if writer.held and place.exists() else "a lost file is not written")
            problems.append(
                "" if not _is_writer(folder, make) else "the lock was lost with its file"
            )
            other = folder / "other"
            other.write_text(json.dumps(_own_claim(pid=77, host="elsewhere")))
            other.replace(place)
            problems.append(
                unrefused(LockedRun, writer.require_held, "77", "elsewhere", "taken over")
            )
            writer.release()
            problems.append("" if place.stat().st_size else "a release removed another's claim")
            place.unlink()
    child = make(LocalFiles(folder))
    child.acquire()
    descriptor = getattr(child, "_descriptor", None)
    child.leave_behind()
    problems.append(unrefused(LockedRun, child.require_own, "forked", str(folder)))
    problems.append("" if not child.held else "a forked child holds the lock")
    child.release()
    problems.append(
        "" if descriptor is None or not _is_writer(folder, make) else "a child freed it"
    )
    if descriptor is not None:
        os.close(descriptor)
    return first_of(problems)


def strange_lock_files(folder: Path, make: Callable[..., Any]) -> str:
    """Find a folder or a link in place of the lock file; it is moved aside."""
    outside = folder / "outside"
    outside.write_text("kept")
    place = folder / lock.LOCK_FILE_NAME
    problems = []
    for plant in (place.mkdir, lambda: place.symlink_to(outside), lambda: os.mkfifo(place)):
        plant()
        writer = make(LocalFiles(folder))
        writer.acquire()
        is_file = place.is_file() and not place.is_symlink()
        problems.append("" if is_file else f"{place.name} is no file")
        writer.release()
        place.unlink()
    aside = len([path for path in folder.iterdir() if "damaged" in path.name])
    problems.append(unlike("what was moved aside", aside, 3))
    return first_of([*problems, unlike("a file that was linked", outside.read_text(), "kept")])


PLANTED_MOUNTS = """\
1 0 8:1 / / rw - {root} /dev/a rw
2 1 8:2 / {at} rw shared:1 - {kind} server:/a {options}
3 1 8:3 / {at}/inner/deeper rw - ext4 /dev/b rw
4 1 8:3 / {at}x rw - ext4 /dev/b rw
torn - line
"""
MOUNT_KINDS: tuple[tuple[str, str, bool], ...] = (
    ("ext4", "rw", True),
    ("xfs", "rw", True),
    ("overlay", "rw", True),
    ("ceph", "rw", True),
    ("nfs", "rw,local_lock=none,hard", True),
    ("nfs4", "rw,local_lock=none", True),
    ("nfs4", "rw,local_lock=all", False),
    ("nfs", "rw,local_lock=flock", False),
    ("lustre", "rw,flock,lazystatfs", True),
    ("lustre", "rw,localflock", False),
    ("lustre", "rw,flock,localflock", False),
    ("lustre", "rw", False),
    ("fuse.sshfs", "rw", False),
)


def file_systems(folder: Path, make: Callable[..., Any]) -> str:
    """Read from planted tables of mounts whether a kernel lock reaches every host."""
    table = folder / "mountinfo"
    at = folder.resolve() / "a b"
    (at / "inner").mkdir(parents=True)
    problems = []
    for kind, options, reaches in MOUNT_KINDS:
        written = str(at).replace(" ", "\\040")
        for root in ("ext4", "fuse.other"):
            mounts = PLANTED_MOUNTS.format(root=root, at=written, kind=kind, options=options)
            table.write_text(mounts.replace("torn - line\n", ""))
            with attributes_set(lock, MOUNTS_FILE=table):
                found = [lock.kernel_locks_reach_all(one) for one in (at, at / "inner/writer.lock")]
                outside = lock.kernel_locks_reach_all(folder / "c")
            problems.append(unlike(f"a lock on {kind} with {options}", found, [reaches, reaches]))
            problems.append(unlike(f"a lock on {root}", outside, root == "ext4"))
    first = "1 0 8:1 / / rw - fuse.a a rw\n1 0 8:1 / / rw - ext4 a rw\n"
    for text, reaches in ((first, True), ("", False)):
        table.write_text(text)
        with attributes_set(lock, MOUNTS_FILE=table):
            problems.append(unlike("the last mount", lock.kernel_locks_reach_all(at), reaches))
    with attributes_set(lock, MOUNTS_FILE=folder / "none"):
        problems.append(unlike("no table of mounts", lock.kernel_locks_reach_all(at), False))
    return first_of(problems)


def readers(folder: Path, make: Callable[..., Any]) -> str:
    """Read a checkpoint from two places; it is being read until the last one is done."""
    files = LocalFiles(folder)
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text("{}")
    (folder / "link").symlink_to(folder / "a")
    (folder / "empty").mkdir()
    found = [is_being_read(files, "a")]
    with reading(files, "a") as first:
        with reading(files, "a") as second, reading(files, "b"):
            found += [first, second, is_being_read(files, "a"), is_being_read(files, "b")]
        found += [is_being_read(files, "a"), is_being_read(files, "b")]
    found.append(is_being_read(files, "a"))
    for name in ("empty", "link", "none"):
        with reading(files, name) as locked:
            found += [locked, is_being_read(files, name)]
    with without_kernel_locks(), reading(files, "a") as locked:
        found += [locked, is_being_read(files, "a")]
    right = [False, True, True, True, True, True, *[False] * 10]
    return unlike("what is being read", found, right)


def dying(folder: Path, make: Callable[..., Any]) -> str:
    """Wait for the kernel to free the lock of a process that has just died, and not for ever."""
    place = folder / lock.LOCK_FILE_NAME
    holder = make(LocalFiles(folder))
    holder.acquire()
    waiting = []
    for pid, seconds in ((NO_PROCESS, 30.0), (NO_PROCESS, 0.0), (os.getpid(), 30.0)):
        place.write_text(json.dumps(_own_claim(pid=pid)))
        with attributes_set(lock, FREEING_SECONDS=seconds):
            other = make(LocalFiles(folder))
            words = "which is dead: wait" if pid == NO_PROCESS else "is running"
            if problem := unrefused(LockedRun, other.acquire, words):
                return problem
            waiting.append(other.is_undecided)
    holder.release()
    return unlike("whether to wait", waiting, [True, False, False])


LOCK_TRIALS: dict[str, Trial] = {
    "two writers": two_writers,
    "claims": claims_of_others,
    "announcements": announcements,
    "takeovers": taken_over,
    "strange files": strange_lock_files,
    "file systems": file_systems,
    "readers": readers,
    "dying": dying,
}


def one_writer(case: Case, *, lock: Callable[..., Any] = RunLock) -> Verdict:
    """Open a run from two places, beside the claims of living and dead processes of all hosts."""
    gate = "checkpoint-policy/one-writer"
    if importlib.util.find_spec("fcntl") is None:
        return not_applicable(gate, required="kernel locks", why="this system has no fcntl")
    with seeded(case.seed):
        return judged_by(
            gate,
            LOCK_TRIALS,
            lock,
            hint="refuse while the holder may live, and take over when it is proved dead",
        )


# States that a run gives up.

GIVE_UP_TRIALS: dict[str, Trial] = {
    "at once": given_up_at_once,
    "once saved": given_up_once_saved,
    "twice": given_up_twice,
}


def gives_up(case: Case, *, finish: Callable[[Store], None] = finish_giving_up) -> Verdict:
    """Give up states of a run at once and for a later save, beside readers and kills."""
    with seeded(case.seed):
        return judged_by(
            "checkpoint-policy/given-up",
            GIVE_UP_TRIALS,
            finish,
            hint="note what is given up before it is deleted, and delete nothing that is read",
        )


POLICY_TAKES = {"SavingPolicy": Takes("policy")}
JUDGED_HERE = (
    Judged("BackgroundSaver", lambda store: None),
    Judged("LocalFiles", lambda root: None),
    Judged("RunLock", lambda files: None),
    Judged("finish_giving_up", lambda store: None),
    Judged("saving", lambda model, optimizer, *, runs, journal: None),
)
SAVED_STATE_GATES = (
    Gate("checkpoint-policy/background", background, {"BackgroundSaver": Takes("saver")}),
    Gate("checkpoint-policy/synced", synced, {"LocalFiles": Takes("files")}),
    Gate("checkpoint-policy/finite", finite_states, POLICY_TAKES),
    Gate("checkpoint-policy/deletes", deletes, POLICY_TAKES),
    Gate("checkpoint-policy/one-writer", one_writer, {"RunLock": Takes("lock")}),
    Gate("checkpoint-policy/given-up", gives_up, {"finish_giving_up": Takes("finish")}),
)
JOURNAL_EVENT_GATES = (Gate("run-journal/events", journal_events, {"saving": Takes("attach")}),)


# Forged pickles: each calls a function that leaves something in a folder.


@dataclass(frozen=True)
class ForgedCall:
    """A pickle that calls a function by its name, on texts in which `{}` is a new path."""

    module: str
    name: str
    texts: tuple[str, ...] = ("{}",)

    def pickled(self, path: Path) -> bytes:
        encoded = [text.format(path).encode() for text in self.texts]
        arguments = b"".join(b"X" + len(text).to_bytes(4, "little") + text for text in encoded)
        # Protocol 4 allows dots in the name, through modules that the module imports.
        named = f"{self.module}\n{self.name}\n".encode()
        return b"\x80\x04c" + named + b"(" + arguments + b"tR."


FORGED_CALLS = (
    ForgedCall("os", "mkdir"),
    ForgedCall("posix", "mkdir"),
    ForgedCall("os", "system", ("mkdir '{}'",)),
    ForgedCall("subprocess", "getoutput", ("mkdir '{}'",)),
    ForgedCall("builtins", "open", ("{}", "w")),
    ForgedCall("builtins", "exec", ("open('{}', 'w')",)),
    ForgedCall("builtins", "eval", ("open('{}', 'w')",)),
    ForgedCall("io", "open", ("{}", "w")),
    ForgedCall("logging", "FileHandler"),
    ForgedCall("numpy", "save", ("{}", "x")),
    ForgedCall("torch", "save", ("x", "{}")),
    ForgedCall("torch.serialization", "save", ("x", "{}")),
    ForgedCall("torch", "os.mkdir"),
    ForgedCall("torch.serialization", "os.mkdir"),
    ForgedCall("torch.distributed.checkpoint.metadata", "os.mkdir"),
    ForgedCall("torch.distributed.checkpoint.filesystem", "os.mkdir"),
)
