"""The spike-check command: plant a loss spike, and compare recovery with a clean run.

The same run is trained three ways. `recovered` has the watchdog; `without` never sees the samples
that the watchdog skipped, and must be equal to the bit; `through` trains on the bad samples. If the
watchdog finds no spike, only `recovered` is trained. The bad samples are those of some windows:
integers are drawn anew, and floating-point values are multiplied by a hundred.

Proof: `python -m pytest tests/cli/test_spike_check.py`.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from ..config import Config, load_config
from ..core.wording import provenance, unheard, write_json
from ..data import Dataset
from ..runs.history import History, read_history
from ..runs.policy_config import SpikeConfig
from ..runs.ranks import RunError
from ..runs.store import SavedRun
from ..trainer import Hook, TrainingRun, Watch, train_run
from ..workloads.models import load_workload
from ..workloads.workload import map_tensors
from .figures import plot_runs
from .options import (
    choose_device,
    json_option,
    model_option,
    new_folder,
    plot_option,
    require_matplotlib,
)
from .runs import saved_tensors
from .runs_diff import compare_values
from .screen import ScreenCommand, fill_screen, messages_on_screen
from .train import open_named_run

# Check that a run recovers from a loss spike, with bad samples planted into the data.

PLANTED_VALUE_FACTOR = 100.0  # factor on planted floating-point values
# Silenced loggers; the result has the same information.
SILENCED_LOGGERS = ("curry_train.runs.spike", "curry_train.runs.policy")
RECOVERED_RUN_NAME = "recovered"
WITHOUT_RUN_NAME = "without"
THROUGH_RUN_NAME = "through"


@dataclass(frozen=True)
class PlantedSpike:
    """Dataset with some bad samples."""

    dataset: Dataset
    bad: frozenset[int]
    seed: int = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, samples: Sequence[int]) -> Any:
        batch = self.dataset.batch(samples)
        rows = [row for row, sample in enumerate(samples) if int(sample) in self.bad]
        if not rows:
            return batch
        generator = torch.Generator().manual_seed(self.seed + int(samples[rows[0]]))

        def spoil(tensor: Tensor) -> Tensor:
            if not tensor.dim() or len(tensor) != len(samples) or tensor.dtype == torch.bool:
                return tensor
            spoiled = tensor.clone()
            if tensor.is_floating_point():
                spoiled[rows] = tensor[rows] * PLANTED_VALUE_FACTOR
            else:
                low = int(tensor.min())
                high = int(tensor.max()) + 1
                shape = tensor[rows].shape
                spoiled[rows] = torch.randint(
                    low, high, shape, generator=generator, dtype=tensor.dtype
                )
            return spoiled

        return map_tensors(batch, spoil)


@dataclass(frozen=True)
class SpikeCheck:
    """Result of `spike_check`."""

    steps: int
    # First and last bad step.
    planted: tuple[int, int]
    patience: int
    rollbacks: int
    # Steps from the first bad one to the one in which the spike was found, both counted.
    found_after: int | None
    back_to: int | None
    # Ranges of skipped data positions.
    skipped: tuple[tuple[int, int], ...]
    # Last losses of each run.
    losses: dict[str, float]
    # Last dev loss of each run, None where it was not measured.
    dev_losses: dict[str, float | None]
    # First difference between `recovered` and `without`, None if equal or not compared.
    difference: str | None

    @property
    def held(self) -> bool:
        return self.rollbacks > 0 and self.difference is None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"held": self.held}


def spike_check(
    folder: Path,
    words: Sequence[str],
    *,
    steps: int,
    at: int,
    num_windows: int,
    config: str | None = None,
    watch: Sequence[Watch] = (),
) -> SpikeCheck:
    """Train with these configuration words in `folder` and check the recovery.

    The samples of `num_windows` windows are bad, from that of step `at` on.
    """
    given = ["spike.action=rollback", *words, f"steps={steps}", f"runs={folder}"]
    spike = check_settings(load_config(config, given), at=at, num_windows=num_windows)
    plant = _Plant(at, num_windows)

    def train_as(name: str, *more_words: str) -> History:
        _train(load_config(config, [*given, *more_words, f"name={name}"]), plant, watch)
        return read_history(folder / f"{name}-001")

    with unheard(*SILENCED_LOGGERS):
        recovered = train_as(RECOVERED_RUN_NAME)
        runs = {RECOVERED_RUN_NAME: recovered}
        spikes, rollbacks, skips = (
            recovered.events.get(kind, []) for kind in ("spike", "rollback", "skip")
        )
        skipped = tuple((event.facts["start"], event.facts["stop"]) for event in skips)
        if rollbacks:
            skip_word = f"data.skip={[list(pair) for pair in skipped]}"
            runs[WITHOUT_RUN_NAME] = train_as(WITHOUT_RUN_NAME, "spike.action=none", skip_word)
            runs[THROUGH_RUN_NAME] = train_as(THROUGH_RUN_NAME, "spike.action=none")

    difference = None
    if rollbacks:
        difference = _difference(folder, recovered, runs[WITHOUT_RUN_NAME])
    return SpikeCheck(
        steps=steps,
        planted=(at, at + num_windows - 1),
        patience=spike.patience,
        rollbacks=len(rollbacks),
        found_after=spikes[0].step - at + 1 if spikes else None,
        back_to=rollbacks[0].step if rollbacks else None,
        skipped=skipped,
        losses={name: run.steps.values["loss"][-1] for name, run in runs.items()},
        dev_losses={name: _dev_loss(run) for name, run in runs.items()},
        difference=difference,
    )


def check_settings(config: Config, *, at: int, num_windows: int) -> SpikeConfig:
    """Return the watchdog's settings; raise ValueError if it could not judge these windows."""
    steps = config.steps
    spike = config.spike
    last = at + num_windows - 1
    if not 1 <= at <= last <= steps:
        raise ValueError(
            f"bad windows {at} to {last} are not all among the {steps} steps: lower --at"
        )
    if not spike.rolls_back:
        raise ValueError("the check needs spike.action=rollback")
    if at <= (judged := spike.judges_after):
        raise ValueError(
            f"the bad samples begin in step {at}, and the watchdog judges from step {judged + 1} "
            "on: give --at and --steps above that, or a smaller spike.window"
        )
    return spike


