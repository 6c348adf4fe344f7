"""Gates of loss-spike recovery: detection, rollback, resume, and a bound on rollbacks.

Each gate takes the component that it checks, so that its tests can plant a wrong one.

Why so long: the gates of one technique: its watchdog, its recovery, and the loops it watches.

Proof: `python -m pytest tests/gates/test_loss_spike.py`.
"""

import itertools
import json
import math
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..core.rerun import seeded
from ..core.wording import unheard
from ..runs.attach import saving
from ..runs.files import LocalFiles
from ..runs.journal import JournalReading
from ..runs.policy import SavingPolicy
from ..runs.policy_config import SpikeConfig
from ..runs.ranks import RunError
from ..runs.spike import RECOVERIES_FILE_NAME, Recoveries, SpikeNotRecovered, SpikeWatchdog
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
from .two_ranks import by_name, load_function, run_on_ranks
from .verdict import (
    Gate,
    Implementation,
    Judged,
    Takes,
    Trial,
    Verdict,
    as_ours,
    attributes_set,
    first_of,
    judged_by,
    unlike,
    unrefused,
    warnings_read,
)

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
        position = self.after(self.position, windows=0)
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


# Loops of all forms that `saving` watches.

NUM_EPOCHS = 4
BATCHES_PER_EPOCH = 10
WATCHED_SPIKE = {"action": "rollback", "window": 16, "patience": 2, "skip_around": 1, "attempts": 2}


@dataclass
class WatchedLoop:
    """A loop over a loader, which may end and begin again; a bad position has a high loss."""

    folder: Path
    attach: Callable[..., Any]
    bad: Callable[[int], float | None]
    spike: Mapping[str, Any] | None = field(default_factory=lambda: WATCHED_SPIKE)
    microbatches: int = 1
    rollback_every: int = 8
    loader: Callable[[], Any] = lambda: range(BATCHES_PER_EPOCH)
    # Of each process, its exit status, and the positions that it trained on.
    ended: list[tuple[Any, list[int]]] = field(default_factory=list)

    def run(self) -> None:
        """Train until the process ends."""
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        taken: list[int] = []
        options = {"spike": self.spike, "rollback_every": self.rollback_every}
        try:
            with self.attach(model, optimizer, runs=self.folder, **options) as run:
                for epoch in run.epochs(range(NUM_EPOCHS)):
                    for batch in run.batches(self.loader()):
                        position = epoch * BATCHES_PER_EPOCH + int(batch)
                        taken.append(position)
                        if len(taken) % self.microbatches == 0:
                            high = self.bad(position)
                            run.step(loss=2.0 + 0.01 * (position % 5) if high is None else high)
            self.ended.append((None, taken))
        except SystemExit as end:
            self.ended.append((end.code, taken))

    def skipped(self) -> list[tuple[int, int]]:
        return [(one.start, one.stop) for one in Recoveries(LocalFiles(self.folder)).done]


def _between(start: int, stop: int, loss: float = 100.0) -> Callable[[int], float | None]:
    return lambda position: loss if start <= position < stop else None


def _positions(*spans: int) -> list[int]:
    """Return the positions from each first number to the one after it, without the last."""
    every = map(range, spans[::2], spans[1::2])
    return list(itertools.chain.from_iterable(every))


def _told(texts: Sequence[str], *words: str) -> str:
    """Return what is wrong unless one warning has all of these words."""
    for text in texts:
        if all(word in text for word in words):
            return ""
    return f"no warning names {', '.join(words)}: {texts}"


