"""Command `curry-train preflight`: check the user's own training loop before it costs GPU hours.

Proof: `python -m pytest tests/cli/test_preflight.py`.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict

import click
import torch

from ..core.wording import provenance, write_json
from ..gates.loop import DEFAULT_STEPS
from ..gates.loop_run import LoopFailed, preflight_program
from ..gates.verdict import Verdict
from .options import json_option, program_of, program_options
from .screen import ScreenCommand, UnusableInput, fill_screen


@click.command("preflight", cls=ScreenCommand, example="--script train.py -- --rate 0.1")
@program_options(DEFAULT_STEPS, least_steps=2)
@click.option(
    "--shrink",
    "num_layers",
    type=click.IntRange(1),
    help="Build models that have a configuration with so many layers, where they are too large.",
)
@json_option()
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
    kind, words = program_of(script, trainer, arguments)
    try:
        verdicts = preflight_program(
            kind, words, num_steps=num_steps, num_ranks=num_ranks, num_layers=num_layers or 0
        )
    except LoopFailed as error:
        raise UnusableInput(str(error)) from error
    _print(shlex.join(words), num_steps, verdicts)
    if json_path:
        results = [asdict(verdict) for verdict in verdicts]
        facts = provenance(torch.device("cpu"))
        program = {"program": words, "steps": num_steps}
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
