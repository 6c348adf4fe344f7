"""The resume-check command: kill a training, resume it, and compare to the bit.

Trains once straight through, and once killed and resumed. Both run in processes of their own; the
second is killed by SIGKILL within a step and resumes from its newest saved state.

Proof: `python -m pytest tests/cli/test_runs_command.py`.
"""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from ..config import load_config
from ..core.wording import provenance
from ..runs.history import History, Steps, read_history
from ..runs.store import SavedRun
from ..trainer import train_run
from .options import choose_device, model_option, new_folder
from .runs import JSON_OPTION, end, saved_tensors
from .runs_diff import compare_values
from .screen import ScreenCommand, fill_screen, messages_on_screen
from .train import open_named_run

# Check that a resumed run equals an uninterrupted one to the bit.

COMPARED_FIGURES = ("loss", "grad_norm", "learning_rate")
STRAIGHT_RUN_NAME = "straight"
KILLED_RUN_NAME = "killed"


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
    """Train with these configuration words in `folder`, with and without a kill, and compare."""
    if not 1 <= save_every < kill_at < steps:
        raise ValueError(
            "the check needs a save, then a kill, then a step: 1 <= save-every < kill-at < steps, "
            f"got {save_every}, {kill_at} and {steps}"
        )
    given = [*words, f"steps={steps}", f"checkpoint.rollback_every={save_every}", f"runs={folder}"]
    _train([*given, f"name={STRAIGHT_RUN_NAME}"], config=config)
    _train([*given, f"name={KILLED_RUN_NAME}"], config=config, kill_at=kill_at)
    killed_run = folder / f"{KILLED_RUN_NAME}-001"
    last_step = read_history(killed_run).last_step
    if last_step != kill_at - 1:
        raise ValueError(
            f"the run was to be killed in step {kill_at} and ended after step {last_step}: this is "
            "a bug of the check"
        )

    _train([*given, f"name={KILLED_RUN_NAME}"], config=config, resume=killed_run.name)
    straight_run = folder / f"{STRAIGHT_RUN_NAME}-001"
    straight, resumed = (read_history(run) for run in (straight_run, killed_run))
    straight_state, resumed_state = (final_tensors(run) for run in (straight_run, killed_run))
    difference = different_figure(straight, resumed)
    return ResumeCheck(
        steps=steps,
        killed_at=kill_at,
        resumed_from=resumed.events["resume"][0].step,
        figures=sum(len(part) for _, _, part in _compared(straight, resumed)),
        tensors=len(straight_state),
        difference=difference or different_tensor(straight_state, resumed_state),
    )


def final_tensors(run: Path) -> dict[str, Tensor]:
    """Read every tensor of the newest saved state of a run."""
    saved = SavedRun(run)
    newest = saved.latest()
    if newest is None:
        raise ValueError(f"{run} has no saved state")

    return saved_tensors(saved, newest.folder)


def _compared(straight: History, resumed: History) -> Iterator[tuple[str, Steps, Steps]]:
    """Yield each figure with the steps of both runs, those that the kill repeats included."""
    for name in COMPARED_FIGURES:
        for part in (*resumed.course.superseded, resumed.steps):
            yield name, straight.steps, part
    for name in straight.metrics.keys() & resumed.metrics.keys():
        for part in (*resumed.metrics[name].superseded, resumed.metrics[name].steps):
            yield "value", straight.metrics[name].steps, part


def different_figure(straight: History, resumed: History) -> str | None:
    """Name the first figure of a resumed run that is not the same, or a step that it lacks."""
    for name, expected, part in _compared(straight, resumed):
        if found := compare_values(expected, part, name).first:
            what = "dev loss" if name == "value" else name
            return f"{what} of step {found.step} is {found.a!r} straight and {found.b!r} resumed"
    missing = sorted({*straight.steps.step} - {*resumed.steps.step})
    return f"step {missing[0]} was not trained after the resume" if missing else None


def different_tensor(straight: dict[str, Tensor], resumed: dict[str, Tensor]) -> str | None:
    """Name the first tensor of two final states that is not the same in every bit."""
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
    """Train one run in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        try:
            process.submit(_train_here, words, config, kill_at, resume).result()
        except BrokenProcessPool as error:
            if kill_at is None:
                raise ValueError("the system ended the process of the training") from error


def _train_here(
    words: Sequence[str], config: str | None, kill_at: int | None, resume: str | None
) -> None:
    """Train one run in this process, and kill it at the step `kill_at`."""
    with open_named_run(load_config(config, words), resume=resume) as run:

        def kill(*_: Any) -> None:
            # The step that is running now is not in `attached.steps` yet.
            if run.attached.steps + 1 == kill_at:
                # Finish saves first, so that the resume step does not depend on disk speed.
                run.attached.policy.finish()
                os.kill(os.getpid(), signal.SIGKILL)

        run.optimizer.register_step_post_hook(kill)
        train_run(run)


# Command `runs resume-check`: check that a killed and resumed run is bit-equal.


@click.command("resume-check", cls=ScreenCommand, example="--steps 6 batch_size=4")
@model_option("model", more=". Same as model=.")
@click.option(
    "--config", type=click.Path(dir_okay=False, exists=True), help="YAML configuration file."
)
@click.option(
    "--steps", default=12, type=click.IntRange(3), show_default=True, help="Steps of each run."
)
@click.option(
    "--kill-at",
    type=click.IntRange(2),
    help="Step in which the second run is killed; default: two thirds of the steps.",
)
@click.option(
    "--save-every",
    type=click.IntRange(1),
    help="Steps between saves; default: half of --kill-at.",
)
@click.option("--out", type=click.Path(file_okay=False), help="Keep the runs in this new folder.")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@JSON_OPTION
def resume_check_command(
    model: str | None,
    config: str | None,
    steps: int,
    kill_at: int | None,
    save_every: int | None,
    out: str | None,
    words: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Check that a resumed run is bit-equal.

    Trains once straight through, and once killed with SIGKILL and resumed, and compares every
    figure and the final state.

    Exit status: 0 equal, 1 not equal, 2 wrong usage.
    """
    kill_step = kill_at or max(2, steps * 2 // 3)
    given = [*words, *([f"model={model}"] if model else [])]
    with contextlib.ExitStack() as stack:
        folder = new_folder(stack, out)
        show_message = stack.enter_context(messages_on_screen())
        show_message("straight, killed, resumed")
        every = save_every or max(1, kill_step // 2)
        facts = provenance(choose_device(load_config(config, given).device))
        result = resume_check(
            folder, given, steps=steps, kill_at=kill_step, save_every=every, config=config
        )

    repeated = result.killed_at - result.resumed_from
    click.echo(
        f"{steps} steps, killed in step {kill_step}, resumed from step {result.resumed_from}: "
        f"{repeated} done again"
    )
    verdict = f"equal: {result.figures} figures and {result.tensors} tensors"
    if not result.equal:
        verdict = fill_screen(f"NOT equal: {result.difference}")
    click.echo(verdict)
    end(json_path, facts | result.to_json(), well=result.equal)
