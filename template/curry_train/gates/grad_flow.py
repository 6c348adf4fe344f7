"""Gate of grad-flow: probing a training changes nothing of it.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from ..core.generators import seeded
from ..core.parity import StepRecord, compare, record
from ..primitives.grad_flow import GradFlow
from ..workloads.workload import Case
from .verdict import Gate, NotApplicable, Outcome

NUM_STEPS = 2


def _train(case: Case, *, is_probed: bool) -> tuple[int, StepRecord]:
    """Train steps of two microbatches with clipping; return the steps probed, and the last step.

    The buffers of the step have the weights after it too.
    """
    module = case.build()
    batch = case.batch()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    try:
        probe = GradFlow(module, optimizer, every=1)
    except ValueError as error:  # such as `DataParallel`
        raise NotApplicable(str(error)) from error
    with seeded(case.seed):
        with probe if is_probed else nullcontext():
            for _ in range(NUM_STEPS):
                optimizer.zero_grad()
                for _ in range(2):
                    loss = case.workload.mean_loss(module, batch)
                    loss.backward()
                nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
                optimizer.step()
        step = record(module, loss.detach())
    weights = {name: one.detach().clone() for name, one in module.named_parameters()}
    return len(probe.records), replace(step, buffers={**step.buffers, **weights})


def flow_same_training(case: Case) -> Outcome:
    """Compare loss, gradients, buffers, generators and weights with and without the probe."""
    (_, plain), (_, again), (num_records, probed) = (
        _train(case, is_probed=is_probed) for is_probed in (False, False, True)
    )
    if not compare(plain, again).bit_equal:
        raise NotApplicable("the plain step does not repeat bit for bit")
    found = compare(plain, probed)
    hint = ""
    if not found.holds or num_records != NUM_STEPS:
        hint = (
            "use no_grad, draw no random numbers, and write to no tensor of a step; or nothing was "
            "probed"
        )
    measured = f"{found.describe()}; {num_records} steps probed"
    return measured, f"bit-equal, {NUM_STEPS} steps probed", hint


GATES = (Gate("grad-flow/same-training", flow_same_training),)
