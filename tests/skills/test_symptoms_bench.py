"""Symptoms of the skill `bench`: reproduced, cured, and not cured by the wrong fix.

python -m pytest tests/skills/test_symptoms_bench.py
"""

import itertools
import random
import statistics
from dataclasses import replace

import pytest
import torch
from planted_machine import PlantedMachine
from symptoms import symptom

from curry_train.bench.report import measure_levers
from curry_train.bench.steps import REFUSED_OUTCOME, Lever, TrainingStep, find_lever
from curry_train.benchmark import compare_steps
from curry_train.core.timing import NO_DIFFERENCE_VERDICT, SLOWER_VERDICT, paired_ratio
from curry_train.gates import grad_accum
from curry_train.workloads.models import mlp, transformer
from curry_train.workloads.workload import Case

SMALL = transformer(depth=2, dim=32, length=16, vocabulary=64)


class Machine:
    """A clock that steps move, times the slowness of the machine at that moment."""

    def __init__(self, slowness):
        self.now, self.slowness = 0.0, itertools.cycle(slowness)

    def step(self, seconds):
        self.now += seconds * next(self.slowness)

    def clock(self):
        return self.now


def figures(case, *levers, **options):
    return measure_levers(
        case, [find_lever(name) for name in levers], **({"rounds": 1, "warmup": 0} | options)
    )


def ticking(*seconds):
    times = itertools.chain.from_iterable((0.0, taken) for taken in itertools.cycle(seconds))
    return lambda: next(times)


@symptom("the same command gives other seconds each time")
def test_a_slower_machine_changes_seconds_but_not_the_ratio():
    runs = []
    for busy in (1.0, 1.7):  # no other process, then one that comes and goes
        machine = Machine([busy] * 4 + [1.0] * 4 + [busy * 1.2] * 2)
        steps = {
            "plain": lambda machine=machine: machine.step(1.0),
            "ours": lambda machine=machine: machine.step(1.3),
        }
        runs.append(
            compare_steps(steps, rounds=20, warmup=0, clock=machine.clock, wait=lambda: None)
        )
    quiet, crowded = runs
    assert crowded["plain"].step.median > 1.2 * quiet["plain"].step.median
    assert crowded["ours"].ratio.median == pytest.approx(quiet["ours"].ratio.median, rel=1e-9)
    machine = Machine(
        [1.0] * 10 + [1.7] * 20
    )  # the wrong fix: one after the other, and the fastest of each
    fastest = []
    for seconds in (1.0, 1.3):
        taken = []
        for _ in range(10):
            start = machine.now
            machine.step(seconds)
            taken.append(machine.now - start)
        fastest.append(min(taken))
    assert fastest[1] / fastest[0] == pytest.approx(1.7 * 1.3)


@symptom("steps of your own loop take no time at all on CUDA")
def test_the_timer_waits_for_a_device_that_returns_early():
    def compared(repeats, **options):
        machine = PlantedMachine(steps=10**6, stall_every=10**6)
        steps = {"once": lambda: machine.launch(1.0), "twice": lambda: machine.launch(2.0)}
        waits = {"wait": machine.wait} if options.get("waits") else {"wait": lambda: None}
        return compare_steps(steps, rounds=repeats, warmup=1, clock=machine.clock, **waits)

    assert compared(8)["twice"].step.median < 0.01
    assert compared(200)["twice"].ratio.median == pytest.approx(1.0)  # the wrong fix: more steps
    assert compared(8, waits=True)["twice"].ratio.median == pytest.approx(2.0, rel=1e-3)


@symptom("the last rounds took 0.5 of the time of the first rounds")
def test_warm_up_steps_are_left_out_and_not_averaged_in():
    cold = [10.0] * 4 + [1.0] * 16  # two configurations, two rounds

    def noted(seconds, **options):
        found = figures(Case(SMALL), "full", clock=ticking(*seconds), **options)
        return found.rows[0].seconds, [note for note in found.notes if "raise --warmup" in note]

    seconds, notes = noted(cold, rounds=6)
    assert notes
    assert statistics.mean(seconds) > 3  # the wrong fix: the mean of all
    once = itertools.chain.from_iterable((0.0, taken) for taken in [*cold, *[1.0] * 100])
    warm = figures(Case(SMALL), "full", rounds=6, warmup=2, clock=lambda: next(once))
    assert warm.rows[0].seconds == [1.0] * 6
    assert not [note for note in warm.notes if "raise --warmup" in note]


