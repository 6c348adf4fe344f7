"""Check that a run recovers from a loss spike, with bad samples planted into the data.

The same run is trained three ways. `recovered` has the watchdog; `without` never sees the samples
that the watchdog skipped, and must be equal to the bit; `through` trains on the bad samples. If the
watchdog finds no spike, only `recovered` is trained. The bad samples are those of some windows:
integers are drawn anew, and floating-point values are multiplied by a hundred.
Proof: `python -m pytest tests/test_spike_check.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import Config, load_config
from .core.batches import map_tensors
from .core.quiet import unheard
from .data.dataset import Dataset
from .resume_check import final_tensors
from .runs.errors import RunError
from .runs.journal_reading import NAME, JournalReading
from .runs.spike import Limit, SpikeWatchdog
from .runs.spike_config import SpikeConfig
from .training import Watch, open_run, train_run

LEAST_THRESHOLD = 3.0  # a lower threshold raises alarms on healthy losses
TIMES = 100.0  # factor on planted floating-point values
# Silenced loggers; the result has the same information.
SAID = (f"{__package__}.spike_watch", f"{__package__}.runs.policy")
RECOVERED = "recovered"
WITHOUT = "without"
THROUGH = "through"


@dataclass(frozen=True)
class Planted:
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
                spoiled[rows] = tensor[rows] * TIMES
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
class Missed:
    """Figures of the watchdog for planted samples that it did not find."""

    # Loss above the watchdog's level, at the bad steps and `patience` steps after them.
    rises: tuple[float, ...]
    # The watchdog's limit at the first bad step.
    limit: Limit
    # Most steps in a row with a rise above their limit.
    in_a_row: int
    threshold: float
    least_rise: float
    patience: int

    @property
    def advice(self) -> str:
        """The settings that would have found the spike, or why none would."""
        stretches = [
            self.rises[end - self.patience : end]
            for end in range(self.patience, len(self.rises) + 1)
        ]
        # The largest rise that lasted for `patience` steps.
        sustained = max((min(stretch) for stretch in stretches), default=0.0)
        reachable = 0.95 * (sustained - self.limit.drift)
        if reachable <= 0 and self.in_a_row:
            return (
                f"plant at least {self.patience} bad steps with --windows, or set "
                f"spike.patience={self.in_a_row}"
            )
        if reachable <= 0 or reachable * self.threshold < LEAST_THRESHOLD * self.limit.by_noise:
            return "no setting: these bad samples raise the loss by no more than its noise"

        settings = []
        if self.limit.by_noise > reachable:
            threshold = self.threshold * reachable / self.limit.by_noise
            settings.append(f"spike.threshold={_rounded_down(threshold)}")
        if self.limit.by_level > reachable:
            least_rise = self.least_rise * reachable / self.limit.by_level
            settings.append(f"spike.least_rise={_rounded_down(least_rise)}")
        return "set " + " and ".join(settings)


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
    # None where the spike was found.
    missed: Missed | None = None

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
    last = at + num_windows - 1

    def train_as(name: str, *more_words: str) -> tuple[dict[int, float], float | None]:
        _train(load_config(config, [*given, *more_words, f"name={name}"]), plant, watch)
        return _figures(folder / f"{name}-001")

    with unheard(*SAID):
        figures = {RECOVERED: train_as(RECOVERED)}
        events = list(JournalReading(folder / f"{RECOVERED}-001" / NAME))
        spikes = [event for event in events if event.kind == "spike"]
        rollbacks = [event for event in events if event.kind == "rollback"]
        skips = tuple(
            (event.facts["start"], event.facts["stop"]) for event in events if event.kind == "skip"
        )
        if rollbacks:
            skip_word = f"data.skip={[list(pair) for pair in skips]}"
            figures[WITHOUT] = train_as(WITHOUT, "spike.action=none", skip_word)
            figures[THROUGH] = train_as(THROUGH, "spike.action=none")

    difference = None
    missed = None
    recovered_losses = figures[RECOVERED][0]
    if rollbacks:
        difference = _difference(folder, recovered_losses, figures[WITHOUT][0])
    else:
        missed = missed_spike(recovered_losses, spike, first=at, last=last)
    return SpikeCheck(
        steps=steps,
        planted=(at, last),
        patience=spike.patience,
        rollbacks=len(rollbacks),
        found_after=spikes[0].step - at + 1 if spikes else None,
        back_to=rollbacks[0].step if rollbacks else None,
        skipped=skips,
        losses={name: list(losses.values())[-1] for name, (losses, _) in figures.items()},
        dev_losses={name: dev for name, (_, dev) in figures.items()},
        difference=difference,
        missed=missed,
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
    if spike.lower_rate is not None or not spike.rolls_back:
        raise ValueError(
            "the check needs spike.action=rollback without spike.lower_rate, which changes the "
            "training after the spike"
        )
    if at <= (judged := spike.judges_after):
        raise ValueError(
            f"the bad samples begin in step {at}, and the watchdog judges from step {judged + 1} "
            "on: give --at and --steps above that, or a smaller spike.window"
        )
    return spike


def missed_spike(
    losses: Mapping[int, float], config: SpikeConfig, *, first: int, last: int
) -> Missed:
    """Replay the losses through a watchdog to find out how they compared with its limits."""
    watchdog = SpikeWatchdog(config)
    limits: list[Limit] = []
    rises: list[float] = []
    in_a_row = 0
    longest = 0
    for step, loss in losses.items():
        limit = watchdog.limit()
        if first <= step <= last + config.patience and limit is not None:
            limits.append(limit)
            rises.append(loss - limit.level)
            in_a_row = in_a_row + 1 if rises[-1] > limit.rise else 0
            longest = max(longest, in_a_row)
        watchdog.observe(step, loss)
    return Missed(
        tuple(rises), limits[0], longest, config.threshold, config.least_rise, config.patience
    )


def _rounded_down(value: float) -> float:
    """Round down to two digits, so that the value is easy to type."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.floor(value / unit) * unit:.2g}")


