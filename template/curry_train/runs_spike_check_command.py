"""Command `runs spike-check`: plant bad samples and check the recovery from the spike.

    python -m curry_train runs spike-check --model transformer --plot spike.png

Proof: `python -m pytest tests/test_spike_check.py -k command`.
"""

import contextlib
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import load_config
from .core.load import load_workload
from .core.provenance import provenance, write_json
from .loop import StepReport
from .options import UnusableInput, choose_device, json_option, model_option, plot_option
from .plots import require_matplotlib
from .progress import clock
from .runs.errors import RunError
from .runs.journal_history import read_history
from .runs_plot import plot_runs
from .spike_check import (
    RECOVERED,
    THROUGH,
    WITHOUT,
    Missed,
    SpikeCheck,
    check_settings,
    spike_check,
)
from .training import Hook, Run, Watch

TIMED = 5  # steps to time before the total time is estimated
MOST_RISES = 6  # rises of the loss to print


@click.command("spike-check")
@model_option("model", more="Same as model=.")
@click.option(
    "--config", type=click.Path(exists=True, dir_okay=False), help="YAML configuration file."
)
@click.option(
    "--steps", type=click.IntRange(18), default=240, show_default=True, help="Steps of each run."
)
@click.option(
    "--at", type=click.IntRange(2), help="First bad step; default: two thirds of the steps."
)
@click.option(
    "--windows",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Number of steps with bad samples.",
)
@plot_option("Draw loss, dev loss and events of the runs as PNG.")
@click.option(
    "--runs",
    "keep_path",
    type=click.Path(file_okay=False),
    help="Keep the runs in this new folder.",
)
@json_option()
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
def spike_check_command(
    model: str | None,
    config: str | None,
    steps: int,
    at: int | None,
    windows: int,
    plot_path: str | None,
    keep_path: str | None,
    json_path: str | None,
    words: tuple[str, ...],
) -> None:
    """Check the recovery from a loss spike.

    Plants bad samples and trains with the watchdog, without the skipped samples, and through the
    bad samples. If the watchdog finds no spike, only the first run is trained.

    Exit status: 0 found and recovered to the bit, 1 not, 2 wrong usage.
    """
    every = max(1, steps // 8)
    at = at or steps * 2 // 3
    given = [f"checkpoint.rollback_every={every}", f"evaluate.every={every}", *words]
    if model:
        given.append(f"model={model}")
    console = Console(stderr=json_path == "-", highlight=False, soft_wrap=False)

    with contextlib.ExitStack() as stack:
        if keep_path:
            folder = Path(keep_path)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spike-check-")))
        if folder.exists() and any(folder.iterdir()):
            raise UnusableInput(f"{folder} is not empty: give a new folder")
        try:
            settings = load_config(config, ["spike.action=rollback", *given, f"steps={steps}"])
            check_settings(settings, at=at, num_windows=windows)
            load_workload(settings.model)  # a wrong model is reported before a missing package
            if plot_path:
                _require_matplotlib()
            facts = provenance(choose_device(settings.device))
            watch = stack.enter_context(_progress(steps))
            result = spike_check(
                folder, given, steps=steps, at=at, num_windows=windows, config=config, watch=[watch]
            )
            if plot_path:
                _draw(result, folder, plot_path)
        except (ValueError, RunError) as error:
            raise UnusableInput(
                "\n".join(textwrap.wrap(str(error), 80, break_long_words=False))
            ) from error

    for line in describe(result):
        console.print("\n".join(textwrap.wrap(line, 80)), markup=False)
    if plot_path:
        console.print(f"drawn as {plot_path}", markup=False)
    if json_path:
        write_json(json_path, facts | result.to_json())
    sys.exit(0 if result.held else 1)


def describe(found: SpikeCheck) -> Iterator[str]:
    """Describe the result in lines."""
    first, last = found.planted
    yield f"planted: bad samples in steps {first} to {last} of {found.steps}"
    if found.missed is not None:
        yield from _describe_missed(found.missed, last - first + 1)
        return
    skipped = ", ".join(f"{start} to {stop - 1}" for start, stop in found.skipped)
    yield f"found {found.found_after} steps after the first, with patience {found.patience}"
    times = "once" if found.rollbacks == 1 else f"{found.rollbacks} times"
    yield f"went back to step {found.back_to}, {times}, without the samples at positions {skipped}"
    for name, words in (
        (RECOVERED, "recovered"),
        (WITHOUT, "never saw them"),
        (THROUGH, "trained through"),
    ):
        dev = found.dev_losses[name]
        dev_loss = "" if dev is None else f", dev loss {dev:.4f}"
        yield f"{words:>15}: loss {found.losses[name]:.4f}{dev_loss}"
    if found.difference is None:
        yield "equal to the bit to the run that never saw them"
    else:
        yield f"NOT equal to the run that never saw them: {found.difference}"


def _describe_missed(missed: Missed, num_bad: int) -> Iterator[str]:
    limit = missed.limit
    rises = ", ".join(f"{rise:+.3g}" for rise in missed.rises[:num_bad][:MOST_RISES])
    if num_bad > MOST_RISES:
        rises += ", ..."
    steps = "bad step" if num_bad == 1 else f"{num_bad} bad steps"
    long_enough = " for long enough" if missed.in_a_row else ""
    yield f"NOT found: the loss did not rise enough{long_enough}"
    yield f"it rose by {rises} in the {steps}, over a level of {limit.level:.4g}"
    yield (
        f"needed: more than {limit.rise:+.3g} in {missed.patience} steps in a row "
        f"(spike.patience); there were {missed.in_a_row}"
    )
    drift = f", plus {limit.drift:.2g} by which it was already rising" if limit.drift else ""
    yield (
        f"that is the larger of {missed.threshold:g} times the noise (spike.threshold), "
        f"{limit.by_noise:.2g}, and {missed.least_rise:g} of the level or of the fall to it "
        f"(spike.least_rise), {limit.by_level:.2g}{drift}"
    )
    yield f"to find it: {missed.advice}"


def _require_matplotlib() -> None:
    try:
        require_matplotlib()
    except RuntimeError as error:
        raise UnusableInput(str(error)) from error


def _draw(found: SpikeCheck, folder: Path, path: str) -> None:
    """Draw all three runs, or the first one if no spike was found."""
    first, last = found.planted
    names: tuple[str, ...] = (RECOVERED,)
    outcome = "not found: one run, through them"
    if found.rollbacks:
        names = (THROUGH, WITHOUT, RECOVERED)
        outcome = "found: three runs"
    histories = [read_history(folder / f"{name}-001", name=name) for name in names]
    plot_runs(histories, path, title=f"bad samples in steps {first} to {last}, {outcome}")


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Watch]:
    """Print an estimate of the total time, then show a bar, or a line per run off a terminal."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (
        BarColumn(12),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=3 * steps)
        steps_before = 0

        @contextlib.contextmanager
        def watch(run: Run) -> Iterator[Hook]:
            nonlocal steps_before
            began = time.perf_counter()
            after_first = 0.0

            def advance(report: StepReport) -> None:
                nonlocal after_first
                if report.step == 1:
                    # The estimate leaves out the first step, which takes much longer.
                    after_first = time.perf_counter()
                elif report.step == TIMED and not steps_before:
                    step_seconds = (time.perf_counter() - after_first) / (TIMED - 1)
                    total = clock(3 * steps * step_seconds)
                    console.print(f"three trainings of {steps} steps, about {total} in all")
                completed = steps_before + report.step
                progress.update(task, completed=completed, description=run.folder.name)

            yield advance
            steps_before += steps
            if not console.is_terminal:
                console.print(
                    f"{run.folder.name}: {steps} steps in {clock(time.perf_counter() - began)}"
                )

        yield watch
