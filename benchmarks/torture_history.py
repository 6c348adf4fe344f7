"""Run a history under the real policy, against a simple model of the expected checkpoints.

The model counts for each checkpoint how many are above it; it calls nothing of the package.
Proof: `python -m pytest tests/benchmarks/test_torture_retention.py`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from curry_train.runs.layout import BEST_KIND, folder_name
from curry_train.runs.policy import SavingPolicy
from curry_train.runs.policy_config import PolicyConfig
from torture_paper import FIRST, Crash, PaperFiles, PaperState, PaperStore


@dataclass
class Books:
    """Checkpoints that must exist: a row for each, of its kind, step and value."""

    config: PolicyConfig
    rows: set[tuple[str, int, float]] = field(default_factory=set)
    rotten: set[tuple[str, int, float]] = field(default_factory=set)
    # The step after which the next state begins a new line, and the earlier later states go.
    branching_at: int | None = None

    def above(self, row: tuple[str, int, float], kinds: tuple[str, ...]) -> int:
        """Count the intact steps of these kinds after the row's step."""
        return len({at for kind, at, _ in self.rows - self.rotten if kind in kinds and row[1] < at})

    def better(self, row: tuple[str, int, float]) -> int:
        up = self.config.best_k_direction == "maximize"
        found = 0
        for kind, at, value in self.rows - self.rotten:
            if kind == BEST_KIND and (value, at) != row[:0:-1]:
                found += (value > row[2]) if up else (value < row[2])
                found += value == row[2] and at < row[1]
        return found

    def stays(self, row: tuple[str, int, float]) -> bool:
        kind, at, _ = row
        keep = self.config.retention
        if kind == BEST_KIND:
            return self.config.best_k == 0 or self.better(row) < self.config.best_k
        states = ("rollback", "recovery")
        if row in self.rotten:
            return not self.above(row, states)
        if kind == "recovery":
            newer = self.above(row, states) < keep.rollback_keep
            return newer or self.above(row, ("recovery",)) < keep.recovery_keep
        return (
            self.above(row, states) < keep.rollback_keep
            and ("recovery", at, 0.0) not in self.rows - self.rotten
        )

    def save(self, row: tuple[str, int, float]) -> None:
        if row[0] != BEST_KIND and self.branching_at is not None:
            self.go_back(self.branching_at)
        self.rows.add(row)
        self.rotten.discard(row)
        self.rows = {held for held in self.rows if self.stays(held)}

    def go_back(self, step: int) -> None:
        self.rows = {row for row in self.rows if row[0] == BEST_KIND or row[1] <= step}
        self.branching_at = None

    def takes(self, value: float, step: int) -> bool:
        finite = value == value and abs(value) != math.inf
        return (
            self.config.best_k > 0
            and finite
            and self.better((BEST_KIND, step, value)) < self.config.best_k
        )


class WrongHistory(AssertionError):
    """Raised when the policy deviates from the model."""


