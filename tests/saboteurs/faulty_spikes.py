"""Faults of loss-spike: watchdogs, rollbacks, samples and forgotten attempts.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

from ..gates import foreign_loss_spike as foreign
from .saboteurs import planted

FAULTS = [
    planted("loss-spike.in-time", "silent", SpikeWatchdog=foreign.Silent),
    planted("loss-spike.in-time", "mean-of-all", SpikeWatchdog=foreign.MeanOfAll),
    planted("loss-spike.in-time", "deaf-to-nan", SpikeWatchdog=foreign.DeafToNaN),
    planted("loss-spike.in-time", "deaf-to-infinity", SpikeWatchdog=foreign.DeafToInfinity),
    planted("loss-spike.no-false-alarm", "impatient", SpikeWatchdog=foreign.Impatient),
]
