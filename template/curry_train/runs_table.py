"""Tables of runs, checkpoints and disk, readable at 80 columns, and their rows as JSON.

Proof: `python -m pytest tests/test_runs_command.py`.
"""

from typing import Any

from rich.table import Table

from .core.sizes import format_bytes
from .runs.disk_estimate import DiskEstimate
from .runs.manifest import read_manifest
from .runs.names import KINDS, Saved
from .runs.saved_run import SavedRun

COUNTS = ((10**9, "B"), (10**6, "M"), (1, ""))
UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("bytes", 1))


def run_row(run: SavedRun, name: str) -> dict[str, Any]:
    """Summarize the checkpoints of a run in one row."""
    checkpoints = [saved for kind in KINDS for saved in run.committed(kind)]
    counts = dict.fromkeys(KINDS, 0)
    for saved in checkpoints:
        counts[saved.serves_as] += 1
    newest = run.latest()
    return {
        "run": name,
        "latest": newest.step if newest else None,
        **counts,
        "bytes": sum(saved.num_bytes for saved in checkpoints),
        "damaged": sum(len(run.damaged(kind)) for kind in KINDS),
    }


def checkpoint_rows(run: SavedRun) -> list[dict[str, Any]]:
    """Return a row for every checkpoint of a run, damaged ones included."""
    rows = []
    checkpoints = [saved for kind in KINDS for saved in run.committed(kind)]
    for kind in KINDS:
        rows += [_checkpoint(run, saved) for saved in checkpoints if saved.serves_as == kind]
        rows += [
            {
                "kind": kind,
                "step": None,
                "metric": None,
                "bytes": 0,
                "date": "",
                "folder": folder,
                "damaged": why,
            }
            for folder, why in run.damaged(kind).items()
        ]
    return rows


def _checkpoint(run: SavedRun, saved: Saved) -> dict[str, Any]:
    metric = None if saved.metric is None else f"{saved.metric.name} {saved.metric.value:.6g}"
    if saved.serves_as != saved.kind:
        metric = "parameters only"
    return {
        "kind": saved.serves_as,
        "step": saved.step,
        "metric": metric,
        "bytes": saved.num_bytes,
        "date": str(read_manifest(run.files, saved.folder).about.get("date", "")),
        "folder": saved.folder,
        "damaged": None,
    }


def runs_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("run", "latest", *KINDS, "size", "damaged")
    for row in rows:
        latest = "none" if row["latest"] is None else str(row["latest"])
        counts = [str(row[kind]) for kind in KINDS]
        table.add_row(
            row["run"], latest, *counts, format_bytes(row["bytes"]), str(row["damaged"] or "")
        )
    return table


def checkpoints_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("kind", "step", "size", "date", "metric")
    for row in rows:
        if row["damaged"]:
            table.add_row(row["kind"], "damaged", "", "", row["damaged"], style="red")
        else:
            date = row["date"].replace("T", " ").removesuffix("+00:00")
            table.add_row(
                row["kind"], str(row["step"]), format_bytes(row["bytes"]), date, row["metric"] or ""
            )
    return table


def estimate_table(found: DiskEstimate) -> Table:
    count, letter = next(
        (found.parameters / factor, letter)
        for factor, letter in COUNTS
        if found.parameters >= factor
    )
    unit, unit_bytes = next((unit, size) for unit, size in UNITS if found.most >= size)
    table = _table(f"{round(count, 2):,g}{letter} parameters, {found.dtype}", unit)
    lines = {
        "one checkpoint: weights, moments, other state": found.checkpoint,
        "one best-K checkpoint: weights only": found.best,
        **{f"retained as {kind}": num_bytes for kind, num_bytes in found.kept.items()},
        "retained in total": found.total,
        "extra while one is written": found.in_flight,
        "space needed on the volume": found.most,
    }
    for label, num_bytes in lines.items():
        size = num_bytes / unit_bytes
        table.add_row(label, f"{size:,.1f}" if num_bytes >= unit_bytes / 10 else f"{size:.2g}")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(columns):
        last = number == len(columns) - 1 and name in ("metric", "damaged")
        numeric = name in ("latest", "step", "size", *dict(UNITS), *KINDS)
        table.add_column(
            name,
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=not last and number > 0,
        )
    return table