def loader_loop(folder: Path, attach: Callable[..., Any]) -> str:
    """Skip the batches around two spikes, of which the second is two steps after the first.

    The first is found in step 26, on position 25: steps 24 to 27 are skipped, which took positions
    23 to 26. The second attempt skips twice as many on each side, of the positions that are left.
    """
    loop = WatchedLoop(folder, attach, lambda at: 100.0 if at in (24, 25, 30, 31) else None)
    with warnings_read() as texts:
        for _ in range(3):
            loop.run()
    expected = [
        (75, _positions(0, 26)),
        (75, _positions(16, 23, 27, 32)),
        (None, _positions(24, 28, 34, 40)),
    ]
    return first_of(
        (
            unlike("what the processes trained on", loop.ended[:2], expected[:2]),
            unlike("the last process", loop.ended[2][0], None),
            unlike("batches after the skipped", loop.ended[2][1][-6:], _positions(34, 40)),
            unlike("skipped", loop.skipped(), [(23, 27), (28, 34)]),
            _told(
                texts, "Rolled back to rollback/step-00000016", "batches 23 to 26 (attempt 1 of 2)"
            ),
            _told(
                texts, "batches 28 to 33 (attempt 2 of 2)", "start again", "too high since step 27"
            ),
        )
    )


def accumulating_loop(folder: Path, attach: Callable[..., Any]) -> str:
    """Skip whole steps of two batches, and roll back at once from NaN."""
    loop = WatchedLoop(folder, attach, _between(31, 32, math.nan), WATCHED_SPIKE, 2, 4)
    loop.run()
    loop.run()
    # Step 16 has positions 30 and 31; with a step on each side, 28 to 33 are skipped.
    expected = [(75, _positions(0, 32)), (None, _positions(24, 28, 34, 40))]
    return unlike("what the processes trained on", loop.ended, expected)


def stream_loop(folder: Path, attach: Callable[..., Any]) -> str:
    """Skip positions of a stream in this process and the next, at a lower learning rate."""
    model = nn.Linear(1, 1)
    spike = WATCHED_SPIKE | {"lower_rate": 0.5, "lower_rate_steps": 3}
    options = {"runs": folder, "spike": spike, "rollback_every": 8, "journal": True}
    stream = Positions()
    taken = []
    with warnings_read() as texts, attach(model, stream=stream, **options) as run:
        while run.continues(until=30):
            taken.append(stream.take())
            run.learning_rate_factor()
            bad = _between(24, 26)(taken[-1])
            run.step(loss=bad or 2.0 + 0.01 * (taken[-1] % 5))
    other = Positions()
    with attach(nn.Linear(1, 1), stream=other, **options | {"journal": False}) as run:
        left = other.after(22, windows=2)
    skips = [event.facts for event in JournalReading(folder) if event.kind == "skip"]
    words = ("without the 4 samples at positions 23 to 26", "0.5 of the learning rate")
    return first_of(
        (
            unlike("what was trained on", taken, _positions(0, 26, 16, 23, 27, 34)),
            unlike("the samples in the journal", skips[0].get("samples"), [23, 24, 25, 26]),
            unlike("two windows later in the next process", left, 28),
            _told(texts, *words, "until step 29 (attempt 1 of 2)", "Rolled back to rollback/step"),
        )
    )


def warned_loop(folder: Path, attach: Callable[..., Any]) -> str:
    """Only warn of a spike, which is the default, or watch nothing."""
    problems = []
    watches: dict[str, tuple[Mapping[str, Any] | None, int]] = {
        "warn": ({"window": 16}, 1),
        "none": ({"action": "none"}, 0),
        "no settings": (None, 0),
    }
    for name, (spike, num_spikes) in watches.items():
        loop = WatchedLoop(folder / name, attach, _between(24, 29), spike)
        with warnings_read() as texts:
            loop.run()
        problems.append(unlike(f"with {name}", loop.ended, [(None, _positions(0, 40))]))
        problems.append(unlike(f"warnings with {name}", len(texts), num_spikes))
        if num_spikes:
            problems.append(_told(texts, "spike: loss 100", "spike.action=rollback", "step 27"))
    return first_of(problems)


