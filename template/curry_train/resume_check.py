"""Is a resumed run the straight one? Trains once straight, once killed and resumed, and compares to the bit.

Both run in processes of their own; the second dies by SIGKILL within a step, and goes on from what it had saved.
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
STRAIGHT, KILLED = "straight", "killed"


@dataclass(frozen=True)
class ResumeCheck:
    """What was compared, and where it first differs; None where all is equal."""

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
    """Train by these words in `folder`. Raises ValueError, with what the run said, where one does not run."""
    if not 1 <= save_every < kill_at < steps:
        raise ValueError(
            f"it takes a save, then a kill, then a step: 1 <= save-every < kill-at < steps, got {save_every}, "
            f"{kill_at} and {steps}"
        )
    given = [*words, f"steps={steps}", f"checkpoint.rollback_every={save_every}", f"runs={folder}"]
    _train([*given, f"name={STRAIGHT}"], config=config)
    _train([*given, f"name={KILLED}"], config=config, kill_at=kill_at)
    killed = folder / f"{KILLED}-001"
    died = max(step for step, _ in _metrics(killed))
    if died != kill_at:
        raise ValueError(
            f"the run was to die at step {kill_at} and was at {died}: this is an error of the check"
        )
    _train([*given, f"name={KILLED}"], config=config, resume=killed.name)
    straight, resumed = _metrics(folder / f"{STRAIGHT}-001"), _metrics(killed)
    first, second = final_tensors(folder / f"{STRAIGHT}-001"), final_tensors(killed)
    return ResumeCheck(
        steps=steps,
        killed_at=kill_at,
        resumed_from=_resumed_from([step for step, _ in resumed]),
        figures=sum(len(found) for _, found in resumed),
        tensors=len(first),
        difference=_different_figure(straight, resumed) or _different_tensor(first, second),
    )


def final_tensors(run: Path) -> dict[str, Tensor]:
    """Every tensor of the newest saved state of a run."""
    saved = SavedRun(run)
    if (newest := saved.latest()) is not None:
        metadata = read_metadata(
            saved.files, newest.folder, read_manifest(saved.files, newest.folder)
        )
        found = {
            name: torch.empty(facts.shape, dtype=facts.dtype)
            for name, facts in facts_of(metadata).items()
        }
        read_tensors(saved.files, newest.folder, metadata, found)
        return found
    raise ValueError(f"{run} has no saved state")


def _metrics(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """The figures of each step, in the order in which they were trained; a step that was done twice is there twice."""
    found: list[tuple[int, dict[str, Any]]] = []
    for event in JournalReading(run / NAME):
        if event.kind == "step":
            found.append(
                (event.step, {name: event.facts[name] for name in FIGURES if name in event.facts})
            )
        elif event.kind == "eval":
            found[-1][1][event.facts["metric"]] = event.facts["value"]
    return found


def _resumed_from(steps: Sequence[int]) -> int:
    """The step before the first that was done again, or that came after the kill."""
    return next(
        (after - 1 for before, after in itertools.pairwise(steps) if after <= before), max(steps)
    )


def _different_figure(
    straight: Sequence[tuple[int, Any]], resumed: Sequence[tuple[int, Any]]
) -> str | None:
    expected = dict(straight)
    for step, found in resumed:
        for name in FIGURES:
            first, second = expected.get(step, {}).get(name), found.get(name)
            if first != second and not (
                first != first and second != second
            ):  # NaN is equal to NaN here
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
        said = done.stderr.strip().splitlines()
        raise ValueError(
            f"the training did not run: {said[-1] if said else f'status {done.returncode}'}"
        )


def _train_here(order: dict[str, Any]) -> None:
    """In the process of one run."""

    @contextlib.contextmanager
    def dies(run: Run) -> Iterator[Hook]:
        def after_step(report: StepReport) -> None:
            if report.step == order["kill_at"]:
                run.policy.finish()  # so that where it goes on does not depend on how fast the disk is
                os.kill(os.getpid(), signal.SIGKILL)

        yield after_step

    train(load_config(order["config"], order["words"]), resume=order["resume"], watch=[dies])


if __name__ == "__main__":
    _train_here(json.loads(sys.argv[1]))
