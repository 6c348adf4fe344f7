"""Command `train`: train a model by a configuration file and `key=value` words.

    curry-train train --config config.yaml steps=1000 optimizer.learning_rate=3e-4
    torchrun --nproc-per-node 8 -m curry_train train --config config.yaml parallel=fsdp2

Proof: `python -m pytest tests/cli/test_train_command.py tests/trainer/test_progress.py`.
"""

import contextlib
import functools
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from click import echo
from torch import nn

from ..config import Config, DataConfig, load_config
from ..core.generators import seeded
from ..core.wording import format_bytes, format_count, format_duration, provenance
from ..data import (
    BYTE_VOCABULARY_SIZE,
    Dataset,
    Samples,
    Tokens,
    layout_of,
    open_tokens,
    read_library_text,
    split_dev,
)
from ..loop import RunReport, StepReport
from ..plan.saved import Plan
from ..primitives.grad_accum import NonFiniteWindow
from ..runs.history import peak_bytes
from ..runs.ranks import RunError
from ..trainer import (
    TRAINING_DTYPES,
    Hook,
    TrainingRun,
    TrainingTask,
    Watch,
    leave,
    open_run,
    train_run,
)
from ..workloads.models import load_object, load_workload
from ..workloads.workload import Batch, Case, WorkloadError
from .options import DEVICES, DTYPE_NAMES, choose_device, model_option
from .parameters import WORDS_ARGUMENT, number_option, option, together
from .screen import Ended, UnusableInput, fill_screen, screen_command

# Resolve the names of a configuration: the model, its loss, and its data.

# Length of a dataset whose batches the workload draws itself.
DRAWN_DATASET_LENGTH = 1 << 20


@dataclass(frozen=True)
class DrawnSamples:
    """Batches drawn by a workload, the same batch for the same first sample."""

    case: Case

    def __len__(self) -> int:
        return DRAWN_DATASET_LENGTH

    def batch(self, samples: Any) -> Batch:
        return replace(self.case, seed=self.case.seed + int(samples[0])).batch(len(samples))


def open_named_run(
    config: Config, *, resume: str | None = None
) -> contextlib.AbstractContextManager[TrainingRun]:
    """Join the ranks and open the run of a configuration that names its model and its data.

    `resume` is `latest`, the name of a run, or a saved state.
    """
    make_task = functools.partial(named_task, config)
    return open_run(config, make_task, resume=resume, load_plan=Plan.load)


def named_task(config: Config, device: torch.device) -> TrainingTask:
    """Build the configured model on a device, and open the data for it."""
    workload = load_workload(config.model)
    dtype = TRAINING_DTYPES[config.dtype]
    case = Case(workload, device, dtype, batch_size=config.microbatch, seed=config.seed)
    module = case.build()
    sizes = (one.num_embeddings for one in module.modules() if isinstance(one, nn.Embedding))
    # The first embedding has the vocabulary.
    samples = open_named_data(config.data, case, vocabulary=next(sizes, None))
    dataset, dev = split_dev(samples, config.data.dev_fraction)
    return TrainingTask(
        workload.name,
        module,
        workload.loss,
        count=workload.count,
        dataset=dataset,
        dev=dev,
        place=case.place,
    )


def open_named_data(config: DataConfig, case: Case, *, vocabulary: int | None = None) -> Dataset:
    """Open the data that `data.source` names, with batches for the model of `case`."""
    if config.source == "workload":
        return DrawnSamples(case)
    if ":" in config.source:
        dataset = load_object(config.source)
        return dataset if hasattr(dataset, "batch") else Samples(dataset)

    with seeded(case.seed):
        layout, own_length = layout_of(case.workload.batch(1))
    length = config.length or own_length
    if config.source == "tokens":
        assert config.path is not None
        return open_tokens(config.path, length=length, layout=layout, vocabulary=vocabulary)
    if vocabulary is not None and vocabulary < BYTE_VOCABULARY_SIZE:
        raise WorkloadError(
            f"text needs a vocabulary of {BYTE_VOCABULARY_SIZE} bytes, and {case.workload.name} "
            f"has {vocabulary} tokens: use data.source=tokens, or a model with more tokens"
        )
    text = read_library_text()
    return Tokens([text], length=length, layout=layout, names=["the library's text"])


# The command.


@screen_command("train", keeps_traceback=True, leave=leave, example="steps=20 microbatch=4")
def train_command(
    path: str | None = option(
        "YAML configuration file; default: config.yaml, if it exists.",
        flags="--config",
        type=click.Path(dir_okay=False),
    ),
    resume: str | None = option(
        "latest, RUN, RUN@STEP, RUN@before-STEP, a checkpoint, or RUN@best for a new run.", "WHAT"
    ),
    same_as_words: dict[str, Any] = together(
        dict,
        model=model_option(more="Same as model=."),
        device=option("Same as device=.", type=DEVICES),
        dtype=option("Same as dtype=.", type=DTYPE_NAMES),
        batch_size=number_option("Samples per step; same as batch_size=."),
        seed=number_option("Same as seed=.", least=0, most=2**63 - 1),
    ),
    show_config: bool = option("Print the complete configuration and exit."),
    words: tuple[str, ...] = WORDS_ARGUMENT,
) -> Ended | None:
    """Train a model by its configuration.

    Exit status: 0 done, 1 a loss or gradient was not finite, a state could not be saved or a GPU is
    out of memory, 2 wrong usage, 3 device not available, 128 plus the signal's number after a
    signal (the state is saved).
    """
    given = [f"{key}={value}" for key, value in same_as_words.items() if value is not None]
    start = [*(["--config", path] if path else []), *words, *given]
    if path is None and Path("config.yaml").is_file():
        path = "config.yaml"
    try:
        with contextlib.ExitStack() as opened:
            try:
                config = load_config(path, [*words, *given])
                if show_config:
                    echo(config.to_yaml(), nl=False)
                    return None
                choose_device(config.device)
                watch: list[Watch] = [show_progress]
                if config.log.tensorboard:
                    require_tensorboard()
                    watch.append(write_tensorboard)
                run = opened.enter_context(open_named_run(config, resume=resume))
            except torch.OutOfMemoryError:
                raise
            except (OSError, ValueError, RuntimeError) as error:
                raise UnusableInput(str(error)) from error
            report = train_run(run, watch=watch)
    except (NonFiniteWindow, RunError, torch.OutOfMemoryError) as error:
        # Training can't go on, or its state can't be saved.
        echo(fill_screen(f"Error: {error}", indent=""), err=True)
        leave(1)
    return _print_results(run, report, start), run.attached.exit_status


