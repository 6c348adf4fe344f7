"""Tests of the loss-spike gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_loss_spike.py
"""

import copy
import math
import statistics
from dataclasses import replace

import pytest
import torch

from curry_train.gates import loss_spike
from curry_train.gates.trials import SpikeComponents
from curry_train.runs.spike import Recovered, Recoveries, Spike, SpikeWatchdog, recover
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case

CHECKS = {gate.name: gate.check for gate in loss_spike.GATES}
CASE = Case(transformer(dropout=0.1, depth=1))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, check):
    verdict = CHECKS[check](Case(load_workload(name)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("check", CHECKS)
def test_gates_hold_with_dropout_and_bfloat16(check):
    verdict = CHECKS[check](Case(transformer(dropout=0.1, depth=1), dtype=torch.bfloat16))
    assert verdict.passed, verdict


def test_gates_hold_on_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for check in CHECKS.values():
        verdict = check(Case(transformer(depth=1), device=torch.device("cuda")))
        assert verdict.passed, verdict


# Saboteurs of the watchdog: never reports; uses the mean of all losses as limit; misses NaN,
# which is not above any limit; reports a single high loss.


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


@pytest.mark.parametrize("watchdog", [Silent, MeanOfAll, DeafToNaN, Impatient])
def test_found_fails_on(watchdog):
    verdict = loss_spike.found(CASE, watchdog=watchdog)
    assert verdict.passed is False
    assert verdict.hint


# Saboteurs of a recovery: trains on the samples again; keeps the weights; loads the newest
# state, from after the spike; keeps the optimizer state; skips one window too few.


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


@pytest.mark.parametrize(
    "fault",
    [takes_them_again, keeps_the_weights, to_the_newest, keeps_the_optimizer, one_window_off],
)
def test_recovered_fails_on(fault):
    verdict = loss_spike.recovered(CASE, parts=SpikeComponents(recover=fault))
    assert verdict.passed is False
    assert verdict.hint


# Saboteurs of the state passed to the next process: the watchdog starts fresh; skips are lost.


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


@pytest.mark.parametrize(
    "parts",
    [SpikeComponents(saves_watchdog=False), SpikeComponents(recoveries=Unrecovered)],
    ids=["watchdog left out", "skips forgotten"],
)
def test_resumed_fails_on(parts):
    verdict = loss_spike.spike_resumed(CASE, parts=parts)
    assert verdict.passed is False
    assert verdict.hint


@pytest.mark.parametrize("recoveries", [InMemory, OfThisProcess])
def test_bounded_fails_on(recoveries):
    verdict = loss_spike.bounded(CASE, parts=SpikeComponents(recoveries=recoveries))
    assert verdict.passed is False
    assert verdict.hint


def test_a_recovery_without_an_end_is_stopped():
    """Stop, by the gate itself, a run that trains on bad samples again and again."""
    parts = SpikeComponents(recover=takes_them_again, recoveries=OfThisProcess)
    with pytest.raises(ValueError, match="the recovery does not end"):
        loss_spike.recovered(CASE, parts=parts)
