"""A planted spike is found in time and nothing else is; the run that went back is the one that never saw the samples.

Each gate takes the part that it is about, so that its tests can plant a wrong one.
Proof: `python -m pytest template/tests/test_loss_spike.py`.
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

from ..core.untouched import seeded
from ..core.verdict import Gate, Verdict
from ..core.workload import Case
from ..runs.spike import SpikeWatchdog
from ..runs.spike_config import SpikeConfig
from ..runs.spike_recovery import SpikeNotRecovered
from ..runs.spike_trial import CONFIG, FIRST_BAD, SAVING, SOUND, SpikeParts, Trial
from ..runs.trial import same

HEALTHY = 40  # steps of the model whose losses are looked at
NUM_PLANTED = 16
WATCHED = SpikeConfig(window=48)


def found(case: Case, *, watchdog: Callable[[SpikeConfig], Any] = SpikeWatchdog) -> Verdict:
    """Rises of three times the spread of the model's own losses and more, and NaN, put into them at random steps."""
    losses, generator = _own_losses(case), random.Random(case.seed)
    patience = WATCHED.patience
    late, noisy = 0, 0
    for number in range(NUM_PLANTED):
        first = generator.randrange(WATCHED.window // 2, HEALTHY - patience)
        before = losses[:first]
        rise = (
            math.nan
            if number % 5 == 0
            else generator.uniform(3, 30) * (max(before) - min(before) or 1.0)
        )
        allowed = 1 if math.isnan(rise) else patience
        seen = _first_alarm(watchdog, [*before, *(loss + rise for loss in losses[first:])])
        late += seen is None or not first < seen <= first + allowed
        alone = [loss + (abs(rise) if place == first else 0) for place, loss in enumerate(losses)]
        noisy += not math.isnan(rise) and _first_alarm(watchdog, alone) is not None
    alarms = int(_first_alarm(watchdog, losses) is not None)
    gate, required = (
        "loss-spike/found",
        f"all within {patience} steps, NaN at once, and nothing else",
    )
    hint = ""
    if alarms or noisy:
        taken = "a healthy step" if alarms else "one high loss"
        hint = f"raise spike.threshold or spike.patience: {taken} was taken for a spike"
    elif late:
        hint = "a spike has to be judged by losses from before it: leave what is too high out of the baseline"
    measured = f"{NUM_PLANTED - late} of {NUM_PLANTED} in time, {alarms + noisy} false in {NUM_PLANTED + 1} series"
    return Verdict(gate, not hint, measured, required, hint)


def recovered(case: Case, *, parts: SpikeParts = SOUND) -> Verdict:
    """Three windows of bad samples, against a run that passes over the same positions from its start."""
    with tempfile.TemporaryDirectory(prefix="spike-gate-") as folder:
        trial = Trial(case, Path(folder, "spiked"), parts, bad=_three_windows)
        return _compared("loss-spike/recovered", case, Path(folder), [trial], [trial.run])


def resumed(case: Case, *, parts: SpikeParts = SOUND) -> Verdict:
    """The same by a process that ends at the first bad step, one that ends as it went back, and one that goes on."""
    with tempfile.TemporaryDirectory(prefix="spike-gate-") as folder:
        lives = [Trial(case, Path(folder, "spiked"), parts, bad=_three_windows) for _ in range(3)]
        runs = [lambda: lives[0].run(FIRST_BAD), lambda: lives[1].run(through=False), lives[2].run]
        return _compared("loss-spike/resumed", case, Path(folder), lives, runs)


def bounded(case: Case, *, parts: SpikeParts = SOUND) -> Verdict:
    """A spike that comes again whatever is skipped, in a process that is started again after each rollback."""
    gate, most = "loss-spike/bounded", CONFIG.attempts
    required = f"{most} rollbacks, then an error that says where to go on"
    rollbacks, said = 0, ""
    with tempfile.TemporaryDirectory(prefix="spike-gate-") as folder:
        while rollbacks <= most and not said:
            trial = Trial(case, Path(folder), parts, bad=lambda step, position: step >= FIRST_BAD)
            try:
                trial.run(through=False)
            except SpikeNotRecovered as error:
                said = str(error)
            if not trial.recovered and not said:
                break
            rollbacks += len(trial.recovered)
    told = "an error that says where" if "--resume" in said else "an error" if said else "no error"
    hint = (
        ""
        if rollbacks == most and "--resume" in said
        else "count the attempts at one place, on the disk"
    )
    return Verdict(gate, not hint, f"{rollbacks} rollbacks, then {told}", required, hint)


GATES = (
    Gate("loss-spike/found", found),
    Gate("loss-spike/recovered", recovered),
    Gate("loss-spike/resumed", resumed),
    Gate("loss-spike/bounded", bounded),
)


def _three_windows(step: int, position: int) -> bool:
    """A window is one position here, and the first step takes position 0."""
    return FIRST_BAD - 1 <= position < FIRST_BAD + 2


def _compared(
    gate: str,
    case: Case,
    folder: Path,
    lives: Sequence[Trial],
    runs: Sequence[Callable[[], dict[str, Tensor]]],
) -> Verdict:
    """The lives of one run in turn; what is left in the end, against a run without bad samples that skips alike."""
    required = "one rollback, every tensor equal to the bit"
    try:
        for run in runs:
            tensors = run()
    except SpikeNotRecovered as error:
        return Verdict(gate, False, "the run gave up", required, str(error))
    done = [each.recovery for life in lives for each in life.recovered]
    if not done:
        return Verdict(
            gate,
            False,
            "no rollback",
            required,
            "the spike was not found: watch the loss of each step",
        )
    skipped = tuple((each.start, each.stop) for each in done)
    never = replace(SAVING, rollback_every=None)
    sound = Trial(
        case,
        folder / "straight",
        SOUND,
        bad=lambda step, position: False,
        skipped=skipped,
        saving=never,
    )
    straight = sound.run()
    wrong = [name for name, held in straight.items() if not same(held, tensors.get(name))]
    measured = (
        f"{len(done)} rollbacks, {len(straight) - len(wrong)} of {len(straight)} tensors equal"
    )
    hint = ""
    if wrong:
        hint = f"{wrong[0]} differs: load the whole state of before the spike, and skip its samples by position"
    elif len(done) != 1:
        hint = "it came again: skip the samples, and keep the watchdog in the checkpoint"
    return Verdict(gate, not hint, measured, required, hint)


def _own_losses(case: Case) -> list[float]:
    """Of a short healthy training on new batches."""
    with seeded(case.seed):
        model = case.build()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        losses = []
        for _ in range(HEALTHY):
            loss = case.workload.mean_loss(model, case.place(case.workload.batch(case.batch_size)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


def _first_alarm(watchdog: Callable[[SpikeConfig], Any], losses: Sequence[float]) -> int | None:
    """The step, which count from 1, at which it is told."""
    watched = watchdog(WATCHED)
    return next(
        (step for step, loss in enumerate(losses, start=1) if watched.observe(step, loss)), None
    )