def spike_that_returns(folder: Path, attach: Callable[..., Any]) -> str:
    """End with the skipped positions and the place to resume from, or with no state at all."""
    loop = WatchedLoop(folder / "again", attach, _between(24, 99))
    loop.run()
    loop.run()
    early = WatchedLoop(folder / "early", attach, _between(18, 20), rollback_every=100)
    resume = 'saving(..., resume="before-'
    return first_of(
        (
            unlike("exit statuses", [status for status, _ in loop.ended], [75, 75]),
            unrefused(SpikeNotRecovered, loop.run, "after 2 rollbacks", "23 to 26", resume),
            unrefused(SpikeNotRecovered, early.run, "nothing to go back to", "rollback_every"),
        )
    )


# The loader's own generator, the step before that of a NaN, and whether the order is another one
# after the rollback to step 16, in the second epoch.
SHUFFLED_LOOPS = ((None, 22, True), (torch.Generator(), 22, False), (None, 18, False))


def shuffled_loop(folder: Path, attach: Callable[..., Any]) -> str:
    """Warn that an epoch without a generator of its own is shuffled anew in another order."""
    problems = []
    for number, (own, bad, is_warned) in enumerate(SHUFFLED_LOOPS):
        samples: Any = range(BATCHES_PER_EPOCH)
        loader = DataLoader(samples, batch_size=None, shuffle=True, generator=own)
        count = itertools.count()
        loop = WatchedLoop(
            folder / str(number),
            attach,
            lambda at, count=count, bad=bad: math.nan if next(count) == bad else None,  # type: ignore
            loader=lambda loader=loader: loader,  # type: ignore[misc]
        )
        with warnings_read() as texts:
            loop.run()
        warned = [text for text in texts if "epoch 2 will be shuffled again" in text]
        problems.append(unlike("warnings of another order", len(warned), int(is_warned)))
        problems += [_told(warned, "DataLoader(..., generator=torch.Generator())")] * is_warned
        problems.append(_told(texts, "Rolled back to rollback/step-00000016"))
    return first_of(problems)


def wrong_loops(folder: Path, attach: Callable[..., Any]) -> str:
    """Refuse settings and steps that nothing could watch, and a damaged list of recoveries."""
    model = nn.Linear(1, 1)

    def begun(**spike: Any) -> Callable[[], Any]:
        return lambda: attach(model, runs=folder / "refused", spike=spike)

    def unknown_loss() -> None:
        with attach(model, runs=folder / "silent", spike=WATCHED_SPIKE) as run:
            for _ in run.batches([1]):
                run.step()

    whole = {"spike": 20, "back_to": 16, "start": 3, "stop": 5, "attempt": 1}
    (folder / "damaged").mkdir()
    listed = folder / "damaged" / RECOVERIES_FILE_NAME
    files = LocalFiles(folder / "damaged")
    listed.write_text(json.dumps([whole]))
    problems = [unlike("a list that is whole", len(Recoveries(files).done), 1)]
    listed.write_text(json.dumps([whole, whole | {"spike": 30}, whole | {"spike": 90}]))
    numbers = [Recoveries(files).attempt(at, within=10) for at in (95, 100, 101, 40, 30, 5)]
    problems.append(unlike("the attempts near earlier spikes", numbers, [2, 2, 1, 1, 1, 1]))
    listed.write_text(json.dumps([whole, whole | {"spike": 30}]))
    numbers = [Recoveries(files).attempt(at, within=10) for at in (40, 41, 25, 20)]
    problems.append(unlike("the attempts near two spikes", numbers, [3, 1, 3, 3]))
    slow = whole | {"learning_rate": 0.5, "slower_until": 30}
    listed.write_text(json.dumps([slow, slow | {"slower_until": 40}]))
    factors = [Recoveries(files).factor(done) for done in (15, 16, 29, 30, 39, 40)]
    problems.append(
        unlike("the factors after two spikes", factors, [1.0, 0.25, 0.25, 0.5, 0.5, 1.0])
    )
    with attach(model, runs=folder / "off", spike={"action": "none"}) as run:
        for _ in run.batches([1]):
            run.step()
    wrong = ({"start": -1}, {"stop": "5"}, {"attempt": 1.5}, {"spike": True}, {"other": 1})
    texts = [json.dumps([whole | change]) for change in wrong]
    for text in ("{", "5", "[5]", "[{}]", *texts):
        listed.write_text(text)
        problems.append(unrefused(RunError, lambda: Recoveries(files), str(listed), "restore it"))
    return first_of(
        (
            unrefused(ValueError, begun(action="rollback", lower_rate=0.5), "lower_rate", "stream"),
            unrefused(ValueError, begun(action="back"), "action", "rollback"),
            unrefused(ValueError, begun(patients=3), "patients"),
            unrefused(ValueError, unknown_loss, "loss"),
            *problems,
        )
    )


