"""Gates of loss-spike: spikes found in the model's own losses, rollbacks, resumes, attempts.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.generators import seeded
from ..core.wording import unheard
from ..runs.attach import saving
from ..runs.policy import SavingPolicy
from ..runs.policy_config import SpikeConfig
from ..runs.spike import SpikeNotRecovered, SpikeWatchdog
from ..workloads.workload import Case
from .own_training import different_names, new_batch, new_training, printed_state, take_user_step
from .verdict import Gate, NotApplicable, Verdict, shared_result

HEALTHY_STEPS = 40
NUM_PLANTED = 16
WATCHDOG_CONFIG = SpikeConfig(window=48)


def find_spikes(
    case: Case,
    *,
    SpikeWatchdog: Callable[[SpikeConfig], Any] = SpikeWatchdog,  # noqa: N803
) -> Verdict:
    """Plant spikes, NaN and infinity at random steps of the model's own losses.

    A spike is at least ten times the spread of the losses before it. A single high loss and the
    losses without a spike must raise no alarm.
    """
    required = (
        f"all within {WATCHDOG_CONFIG.patience} steps, NaN and infinity at once, and nothing else"
    )
    losses = _own_losses(case)
    if not all(map(math.isfinite, losses)):
        raise NotApplicable("the model's own losses are not all finite", required=required)
    generator = random.Random(case.seed)
    patience = WATCHDOG_CONFIG.patience
    num_late = 0
    num_missed = 0
    num_false_single = 0
    for number in range(NUM_PLANTED):
        first = generator.randrange(WATCHDOG_CONFIG.window // 2, HEALTHY_STEPS - patience)
        before = losses[:first]
        rise = generator.uniform(10, 100) * (max(before) - min(before) or 1.0)
        if number % 5 == 0:
            rise = math.inf if number % 2 else math.nan
        else:
            single = list(losses)
            single[first] += rise
            num_false_single += _first_alarm(SpikeWatchdog, single) is not None
        allowed = patience if math.isfinite(rise) else 1
        alarm = _first_alarm(SpikeWatchdog, [*before, *(loss + rise for loss in losses[first:])])
        num_missed += alarm is None
        num_late += alarm is not None and not first < alarm <= first + allowed

    num_false_healthy = int(_first_alarm(SpikeWatchdog, losses) is not None)
    hint = ""
    if num_false_healthy or num_false_single:
        cause = "a healthy step" if num_false_healthy else "a single high loss"
        hint = f"raise spike.threshold or spike.patience: {cause} was reported as a spike"
    elif num_missed:
        hint = (
            "compare a loss with losses before the spike: leave high losses out of the baseline, "
            "and report NaN and infinity at once"
        )
    elif num_late:
        hint = f"raise the alarm within {patience} high losses, and at the first that is not finite"
    measured = (
        f"{NUM_PLANTED - num_missed - num_late} of {NUM_PLANTED} in time, {num_late} late, "
        f"{num_false_healthy + num_false_single} false in {NUM_PLANTED + 1} series"
    )
    return Verdict("loss-spike/found", not hint, measured, required, hint)


def _own_losses(case: Case) -> list[float]:
    """Train for a few healthy steps on new batches and return the losses."""
    with seeded(case.seed):
        model, optimizer = new_training(case, seed=case.seed)
        return [
            float(take_user_step(case, model, optimizer, new_batch(case)))
            for _ in range(HEALTHY_STEPS)
        ]


def _first_alarm(watchdog: Callable[[SpikeConfig], Any], losses: Sequence[float]) -> int | None:
    """Return the first step, counted from 1, at which the watchdog reports a spike, if any."""
    watched = watchdog(WATCHDOG_CONFIG)
    return next(
        (step for step, loss in enumerate(losses, start=1) if watched.observe(step, loss)), None
    )


# A training that rolls back: the watchdog judges losses after 16 of them, so only the last steps
# before a spike train the model. Step n takes position n - 1.

OPTIONS: Mapping[str, Any] = {
    "spike": {"action": "rollback", "window": 16, "patience": 2, "attempts": 2, "skip_around": 1},
    "rollback_every": 3,
    "recovery_every": None,
    "best_k": 0,
}
FIRST_TRAINED = 13
# Its state is saved, though its batch is bad.
FIRST_BAD = 18
NUM_STEPS = 21
# The positions of the bad steps until the alarm, and of one step on each side.
SKIPPED_POSITIONS = (16, 20)


@dataclass
class Positions:
    """A stream of positions, some of which are skipped."""

    position: int = 0
    skipped: set[int] = field(default_factory=set)

    def take(self) -> int:
        """Return the next position to train on."""
        position = self.after(self.position, windows=0)
        self.position = position + 1
        return position

    def after(self, position: int, *, windows: int) -> int:
        while windows or position in self.skipped:
            windows -= position not in self.skipped
            position += 1
        return position

    def skip(self, start: int, stop: int) -> None:
        self.skipped |= set(range(start, stop))


Bad = Callable[[int, int], bool]


@dataclass(frozen=True)
class Ended:
    """The state at the end of a process, and the positions that its rollbacks skip."""

    facts: dict[str, str]
    skipped: list[tuple[int, int]]


def train_with_spikes(
    case: Case,
    folder: Path,
    *,
    bad: Bad,
    until: int = NUM_STEPS,
    goes_on: bool = True,
    skipped: Sequence[int] = (),
) -> Ended:
    """Train in one process of a run; `goes_on` is false to end it at the first rollback.

    `bad(step, position)` returns whether a batch spoils the weights. `skipped` is never trained on.
    """
    with seeded(case.seed), unheard(SpikeWatchdog.__module__, SavingPolicy.__module__):
        model, optimizer = new_training(case, seed=case.seed)
        stream = Positions(skipped=set(skipped))
        with saving(model, optimizer, runs=folder, stream=stream, **OPTIONS) as run:
            num_before = len(run.recoveries.done)
            stands = True
            while (stands or goes_on) and run.continues(until=until):
                position = stream.take()
                step = run.steps + 1
                if step >= FIRST_TRAINED:
                    with seeded(case.seed + 1000 + position):
                        batch = new_batch(case)
                    take_user_step(case, model, optimizer, batch)
                if is_bad := bad(step, position):
                    _spoil(model)
                stands = run.step(loss=100.0 if is_bad else 2.0 + 0.01 * (step % 5))
            facts = printed_state(model, optimizer, step=run.steps, drawn=torch.rand(1))
            return Ended(facts, [(one.start, one.stop) for one in run.recoveries.done[num_before:]])


def _spoil(model: nn.Module) -> None:
    """Change the weights, as a step on bad samples does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.ones_like(parameter))


