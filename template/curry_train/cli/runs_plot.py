"""Command `runs plot`: draw runs from their journals.

    curry-train runs plot run-001 run-002 --out runs.png

Proof: `python -m pytest tests/cli/test_runs_plot.py`.
"""

import click

from ..runs.history import read_history
from .figures import plot_runs
from .options import plot_option
from .parameters import argument
from .runs_diff import summary
from .screen import Ended, screen_command


@screen_command("plot", example="run-001 --out run.png")
def plot_command(
    names: tuple[str, ...] = argument("RUN...", required=True),
    out: str = plot_option("Write this PNG.", "--out", default="runs.png", show_default=True),
) -> Ended:
    """Draw runs from their journals.

    Draws loss, dev metric, learning rate, memory and events.

    A run is a name in runs/, a folder or a journal. Exit status: 0 drawn, 2 a run can't be read.
    """
    histories = [read_history(name, root="runs") for name in dict.fromkeys(names)]
    plot_runs(histories, out)
    click.echo(f"wrote {out}")
    return {"out": out, "runs": [*map(summary, histories)]}, 0
