"""Faults of loss-spike recovery: alarms, rollbacks, skipped samples, lower rates.

Proof: `python -m pytest tests/gates/test_loss_spike.py`.
"""

import copy
import math
import statistics
from dataclasses import replace

from saboteurs import planted

from curry_train.gates.trials import SpikeComponents
from curry_train.runs import spike
from curry_train.runs.attach import saving
from curry_train.runs.spike import (
    AttachedWatch,
    Recovered,
    Recoveries,
    Recovery,
    Spike,
    SpikeWatchdog,
    recover,
)


class Silent(SpikeWatchdog):
    def observe(self, step, loss):
        return None


class MeanOfAll(SpikeWatchdog):
    """A watchdog whose limit is three standard deviations of all losses, spikes included."""

    seen: list

    def observe(self, step, loss):
        self.seen = [*getattr(self, "seen", []), float(loss)]
        if len(self.seen) < 16 or math.isnan(loss):
            return None
        limit = statistics.fmean(self.seen) + 3 * statistics.pstdev(self.seen)
        return Spike(step, step, loss, None, limit) if loss > limit else None


class DeafToNaN(SpikeWatchdog):
    def observe(self, step, loss):
        return None if math.isnan(loss) else super().observe(step, loss)


class Impatient(SpikeWatchdog):
    def __init__(self, config):
        super().__init__(replace(config, patience=1))


def takes_them_again(spike, config, **facts):
    done = recover(spike, config, **facts)
    return Recovered(done.resumed, replace(done.recovery, start=10**6, stop=10**6 + 1))


def keeps_the_weights(spike, config, *, state, load, **facts):
    spoiled = {name: held.clone() for name, held in state.model.state_dict().items()}
    done = recover(spike, config, state=state, load=load, **facts)
    state.model.load_state_dict(spoiled)
    return done


def to_the_newest(spike, config, *, load, **facts):
    return recover(spike, config, load=lambda what: load(facts["state"].step - 1), **facts)


def keeps_the_optimizer(spike, config, *, state, load, **facts):
    spoiled = copy.deepcopy(state.optimizers[0].state_dict())
    done = recover(spike, config, state=state, load=load, **facts)
    state.optimizers[0].load_state_dict(spoiled)
    return done


def one_window_off(spike, config, *, after, **facts):
    return recover(
        spike, config, after=lambda position, windows: after(position, max(0, windows - 2)), **facts
    )


class InMemory(Recoveries):
    def add(self, recovery, *, write):
        super().add(recovery, write=False)


class OfThisProcess(Recoveries):
    """A recovery that skips the right samples, but counts attempts from one in each process."""

    def attempt(self, step, *, within):
        return 1


class Unrecovered(Recoveries):
    """A recovery that reads the file but skips nothing."""

    def __init__(self, files):
        super().__init__(files)
        self.done = []


def skips_too_many(spike, config, **facts):
    done = recover(spike, config, **facts)
    return Recovered(done.resumed, replace(done.recovery, stop=done.recovery.stop + 200))


def skips_one_too_few(spike, config, **facts):
    done = recover(spike, config, **facts)
    return Recovered(done.resumed, replace(done.recovery, start=done.recovery.start + 1))


def attached(change):
    """Return `saving` whose factor of the learning rate goes through `change(step, factor)`."""

    def attach(*args, **options):
        run = saving(*args, **options)
        factor = run.learning_rate_factor
        run.learning_rate_factor = lambda: change(run.steps, factor())
        return run

    return attach


never_applied = attached(lambda step, factor: 1.0)
never_ended = attached(lambda step, factor: 0.5 if step >= 24 else factor)
from_the_start = attached(lambda step, factor: 0.5)


class NoDrift(SpikeWatchdog):
    def limit(self):
        found = super().limit()
        return found and replace(found, drift=0.0)


class LeastRiseAlways(SpikeWatchdog):
    def limit(self):
        found = super().limit()
        return found and replace(found, by_noise=0.0)


