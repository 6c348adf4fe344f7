"""Faults of the run journal: events that wait, are rounded, torn, or never written.

Proof: `python -m pytest tests/gates/test_run_journal.py`.
"""

import json

from saboteurs import planted

from curry_train.runs.attach import saving
from curry_train.runs.history import read_history
from curry_train.runs.journal import JOURNAL_FILE_NAME, Journal, JournalReading


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


def without(kind):
    """Return `saving` with a journal that drops the events of one kind."""

    def attach(*args, **options):
        run = saving(*args, **options)
        journal = run._journal._journal
        write = journal.write

        def write_others(written, **facts):
            if written != kind:
                write(written, **facts)

        journal.write = write_others
        return run

    return attach


def without_steps(*args, **options):
    run = saving(*args, **options)
    run._journal._journal.step = lambda step, **facts: None
    return run


FAULTS = [
    planted("checkpoint-policy.journal-at-once", "held", journal=Held),
    planted("checkpoint-policy.journal-digits", "rounded", journal=Rounded),
    planted("checkpoint-policy.journal-digits", "without-nan", journal=WithoutNaN),
    planted("checkpoint-policy.journal-torn", "plain", journal=Plain),
    planted("checkpoint-policy.journal-torn", "anew", journal=Anew),
    planted("checkpoint-policy.journal-attempts", "one-attempt", journal=OneAttempt),
    planted("checkpoint-policy.journal-attempts", "first-counts", read=first_counts),
    planted(
        "checkpoint-policy.journal-events",
        "without-evaluations",
        attach=without("eval"),
        hint="each metric",
    ),
    planted(
        "checkpoint-policy.journal-events",
        "without-saves",
        attach=without("save"),
        hint="committed",
    ),
    planted(
        "checkpoint-policy.journal-events",
        "without-deletions",
        attach=without("prune"),
        hint="deleted",
    ),
    planted(
        "checkpoint-policy.journal-events", "without-steps", attach=without_steps, hint="each step"
    ),
]
