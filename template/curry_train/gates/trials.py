"""Trial runs for the gates of saved state: a store on a disk, retention, and loss spikes.

Each trial takes the components that it runs, so that tests and `--impl` can replace them.

Why so long: all that several gates of saved state plant, which none of them could import from
another.

Proof: `python -m pytest tests/gates/test_checkpoint_policy.py tests/gates/test_loss_spike.py`.
"""

import contextlib
import copy
import json
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from ..core.rerun import seeded
from ..core.wording import unheard
from ..runs.files import LocalFiles
from ..runs.layout import BEST_KIND, Manifest, Metric, SavedCheckpoint, folder_name
from ..runs.lock import reading
from ..runs.policy import SavingPolicy
from ..runs.policy_config import PolicyConfig, Retention, SpikeConfig
from ..runs.retention import (
    NoRoom,
    best_first,
    give_up,
    give_up_once,
    given_up,
    is_among_best,
    newest_first,
    require_room,
    to_delete,
)
from ..runs.spike import Recovered, Recoveries, SpikeWatchdog, recover
from ..runs.state import TrainingState
from ..runs.store import SavedRun, Store, Writing
from ..workloads.workload import Case
from .verdict import attributes_set, first_of, unlike, unrefused

# A short training for the gates of the checkpoint store.


@dataclass(frozen=True)
class StoreComponents:
    """The components of the store; the test of a gate replaces them with faulty ones."""

    state: Callable[..., Any] = TrainingState
    commit: Callable[[Writing, Any], Manifest] = Writing.commit
    verify: Callable[[SavedRun, str], Any] = SavedRun.verify
    load: Callable[[SavedRun, str, Any], Any] = SavedRun.load


SOUND_STORE = StoreComponents()


class Interrupted(OSError):
    """Raised in place of a change on the disk."""


