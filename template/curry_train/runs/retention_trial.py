"""Random histories of a run, and a ledger beside them that says which promise of retention a rule breaks.

A history is a list of events: a save, a measurement (NaN among them), damage, a reader, a rollback, a restart.
Proof: `python -m pytest tests/test_retention.py`.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .names import BEST, Metric, Saved, folder_name
from .policy_config import PolicyConfig, Retention
from .retention import best_first, is_among_best, newest_first, to_delete

VALUES = (0.1, 0.2, 0.2, 0.3, 5.0, math.nan, math.inf)
FIRST_STEP = 99_999_985  # some steps later it has nine digits, and sorts before this as text

Event = tuple[str, Any]
EVENTS: tuple[tuple[str, Sequence[Any]], ...] = (
    ("rollback", (True, True, True, False)),  # whether the loss is finite
    ("recovery", (True, True, True, False)),
    ("measure", VALUES),
    ("damage", (0, 1, 2, 3)),
    ("read", tuple(range(20))),
    ("turn back", tuple(range(20))),
    ("restart", (None,)),
)


@dataclass
class Rules:
    """What is tried; a test plants a wrong one."""

    delete: Callable[..., list[Saved]] = to_delete
    among_best: Callable[..., bool] = is_among_best
    saves: Callable[[bool], bool] = lambda healthy: healthy


def new_saved(kind: str, step: int, value: float | None = None, *, name: str = "dev_loss") -> Saved:
    """A checkpoint that is nowhere."""
    metric = None if value is None else Metric(name, value)
    folder = folder_name(kind, step, metric)
    return Saved(kind, step, folder, f"/run/{folder}", metric)


def random_history(
    generator: random.Random, *, length: int = 40
) -> tuple[list[Event], PolicyConfig]:
    drawn = [generator.choice(EVENTS) for _ in range(generator.randrange(length))]
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
    there: dict[str, Saved] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    unhealthy: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    good: Saved | None = None

    def line(self, *, healthy: bool = True) -> list[Saved]:
        """What training could go on from, newest first."""
        without = self.damaged | self.unhealthy if healthy else self.damaged
        held = newest_first(self.there.values())
        return [one for one in held if one.folder not in without and one.step <= self.step]

    def take(self, event: str, what: Any, rules: Rules) -> str | None:
        if event in ("rollback", "recovery"):
            self.step += 3
            if rules.saves(what):
                one = new_saved(event, self.step)
                self.there[one.folder] = one
                self.damaged.discard(one.folder)
                (self.unhealthy.discard if what else self.unhealthy.add)(one.folder)
                self.good = one if what else self.good
        elif event == "measure" and rules.among_best(
            what, self.step, self.there.values(), self.config
        ):
            if not math.isfinite(what):
                return "a state is best by NaN"
            one = new_saved(BEST, self.step, what)
            self.there[one.folder] = one
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

    def _leave_to_readers(self) -> None:
        """What is beyond and being read is noted as given up, and is no more of this run's."""
        beyond = {
            one.folder for one in newest_first(self.there.values()) if one.step > self.step
        } & self.read
        self.read -= beyond
        for folder in beyond:
            del self.there[folder]

    def judged(self, gone: Iterable[Saved]) -> str | None:
        keep, ranked = self.config.retention, best_first(self.there.values(), self.config)
        steps = {one.step for one in self.line()}
        for one in gone:
            del self.there[one.folder]
        lasting = {step for step in steps if keep.keep_every and step % keep.keep_every == 0}
        held = [
            one for one in self.line() if one.folder not in self.read and one.step not in lasting
        ]
        beyond = [one for one in newest_first(self.there.values()) if one.step > self.step]
        free = self.damaged | self.read
        broken = {
            "the newest good state is gone": self.good is not None
            and self.good.folder not in self.there,
            "what is being read is gone": bool(self.read - self.there.keys()),
            "the best is gone": any(
                one.folder not in self.there for one in ranked[: self.config.best_k]
            ),
            "fewer good states stay than could": len({one.step for one in self.line()})
            < min(keep.rollback_keep, len(steps)),
            "what stays for good is gone": bool(lasting - {one.step for one in self.line()}),
            "too many states stay": len(held) > keep.rollback_keep + keep.recovery_keep,
            "a stale higher step stays": bool(self.line())
            and any(one.folder not in free for one in beyond),
            "too many of the best stay": self.config.best_k > 0
            and sum(one.folder in self.there and one.folder not in self.read for one in ranked)
            > self.config.best_k,
        }
        return next((words for words, is_broken in broken.items() if is_broken), None)


def broken_promise(events: Iterable[Event], config: PolicyConfig, rules: Rules) -> str | None:
    """The first promise that is broken in a history, in words; None where all are kept."""
    ledger = _Ledger(config)
    for event, what in events:
        if event == "restart":
            ledger.read = set()
        if said := ledger.take(event, what, rules):
            return said
        gone = rules.delete(
            list(ledger.there.values()),
            config,
            step=ledger.step,
            damaged=frozenset(ledger.damaged),
            protected=frozenset(ledger.read),
        )
        if said := ledger.judged(gone):
            return said
    return None
