"""Tests of the journal's gates: they hold on models and fail on common faults.

python -m pytest tests/gates/test_run_journal.py
"""

import json

import pytest
import torch

from curry_train.gates import checkpoint_policy
from curry_train.runs.history import read_history
from curry_train.runs.journal import JOURNAL_FILE_NAME, Journal, JournalReading
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case

CHECKS = {gate.name: gate.check for gate in checkpoint_policy.JOURNAL_GATES}
CASE = Case(transformer(dropout=0.1, depth=1))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, check):
    verdict = CHECKS[check](Case(load_workload(name)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("check", CHECKS)
def test_gates_hold_in_bfloat16(check):
    verdict = CHECKS[check](Case(transformer(depth=1), dtype=torch.bfloat16))
    assert verdict.passed, verdict


class Held(Journal):
    """A journal that keeps its events in memory until it is closed."""

    def _append(self, handle, line):
        self.held = [*getattr(self, "held", []), line]
        return True

    def close(self):
        if self._file is not None:
            for line in getattr(self, "held", []):
                super()._append(self._file.handle, line)
        super().close()


class Rounded(Journal):
    def step(self, step, *, loss, **facts):
        super().step(step, loss=round(loss, 4), **facts)


class WithoutNaN(Journal):
    def step(self, step, *, loss, **facts):
        super().step(step, loss=loss if loss == loss else None, **facts)


@pytest.mark.parametrize("journal", [Held, Rounded, WithoutNaN])
def test_complete_fails_on(journal):
    verdict = checkpoint_policy.journal_complete(CASE, journal=journal)
    assert verdict.passed is False
    assert verdict.hint


class Plain:
    """A journal as scripts write one: lines appended to the file, whatever it holds."""

    def __init__(self, folder):
        self.path = folder / JOURNAL_FILE_NAME

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass

    def write(self, kind, step, **facts):
        run = {"run": "plain"} if kind in ("start", "resume") else {}
        with self.path.open("a") as stream:
            event = {"v": 1, "time": 0.0, "step": step, "attempt": 1, "kind": kind, **run, **facts}
            stream.write(json.dumps(event) + "\n")

    def start(self):
        self.write("start", 0)

    def resume(self, step):
        self.write("resume", step)

    def rollback(self, step, **facts):
        pass

    def step(self, step, **facts):
        self.write("step", step, **facts)


class Anew(Plain):
    """A journal that empties the file when it is resumed."""

    def resume(self, step):
        self.path.unlink()
        super().resume(step)


@pytest.mark.parametrize("journal", [Plain, Anew])
def test_torn_fails_on(journal):
    verdict = checkpoint_policy.torn(CASE, journal=journal)
    assert verdict.passed is False
    assert verdict.hint


class OneAttempt(Journal):
    """A journal in which a rollback starts no attempt."""

    def rollback(self, step, **facts):
        self.write("warning", step=step, reason="rolled back")


def first_counts(folder):
    """Read the first loss of a step instead of the last."""
    history, seen = read_history(folder), {}
    for event in JournalReading(folder):
        if event.kind == "step":
            seen.setdefault(event.step, event.facts["loss"])
    for place, step in enumerate(history.steps.step):
        history.steps.values["loss"][place] = seen[step]
    return history


@pytest.mark.parametrize(
    "parts",
    [{"journal": OneAttempt}, {"read": first_counts}],
    ids=["one attempt", "the first counts"],
)
def test_attempts_fails_on(parts):
    verdict = checkpoint_policy.attempts(CASE, **parts)
    assert verdict.passed is False
    assert verdict.hint