def _three_samples(step: int, position: int) -> bool:
    return FIRST_BAD - 1 <= position < FIRST_BAD + 2


def check_recovery(case: Case) -> Verdict:
    """Recover from three bad samples; compare with a training that never saw them."""
    return _compare("loss-spike/recovered", case, [{}])


def recover_in_three_processes(case: Case) -> Verdict:
    """End a process at the first bad step, the next after the rollback, and go on in a third."""
    return _compare("loss-spike/resumed", case, [{"until": FIRST_BAD}, {"goes_on": False}, {}])


def _compare(gate: str, case: Case, processes: Sequence[Mapping[str, Any]]) -> Verdict:
    """Train in processes one after the other; compare with a run that skips from its start."""
    start, stop = SKIPPED_POSITIONS
    required = f"one rollback, positions {start} to {stop - 1} skipped, bit-equal"
    skipped = list[tuple[int, int]]()
    with tempfile.TemporaryDirectory(prefix="spike-gate-") as folder:
        try:
            for options in processes:
                ended = train_with_spikes(case, Path(folder), bad=_three_samples, **options)
                skipped += ended.skipped
        except SpikeNotRecovered as error:
            return Verdict(gate, False, "the run gave up", required, str(error))
    straight = shared_result(case, "training without spikes", lambda: _train_without_spike(case))
    expected = straight.facts

    wrong = different_names(ended.facts, expected)
    ranges = ", ".join(f"{start} to {stop - 1}" for start, stop in skipped)
    measured = (
        f"{len(skipped)} rollbacks, positions {ranges or 'none'} skipped, "
        f"{len(expected) - len(wrong)} of {len(expected)} values equal"
    )
    hint = ""
    if not skipped:
        hint = "the spike was not detected: pass the loss of every step, and save the watchdog"
    elif skipped != [SKIPPED_POSITIONS]:
        hint = "skip once the samples of the bad steps and of skip_around steps on each side"
    elif wrong:
        hint = f"{wrong[0]} differs: load the whole state from before the spike"
    return Verdict(gate, not hint, measured, required, hint)


def _train_without_spike(case: Case) -> Ended:
    with tempfile.TemporaryDirectory(prefix="spike-gate-") as folder:
        skipped = range(*SKIPPED_POSITIONS)
        return train_with_spikes(
            case, Path(folder), bad=lambda step, position: False, skipped=skipped
        )


GATES = (
    Gate("loss-spike/found", find_spikes, steps=HEALTHY_STEPS),
    Gate("loss-spike/recovered", check_recovery, machine=True, steps=22),
    Gate("loss-spike/resumed", recover_in_three_processes, machine=True, steps=13),
)
