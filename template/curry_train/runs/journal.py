"""Write the journal of a run, `journal.jsonl`, with one event per line.

    with Journal("runs/run-001", rank=rank) as journal:
        journal.start(facts=run_facts(config, device=device))  # or journal.resume(500, facts=...)
        journal.step(1, loss=4.2, learning_rate=3e-4, seconds=0.1, peak_bytes=2**30)
        journal.write("save", step=100, checkpoint="rollback/step-00000100.dcp")
        journal.rollback(100, from_step=180, reason="loss 9.1 after 4.0")
        journal.write("stop", step=300, reason="steps")

Only one process of the run writes. Each line has `v`, `time`, `step`, `attempt` and `kind`; each
resume or rollback opens a new attempt. A line is a single append and is in the file when the call
returns, so that a kill can tear the last line at most. The next process that opens the journal
moves a torn line into a warning event. A full disk loses events, with a warning, but does not stop
the training.
Proof: `python -m pytest tests/test_journal.py tests/test_journal_kill.py`.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .forked import close_here, keep_from_children
from .journal_file import JournalFile, open_journal
from .journal_lines import KINDS, OPENING, JournalError, encode_event
from .journal_reading import NAME

# Events that are synced to the disk, so that they survive a loss of power.
ON_DISK = {"start", "resume", "rollback", "save", "stop"}
logger = logging.getLogger(__name__)


class Journal:
    """The journal of a run's folder, open for writing by rank 0; other ranks write nothing.

    `run` is the name of the run, by default the folder's name. The kernel's lock on the file
    refuses a second process. A file system without locks gets a warning event instead; lines can't
    mix on a local disk even then, since each is a single append.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        run: str | None = None,
        rank: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(folder) / NAME
        self.run = run or Path(folder).resolve().name
        self.writes = rank == 0
        self._clock = clock
        # A background save writes its event from its own thread.
        self._mutex = threading.RLock()
        self._file: JournalFile | None = (
            open_journal(self.path, run=self.run) if self.writes else None
        )
        self._last = self._file.last if self._file else None
        self.attempt = self._last.attempt if self._last else 0
        self._begun = False
        self._torn = False
        keep_from_children(self)
        self._lost = 0
        self._why = ""

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def empty(self) -> bool:
        """Whether the journal has no attempt yet, so that `start` may be called."""
        return self.attempt == 0

    def start(self, *, facts: Mapping[str, Any] | None = None) -> None:
        """Begin the run; `facts` are the result of `run_facts`."""
        if not self.empty:
            raise JournalError(
                f"{self.path} has events already: give a new run its own folder, or call resume(0)"
            )
        self._begin("start", 0, {"pid": os.getpid(), **(facts or {})})

    def resume(
        self,
        step: int,
        *,
        facts: Mapping[str, Any] | None = None,
        from_run: str | None = None,
        checkpoint: str | None = None,
    ) -> None:
        """Continue the run from `step` of its own state, or of the state of the run `from_run`."""
        if self._file and self._last and from_run is None and step > self._last.step:
            self._file.remarks.append(
                f"steps {self._last.step + 1} to {step} are not in this journal"
            )
        origin: dict[str, Any] = {"pid": os.getpid()}
        if from_run is not None:
            origin["from_run"] = from_run
        if checkpoint is not None:
            origin["checkpoint"] = checkpoint
        self._begin("resume", step, origin | dict(facts or {}))

    def rollback(self, step: int, *, from_step: int, reason: str, **facts: Any) -> None:
        """Record that the run went back from `from_step` to its state at `step`."""
        self._check_begun("rollback")
        self._begin("rollback", step, {"from_step": from_step, "reason": reason, **facts})

    def step(
        self,
        step: int,
        *,
        loss: float,
        learning_rate: float,
        grad_norm: float | None = None,
        terms: int | None = None,
        seconds: float | None = None,
        peak_bytes: int | None = None,
        **more: Any,
    ) -> None:
        """Record one optimizer step and its figures."""
        self.write(
            "step",
            step=step,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            terms=terms,
            seconds=seconds,
            peak_bytes=peak_bytes,
            **more,
        )

    def write(self, kind: str, *, step: int, **facts: Any) -> None:
        """Write any other event.

        An eval has `metric` and `value`; a spike, skip, warning or stop has `reason`.
        """
        if kind in OPENING:
            raise ValueError(f"an event {kind!r} opens an attempt: call the method {kind}()")
        if kind not in KINDS:
            raise ValueError(f"there is no event {kind!r}: take one of {', '.join(KINDS)}")
        self._check_begun(kind)
        self._write(kind, step, facts)

    def close(self) -> None:
        """Close the file. Write the event `stop` with its reason before this call."""
        with self._mutex:
            if self._file is not None:
                close_here(self._file.handle)
                self._file = None

    def leave_behind(self) -> None:
        """Give up the journal in a forked child, because the parent owns it."""
        self._file = None

    def _check_begun(self, kind: str) -> None:
        if self.writes and not self._begun:
            raise JournalError(
                f"{self.path}: {kind} before the run began: call start or resume first"
            )

    def _begin(self, kind: str, step: int, facts: dict[str, Any]) -> None:
        with self._mutex:
            self._write(kind, step, facts)
            self._begun = True
            while self._file is not None and self._file.remarks:
                self._write("warning", step, {"reason": self._file.remarks.pop(0)})

    def _write(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        if not self.writes:
            return
        if type(step) is not int or step < 0:
            raise ValueError(f"a step is a whole number from 0, got {step!r}")
        with self._mutex:
            if self._file is None:
                raise JournalError(f"{self.path} is closed: {kind} of step {step} can't be written")
            attempt = self.attempt + (kind in OPENING)
            run = self.run if kind in OPENING else None
            line = encode_event(
                kind, facts, time=self._clock(), step=step, attempt=attempt, run=run
            )
            self.attempt = attempt

            if self._lost and not self._report_lost(step):
                self._lost += 1
            elif not self._append(self._file.handle, line):
                self._lost = 1
                logger.warning(
                    "%s: step %d: %s; training goes on without its journal",
                    self.path,
                    step,
                    self._why,
                )
            elif kind in ON_DISK:
                self._force(self._file.handle)

    def _report_lost(self, step: int) -> bool:
        """Write a warning about lost events; return whether it could be written."""
        assert self._file is not None
        facts = {"reason": f"{self._lost} events could not be written: {self._why}"}
        line = encode_event("warning", facts, time=self._clock(), step=step, attempt=self.attempt)
        if self._append(self._file.handle, line):
            self._lost = 0
        return not self._lost

    def _append(self, handle: int, line: bytes) -> bool:
        """Write the line with one call, so that lines of other writers can't mix with it.

        After a torn line, begin on a new line. Returns whether the whole line was written.
        """
        line = b"\n" + line if self._torn else line
        try:
            written = os.write(handle, line)
        except OSError as error:
            self._why = error.strerror or str(error)
            return False
        self._torn = written < len(line)
        self._why = os.strerror(errno.ENOSPC) if self._torn else ""
        return not self._torn

    def _force(self, handle: int) -> None:
        try:
            os.fsync(handle)
        except OSError as error:
            logger.warning("%s may not outlive a loss of power: %s", self.path, error.strerror)
