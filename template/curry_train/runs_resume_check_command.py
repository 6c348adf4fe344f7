"""Command `runs resume-check`: check that a killed and resumed run is bit-equal.

    python -m curry_train runs resume-check --model mlp --steps 8

It trains, so it needs the training project.
Proof: `python -m pytest tests/test_runs_command.py -k resume`.
"""

import contextlib
import tempfile
import textwrap
from pathlib import Path

import click

from .config import load_config
from .core.provenance import provenance
from .options import UnusableInput, choose_device, model_option
from .resume_check import resume_check
from .runs_command import JSON, console_for, end, progress_of


@click.command("resume-check")
@model_option("model", more="Same as model=.")
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
@JSON
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
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="resume-check-")))
        else:
            folder = Path(out)
            if folder.exists() and any(folder.iterdir()):
                raise UnusableInput(f"{out} is not empty: give a new folder")
        try:
            show_message = stack.enter_context(progress_of())
            show_message("straight, killed, resumed")
            every = save_every or max(1, kill_step // 2)
            facts = provenance(choose_device(load_config(config, given).device))
            result = resume_check(
                folder, given, steps=steps, kill_at=kill_step, save_every=every, config=config
            )
        except ValueError as error:
            raise UnusableInput(
                "\n".join(textwrap.wrap(str(error), 80, break_long_words=False))
            ) from error

    repeated = result.killed_at - result.resumed_from
    console = console_for(json_path)
    console.print(
        f"{steps} steps, killed in step {kill_step}, resumed from step {result.resumed_from}: "
        f"{repeated} done again"
    )
    verdict = f"equal: {result.figures} figures and {result.tensors} tensors"
    if not result.equal:
        verdict = "\n".join(textwrap.wrap(f"NOT equal: {result.difference}", 80))
    console.print(verdict, markup=False)
    end(json_path, facts | result.to_json(), well=result.equal)
