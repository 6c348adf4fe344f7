"""Tests of the frame of the gates: what a gate ran, what gates share, and their definition.

Run: `python -m pytest tests/gates/test_verdict.py`.
"""

import gc
import weakref

import pytest
import torch
from torch import nn

from curry_train.gates.same_training import bit_difference
from curry_train.gates.verdict import (
    TECHNIQUES,
    Gate,
    Verdict,
    discover,
    drop_shared_results,
    measure_rows,
    shared_result,
    techniques_of,
)
from curry_train.workloads.models import load_workload, transformer
from curry_train.workloads.workload import Case, Workload


def gates_that_run_nothing(gates, cases):
    """Return the gates that ran nothing of the user's on the cases to which they apply."""
    verdicts = {gate.name: [gate.run(case) for case in cases] for gate in gates}
    judged = {
        name: [verdict for verdict in of_gate if verdict.passed is not None]
        for name, of_gate in verdicts.items()
    }
    return [name for name, of_gate in judged.items() if not all(one.ran for one in of_gate)]


@pytest.fixture(scope="module")
def cases():
    # Ranks load a workload by its name.
    return [Case(load_workload(name), batch_size=4) for name in ("transformer", "snn")]


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_every_gate_runs_what_is_of_the_user(technique, cases):
    gates = [gate for gate in discover([technique]) if not gate.thorough]
    assert len(gates) >= 4
    assert gates_that_run_nothing(gates, cases) == []


def test_a_gate_on_planted_inputs_is_found(cases):
    def of_ours(case):
        planted = nn.Linear(2, 2)
        return Verdict("a/planted", bool(planted(torch.ones(1, 2)).numel()), "2", "2")

    def of_user(case):
        case.workload.loss(case.build(), case.batch())
        return Verdict("a/model", True, "1", "1")

    gates = [Gate("a/planted", of_ours), Gate("a/model", of_user)]
    assert gates_that_run_nothing(gates, cases) == ["a/planted"]
    assert gates[1].run(cases[0]).ran == ("model", "loss")
    assert Gate("a/machine", of_ours, machine=True).run(cases[0]).ran == ("machine",)


def test_results_that_gates_share_are_made_once_and_dropped():
    case = Case(transformer(depth=1))
    made = []

    def make():
        made.append(torch.ones(1))
        return made[-1]

    assert shared_result(case, "key", make) is shared_result(case, "key", make)
    assert len(made) == 1
    shared_result(Case(load_workload("mlp")), "key", make)
    assert len(made) == 2
    drop_shared_results()
    shared_result(case, "key", make)
    assert len(made) == 3


def test_nothing_of_a_model_is_alive_after_its_gates():
    built = []

    def build():
        module = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
        built.append(weakref.ref(module[0][0].weight))
        return module

    workload = Workload(
        "watched",
        build=build,
        batch=lambda size: torch.randn(size, 8),
        loss=lambda module, batch: module(batch).square().sum(),
    )
    gates = [gate for gate in discover() if gate.name in ("recompute/parity-full", "bench/same")]
    list(measure_rows([Case(workload)], gates, num_processes=1))
    gc.collect()
    assert len(built) >= 3
    assert [one for one in built if one() is not None] == []


@pytest.mark.parametrize(
    ("found", "expected", "text"),
    [
        ({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([1.0, 2.5])}, "Mismatched"),
        (torch.ones(1, dtype=torch.float64), torch.ones(1), "dtype"),
        ([1, 2], [1, 3], "not equal"),
        ([1], [1, 2], "length"),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), ""),
    ],
)
def test_values_are_compared_to_the_bit(found, expected, text):
    difference = bit_difference(found, expected)
    assert bool(difference) == bool(text)
    assert text in difference


def test_patterns_with_wildcards_find_their_technique():
    assert techniques_of(["sac", "bench/same"]) == ("bench", "sac")
    assert techniques_of(["*parity*"]) == techniques_of([]) == techniques_of(["sack"]) == TECHNIQUES
    assert {gate.name.partition("/")[0] for gate in discover()} == set(TECHNIQUES)
