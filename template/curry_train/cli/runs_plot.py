"""Command `runs plot`: draw runs from their journals.

    curry-train runs plot run-001 run-002 --out runs.png

Proof: `python -m pytest tests/cli/test_runs_plot.py`.
"""

from typing import Any

import click

from ..core.wording import write_json
from ..runs.history import History, read_history
from ..runs.journal import find_journal, finite
from .figures import plot_runs
from .options import json_option, output_option
from .screen import ScreenCommand


@click.command("plot", cls=ScreenCommand, example="run-001 --out run.png")
@click.argument("names", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--runs",
    "root",
    default="runs",
    show_default=True,
    metavar="DIR",
    help="Folder of the runs given by name.",
)
@output_option("Write this PNG.", "--out", default="runs.png", show_default=True)
@click.option(
    "--scale",
    type=click.Choice(["auto", "log", "linear"]),
    default="auto",
    show_default=True,
    help="Axis of the loss.",
)
@click.option(
    "--smooth",
    type=click.IntRange(2),
    metavar="STEPS",
    help="Draw the loss as a mean over this many steps.",
)
@json_option()
def runs_plot_command(
    names: tuple[str, ...],
    root: str,
    out: str,
    scale: str,
    smooth: int | None,
    json_path: str | None,
) -> None:
    """Draw runs from their journals.

    Draws loss, dev metric, learning rate, memory and events.

    A run is a name in --runs, a folder or a journal. Exit status: 0 drawn, 2 a run can't be read.
    """
    histories = [
        read_history(find_journal(name, root=root), name=name) for name in dict.fromkeys(names)
    ]
    coloured = plot_runs(histories, out, scale=scale, smooth=smooth)
    if json_path:
        rows = [_summary(history) | {"coloured": history.name in coloured} for history in histories]
        write_json(json_path, finite({"out": out, "runs": rows}))
    many = "1 run" if len(histories) == 1 else f"{len(histories)} runs"
    click.echo(f"{many} drawn as {out}")


def _summary(history: History) -> dict[str, Any]:
    steps = history.steps
    return {
        "name": history.name,
        "run": history.run,
        "attempts": len(history.attempts),
        "num_steps": len(steps),
        "first_step": steps.step[0] if steps else None,
        "last_step": steps.step[-1] if steps else None,
        "last_loss": steps.values["loss"][-1] if steps else None,
        "superseded_steps": sum(len(part) for part in history.course.superseded),
        "events": {kind: len(events) for kind, events in sorted(history.events.items())},
        "metrics": {
            name: {
                "last": course.steps.values["value"][-1],
                "least": min(course.steps.values["value"]),
            }
            for name, course in history.metrics.items()
            if len(course.steps)
        },
        "damaged_lines": history.num_damaged,
    }