@symptom("`no difference seen`, and there must be one")
def test_a_small_difference_needs_more_rounds_to_be_seen():
    draw = random.Random(1)

    def found(rounds):
        plain, ours = ([draw.lognormvariate(0, 0.05) for _ in range(rounds)] for _ in range(2))
        return paired_ratio([1.02 * seconds for seconds in ours], plain)

    few, many = [found(12) for _ in range(20)], found(1000)
    assert statistics.multimode(ratio.verdict for ratio in few) == [NO_DIFFERENCE_VERDICT]
    assert (many.verdict, many.lower < 1.02 < many.upper) == (SLOWER_VERDICT, True)
    medians = [ratio.median for ratio in few]  # the wrong fix: the median, whatever its interval
    assert min(medians) < 1 < 1.04 < max(medians)


@symptom("MFU above 100%")
def test_utilisation_above_100_percent_comes_from_a_wrong_peak():
    found = figures(Case(SMALL), peak=1e6, clock=ticking(0.1)).plain
    assert found.mfu > 1
    assert "give --peak" in found.notes[0]
    right = figures(Case(SMALL), peak=1e12, clock=ticking(0.1)).plain
    assert right.mfu < 1
    assert right.notes == []


@symptom("utilisation rises with recompute, and training gets slower")
def test_recomputed_flops_do_not_count_as_work_of_the_model():
    plain, full = figures(Case(SMALL), "full", peak=1e9, clock=ticking(0.50, 0.55)).rows
    assert full.hfu > plain.hfu  # the wrong fix: the FLOPs that ran, as a sign of a good step
    assert full.mfu < plain.mfu
    assert full.terms_per_second < plain.terms_per_second


def skip_a_block(model, sample):
    model.layers[1].register_forward_hook(lambda module, args, output: args[0])
    return ["layers.1"]


@symptom("`changes the training result` beside a lever")
def test_a_lever_that_skips_work_is_distinguished_from_other_random_numbers():
    fast = Lever("fast", (skip_a_block,))
    for rounds in (1, 4):  # the wrong fix: more steps change nothing, as all are the same
        row = measure_levers(Case(SMALL), [fast], rounds=rounds, warmup=0).rows[1]
        assert "changes the training result" in row.notes[0]
    dropout = transformer(depth=2, dim=32, length=16, vocabulary=64, dropout=0.3)
    row = figures(Case(dropout), "accumulate=2").rows[1]
    assert "unless random numbers" in row.notes[0]
    assert grad_accum.equal_windows(Case(dropout)).passed  # the technique's gate fails


@symptom("a lever is refused: `can't be cut into 4 microbatches`")
def test_accumulation_cuts_the_same_batch_that_the_plain_step_takes():
    row = figures(Case(SMALL, batch_size=2), "accumulate=4").rows[1]
    assert row.outcome == REFUSED_OUTCOME
    assert "--batch-size 4 or more" in row.why
    plain, cut = figures(Case(SMALL, batch_size=4), "accumulate=4").rows
    assert cut.num_terms == plain.num_terms
    larger = TrainingStep(
        Case(SMALL, batch_size=8), find_lever("accumulate=4")
    )  # the wrong fix: four batches for one
    assert larger.num_terms == 2 * plain.num_terms


@symptom("recompute or accumulation leaves the peak as it is")
def test_a_peak_in_the_optimizers_step_is_not_lowered_by_recompute():
    plain, full, twice = figures(Case(mlp()), "full", "full+accumulate=2").rows
    assert full.peak_ratio == 1.0
    assert twice.peak_ratio == pytest.approx(1.0, abs=1e-5)  # the wrong fix: more recompute
    lighter = figures(Case(mlp()), optimizer="sgd").plain
    assert lighter.peak_bytes < 0.6 * plain.peak_bytes
    larger = figures(Case(mlp(), batch_size=512), "full").rows[1]
    assert larger.peak_ratio < 0.9


def test_the_batch_is_the_same_for_all_steps():
    """Run the compared steps, and find one batch in all of them."""
    steps = [TrainingStep(Case(SMALL), find_lever(name)) for name in ("full", "accumulate=2")]
    whole = [torch.cat([each["tokens"] for each in step.window]) for step in steps]
    assert torch.equal(*whole)
    assert torch.equal(whole[0], replace(Case(SMALL)).batch()["tokens"])
