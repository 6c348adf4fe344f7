"""Gate of grad-flow: probing a training changes nothing of it.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

from contextlib import nullcontext

from ..core.digest import generator_digests
from ..core.generators import seeded
from ..primitives.grad_flow import GradFlow
from ..workloads.workload import Case
from .own_training import (
    describe_state,
    draw_batch,
    find_differences,
    make_training,
    take_user_step,
)
from .verdict import Gate, NotApplicable, Outcome

NUM_STEPS = 2


def _train(case: Case, *, is_probed: bool) -> tuple[int, dict[str, str]]:
    """Train two steps; return the number of steps probed, and the losses and the state by name."""
    with seeded(case.seed):
        model, optimizer = make_training(case)
        try:
            probe = GradFlow(model, optimizer, every=1)
        except ValueError as error:  # such as `DataParallel`
            raise NotApplicable(str(error)) from error
        with probe if is_probed else nullcontext():
            losses = [
                take_user_step(case, model, optimizer, draw_batch(case)) for _ in range(NUM_STEPS)
            ]
        state = describe_state(model, optimizer, loss=losses, generator=generator_digests())
        return len(probe.records), state


def flow_same_training(case: Case) -> Outcome:
    """Compare losses, the model, the optimizer and generators with and without the probe."""
    (_, plain), (_, again), (num_records, probed) = (
        _train(case, is_probed=is_probed) for is_probed in (False, False, True)
    )
    if plain != again:
        raise NotApplicable("the plain training does not repeat bit for bit")
    wrong = find_differences(probed, plain)
    hint = ""
    if wrong or num_records != NUM_STEPS:
        hint = (
            "use no_grad, draw no random numbers, and write to no tensor of a step; or nothing was "
            "probed"
        )
    different = f"{', '.join(wrong[:3])} differ" if wrong else "bit-equal"
    return f"{different}; {num_records} steps probed", f"bit-equal, {NUM_STEPS} steps probed", hint


GATES = (Gate("grad-flow/same-training", flow_same_training),)
