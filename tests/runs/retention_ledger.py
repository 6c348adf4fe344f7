"""A ledger of a run's checkpoints, which finds the promise that a rule of retention breaks.

Proof: `python -m pytest tests/runs/test_retention.py`.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from curry_train.runs.layout import BEST_KIND, Metric, SavedCheckpoint, folder_name
from curry_train.runs.policy_config import PolicyConfig, Retention
from curry_train.runs.retention import best_first, is_among_best, newest_first, to_delete

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

    def broken_by(self, gone: Iterable[SavedCheckpoint]) -> str | None:
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
        if promise := ledger.broken_by(gone):
            return promise
    return None
