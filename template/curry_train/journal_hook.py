"""The journal of a training run, as a context that gives the loop a hook, beside those of progress.py.

    with open_run(config) as run:
        train_run(run, watch=[show_progress, write_journal])

Proof: `python -m pytest tests/test_journal_hook.py`.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from .loop import StepReport
from .progress import peak_bytes
from .runs.journal import Journal
from .runs.run_facts import run_facts
from .training import Run


class RunJournal:
    """Called after each step. `journal` takes what else happens: saves, prunes, spikes, rollbacks."""

    def __init__(self, journal: Journal, run: Run) -> None:
        self.journal = journal
        self.step = run.first_step
        self.ended_by: str | None = None
        self._run = run
        self._steps = run.parts.config.steps

    def __call__(self, report: StepReport) -> None:
        self.step = report.step
        self.journal.step(
            report.step,
            loss=report.loss,
            learning_rate=report.learning_rate,
            grad_norm=report.grad_norm,
            terms=report.num_terms,
            seconds=report.seconds,
            peak_bytes=peak_bytes(self._run.parts.ranks.device),
            epoch=self._run.parts.stream.epoch,
        )
        if not report.stepped:
            self.journal.write("skip", step=report.step, reason="a gradient was not finite, and the scale is lowered")
        if report.dev_loss is not None:
            self.journal.write("eval", step=report.step, metric="dev_loss", value=report.dev_loss)

    def saved(self, step: int, checkpoint: str, **facts: Any) -> None:
        """A state was saved, as `recovery/step-00000100.dcp` in the run's folder."""
        self.journal.write("save", step=step, checkpoint=checkpoint, **facts)

    def pruned(self, step: int, checkpoint: str, **facts: Any) -> None:
        """The saved state of `step` was removed, because newer or better ones are kept."""
        self.journal.write("prune", step=self.step, checkpoint=checkpoint, of_step=step, **facts)

    def ended(self, reason: str) -> None:
        """Why the loop ended, as in RunReport.ended_by; the last event says it."""
        self.ended_by = reason

    def reason(self) -> str:
        return self.ended_by or ("steps" if self.step >= self._steps else "before its last step")


@contextlib.contextmanager
def write_journal(run: Run) -> Iterator[RunJournal]:
    """An event for each step in journal.jsonl, there at once; the first says what the run is made of."""
    parts = run.parts
    with Journal(run.folder, rank=parts.ranks.rank) as journal:
        facts = run_facts(asdict(parts.config), device=parts.ranks.device, world_size=parts.ranks.size)
        if run.first_step or not journal.empty:
            journal.resume(run.first_step, facts=facts)
        else:
            journal.start(facts=facts)
        hook = RunJournal(journal, run)
        try:
            yield hook
        except BaseException as error:
            journal.write("stop", step=hook.step, reason=f"{type(error).__name__}: {error}"[:1000])
            raise
        journal.write("stop", step=hook.step, reason=hook.reason())
