"""Faults of loss-spike: watchdogs, rollbacks, samples and forgotten attempts.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import copy
from dataclasses import replace

import foreign_loss_spike as foreign
from saboteurs import planted

from curry_train.runs import spike
from curry_train.runs.spike import AttachedWatch, SpikeWatchdog

go_back = AttachedWatch.go_back


def changed(**moved):
    """Plant a rollback after which other positions are skipped."""

    def go_back_and_change(self, *args):
        skip = self._data.skip
        self._data.skip = lambda start, stop: None
        recovery = go_back(self, *args)
        places = {name: getattr(recovery, name) + by for name, by in moved.items()}
        self.recoveries.done[-1] = replace(recovery, **places)
        self._data.skip = skip
        skip(self.recoveries.done[-1].start, self.recoveries.done[-1].stop)
        return self.recoveries.done[-1]

    return [(AttachedWatch, "go_back", go_back_and_change)]


def kept(read, write):
    """Plant a rollback that keeps something of the spoiled state."""

    def go_back_and_keep(self, spike, state, load):
        spoiled = copy.deepcopy(read(state))
        recovery = go_back(self, spike, state, load)
        write(state, spoiled)
        return recovery

    return [(AttachedWatch, "go_back", go_back_and_keep)]


def to_the_newest(self, spike, state, load):
    """Load the newest state, which is from after the first bad step."""
    return go_back(self, spike, state, lambda what: load("latest"))


state_dict = SpikeWatchdog.state_dict
read = spike._read

FAULTS = [
    planted("loss-spike.in-time", "silent", SpikeWatchdog=foreign.Silent),
    planted("loss-spike.in-time", "mean-of-all", SpikeWatchdog=foreign.MeanOfAll),
    planted("loss-spike.in-time", "deaf-to-nan", SpikeWatchdog=foreign.DeafToNaN),
    planted("loss-spike.in-time", "deaf-to-infinity", SpikeWatchdog=foreign.DeafToInfinity),
    planted("loss-spike.no-false-alarm", "impatient", SpikeWatchdog=foreign.Impatient),
    planted(
        "loss-spike.never-saw",
        "weights",
        patches=kept(
            lambda state: state.model.state_dict(),
            lambda state, spoiled: state.model.load_state_dict(spoiled),
        ),
        hint="model",
    ),
    planted(
        "loss-spike.never-saw",
        "optimizer",
        patches=kept(
            lambda state: state.optimizers[0].state_dict(),
            lambda state, spoiled: state.optimizers[0].load_state_dict(spoiled),
        ),
    ),
    planted(
        "loss-spike.never-saw",
        "newest",
        patches=[(AttachedWatch, "go_back", to_the_newest)],
        hint="skip once|differs",
    ),
    planted("loss-spike.skipped", "200-too-many", patches=changed(stop=200), hint="skip once"),
    planted("loss-spike.skipped", "one-too-few", patches=changed(start=1), hint="skip once"),
    planted(
        "loss-spike.resumed",
        "suspects-unsaved",
        patches=[(SpikeWatchdog, "state_dict", lambda self: state_dict(self) | {"suspects": []})],
    ),
    planted("loss-spike.resumed", "skips-forgotten", patches=[(spike, "_read", lambda files: [])]),
]