WATCHED_LOOPS: dict[str, Trial] = {
    "a loader": loader_loop,
    "two microbatches": accumulating_loop,
    "a stream": stream_loop,
    "warnings": warned_loop,
    "a spike that returns": spike_that_returns,
    "shuffled data": shuffled_loop,
    "refused": wrong_loops,
}


def watched_loops(case: Case, *, attach: Callable[..., Any] = saving) -> Verdict:
    """Watch planted loops over loaders and streams, in several processes, and read the warnings."""
    # No sync is needed, because no trial simulates a power cut.
    with seeded(case.seed), attributes_set(os, fsync=lambda descriptor: None):
        return judged_by(
            "loss-spike/loops",
            WATCHED_LOOPS,
            attach,
            hint="skip the positions of the spike and no others, and name them",
        )


# Of which it takes 3; ranks that do not agree wait for each other until then.
SECONDS_OF_RANKS = 60.0


def watched_ranks(case: Case, *, attach: str = f"{saving.__module__}:saving") -> Verdict:
    """Watch a planted loop on two gloo ranks, of which only the second has high losses.

    The ranks are separate processes, so `attach` is passed by name.
    """
    with tempfile.TemporaryDirectory(prefix="loss-spike-ranks-") as folder:
        first, second = run_on_ranks(
            f"{__name__}:_watched_rank", timeout=SECONDS_OF_RANKS, folder=folder, attach=attach
        )
    # As on one process, from the mean of the two losses.
    expected = {
        "ended": [[75, _positions(0, 26)], [None, _positions(16, 23, 27, 40)]],
        "skipped": [[23, 27]],
        "warned": "",
    }
    wrong = [
        unlike(f"{name} of rank {rank}", found.get(name), value)
        for rank, found in enumerate((first, second))
        for name, value in expected.items()
    ]
    problem = first_of(wrong)
    agreed = sum(not one for one in wrong)
    return Verdict(
        "loss-spike/two-ranks",
        not problem,
        f"{agreed} of {len(wrong)} facts as of one process",
        f"{len(wrong)} of {len(wrong)}",
        f"{problem}; judge the mean of all ranks' losses, on all ranks" if problem else "",
    )


def _watched_rank(folder: str, attach: str) -> dict[str, Any]:
    """Train in two processes' time on one rank, whose healthy losses are its own."""
    rank = dist.get_rank()
    level = 1.0 + 2.0 * rank
    loop = WatchedLoop(
        Path(folder),
        load_function(attach),
        lambda at: 100.0 if rank and 24 <= at < 26 else level + 0.01 * (at % 5),
    )
    with warnings_read() as texts:
        for _ in range(2):
            loop.run()
            dist.barrier()
    return {
        "ended": loop.ended,
        "skipped": loop.skipped(),
        # Only the first rank warns.
        "warned": "" if rank else _told(texts, "spike: loss 50.", "batches 23 to 26"),
    }


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
    Gate("loss-spike/loops", watched_loops, {"saving": Takes("attach")}),
    Gate("loss-spike/two-ranks", watched_ranks, {"saving": Takes("attach", by_name)}),
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
