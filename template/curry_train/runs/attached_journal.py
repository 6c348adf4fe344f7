"""Write the journal of a training run made by `saving`.

The commands `runs show`, `runs diff` and `runs plot` read it.

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
    """Raise ValueError where the storage cannot append lines to a file."""
    if not isinstance(files, LocalFiles):
        raise ValueError(
            f"a journal needs a folder on a disk, and {runs} is not one: leave journal out"
        )


class AttachedJournal:
    """The journal of one process: rank 0 writes it with its own loss, read at every step."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        state: TrainingState,
        resumed: Resumed | None,
        *,
        config: PolicyConfig,
        ranks: Ranks,
    ) -> None:
        self._state = state
        self._config = config
        self._journal = Journal(folder, rank=ranks.rank)
        self._step = state.step
        self._since = time.perf_counter()
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
        """Read the learning rate, because the loop may step its schedule before `after_step`."""
        rates = [
            float(group["lr"])
            for optimizer in self._state.optimizers
            for group in optimizer.param_groups
        ]
        self._rate = rates[0] if rates else 0.0

    def after_step(self, metrics: Mapping[str, Any]) -> None:
        """Write the step and the evaluation that happened since the last call."""
        step = self._state.step
        now = time.perf_counter()
        name = self._config.best_k_metric

        if step > self._step:
            if metrics.get("loss") is None:
                raise ValueError(
                    "a journal needs the loss of each step: "
                    "call run.step(loss=loss), or leave journal out"
                )
            self._journal.step(
                step,
                loss=number_of(metrics["loss"]),
                learning_rate=self._rate,
                seconds=now - self._since,
                peak_bytes=peak_bytes(self._device),
            )
            self._step = step
            self._since = now
            # A loop that does not take its batches from `run.batches` never calls `before_step`.
            self.before_step()

        if metrics.get(name) is not None:
            self._journal.write("eval", step=step, metric=name, value=number_of(metrics[name]))

    def spiked(self, spike: Spike) -> None:
        """Write a spike that the watchdog found; call after the journal has its step."""
        self._journal.write(
            "spike",
            step=spike.step,
            reason=spike.words,
            loss=spike.loss,
            first=spike.first,
            baseline=spike.baseline,
            limit=spike.limit,
        )

    def went_back(self, spike: Spike, done: Recovered, saved: Iterable[Saved]) -> None:
        """Write the rollback and the skipped batches, and end the journal of this process."""
        self.saved(saved)
        recovery = done.recovery
        self._journal.rollback(
            recovery.back_to,
            from_step=spike.step,
            reason=spike.words,
            checkpoint=done.resumed.saved.folder,
            number=recovery.attempt,
        )
        self._journal.write(
            "skip",
            step=recovery.back_to,
            reason=f"batches {recovery.start} to {recovery.stop - 1} of the run, "
            f"around the spike of step {spike.step}",
            start=recovery.start,
            stop=recovery.stop,
        )
        self.ended("spike")

    def ended(self, reason: str, saved: Iterable[Saved] = ()) -> None:
        """Write the last event and close the journal."""
        self.saved(saved)
        self._journal.write("stop", step=self._state.step, reason=reason[:1000])
        self._journal.close()

    def saved(self, saved: Iterable[Saved]) -> None:
        """Write an event for every committed checkpoint."""
        for checkpoint in saved:
            self._journal.write(
                "save",
                step=checkpoint.step,
                checkpoint=checkpoint.folder,
                num_bytes=checkpoint.num_bytes,
            )
