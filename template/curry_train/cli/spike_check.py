"""The spike-check command: plant a loss spike, and compare recovery with a clean run.

The same run is trained three ways. `recovered` has the watchdog; `without` never sees the samples
that the watchdog skipped, and must be equal to the bit; `through` trains on the bad samples. If the
watchdog finds no spike, only `recovered` is trained. The bad samples are those of some windows:
integers are drawn anew, and floating-point values are multiplied by a hundred.

Proof: `python -m pytest tests/cli/test_spike_check.py`.
"""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from torch import Tensor

from ..config import Config, load_config
from ..core.digest import digest
from ..core.wording import provenance
from ..data import Dataset
from ..runs.history import History, read_history
from ..runs.ranks import RunError
from ..runs.store import SavedRun
from ..trainer import Hook, TrainingRun, train_run
from ..workloads.workload import map_tensors
from .options import choose_device, model_option
from .parameters import INPUT_FILE, WORDS_ARGUMENT, number_option, option
from .runs import saved_tensors
from .runs_diff import compare_values
from .screen import Ended, echo_lines, messages_on_screen, screen_command
from .train import open_named_run

PLANTED_VALUE_FACTOR = 100.0  # factor on planted floating-point values
# Silenced loggers; the result has the same information.
SILENCED_LOGGERS = ("curry_train.runs.spike", "curry_train.runs.policy")
RUNS = {"recovered": "recovered", "without": "never saw them", "through": "trained through"}


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
                spoiled[rows] *= PLANTED_VALUE_FACTOR
            else:
                ends = int(tensor.min()), int(tensor.max()) + 1
                spoiled[rows] = tensor[rows].random_(*ends, generator=generator)
            return spoiled

        return map_tensors(batch, spoil)


def spike_check(
    folder: Path,
    words: Sequence[str],
    *,
    steps: int,
    at: int,
    num_windows: int,
    config: str | None = None,
) -> dict[str, Any]:
    """Train with these configuration words in `folder` and check the recovery.

    The samples of `num_windows` windows are bad, from that of step `at` on.
    """
    # A replay could not plant the samples of a box.
    given = ["spike.action=rollback", "box.keep=0", *words, f"steps={steps}", f"runs={folder}"]
    asked = load_config(config, given)
    check_settings(asked, at=at, num_windows=num_windows)

    def train_as(name: str, *more_words: str) -> History:
        settings = load_config(config, [*given, *more_words, f"name={name}"])
        _train(settings, at, num_windows, show)
        return read_history(folder / f"{name}-001")

    with contextlib.ExitStack() as stack:
        for name in SILENCED_LOGGERS:
            stack.enter_context(mock.patch.object(logging.getLogger(name), "disabled", True))
        show = stack.enter_context(messages_on_screen())
        runs = {"recovered": train_as("recovered")}
        spikes, rollbacks, skips = (
            runs["recovered"].events.get(kind, []) for kind in ("spike", "rollback", "skip")
        )
        skipped = [[event.facts["start"], event.facts["stop"]] for event in skips]
        if rollbacks:
            runs["without"] = train_as("without", "spike.action=none", f"data.skip={skipped}")
            runs["through"] = train_as("through", "spike.action=none")

    difference = _find_difference(folder, runs["recovered"], runs["without"]) if rollbacks else None
    return provenance(choose_device(asked.device)) | {
        "steps": steps,
        # First and last bad step.
        "planted": [at, at + num_windows - 1],
        "patience": asked.spike.patience,
        "rollbacks": len(rollbacks),
        # Steps from the first bad one to the one in which the spike was found, both counted.
        "found_after": spikes[0].step - at + 1 if spikes else None,
        "back_to": rollbacks[0].step if rollbacks else None,
        # Ranges of data positions.
        "skipped": skipped,
        "losses": {name: run.steps.values["loss"][-1] for name, run in runs.items()},
        "dev_losses": {name: _read_dev_loss(run) for name, run in runs.items()},
        # First difference between `recovered` and `without`, None if equal or not compared.
        "difference": difference,
        "held": bool(rollbacks) and difference is None,
    }


def check_settings(config: Config, *, at: int, num_windows: int) -> None:
    """Raise ValueError if the watchdog could not judge these windows."""
    spike = config.spike
    last = at + num_windows - 1
    if last > config.steps:
        raise ValueError(
            f"bad windows {at} to {last} are not all among the {config.steps} steps: lower --at"
        )
    if not spike.rolls_back:
        raise ValueError("the check needs spike.action=rollback")
    if at <= (judged := spike.judges_after):
        raise ValueError(
            f"the bad samples begin in step {at}, and the watchdog judges from step {judged + 1} "
            "on: give --at and --steps above that, or a smaller spike.window"
        )