class InterruptedFiles(LocalFiles):
    """A local folder in which only the first `left` changes succeed."""

    # None for no limit.
    left: int | None = None

    def _change(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Interrupted("interrupted")

    def create(self, key: str) -> BinaryIO:
        self._change()
        return super().create(key)

    def finish(self, stream: BinaryIO) -> None:
        try:
            self._change()
        except Interrupted:
            # Only a part of the file reached the disk.
            stream.truncate(stream.tell() // 2)
            stream.close()
            raise
        # No sync is needed, because the trial simulates no power cut.
        stream.close()

    def rename(self, old: str, new: str) -> None:
        self._change()
        super().rename(old, new)

    def sync_folder(self, key: str) -> None:
        self._change()

    def remove_folder(self, key: str) -> None:
        self._change()
        super().remove_folder(key)


@contextlib.contextmanager
def trained(case: Case, parts: StoreComponents) -> Iterator[tuple[Any, Path]]:
    """Yield a state after one step, and an empty folder; restore every generator afterwards."""
    with seeded(case.seed), tempfile.TemporaryDirectory(prefix="checkpoint-gate-") as folder:
        state = new_state(case, parts, seed=case.seed)
        train_step(case, state)
        yield state, Path(folder)


class PlantedExtra:
    """A planted object with a state of its own, as callers pass in `extra`."""

    def __init__(self) -> None:
        self.number = 0
        self.average = torch.zeros(2)

    def step(self) -> None:
        self.number += 1
        self.average = 0.5 * self.average + torch.rand(2)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]
        self.average = state["average"]


# What a training has beside its model and optimizer, by the state that saves it.
_objects: WeakKeyDictionary[Any, SimpleNamespace] = WeakKeyDictionary()


def new_state(case: Case, parts: StoreComponents, *, seed: int) -> Any:
    """Make the state of a new model with optimizer, scheduler, scaler, extra and a generator."""
    model = replace(case, seed=seed).build()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    # A scale of a power of 2, which changes at each step, rounds nothing.
    scaler = torch.amp.GradScaler(
        case.device.type,
        init_scale=2.0,
        growth_interval=1,
        enabled=not has_complex_parameters(model),
    )
    objects = SimpleNamespace(
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        scaler=scaler,
        seen=PlantedExtra(),
        generator=torch.Generator().manual_seed(seed),
    )
    state = parts.state(
        model,
        optimizer,
        objects.scheduler,
        objects.scaler,
        extra={"seen": objects.seen},
        generators={"own": objects.generator},
    )
    _objects[state] = objects
    return state


def has_complex_parameters(model: nn.Module) -> bool:
    """Return whether a model has complex gradients, which torch's `GradScaler` does not take."""
    return any(one.is_complex() and one.requires_grad for one in model.parameters())


def train_step(case: Case, state: Any) -> Tensor:
    """Train one step on a new batch, and return its loss, which depends on every generator."""
    objects = _objects[state]
    loss = backward_of(case, state)
    objects.scaler.step(state.optimizers[0])
    objects.scaler.update()
    objects.scheduler.step()
    objects.seen.step()
    state.optimizers[0].zero_grad()
    state.step += 1
    state.microstep = 0
    return loss


def backward_of(case: Case, state: Any) -> Tensor:
    """Run forward and backward of one microbatch, and return its loss."""
    objects = _objects[state]
    batch = case.place(case.workload.batch(case.batch_size))
    own = torch.rand((), generator=objects.generator).item()
    weight = 1 + 0.01 * (own + random.random() + float(numpy.random.rand()))
    loss = weight * case.workload.mean_loss(state.model, batch)
    objects.scaler.scale(loss).backward()
    state.position += case.batch_size
    state.microstep += 1
    return loss.detach()


def restored_facts(state: Any) -> dict[str, Any]:
    """Return copies of everything that a resume restores, read from the objects themselves."""
    objects = _objects[state]
    gradients = {name: one.grad for name, one in state.model.named_parameters()}
    sources = {
        "model": state.model.state_dict(),
        "gradient": gradients if state.microstep else {},
        "optimizer": state.optimizers[0].state_dict(),
        "scheduler": objects.scheduler.state_dict(),
        "scaler": objects.scaler.state_dict(),
        "extra": objects.seen.state_dict(),
        "generator": {
            "own": objects.generator.get_state(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": numpy.random.get_state(legacy=False)["state"],
        },
        "counter": {name: getattr(state, name) for name in ("step", "position", "microstep")},
    }
    facts = {}
    for kind, source in sources.items():
        for path, value in tree_flatten_with_path(source)[0]:
            is_copied = isinstance(value, Tensor | numpy.ndarray)
            facts[f"{kind}{keystr(path)}"] = copy.deepcopy(value) if is_copied else value
    return facts


def differing(facts: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Return the names of the facts that differ, or that only one side has."""
    names = [*facts, *(name for name in others if name not in facts)]
    return [name for name in names if not _same_fact(facts.get(name), others.get(name))]


def _same_fact(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and same_bits(one, other)
    if isinstance(one, numpy.ndarray):
        return isinstance(other, numpy.ndarray) and numpy.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


def tensors_of(state: Any) -> dict[str, Tensor]:
    """Return copies of all tensors that a save writes."""
    return {name: tensor.clone() for name, tensor in TrainingState.snapshot(state).tensors.items()}


def same_bits(first: Tensor, second: Tensor | None) -> bool:
    """Return whether two tensors are equal to the bit, with NaN equal to NaN."""
    return second is not None and (
        torch.equal(first, second) or bool((first.isnan() & second.isnan()).all())
    )


# Random histories of a run, and a ledger that finds the promise a retention rule breaks.

METRIC_VALUES = (0.1, 0.2, 0.2, 0.3, 5.0, math.nan, math.inf)
# A few steps later the step has nine digits, and sorts before this one as text.
FIRST_STEP = 99_999_985

ExpectedEvent = tuple[str, Any]
RETENTION_EVENTS: tuple[tuple[str, Sequence[Any]], ...] = (
    ("rollback", (True, True, True, False)),  # whether the loss is finite
    ("recovery", (True, True, True, False)),
    ("measure", METRIC_VALUES),
    ("damage", (0, 1, 2, 3)),
    ("read", tuple(range(20))),
    ("turn back", tuple(range(20))),
    ("restart", (None,)),
)


@dataclass
class Rules:
    """The retention rules under test; a test plants wrong ones."""

    delete: Callable[..., list[SavedCheckpoint]] = to_delete
    among_best: Callable[..., bool] = is_among_best
    saves: Callable[[bool], bool] = lambda healthy: healthy


def new_saved(
    kind: str, step: int, value: float | None = None, *, name: str = "dev_loss"
) -> SavedCheckpoint:
    """Make the record of a checkpoint that exists on no disk."""
    metric = None if value is None else Metric(name, value)
    folder = folder_name(kind, step, metric)
    return SavedCheckpoint(kind, step, folder, f"/run/{folder}", metric)


def random_history(
    generator: random.Random, *, length: int = 40
) -> tuple[list[ExpectedEvent], PolicyConfig]:
    """Draw a list of events, fewer than `length`, and a configuration."""
    drawn = [generator.choice(RETENTION_EVENTS) for _ in range(generator.randrange(length))]
    config = PolicyConfig(
        best_k=generator.randrange(4),
        best_k_direction=generator.choice(("minimize", "maximize")),
        retention=Retention(
            generator.randrange(1, 5),
            generator.randrange(1, 4),
            keep_every=generator.choice((None, None, 5)),
        ),
    )
    return [(name, generator.choice(choices)) for name, choices in drawn], config


@dataclass
class _Ledger:
    config: PolicyConfig
    step: int = FIRST_STEP
    there: dict[str, SavedCheckpoint] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    unhealthy: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    good: SavedCheckpoint | None = None

    def line(self, *, healthy: bool = True) -> list[SavedCheckpoint]:
        """Return the states that training could resume from, newest first."""
        excluded = self.damaged | self.unhealthy if healthy else self.damaged
        states = newest_first(self.there.values())
        return [one for one in states if one.folder not in excluded and one.step <= self.step]

    def take(self, event: str, what: Any, rules: Rules) -> str | None:
        """Apply an event; return the promise that it breaks."""
        if event in ("rollback", "recovery"):
            self.step += 3
            if rules.saves(what):
                self._save(event, healthy=what)
        elif event == "measure" and rules.among_best(
            what, self.step, self.there.values(), self.config
        ):
            if not math.isfinite(what):
                return "a NaN or infinite metric is among the best"
            best = new_saved(BEST_KIND, self.step, what)
            self.there[best.folder] = best
        elif event == "damage":
            self.damaged |= {one.folder for one in self.line()[what : what + 1] if one != self.good}
        elif event == "read":
            self.read = {sorted(self.there)[what % len(self.there)]} if self.there else set()
        elif event in ("turn back", "restart"):
            line = self.line()
            self.good = line[(what or 0) % len(line)] if line else None
            self.step = self.good.step if self.good else self.step
            self._leave_to_readers()
        return None

    def _save(self, kind: str, *, healthy: bool) -> None:
        saved = new_saved(kind, self.step)
        self.there[saved.folder] = saved
        self.damaged.discard(saved.folder)
        if healthy:
            self.unhealthy.discard(saved.folder)
            self.good = saved
        else:
            self.unhealthy.add(saved.folder)

    def _leave_to_readers(self) -> None:
        """Drop the states beyond this step that are being read: the run has given them up."""
        beyond = {one.folder for one in newest_first(self.there.values()) if one.step > self.step}
        dropped = beyond & self.read
        self.read -= dropped
        for folder in dropped:
            del self.there[folder]

    def judged(self, gone: Iterable[SavedCheckpoint]) -> str | None:
        """Delete `gone`; return the first promise that this breaks."""
        retention = self.config.retention
        ranked = best_first(self.there.values(), self.config)
        steps_before = {one.step for one in self.line()}
        for one in gone:
            del self.there[one.folder]

        line = self.line()
        steps = {one.step for one in line}
        permanent = set()
        if retention.keep_every:
            permanent = {step for step in steps_before if step % retention.keep_every == 0}
        counted = [one for one in line if one.folder not in self.read and one.step not in permanent]
        beyond = [one for one in newest_first(self.there.values()) if one.step > self.step]
        may_be_stale = self.damaged | self.read
        num_best = sum(one.folder in self.there and one.folder not in self.read for one in ranked)

        most_states = retention.rollback_keep + retention.recovery_keep
        best_k = self.config.best_k
        broken = {
            "the newest good state is gone": self.good is not None
            and self.good.folder not in self.there,
            "a checkpoint that is being read is gone": bool(self.read - self.there.keys()),
            "one of the best is gone": any(one.folder not in self.there for one in ranked[:best_k]),
            "fewer good states stay than possible": len(steps)
            < min(retention.rollback_keep, len(steps_before)),
            "a state kept by keep_every is gone": bool(permanent - steps),
            "too many states stay": len(counted) > most_states,
            "a stale higher step stays": bool(line)
            and any(one.folder not in may_be_stale for one in beyond),
            "too many of the best stay": 0 < best_k < num_best,
        }
        return next((promise for promise, is_broken in broken.items() if is_broken), None)


def broken_promise(
    events: Iterable[ExpectedEvent], config: PolicyConfig, rules: Rules
) -> str | None:
    """Return the first promise that a history breaks, or None."""
    ledger = _Ledger(config)
    for event, what in events:
        if event == "restart":
            ledger.read = set()
        if promise := ledger.take(event, what, rules):
            return promise
        gone = rules.delete(
            list(ledger.there.values()),
            config,
            step=ledger.step,
            damaged=frozenset(ledger.damaged),
            protected=frozenset(ledger.read),
        )
        if promise := ledger.judged(gone):
            return promise
    return None


# A short training with planted loss spikes, for the gates of spike recovery.

TRIAL_SPIKE_CONFIG = SpikeConfig(
    action="rollback", window=16, threshold=50.0, patience=2, attempts=2, skip_around=1
)
TRIAL_POLICY_CONFIG = PolicyConfig(rollback_every=2, recovery_every=None, best_k=0)
# The first step with bad samples; its state is saved.
FIRST_BAD = 4
NUM_STEPS = 6
# The most steps in one trial, including the repeated ones.
MOST_STEPS = 60


@dataclass(frozen=True)
class SpikeComponents:
    """The components of the recovery; the test of a gate replaces them with faulty ones."""

    watchdog: Callable[[SpikeConfig], Any] = SpikeWatchdog
    recover: Callable[..., Recovered] = recover
    recoveries: Callable[[Any], Any] = Recoveries
    saves_watchdog: bool = True


SOUND_SPIKE = SpikeComponents()


class WithoutSync(LocalFiles):
    """A local folder without syncs, because the trial simulates no power cut."""

    def sync_folder(self, key: str) -> None:
        pass


class StoreTrial:
    """One process of a run, which resumes from the newest state in `folder`.

    `bad(step, position)` returns whether a step spoils the weights; the positions in `skipped` are
    never trained on.
    """

    def __init__(
        self,
        case: Case,
        folder: Path,
        parts: SpikeComponents,
        *,
        bad: Callable[[int, int], bool],
        skipped: tuple[tuple[int, int], ...] = (),
        saving: PolicyConfig = TRIAL_POLICY_CONFIG,
    ) -> None:
        self.case = case
        self.parts = parts
        self.bad = bad
        self.skipped = list(skipped)
        self.folder = folder
        self.saving = saving
        self.done = 0
        self.recovered: list[Recovered] = []

    def run(self, steps: int = NUM_STEPS, *, through: bool = True) -> dict[str, Tensor]:
        """Train to step `steps`, or to the first recovery with `through=False`.

        Returns copies of all tensors of the state.
        """
        watchdog = self.parts.watchdog(TRIAL_SPIKE_CONFIG)
        with seeded(self.case.seed), self._opened(watchdog) as (policy, state, recoveries):
            while state.step < steps and (through or not self.recovered):
                position = self._next(state.position)
                self.done += 1
                if self.done > MOST_STEPS:
                    raise ValueError(
                        f"{MOST_STEPS} steps were done to reach step {steps}: the recovery does "
                        f"not end"
                    )

                self._step(state, position)
                loss = _planted_loss(state.step + 1, high=self.bad(state.step + 1, position))
                state.step += 1
                state.position = position + 1

                spike = watchdog.observe(state.step, loss)
                if spike is None:
                    policy.after_step(state.step, state, {"loss": loss})
                    continue
                recovered = self.parts.recover(
                    spike,
                    TRIAL_SPIKE_CONFIG,
                    state=state,
                    load=lambda what: policy.resume(state, what),
                    after=self._after,
                    recoveries=recoveries,
                )
                self.recovered.append(recovered)
                self.skipped.append((recovered.recovery.start, recovered.recovery.stop))
            return {name: tensor.clone() for name, tensor in state.snapshot().tensors.items()}

    def _step(self, state: TrainingState, position: int) -> None:
        with seeded(self.case.seed + 1000 + position):
            batch = self.case.place(self.case.workload.batch(self.case.batch_size))
        loss = self.case.workload.mean_loss(state.model, batch)
        loss.backward()
        state.optimizers[0].step()
        state.optimizers[0].zero_grad()

        if self.bad(state.step + 1, position):
            with torch.no_grad():
                for parameter in state.model.parameters():
                    parameter.add_(torch.ones_like(parameter))

    def _next(self, position: int) -> int:
        """Return the first position from `position` on that is not skipped."""
        while any(start <= position < stop for start, stop in self.skipped):
            position += 1
        return position

    def _after(self, position: int, windows: int) -> int:
        for _ in range(windows):
            position = self._next(position) + 1
        return position

    @contextmanager
    def _opened(self, watchdog: Any) -> Iterator[tuple[SavingPolicy, TrainingState, Any]]:
        model = replace(self.case, seed=self.case.seed).build()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        extra = {"spike": watchdog} if self.parts.saves_watchdog else {}
        state = TrainingState(model, torch.optim.AdamW(trained, lr=1e-3), extra=extra)
        files = WithoutSync(self.folder)
        with (
            unheard(SavingPolicy.__module__),
            Store(self.folder, files=files) as store,
            SavingPolicy(store, self.saving) as policy,
        ):
            if policy.resume(state) is None:
                for step in range(-TRIAL_SPIKE_CONFIG.window, 1):
                    watchdog.observe(step, _planted_loss(step, high=False))
            recoveries = self.parts.recoveries(files)
            self.skipped += [(one.start, one.stop) for one in recoveries.done]
            yield policy, state, recoveries


def _planted_loss(step: int, *, high: bool) -> float:
    """Return the loss that the watchdog gets for a step."""
    return 2000.0 if high else 2.0 + 0.01 * (step % 5)


ROLLBACK_KIND = "rollback"


# Folders that are given up, and room on the disk.


class TinyState:
    """Makes small checkpoints, whose values tell one from another."""

    def __init__(self) -> None:
        self.layer = nn.Linear(2, 1)
        self.state = TrainingState(self.layer)

    def saved(self, store: Store, step: int, *, replace: bool = False) -> str:
        with torch.no_grad():
            self.layer.weight.add_(1)
        return store.save(ROLLBACK_KIND, step, self.state, replace=replace).folder


def _steps_in(folder: Path) -> list[int]:
    return [one.step for one in SavedRun(folder).committed(ROLLBACK_KIND)]


def _unnoted(folder: Path) -> str:
    left = [path.name for path in folder.iterdir() if "turned" in path.name]
    return f"{left[0]} stays when all is given up" if left else ""


def given_up_at_once(folder: Path, finish: Callable[[Store], None]) -> str:
    """Give up two of four states, one of which is read; it goes when the reader has."""
    tiny = TinyState()
    with Store(folder, files=InterruptedFiles(folder)) as store:
        names = [tiny.saved(store, step) for step in (1, 2, 3, 4)]
        with reading(store.files, names[1]):
            give_up(store, names[:1])
            problems = [unlike("what stays", _steps_in(folder), [2, 3, 4]), _unnoted(folder)]
            give_up(store, names[1:3])
            problems.append(unlike("what is read stays", _steps_in(folder), [2, 4]))
            problems.append(unlike("given up", sorted(given_up(store.files)), [names[1]]))
            finish(store)
            problems.append(unlike("what is read stays", _steps_in(folder), [2, 4]))
    with Store(folder, files=InterruptedFiles(folder)) as store:
        problems.append(unlike("given up", sorted(given_up(store.files)), [names[1]]))
        finish(store)
        problems.append(unlike("after the reader", _steps_in(folder), [4]))
        problems.append(unlike("given up", sorted(given_up(store.files)), []))
        problems.append(_unnoted(folder))
        finish(store)
    return first_of(problems)


def given_up_once_saved(folder: Path, finish: Callable[[Store], None]) -> str:
    """Give states up for a save that comes, one that comes later, and one that never does."""
    tiny = TinyState()
    problems = []
    with Store(folder, files=InterruptedFiles(folder)) as store:
        names = [tiny.saved(store, step) for step in (1, 2, 3)]
        # A state that has the name of the next save already is kept until it is attributes_set.
        give_up_once(store, names[1:], names[1])
        problems.append(unlike("before the save", sorted(given_up(store.files)), []))
        tiny.saved(store, 2, replace=True)
        problems.append(unlike("after the save", sorted(given_up(store.files)), names[2:]))
        finish(store)
        problems += [unlike("what stays", _steps_in(folder), [1, 2]), _unnoted(folder)]

        give_up_once(store, names[:1], "rollback/step-00000005.dcp")
        problems.append(unlike("before the save", sorted(given_up(store.files)), []))
        finish(store)
        problems += [unlike("after no save", _steps_in(folder), [1, 2]), _unnoted(folder)]

        give_up_once(store, names[:2], "rollback/step-00000006.dcp")
        tiny.saved(store, 6)
    with Store(folder, files=InterruptedFiles(folder)) as store:
        finish(store)
        problems += [unlike("after a kill", _steps_in(folder), [6]), _unnoted(folder)]
    return first_of(problems)


def given_up_twice(folder: Path, finish: Callable[[Store], None]) -> str:
    """Give up for a later save what is read, beside what is given up already; read torn notes."""
    tiny = TinyState()
    problems = []
    with Store(folder, files=InterruptedFiles(folder)) as store:
        names = [tiny.saved(store, step) for step in (1, 2, 3)]
        with reading(store.files, names[0]):
            give_up(store, names[:1])
            give_up_once(store, names[1:2], "rollback/step-00000007.dcp")
            problems.append(unlike("before the save", sorted(given_up(store.files)), names[:1]))
            tiny.saved(store, 7)
            problems.append(unlike("after the save", sorted(given_up(store.files)), names[:2]))
            finish(store)
            problems.append(unlike("what is read stays", _steps_in(folder), [1, 3, 7]))
            problems.append(unlike("given up", sorted(given_up(store.files)), names[:1]))
        noted = next((path for path in folder.iterdir() if "turned" in path.name), None)
        if noted is None:
            return first_of(problems)
        finish(store)
        problems += [unlike("what stays", _steps_in(folder), [3, 7]), _unnoted(folder)]
        once = {"now": [], "later": [names[2]], "once": names[2], "unlike": None}
        for text in ("", "{", "5", '{"now": []}', json.dumps(once | {"later": 1})):
            noted.write_text(text)
            problems.append(unlike(f"given up by {text!r:.20}", sorted(given_up(store.files)), []))
    return first_of(problems)


def no_room(folder: Path, estimate: Callable[..., Any]) -> str:
    """Refuse a save that does not fit on its volume, with the bytes that are missing."""
    problems = []
    asked = []
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (folder / "recovery").symlink_to(elsewhere)

    def usage(path: Any) -> Any:
        asked.append(Path(path).name)
        return SimpleNamespace(free=20 * 10**9)

    with attributes_set(shutil, disk_usage=usage):
        files = LocalFiles(folder / "not yet")
        for kind, words in (
            (ROLLBACK_KIND, "rollback_keep"),
            ("recovery", "recovery_keep"),
            (BEST_KIND, "best_k"),
        ):
            require_room(files, kind, 19 * 10**9)
            call = lambda kind=kind: require_room(files, kind, 50 * 10**9)  # noqa: E731
            problems.append(unrefused(NoRoom, call, "20.00 GB", "50.00 GB", "30.00 GB", words))
        problems.append(
            unrefused(NoRoom, lambda: require_room(files, ROLLBACK_KIND, 20 * 10**9), "bytes are")
        )
        require_room(LocalFiles(folder), "recovery", 1)
    problems.append(unlike("the volumes", [asked[0], asked[-1]], [folder.name, "elsewhere"]))
    unknown = SimpleNamespace(free_bytes=lambda: None, location=str)
    require_room(unknown, ROLLBACK_KIND, 10**30)  # type: ignore[arg-type]
    return first_of(problems)


# In bytes per parameter: a checkpoint with AdamW's state, and its weights.
DISK_BYTES = {"float32": (12, 4), "bfloat16": (14, 2), "float16": (14, 2), "bfloat16-pure": (6, 2)}


def estimated(folder: Path, estimate: Callable[..., Any]) -> str:
    """Compare the estimate of a policy with its definition, for each dtype and for SGD."""
    config = PolicyConfig(best_k=2, retention=Retention(3, 4))
    small = PolicyConfig(rollback_parameters_only=True, best_k=2, retention=Retention(3, 4))
    off = PolicyConfig(rollback_every=None, retention=Retention(3, 4, 500), best_k=0)
    problems = []
    for dtype, (state, weights) in DISK_BYTES.items():
        for given, (rollbacks, best) in ((config, (3, 2)), (small, (3, 2)), (off, (0, 0))):
            found = estimate(1000, given, dtype=dtype)
            of_rollback = weights if given is small else state
            sizes = [rollbacks * of_rollback, 4 * state, best * weights]
            expected = {
                "parameters": 1000,
                "dtype": dtype,
                "checkpoint": 1000 * state,
                "best": 1000 * weights,
                "kept": dict(
                    zip(
                        ("rollback", "recovery", "best-k"),
                        [1000 * one for one in sizes],
                        strict=True,
                    )
                ),
                "total": 1000 * sum(sizes),
                "in_flight": 1000 * state,
                "advice": found.advice,
                "most": 1000 * (sum(sizes) + state),
            }
            problems.append(unlike(f"the estimate for {dtype}", found.to_json(), expected))
    sgd = estimate(1000, config, state_bytes_per_parameter=8)
    least = estimate(1, state_bytes_per_parameter=4)
    problems.append(unlike("the estimate for SGD", (sgd.checkpoint, sgd.best), (8000, 4000)))
    problems.append(
        unlike(
            "the smallest estimate",
            least.total,
            estimate(1, PolicyConfig(), state_bytes_per_parameter=4).total,
        )
    )
    problems.append(unrefused(ValueError, lambda: estimate(0), "parameters"))
    problems.append(
        unrefused(
            ValueError, lambda: estimate(1, dtype="fp32"), "dtype", "float32, bfloat16", "fp32"
        )
    )
    problems.append(
        unrefused(
            ValueError,
            lambda: estimate(1, state_bytes_per_parameter=3.9),
            "state_bytes_per_parameter",
            "4 or more",
            "3.9",
        )
    )
    return first_of([*problems, *_wrong_advice(estimate)])


def _wrong_advice(estimate: Callable[..., Any]) -> Iterator[str]:
    """Yield what is wrong with the advice: none up to 10 GB, and what applies above."""
    billion = 10**9
    default = PolicyConfig()
    rare = PolicyConfig(rollback_every=None)
    small = PolicyConfig(rollback_parameters_only=True)
    every = PolicyConfig(retention=Retention(keep_every=700))
    for parameters, config, words in (
        (10 * billion // 12, default, []),
        (10 * billion // 12, every, [("keep_every", "700 steps")]),
        (7 * billion, every, [("keep_every",), ("84.0 GB", "10 GB"), ("28.0 GB", "280 GB")]),
        (7 * billion, default, [("84.0 GB", "10 GB"), ("28.0 GB", "280 GB")]),
        (7 * billion, rare, [("84.0 GB",)]),
        (7 * billion, small, [("84.0 GB",)]),
    ):
        found = estimate(parameters, config).advice
        yield unlike("the number of advices", len(found), len(words))
        for wanted, line in zip(words, found, strict=False):
            missing = [word for word in wanted if word not in line]
            yield f"the advice does not name {missing[0]}: {line}" if missing else ""
