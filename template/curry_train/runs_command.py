"""The commands that look after saved state: what is there, is it whole. Others are in modules beside this one.

    python -m curry_train runs list
    python -m curry_train runs verify runs/run-001
    python -m my_package.runs_command list            # in a package that has no command line of ours

Proof: `python -m pytest tests/test_runs_command.py`.
"""

import contextlib
import importlib
import importlib.util
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from .core.provenance import write_json
from .options import UnusableInput, json_option
from .runs.errors import DamagedCheckpoint
from .runs.journal_history import read_history
from .runs.journal_lines import JournalError, printable
from .runs.journal_reading import NAME
from .runs.names import KINDS, what_runs_there_are
from .runs.saved_run import SavedRun
from .runs_story import story, story_lines
from .runs_table import checkpoint_rows, checkpoints_table, run_row, runs_table

JSON = json_option("Write the facts; - is standard output.")
# Each is in a module of its own, which a package has or has not: of which technique, or of the training project.
BESIDE = {
    "diff": "checkpoint-policy",
    "estimate": "checkpoint-policy",
    "plot": "checkpoint-policy",
    "resume-check": None,
    "spike-check": "loss-spike",
}
RUN = click.argument("run", metavar="RUN")


class Commands(click.Group):
    """Also those in modules beside this one, where the project has them: `diff` is `runs_diff_command.diff_command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(
            [
                *super().list_commands(ctx),
                *(name for name in BESIDE if importlib.util.find_spec(_beside(name))),
            ]
        )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in BESIDE:
            if cmd_name not in self.list_commands(ctx):
                raise UnusableInput(_missing(cmd_name))
            return cast(
                click.Command,
                getattr(importlib.import_module(_beside(cmd_name)), f"{_word(cmd_name)}_command"),
            )
        return super().get_command(ctx, cmd_name)


def _missing(name: str) -> str:
    if (technique := BESIDE[name]) is None:
        return (
            f"{name} trains, so it needs the training project, which {__package__} has not: python scripts/scaffold.py "
            f"new DIR --name NAME makes one, and runs it there on any --model package.module:factory"
        )
    return f"{__package__} has no {name}: python scripts/scaffold.py add {technique} --into its folder brings it"


def _beside(name: str) -> str:
    return f"{__package__}.runs_{_word(name)}_command"


def _word(name: str) -> str:
    return name.replace("-", "_")


@click.group("runs", cls=Commands)
def runs_command() -> None:
    """Saved state and journals of runs. Exit status: 0 well, 1 damaged or not equal, 2 wrong usage."""


@runs_command.command("list")
@click.argument("folder", default="runs")
@JSON
def list_command(folder: str, json_path: str | None) -> None:
    """The runs in FOLDER, with what is saved of each, as far as that shows without reading all of it."""
    root = Path(folder)
    if not root.is_dir():
        raise UnusableInput(f"there is no folder {folder}: give the one that holds the runs")
    rows = [run_row(SavedRun(path), path.name) for path in sorted(root.iterdir()) if _is_run(path)]
    console = console_for(json_path)
    console.print(runs_table(rows) if rows else f"{folder} holds no run")
    end(json_path, {"folder": folder, "runs": rows}, well=not any(row["damaged"] for row in rows))


@runs_command.command("show")
@RUN
@JSON
def show_command(run: str, json_path: str | None) -> None:
    """The checkpoints of a run, and which of them are damaged, and why; its attempts, and what happened in them."""
    saved = _open(run)
    rows, newest = checkpoint_rows(saved), saved.latest()
    told, unread = _told(saved)
    console = console_for(json_path)
    console.print(checkpoints_table(rows))
    console.print(f"latest: {newest.folder}" if newest else "nothing to resume from")
    for line in [*story_lines(told), *([unread] if unread else [])]:
        console.print(line, markup=False)
    facts = {
        "run": run,
        "latest": newest.folder if newest else None,
        "checkpoints": rows,
        "attempts": told,
    }
    end(json_path, facts, well=not any(row["damaged"] for row in rows))


@runs_command.command("verify")
@RUN
@click.argument("checkpoint", required=False)
@JSON
def verify_command(run: str, checkpoint: str | None, json_path: str | None) -> None:
    """Read every file of a run again, or of one CHECKPOINT such as rollback/step-00000500.dcp or latest."""
    saved = _open(run)
    try:
        folders = (
            [row["folder"] for row in checkpoint_rows(saved)]
            if checkpoint is None
            else [saved.folder_of(checkpoint)]
        )
    except (ValueError, DamagedCheckpoint) as error:
        raise UnusableInput(str(error)) from error
    found: dict[str, str | None] = {}
    with progress_of() as say:
        for folder in folders:
            say(folder)
            try:
                saved.verify(folder)
                found[folder] = None
            except DamagedCheckpoint as error:
                found[folder] = str(error)
    damaged = {folder: why for folder, why in found.items() if why}
    console = console_for(json_path)
    for folder, why in damaged.items():
        console.print(f"damaged: {folder}", style="red", markup=False)
        console.print(textwrap.indent("\n".join(textwrap.wrap(why, 76)), "  "), markup=False)
    console.print(f"{len(found) - len(damaged)} of {len(found)} checkpoints whole")
    end(json_path, {"run": run, "damaged": damaged, "checkpoints": len(found)}, well=not damaged)


def _told(saved: SavedRun) -> tuple[list[dict[str, Any]], str]:
    """What the journal tells, or why it can't be read; a run need not have one."""
    path = Path(saved.files.location(""), NAME)
    if not path.exists():
        return [], ""
    try:
        return story(read_history(path)), ""
    except JournalError as error:
        return [], "\n".join(textwrap.wrap(printable(str(error)), 80))


def _open(run: str) -> SavedRun:
    """A run's folder, or the name of one in `runs`."""
    if "://" not in run and not _is_run(Path(run)) and _is_run(Path("runs", run)):
        return SavedRun(Path("runs", run))
    if "://" not in run and not _is_run(Path(run)):
        beside = Path(run).parent if Path(run).parent.name else Path("runs")
        there = [path.name for path in beside.glob("*/") if _is_run(path)]
        known = what_runs_there_are(Path(run).name, there, root=beside)
        advice = f"give a folder that holds {', '.join(KINDS)} or {NAME}, such as runs/run-001"
        said = f"{run} is no run: {known if there else advice}"
        raise UnusableInput(
            "\n".join(textwrap.wrap(printable(said, longest=1000), 73, break_on_hyphens=False))
        )
    return SavedRun(run)


def _is_run(path: Path) -> bool:
    """A run that has saved nothing yet may have a journal."""
    return any((path / kind).is_dir() for kind in KINDS) or (path / NAME).is_file()


def console_for(json_path: str | None) -> Console:
    return Console(stderr=json_path == "-", highlight=False, soft_wrap=False)


@contextlib.contextmanager
def progress_of() -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda words: progress.update(task, description=words)


def end(json_path: str | None, facts: dict[str, Any], *, well: bool) -> None:
    if json_path:
        write_json(json_path, facts)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    runs_command(prog_name=f"python -m {__package__}.runs_command")