def _print_results(run: TrainingRun, report: RunReport, start: list[str]) -> dict[str, Any]:
    """Print how the run ended, and return it; both on the first rank.

    `start` are the words that started it, with which it is resumed.
    """
    if not run.ranks.first:
        return {}
    last = report.last
    newest = run.attached.store.latest()
    saved = f"saved as {run.folder / newest.folder}" if newest else "not saved"
    if last is None:
        message = (
            f"nothing to do: {run.folder} has its {report.step} steps; increase steps= to go on"
        )
    elif report.finished:
        message = f"{report.step} steps done, {saved}"
    else:
        why = "the data ended" if report.ended_by == "data" else f"stopped by {report.ended_by}"
        again = shlex.join(["--resume", run.folder.name, *start])
        message = f"{why} after step {report.step}, {saved}\ngo on with {again}"
    echo(message)

    ended = {"step": report.step, "ended_by": report.ended_by, "run": str(run.folder)}
    figures = {}
    if last is not None:
        figures = {"loss": last.loss, "dev_loss": last.dev_loss, "grad_norm": last.grad_norm}
    return provenance(run.device) | ended | figures


# Progress of a run: lines on the console, and TensorBoard.


@contextlib.contextmanager
def show_progress(run: TrainingRun) -> Iterator[Hook]:
    """Print a line every `log.every` steps, for the first and last one, and for each dev loss."""
    echo(describe_training(run))
    first = run.attached.steps + 1
    after_first = 0.0

    def line(report: StepReport) -> None:
        nonlocal after_first
        now = report.step
        if now == first:
            # The estimate leaves out the first step, which takes much longer than the others.
            after_first = time.perf_counter()
        elif report.dev_loss is None and now % run.config.log.every and now != report.steps:
            return
        seconds_per_step = (time.perf_counter() - after_first) / max(1, now - first)
        left = ""
        if first < now < report.steps:
            left = f"  {format_duration(seconds_per_step * (report.steps - now))} left"
        step = f"{now:>{len(str(report.steps))}}/{report.steps}"
        echo(f"step {step}  {figures(report, run)}{left}")

    yield line


@contextlib.contextmanager
def write_tensorboard(run: TrainingRun) -> Iterator[Hook]:
    """Write the figures of each step for TensorBoard, in the run's folder."""
    with require_tensorboard()(run.folder / "tensorboard") as writer:

        def write(report: StepReport) -> None:
            for name in ("loss", "dev_loss", "grad_norm", "learning_rate"):
                if (value := getattr(report, name)) is not None:
                    writer.add_scalar(name, value, report.step)
            writer.add_scalar("terms_per_second", report.num_terms / report.seconds, report.step)

        yield write


def require_tensorboard() -> Any:
    """Return TensorBoard's writer, or raise ValueError with the install command."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "log.tensorboard needs the package tensorboard: pip install tensorboard"
        ) from error
    return SummaryWriter


def describe_training(run: TrainingRun) -> str:
    """Describe model, data and settings, and what a resume passed over or does differently."""
    config = run.config
    steps = run.attached.steps
    started = f", from step {steps}" if steps else ""
    num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    ranks = ""
    if run.ranks.size > 1:
        ranks = f" on each of {run.ranks.size} ranks ({config.parallel})"
    recompute = ""
    if run.changed:
        recompute = f", {config.recomputation().strategy} on {len(run.changed)} layers"
    resumed = run.attached.resumed
    noted = ""
    if resumed and (resumed.damaged or resumed.notes):
        noted = f"\n{resumed.words}"
    return (
        f"{run.folder}: {run.task.name}, {num_parameters / 1e6:.2f}M parameters, "
        f"{len(run.stream.dataset):,} samples{started}\n"
        f"{run.stream.microbatches_per_window} x {config.microbatch} "
        f"sample{'s' * (config.microbatch > 1)} a step{ranks}, "
        f"{config.precision} on {run.device.type}{recompute}{noted}"
    )


def figures(report: StepReport, run: TrainingRun) -> str:
    """Summarize a step: loss, throughput and peak memory."""
    unit = "tokens" if run.config.data.source in ("text", "tokens") else "terms"
    dev = "" if report.dev_loss is None else f"  dev {report.dev_loss:.4f}"
    skipped = "" if report.stepped else "  skipped"
    return (
        f"loss {report.loss:.4f}{dev}{skipped}  {format_count(report.num_terms / report.seconds)} "
        f"{unit}/s  {format_bytes(peak_bytes(run.device))}"
    )