class SuspectsUnsaved(SpikeWatchdog):
    def state_dict(self):
        return super().state_dict() | {"suspects": []}


class StartUnsaved(SpikeWatchdog):
    def state_dict(self):
        return super().state_dict() | {"began": None}


def skips_one_more(self, position):
    """Skip the batch after the skipped ones too."""
    return any(one.start <= position <= one.stop for one in self.recoveries.done)


def forgets_streams(self, state, files):
    """Read the recoveries, and skip nothing in a stream."""
    self._judged = state.step
    self.recoveries = Recoveries(files)


def tells_nothing(self, message, *values):
    """Print no warning."""


def reads_what_is_there(entry):
    return Recovery(**entry)


FAULTS = [
    planted(
        "loss-spike.loops",
        "one-more",
        patches=[(AttachedWatch, "skips", skips_one_more)],
        hint="trained on",
    ),
    planted(
        "loss-spike.loops",
        "streams",
        patches=[(AttachedWatch, "begin", forgets_streams)],
        hint="in the next process",
    ),
    planted(
        "loss-spike.named",
        "silent",
        patches=[(AttachedWatch, "_warn", tells_nothing)],
        hint="no warning names",
    ),
    planted(
        "loss-spike.named",
        "unchecked",
        patches=[(spike, "_checked", reads_what_is_there)],
        hint="RunError",
    ),
    planted("loss-spike.limit", "no-drift", watchdog=NoDrift, hint="drift"),
    planted("loss-spike.limit", "no-noise", watchdog=LeastRiseAlways, hint="threshold"),
    planted("loss-spike.watchdog-state", "suspects", watchdog=SuspectsUnsaved, hint="saved at"),
    planted("loss-spike.watchdog-state", "start", watchdog=StartUnsaved, hint="saved at"),
    planted("loss-spike.in-time", "silent", watchdog=Silent),
    planted("loss-spike.in-time", "mean-of-all", watchdog=MeanOfAll),
    planted("loss-spike.in-time", "deaf-to-nan", watchdog=DeafToNaN),
    planted("loss-spike.no-false-alarm", "impatient", watchdog=Impatient),
    planted(
        "loss-spike.never-saw", "takes-them-again", parts=SpikeComponents(recover=takes_them_again)
    ),
    planted(
        "loss-spike.never-saw",
        "keeps-the-weights",
        parts=SpikeComponents(recover=keeps_the_weights),
    ),
    planted("loss-spike.never-saw", "to-the-newest", parts=SpikeComponents(recover=to_the_newest)),
    planted(
        "loss-spike.never-saw",
        "keeps-the-optimizer",
        parts=SpikeComponents(recover=keeps_the_optimizer),
    ),
    planted(
        "loss-spike.never-saw", "one-window-off", parts=SpikeComponents(recover=one_window_off)
    ),
    planted(
        "loss-spike.skipped",
        "200-too-many",
        parts=SpikeComponents(recover=skips_too_many),
        hint="no others",
    ),
    planted(
        "loss-spike.skipped",
        "one-too-few",
        parts=SpikeComponents(recover=skips_one_too_few),
        hint="no others|came again",
    ),
    planted("loss-spike.resumed", "watchdog-left-out", parts=SpikeComponents(saves_watchdog=False)),
    planted("loss-spike.resumed", "skips-forgotten", parts=SpikeComponents(recoveries=Unrecovered)),
    planted("loss-spike.bounded", "in-memory", parts=SpikeComponents(recoveries=InMemory)),
    planted(
        "loss-spike.bounded", "of-this-process", parts=SpikeComponents(recoveries=OfThisProcess)
    ),
    planted("loss-spike.lower-rate", "never-applied", attach=never_applied, hint="is 1.0, not 0.5"),
    planted("loss-spike.lower-rate", "never-ended", attach=never_ended, hint="is 0.5, not 1.0"),
    planted(
        "loss-spike.lower-rate", "from-the-start", attach=from_the_start, hint="is 0.5, not 1.0"
    ),
]
