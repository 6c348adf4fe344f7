"""Check the user's own training loop, as it runs, without a reference.

    verdicts = preflight(train)             # `train()` is the loop; it ends after a few steps
    assert all(verdict.passed is not False for verdict in verdicts)

Each check reads the trace of a few windows. Where it can't know, it does not apply.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .loop_accumulation import accumulation, sign, unused
from .loop_data import (
    data,
    mode,
    other_batches,
    recomputed_differently,
    same_order,
    same_randomness,
    same_samples,
    shuffled_apart,
    targets,
    untrained,
    without_statistics,
)
from .loop_events import Clip, Fault, LossCall, Scaling, Schedule, Step, Targets, Trace
from .loop_optimizers import (
    alike,
    clipping,
    groups_made_equal,
    made_anew,
    moves,
    never_stepped,
    never_steps,
    optimizer,
    same_loss,
    scaler,
    schedule,
    stepped_twice,
    without_gradient,
    wrongly_frozen,
    zeroed,
)
from .loop_trace import observe
from .verdict import NotApplicable, Verdict, not_applicable

DEFAULT_STEPS = 8
NO_LOSS = "no loss function of torch was called"
NO_STEP = "the loop made no optimizer step: weights that it changes itself need torch.optim.SGD"


@dataclass(frozen=True)
class Check:
    """A requirement of a loop, and the functions that find where it is not met."""

    required: str
    # In this order; what is wrong with a single call is seen at once.
    finders: tuple[Callable[[Trace], Iterable[Fault]], ...] = ()
    # Where a loop has no such event, nothing is found, and it does not apply, for this reason.
    needs: Any = Step
    reason: str = NO_STEP


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
                raise NotApplicable(NO_STEP)
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


def verdict_of(
    name: str, required: str, faults: Iterable[Fault], *, elsewhere: str = ""
) -> Verdict:
    """Return the verdict of a check, with the first fault that it finds, or that is elsewhere."""
    for where, measured, hint in faults:
        place = (where if isinstance(where, str) else where.place) or elsewhere
        measured = f"{place}: {measured}" if place else measured
        return Verdict(f"loop/{name}", False, measured, required, hint, ran=("loop",))
    return Verdict(f"loop/{name}", True, "held", required, ran=("loop",))


CHECKS = {
    "results": Check("each result is used, each method called"),
    "accumulation": Check(
        "a window's gradient is that of the same samples in one batch",
        (unused, accumulation),
    ),
    "sign": Check("finite losses and gradients, and a loss that is made smaller", (sign,)),
    "zeroed": Check("gradients are set to zero once per step", (zeroed,)),
    "optimizer": Check(
        "each parameter with a gradient is in one optimizer, once",
        (never_steps, optimizer, stepped_twice, made_anew),
    ),
    "moves": Check(
        "trained parameters move, frozen ones do not",
        (wrongly_frozen, alike, without_gradient, moves, same_loss),
    ),
    "schedule": Check(
        "one step of the schedule per optimizer step, after it",
        (never_stepped, schedule, groups_made_equal),
        Schedule,
        "no schedule of torch made a step in the steps that were watched",
    ),
    "clipping": Check(
        "clipped once, after the last backward, before the step",
        (clipping,),
        Clip,
        "the loop does not clip",
    ),
    "scaler": Check(
        "each loss scaled, steps by the scaler, its scale updated",
        (scaler,),
        Scaling,
        "the loop has no scaler that is on",
    ),
    "autocast": Check("autocast around the forward pass alone"),
    "logits": Check("logits or log-probabilities, as the loss needs", (), LossCall, NO_LOSS),
    "targets": Check(
        "targets that are to be learned, without padding", (targets,), LossCall | Targets, NO_LOSS
    ),
    "mode": Check(
        "training mode in training, and only there",
        (mode, untrained, without_statistics, recomputed_differently),
    ),
    "data": Check(
        "new samples and random numbers at each step",
        (same_samples, same_order, same_randomness, data, other_batches, shuffled_apart),
    ),
    "graph": Check("no graph outlives its step"),
    "growth": Check("nothing large and no hook more in each step"),
}
