"""Gates of timesteps hold on loops of other forms, and name hidden state.

python -m pytest tests/gates/test_snn_timesteps.py
"""

from dataclasses import replace

import pytest
import torch

from curry_train.gates import snn_timesteps
from curry_train.workloads import Case
from curry_train.workloads.models import SpikingNetwork, snn


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
    verdicts = {gate.name: gate.run(LOOPS[name]) for gate in snn_timesteps.GATES}
    for verdict in verdicts.values():
        assert verdict.passed is not False, verdict
    assert verdicts["snn-timesteps/memory"].passed is (None if name == "one timestep" else True)