class _Plant:
    """Make the samples at the positions of some windows bad, the same ones in each run."""

    def __init__(self, at: int, num_windows: int) -> None:
        self.at = at
        self.num_windows = num_windows

    def __call__(self, stream: Any, seed: int) -> None:
        size = stream.batch_size
        positions = range((self.at - 1) * size, (self.at - 1 + self.num_windows) * size)
        bad = frozenset(int(sample) for sample in stream.order(list(positions)))
        stream.dataset = PlantedSpike(stream.dataset, bad, seed)


def _train(config: Config, plant: Callable[[Any, int], None], watch: Sequence[Watch]) -> None:
    with open_named_run(config) as run:
        plant(run.stream, config.seed)
        trained = train_run(run, watch=watch)
    report = trained.report
    if not report.finished:
        raise RunError(
            f"the training of {trained.folder.name} was ended after step {report.step} of "
            f"{config.steps} by {report.ended_by}, so nothing was checked"
        )


def _dev_loss(run: History) -> float | None:
    """Return the last dev loss."""
    values = [course.steps.values["value"] for course in run.metrics.values()]
    return values[0][-1] if values else None


def _difference(folder: Path, recovered: History, without: History) -> str | None:
    """Name the first difference of the recovered run from one that never saw the samples."""
    if recovered.steps.step != without.steps.step:
        return "the recovered run is of other steps than the run that never saw the samples"
    if found := compare_values(recovered.steps, without.steps, "loss").first:
        return (
            f"the loss of step {found.step} is {found.a!r} recovered and {found.b!r} in the run "
            "that never saw the samples"
        )
    names = (RECOVERED_RUN_NAME, WITHOUT_RUN_NAME)
    return different_tensor(*(final_tensors(folder / f"{name}-001") for name in names))


def final_tensors(run: Path) -> dict[str, Tensor]:
    """Read every tensor of the newest saved state of a run."""
    saved = SavedRun(run)
    newest = saved.latest()
    if newest is None:
        raise ValueError(f"{run} has no saved state")

    return saved_tensors(saved, newest.folder)


