"""Summary of a run's attempts: how each began and ended, and its unusual events.

Proof: `python -m pytest tests/test_runs_command.py -k story`.
"""

import textwrap
from collections.abc import Iterator
from typing import Any

from .runs.journal_history import History
from .runs.journal_lines import Event, printable

TOLD = ("spike", "skip", "warning")
MOST = 6  # events of a kind to print per attempt
MOST_ATTEMPTS = 20


def story(history: History) -> list[dict[str, Any]]:
    """Return a row for each attempt, with its spikes, skips and warnings."""
    rows = []
    for attempt in history.attempts:
        events: list[dict[str, Any]] = [
            {"step": event.step, "kind": kind, "reason": str(event.facts.get("reason", ""))}
            for kind in TOLD
            for event in _events(history, kind)
            if event.attempt == attempt.number
        ]
        rows.append(
            {
                "attempt": attempt.number,
                "began": attempt.kind,
                "from_step": attempt.step,
                "to_step": attempt.last_step,
                "ended": attempt.ended,
                "events": sorted(events, key=lambda row: row["step"]),
            }
        )
    return rows


def story_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Format the rows at 80 columns; an attempt without events takes one line."""
    if len(rows) > MOST_ATTEMPTS:
        yield f"{len(rows) - MOST_ATTEMPTS} earlier attempts, which --json has"
    for row in rows[-MOST_ATTEMPTS:]:
        ended = f"ended by {printable(row['ended'])}" if row["ended"] else "no record of its end"
        if row["attempt"] != rows[-1]["attempt"] and row["ended"] is None:
            next_row = rows[row["attempt"]]  # attempts count from 1
            if next_row["began"] == "rollback":
                ended = "rolled back"
        line = (
            f"attempt {row['attempt']}: {row['began']} at step {row['from_step']}, "
            f"up to {row['to_step']}, {ended}"
        )
        yield from textwrap.wrap(line, 80, subsequent_indent="  ")

        for kind in TOLD:
            events = [event for event in row["events"] if event["kind"] == kind]
            for event in events[:MOST]:
                line = f"step {event['step']}, {kind}: {printable(event['reason'])}"
                yield from textwrap.wrap(line, 80, initial_indent="  ", subsequent_indent="    ")
            if len(events) > MOST:
                yield f"  and {len(events) - MOST} more of {kind}"


def _events(history: History, kind: str) -> list[Event]:
    return history.marks[kind].events if kind in history.marks else []
