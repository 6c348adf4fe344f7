"""The journal of a training that `saving` keeps, so that `runs show`, `diff` and `plot` can read it.

    journal = AttachedJournal("runs/mine", state, resumed, config=config, ranks=ranks)
    journal.after_step({"loss": loss})
    journal.saved(saved)
    journal.ended("SIGTERM", saved)

Proof: `python -m pytest tests/test_attached_journal.py`.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from ..core.high_water import peak_bytes
from .files import Files, LocalFiles
from .health import number_of
from .journal import Journal
from .names import Saved
from .policy_config import PolicyConfig
from .ranks import Ranks
from .resume import Resumed
from .run_facts import run_facts
from .spike import Spike
from .spike_recovery import Recovered
from .state import TrainingState


def require_disk(files: Files, runs: str | os.PathLike[str]) -> None:
    """Raise where no line can be added to a file."""
    if not isinstance(files, LocalFiles):
        raise ValueError(
            f"a journal needs a folder on a disk, and {runs} is none: leave journal out"
        )


class AttachedJournal:
    """The first rank writes, with its own loss, which is read at each step."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        state: TrainingState,
        resumed: Resumed | None,
        *,
        config: PolicyConfig,
        ranks: Ranks,
    ) -> None:
        self._state, self._config = state, config
        self._journal = Journal(folder, rank=ranks.rank)
        self._step, self._since = state.step, time.perf_counter()
        self.before_step()
        self._device = next(
            (parameter.device for parameter in state.model.parameters()), torch.device("cpu")
        )
        facts = run_facts(
            {"checkpoint": asdict(config)}, device=self._device, world_size=ranks.size
        )
        if resumed is None and self._journal.empty:
            self._journal.start(facts=facts)
        else:
            self._journal.resume(
                state.step, facts=facts, checkpoint=resumed.saved.folder if resumed else None
            )

    def before_step(self) -> None:
        """A schedule may be stepped before the step is told, so its rate is read here."""
        rates = [float(group["lr"]) for one in self._state.optimizers for group in one.param_groups]
        self._rate = rates[0] if rates else 0.0

    def after_step(self, metrics: Mapping[str, Any]) -> None:
        """What came since the last call: a step, a measurement."""
        step, now, name = self._state.step, time.perf_counter(), self._config.best_k_metric
        if step > self._step:
            if metrics.get("loss") is None:
                raise ValueError(
                    "a journal has the loss of each step: call run.step(loss=loss), or leave journal out"
                )
            loss, peak = number_of(metrics["loss"]), peak_bytes(self._device)
            self._journal.step(
                step,
                loss=loss,
                learning_rate=self._rate,
                seconds=now - self._since,
                peak_bytes=peak,
            )
            self._step, self._since = step, now
            self.before_step()  # for a loop that takes its batches elsewhere
        if metrics.get(name) is not None:
            self._journal.write("eval", step=step, metric=name, value=number_of(metrics[name]))

    def spiked(self, spike: Spike) -> None:
        """Seen by the watchdog, after its step."""
        seen = {
            "loss": spike.loss,
            "first": spike.first,
            "baseline": spike.baseline,
            "limit": spike.limit,
        }
        self._journal.write("spike", step=spike.step, reason=spike.words, **seen)

    def went_back(self, spike: Spike, done: Recovered, saved: Iterable[Saved]) -> None:
        """The last events of this process."""
        self.saved(saved)
        recovery, folder = done.recovery, done.resumed.saved.folder
        told = {"checkpoint": folder, "number": recovery.attempt}
        self._journal.rollback(recovery.back_to, from_step=spike.step, reason=spike.words, **told)
        words = f"batches {recovery.start} to {recovery.stop - 1} of the run, around the spike of step {spike.step}"
        self._journal.write(
            "skip", step=recovery.back_to, reason=words, start=recovery.start, stop=recovery.stop
        )
        self.ended("spike")

    def ended(self, reason: str, saved: Iterable[Saved] = ()) -> None:
        """The last event, and the file is given back."""
        self.saved(saved)
        self._journal.write("stop", step=self._state.step, reason=reason[:1000])
        self._journal.close()

    def saved(self, saved: Iterable[Saved]) -> None:
        """What was committed."""
        for one in saved:
            self._journal.write(
                "save", step=one.step, checkpoint=one.folder, num_bytes=one.num_bytes
            )
