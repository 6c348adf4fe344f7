"""Gates of loss-spike recovery: detection, rollback, resume, and a bound on rollbacks.

Each gate takes the component that it checks, so that its tests can plant a wrong one.

Proof: `python -m pytest tests/gates/test_loss_spike.py`.
"""

import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.rerun import seeded
from ..runs.policy_config import SpikeConfig
from ..runs.spike import SpikeNotRecovered, SpikeWatchdog
from ..workloads.workload import Case
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
)
COMPONENT_TAKES = {
    "SpikeWatchdog": _component("watchdog"),
    "recover": _component("recover"),
    "Recoveries": _component("recoveries"),
}

GATES = (
    Gate("loss-spike/found", found, {"SpikeWatchdog": Takes("watchdog")}),
    Gate("loss-spike/recovered", recovered, COMPONENT_TAKES),
    Gate("loss-spike/resumed", spike_resumed, COMPONENT_TAKES),
    Gate("loss-spike/bounded", bounded, COMPONENT_TAKES),
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

    That run has no bad samples and skips the same positions from its start.
    """
    required = "one rollback, every tensor equal to the bit"
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
        skipped=tuple((recovery.start, recovery.stop) for recovery in recoveries),
        saving=replace(TRIAL_POLICY_CONFIG, rollback_every=None),
    )
    expected = reference.run()
    wrong = [name for name, held in expected.items() if not same_bits(held, tensors.get(name))]

    num_equal = len(expected) - len(wrong)
    measured = f"{len(recoveries)} rollbacks, {num_equal} of {len(expected)} tensors equal"
    hint = ""
    if wrong:
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
