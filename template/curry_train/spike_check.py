"""Does a run recover from a spike? Bad samples are planted into the data, and the same run is trained three ways.

`recovered` has the watchdog; `without` never sees the samples that it skipped, and has to be equal to the bit;
`through` trains on, as the first does where it finds nothing: then there are no others. The bad samples are
those of some windows: whole numbers are drawn anew, others a hundred times as large.
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

LEAST_THRESHOLD = 3.0  # below it sound losses are alarms
TIMES = 100.0  # as large are planted values that are not whole numbers
SAID = (
    f"{__package__}.spike_watch",
    f"{__package__}.runs.policy",
)  # what they say is in the result
RECOVERED, WITHOUT, THROUGH = "recovered", "without", "through"


@dataclass(frozen=True)
class Planted:
    """A dataset of which some samples are bad."""

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
            spoiled, shape = tensor.clone(), tensor[rows].shape
            if tensor.is_floating_point():
                spoiled[rows] = tensor[rows] * TIMES
            else:
                low, high = int(tensor.min()), int(tensor.max()) + 1
                spoiled[rows] = torch.randint(
                    low, high, shape, generator=generator, dtype=tensor.dtype
                )
            return spoiled

        return map_tensors(batch, spoil)


@dataclass(frozen=True)
class Missed:
    """Why nothing was found. `rises` are those of the loss over the watchdog's level, at the bad steps and `patience`
    after them; `limit` is that of the first bad step, and `in_a_row` how many in a row were above theirs."""

    rises: tuple[float, ...]
    limit: Limit
    in_a_row: int
    threshold: float
    least_rise: float
    patience: int

    @property
    def advice(self) -> str:
        """The settings with which it would have been found, or why none would."""
        rows = [
            self.rises[end - self.patience : end]
            for end in range(self.patience, len(self.rises) + 1)
        ]
        kept_up = max((min(row) for row in rows), default=0.0)  # through so many steps
        room = 0.95 * (kept_up - self.limit.drift)
        if room <= 0 and self.in_a_row:
            return f"plant at least {self.patience} bad steps with --windows, or set spike.patience={self.in_a_row}"
        by = {
            "threshold": (self.threshold, self.limit.by_noise),
            "least_rise": (self.least_rise, self.limit.by_level),
        }
        if room <= 0 or room * self.threshold < LEAST_THRESHOLD * self.limit.by_noise:
            return "no setting: these bad samples raise the loss by no more than its noise"
        lower = {name: setting * room / rise for name, (setting, rise) in by.items() if rise > room}
        return "set " + " and ".join(
            f"spike.{name}={_rounded_down(value)}" for name, value in lower.items()
        )


@dataclass(frozen=True)
class SpikeCheck:
    """What came of it. `found_after` counts the steps from the first bad one to the one at which the spike was found;
    losses are those of the end, `dev_loss` where it was measured. `missed` is None where it was found."""

    steps: int
    planted: tuple[int, int]
    patience: int
    rollbacks: int
    found_after: int | None
    back_to: int | None
    skipped: tuple[tuple[int, int], ...]
    losses: dict[str, float]
    dev_losses: dict[str, float | None]
    difference: str | None
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
    """Train by these words in `folder`, with `num_windows` bad windows from the one of step `at` on."""
    given = ["spike.action=rollback", *words, f"steps={steps}", f"runs={folder}"]
    spike = check_settings(load_config(config, given), at=at, num_windows=num_windows)
    plant, names = _Plant(at, num_windows), [RECOVERED]
    with unheard(*SAID):
        _train(load_config(config, [*given, f"name={RECOVERED}"]), plant, watch)
        events = list(JournalReading(folder / f"{RECOVERED}-001" / NAME))
        spikes = [event for event in events if event.kind == "spike"]
        backs = [event for event in events if event.kind == "rollback"]
        skips = tuple(
            (event.facts["start"], event.facts["stop"]) for event in events if event.kind == "skip"
        )
        told = f"data.skip={[list(pair) for pair in skips]}"
        if backs:
            _train(
                load_config(config, [*given, "spike.action=none", told, f"name={WITHOUT}"]),
                plant,
                watch,
            )
            _train(
                load_config(config, [*given, "spike.action=none", f"name={THROUGH}"]), plant, watch
            )
            names += [WITHOUT, THROUGH]
    figures = {name: _figures(folder / f"{name}-001") for name in names}
    return SpikeCheck(
        steps=steps,
        planted=(at, at + num_windows - 1),
        patience=spike.patience,
        rollbacks=len(backs),
        found_after=spikes[0].step - at + 1 if spikes else None,
        back_to=backs[0].step if backs else None,
        skipped=skips,
        losses={name: list(losses.values())[-1] for name, (losses, _) in figures.items()},
        dev_losses={name: dev for name, (_, dev) in figures.items()},
        difference=_difference(folder, figures[RECOVERED][0], figures[WITHOUT][0])
        if backs
        else None,
        missed=None
        if backs
        else missed_spike(figures[RECOVERED][0], spike, first=at, last=at + num_windows - 1),
    )


def check_settings(config: Config, *, at: int, num_windows: int) -> SpikeConfig:
    """What the watchdog is told; a ValueError where these windows could not be judged by it."""
    steps, spike, last = config.steps, config.spike, at + num_windows - 1
    if not 1 <= at <= last <= steps:
        raise ValueError(
            f"bad windows {at} to {last} are not all among the {steps} steps: lower --at"
        )
    if spike.lower_rate is not None or not spike.rolls_back:
        raise ValueError(
            "the check needs spike.action=rollback, and no spike.lower_rate, which makes another run"
        )
    if at <= (judged := spike.judges_after):
        raise ValueError(
            f"the bad samples begin in step {at}, and the watchdog judges from step {judged + 1} on: give --at and "
            "--steps above that, or a smaller spike.window"
        )
    return spike


def missed_spike(
    losses: Mapping[int, float], config: SpikeConfig, *, first: int, last: int
) -> Missed:
    """What the watchdog held against the losses of these steps, by showing it all of them again."""
    watchdog, limits, rises, row, longest = (
        SpikeWatchdog(config),
        list[Limit](),
        list[float](),
        0,
        0,
    )
    for step, loss in losses.items():
        limit = watchdog.limit()
        if first <= step <= last + config.patience and limit is not None:
            limits.append(limit)
            rises.append(loss - limit.level)
            row = row + 1 if rises[-1] > limit.rise else 0
            longest = max(longest, row)
        watchdog.observe(step, loss)
    return Missed(
        tuple(rises), limits[0], longest, config.threshold, config.least_rise, config.patience
    )


def _rounded_down(value: float) -> float:
    """To two digits, so that it can be typed."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.floor(value / unit) * unit:.2g}")


