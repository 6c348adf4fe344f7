"""Check the user's own training loop, as it runs, without a reference.

    verdicts = preflight(train)             # `train()` is the loop; it ends after three steps
    assert all(verdict.passed is not False for verdict in verdicts)

Each check reads the trace of a few windows. Where it can't know, it does not apply.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .loop_trace import (
    Backward,
    Clip,
    Event,
    Forward,
    LossCall,
    Scaling,
    Schedule,
    Step,
    Trace,
    Zero,
    observe,
)
from .verdict import NotApplicable, Verdict, not_applicable

DEFAULT_STEPS = 3
# Weights of terms may differ by rounding of the loss, which is printed in half precision at worst.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Fault:
    """A fault of the loop: the line, the measured figure, and advice."""

    place: str
    measured: str
    hint: str


Check = Callable[[Trace], Fault | None]


def preflight(train: Callable[[], Any], *, num_steps: int = DEFAULT_STEPS) -> list[Verdict]:
    """Run a loop until it has made some steps, and return the verdict of each check."""
    return judge(observe(train, num_steps=num_steps))


def judge(trace: Trace) -> list[Verdict]:
    """Return the verdict of each check on what a loop did."""
    verdicts = []
    for name, (required, check) in CHECKS.items():
        gate = f"loop/{name}"
        try:
            if not trace.of(Step):
                raise NotApplicable("the loop made no step of an optimizer", required=required)
            fault = check(trace)
        except NotApplicable as error:
            verdicts.append(not_applicable(gate, required=required, why=str(error)))
            continue
        if fault is None:
            verdicts.append(Verdict(gate, True, "held", required, ran=("loop",)))
        else:
            measured = f"{fault.place}: {fault.measured}" if fault.place else fault.measured
            verdicts.append(Verdict(gate, False, measured, required, fault.hint, ran=("loop",)))
    return verdicts


def _windows(trace: Trace) -> Iterator[tuple[Optimizer, list[Event]]]:
    for optimizer in _stepping(trace):
        for window in trace.windows(optimizer):
            yield optimizer, window


def _stepping(trace: Trace) -> list[Optimizer]:
    """Return the optimizers that have made a step."""
    return list({id(step.optimizer): step.optimizer for step in trace.of(Step)}.values())


def _reaching(optimizer: Optimizer, window: Sequence[Event]) -> list[Backward]:
    """Return the backward calls of a window that made gradients of an optimizer."""
    calls = [event for event in window if isinstance(event, Backward)]
    return [call for call in calls if id(optimizer) in call.reached]


def _microbatches(optimizer: Optimizer, window: Sequence[Event]) -> list[list[Backward]]:
    """Return the backward calls of a window by the line that made them."""
    lines = defaultdict[str, list[Backward]](list)
    for call in _reaching(optimizer, window):
        lines[call.place].append(call)
    # A closure that an optimizer calls several times is no accumulation.
    return [calls for calls in lines.values() if not all(call.in_step for call in calls)]


def accumulation(trace: Trace) -> Fault | None:
    """Each term of the losses of a window weighs as in one batch."""
    several = [
        calls
        for optimizer, window in _windows(trace)
        for calls in _microbatches(optimizer, window)
        if len(calls) > 1
    ]
    if not several:
        raise NotApplicable("each step has one backward call of a line", required="several")
    for calls in several:
        losses = [call.loss for call in calls if call.loss is not None and call.loss.num_terms]
        if len(losses) < len(calls):
            raise NotApplicable(
                "a loss is not a multiple of one of torch's mean or summed losses", required="one"
            )
        weights = []
        total = 0.0
        for call, loss in zip(calls, losses, strict=True):
            assert loss.num_terms is not None
            of_loss = call.value / call.scale / loss.value if loss.value else math.nan
            weights.append(of_loss / loss.num_terms if loss.reduction == "mean" else of_loss)
            total += of_loss * (1 if loss.reduction == "mean" else loss.num_terms)
        if not all(map(math.isfinite, weights)):
            raise NotApplicable("a loss is 0 or not finite", required="finite losses")
        # A Trainer calls backward; the loss is the user's.
        place = calls[0].place or losses[0].place
        if losses[0].reduction == "mean" and abs(total - 1) > TOLERANCE:
            return Fault(
                place,
                f"the gradients of a window are {total:.3g} times those of one batch",
                f"divide the loss by the {len(calls)} microbatches of the window, or its sum by "
                "the number of terms in all of them (num_items_in_batch of a Trainer)",
            )
        spread = max(weights) / min(weights)
        if spread > 1 + TOLERANCE:
            return Fault(
                place,
                f"a term of one microbatch weighs {spread:.3g} times that of another",
                "sum each loss and divide by the number of terms of the whole window",
            )
    return None


def zeroed(trace: Trace) -> Fault | None:
    """Gradients are set to zero once per window, before its first backward call."""
    for optimizer, window in _windows(trace):
        calls = _reaching(optimizer, window)
        if not calls:
            continue
        step = window[-1]
        if not any(id(optimizer) in call.clean for call in calls):
            return Fault(
                step.place,
                "a step with gradients of the step before",
                "call optimizer.zero_grad() once per step, before the first backward",
            )
        own = _parameter_ids(optimizer)
        last = window.index(calls[-1])
        of_line = [call for call in calls if call.place == calls[-1].place]
        first_of_line = window.index(of_line[0])
        for place, event in enumerate(window):
            if isinstance(event, Zero) and not event.in_step and event.parameters & own:
                if place > last:
                    return Fault(
                        event.place,
                        "gradients are set to zero before the step",
                        "move zero_grad() behind the step",
                    )
                if place > first_of_line:
                    return Fault(
                        event.place,
                        "gradients of earlier microbatches are set to zero",
                        "call zero_grad() once per step, not per microbatch",
                    )
    return None


def optimizer(trace: Trace) -> Fault | None:
    """The optimizers hold each parameter that gets a gradient."""
    held = _held(trace)
    missing = []
    for root in trace.roots:
        own = [one for one in root.parameters() if one.requires_grad and one.grad is not None]
        # A network of which nothing is trained only passes gradients on, as in a perceptual loss.
        if any(id(one) in held for one in own):
            missing += [trace.names.get(id(one), "?") for one in own if id(one) not in held]
    if missing:
        step = trace.of(Step)[-1]
        return Fault(
            step.place,
            f"{_named(missing)} get gradients and are in no optimizer",
            "give the optimizer the parameters of the model that is trained, after it is moved, "
            "wrapped or copied; freeze the others by requires_grad_(False)",
        )
    return None


def _held(trace: Trace) -> set[int]:
    return set[int]().union(*map(_parameter_ids, trace.optimizers))


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def moves(trace: Trace) -> Fault | None:
    """Trained parameters move, and frozen ones do not."""
    steps: list[Step] = trace.of(Step)
    if frozen := [step for step in steps if step.frozen_moved]:
        names = [trace.names.get(one, "?") for one in frozen[0].frozen_moved]
        return Fault(
            frozen[0].place,
            f"frozen parameters move: {_named(names)}",
            "leave frozen parameters out of the optimizer",
        )
    if any(step.moved is None for step in steps):
        raise NotApplicable("too many parameters to compare", required="a smaller model")
    for one in _stepping(trace):
        own = [step for step in steps if step.optimizer is one]
        if len(own) > 1 and not any(step.moved for step in own):
            return Fault(
                own[0].place,
                f"no parameter of {type(one).__name__} moves: {_why_nothing_moves(own)}",
                "give it the parameters of the model that is trained, and a learning rate",
            )
    held = _held(trace)
    with_gradients, without = trace.ran[True], trace.ran[False]
    names = [
        trace.names.get(id(parameter), f"{type(module).__name__}.{own}")
        for module in without.values()
        if id(module) not in with_gradients
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and parameter.grad is None and id(parameter) in held
    ]
    if names:
        return Fault(
            steps[-1].place,
            f"trained parameters get no gradient, because they ran without: {_named(names)}",
            "with reentrant checkpointing the input of a block needs a gradient: "
            "use_reentrant=False, or model.enable_input_require_grads(); else remove the no_grad",
        )
    return None


def _why_nothing_moves(steps: Sequence[Step]) -> str:
    if not any(any(step.rates) for step in steps):
        return "its learning rate is 0"
    if not any(step.with_gradient for step in steps):
        return "no parameter of it has a gradient"
    return "its updates are 0"


def _named(names: Sequence[str], most: int = 2) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - most} more" if len(unique) > most else ""
    return ", ".join(unique[:most]) + more


def schedule(trace: Trace) -> Fault | None:
    """A schedule steps at most once per step of the optimizer, after it."""
    events: list[Schedule] = trace.of(Schedule)
    if not events:
        raise NotApplicable("no schedule of torch made a step", required="a schedule")
    for one in {id(event.scheduler): event.scheduler for event in events}.values():
        for number, window in enumerate(trace.windows(one.optimizer)):
            own = [e for e in window if isinstance(e, Schedule) and e.scheduler is one]
            if number == 0 and own:
                return Fault(
                    own[0].place,
                    "the schedule steps before the optimizer's first step",
                    "call scheduler.step() after optimizer.step()",
                )
            if len(own) > 1:
                return Fault(
                    own[0].place,
                    f"{len(own)} steps of the schedule per optimizer step",
                    "step the schedule once per optimizer step, not per microbatch",
                )
    return None


def clipping(trace: Trace) -> Fault | None:
    """Gradients are clipped after the last backward call and unscaling, before the step."""
    clips: list[Clip] = trace.of(Clip)
    if not clips:
        raise NotApplicable("the loop does not clip", required="a clipping")
    held = _held(trace)
    for clip in clips:
        if not clip.parameters:
            hint = "pass model.parameters() anew; a generator is empty after one use"
            return Fault(clip.place, "it clips no parameter", hint)
        if not clip.parameters & held:
            hint = "clip the parameters of the model that is trained"
            return Fault(clip.place, "it clips parameters that no optimizer has", hint)
        if clip.is_scaled:
            hint = "call scaler.unscale_(optimizer) before it"
            return Fault(clip.place, "gradients are clipped while they are scaled", hint)
    faults = (_clipped_too_late_or_early(one, window) for one, window in _windows(trace))
    return next(filter(None, faults), None)


def _clipped_too_late_or_early(optimizer: Optimizer, window: Sequence[Event]) -> Fault | None:
    own = _parameter_ids(optimizer)
    before: list[str] = []  # lines of the backward calls so far
    after = [event.place for event in window if isinstance(event, Backward)]
    for event in window:
        if isinstance(event, Backward):
            before.append(after.pop(0))
        elif isinstance(event, Clip) and event.parameters & own:
            if after and not before:
                hint = "clip between the last backward and the step"
                return Fault(event.place, "gradients are clipped after the step", hint)
            if set(after) & set(before):
                hint = "clip once per step, after the last backward"
                return Fault(event.place, "a part of the window's gradient is clipped", hint)
    return None


def scaler(trace: Trace) -> Fault | None:
    """A scaler scales each loss, steps and is updated."""
    calls: list[Scaling] = [one for one in trace.of(Scaling) if one.is_enabled]
    if not calls:
        half = [one for one in trace.of(Forward) if one.autocast == torch.float16]
        if half:
            return Fault(
                half[0].place,
                "float16 without a scaler: small gradients become 0",
                "use torch.amp.GradScaler, or bfloat16",
            )
        raise NotApplicable("the loop has no scaler that is on", required="a scaler")
    names = {one.call for one in calls}
    steps: list[Step] = trace.of(Step)
    if "scale" not in names:
        return Fault(calls[0].place, "no loss is scaled", "call scaler.scale(loss).backward()")
    unscaled = [one for one in trace.of(Backward) if one.scale == 1]
    direct = [step for step in steps if not step.by_scaler and not unscaled]
    if direct and "unscale_" not in names:
        return Fault(
            direct[0].place,
            "the optimizer steps on scaled gradients",
            "call scaler.step(optimizer) in place of optimizer.step()",
        )
    if "update" not in names and len(steps) > 1:
        return Fault(calls[0].place, "the scale is never updated", "call scaler.update()")
    return None


def autocast(trace: Trace) -> Fault | None:
    """Autocast is around the forward pass alone."""
    inside = [one for one in trace.of(Backward) if one.in_autocast]
    if inside:
        return Fault(
            inside[0].place,
            "backward runs under autocast",
            "end the autocast block before loss.backward()",
        )
    return None


def logits(trace: Trace) -> Fault | None:
    """A loss gets logits or log-probabilities, as it needs."""
    calls: list[LossCall] = trace.of(LossCall)
    if not calls:
        raise NotApplicable("no loss function of torch on classes was called", required="one")
    for call in calls:
        if call.name in ("cross_entropy", "binary_cross_entropy_with_logits"):
            if call.made_by.startswith(("Softmax", "Sigmoid")):
                return Fault(
                    call.place,
                    f"{call.name} gets probabilities",
                    "give it the values before softmax or sigmoid",
                )
        elif max(abs(one - 1) for one in call.row_sums) > TOLERANCE:
            return Fault(
                call.place,
                f"{call.name} gets no log-probabilities",
                "give it F.log_softmax(logits, dim=1), or use cross_entropy",
            )
    return None


def targets(trace: Trace) -> Fault | None:
    """Targets are the ones to learn."""
    calls = [one for one in trace.of(LossCall) if one.num_terms is not None]
    if not calls:
        raise NotApplicable("no loss function of torch on classes was called", required="one")
    for call in calls:
        same = call.same_as_input
        if call.num_terms == 0:
            return Fault(
                call.place,
                "no target counts: all have the ignored index",
                "look at how labels are made",
            )
        if same.get(0, 0) > 0.99:
            return Fault(
                call.place,
                "the targets are the model's own input",
                "shift the targets by one token to the left",
            )
        if same.get(2, 0) > 0.99 and same.get(1, 0) < 0.9:
            return Fault(
                call.place,
                "the targets are shifted by two tokens",
                "shift once: models of Hugging Face shift the labels themselves",
            )
        if call.counts_padding and max(same.get(0, 0), same.get(1, 0)) > 0.5:
            return Fault(
                call.place,
                "targets count where the attention mask is 0",
                "set labels of padding to the ignored index, -100",
            )
    return None


def mode(trace: Trace) -> Fault | None:
    """The model is in training mode in forward passes that are trained on."""
    forwards: list[Forward] = trace.of(Forward)
    wrong = [
        one
        for one in forwards
        if not one.training
        and any(root is one.module for root in trace.roots)
        and _acts(one.module)
    ]
    if wrong:
        again = any(one.training for one in forwards if one.module is wrong[0].module)
        return Fault(
            wrong[0].place,
            f"a trained forward pass in eval mode{', after one in training mode' * again}",
            "call model.train() before training, and again after each evaluation",
        )
    return None


def _acts(model: nn.Module) -> bool:
    """Return whether a model computes something else in training mode, at any rate."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    dropped = [getattr(one, "p", 1) or 0 for one in model.modules() if isinstance(one, kinds)]
    inside = [
        one.dropout for one in model.modules() if isinstance(getattr(one, "dropout", 0), float)
    ]
    return any(dropped) or any(inside)


