"""Gates of the run journal: no lost events, torn ends, and attempts.

Each gate takes the component that it checks, so that its tests can plant a wrong one.

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
    """Write the model's losses and a NaN, and look for each in the file when its call returns."""
    losses = [*_own_losses(case), math.nan]
    num_present = 0
    num_equal = 0
    with (
        tempfile.TemporaryDirectory(prefix="journal-gate-") as folder,
        journal(Path(folder)) as writer,
    ):
        writer.start()
        for step, loss in enumerate(losses, start=1):
            writer.step(step, loss=loss, learning_rate=1e-3)
            written = _losses_in(Path(folder))
            expected = loss if math.isfinite(loss) else str(loss)
            num_present += len(written) == step
            num_equal += bool(written) and written[-1] == expected

    number = len(losses)
    hint = ""
    if num_present < number:
        hint = (
            "append each event as it happens: events held back in memory are lost if the process "
            "is killed"
        )
    elif num_equal < number:
        hint = "write figures with all their digits, and NaN as a word"
    measured = (
        f"{num_present} of {number} present at once, {num_equal} of {number} losses to the bit"
    )
    return Verdict("run-journal/complete", not hint, measured, "all at once, all to the bit", hint)


def torn(case: Case, *, journal: Callable[[Path], Any] = Journal) -> Verdict:
    """Cut the journal at bytes of its last lines, read it, and continue it in a new process."""
    required = "all complete events after each cut, before and after continuing"
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
            if problem := _goes_on(Path(folder), whole[:cut], journal):
                wrong.append(f"at byte {cut} of {len(whole)}: {problem}")

    hint = ""
    if wrong:
        hint = f"{wrong[0]}; skip a torn line, and start the next event on a new line"
    return Verdict(
        "run-journal/torn", not wrong, f"{len(cuts)} cuts, {len(wrong)} wrong", required, hint
    )


def attempts(
    case: Case,
    *,
    journal: Callable[[Path], Any] = Journal,
    read: Callable[[Path], History] = read_history,
) -> Verdict:
    """Read the journal of a run with a rollback and a resume: a step's last loss counts."""
    losses = _own_losses(case)
    losses_after_rollback = [loss + 1 for loss in losses]
    with tempfile.TemporaryDirectory(prefix="journal-gate-") as folder:
        with journal(Path(folder)) as writer:
            writer.start()
            _write(writer, losses, range(1, 6))
            writer.rollback(2, from_step=5, reason="planted")
            _write(writer, losses_after_rollback, range(3, 5))
        with journal(Path(folder)) as writer:
            writer.resume(3)
            _write(writer, losses, range(4, NUM_STEPS + 1))
        history = read(Path(folder))
        expected = [*losses[:2], losses_after_rollback[2], *losses[3:]]
        found = list(history.steps.values["loss"])
        attempts = [(attempt.number, attempt.kind, attempt.step) for attempt in history.attempts]

    num_right = 0
    if len(found) == NUM_STEPS:
        num_right = sum(loss == other for loss, other in zip(found, expected, strict=False))
    expected_attempts = [(1, "start", 0), (2, "rollback", 2), (3, "resume", 3)]
    held = num_right == NUM_STEPS and attempts == expected_attempts
    hint = ""
    if not held:
        hint = (
            "start a new attempt at each resume and rollback; of two losses of a step use the later"
        )
    measured = f"{num_right} of {NUM_STEPS} losses are the last, {len(attempts)} attempts"
    return Verdict(
        "run-journal/attempts", held, measured, f"{NUM_STEPS} of {NUM_STEPS}, 3 attempts", hint
    )


GATES = (
    Gate("run-journal/complete", complete),
    Gate("run-journal/torn", torn),
    Gate("run-journal/attempts", attempts),
)


def _losses_in(folder: Path) -> list[Any]:
    """Read the losses as another process would; NaN is a word."""
    try:
        return [event.facts["loss"] for event in JournalReading(folder) if event.kind == "step"]
    except JournalError:  # the journal is still empty
        return []


def _goes_on(folder: Path, left: bytes, journal: Callable[[Path], Any]) -> str:
    """Continue a cut journal with two events in another process; return the problem, if any."""
    num_complete = left.count(b"\n")
    try:
        num_read = sum(1 for _ in JournalReading(folder))
        with journal(folder) as writer:
            writer.resume(NUM_STEPS)
            writer.step(NUM_STEPS + 1, loss=1.0, learning_rate=1e-3)
        events = list(JournalReading(folder))
    except RunError as error:
        return str(error)
    # A last line that lacks only its newline is complete as well.
    if not num_complete <= num_read <= num_complete + 1:
        return f"{num_read} of {num_complete} events were read"
    kinds = [event.kind for event in events if event.kind != "warning"][-2:]
    if len(events) < num_read + 2 or kinds != ["resume", "step"]:
        return f"{len(events)} of {num_read + 2} events are in the journal"
    return ""


def _write(writer: Any, losses: list[float], steps: range) -> None:
    for step in steps:
        writer.step(step, loss=losses[step - 1], learning_rate=1e-3)


def _own_losses(case: Case) -> list[float]:
    with trained(case, SOUND) as (state, _):
        return [float(train_step(case, state)) for _ in range(NUM_STEPS)]