def different_tensor(straight: dict[str, Tensor], resumed: dict[str, Tensor]) -> str | None:
    """Name the first tensor of two final states that is not the same in every bit."""
    if missing := sorted(straight.keys() ^ resumed.keys()):
        return f"{missing[0]} is in one of the two final states alone"
    for name, first in straight.items():
        second = resumed[name]
        if (
            first.shape != second.shape
            or first.dtype != second.dtype
            or not _same_bits(first, second)
        ):
            return f"{name} differs in the final state"
    return None


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(
        *(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    )


# Command `runs spike-check`: plant bad samples and check the recovery from the spike.


@click.command("spike-check", cls=ScreenCommand, example="--steps 18 batch_size=4")
@model_option("model", more=". Same as model=.")
@click.option(
    "--config", type=click.Path(exists=True, dir_okay=False), help="YAML configuration file."
)
@click.option(
    "--steps", type=click.IntRange(18), default=240, show_default=True, help="Steps of each run."
)
@click.option(
    "--at", type=click.IntRange(2), help="First bad step.  [default: two thirds of the steps]"
)
@click.option(
    "--windows",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Number of steps with bad samples.",
)
@plot_option("Draw loss, dev loss and events of the runs as PNG.")
@click.option(
    "--runs",
    "keep_path",
    type=click.Path(file_okay=False),
    help="Keep the runs in this new folder.",
)
@json_option()
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
def spike_check_command(
    model: str | None,
    config: str | None,
    steps: int,
    at: int | None,
    windows: int,
    plot_path: str | None,
    keep_path: str | None,
    json_path: str | None,
    words: tuple[str, ...],
) -> None:
    """Check the recovery from a loss spike.

    Plants bad samples and trains with the watchdog, without the skipped samples, and through the
    bad samples. If the watchdog finds no spike, only the first run is trained.

    Exit status: 0 found and recovered to the bit, 1 not, 2 wrong usage.
    """
    every = max(1, steps // 8)
    at = at or steps * 2 // 3
    given = [f"checkpoint.rollback_every={every}", f"evaluate.every={every}", *words]
    if model:
        given.append(f"model={model}")

    with contextlib.ExitStack() as stack:
        folder = new_folder(stack, keep_path)
        settings = load_config(config, ["spike.action=rollback", *given, f"steps={steps}"])
        check_settings(settings, at=at, num_windows=windows)
        load_workload(settings.model)  # a wrong model is reported before a missing package
        if plot_path:
            require_matplotlib()
        facts = provenance(choose_device(settings.device))
        show = stack.enter_context(messages_on_screen())
        result = spike_check(
            *(folder, given),
            steps=steps,
            at=at,
            num_windows=windows,
            config=config,
            watch=[functools.partial(_show_steps, show)],
        )
        if plot_path:
            drawn = [read_history(folder / f"{name}-001", name=name) for name in result.losses]
            plot_runs(drawn, plot_path)

    for line in describe_spike_check(result):
        click.echo(fill_screen(line, indent=""))
    if plot_path:
        click.echo(f"drawn as {plot_path}")
    if json_path:
        write_json(json_path, facts | result.to_json())
    sys.exit(0 if result.held else 1)


def describe_spike_check(found: SpikeCheck) -> Iterator[str]:
    """Describe the result in lines."""
    first, last = found.planted
    yield f"planted: bad samples in steps {first} to {last} of {found.steps}"
    if not found.rollbacks:
        yield (
            f"NOT found: no {found.patience} steps in a row (spike.patience) had a loss above the "
            "limit (spike.threshold, spike.least_rise); --plot draws the losses"
        )
        return
    skipped = ", ".join(f"{start} to {stop - 1}" for start, stop in found.skipped)
    yield f"found {found.found_after} steps after the first, with patience {found.patience}"
    times = "once" if found.rollbacks == 1 else f"{found.rollbacks} times"
    yield f"went back to step {found.back_to}, {times}, without the samples at positions {skipped}"
    for name, words in (
        (RECOVERED_RUN_NAME, "recovered"),
        (WITHOUT_RUN_NAME, "never saw them"),
        (THROUGH_RUN_NAME, "trained through"),
    ):
        dev = found.dev_losses[name]
        dev_loss = "" if dev is None else f", dev loss {dev:.4f}"
        yield f"{words:>15}: loss {found.losses[name]:.4f}{dev_loss}"
    if found.difference is None:
        yield "equal to the bit to the run that never saw them"
    else:
        yield f"NOT equal to the run that never saw them: {found.difference}"


@contextlib.contextmanager
def _show_steps(show: Callable[[str], None], run: TrainingRun) -> Iterator[Hook]:
    """Show the step of the run that is trained."""
    yield lambda report: show(f"{run.folder.name}: step {report.step} of {report.steps}")
