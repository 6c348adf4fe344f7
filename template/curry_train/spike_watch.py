"""Spike watchdog of a training run: roll back, skip the samples, and train on.

    watch = SpikeWatch(run, journal, stop)
    while True:
        run_training_steps(..., after_step=[watch], schedule=watch.factor, stop=stop)
        if not watch.found:
            break
        watch.recover()

The judged losses are the same on every rank, so all ranks roll back together. `recoveries.json` in
the run's folder records the skipped samples, and a resumed run skips them too. Proof:
`python -m pytest tests/test_spike_watch.py`.
"""

import logging
import math
from typing import TYPE_CHECKING

from .journal_hook import RunJournal
from .loop import StepReport, Stop
from .primitives.grad_accum import NonFiniteWindow
from .runs.spike import Spike
from .runs.spike_recovery import Recovered, recover

if TYPE_CHECKING:
    from .training import Run

MOST_LISTED = 4096  # the journal lists skipped samples up to this number
REASON = "spike"
logger = logging.getLogger(__name__)


class SpikeWatch:
    """Judge the loss after each step; stop the loop at a spike, and recover from it.

    `found` is the spike that stopped the loop, until `recover` has rolled back from it.
    """

    def __init__(self, run: "Run", journal: RunJournal, stop: Stop) -> None:
        self.found: Spike | None = None
        self.config = run.parts.config.spike
        self._run = run
        self._journal = journal
        self._stop = stop
        self._schedule = run.parts.config.learning_rates()

    def factor(self, done: int) -> float:
        """Return the factor on the peak learning rate for the step after `done` steps."""
        return self._schedule(done) * self._run.recoveries.factor(done)

    def __call__(self, report: StepReport) -> None:
        if self.config.action != "none" and report.stepped:
            self._judge(report.step, report.loss)

    def not_finite(self, error: NonFiniteWindow) -> None:
        """Treat a step with a loss or gradient that is not finite as a spike.

        Raises the error again if the settings do not roll back.
        """
        if not self.config.rolls_back:
            raise error
        self._judge(self._run.state.step + 1, math.nan, why=str(error))

    def recover(self) -> None:
        """Roll back to before the spike and skip its samples. Raises SpikeNotRecovered."""
        spike = self.found
        run = self._run
        stream = run.parts.stream
        assert spike is not None
        for saved in run.policy.finish():
            self._journal.saved(saved)
        done = recover(
            spike,
            self.config,
            state=run.state,
            load=run.load,
            after=lambda position, windows: stream.after(position, windows=windows),
            recoveries=run.recoveries,
            write=run.parts.ranks.first,
            go_on=f"--resume {run.folder.name}@{{}}",
        )
        samples = stream.samples_between(done.recovery.start, done.recovery.stop)
        stream.skip(done.recovery.start, done.recovery.stop)
        self._tell(spike, done, samples)
        self.found = None
        if self._stop.reason == REASON:  # a signal that came meanwhile still ends the run
            self._stop.reason = None

    def _judge(self, step: int, loss: float, *, why: str = "") -> None:
        spike = self._run.watchdog.observe(step, loss)
        if spike is None:
            return
        words = why or spike.words
        seen = {
            "loss": None if why else loss,
            "first": spike.first,
            "baseline": spike.baseline,
            "limit": spike.limit,
        }
        self._journal.journal.write("spike", step=step, reason=words, **seen)
        if self.config.rolls_back:
            self.found = spike
            self._stop.ask(REASON)
            self._say("spike: %s", words)
        else:
            self._say(
                "spike: %s; with spike.action=rollback the run rolls back and skips its samples",
                words,
            )

    def _tell(self, spike: Spike, done: Recovered, samples: list[int]) -> None:
        journal = self._journal.journal
        recovery = done.recovery
        folder = done.resumed.saved.folder
        start = recovery.start
        stop = recovery.stop
        journal.rollback(
            recovery.back_to,
            from_step=spike.step,
            reason=spike.words,
            checkpoint=folder,
            number=recovery.attempt,
        )
        words = (
            f"positions {start} to {stop - 1} of the data, around the spike of step {spike.step}"
        )
        listed = {"samples": samples} if len(samples) <= MOST_LISTED else {}
        journal.write(
            "skip",
            step=recovery.back_to,
            reason=words,
            start=start,
            stop=stop,
            num_samples=len(samples),
            **listed,
        )
        slower = ""
        if recovery.slower_until:
            slower = (
                f", at {recovery.learning_rate:g} of the learning rate until step "
                f"{recovery.slower_until}"
            )
        self._say(
            "back at %s, without the %d samples at positions %d to %d%s (attempt %d of %d)",
            folder,
            len(samples),
            start,
            stop - 1,
            slower,
            recovery.attempt,
            self.config.attempts,
        )

    def _say(self, words: str, *figures: object) -> None:
        if self._run.parts.ranks.first:
            logger.warning(words, *figures)