def _train(config: Config, at: int, num_windows: int, show: Callable[[str], None]) -> None:
    """Train on the data of a configuration, in which the samples of some windows are bad."""

    @contextlib.contextmanager
    def show_steps(run: TrainingRun) -> Iterator[Hook]:
        yield lambda report: show(f"{run.folder.name}: step {report.step} of {report.steps}")

    with open_named_run(config) as run:
        stream = run.stream
        size = stream.batch_size
        positions = range((at - 1) * size, (at - 1 + num_windows) * size)
        bad = frozenset(int(sample) for sample in stream.order(list(positions)))
        stream.dataset = PlantedSpike(stream.dataset, bad, config.seed)
        report = train_run(run, watch=[show_steps])
    if not report.finished:
        text = (
            f"the training of {run.folder.name} was ended after step {report.step} of "
            f"{config.steps} by {report.ended_by}, so nothing was checked"
        )
        if not run.attached.exit_status:
            raise RunError(text)
        # A signal ended it.
        echo_lines(text, indent="")
        raise click.exceptions.Exit(run.attached.exit_status)


def _read_dev_loss(run: History) -> float | None:
    """Return the last dev loss, None where it was not measured."""
    measured = (steps.values["value"][-1] for steps in run.metrics.values())
    return next(measured, None)


def _find_difference(folder: Path, recovered: History, without: History) -> str | None:
    """Name the first difference of the recovered run from one that never saw the samples."""
    if found := compare_values(recovered.steps, without.steps, "loss")["first"]:
        return (
            f"the loss of step {found['step']} is {found['a']!r} recovered and {found['b']!r} in "
            "the run that never saw the samples"
        )
    states = []
    for name in ("recovered", "without"):
        tensors = saved_tensors(SavedRun(folder / f"{name}-001"), "latest")
        states.append({(name, digest(tensor)) for name, tensor in tensors.items()})
    differing = sorted(name for name, _ in states[0] ^ states[1])
    return f"{differing[0]} differs in the final state" if differing else None


@screen_command("spike-check", example="--steps 60")
def spike_check_command(
    model: str | None = model_option(more="Same as model=."),
    config: str | None = option("YAML configuration file.", type=INPUT_FILE),
    steps: int = number_option("Steps of each run.", default=240, least=18),
    at: int | None = number_option("First bad step.  [default: two thirds of the steps]", least=2),
    windows: int = number_option("Number of steps with bad samples.", default=5),
    keep_path: str | None = option(
        "Keep the runs in this new folder, for `runs plot`.",
        flags="--runs",
        type=click.Path(file_okay=False),
    ),
    words: tuple[str, ...] = WORDS_ARGUMENT,
) -> Ended:
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
    if keep_path and Path(keep_path).exists() and any(Path(keep_path).iterdir()):
        raise ValueError(f"{keep_path} is not empty: give a new folder")
    with tempfile.TemporaryDirectory() as folder:
        found = spike_check(
            Path(keep_path or folder), given, steps=steps, at=at, num_windows=windows, config=config
        )
    echo_lines(*describe(found), indent="")
    return found, not found["held"]


def describe(found: Mapping[str, Any]) -> Iterator[str]:
    """Describe the result in lines."""
    first, last = found["planted"]
    yield f"planted: bad samples in steps {first} to {last} of {found['steps']}"
    if not found["rollbacks"]:
        yield (
            f"NOT found: no {found['patience']} steps in a row (spike.patience) had a loss above "
            "the limit (spike.threshold, spike.least_rise); `runs plot` draws those of --runs"
        )
        return
    skipped = ", ".join(f"{start} to {stop - 1}" for start, stop in found["skipped"])
    yield f"found {found['found_after']} steps after the first, with patience {found['patience']}"
    times = "once" if found["rollbacks"] == 1 else f"{found['rollbacks']} times"
    back = f"went back to step {found['back_to']}, {times}"
    yield f"{back}, without the samples at positions {skipped}"
    for name, words in RUNS.items():
        dev = found["dev_losses"][name]
        dev_loss = "" if dev is None else f", dev loss {dev:.4f}"
        yield f"{words:>15}: loss {found['losses'][name]:.4f}{dev_loss}"
    if found["difference"] is None:
        yield "equal to the bit to the run that never saw them"
    else:
        yield f"NOT equal to the run that never saw them: {found['difference']}"
