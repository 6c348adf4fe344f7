"""Tests of the frame of the gates: what a gate ran, what gates share, and their definition.

Run: `python -m pytest tests/gates/test_verdict.py`.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from curry_train.gates.verdict import TECHNIQUES, Gate, discover, shared

from ..saboteurs.saboteurs import case_of, verdict_of


def test_what_a_gate_ran_is_counted():
    def of_ours(case):
        nn.Linear(2, 2)(torch.ones(1, 2))
        return "2", "2", ""

    def of_user(case):
        case.workload.loss(case.build(), case.batch())
        return "1", "1", ""

    case = case_of("mlp")
    assert Gate("a/planted", of_ours).run(case).ran == ()
    assert Gate("a/model", of_user).run(case).ran == ("model", "loss")
    assert Gate("a/machine", of_ours, machine=True).run(case).ran == ("machine",)


def test_gates_of_one_case_share_a_result_and_those_of_another_do_not():
    case = case_of("mlp")
    another = replace(case, dtype=torch.bfloat16)
    calls = []
    look = shared(calls.append)
    for one in (case, replace(case), another, case):
        look(one)
    assert calls == [case, another, case]


def test_patterns_with_wildcards_find_their_gates():
    def techniques(*patterns):
        return {gate.name.partition("/")[0] for gate in discover(patterns)}

    assert techniques("sac", "bench/same") == {"bench", "sac"}
    assert techniques("*parity*") == {"memory-plan", "recompute", "sac", "snn-timesteps"}
    assert techniques() == set(TECHNIQUES)
    with pytest.raises(ValueError, match="did you mean 'sac'"):
        discover(["sack"])


def test_a_gate_that_fails_before_the_model_runs_does_not_count_as_one_that_ran_it():
    def fails_in_the_batch(case):
        case.build()
        torch.stack([torch.ones(1), torch.ones(2)])

    verdict = verdict_of(fails_in_the_batch, case_of("mlp"))
    assert (verdict.passed, verdict.ran) == (False, ())
    assert verdict.measured.startswith("raised RuntimeError")
    assert "test_verdict.py, line" in verdict.hint
    assert verdict.hint.endswith("torch.stack([torch.ones(1), torch.ones(2)])")


def test_an_error_without_a_text_is_reported_by_its_line():
    def fails(case):
        raise ValueError

    assert verdict_of(fails, case_of("mlp")).hint.endswith("raise ValueError")
