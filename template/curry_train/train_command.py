"""The command that trains: a configuration file, words that change it, and the run.

    python -m curry_train train --config config.yaml steps=1000 optimizer.learning_rate=3e-4
    torchrun --nproc-per-node 8 -m curry_train train --config config.yaml parallel=fsdp2

Proof: `python -m pytest tests/test_train_command.py`.
"""

import contextlib
import functools
import os
import sys
import textwrap
from pathlib import Path

import click
from rich.console import Console

from .config import Config, load_config
from .core.lazy import MissingTechnique
from .core.provenance import provenance, write_json
from .loop import SIGNALS
from .options import DTYPES, UnusableInput, choose_device, json_option, model_option
from .primitives.grad_accum import NonFiniteWindow
from .progress import require_tensorboard, show_progress, write_tensorboard
from .runs.errors import RunError
from .training import Trained, Watch, open_run, train_run


@click.command("train", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    "path",
    type=click.Path(dir_okay=False),
    help="A YAML file; config.yaml here if there is one.",
)
@click.option(
    "--resume",
    metavar="WHAT",
    help="latest, a run, RUN@STEP, RUN@before-STEP, RUN@best for a new run, or a checkpoint.",
)
@model_option("model", more="The same as model=.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), help="The same as device=.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="The same as dtype=.")
@click.option(
    "--batch-size", type=click.IntRange(1), help="Samples of a step; the same as batch_size=."
)
@click.option("--seed", type=click.IntRange(0), help="The same as seed=.")
@json_option("Write how it ended; - is standard output.")
@click.option(
    "--show-config", is_flag=True, help="Print the configuration as it was understood, and stop."
)
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
    """Train. Exit status: 0 done, 1 a loss or a gradient was not finite, or a state not saved, 2 wrong usage, 3 no such
    device, 128 and its number after a signal, with the state saved."""
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
                shown = functools.partial(show_progress, console=console, every=config.log.every)
                watch: list[Watch] = [
                    shown,
                    *([write_tensorboard] if config.log.tensorboard else []),
                ]
                run = opened.enter_context(open_run(config, resume=resume))
            except (ValueError, RuntimeError, MissingTechnique) as error:
                raise UnusableInput(
                    "\n".join(textwrap.wrap(str(error), 80, break_long_words=False))
                ) from error
            trained = train_run(run, watch=watch)
    except (
        NonFiniteWindow,
        RunError,
    ) as error:  # training can't go on, or what it has can't be saved
        click.echo(
            "\n".join(textwrap.wrap(f"Error: {error}", 80, break_long_words=False)), err=True
        )
        _leave(1)
    _tell(config, trained, json_path)
    _leave(_status(trained))


def _here() -> str | None:
    return "config.yaml" if Path("config.yaml").is_file() else None


def _tell(config: Config, trained: Trained, json_path: str | None) -> None:
    if _rank():
        return
    report, words, where = (
        trained.report,
        "",
        trained.folder / trained.saved.folder if trained.saved else "nowhere",
    )
    if report.last is None:
        words = f"nothing to do: {trained.folder} has its {report.step} steps; set steps= to more"
    elif report.finished:
        words = f"{report.step} steps done, saved as {where}"
    else:
        why = "the data ended" if report.ended_by == "data" else f"stopped by {report.ended_by}"
        words = f"{why} after step {report.step}, saved as {where}\ngo on with --resume {trained.folder.name}"
    click.echo(words, err=json_path == "-")
    if json_path:
        last = report.last
        figures = (
            {}
            if last is None
            else {"loss": last.loss, "dev_loss": last.dev_loss, "grad_norm": last.grad_norm}
        )
        ended = {"step": report.step, "ended_by": report.ended_by, "run": str(trained.folder)}
        write_json(json_path, provenance(choose_device(config.device)) | ended | figures)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _status(trained: Trained) -> int:
    numbers = {number.name: 128 + number for number in SIGNALS}
    return numbers.get(trained.report.ended_by, 0)


def _leave(status: int) -> None:
    """A rank on gloo ends here, because torch 2.13 aborts about one in four ends of a process that used DDP."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
