"""Command-line options and exit statuses shared by all commands.

Proof: `python -m pytest tests/cli/test_cli.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from ..core.timing import NoSuchDevice, find_device
from ..workloads.models import BUILTIN_WORKLOADS
from ..workloads.workload import Workload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_BATCH_SIZE = 4
BATCH_SIZE_HELP = (
    f"Samples per step. [default: {DEFAULT_BATCH_SIZE} for gates; otherwise the size of the factory's batch, "
    f"or {DEFAULT_BATCH_SIZE}]"
)


class DeviceMissing(click.ClickException):
    """The requested device is not available."""

    exit_code = 3


class UnusableInput(click.ClickException):
    """The user's input can't be used."""

    exit_code = 2


def choose_device(name: str) -> torch.device:
    """Return the device of `--device`; a missing one ends the command with exit status 3."""
    try:
        return find_device(name)
    except NoSuchDevice as error:
        raise DeviceMissing(str(error)) from error


def _writable(path: str | None) -> str | None:
    """Refuse a path whose folder does not exist, before a long run rather than at its end."""
    if path not in (None, "-") and not Path(path).parent.is_dir():
        raise click.BadParameter(f"the folder of {path!r} does not exist: create it first")
    return path


def model_option(
    name: str, *, more: str = "", **settings: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--model` with the same values in every command; `more` is appended to its help."""
    text = (
        f"A built-in workload ({', '.join(BUILTIN_WORKLOADS)}) or a factory, as pkg.module:name or "
        f"file.py:name, that returns a module, a (module, batch) pair or a Workload. {more}"
    )
    return click.option("--model", name, metavar="NAME|FACTORY", help=text.strip(), **settings)


def output_option(
    told: str, *names: str, standard_output: bool = False, **settings: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add an option for an output file, which is checked before the work begins."""
    path = click.Path(dir_okay=False, writable=True, allow_dash=standard_output)
    return click.option(
        *names,
        type=path,
        callback=lambda context, option, value: _writable(value),
        help=told,
        **settings,
    )


def json_option(
    told: str = "Write the figures; - is standard output.", **settings: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--json` with the help text `told`."""
    return output_option(told, "--json", "json_path", standard_output=True, **settings)


def plot_option(told: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--plot` with the help text `told`."""
    return output_option(told, "--plot", "plot_path")


def samples_of(workload: Workload, asked: int | None) -> int:
    """Return the samples per step: those asked for, of the factory's batch, or `DEFAULT_BATCH_SIZE`."""
    return asked or workload.own_batch or DEFAULT_BATCH_SIZE


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that mean the same in every command that runs a model."""
    for option in (
        json_option(),
        click.option(
            "--seed",
            default=0,
            type=click.IntRange(0),
            show_default=True,
            help="Seed of weights, batch and dropout.",
        ),
        click.option("--batch-size", type=click.IntRange(1), help=BATCH_SIZE_HELP),
        click.option(
            "--dtype",
            default="float32",
            type=click.Choice(list(DTYPES)),
            show_default=True,
            help="Type of weights and batch.",
        ),
        click.option(
            "--blocks", metavar="PATTERN", help="Blocks to work on, a glob over module names."
        ),
        click.option(
            "--device",
            default="auto",
            type=click.Choice(["auto", "cuda", "cpu"]),
            show_default=True,
            help="auto is CUDA where available, else the CPU.",
        ),
    ):
        command = option(command)
    return command
