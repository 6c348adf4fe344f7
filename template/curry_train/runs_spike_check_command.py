"""The command that plants a loss spike and shows what comes of it: `spike_check_command`, for the group `runs`.

    python -m curry_train runs spike-check --model transformer --plot spike.png

Proof: `python -m pytest tests/test_spike_check.py -k command`.
"""

import contextlib
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import load_config
from .core.provenance import provenance, write_json
from .loop import StepReport
from .options import UnusableInput, choose_device, json_option, model_option, plot_option
from .plots import require_matplotlib
from .runs.errors import RunError
from .runs.journal_history import read_history
from .runs_plot import plot_runs
from .spike_check import RECOVERED, THROUGH, WITHOUT, SpikeCheck, spike_check
from .training import Hook, Run, Watch


@click.command("spike-check")
@model_option("model", more="The same as model=.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="A YAML file.")
@click.option("--steps", type=click.IntRange(18), default=240, show_default=True)
@click.option("--at", type=click.IntRange(2), help="The first bad step; two thirds of the steps by default.")
@click.option("--windows", type=click.IntRange(1), default=5, show_default=True, help="Steps whose samples are bad.")
@plot_option("Draw the three runs: loss, dev loss, and what happened; a PNG.")
@click.option("--runs", "kept", type=click.Path(file_okay=False), help="Keep the three runs in this new folder.")
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

    Exit status: 0 found and recovered to the bit, 1 not, 2 wrong usage.
    """
    given = [*words, *([f"model={model}"] if model else [])]
    console = Console(stderr=json_path == "-", highlight=False, soft_wrap=False)
    with contextlib.ExitStack() as stack:
        folder = Path(kept) if kept else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spike-check-")))
        if folder.exists() and any(folder.iterdir()):
            raise UnusableInput(f"{folder} is not empty: give a new folder")
        watch = stack.enter_context(_progress(3 * steps))
        try:
            if plot_path:
                require_matplotlib()
            every = max(1, steps // 8)
            given = [f"checkpoint.rollback_every={every}", f"evaluate.every={every}", *given]
            facts = provenance(choose_device(load_config(config, given).device))
            found = spike_check(
                folder, given, steps=steps, at=at or steps * 2 // 3, num_windows=windows, config=config, watch=[watch]
            )
            if plot_path:
                names = (THROUGH, WITHOUT, RECOVERED)
                plot_runs([read_history(folder / f"{name}-001", name=name) for name in names], plot_path)
        except (ValueError, RunError) as error:
            raise UnusableInput("\n".join(textwrap.wrap(str(error), 80, break_long_words=False))) from error
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
    if not found.rollbacks:
        yield "NOT found: the loss did not rise enough; lower spike.threshold or spike.least_rise"
        return
    skipped = ", ".join(f"{start} to {stop - 1}" for start, stop in found.skipped)
    yield f"found {found.found_after} steps after the first, with patience {found.patience}"
    times = "once" if found.rollbacks == 1 else f"{found.rollbacks} times"
    yield f"went back to step {found.back_to}, {times}, without the samples at positions {skipped}"
    for name, words in ((RECOVERED, "recovered"), (WITHOUT, "never saw them"), (THROUGH, "trained through")):
        dev = found.dev_losses[name]
        yield f"{words:>15}: loss {found.losses[name]:.4f}" + ("" if dev is None else f", dev loss {dev:.4f}")
    same = "equal to the bit to the run that never saw them"
    yield same if found.difference is None else f"NOT the run that never saw them: {found.difference}"


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Watch]:
    console = Console(stderr=True)
    columns = (BarColumn(12), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task, before = progress.add_task("", total=total), 0

        @contextlib.contextmanager
        def watch(run: Run) -> Iterator[Hook]:
            nonlocal before

            def advance(report: StepReport) -> None:
                progress.update(task, completed=before + report.step, description=run.folder.name)

            yield advance
            before += run.parts.config.steps

        yield watch
