"""An event is in the journal when the call returns, a torn end loses that one alone, and the last attempt counts.

Each gate takes the part that it is about, so that its tests can plant a wrong one.
Proof: `python -m pytest tests/test_run_journal.py`.
"""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.verdict import Gate, Verdict
from ..core.workload import Case
from ..runs.errors import RunError
from ..runs.journal import Journal
from ..runs.journal_history import History, read_history
from ..runs.journal_lines import JournalError
from ..runs.journal_reading import NAME, JournalReading
from ..runs.trial import SOUND, train_step, trained

NUM_STEPS = 6
MOST_CUTS = 60


def complete(case: Case, *, journal: Callable[[Path], Any] = Journal) -> Verdict:
    """The model's own losses, and one that is not a number, looked for in the file after each call."""
    losses = [*_own_losses(case), math.nan]
    there = equal = 0
    with (
        tempfile.TemporaryDirectory(prefix="journal-gate-") as folder,
        journal(Path(folder)) as writer,
    ):
        writer.start()
        for step, loss in enumerate(losses, start=1):
            writer.step(step, loss=loss, learning_rate=1e-3)
            told = _losses_in(Path(folder))
            there += len(told) == step
            equal += bool(told) and told[-1] == (loss if math.isfinite(loss) else str(loss))
    number = len(losses)
    hint = ""
    if there < number:
        hint = (
            "write each event by one append as it happens: what is held back dies with the process"
        )
    elif equal < number:
        hint = "write figures with all their digits, and NaN as a word"
    measured = f"{there} of {number} there at once, {equal} of {number} losses to the bit"
    return Verdict("run-journal/complete", not hint, measured, "all at once, all to the bit", hint)


def torn(case: Case, *, journal: Callable[[Path], Any] = Journal) -> Verdict:
    """Cut at bytes of the last lines, read, and gone on with by the next process."""
    required = "at each cut all whole events, before and after"
    wrong = list[str]()
    with tempfile.TemporaryDirectory(prefix="journal-gate-") as folder:
        with journal(Path(folder)) as writer:
            writer.start()
            for step, loss in enumerate(_own_losses(case), start=1):
                writer.step(step, loss=loss, learning_rate=1e-3)
        path = Path(folder, NAME)
        whole = path.read_bytes()
        least = len(b"".join(whole.splitlines(keepends=True)[:-3]))
        cuts = range(least, len(whole) + 1, max(1, (len(whole) - least) // MOST_CUTS))
        for cut in cuts:
            path.write_bytes(whole[:cut])
            if said := _goes_on(Path(folder), whole[:cut], journal):
                wrong.append(f"at byte {cut} of {len(whole)}: {said}")
    hint = (
        f"{wrong[0]}; set a torn line aside, and begin the next on a line of its own"
        if wrong
        else ""
    )
    return Verdict(
        "run-journal/torn", not wrong, f"{len(cuts)} cuts, {len(wrong)} wrong", required, hint
    )


def attempts(
    case: Case,
    *,
    journal: Callable[[Path], Any] = Journal,
    read: Callable[[Path], History] = read_history,
) -> Verdict:
    """A run that went back, was killed, and was resumed: what counts is what was trained last."""
    losses = _own_losses(case)
    again = [loss + 1 for loss in losses]
    with tempfile.TemporaryDirectory(prefix="journal-gate-") as folder:
        with journal(Path(folder)) as writer:
            writer.start()
            _write(writer, losses, range(1, 6))
            writer.rollback(2, from_step=5, reason="planted")
            _write(writer, again, range(3, 5))
        with journal(Path(folder)) as writer:
            writer.resume(3)
            _write(writer, losses, range(4, NUM_STEPS + 1))
        history = read(Path(folder))
        expected = [*losses[:2], again[2], *losses[3:]]
        found = list(history.steps.values["loss"])
        opened = [(one.number, one.kind, one.step) for one in history.attempts]
    right = (
        sum(loss == other for loss, other in zip(found, expected, strict=False))
        if len(found) == NUM_STEPS
        else 0
    )
    held = right == NUM_STEPS and opened == [(1, "start", 0), (2, "rollback", 2), (3, "resume", 3)]
    hint = (
        ""
        if held
        else "open a new attempt at each resume and rollback; of two losses of a step the later counts"
    )
    measured = f"{right} of {NUM_STEPS} losses are the last, {len(opened)} attempts"
    return Verdict(
        "run-journal/attempts", held, measured, f"{NUM_STEPS} of {NUM_STEPS}, 3 attempts", hint
    )


GATES = (
    Gate("run-journal/complete", complete),
    Gate("run-journal/torn", torn),
    Gate("run-journal/attempts", attempts),
)


def _losses_in(folder: Path) -> list[Any]:
    """As another process reads them; NaN is a word."""
    try:
        return [event.facts["loss"] for event in JournalReading(folder) if event.kind == "step"]
    except JournalError:  # nothing is in it yet
        return []


def _goes_on(folder: Path, left: bytes, journal: Callable[[Path], Any]) -> str:
    """What is wrong with a journal of which this was left, once another process has written two events."""
    whole = left.count(b"\n")
    try:
        read = sum(1 for _ in JournalReading(folder))
        with journal(folder) as writer:
            writer.resume(NUM_STEPS)
            writer.step(NUM_STEPS + 1, loss=1.0, learning_rate=1e-3)
        events = list(JournalReading(folder))
    except RunError as error:
        return str(error)
    if not whole <= read <= whole + 1:  # a line that lacks only its end is whole
        return f"{read} events were read of {whole}"
    kinds = [event.kind for event in events if event.kind != "warning"][-2:]
    if len(events) < read + 2 or kinds != ["resume", "step"]:
        return f"{len(events)} events are there of {read + 2}"
    return ""


def _write(writer: Any, losses: list[float], steps: range) -> None:
    for step in steps:
        writer.step(step, loss=losses[step - 1], learning_rate=1e-3)


def _own_losses(case: Case) -> list[float]:
    with trained(case, SOUND) as (state, _):
        return [float(train_step(case, state)) for _ in range(NUM_STEPS)]
