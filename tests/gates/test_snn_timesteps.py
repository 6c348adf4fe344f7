"""Tests of the timestep gates, on our and others' loops over time, right and wrong.

python -m pytest tests/gates/test_snn_timesteps.py
"""

from dataclasses import replace

import pytest
import torch
from faulty_timesteps import KEEPERS, LONG_SNN, NOISY
from saboteurs import faults

from curry_train.gates import snn_timesteps
from curry_train.gates.implementation import load_implementation
from curry_train.workloads.models import BUILTIN_WORKLOADS, SpikingNetwork, load_workload, snn
from curry_train.workloads.workload import Case

GATES = {gate.name: gate for gate in snn_timesteps.GATES}


@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_loops_over_time_and_do_not_apply_elsewhere(name):
    for gate_name, gate in GATES.items():
        verdict = gate.run(Case(load_workload(name)))
        assert verdict.gate == gate_name
        assert verdict.passed is (True if name == "snn" else None), verdict


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_hold_with_dropout_in_both_precisions(device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    case = Case(NOISY, device=torch.device(device), dtype=dtype)
    for gate in GATES.values():
        verdict = gate.run(case)
        assert verdict.passed is not False, verdict


class ListOfTimesteps(SpikingNetwork):
    """A loop of the user's own: over a list, from a state that the first step makes."""

    def unroll(self, step, inputs, state):
        outputs = []
        for x in inputs:
            output, state = step(x, state)
            outputs.append(output)
        return torch.stack(outputs), state

    def step(self, x, state):
        return super().step(x, self.initial_state(x[:, None]) if state is None else state)

    def forward(self, x):
        outputs, state = self.unroll(self.step, list(x.unbind(1)), None)
        return self.head(outputs.mean(0) + state[-1])


LOOPS = {
    "no blocks": Case(replace(snn(depth=1), build=lambda: SpikingNetwork(64, 1))),
    "two timesteps": Case(snn(timesteps=2)),
    "one timestep": Case(snn(timesteps=1)),
    "blocks that are named": Case(snn(), blocks="layers.*"),
    "a list": Case(replace(snn(), build=lambda: ListOfTimesteps(64, 3))),
}


@pytest.mark.parametrize("name", LOOPS)
def test_gates_hold_on_loops_of_other_forms(name):
    verdicts = {gate.name: gate.run(LOOPS[name]) for gate in GATES.values()}
    for verdict in verdicts.values():
        assert verdict.passed is not False, verdict
    assert verdicts["snn-timesteps/outputs"].passed
    assert verdicts["snn-timesteps/memory"].passed is (None if "timestep" in name else True)


@pytest.mark.parametrize("workload", [snn(), LONG_SNN, NOISY], ids=["snn", "long", "noisy"])
@pytest.mark.parametrize(("function", "has_levels"), [("in_chunks", 0), ("in_nested_chunks", 1)])
def test_a_loop_in_chunks_by_torchs_checkpoint_passes(function, has_levels, workload):
    given = [load_implementation(f"checkpoint_timesteps=foreign_snn_timesteps:{function}")]
    for name, gate in GATES.items():
        verdict = gate.run(Case(workload), given)
        if name.endswith("hidden-state") or (name.endswith("nested") and not has_levels):
            assert verdict.passed is None, verdict
        else:
            assert verdict.passed, verdict


@pytest.mark.parametrize("check", ["memory", "parity"])
def test_a_model_with_hidden_state_fails_with_its_name(check):
    verdict = GATES[f"snn-timesteps/{check}"].run(Case(KEEPERS))
    assert verdict.passed is False
    assert "layers.1 (Keeper) keeps state" in verdict.hint, verdict
    assert "'v'" in verdict.hint


@pytest.mark.parametrize("saboteur", faults("faulty_timesteps"), ids=str)
def test_gate_catches(saboteur):
    saboteur.check()