def data(trace: Trace) -> Fault | None:
    """Batches differ from step to step where the data has more than one."""
    loaders = [one for one in trace.loaders if _length(one) > 1]
    if not loaders:
        raise NotApplicable("no DataLoader of several batches is known", required="a DataLoader")
    first = [window for _, window in _windows(trace)]
    digests = [[event.digest for event in window if isinstance(event, Forward)] for window in first]
    digests = [one for one in digests if one and None not in one]
    if len(digests) > 1 and all(one == digests[0] for one in digests):
        forward = trace.of(Forward)[0]
        return Fault(
            forward.place,
            f"{len(digests)} steps on the same batch",
            "iterate over the loader; next(iter(loader)) begins it anew",
        )
    return None


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:  # an iterable dataset
        return 0


def graph(trace: Trace) -> Fault | None:
    """No graph is kept alive from step to step."""
    if trace.held_graphs:
        return Fault(
            trace.held_graphs[0],
            "a tensor of two steps ago is still held, with its graph",
            "keep loss.item() or tensor.detach() in place of the tensor",
        )
    return None


# By name: what is required, in words, and the check.
CHECKS: dict[str, tuple[str, Check]] = {
    "accumulation": ("a window's gradient is that of the same samples in one batch", accumulation),
    "zeroed": ("gradients are set to zero once per step", zeroed),
    "optimizer": ("each parameter with a gradient is in an optimizer", optimizer),
    "moves": ("trained parameters move, frozen ones do not", moves),
    "schedule": ("one step of the schedule per optimizer step, after it", schedule),
    "clipping": ("clipped once, after the last backward, before the step", clipping),
    "scaler": ("each loss scaled, steps by the scaler, its scale updated", scaler),
    "autocast": ("autocast around the forward pass alone", autocast),
    "logits": ("logits or log-probabilities, as the loss needs", logits),
    "targets": ("targets that are to be learned, without padding", targets),
    "mode": ("training mode in training", mode),
    "data": ("new samples at each step", data),
    "graph": ("no graph outlives its step", graph),
}
