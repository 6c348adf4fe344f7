"""Command `runs estimate`: disk space that a checkpoint policy needs.

    python -m curry_train runs estimate --parameters 7e9 retention.rollback_keep=2

Proof: `python -m pytest tests/test_runs_command.py -k estimate`.
"""

import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import click
import yaml
from rich.console import Console

from .core.load import load_workload
from .core.provenance import write_json
from .core.workload import Case
from .options import UnusableInput, json_option, model_option
from .runs.disk_estimate import STATE, estimate_disk
from .runs.free_space import free_bytes
from .runs.policy_config import PolicyConfig
from .runs.saved_run import SavedRun
from .runs_table import estimate_table


@click.command("estimate")
@click.option(
    "--parameters", metavar="NUMBER", help="Number of parameters, such as 7e9; or give --model."
)
@model_option("model", more="Its parameters are counted.")
@click.option(
    "--dtype",
    type=click.Choice(list(STATE)),
    default="float32",
    show_default=True,
    help="Type of the weights.",
)
@click.option(
    "--folder", metavar="FOLDER", help="Check that the volume of this folder has the space."
)
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@json_option()
def estimate_command(
    parameters: str | None,
    model: str | None,
    dtype: str,
    folder: str | None,
    words: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Estimate the disk space that a checkpoint policy needs.

    KEY=VALUE sets a key of the block checkpoint:, such as retention.rollback_keep=2. Exit status: 0
    estimated, 1 the volume of --folder is too small, 2 wrong usage.
    """
    try:
        if (parameters is None) == (model is None):
            raise ValueError("give --parameters or --model")
        number = _count(model) if model else int(float(parameters or 0))
        estimate = estimate_disk(number, PolicyConfig.from_config(_block(words)), dtype=dtype)
    except (ValueError, OverflowError) as error:
        raise UnusableInput(str(error)) from error
    console = Console(stderr=json_path == "-", highlight=False)
    console.print(estimate_table(estimate))
    for line in estimate.advice:
        console.print("\n".join(textwrap.wrap(line, 80)), markup=False)

    facts = estimate.to_json()
    enough = True
    if folder is not None:
        free = free_bytes(SavedRun(folder).files, "recovery")
        enough = free is None or free >= estimate.most
        facts["free"] = free
        console.print(
            f"{folder} has {(free or 0) / 1e9:.1f} GB free: {'enough' if enough else 'not enough'}"
        )
    if json_path:
        write_json(json_path, facts)
    sys.exit(0 if enough else 1)


def _block(words: Sequence[str]) -> dict[str, Any]:
    block: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.removeprefix("checkpoint.").partition("=")
        if not equals:
            raise ValueError(f"{word!r} sets nothing: write key=value, such as rollback_every=100")
        *outer, last = key.split(".")
        inner = block
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = yaml.safe_load(text)
    return block


def _count(model: str) -> int:
    return sum(parameter.numel() for parameter in Case(load_workload(model)).build().parameters())