class _Plant:
    """The same samples in each run, wherever it skips: those that stand at the windows' positions."""

    def __init__(self, at: int, num_windows: int) -> None:
        self.at, self.num_windows = at, num_windows

    def __call__(self, stream: Any, seed: int) -> None:
        size = stream.batch_size
        places = range((self.at - 1) * size, (self.at - 1 + self.num_windows) * size)
        stream.dataset = Planted(
            stream.dataset, frozenset(int(one) for one in stream.order(list(places))), seed
        )


def _train(config: Config, plant: Callable[[Any, int], None], watch: Sequence[Watch]) -> None:
    with open_run(config) as run:
        plant(run.parts.stream, config.seed)
        trained = train_run(run, watch=watch)
    if not trained.report.finished:
        ended = f"after step {trained.report.step} of {config.steps} by {trained.report.ended_by}"
        raise RunError(
            f"the training of {trained.folder.name} was ended {ended}, so nothing was checked"
        )


def _figures(run: Path) -> tuple[dict[int, float], float | None]:
    """The loss of each step as it counts in the end, and the last dev loss."""
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
        first, second = recovered.get(step), without.get(step)
        if first != second:
            return f"the loss of step {step} is {first!r} recovered and {second!r} in the run that never saw the samples"
    first_state, second_state = (
        final_tensors(folder / f"{name}-001") for name in (RECOVERED, WITHOUT)
    )
    for name in sorted(first_state.keys() | second_state.keys()):
        pair = first_state.get(name), second_state.get(name)
        if pair[0] is None or pair[1] is None or not torch.equal(pair[0], pair[1]):
            return f"{name} differs in the final state"
    return None
