"""Encode and parse one line of a journal: an event as JSON.

    line = encode_event("eval", {"metric": "dev_loss", "value": 4.1}, time=0.0, step=50, attempt=1)
    event = parse_event(line, line=1)

Figures that are not finite are written as the strings nan, inf and -inf, so that every line is
valid JSON for every reader. This module does not import torch.
Proof: `python -m pytest tests/test_journal_reading.py -k line`.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .errors import RunError

VERSION = 1
OPENING = ("start", "resume", "rollback")
KINDS = (*OPENING, "step", "save", "prune", "eval", "spike", "skip", "warning", "stop")
TAKEN = {"v", "time", "step", "attempt", "kind", "run"}
# Bytes of the longest line, with its newline. A longer line is damage.
LONGEST = 2**20
# A time, step or attempt of this size or more is damage.
FARTHEST = 10**15


class JournalError(RunError):
    """A journal can't be read, or can't be written."""


class NewerJournal(JournalError):
    """The journal was written by a later version of this package."""


class Event(NamedTuple):
    """One event of a journal; `facts` holds all fields without their own attribute."""

    line: int
    time: float
    step: int
    attempt: int
    kind: str
    facts: dict[str, Any]


def encode_event(
    kind: str,
    facts: Mapping[str, Any],
    *,
    time: float,
    step: int,
    attempt: int,
    run: str | None = None,
) -> bytes:
    """Encode an event as a line with its newline.

    `run` belongs into the event that opens an attempt; the version is in every event.
    """
    if taken := TAKEN & facts.keys():
        raise ValueError(
            f"{kind} of step {step} can't have facts called {', '.join(sorted(taken))}: rename them"
        )
    event: dict[str, Any] = {
        "v": VERSION,
        "time": round(time, 3),
        "step": step,
        "attempt": attempt,
        "kind": kind,
    }
    if run is not None:
        event["run"] = run
    event.update(facts)
    try:
        try:
            line = _ENCODE(event)
        except ValueError:
            line = _ENCODE(finite(event))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{kind} of step {step} can't be written as JSON ({error}): pass numbers, text, lists "
            f"and mappings"
        ) from error
    if len(line) >= LONGEST:
        raise ValueError(
            f"{kind} of step {step} takes {len(line)} bytes, and the limit is {LONGEST - 1}: "
            f"shorten its facts"
        )
    return line.encode("ascii") + b"\n"


def finite(value: Any) -> Any:
    """Replace figures that JSON can't represent with the strings nan, inf and -inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def _plain(value: Any) -> Any:
    """Convert paths, mappings, and figures of torch and numpy for the JSON encoder."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if callable(item := getattr(value, "item", None)):
        return finite(item())
    raise TypeError(f"it contains a {type(value).__name__}")


_ENCODE = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain).encode
_DECODE = json.JSONDecoder().decode


def parse_event(text: bytes, *, line: int) -> Event | str:
    """Parse a line; return the event, or a description of why the line is not an event.

    Raises NewerJournal.
    """
    try:
        facts = _DECODE(text.decode())
    except UnicodeDecodeError:
        return "not text"
    except (ValueError, RecursionError):
        return "not JSON"
    if type(facts) is not dict:
        return "not an event"

    version = facts.pop("v", None)
    time = facts.pop("time", None)
    step = facts.pop("step", None)
    attempt = facts.pop("attempt", None)
    kind = facts.pop("kind", None)
    if type(version) is int and version > VERSION:
        where = f"line {line}" if line else "its end"
        raise NewerJournal(
            f"{where} was written by a newer version of this package (journal version {version}; "
            f"this package reads up to {VERSION}): use the version that wrote it, or a later one"
        )
    if version != VERSION or type(kind) is not str:
        return "not an event"
    if type(time) not in (int, float) or not abs(time) < FARTHEST:
        return "an event without its time"
    if type(step) is not int or not 0 <= step < FARTHEST:
        return "an event without its step"
    if type(attempt) is not int or not 1 <= attempt < FARTHEST:
        return "an event without its attempt"
    return Event(line, time, step, attempt, kind, facts)


def number_of(value: Any) -> float:
    """Convert a figure of an event to a float.

    The strings inf and -inf are figures; anything else that is not a number becomes nan.
    """
    if type(value) is float:
        return value
    if type(value) is int and abs(value) < 2**1000:
        return float(value)
    if type(value) is str and value in ("inf", "-inf"):
        return float(value)
    return float("nan")


def printable(text: str, *, longest: int = 300) -> str:
    """Escape text from a file for a terminal: control characters, and what can't be encoded."""
    shown = "".join(
        letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[: longest + 1]
    )
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."
