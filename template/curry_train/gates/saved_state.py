"""Gates of a run while it saves: what it syncs, waits for, refuses, deletes and records.

They train a planted model of two layers, because none of these claims depends on the model. The
gates of `checkpoint_policy.py` save and load the state of the model itself.

Proof: `python -m pytest tests/gates/test_saved_state.py`.
"""

import contextlib
import math
import os
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
from ..runs.attach import saving
from ..runs.background import BackgroundSaver
from ..runs.files import Files, LocalFiles
from ..runs.journal import JournalReading
from ..runs.lock import reading
from ..runs.policy import SavingPolicy
from ..runs.policy_config import PolicyConfig, Retention
from ..runs.state import TrainingState
from ..runs.store import SavedRun, Store
from ..workloads.workload import Case
from .trials import same_bits, tensors_of
from .verdict import Gate, Judged, Takes, Verdict

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


POLICY_TAKES = {"SavingPolicy": Takes("policy")}
JUDGED_HERE = (
    Judged("BackgroundSaver", lambda store: None),
    Judged("LocalFiles", lambda root: None),
    Judged("saving", lambda model, optimizer, *, runs, journal: None),
)
SAVED_STATE_GATES = (
    Gate("checkpoint-policy/background", background, {"BackgroundSaver": Takes("saver")}),
    Gate("checkpoint-policy/synced", synced, {"LocalFiles": Takes("files")}),
    Gate("checkpoint-policy/finite", finite_states, POLICY_TAKES),
    Gate("checkpoint-policy/deletes", deletes, POLICY_TAKES),
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
