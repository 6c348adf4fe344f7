"""Check the user's own training loop, as it runs, without a reference.

    verdicts = preflight(train)             # `train()` is the loop; it ends after a few steps
    assert all(verdict.passed is not False for verdict in verdicts)

Each check reads the trace of a few windows. Where it can't know, it does not apply.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

from collections.abc import Callable
from typing import Any

from . import loop_accumulation, loop_data, loop_optimizers
from .loop_events import NO_LOSS, Check, Faults, LossCall, Step, Trace
from .loop_trace import observe
from .verdict import NotApplicable, Verdict, not_applicable

DEFAULT_STEPS = 8


def preflight(train: Callable[[], Any], *, num_steps: int = DEFAULT_STEPS) -> list[Verdict]:
    """Run a loop until it has made some steps, and return the verdict of each check."""
    return judge(observe(train, num_steps=num_steps))


def judge(trace: Trace) -> list[Verdict]:
    """Return the verdict of each check on what a loop did."""
    verdicts = []
    # For what a Trainer does by itself.
    made = [*trace.places(r"(=|return) *[\w.]*Trainer\("), ""][0]
    for name, check in CHECKS.items():
        faults = trace.faults[name]
        try:
            # Whether an optimizer makes a step at all is a check.
            if not (trace.of(Step) or name == "optimizer" or faults):
                raise NotApplicable(Check.reason)
            found = (fault for find in check.finders for fault in find(trace))
            verdict = verdict_of(name, check.required, faults or found, elsewhere=made)
            if verdict.passed and not trace.of(check.needs):
                raise NotApplicable(check.reason)
            verdicts.append(verdict)
        except NotApplicable as error:
            verdicts.append(not_applicable(f"loop/{name}", str(error)))
    # A fault may well be its cause.
    if trace.error is not None and all(one.passed is not False for one in verdicts):
        raise trace.error
    return verdicts


def verdict_of(name: str, required: str, faults: Faults, *, elsewhere: str = "") -> Verdict:
    """Return the verdict of a check, with the first fault that it finds, or that is elsewhere."""
    for where, measured, hint in faults:
        place = (where if isinstance(where, str) else where.place) or elsewhere
        measured = f"{place}: {measured}" if place else measured
        return Verdict(f"loop/{name}", False, measured, required, hint, ran=("loop",))
    return Verdict(f"loop/{name}", True, "held", required, ran=("loop",))


# In the order in which they are shown.
CHECKS = {
    "results": Check("each result is used, each method called"),
    **loop_accumulation.CHECKS,
    **loop_optimizers.CHECKS,
    "autocast": Check("autocast around the forward pass alone"),
    "logits": Check("logits or log-probabilities, as the loss needs", (), LossCall, NO_LOSS),
    **loop_data.CHECKS,
    "graph": Check("no graph outlives its step"),
    "growth": Check("nothing large and no hook more in each step"),
}
