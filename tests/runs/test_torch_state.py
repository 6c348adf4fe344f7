"""What torch's own state dicts do not restore is why ours exist; most other trainings they do.

A case that passes with a new torch is one that `curry_train.runs.state` need no longer handle.

python -m pytest -m long tests/runs/test_torch_state.py
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import LBFGS, SGD, AdamW

from ..store_models import WIDTH, equal, network, tensors_of, train, unscheduled

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:.*_get_pg_default_device"),
]


class Unused(nn.Sequential):
    """A network with a layer that gets no gradient."""

    def __init__(self):
        super().__init__(network(), nn.Linear(2, 2))

    def forward(self, x):
        return self[0](x)


class Quantised(nn.Linear):
    """A layer whose state has an entry that is no attribute, as of a quantised weight."""

    def __init__(self):
        super().__init__(WIDTH, 4)
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({f"{prefix}weight.scale": torch.ones(1)})
        )


class OwnKey(SGD):
    """An optimizer with state of no parameter."""

    def step(self, closure=None):
        self.state["calls"] = self.state.get("calls", 0) + 1
        return super().step(closure)


# Model, optimizer, steps before the save, and the error; False where not all of it is restored.
CASES = {
    "no state yet": (network, AdamW, 0, False),
    "parameters without gradient": (Unused, AdamW, 2, dcp.api.CheckpointException),
    "quantised": (lambda: nn.Sequential(Quantised()), AdamW, 2, AttributeError),
    "state of no parameter": (network, OwnKey, 2, KeyError),
    "closure": (network, LBFGS, 0, TypeError),
}


@pytest.mark.parametrize("name", CASES)
def test_torch_does_not_restore_it(name, tmp_path):
    build, optimizer, steps, outcome = CASES[name]

    def restored():
        state, other = (unscheduled(seed, optimizer, build) for seed in (0, 1))
        train(state, steps)
        expected = tensors_of(state)
        dcp.save(
            dict(enumerate(get_state_dict(state.model, state.optimizers))), checkpoint_id=tmp_path
        )
        found = dict(enumerate(get_state_dict(other.model, other.optimizers)))
        dcp.load(found, checkpoint_id=tmp_path)
        set_state_dict(
            other.model, other.optimizers, model_state_dict=found[0], optim_state_dict=found[1]
        )
        return equal(tensors_of(other), expected)

    if outcome is False:
        assert not restored()
    else:
        with pytest.raises(outcome):
            restored()
