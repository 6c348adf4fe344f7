"""The command that plants a loss spike and shows what comes of it: `spike_check_command`, for the group `runs`.

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

TIMED = 5  # steps after which it is known how long one takes
MOST_RISES = 6  # that are told


@click.command("spike-check")
@model_option("model", more="The same as model=.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="A YAML file.")
@click.option("--steps", type=click.IntRange(18), default=240, show_default=True)
@click.option(
    "--at", type=click.IntRange(2), help="The first bad step; two thirds of the steps by default."
)
@click.option(
    "--windows",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Steps whose samples are bad.",
)
@plot_option("Draw the runs: loss, dev loss, and what happened; a PNG.")
@click.option(
    "--runs", "kept", type=click.Path(file_okay=False), help="Keep the runs in this new folder."
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
    kept: str | None,
    json_path: str | None,
    words: tuple[str, ...],
) -> None:
    """Plant bad samples, train with the watchdog, without those samples, and through them, and draw all three.

    Where the watchdog finds nothing, that one training is all there is.

    Exit status: 0 found and recovered to the bit, 1 not, 2 wrong usage.
    """
    given = [*words, *([f"model={model}"] if model else [])]
    every, at = max(1, steps // 8), at or steps * 2 // 3
    given = [f"checkpoint.rollback_every={every}", f"evaluate.every={every}", *given]
    console = Console(stderr=json_path == "-", highlight=False, soft_wrap=False)
    with contextlib.ExitStack() as stack:
        folder = (
            Path(kept)
            if kept
            else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spike-check-")))
        )
        if folder.exists() and any(folder.iterdir()):
            raise UnusableInput(f"{folder} is not empty: give a new folder")
        try:
            settings = load_config(config, ["spike.action=rollback", *given, f"steps={steps}"])
            check_settings(settings, at=at, num_windows=windows)
            load_workload(
                settings.model
            )  # what is wrong with it is told before what is not installed
            if plot_path:
                _require_matplotlib()
            facts = provenance(choose_device(settings.device))
            watch = stack.enter_context(_progress(steps))
            found = spike_check(
                folder, given, steps=steps, at=at, num_windows=windows, config=config, watch=[watch]
            )
            if plot_path:
                _draw(found, folder, plot_path)
        except (ValueError, RunError) as error:
            raise UnusableInput(
                "\n".join(textwrap.wrap(str(error), 80, break_long_words=False))
            ) from error
    for line in describe(found):
        console.print("\n".join(textwrap.wrap(line, 80)), markup=False)
    if plot_path:
        console.print(f"drawn as {plot_path}", markup=False)
    if json_path:
        write_json(json_path, facts | found.to_json())
    sys.exit(0 if found.held else 1)


def describe(found: SpikeCheck) -> Iterator[str]:
    """What came of it, in lines."""
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
        yield f"{words:>15}: loss {found.losses[name]:.4f}" + (
            "" if dev is None else f", dev loss {dev:.4f}"
        )
    same = "equal to the bit to the run that never saw them"
    yield (
        same if found.difference is None else f"NOT the run that never saw them: {found.difference}"
    )


def _describe_missed(missed: Missed, num_bad: int) -> Iterator[str]:
    limit, shown = missed.limit, missed.rises[:num_bad]
    rises = ", ".join(f"{rise:+.3g}" for rise in shown[:MOST_RISES]) + (
        ", ..." if num_bad > MOST_RISES else ""
    )
    steps = "bad step" if num_bad == 1 else f"{num_bad} bad steps"
    yield f"NOT found: the loss did not rise enough{' for long enough' if missed.in_a_row else ''}"
    yield f"it rose by {rises} in the {steps}, over a level of {limit.level:.4g}"
    yield (
        f"needed: more than {limit.rise:+.3g} in {missed.patience} steps in a row (spike.patience); there were "
        f"{missed.in_a_row}"
    )
    drift = f", and {limit.drift:.2g} by which it was rising before" if limit.drift else ""
    yield (
        f"that is the larger of {missed.threshold:g} times the noise (spike.threshold), {limit.by_noise:.2g}, and "
        f"{missed.least_rise:g} of the level or of the fall to it (spike.least_rise), {limit.by_level:.2g}{drift}"
    )
    yield f"to find it: {missed.advice}"


def _require_matplotlib() -> None:
    try:
        require_matplotlib()
    except RuntimeError as error:
        raise UnusableInput(str(error)) from error


def _draw(found: SpikeCheck, folder: Path, path: str) -> None:
    """The three runs, or the one there is."""
    first, last = found.planted
    title = f"bad samples in steps {first} to {last}, " + (
        "found" if found.rollbacks else "not found"
    )
    names = (THROUGH, WITHOUT, RECOVERED) if found.rollbacks else (RECOVERED,)
    histories = [read_history(folder / f"{name}-001", name=name) for name in names]
    plot_runs(
        histories,
        path,
        title=f"{title}: {'three runs' if len(names) > 1 else 'one run, through them'}",
    )


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Watch]:
    """How long it will take, as soon as that is known; then a bar on a terminal, and elsewhere a line for each run."""
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
        task, before = progress.add_task("", total=3 * steps), 0

        @contextlib.contextmanager
        def watch(run: Run) -> Iterator[Hook]:
            nonlocal before
            began, after_first = time.perf_counter(), 0.0

            def advance(report: StepReport) -> None:
                nonlocal after_first
                if report.step == 1:
                    after_first = (
                        time.perf_counter()
                    )  # the first step takes much longer than the others
                elif report.step == TIMED and not before:
                    each = (time.perf_counter() - after_first) / (TIMED - 1)
                    console.print(
                        f"three trainings of {steps} steps, about {clock(3 * steps * each)} in all"
                    )
                progress.update(task, completed=before + report.step, description=run.folder.name)

            yield advance
            before += steps
            if not console.is_terminal:
                console.print(
                    f"{run.folder.name}: {steps} steps in {clock(time.perf_counter() - began)}"
                )

        yield watch
