"""Check that a resumed run equals an uninterrupted one to the bit.

Trains once straight through, and once killed and resumed. Both run in processes of their own; the
second is killed by SIGKILL within a step and resumes from its newest saved state.
Proof: `python -m pytest tests/test_runs_command.py`.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import load_config
from .loop import StepReport
from .runs.journal_reading import NAME, JournalReading
from .runs.manifest import read_manifest
from .runs.safe_reader import facts_of, read_metadata, read_tensors
from .runs.saved_run import SavedRun
from .training import Hook, Run, train

FIGURES = ("loss", "dev_loss", "grad_norm", "learning_rate")
STRAIGHT = "straight"
KILLED = "killed"


@dataclass(frozen=True)
class ResumeCheck:
    """Numbers of compared figures and tensors, and the first difference (None if equal)."""

    steps: int
    killed_at: int
    resumed_from: int
    figures: int
    tensors: int
    difference: str | None

    @property
    def equal(self) -> bool:
        return self.difference is None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"equal": self.equal}


def resume_check(
    folder: Path,
    words: Sequence[str],
    *,
    steps: int,
    kill_at: int,
    save_every: int,
    config: str | None = None,
) -> ResumeCheck:
    """Train with these configuration words in `folder`, with and without a kill, and compare.

    Raises ValueError with the last line that the run printed if a run fails.
    """
    if not 1 <= save_every < kill_at < steps:
        raise ValueError(
            "the check needs a save, then a kill, then a step: 1 <= save-every < kill-at < steps, "
            f"got {save_every}, {kill_at} and {steps}"
        )
    given = [*words, f"steps={steps}", f"checkpoint.rollback_every={save_every}", f"runs={folder}"]
    _train([*given, f"name={STRAIGHT}"], config=config)
    _train([*given, f"name={KILLED}"], config=config, kill_at=kill_at)
    killed_run = folder / f"{KILLED}-001"
    last_step = max(step for step, _ in _metrics(killed_run))
    if last_step != kill_at:
        raise ValueError(
            f"the run was to be killed at step {kill_at} and ended at {last_step}: this is a bug "
            "of the check"
        )

    _train([*given, f"name={KILLED}"], config=config, resume=killed_run.name)
    straight_run = folder / f"{STRAIGHT}-001"
    straight = _metrics(straight_run)
    resumed = _metrics(killed_run)
    straight_state = final_tensors(straight_run)
    resumed_state = final_tensors(killed_run)
    difference = _different_figure(straight, resumed)
    return ResumeCheck(
        steps=steps,
        killed_at=kill_at,
        resumed_from=_resumed_from([step for step, _ in resumed]),
        figures=sum(len(figures) for _, figures in resumed),
        tensors=len(straight_state),
        difference=difference or _different_tensor(straight_state, resumed_state),
    )


def final_tensors(run: Path) -> dict[str, Tensor]:
    """Read every tensor of the newest saved state of a run."""
    saved = SavedRun(run)
    newest = saved.latest()
    if newest is None:
        raise ValueError(f"{run} has no saved state")

    manifest = read_manifest(saved.files, newest.folder)
    metadata = read_metadata(saved.files, newest.folder, manifest)
    tensors = {
        name: torch.empty(facts.shape, dtype=facts.dtype)
        for name, facts in facts_of(metadata).items()
    }
    read_tensors(saved.files, newest.folder, metadata, tensors)
    return tensors


def _metrics(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the figures of each step in journal order; a repeated step appears twice."""
    steps: list[tuple[int, dict[str, Any]]] = []
    for event in JournalReading(run / NAME):
        if event.kind == "step":
            figures = {name: event.facts[name] for name in FIGURES if name in event.facts}
            steps.append((event.step, figures))
        elif event.kind == "eval":
            _, figures = steps[-1]
            figures[event.facts["metric"]] = event.facts["value"]
    return steps


def _resumed_from(steps: Sequence[int]) -> int:
    """Return the step before the first repeated one, or the last step if none was repeated."""
    return next(
        (after - 1 for before, after in itertools.pairwise(steps) if after <= before), max(steps)
    )


def _different_figure(
    straight: Sequence[tuple[int, Any]], resumed: Sequence[tuple[int, Any]]
) -> str | None:
    expected = dict(straight)
    for step, figures in resumed:
        for name in FIGURES:
            first = expected.get(step, {}).get(name)
            second = figures.get(name)
            both_nan = first != first and second != second
            if first != second and not both_nan:
                return f"{name} of step {step} is {first!r} straight and {second!r} resumed"
    missing = sorted(expected.keys() - dict(resumed).keys())
    return f"step {missing[0]} was not trained after the resume" if missing else None


def _different_tensor(straight: dict[str, Tensor], resumed: dict[str, Tensor]) -> str | None:
    if missing := sorted(straight.keys() ^ resumed.keys()):
        return f"{missing[0]} is in one of the two final states alone"
    for name, first in straight.items():
        second = resumed[name]
        if (
            first.shape != second.shape
            or first.dtype != second.dtype
            or not _same_bits(first, second)
        ):
            return f"{name} differs in the final state"
    return None


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(
        *(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    )


def _train(
    words: Sequence[str],
    *,
    config: str | None,
    kill_at: int | None = None,
    resume: str | None = None,
) -> None:
    package = __package__ or ""
    root = str(Path(__file__).resolve().parents[len(package.split("."))])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    order = json.dumps(
        {"config": config, "words": list(words), "kill_at": kill_at, "resume": resume}
    )
    command = [sys.executable, "-m", f"{package}.resume_check", order]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    expected = 0 if kill_at is None else -signal.SIGKILL
    if done.returncode != expected:
        errors = done.stderr.strip().splitlines()
        reason = errors[-1] if errors else f"status {done.returncode}"
        raise ValueError(f"the training did not run: {reason}")


def _train_here(order: dict[str, Any]) -> None:
    """Train one run in this process, and kill it at the step `kill_at`."""

    @contextlib.contextmanager
    def kill_at_step(run: Run) -> Iterator[Hook]:
        def after_step(report: StepReport) -> None:
            if report.step == order["kill_at"]:
                # Finish saves first, so that the resume step does not depend on disk speed.
                run.policy.finish()
                os.kill(os.getpid(), signal.SIGKILL)

        yield after_step

    config = load_config(order["config"], order["words"])
    train(config, resume=order["resume"], watch=[kill_at_step])


if __name__ == "__main__":
    _train_here(json.loads(sys.argv[1]))
