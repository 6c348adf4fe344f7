"""Trial runs for the gates of saved state: a store on a disk, retention, and loss spikes.

Each trial takes the components that it runs, so that tests and `--impl` can replace them.

Proof: `python -m pytest tests/gates/test_checkpoint_policy.py tests/gates/test_loss_spike.py`.
"""

import contextlib
import copy
import math
import random
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
from ..runs.policy import SavingPolicy
from ..runs.policy_config import PolicyConfig, Retention, SpikeConfig
from ..runs.retention import best_first, is_among_best, newest_first, to_delete
from ..runs.spike import Recovered, Recoveries, SpikeWatchdog, recover
from ..runs.state import TrainingState
from ..runs.store import SavedRun, Store, Writing
from ..workloads.workload import Case

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
