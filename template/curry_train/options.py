"""The options, and the exit statuses, that mean the same in every command.

Proof: `python -m pytest tests/test_cli.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from .core.builtin import BUILTIN
from .core.workload import Workload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FEW = 4
BATCH_SIZE = (
    f"Samples of a step. [default: {FEW} for gates; else those of the factory's batch, or {FEW}]"
)


class DeviceMissing(click.ClickException):
    """The device asked for is not there."""

    exit_code = 3


class UnusableInput(click.ClickException):
    """What was typed can't be used."""

    exit_code = 2


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        raise DeviceMissing(
            f"no CUDA device: torch {torch.__version__} is {built} and finds none. Use --device cpu"
        )
    return torch.device(name)


def _writable(path: str | None) -> str | None:
    """A path whose folder exists, so that a long run does not end in nothing."""
    if path not in (None, "-") and not Path(path).parent.is_dir():
        raise click.BadParameter(f"the folder of {path!r} does not exist: create it first")
    return path


def model_option(
    name: str, *, more: str = "", **settings: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--model`, which takes the same everywhere; `more` says what this command does with it."""
    told = (
        f"A built-in workload ({', '.join(BUILTIN)}) or your own factory, as pkg.module:name or file.py:name; it "
        f"returns a module, a (module, batch) pair or a Workload. {more}"
    )
    return click.option("--model", name, metavar="NAME|FACTORY", help=told.strip(), **settings)


def output_option(
    told: str, *names: str, standard_output: bool = False, **settings: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A file that the command writes, refused before the work where it can't be."""
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
    """`--json`, and what it writes."""
    return output_option(told, "--json", "json_path", standard_output=True, **settings)


def plot_option(told: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--plot`, and what it draws."""
    return output_option(told, "--plot", "plot_path")


def samples_of(workload: Workload, asked: int | None) -> int:
    """How many samples a step has."""
    return asked or workload.own_batch or FEW


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that mean the same in every command."""
    for option in (
        json_option(),
        click.option("--seed", default=0, type=click.IntRange(0), show_default=True),
        click.option("--batch-size", type=click.IntRange(1), help=BATCH_SIZE),
        click.option(
            "--dtype", default="float32", type=click.Choice(list(DTYPES)), show_default=True
        ),
        click.option(
            "--blocks", metavar="PATTERN", help="The blocks to work on, a glob over module names."
        ),
        click.option(
            "--device",
            default="auto",
            type=click.Choice(["auto", "cuda", "cpu"]),
            show_default=True,
        ),
    ):
        command = option(command)
    return command
