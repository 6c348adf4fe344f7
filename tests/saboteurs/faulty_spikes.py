"""Faults of loss-spike: watchdogs, rollbacks, samples and forgotten attempts.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import copy
from dataclasses import replace

import foreign_loss_spike as foreign
from saboteurs import planted

from curry_train.runs import spike
from curry_train.runs.spike import Recoveries, SpikeWatchdog, recover


def changed(**moved):
    """Plant a rollback after which other positions are skipped."""

    def recover_and_change(*args, recoveries, **facts):
        done = recover(*args, recoveries=recoveries, **facts)
        recovery = done.recovery
        places = {name: getattr(recovery, name) + by for name, by in moved.items()}
        recoveries.done[-1] = replace(recovery, **places)
        return replace(done, recovery=recoveries.done[-1])

    return [(spike, "recover", recover_and_change)]


def kept(read, write):
    """Plant a rollback that keeps something of the spoiled state."""

    def recover_and_keep(*args, state, **facts):
        spoiled = copy.deepcopy(read(state))
        done = recover(*args, state=state, **facts)
        write(state, spoiled)
        return done

    return [(spike, "recover", recover_and_keep)]


def to_the_newest(*args, load, **facts):
    """Load the newest state, which is from after the first bad step."""
    return recover(*args, load=lambda what: load("latest"), **facts)


state_dict = SpikeWatchdog.state_dict
read = spike._read
add = Recoveries.add

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
        patches=[(spike, "recover", to_the_newest)],
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
