"""Progress bars, spinners and plots that the commands share.

Each is a context that yields a hook for the loop; `train` opens them.

Proof: `python -m pytest tests/trainer/test_progress.py tests/plan/test_timeline.py`.
"""

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..core.timing import peak_bytes
from ..core.wording import format_bytes
from ..loop import StepReport
from ..trainer import Hook, TrainingRun

# Progress of a run: a bar or lines on the console, and TensorBoard.


@contextlib.contextmanager
def show_progress(
    run: TrainingRun, *, console: Console | None = None, every: int = 10
) -> Iterator[Hook]:
    """Show a bar on a terminal; elsewhere print a line every `every` steps.

    Lines are also printed for the first step, the last step and each dev loss.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    console.print(describe_training(run), markup=False)
    if not console.is_terminal:
        first = run.first_step + 1
        after_first = 0.0

        def line(report: StepReport) -> None:
            nonlocal after_first
            if report.step == first:
                # The estimate leaves out the first step, which takes much longer than the others.
                after_first = time.perf_counter()
            elif report.dev_loss is None and report.step % every and report.step != report.steps:
                return

            seconds_per_step = (time.perf_counter() - after_first) / max(1, report.step - first)
            left = ""
            if first < report.step < report.steps:
                left = f"  {clock(seconds_per_step * (report.steps - report.step))} left"
            step = f"{report.step:>{len(str(report.steps))}}/{report.steps}"
            console.print(f"step {step}  {figures(report, run)}{left}", markup=False)

        yield line
        return

    columns = (
        BarColumn(12),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("the first step", total=run.config.steps, completed=run.first_step)

        def advance(report: StepReport) -> None:
            progress.update(task, completed=report.step, description=figures(report, run))
            if report.dev_loss is not None:
                progress.console.print(
                    f"step {report.step}: dev loss {report.dev_loss:.4f}", highlight=False
                )

        yield advance


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
    """Describe model, data and settings, and the damaged states that a resume passed over."""
    config = run.config
    started = f", from step {run.first_step}" if run.first_step else ""
    ranks = ""
    if run.ranks.size > 1:
        ranks = f" on each of {run.ranks.size} ranks ({config.parallel})"
    recompute = ""
    if run.changed:
        recompute = f", {config.recomputation().strategy} on {len(run.changed)} layers"
    resumed = run.attached.resumed
    damaged = f"\n{resumed.words}" if resumed and resumed.damaged else ""
    return (
        f"{run.folder}: {run.task.name}, {run.num_parameters / 1e6:.2f}M parameters, "
        f"{len(run.stream.dataset):,} samples{started}\n"
        f"{run.stream.microbatches_per_window} x {config.microbatch} samples a step{ranks}, "
        f"{config.precision} on {run.device.type}{recompute}{damaged}"
    )


def figures(report: StepReport, run: TrainingRun) -> str:
    """Summarize a step: loss, throughput and peak memory."""
    unit = "tokens" if run.config.data.source in ("text", "tokens") else "terms"
    dev = "" if report.dev_loss is None else f"  dev {report.dev_loss:.4f}"
    skipped = "" if report.stepped else "  skipped"
    rate = short(report.num_terms / report.seconds)
    memory = format_bytes(peak_bytes(run.device))
    return f"loss {report.loss:.4f}{dev}{skipped}  {rate} {unit}/s  {memory}"


def short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# Plot of a memory timeline, and the check that matplotlib is installed.


def require_matplotlib() -> None:
    """Raise RuntimeError with the install command if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError(
            "a plot needs matplotlib, which is not installed: pip install 'matplotlib>=3.8'"
        )
