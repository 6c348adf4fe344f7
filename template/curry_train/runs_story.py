"""What a run's journal tells of its attempts: how each began and ended, and what happened in it, in few lines.

Proof: `python -m pytest tests/test_runs_command.py -k story`.
"""

import textwrap
from collections.abc import Iterator
from typing import Any

from .runs.journal_history import History
from .runs.journal_lines import Event, printable

TOLD = ("spike", "skip", "warning")
MOST = 6  # of a kind in an attempt
MOST_ATTEMPTS = 20


def story(history: History) -> list[dict[str, Any]]:
    """An attempt in each row, with its events that are out of the ordinary."""
    rows = []
    for attempt in history.attempts:
        happened: list[dict[str, Any]] = [
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
                "events": sorted(happened, key=lambda row: row["step"]),
            }
        )
    return rows


def story_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """At 80 columns; a run that went as planned takes one."""
    if len(rows) > MOST_ATTEMPTS:
        yield f"{len(rows) - MOST_ATTEMPTS} attempts before, which --json has"
    for row in rows[-MOST_ATTEMPTS:]:
        ended = f"ended by {printable(row['ended'])}" if row["ended"] else "no word of its end"
        if row["attempt"] != rows[-1]["attempt"] and row["ended"] is None:
            ended = "gone back from" if rows[row["attempt"]]["began"] == "rollback" else ended
        words = f"attempt {row['attempt']}: {row['began']} at step {row['from_step']}, up to {row['to_step']}, {ended}"
        yield from textwrap.wrap(words, 80, subsequent_indent="  ")
        for kind in TOLD:
            found = [event for event in row["events"] if event["kind"] == kind]
            for event in found[:MOST]:
                words = f"step {event['step']}, {kind}: {printable(event['reason'])}"
                yield from textwrap.wrap(words, 80, initial_indent="  ", subsequent_indent="    ")
            if len(found) > MOST:
                yield f"  and {len(found) - MOST} more of {kind}"


def _events(history: History, kind: str) -> list[Event]:
    return history.marks[kind].events if kind in history.marks else []
