"""The runs commands: list, show, verify and export.

Proof: `python -m pytest tests/cli/test_runs_command.py tests/cli/test_export.py`.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from click import echo
from safetensors.torch import save_file

from ..core.wording import format_bytes
from ..runs.format import MODEL_PREFIX, SAFETENSORS_FILE_NAME
from ..runs.history import History, read_history
from ..runs.journal import JOURNAL_FILE_NAME, JournalError, printable
from ..runs.layout import CHECKPOINT_KINDS, find_run
from ..runs.ranks import DamagedCheckpoint
from ..runs.resume import choose
from ..runs.store import SavedRun
from .parameters import INPUT_FILE, argument, option
from .screen import Ended, LazyGroup, echo_lines, messages_on_screen, screen_command, table

# Tables of runs and checkpoints, readable at 80 columns, and their rows as JSON.

Rows = list[dict[str, Any]]


def run_row(run: SavedRun, name: str) -> dict[str, Any]:
    """Summarize the checkpoints of a run in one row."""
    checkpoints, damaged = run.scan()
    counts = dict.fromkeys(CHECKPOINT_KINDS, 0)
    for saved in checkpoints:
        counts[saved.kind] += 1
    newest = run.latest()
    return {
        "run": name,
        "latest": newest.step if newest else None,
        **counts,
        "bytes": sum(saved.num_bytes for saved in checkpoints),
        "damaged": len(damaged),
    }


def checkpoint_rows(run: SavedRun) -> Rows:
    """Return a row for every checkpoint of a run, the damaged ones last."""
    committed, damaged = run.scan()
    rows: Rows = [
        {
            "kind": saved.kind,
            "folder": saved.folder,
            "step": saved.step,
            "bytes": saved.num_bytes,
            "date": saved.date,
            "metric": "{} {:.6g}".format(*saved.metric) if saved.metric else None,
            "damaged": None,
        }
        for saved in committed
    ]
    unknown = {"step": None, "bytes": 0, "date": None, "metric": None}
    return rows + [
        {"kind": folder.partition("/")[0], "folder": folder, **unknown, "damaged": why}
        for folder, why in damaged.items()
    ]


def rows_table(rows: Rows, *names: str) -> str:
    """Return these columns of rows as a table."""
    cells = [[_format_cell(name, row[name]) for name in names] for row in rows]
    return table([names, *cells], texts=("date", "metric", "damaged"))


def _format_cell(name: str, value: Any) -> str:
    if name == "bytes":
        return format_bytes(value)
    if name == "damaged":
        # These commands read names and sizes; `runs verify` reads every byte.
        return str(value or "not hashed")
    text = "" if value is None else str(value)
    return text[:19] if name == "date" else text


# Summary of a run's attempts: how each began and ended, and its unusual events.

STORY_EVENT_KINDS = ("spike", "skip", "warning")
MOST_EVENTS = 12  # events to print per attempt


def story(history: History) -> Rows:
    """Return a row for each attempt, with its spikes, skips and warnings."""
    rows = []
    for attempt in history.attempts:
        events: Rows = [
            {"step": one.step, "kind": kind, "reason": str(one.facts.get("reason", ""))}
            for kind in STORY_EVENT_KINDS
            for one in history.events.get(kind, [])
            if one.attempt == attempt.number
        ]
        rows.append(
            {
                "attempt": attempt.number,
                "began": attempt.kind,
                "from_step": attempt.step,
                "to_step": attempt.last_step,
                "ended": attempt.ended,
                "events": sorted(events, key=lambda one: one["step"]),
            }
        )
    return rows


def story_lines(rows: Rows) -> Iterator[str]:
    """Describe the attempts and their first events."""
    for row in rows:
        ended = f"ended by {printable(row['ended'])}" if row["ended"] else "no record of its end"
        yield (
            f"attempt {row['attempt']}: {row['began']} at step {row['from_step']}, "
            f"up to {row['to_step']}, {ended}"
        )
        for event in row["events"][:MOST_EVENTS]:
            yield f"  step {event['step']}, {event['kind']}: {printable(event['reason'])}"
        if more := len(row["events"][MOST_EVENTS:]):
            yield f"  and {more} more events, which --json has"


# Commands `runs list`, `runs show` and `runs verify`: inspect saved state.

COMMANDS = {
    "runs": {
        "list": "List runs and their saved states.",
        "show": "Show checkpoints, damage, attempts and events of a run.",
        "verify": "Verify every file of a run, or of one CHECKPOINT.",
        "export": "Write the parameters of a checkpoint as Hugging Face safetensors.",
    },
    "runs_inspect": {"inspect": "Inspect anybody's checkpoint without unpickling it."},
    "runs_diff": {"diff": "Compare two runs by their journals."},
    "runs_locate": {
        "record": "Record digests of what a script or Trainer computes.",
        "locate": "Name the first place at which two recorded runs differ.",
    },
    "runs_replay": {"replay": "Repeat a bad step that a run has kept in a box."},
    "runs_plot": {"plot": "Draw runs from their journals."},
    "resume_check": {"resume-check": "Check that a resumed run is bit-equal."},
    "spike_check": {"spike-check": "Check the recovery from a loss spike."},
    "runs_estimate": {"estimate": "Estimate the disk space that a checkpoint policy needs."},
}


@click.group("runs", cls=LazyGroup, lazy=COMMANDS, example="list")
def runs_command() -> None:
    """Inspect, compare and check saved runs.

    Exit status: 0 all well, 1 damaged or not equal, 2 wrong usage.
    """


@screen_command("list", example="runs")
def list_command(folder: str = argument(default="runs")) -> Ended:
    """List runs and their saved states.

    The files of the saved states in FOLDER are not all read; `verify` reads them.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"there is no folder {folder}: give the one that holds the runs")
    rows = [run_row(SavedRun(path), path.name) for path in sorted(root.iterdir()) if is_run(path)]
    names = ("run", "latest", *CHECKPOINT_KINDS, "bytes", "damaged")
    echo(rows_table(rows, *names) if rows else f"{folder} holds no run")
    return {"folder": folder, "runs": rows}, any(row["damaged"] for row in rows)