class _Plant:
    """Make the samples at the positions of some windows bad, the same ones in each run."""

    def __init__(self, at: int, num_windows: int) -> None:
        self.at = at
        self.num_windows = num_windows

    def __call__(self, stream: Any, seed: int) -> None:
        size = stream.batch_size
        positions = range((self.at - 1) * size, (self.at - 1 + self.num_windows) * size)
        bad = frozenset(int(sample) for sample in stream.order(list(positions)))
        stream.dataset = Planted(stream.dataset, bad, seed)


def _train(config: Config, plant: Callable[[Any, int], None], watch: Sequence[Watch]) -> None:
    with open_run(config) as run:
        plant(run.parts.stream, config.seed)
        trained = train_run(run, watch=watch)
    report = trained.report
    if not report.finished:
        raise RunError(
            f"the training of {trained.folder.name} was ended after step {report.step} of "
            f"{config.steps} by {report.ended_by}, so nothing was checked"
        )


def _figures(run: Path) -> tuple[dict[int, float], float | None]:
    """Return the losses without those that were rolled back, and the last dev loss."""
    losses: dict[int, float] = {}
    dev: float | None = None
    for event in JournalReading(run / NAME):
        if event.kind == "rollback":
            losses = {step: loss for step, loss in losses.items() if step <= event.step}
        elif event.kind == "step":
            losses[event.step] = event.facts["loss"]
        elif event.kind == "eval":
            dev = event.facts["value"]
    return losses, dev


def _difference(folder: Path, recovered: dict[int, float], without: dict[int, float]) -> str | None:
    for step in sorted(recovered.keys() | without.keys()):
        first = recovered.get(step)
        second = without.get(step)
        if first != second:
            return (
                f"the loss of step {step} is {first!r} recovered and {second!r} in the run that "
                "never saw the samples"
            )

    recovered_state = final_tensors(folder / f"{RECOVERED}-001")
    without_state = final_tensors(folder / f"{WITHOUT}-001")
    for name in sorted(recovered_state.keys() | without_state.keys()):
        ours = recovered_state.get(name)
        theirs = without_state.get(name)
        if ours is None or theirs is None or not torch.equal(ours, theirs):
            return f"{name} differs in the final state"
    return None
