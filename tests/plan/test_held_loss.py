"""A loss that lives into the next forward holds no more bytes than without a technique.

python -m pytest tests/plan/test_held_loss.py
"""

import gc

import pytest

from curry_train.core.measure import LiveStorages
from curry_train.gates.same_training import sample_of
from curry_train.primitives import STRATEGIES
from curry_train.workloads import Case
from curry_train.workloads.models import snn, transformer

MODELS = {"transformer": transformer(depth=2, dim=32, length=16), "snn": snn(timesteps=4)}


def bytes_after_backward(workload, strategy):
    """Return the bytes alive with the loss and the gradients, and nothing else of the step."""
    case = Case(MODELS[workload])
    module, batch = case.build(), case.batch()
    STRATEGIES[strategy].apply(module, sample_of(case))
    for _ in range(2):  # the first step may keep its measurements
        module.zero_grad()
        gc.collect()
        with LiveStorages() as storages:
            loss = case.workload.mean_loss(module, batch)
            loss.backward()
            gc.collect()
            alive = storages.bytes_alive
        del loss
    return alive


@pytest.mark.parametrize("workload", MODELS)
def test_a_loss_that_stays_alive_holds_nothing_else_of_its_step(workload):
    plain = bytes_after_backward(workload, "none")
    found, why = {}, {}
    for strategy in STRATEGIES.keys() - {"memory_budget"}:  # compiling takes seconds
        try:
            found[strategy] = bytes_after_backward(workload, strategy)
        except (ValueError, RuntimeError) as error:
            why[strategy] = str(error)  # the strategy does not apply to this model
    assert len(found) >= 5, why
    assert {name: held for name, held in found.items() if held > plain} == {}
