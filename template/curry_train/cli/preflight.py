"""Command `curry-train preflight`: check the user's own training loop before it costs GPU hours.

Proof: `python -m pytest tests/cli/test_preflight.py`.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
import torch

from ..core.wording import provenance, write_json
from ..gates.loop import DEFAULT_STEPS
from ..gates.loop_run import LoopFailed, preflight_program
from ..gates.verdict import Verdict
from .options import json_option
from .screen import ScreenCommand, UnusableInput, fill_screen


@click.command("preflight", cls=ScreenCommand, example="--script train.py -- --rate 0.1")
@click.option(
    "--script", metavar="FILE", help="Run this script, with the ARGUMENTS after --, as it is."
)
@click.option(
    "--trainer",
    metavar="FACTORY",
    help="pkg.module:function that returns a Trainer of Hugging Face, or Lightning's with its "
    "module.",
)
@click.option(
    "--steps",
    "num_steps",
    type=click.IntRange(2),
    default=DEFAULT_STEPS,
    show_default=True,
    help="Steps of an optimizer, after which the loop ends.",
)
@click.option(
    "--ranks",
    "num_ranks",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Start so many processes, as torchrun does, and compare them.",
)
@click.option(
    "--shrink",
    "num_layers",
    type=click.IntRange(1),
    help="Build models that have a configuration with so many layers, where they are too large.",
)
@json_option()
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS]")
def preflight_command(
    script: str | None,
    trainer: str | None,
    num_steps: int,
    num_ranks: int,
    num_layers: int | None,
    json_path: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Check your own training loop, as it is.

    It runs a few steps in a process of its own, saves nothing, and puts changed files back. Exit
    status: 0 nothing is wrong, 1 a check failed, 2 the loop could not be checked.
    """
    if (script is None) == (trainer is None):
        raise click.UsageError("give either --script or --trainer")
    if script is not None and not Path(script).is_file():
        raise UnusableInput(f"there is no file {script}")
    kind, words = ("script", [script, *arguments]) if script else ("trainer", [str(trainer)])
    try:
        given = [str(word) for word in words]
        verdicts = preflight_program(
            kind, given, num_steps=num_steps, num_ranks=num_ranks, num_layers=num_layers or 0
        )
    except LoopFailed as error:
        raise UnusableInput(str(error)) from error
    _print(shlex.join(map(str, words)), num_steps, verdicts)
    if json_path:
        results = [asdict(verdict) for verdict in verdicts]
        facts = provenance(torch.device("cpu"))
        program = {"program": list(words), "steps": num_steps}
        write_json(json_path, facts | program | {"results": results})
    if any(verdict.passed is False for verdict in verdicts):
        sys.exit(1)
    if not any(verdict.passed for verdict in verdicts):
        raise UnusableInput(f"nothing was checked: {verdicts[0].hint}")


def _print(name: str, num_steps: int, verdicts: Sequence[Verdict]) -> None:
    """Print the verdict first, then what failed, and what held or does not apply in a line each."""
    failed = [verdict for verdict in verdicts if verdict.passed is False]
    held = [_short(verdict) for verdict in verdicts if verdict.passed]
    outcome = (
        f"{len(failed)} of {len(failed) + len(held)} checks FAILED"
        if failed
        else (f"{len(held)} checks held")
    )
    lines = [f"{name}, {num_steps} steps: {outcome}"]
    for verdict in failed:
        lines += ["", f"{_short(verdict)}: {verdict.measured}"]
        lines += [f"  required: {verdict.required}", f"  what to do: {verdict.hint}"]
    not_applicable = [
        f"{_short(verdict)} ({verdict.hint})" for verdict in verdicts if verdict.passed is None
    ]
    lines += ["", f"held: {', '.join(held) or 'none'}"]
    if not_applicable:
        lines.append(f"not applicable: {'; '.join(not_applicable)}")
    for line in lines:
        click.echo(fill_screen(line, indent="    "))


def _short(verdict: Verdict) -> str:
    return verdict.gate.removeprefix("loop/")
