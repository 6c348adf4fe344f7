"""The command that asks whether a resume holds: `resume_check_command`, for the group `runs`.

    python -m curry_train runs resume-check --model mlp --steps 8

It trains, so it needs the training project beside it. Proof: `python -m pytest tests/test_runs_command.py -k resume`.
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
@model_option("model", more="The same as model=.")
@click.option("--config", type=click.Path(dir_okay=False, exists=True), help="A YAML file.")
@click.option("--steps", default=12, type=click.IntRange(3), show_default=True)
@click.option(
    "--kill-at",
    type=click.IntRange(2),
    help="The step in which the second run dies; two thirds of the way.",
)
@click.option(
    "--save-every",
    type=click.IntRange(1),
    help="Steps from save to save; so that one is lost, if left out.",
)
@click.option("--out", type=click.Path(file_okay=False), help="Keep the runs there.")
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
    """Train straight, train again and kill -9, resume, and compare every figure and the final state to the bit."""
    died = kill_at or max(2, steps * 2 // 3)
    given = [*words, *([f"model={model}"] if model else [])]
    with contextlib.ExitStack() as stack:
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="resume-check-")))
        else:
            folder = Path(out)
            if folder.exists() and any(folder.iterdir()):
                raise UnusableInput(f"{out} is not empty: give a new folder")
        try:
            say = stack.enter_context(progress_of())
            say("straight, killed, resumed")
            every = save_every or max(1, died // 2)
            facts = provenance(choose_device(load_config(config, given).device))
            found = resume_check(
                folder, given, steps=steps, kill_at=died, save_every=every, config=config
            )
        except ValueError as error:
            raise UnusableInput(
                "\n".join(textwrap.wrap(str(error), 80, break_long_words=False))
            ) from error
    lost = found.killed_at - found.resumed_from
    console = console_for(json_path)
    console.print(
        f"{steps} steps, killed in step {died}, resumed from step {found.resumed_from}: {lost} done again"
    )
    told = f"equal: {found.figures} figures and {found.tensors} tensors"
    console.print(
        told if found.equal else "\n".join(textwrap.wrap(f"NOT equal: {found.difference}", 80)),
        markup=False,
    )
    end(json_path, facts | found.to_json(), well=found.equal)
