"""Check the user's own training loop, as it runs, without a reference.

    verdicts = preflight(train)             # `train()` is the loop; it ends after a few steps
    assert all(verdict.passed is not False for verdict in verdicts)

Each check reads the trace of a few windows. Where it can't know, it does not apply.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from .loop_accumulation import accumulation, sign, unused
from .loop_data import (
    data,
    logits,
    mode,
    other_batches,
    recomputed_differently,
    same_randomness,
    same_samples,
    targets,
    untrained,
)
from .loop_events import Fault, Step, Trace
from .loop_optimizers import (
    alike,
    clipping,
    frozen_by_flag,
    its_own_reference,
    made_anew,
    moves,
    never_stepped,
    never_steps,
    optimizer,
    scaler,
    schedule,
    stepped_twice,
    without_gradient,
    zeroed,
)
from .loop_trace import observe
from .verdict import NotApplicable, Verdict, not_applicable

DEFAULT_STEPS = 8
Finder = Callable[[Trace], Iterable[Fault]]


def preflight(train: Callable[[], Any], *, num_steps: int = DEFAULT_STEPS) -> list[Verdict]:
    """Run a loop until it has made some steps, and return the verdict of each check."""
    return judge(observe(train, num_steps=num_steps))


def judge(trace: Trace) -> list[Verdict]:
    """Return the verdict of each check on what a loop did."""
    verdicts = []
    for name, (required, *finders) in CHECKS.items():
        try:
            if not (trace.of(Step) or name == "optimizer" or trace.faults[name]):
                raise NotApplicable("the loop made no step of an optimizer")
            found = (fault for find in finders for fault in find(trace))
            verdicts.append(verdict_of(name, required, trace.faults[name] or found))
        except NotApplicable as error:
            verdicts.append(not_applicable(f"loop/{name}", str(error)))
    return verdicts


def verdict_of(name: str, required: str, faults: Iterable[Fault]) -> Verdict:
    """Return the verdict of a check, with the first fault that it finds."""
    for where, measured, hint in faults:
        place = where if isinstance(where, str) else where.place
        measured = f"{place}: {measured}" if place else measured
        return Verdict(f"loop/{name}", False, measured, required, hint, ran=("loop",))
    return Verdict(f"loop/{name}", True, "held", required, ran=("loop",))


# By name: what is required, in words, and what finds faults, in this order.
CHECKS: dict[str, tuple[str, *tuple[Finder, ...]]] = {
    "accumulation": (
        "a window's gradient is that of the same samples in one batch",
        unused,
        accumulation,
    ),
    "sign": ("finite losses and gradients, and a loss that is made smaller", sign),
    "zeroed": ("gradients are set to zero once per step", zeroed),
    "optimizer": (
        "each parameter with a gradient is in one optimizer, once",
        never_steps,
        optimizer,
        stepped_twice,
        made_anew,
    ),
    "moves": (
        "trained parameters move, frozen ones do not",
        frozen_by_flag,
        alike,
        without_gradient,
        moves,
        its_own_reference,
    ),
    "schedule": ("one step of the schedule per optimizer step, after it", never_stepped, schedule),
    "clipping": ("clipped once, after the last backward, before the step", clipping),
    "scaler": ("each loss scaled, steps by the scaler, its scale updated", scaler),
    "autocast": ("autocast around the forward pass alone",),
    "logits": ("logits or log-probabilities, as the loss needs", logits),
    "targets": ("targets that are to be learned, without padding", targets),
    "mode": (
        "training mode in training, and only there",
        mode,
        untrained,
        recomputed_differently,
    ),
    "data": (
        "new samples and random numbers at each step",
        same_samples,
        same_randomness,
        data,
        other_batches,
    ),
    # Seen at once.
    "graph": ("no graph outlives its step",),
    "growth": ("nothing large and no hook more in each step",),
}
