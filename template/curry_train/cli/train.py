"""Command `train`: train a model by a configuration file and `key=value` words.

    python -m curry_train train --config config.yaml steps=1000 optimizer.learning_rate=3e-4
    torchrun --nproc-per-node 8 -m curry_train train --config config.yaml parallel=fsdp2

Proof: `python -m pytest tests/cli/test_train_command.py`.
"""

import contextlib
import functools
import os
import sys
import textwrap
from pathlib import Path

import click
from rich.console import Console

from ..config import Config, load_config
from ..core.lazy import MissingTechnique
from ..core.timing import NoSuchDevice
from ..core.wording import provenance, write_json
from ..loop import SIGNALS
from ..primitives.grad_accum import NonFiniteWindow
from ..runs.ranks import RunError
from ..trainer import Trained, Watch, open_run, train_run
from .console import require_tensorboard, show_progress, write_tensorboard
from .options import (
    DTYPES,
    DeviceMissing,
    UnusableInput,
    choose_device,
    json_option,
    model_option,
)


@click.command("train", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    "path",
    type=click.Path(dir_okay=False),
    help="YAML configuration file; default: config.yaml, if it exists.",
)
@click.option(
    "--resume",
    metavar="WHAT",
    help="latest, RUN, RUN@STEP, RUN@before-STEP, a checkpoint, or RUN@best for a new run.",
)
@model_option("model", more="Same as model=.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), help="Same as device=.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Same as dtype=.")
@click.option("--batch-size", type=click.IntRange(1), help="Samples per step; same as batch_size=.")
@click.option("--seed", type=click.IntRange(0), help="Same as seed=.")
@json_option("Write how the run ended; - is standard output.")
@click.option("--show-config", is_flag=True, help="Print the complete configuration and exit.")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
def train_command(
    path: str | None,
    resume: str | None,
    model: str | None,
    device: str | None,
    dtype: str | None,
    batch_size: int | None,
    seed: int | None,
    json_path: str | None,
    show_config: bool,
    words: tuple[str, ...],
) -> None:
    """Train a model by its configuration.

    Exit status: 0 done, 1 a loss or gradient was not finite or a state could not be saved, 2 wrong
    usage, 3 device not available, 128 plus the signal's number after a signal (the state is saved).
    """
    options = {
        "model": model,
        "device": device,
        "dtype": dtype,
        "batch_size": batch_size,
        "seed": seed,
    }
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    try:
        with contextlib.ExitStack() as opened:
            try:
                config = load_config(path or _here(), [*words, *given])
                if show_config:
                    click.echo(config.to_yaml(), nl=False)
                    return
                if config.log.tensorboard:
                    require_tensorboard()
                console = Console(stderr=json_path == "-", highlight=False, soft_wrap=True)
                watch: list[Watch] = [
                    functools.partial(show_progress, console=console, every=config.log.every)
                ]
                if config.log.tensorboard:
                    watch.append(write_tensorboard)
                run = opened.enter_context(open_run(config, resume=resume))
            except NoSuchDevice as error:
                raise DeviceMissing(str(error)) from error
            except (ValueError, RuntimeError, MissingTechnique) as error:
                raise UnusableInput(
                    "\n".join(textwrap.wrap(str(error), 80, break_long_words=False))
                ) from error
            trained = train_run(run, watch=watch)
    except (NonFiniteWindow, RunError) as error:
        # Training can't go on, or its state can't be saved.
        click.echo(
            "\n".join(textwrap.wrap(f"Error: {error}", 80, break_long_words=False)), err=True
        )
        _leave(1)
    _tell(config, trained, json_path)
    _leave(_status(trained))


def _here() -> str | None:
    return "config.yaml" if Path("config.yaml").is_file() else None


def _tell(config: Config, trained: Trained, json_path: str | None) -> None:
    """Print how the run ended, on the first rank, and write it as JSON."""
    if _rank():
        return
    report = trained.report
    last = report.last
    saved = f"saved as {trained.folder / trained.saved.folder}" if trained.saved else "not saved"
    if last is None:
        message = (
            f"nothing to do: {trained.folder} has its {report.step} steps; increase steps= to go on"
        )
    elif report.finished:
        message = f"{report.step} steps done, {saved}"
    else:
        why = "the data ended" if report.ended_by == "data" else f"stopped by {report.ended_by}"
        message = (
            f"{why} after step {report.step}, {saved}\ngo on with --resume {trained.folder.name}"
        )
    click.echo(message, err=json_path == "-")

    if json_path:
        ended = {"step": report.step, "ended_by": report.ended_by, "run": str(trained.folder)}
        figures = {}
        if last is not None:
            figures = {"loss": last.loss, "dev_loss": last.dev_loss, "grad_norm": last.grad_norm}
        write_json(json_path, provenance(choose_device(config.device)) | ended | figures)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _status(trained: Trained) -> int:
    numbers = {number.name: 128 + number for number in SIGNALS}
    return numbers.get(trained.report.ended_by, 0)


def _leave(status: int) -> None:
    """Exit; with several ranks at once, without Python's clean-up.

    On gloo, torch 2.13 aborts in about one of four exits of a process that used DDP.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
