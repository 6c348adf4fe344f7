"""Commands `runs list`, `runs show` and `runs verify`: inspect saved state.

    python -m curry_train runs list
    python -m curry_train runs verify runs/run-001
    python -m my_package.runs_command list      # in a package without the curry_train command line

The other `runs` commands are in modules beside this one.

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

JSON = json_option("Write the results; - is standard output.")
# Commands in modules of their own, with the technique that brings the module. None stands for the
# training project. A package need not have all of them.
BESIDE = {
    "diff": "checkpoint-policy",
    "estimate": "checkpoint-policy",
    "plot": "checkpoint-policy",
    "resume-check": None,
    "spike-check": "loss-spike",
}
RUN = click.argument("run", metavar="RUN")


class Commands(click.Group):
    """Command group that adds the commands of the modules beside this one, where installed.

    `diff` is `runs_diff_command.diff_command`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        installed = [name for name in BESIDE if importlib.util.find_spec(_beside(name))]
        return sorted([*super().list_commands(ctx), *installed])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BESIDE:
            return super().get_command(ctx, cmd_name)
        if cmd_name not in self.list_commands(ctx):
            raise UnusableInput(_missing(cmd_name))
        module = importlib.import_module(_beside(cmd_name))
        return cast(click.Command, getattr(module, f"{_word(cmd_name)}_command"))


def _missing(name: str) -> str:
    if (technique := BESIDE[name]) is None:
        return (
            f"{name} trains, so it needs the training project, which {__package__} does not have: "
            "make one with python scripts/scaffold.py new DIR --name NAME, and run it there on any "
            "--model package.module:factory"
        )
    return (
        f"{__package__} has no {name}: add it with python scripts/scaffold.py add {technique} "
        "--into its folder"
    )


def _beside(name: str) -> str:
    return f"{__package__}.runs_{_word(name)}_command"


def _word(name: str) -> str:
    return name.replace("-", "_")


@click.group("runs", cls=Commands)
def runs_command() -> None:
    """Inspect saved states and journals of runs.

    Exit status: 0 all well, 1 damaged or not equal, 2 wrong usage.
    """


@runs_command.command("list")
@click.argument("folder", default="runs")
@JSON
def list_command(folder: str, json_path: str | None) -> None:
    """List runs and their saved states.

    The files of the saved states in FOLDER are not all read; `verify` reads them.
    """
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
    """Show checkpoints, damage, attempts and events of a run."""
    saved = _open(run)
    rows = checkpoint_rows(saved)
    newest = saved.latest()
    attempts, journal_error = _told(saved)

    console = console_for(json_path)
    console.print(checkpoints_table(rows))
    console.print(f"latest: {newest.folder}" if newest else "nothing to resume from")
    for line in story_lines(attempts):
        console.print(line, markup=False)
    if journal_error:
        console.print(journal_error, markup=False)

    facts = {
        "run": run,
        "latest": newest.folder if newest else None,
        "checkpoints": rows,
        "attempts": attempts,
    }
    end(json_path, facts, well=not any(row["damaged"] for row in rows))


@runs_command.command("verify")
@RUN
@click.argument("checkpoint", required=False)
@JSON
def verify_command(run: str, checkpoint: str | None, json_path: str | None) -> None:
    """Verify every file of a run, or of one CHECKPOINT.

    CHECKPOINT is latest, or a folder such as rollback/step-00000500.dcp.
    """
    saved = _open(run)
    try:
        if checkpoint is None:
            folders = [row["folder"] for row in checkpoint_rows(saved)]
        else:
            folders = [saved.folder_of(checkpoint)]
    except (ValueError, DamagedCheckpoint) as error:
        raise UnusableInput(str(error)) from error

    errors: dict[str, str | None] = {}
    with progress_of() as show_message:
        for folder in folders:
            show_message(folder)
            try:
                saved.verify(folder)
                errors[folder] = None
            except DamagedCheckpoint as error:
                errors[folder] = str(error)

    damaged = {folder: why for folder, why in errors.items() if why}
    console = console_for(json_path)
    for folder, why in damaged.items():
        console.print(f"damaged: {folder}", style="red", markup=False)
        console.print(textwrap.indent("\n".join(textwrap.wrap(why, 76)), "  "), markup=False)
    console.print(f"{len(errors) - len(damaged)} of {len(errors)} checkpoints intact")
    end(json_path, {"run": run, "damaged": damaged, "checkpoints": len(errors)}, well=not damaged)


def _told(saved: SavedRun) -> tuple[list[dict[str, Any]], str]:
    """Return the attempts in a run's journal, and an error text if it can't be read.

    A run without a journal gives neither.
    """
    path = Path(saved.files.location(""), NAME)
    if not path.exists():
        return [], ""
    try:
        return story(read_history(path)), ""
    except JournalError as error:
        return [], "\n".join(textwrap.wrap(printable(str(error)), 80))


def _open(run: str) -> SavedRun:
    """Open a run given by folder, by URL, or by name in `runs`."""
    if "://" in run or _is_run(Path(run)):
        return SavedRun(run)
    if _is_run(Path("runs", run)):
        return SavedRun(Path("runs", run))

    root = Path(run).parent if Path(run).parent.name else Path("runs")
    names = [path.name for path in root.glob("*/") if _is_run(path)]
    if names:
        advice = what_runs_there_are(Path(run).name, names, root=root)
    else:
        advice = f"give a folder that holds {', '.join(KINDS)} or {NAME}, such as runs/run-001"
    message = printable(f"{run} is no run: {advice}", longest=1000)
    raise UnusableInput("\n".join(textwrap.wrap(message, 73, break_on_hyphens=False)))


def _is_run(path: Path) -> bool:
    """Whether a folder is a run; one that has saved nothing yet may have a journal."""
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
