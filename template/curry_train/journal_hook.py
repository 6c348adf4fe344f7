"""Journal of a training run, written by a hook of the training loop.

    with write_journal(run) as journal:
        run_training_steps(..., after_step=[journal])
        journal.ended(report.ended_by)

Proof: `python -m pytest tests/test_journal_hook.py`.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .core.high_water import peak_bytes
from .loop import StepReport
from .runs.journal import Journal
from .runs.names import Saved
from .runs.run_facts import run_facts

if TYPE_CHECKING:
    from .training import Run


class RunJournal:
    """Write the journal; call it after each step.

    Other events, such as saves, prunes, spikes and rollbacks, are written to `journal`.
    """

    def __init__(self, journal: Journal, run: "Run") -> None:
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
            self.journal.write(
                "skip",
                step=report.step,
                reason="a gradient was not finite, and the scale is lowered",
            )
        if report.dev_loss is not None:
            self.journal.write("eval", step=report.step, metric="dev_loss", value=report.dev_loss)

    def saved(self, saved: Saved) -> None:
        """Record that a state was committed, with its size."""
        self.journal.write(
            "save", step=saved.step, checkpoint=saved.folder, num_bytes=saved.num_bytes
        )

    def pruned(self, step: int, checkpoint: str, **facts: Any) -> None:
        """Record that the saved state of `step` was removed by the retention."""
        self.journal.write("prune", step=self.step, checkpoint=checkpoint, of_step=step, **facts)

    def ended(self, reason: str) -> None:
        """Set the reason of the last event, as in `RunReport.ended_by`."""
        self.ended_by = reason

    def reason(self) -> str:
        return self.ended_by or ("steps" if self.step >= self._steps else "before its last step")


@contextlib.contextmanager
def write_journal(run: "Run") -> Iterator[RunJournal]:
    """Write an event for each step to journal.jsonl at once; the first has the run's facts."""
    parts = run.parts
    with Journal(run.folder, rank=parts.ranks.rank) as journal:
        facts = run_facts(
            asdict(parts.config), device=parts.ranks.device, world_size=parts.ranks.size
        )
        if run.first_step or not journal.empty:
            resumed = run.resumed.saved.folder if run.resumed else None
            journal.resume(run.first_step, facts=facts, checkpoint=resumed)
        else:
            journal.start(facts=facts)
        hook = RunJournal(journal, run)
        try:
            yield hook
        except BaseException as error:
            journal.write("stop", step=hook.step, reason=f"{type(error).__name__}: {error}"[:1000])
            raise
        journal.write("stop", step=hook.step, reason=hook.reason())