class History:
    """A run over all its processes."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.files = PaperFiles()
        self.books = Books(config)
        self.rotten: set[str] = set()
        # Whether the books have each checkpoint; after a crash they read the folder once.
        self.sure = True
        self.begin()

    def begin(self) -> None:
        """Start a new process, which resumes from the latest checkpoint."""
        self.state, self.books.branching_at = PaperState(), None
        self.store = PaperStore(self.files, self.rotten)
        self.policy = SavingPolicy(self.store, self.config)
        self.policy.resume(self.state)
        states = {at for kind, at, _ in self.books.rows - self.books.rotten if kind != BEST_KIND}
        expect(
            not self.sure or self.state.step == max(states, default=FIRST),
            f"resumed from {self.state.step}",
            states,
        )
        self.look(exact=self.sure)

    def there(self) -> set[tuple[str, int, float]]:
        every = [*self.store.states(), *self.store.committed(BEST_KIND)]
        return {(one.kind, one.step, one.metric.value if one.metric else 0.0) for one in every}

    def look(self, *, exact: bool = True) -> None:
        if exact:
            expect(
                self.there() == self.books.rows,
                f"at step {self.state.step} {self.there()}",
                self.books.rows,
            )
        self.books.rows = self.there()
        self.books.rotten &= self.books.rows

    def train(self, what: tuple[int, float | None, bool], *, crash: int | None = None) -> None:
        """Train some steps, the last with or without a dev loss; losses may be NaN."""
        steps, value, healthy = what
        for number in range(steps):
            self.state.step += 1
            step, last = self.state.step, number == steps - 1
            metrics = {"loss": 1.0 if healthy or not last else math.nan}
            if last and value is not None:
                metrics["dev_loss"] = value
            before = set(self.books.rows)
            self.files.left = crash if last else None
            self.policy.after_step(step, self.state, metrics)  # may raise Crash
            self.files.left = None
            self.note(step, metrics)
            self.look()
            if not all(math.isfinite(value) for value in metrics.values()):
                expect(self.books.rows == before, "something was saved with NaN", before)

    def note(self, step: int, metrics: dict[str, float]) -> None:
        """Record in the books what the policy had to do."""
        value = metrics.get("dev_loss")
        due = [kind for kind, every in self.cadences() if every and step % every == 0]
        if not all(math.isfinite(one) for one in metrics.values()) or not (
            due or value is not None
        ):
            return
        if due:
            row = (due[0], step, 0.0)
            is_new = row not in self.books.rows or row in self.books.rotten
            if is_new or self.books.branching_at is not None:
                self.books.save(row)
        if value is not None and self.books.takes(value, step):
            self.books.save((BEST_KIND, step, value))

    def cadences(self) -> list[tuple[str, Any]]:
        return [("recovery", self.config.recovery_every), ("rollback", self.config.rollback_every)]

    def rollback(self, choice: int, *, crash: int | None = None) -> None:
        states = sorted(
            {at for kind, at, _ in self.books.rows - self.books.rotten if kind != BEST_KIND}
        )
        if not states:
            return
        step = states[choice % len(states)]
        self.files.left = crash
        # The states beyond are given up at once; a plain step keeps them until the next save.
        resumed = self.policy.resume(self.state, f"before-{step + 1}")
        self.files.left = None
        expect(
            resumed is not None and self.state.step == step, f"resumed from {self.state.step}", step
        )
        self.books.go_back(step)
        self.look()

    def branch(self, choice: int) -> None:
        """Resume from an earlier step, whose later states stay until the next state is saved."""
        states = sorted(
            {at for kind, at, _ in self.books.rows - self.books.rotten if kind != BEST_KIND}
        )
        if not states:
            return
        step = states[choice % len(states)]
        self.restart()
        self.policy.resume(self.state, step)
        expect(self.state.step == step, f"resumed from {self.state.step}", step)
        self.books.branching_at = step
        self.look()

    def rot(self, choice: int) -> None:
        """Damage a checkpoint so that the next start's full read finds it; never the only one."""
        states = sorted(row for row in self.books.rows - self.books.rotten if row[0] != BEST_KIND)
        if len({row[1] for row in states}) < 2:
            return
        row = states[choice % len(states)]
        self.restart()
        self.rotten.add(folder_name(row[0], row[1]))
        self.books.rotten = {
            row
            for row in self.books.rows
            if row[0] != BEST_KIND and folder_name(*row[:2]) in self.rotten
        }
        newest = max(at for kind, at, _ in self.books.rows - self.books.rotten if kind != BEST_KIND)
        self.books.rotten = {
            row for row in self.books.rotten if row[1] >= newest
        }  # older checkpoints were not read
        self.rotten = {folder_name(*row[:2]) for row in self.books.rotten}
        self.restart()

    def restart(self, _: Any = None) -> None:
        self.begin()

    def crash(self, what: tuple[int, Any]) -> None:
        """Crash at the n-th change of a step or a rollback; judge the folder in a new process."""
        after, inner = what
        if self.books.branching_at is not None:
            # Both lines are right then; tests/runs/test_saving_policy.py has such kills.
            return
        before, turned = set(self.books.rows), None
        try:
            if isinstance(inner, int):
                states = sorted(
                    {at for kind, at, _ in before - self.books.rotten if kind != BEST_KIND}
                )
                turned = states[inner % len(states)] if states else None
                self.rollback(inner, crash=after)
            else:
                self.train(inner, crash=after)
        except Crash:
            rotten = {
                row for row in self.books.rotten if folder_name(*row[:2]) in self.rotten
            }  # a step may be saved again
            self.sure = False
            before = (
                set(self.books.rows) if turned is None else before
            )  # the earlier steps are recorded already
            self.begin()
            self.sure = True
            self.judge_crash(before, turned, rotten)

    def judge_crash(
        self,
        before: set[tuple[str, int, float]],
        turned: int | None,
        rotten: set[tuple[str, int, float]],
    ) -> None:
        """Check that the newest exists, and that each deleted one had enough above it."""
        there = self.there()
        states = {
            row
            for row in before - rotten
            if row[0] != BEST_KIND and (turned is None or row[1] <= turned)
        }
        newest = max((row[1] for row in states), default=FIRST)
        expect(self.state.step >= newest, f"after a crash training is at {self.state.step}", newest)
        beyond = {
            row
            for row in before - rotten
            if row[0] != BEST_KIND and turned is not None and row[1] > turned
        }
        expect(
            not beyond & there or beyond <= there,
            f"a rollback that crashed left a part of {beyond}",
            "all or nothing",
        )
        now = Books(self.config, there, rotten & there)
        for row in before - there - rotten:
            beyond = row[0] != BEST_KIND and turned is not None and row[1] > turned
            stale = row[0] != BEST_KIND and row[1] > self.state.step
            now.rows = there | {row}
            expect(
                beyond or stale or not now.stays(row),
                f"after a crash {row} is gone of {before}",
                there,
            )


def expect(holds: bool, found: str, wanted: Any) -> None:
    if not holds:
        raise WrongHistory(f"{found}, and the books say {wanted}")
