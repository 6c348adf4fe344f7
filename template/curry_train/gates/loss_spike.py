"""Gate of loss-spike: spikes are found in the model's own losses, and nothing else.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from ..core.generators import seeded
from ..runs.policy_config import SpikeConfig
from ..runs.spike import SpikeWatchdog
from ..workloads.workload import Case
from .own_training import draw_batch, make_training, take_user_step
from .verdict import Gate, NotApplicable, Outcome

HEALTHY_STEPS = 40
NUM_PLANTED = 16
WATCHDOG_CONFIG = SpikeConfig(window=48)


def find_spikes(
    case: Case,
    *,
    SpikeWatchdog: Callable[[SpikeConfig], Any] = SpikeWatchdog,  # noqa: N803
) -> Outcome:
    """Plant spikes, NaN and infinity at random steps of the model's own losses.

    A spike is at least ten times the spread of the losses before it. A single high loss and the
    losses without a spike must raise no alarm.
    """
    required = (
        f"all within {WATCHDOG_CONFIG.patience} steps, NaN and infinity at once, and nothing else"
    )
    with seeded(case.seed):
        model, optimizer = make_training(case)
        losses = [
            float(take_user_step(case, model, optimizer, draw_batch(case)))
            for _ in range(HEALTHY_STEPS)
        ]
    if not all(map(math.isfinite, losses)):
        raise NotApplicable("the model's own losses are not all finite")

    def first_alarm(losses: Sequence[float]) -> int | None:
        """Return the first step, counted from 1, at which a spike is reported, if any."""
        watched = SpikeWatchdog(WATCHDOG_CONFIG)
        steps = enumerate(losses, start=1)
        return next((step for step, loss in steps if watched.observe(step, loss)), None)

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
            num_false_single += first_alarm(single) is not None
        allowed = patience if math.isfinite(rise) else 1
        alarm = first_alarm([*before, *(loss + rise for loss in losses[first:])])
        num_missed += alarm is None
        num_late += alarm is not None and not first < alarm <= first + allowed

    num_false_healthy = int(first_alarm(losses) is not None)
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
    return measured, required, hint


GATES = (Gate("loss-spike/found", find_spikes, steps=HEALTHY_STEPS),)
