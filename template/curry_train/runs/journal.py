"""What happens to a run, written as it happens: `journal.jsonl`, one event per line, by one process of the run.

    with Journal("runs/run-001", rank=rank) as journal:
        journal.start(facts=run_facts(config, device=device))        # or journal.resume(500, facts=...)
        journal.step(1, loss=4.2, learning_rate=3e-4, grad_norm=1.0, terms=512, seconds=0.1, peak_bytes=2**30)
        journal.write("save", step=100, checkpoint="rollback/step-00000100.dcp")
        journal.rollback(100, from_step=180, reason="loss 9.1 after 4.0")
        journal.write("stop", step=300, reason="steps")

Each line has `v`, `time`, `step`, `attempt` and `kind`; each resume or rollback opens a new attempt. A line is one
append to the file, there when the call returns, so a kill tears the last one at most; who opens the journal next sets
that aside in a warning event. A full disk loses events, which is said, and never the training.
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

ON_DISK = {
    "start",
    "resume",
    "rollback",
    "save",
    "stop",
}  # also there after the machine lost its power
logger = logging.getLogger(__name__)


class Journal:
    """Opens the journal of a run's folder for writing; `run` is the folder's name. Ranks but the first write nothing.

    A second process is refused by the kernel's lock on the file. Where the file system has none, that is said in a
    warning event, and lines still can't mix on a local disk, since each is one append.
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
        self._mutex = threading.RLock()  # a save in the background is told by its own thread
        self._file: JournalFile | None = (
            open_journal(self.path, run=self.run) if self.writes else None
        )
        self._last = self._file.last if self._file else None
        self.attempt = self._last.attempt if self._last else 0
        self._begun = self._torn = False
        keep_from_children(self)
        self._lost, self._why = 0, ""

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
        """Whether no attempt was opened yet, so that `start` may be the first."""
        return self.attempt == 0

    def start(self, *, facts: Mapping[str, Any] | None = None) -> None:
        """The run begins, with what `run_facts` knows of it."""
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
        """The run goes on from `step`, of its own state or of another run's, `from_run`."""
        if self._file and self._last and from_run is None and step > self._last.step:
            self._file.remarks.append(
                f"steps {self._last.step + 1} to {step} are not in this journal"
            )
        told = {"pid": os.getpid(), "from_run": from_run, "checkpoint": checkpoint}
        self._begin(
            "resume",
            step,
            {key: value for key, value in told.items() if value is not None} | dict(facts or {}),
        )

    def rollback(self, step: int, *, from_step: int, reason: str, **facts: Any) -> None:
        """The run went back from `from_step` to its state of `step`."""
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
        """One optimizer step and its figures."""
        facts = {
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "terms": terms,
        }
        self.write("step", step=step, **facts, seconds=seconds, peak_bytes=peak_bytes, **more)

    def write(self, kind: str, *, step: int, **facts: Any) -> None:
        """Any other event; `metric` and `value` of an eval, `reason` of a spike, skip, warning or stop."""
        if kind in OPENING or kind not in KINDS:
            raise ValueError(
                f"{kind!r} can't be written so: call the method, or take one of {', '.join(KINDS)}"
            )
        self._check_begun(kind)
        self._write(kind, step, facts)

    def close(self) -> None:
        """Give the file back. The event `stop` is for the caller to write, who knows why."""
        with self._mutex:
            if self._file is not None:
                close_here(self._file.handle)
                self._file = None

    def leave_behind(self) -> None:
        """A child that was forked has no journal: this one is its parent's."""
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
            if self._lost and not self._say_lost(step):
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

    def _say_lost(self, step: int) -> bool:
        assert self._file is not None
        told = {"reason": f"{self._lost} events could not be written: {self._why}"}
        line = encode_event("warning", told, time=self._clock(), step=step, attempt=self.attempt)
        if self._append(self._file.handle, line):
            self._lost = 0
        return not self._lost

    def _append(self, handle: int, line: bytes) -> bool:
        """One write, so that no other line comes between; after a torn one on a line of its own."""
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
