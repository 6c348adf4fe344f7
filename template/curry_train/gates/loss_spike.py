"""Gates of loss-spike recovery: detection, rollback, resume, and a bound on rollbacks.

Each gate takes the component that it checks, so that its tests can plant a wrong one.

Proof: `python -m pytest tests/gates/test_loss_spike.py`.
"""

import json
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.rerun import seeded
from ..core.wording import unheard
from ..runs.attach import saving
from ..runs.policy import SavingPolicy
from ..runs.policy_config import SpikeConfig
from ..runs.spike import Recoveries, SpikeNotRecovered, SpikeWatchdog
from ..workloads.workload import Case
from .saved_state import planted_training
from .trials import (
    FIRST_BAD,
    SOUND_SPIKE,
    TRIAL_POLICY_CONFIG,
    TRIAL_SPIKE_CONFIG,
    SpikeComponents,
    StoreTrial,
    same_bits,
)
from .verdict import Gate, Implementation, Judged, Takes, Verdict, as_ours

HEALTHY_STEPS = 40  # steps of healthy training
NUM_PLANTED = 16
WATCHDOG_CONFIG = SpikeConfig(window=48)


def found(case: Case, *, watchdog: Callable[[SpikeConfig], Any] = SpikeWatchdog) -> Verdict:
    """Plant spikes and NaN at random steps of the model's own losses.

    A spike is at least three times the spread of the losses before it. A single high loss and the
    losses without a spike must raise no alarm.
    """
    losses = _own_losses(case)
    generator = random.Random(case.seed)
    patience = WATCHDOG_CONFIG.patience
    num_late = 0
    num_false_single = 0
    for number in range(NUM_PLANTED):
        first = generator.randrange(WATCHDOG_CONFIG.window // 2, HEALTHY_STEPS - patience)
        before = losses[:first]
        if number % 5 == 0:
            rise = math.nan
        else:
            rise = generator.uniform(3, 30) * (max(before) - min(before) or 1.0)

        allowed = 1 if math.isnan(rise) else patience
        alarm = _first_alarm(watchdog, [*before, *(loss + rise for loss in losses[first:])])
        num_late += alarm is None or not first < alarm <= first + allowed

        single = list(losses)
        single[first] += abs(rise)
        num_false_single += not math.isnan(rise) and _first_alarm(watchdog, single) is not None

    num_false_healthy = int(_first_alarm(watchdog, losses) is not None)
    hint = ""
    if num_false_healthy or num_false_single:
        cause = "a healthy step" if num_false_healthy else "a single high loss"
        hint = f"raise spike.threshold or spike.patience: {cause} was reported as a spike"
    elif num_late:
        hint = "compare a loss with losses before the spike: leave high losses out of the baseline"
    measured = (
        f"{NUM_PLANTED - num_late} of {NUM_PLANTED} in time, "
        f"{num_false_healthy + num_false_single} false in {NUM_PLANTED + 1} series"
    )
    required = f"all within {patience} steps, NaN at once, and nothing else"
    return Verdict("loss-spike/found", not hint, measured, required, hint)


# Series of losses whose limit follows from the configuration by hand.

LIMIT_CONFIG = SpikeConfig(window=32, patience=1, threshold=6.0, least_rise=0.1)
SERIES_LENGTH = 48


@dataclass(frozen=True)
class WatchedSeries:
    """Losses from step 1 on, and of each expected spike the first step and that of the alarm."""

    losses: Sequence[float]
    spikes: Sequence[tuple[int, int]]
    config: SpikeConfig = LIMIT_CONFIG
    # Steps that are left out before the last loss.
    gap: int = 0


def _around(losses: Sequence[float], limit: float) -> dict[str, WatchedSeries]:
    """Return two series: one ends just below the limit, and one just above it."""
    last = len(losses) + 1
    return {
        "below": WatchedSeries([*losses, limit - 1e-3], []),
        "above": WatchedSeries([*losses, limit + 1e-3], [(last, last)]),
    }


def _limits() -> dict[str, dict[str, WatchedSeries]]:
    flat = [2.0] * SERIES_LENGTH
    rising = [2.0 + 0.01 * step for step in range(SERIES_LENGTH)]
    patient = replace(LIMIT_CONFIG, patience=3)
    end = SERIES_LENGTH
    return {
        # A tenth of the level, since the loss has fallen by more.
        "least_rise": _around([10.0] * 16 + flat, 2.2),
        "least_rise of the fall": _around([2.5] * 16 + flat, 2.05),
        # Six standard deviations, each 1.4826 times the median deviation of 0.01.
        "threshold": _around([2.01, 1.99] * (SERIES_LENGTH // 2), 2.0 + 6 * 1.4826 * 0.01),
        # The median of the last 16 losses, and a slope of 0.01 over 16 steps.
        "drift": _around(rising, rising[-1] - 0.075 + 0.16),
        "others": {
            "too early": WatchedSeries([2.0] * 8 + [1e9, 2.0], []),
            "NaN early": WatchedSeries([2.0] * 3 + [math.nan], [(4, 4)]),
            "NaN twice": WatchedSeries(
                [*flat, math.nan, math.nan, 2.0, math.inf],
                [(end + 1, end + 1), (end + 4, end + 4)],
            ),
            "patience": WatchedSeries([*flat, 9.0, 9.0, 9.0], [(end + 1, end + 3)], patient),
            "interrupted": WatchedSeries([*flat, 9.0, 9.0, 2.0, 9.0, 9.0], [], patient),
            "off for a while": WatchedSeries([*flat, 9.0, 9.0, 9.0], [], patient, gap=100),
        },
    }


def limits(case: Case, *, watchdog: Callable[[SpikeConfig], Any] = SpikeWatchdog) -> Verdict:
    """Compare the alarms on planted series with the limits that the configuration gives by hand.

    Each series is watched twice: by one watchdog, and by one that is saved and loaded after each
    step.
    """
    wrong = []
    num_series = 0
    for name, of_limit in _limits().items():
        for end, series in of_limit.items():
            for is_saved in (False, True):
                num_series += 1
                if _alarms(watchdog, series, is_saved=is_saved) != series.spikes:
                    wrong.append(f"{name}, {end}{', saved at each step' if is_saved else ''}")
    measured = f"{num_series - len(wrong)} of {num_series} series right"
    hint = ""
    if wrong:
        hint = f"{wrong[0]}: level + drift + the larger of threshold and least_rise is the limit"
    return Verdict("loss-spike/limit", not wrong, measured, f"{num_series} right", hint)


def _alarms(
    watchdog: Callable[[SpikeConfig], Any], series: WatchedSeries, *, is_saved: bool
) -> list[tuple[int, int]]:
    watched = watchdog(series.config)
    found = []
    for step, loss in enumerate(series.losses, start=1):
        if spike := watched.observe(step + series.gap * (step == len(series.losses)), loss):
            found.append((spike.first, spike.step))
        if is_saved:
            state = json.loads(json.dumps(watched.state_dict()))
            watched = watchdog(series.config)
            watched.load_state_dict(state)
    return found


def recovered(case: Case, *, parts: SpikeComponents = SOUND_SPIKE) -> Verdict:
    """Recover from three windows of bad samples; compare with a run that never trained on them."""
    with tempfile.TemporaryDirectory(prefix="spike-gate-") as folder:
        trial = StoreTrial(case, Path(folder, "spiked"), parts, bad=_three_windows)
        return _compared("loss-spike/recovered", case, Path(folder), [trial], [trial.run])


def spike_resumed(case: Case, *, parts: SpikeComponents = SOUND_SPIKE) -> Verdict:
    """Recover from bad samples in a run of three processes.

    The first ends at the first bad step, the second after the rollback, and the third continues.
    """
    with tempfile.TemporaryDirectory(prefix="spike-gate-") as folder:
        lives = [
            StoreTrial(case, Path(folder, "spiked"), parts, bad=_three_windows) for _ in range(3)
        ]
        runs = [lambda: lives[0].run(FIRST_BAD), lambda: lives[1].run(through=False), lives[2].run]
        return _compared("loss-spike/resumed", case, Path(folder), lives, runs)


def bounded(case: Case, *, parts: SpikeComponents = SOUND_SPIKE) -> Verdict:
    """Limit the rollbacks for a spike that returns whatever is skipped.

    The process is restarted after each rollback.
    """
    gate = "loss-spike/bounded"
    most = TRIAL_SPIKE_CONFIG.attempts
    required = f"{most} rollbacks, then an error with the place to resume from"
    num_rollbacks = 0
    message = ""
    with tempfile.TemporaryDirectory(prefix="spike-gate-") as folder:
        while num_rollbacks <= most and not message:
            trial = StoreTrial(
                case, Path(folder), parts, bad=lambda step, position: step >= FIRST_BAD
            )
            try:
                trial.run(through=False)
            except SpikeNotRecovered as error:
                message = str(error)
            if not trial.recovered and not message:
                break
            num_rollbacks += len(trial.recovered)

    if "--resume" in message:
        outcome = "an error with the place to resume from"
    elif message:
        outcome = "an error"
    else:
        outcome = "no error"
    hint = ""
    if num_rollbacks != most or "--resume" not in message:
        hint = "count the attempts in one place, on disk"
    return Verdict(gate, not hint, f"{num_rollbacks} rollbacks, then {outcome}", required, hint)


# A run that lowers the learning rate after a rollback: the bad position, and the steps of the run.
BAD_POSITION = 24
LOWERED_STEPS = 30
LOWER_RATE = 0.5
LOWER_RATE_STEPS = 3


class Positions:
    """A stream of positions, some of which are skipped."""

    def __init__(self) -> None:
        self.position = 0
        self._skipped: set[int] = set()

    def take(self) -> int:
        """Return the next position to train on."""
        position = self.after(self.position, windows=1) - 1
        self.position = position + 1
        return position

    def after(self, position: int, *, windows: int) -> int:
        while windows or position in self._skipped:
            windows -= position not in self._skipped
            position += 1
        return position

    def skip(self, start: int, stop: int) -> None:
        self._skipped |= set(range(start, stop))

    def samples_between(self, start: int, stop: int) -> list[int]:
        return list(range(start, stop))


def lowered_rate(case: Case, *, attach: Callable[..., Any] = saving) -> Verdict:
    """Train with `lower_rate` through a planted spike, and record the factor of each step.

    It has to be 1 until the rollback, `lower_rate` until `lower_rate_steps` after the spike, and 1
    again.
    """
    gate = "loss-spike/lower-rate"
    spike = {
        "action": "rollback",
        "window": 16,
        "patience": 1,
        "skip_around": 0,
        "lower_rate": LOWER_RATE,
        "lower_rate_steps": LOWER_RATE_STEPS,
    }
    factors: dict[int, float] = {}
    num_rollbacks = 0
    with planted_training(case) as (state, folder), unheard(SavingPolicy.__module__):
        optimizer = state.optimizers[0]
        stream = Positions()
        options = {"runs": folder / "run", "stream": stream, "spike": spike, "rollback_every": 8}
        with attach(state.model, optimizer, **options) as run, unheard(Recoveries.__module__):
            while run.continues(until=LOWERED_STEPS):
                position = stream.take()
                step = run.steps + 1
                factors[step] = run.learning_rate_factor()
                loss = 100.0 if position == BAD_POSITION else 2.0 + 0.01 * (position % 5)
                num_rollbacks += not run.step(loss=loss)

    # Step n takes position n - 1. The spike's step is trained again, on the position after it.
    spiked = BAD_POSITION + 1
    back_to = BAD_POSITION // 8 * 8
    expected = {
        step: LOWER_RATE if back_to < step <= spiked + LOWER_RATE_STEPS else 1.0
        for step in range(1, LOWERED_STEPS + 1)
    }
    wrong = [step for step in expected if factors.get(step) != expected[step]]
    num_lower = sum(factor == LOWER_RATE for factor in factors.values())
    hint = ""
    if num_rollbacks != 1:
        hint = "the planted spike has to be rolled back once"
    elif wrong:
        hint = (
            f"the factor of step {wrong[0]} is {factors.get(wrong[0])}, not {expected[wrong[0]]}: "
            "lower the rate from the rollback until lower_rate_steps after the spike"
        )
    measured = f"{num_rollbacks} rollbacks, {num_lower} of {len(factors)} steps at {LOWER_RATE:g}"
    num_expected = sum(factor == LOWER_RATE for factor in expected.values())
    required = f"1 rollback, {num_expected} of {LOWERED_STEPS} steps at {LOWER_RATE:g}"
    return Verdict(gate, not hint, measured, required, hint)


def _component(name: str) -> Takes:
    """Take one component of the recovery, beside those that were taken before."""

    def adapt(given: Implementation, present: Any) -> SpikeComponents:
        value = as_ours(given.value, SpikeNotRecovered) if name == "recover" else given.value
        return replace(present or SOUND_SPIKE, **{name: value})

    return Takes("parts", adapt)


JUDGED_CALLABLES = (
    Judged("SpikeWatchdog", lambda config: None),
    Judged("recover", lambda spike, config, *, state, load, after, recoveries: None),
    Judged("Recoveries", lambda files: None),
    Judged("saving", lambda model, optimizer, *, runs, stream, spike, rollback_every: None),
)
COMPONENT_TAKES = {
    "SpikeWatchdog": _component("watchdog"),
    "recover": _component("recover"),
    "Recoveries": _component("recoveries"),
}

GATES = (
    Gate("loss-spike/found", found, {"SpikeWatchdog": Takes("watchdog")}),
    Gate("loss-spike/limit", limits, {"SpikeWatchdog": Takes("watchdog")}),
    Gate("loss-spike/recovered", recovered, COMPONENT_TAKES),
    Gate("loss-spike/resumed", spike_resumed, COMPONENT_TAKES),
    Gate("loss-spike/bounded", bounded, COMPONENT_TAKES),
    Gate("loss-spike/lower-rate", lowered_rate, {"saving": Takes("attach")}),
)


# The positions to skip, by the configuration alone: step n takes position n - 1.
SKIPPED_POSITIONS = (
    FIRST_BAD - 1 - TRIAL_SPIKE_CONFIG.skip_around,
    FIRST_BAD - 1 + TRIAL_SPIKE_CONFIG.patience + TRIAL_SPIKE_CONFIG.skip_around,
)


def _three_windows(step: int, position: int) -> bool:
    """Return whether a position is bad; a window is one position, and step 1 takes the first."""
    return FIRST_BAD - 1 <= position < FIRST_BAD + 2


def _compared(
    gate: str,
    case: Case,
    folder: Path,
    lives: Sequence[StoreTrial],
    runs: Sequence[Callable[[], dict[str, Tensor]]],
) -> Verdict:
    """Run the processes of one run in turn and compare its last state with a run without spikes.

    That run has no bad samples, and skips from its start the positions that the configuration
    names: those of the bad steps until the alarm, and `skip_around` steps on each side.
    """
    start, stop = SKIPPED_POSITIONS
    required = f"one rollback, positions {start} to {stop - 1} skipped, bit-equal"
    try:
        for run in runs:
            tensors = run()
    except SpikeNotRecovered as error:
        return Verdict(gate, False, "the run gave up", required, str(error))
    recoveries = [recovered.recovery for life in lives for recovered in life.recovered]
    if not recoveries:
        hint = "the spike was not detected: pass the loss of every step to the watchdog"
        return Verdict(gate, False, "no rollback", required, hint)

    reference = StoreTrial(
        case,
        folder / "straight",
        SOUND_SPIKE,
        bad=lambda step, position: False,
        skipped=(SKIPPED_POSITIONS,),
        saving=replace(TRIAL_POLICY_CONFIG, rollback_every=None),
    )
    expected = reference.run()
    wrong = [name for name, held in expected.items() if not same_bits(held, tensors.get(name))]

    num_equal = len(expected) - len(wrong)
    skipped = [(recovery.start, recovery.stop) for recovery in recoveries]
    ranges = ", ".join(f"{start} to {stop - 1}" for start, stop in skipped)
    measured = f"{len(recoveries)} rollbacks, {ranges} skipped, "
    measured += f"{num_equal} of {len(expected)} tensors equal"
    hint = ""
    if len(skipped) == 1 and skipped[0] != SKIPPED_POSITIONS:
        hint = "skip the samples of the bad steps and of skip_around steps on each side, no others"
    elif wrong:
        hint = (
            f"{wrong[0]} differs: load the whole state from before the spike, and skip its samples "
            "by position"
        )
    elif len(recoveries) != 1:
        hint = "the spike came again: skip its samples, and save the watchdog in the checkpoint"
    return Verdict(gate, not hint, measured, required, hint)


def _own_losses(case: Case) -> list[float]:
    """Train for a few healthy steps on new batches and return the losses."""
    with seeded(case.seed):
        model = case.build()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        losses = []
        for _ in range(HEALTHY_STEPS):
            loss = case.workload.mean_loss(model, case.place(case.workload.batch(case.batch_size)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


def _first_alarm(watchdog: Callable[[SpikeConfig], Any], losses: Sequence[float]) -> int | None:
    """Return the first step, counted from 1, at which the watchdog reports a spike, if any."""
    watched = watchdog(WATCHDOG_CONFIG)
    return next(
        (step for step, loss in enumerate(losses, start=1) if watched.observe(step, loss)), None
    )
