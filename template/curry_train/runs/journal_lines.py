"""One line of a journal: an event as JSON, both ways, and what makes a line no event.

    line = encode_event("eval", {"metric": "dev_loss", "value": 4.1}, time=0.0, step=50, attempt=1)
    event = parse_event(line, line=1)

Figures that are not finite are the words nan, inf and -inf, so that every line is JSON for every reader. Nothing here
imports torch. Proof: `python -m pytest tests/test_journal_reading.py -k line`.
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
LONGEST = 2**20  # bytes of a line; more is not ours
FARTHEST = 10**15  # a step or an attempt beyond it is damage


class JournalError(RunError):
    """A journal that can't be read, or not be written."""


class NewerJournal(JournalError):
    """A later version of this package wrote it."""


class Event(NamedTuple):
    """What happened; `facts` is everything beside the four figures that each event has."""

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
    """A whole line. `run` is in the event that opens an attempt, and the version in every one."""
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
            f"{kind} of step {step} is no JSON ({error}): give numbers, text, lists and mappings"
        ) from error
    if len(line) >= LONGEST:
        raise ValueError(
            f"{kind} of step {step} takes {len(line)} bytes and {LONGEST - 1} is the most: tell less"
        )
    return line.encode("ascii") + b"\n"


def finite(value: Any) -> Any:
    """The same with words for figures that JSON can't hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    """Figures of torch and numpy, and paths, are taken as well."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if callable(item := getattr(value, "item", None)):
        return finite(item())
    raise TypeError(f"a {type(value).__name__} in it")


_ENCODE = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain).encode
_DECODE = json.JSONDecoder().decode


def parse_event(text: bytes, *, line: int) -> Event | str:
    """The event of a line, or why it is none. Raises NewerJournal."""
    try:
        facts = _DECODE(text.decode())
    except UnicodeDecodeError:
        return "no text"
    except (ValueError, RecursionError):
        return "no JSON"
    if type(facts) is not dict:
        return "no event"
    pop = facts.pop
    version, time, step = pop("v", None), pop("time", None), pop("step", None)
    attempt, kind = pop("attempt", None), pop("kind", None)
    if type(version) is int and version > VERSION:
        where = f"line {line}" if line else "its end"
        raise NewerJournal(
            f"{where} was written by a newer version (journal {version}, and {VERSION} is the last known here): use "
            "the version of this package that wrote it, or a later one"
        )
    if version != VERSION or type(kind) is not str:
        return "no event"
    if type(time) not in (int, float) or not abs(time) < FARTHEST:
        return "an event without its time"
    if type(step) is not int or not 0 <= step < FARTHEST:
        return "an event without its step"
    if type(attempt) is not int or not 1 <= attempt < FARTHEST:
        return "an event without its attempt"
    return Event(line, time, step, attempt, kind, facts)


def number_of(value: Any) -> float:
    """A figure as it was; the words nan, inf and -inf are figures too, and what is none is nan."""
    if type(value) is float:
        return value
    if type(value) is int and abs(value) < 2**1000:
        return float(value)
    return float(value) if value in ("inf", "-inf") and type(value) is str else float("nan")


def printable(text: str, *, longest: int = 300) -> str:
    """Text of a file for a terminal: nothing in it moves the cursor or can't be encoded."""
    shown = "".join(
        letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[: longest + 1]
    )
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."