@screen_command("show", example="run-001")
def show_command(run: str = argument()) -> Ended:
    """Show checkpoints, damage, attempts and events of a run."""
    saved = _open(run)
    rows = checkpoint_rows(saved)
    newest = saved.latest()
    echo(rows_table(rows, "kind", "step", "bytes", "date", "metric", "damaged"))
    echo(f"latest: {newest.folder}" if newest else "nothing to resume from")

    attempts: Rows = []
    journal = saved.root / JOURNAL_FILE_NAME
    if journal.exists():
        try:
            attempts = story(read_history(journal))
        except JournalError as error:
            echo_lines(printable(str(error)), indent="")
    echo_lines(*story_lines(attempts), indent="    ")
    latest = newest.folder if newest else None
    facts = {"run": run, "latest": latest, "checkpoints": rows, "attempts": attempts}
    return facts, any(row["damaged"] for row in rows)


@screen_command("verify", example="run-001 latest")
def verify_command(
    run: str = argument(), checkpoint: str | None = argument(required=False)
) -> Ended:
    """Verify every file of a run, or of one CHECKPOINT.

    CHECKPOINT is latest, best, a step, or a folder such as rollback/step-00000500.dcp.
    """
    saved = _open(run)
    if checkpoint:
        saved, folder = _choose(saved, checkpoint)
        folders = [folder]
    else:
        folders = [*saved.steps(*CHECKPOINT_KINDS)]
    damaged: dict[str, str] = {}
    with messages_on_screen() as show_message:
        for folder in folders:
            show_message(folder)
            try:
                saved.verify(folder)
            except DamagedCheckpoint as error:
                damaged[folder] = str(error)
    for folder, why in damaged.items():
        echo_lines(f"damaged: {folder}", f"  {why}")
    echo(f"{len(folders) - len(damaged)} of {len(folders)} checkpoints intact")
    return {"run": run, "damaged": damaged, "checkpoints": len(folders)}, bool(damaged)


def _open(run: str) -> SavedRun:
    """Open a run given by folder, or by name in `runs`."""
    return SavedRun(find_run(run, root="runs", is_run=is_run))


def _choose(run: SavedRun, what: str) -> tuple[SavedRun, str]:
    """Return the run of the checkpoint that is asked for, and its folder, damaged if all are."""
    root, folders = choose(run, what)
    chosen = SavedRun(root)
    damaged = chosen.scan()[1]
    return chosen, min(folders, key=lambda folder: folder in damaged)


def is_run(path: Path) -> bool:
    """Return whether a folder is a run; one that has saved nothing yet may have a journal."""
    return (
        any((path / kind).is_dir() for kind in CHECKPOINT_KINDS)
        or (path / JOURNAL_FILE_NAME).is_file()
    )


# Command `runs export`: the parameters as Hugging Face safetensors.


def saved_tensors(run: SavedRun, what: str, prefix: str = "") -> dict[str, torch.Tensor]:
    """Verify a checkpoint, and read its tensors with such names, without a model."""
    run, folder = _choose(run, what)
    contents = run.open_content(run.verify(folder))
    tensors = {
        name: torch.empty(one.shape, dtype=one.dtype)
        for name, one in contents.tensors.items()
        if name.startswith(prefix)
    }
    contents.fill(tensors)
    return tensors


def export_parameters(
    run: SavedRun, checkpoint: str, folder: Path, *, config: str | None = None
) -> list[str]:
    """Verify a checkpoint, and write its parameters into a new folder; return their names.

    The folder appears when everything is in it. `config` is a config.json to copy there.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists: give a new folder")
    parameters = {
        name.removeprefix(MODEL_PREFIX): tensor
        for name, tensor in saved_tensors(run, checkpoint, MODEL_PREFIX).items()
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        staged = Path(name, folder.name)
        staged.mkdir()
        save_file(parameters, staged / SAFETENSORS_FILE_NAME, metadata={"format": "pt"})
        if config is not None:
            shutil.copyfile(config, staged / "config.json")
        staged.rename(folder)
    return sorted(parameters)


@screen_command("export", example="run-001 latest --out model")
def export_command(
    run: str = argument(),
    checkpoint: str = argument(default="latest"),
    out: str = option("The new folder of the files.", "FOLDER", required=True),
    model_config: str | None = option(
        "A config.json of Hugging Face to put next to them.",
        "FILE",
        type=INPUT_FILE,
    ),
) -> Ended:
    """Write the parameters of a checkpoint as Hugging Face safetensors.

    CHECKPOINT is latest, best, a step, or a folder such as best-k/dev_loss-0.25-step-00000450.dcp.
    Its files are verified. Parameters that share values are written once, under the first name.
    """
    names = export_parameters(_open(run), checkpoint, Path(out), config=model_config)
    echo(f"{len(names)} tensors in {Path(out, SAFETENSORS_FILE_NAME)}")
    return {"out": out, "names": names}, 0
