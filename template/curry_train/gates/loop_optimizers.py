"""Check what optimizers are given and make of it: gradients, weights, rates, clipping and scales.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    ReduceLROnPlateau,
)

from ..core.digest import is_plain
from ..workloads.optimizers import parameters_of
from .loop_events import (
    FEWEST_STEPS,
    Backward,
    Check,
    Clip,
    Cut,
    Event,
    Faults,
    Fetch,
    Forward,
    LossCall,
    Scaling,
    Schedule,
    Step,
    Stepping,
    Trace,
    grouped,
    tensors_of,
)
from .loop_weights import has_equal_rows
from .verdict import NotApplicable

# A larger share of weights that a step takes by decay leaves nothing of them.
MOST_DECAY = 0.1
# A larger gradient is not what rounding leaves of 0.
MOST_NOISE = 1e-6
# How many times as large as what is in front of it a head is at most.
MOST_OF_HEAD = 4
# The length of a schedule that is counted in batches.
OF_BATCHES = re.compile(r"(steps|T_max) *=[^,)]*(len\(|steps|batches)|steps_per_epoch *=(?! *1\b)")
# Attributes that people set to freeze a module or parameter, without effect.
FLAGS = {"require_grad", "requires_grad"}


def zeroed(trace: Trace) -> Faults:
    """Gradients are set to zero once per window, before its first backward call."""
    for window in trace.windows:
        calls = window.calls
        if not calls:
            versions = window.previous and window.previous.versions
            if window.versions == versions and window.has_gradients and not window.in_backward:
                yield (
                    window,
                    "a step on the gradients of the step before, without a backward call",
                    "call optimizer.step() once per backward of a window, then zero_grad()",
                )
            continue
        if not any(map(window.is_clean, calls)):
            yield (
                # A zero_grad of this window comes too late, or leaves parameters out.
                [window, *window.zeros][-1],
                "a step with gradients of the step before",
                "call optimizer.zero_grad() once per step, before the first backward",
            )
        if window.is_by_hand:
            continue
        yield from _find_steps_off_the_weights(window)
        for attack, call in itertools.pairwise(calls):
            if attack.of_inputs and attack.lines != call.lines and not window.is_clean(call):
                yield (
                    attack,
                    "gradients of an attack on the inputs are in the step",
                    "take them by torch.autograd.grad(loss, inputs), or call zero_grad() after it",
                )
        modes = {(one.module, one.training) for one in window.forwards}
        is_several = len(modes) > len({module for module, _ in modes})
        is_attack = any(call.of_inputs for call in calls)
        # An attack or a sampler runs the model more often than backward reaches its parameters.
        has_one_each = calls == window.all_calls and len(calls) == len(window.forwards)
        if is_several and has_one_each and not is_attack:
            hint = "evaluate under torch.no_grad(), without backward"
            yield calls[0], "gradients of an evaluation are in the step", hint
        yield from _find_zeroed_gradients(window)
        yield from _find_used_gradients(window, trace.held_parameters)


def _find_steps_off_the_weights(window: Step) -> Faults:
    """Find faults of a step that first changes the weights and takes gradients there, as SAM."""
    weights = [one.weights for one in window.forwards if one.module is window.first.module]
    # SAM changes all weights. An attack on the outputs of one layer changes that layer alone.
    change = min((max(ends) - min(ends) for ends in zip(*weights, strict=True)), default=0.0)
    calls = window.all_calls
    if not change or len({one.digests for one in window.forwards}) > 1 or len(calls) < 2:
        return
    if not any(map(window.is_clean, calls[1:])):
        hint = "call zero_grad() before the second backward"
        yield calls[1], "gradients at two points of the weights are added", hint
    last = window.previous
    if last is not None and abs(window.weights[0] - last.weights[1]) > 0.05 * change:
        yield (
            window,
            f"weights that were changed for a trial, before {calls[1].place}, stay so",
            "put the weights back before the step",
        )


def _find_zeroed_gradients(window: Step) -> Faults:
    """Find gradients of the window that are set to zero before its step."""
    calls = window.calls
    if not window.has_gradients and any(call.value for call in calls):
        for zero in window.zeros:
            if zero.at > calls[-1].at:
                hint = "move zero_grad() behind the step"
                yield zero, "gradients are set to zero before the step", hint
    of_line = [call for call in calls if call.lines == calls[-1].lines and call.reached]
    for call in of_line[1:]:
        # Gradients may be 0 by themselves.
        if window.is_clean(call) and not call.in_step and not call.is_next:
            between = [one for one in window.zeros if of_line[0].at < one.at < call.at]
            yield (
                [call, *between][-1],
                "gradients of earlier microbatches are set to zero",
                "call zero_grad() once per step, not per microbatch",
            )


def _find_used_gradients(window: Step, held: set[Tensor]) -> Faults:
    """Find gradients of a loss that another optimizer has stepped on already."""
    clean = [number for number, call in enumerate(window.calls) if window.is_clean(call)]
    used = window.calls[max(clean, default=0) :]
    own = next((call for call in used if call.reached & held <= window.own), used[0])
    for call in used[: used.index(own)]:
        if own.lines != call.lines and any(
            call.at < one.at < own.at and call.reached & one.own for one in window.of(Step)
        ):
            yield (
                window,
                f"a step with gradients of the loss at {call.place}, which another optimizer "
                "has used",
                "call optimizer.zero_grad() before the backward calls of its own loss",
            )


def optimizer(trace: Trace) -> Faults:
    """The optimizers hold each parameter that gets a gradient, once."""
    steps = trace.of(Step)
    if not steps:
        return
    # With leaves that are in no module.
    missing = (
        _find_missing_parameters(trace)
        | trace.lone_leaves.keys() - trace.names.keys() - trace.held_parameters
    )
    origin = steps[-1].origin
    seen = set[Tensor]()
    for first, *_ in trace.by_optimizer:
        # It was given what another optimizer has in place of what is missing.
        if first.own <= seen:
            origin = first.origin
        seen |= first.own
        given = parameters_of(first.optimizer)
        # Of SGD two steps of one memory add up to that of the sum.
        is_sum = isinstance(first.optimizer, torch.optim.SGD)
        memory = {(is_plain(one) and not is_sum and one.data_ptr()) or id(one) for one in given}
        if len(given) > len(memory):
            yield (
                first.origin,
                f"a parameter, or its memory, is in {type(first.optimizer).__name__} twice",
                "give each parameter once, and tie layers by head.weight = embedding.weight",
            )
    if missing:
        yield (
            origin,
            f"in no optimizer, but with gradients: {trace.named(missing)}; the last step is at "
            f"{steps[-1].place}",
            "give the optimizer the parameters of the model that is trained, after it is moved, "
            "wrapped or copied; keep layers in nn.ModuleList, not in a list, and tensors as "
            "nn.Parameter; freeze the others by requires_grad_(False)",
        )


def _find_missing_parameters(trace: Trace) -> set[Tensor]:
    """Return parameters that get gradients, next to others that an optimizer has."""
    # Of modules that ran, and that no module which was called has.
    alone = {
        one
        for module in trace.modules_run[True].keys() - {*trace.roots.modules()}
        for one in nn.Module.parameters(module, recurse=False)
    }
    found = set[Tensor]()
    known = trace.held_parameters & trace.names.keys()
    # A copy of the weights does not run itself.
    shapes = {one.shape for first, *_ in trace.by_optimizer for one in first.own - known}
    for root in trace.roots:
        own = {one for one in root.parameters() if one.requires_grad} & trace.with_gradient
        calls = [one for one in trace.trained_forwards if one.module is root]
        # A network of which nothing is trained may only pass gradients on, as in a perceptual loss.
        # A head gets all that it is given from trained layers, and is not much larger than these.
        most = sum(map(Tensor.numel, root.parameters())) / MOST_OF_HEAD
        is_head = all(
            one.behind <= known and sum(map(Tensor.numel, one.behind)) > most
            for one in trace.of(Forward)
            if one.module is root and one.training
        )
        is_first = calls and all(one.training and (is_head or not one.behind) for one in calls)
        # The loop may step it by other means, or a copy of it, as in full precision.
        is_moved = len({one.weights for one in calls}) > 1 or shapes.issuperset(
            one.shape for one in root.parameters()
        )
        if (is_first and not is_moved) or not trace.held_parameters.isdisjoint(own):
            found |= own | alone
    return found & trace.with_gradient - trace.held_parameters


def never_steps(trace: Trace) -> Faults:
    """Find an optimizer without a step, whose parameters get gradients for each of another one."""
    others = frozenset[Tensor]().union(*(one.own for one in trace.of(Stepping)))
    for one in trace.optimizers:
        own = {*parameters_of(one)} - others
        windows = [[call.reached & own for call in window.of(Backward)] for window in trace.windows]
        windows = windows or [[call.reached & own] for call in trace.of(Backward)]
        if one in trace.causes and len(windows) >= FEWEST_STEPS and all(map(any, windows)):
            yield (
                trace.causes[one],
                f"this {type(one).__name__} makes no step, and its parameters get gradients",
                "call its step() too; until then, freeze its parameters by requires_grad_(False)",
            )


def stepped_twice(trace: Trace) -> Faults:
    last: Step | None = None
    for event in trace.events:
        if isinstance(event, Backward):
            last = None
        elif isinstance(event, Step) and not event.in_backward:
            shared = last.own & event.own if last is not None else ()
            if last is not None and last.optimizer is not event.optimizer and shared:
                yield (
                    event.origin,
                    f"the optimizers of {last.origin} and {event.origin} step on the same "
                    f"gradients of {trace.named(shared)}, at {last.place} and {event.place}",
                    "give each parameter to one optimizer",
                )
            last = event


def made_anew(trace: Trace) -> Faults:
    """Find moments that are lost again and again, as where an optimizer is made anew."""
    for windows in grouped(trace.windows, "origin", "own"):
        stages = [windows[:1]]
        # Moments that are all 0, or as after an earlier step, are lost; others the user changed.
        states = {0.0, *(one.state[1] for one in windows)}
        for last, window in itertools.pairwise(windows):
            state, _ = window.state
            # Other weights may well begin without moments, as those of another task.
            is_same = window.weights[0] == last.weights[1]
            if is_same and state in states and state != last.state[1]:
                stages.append([])
            stages[-1].append(window)
        # In stages of a training each has data of its own, or many steps.
        data = [{one.dataset for window in stage for one in window.of(Fetch)} for stage in stages]
        is_staged = all(data) and not set.intersection(*data)
        is_staged |= not any(data) and min(map(len, stages)) > FEWEST_STEPS
        # One optimizer may begin anew at times; it may be loaded as it was after its first step.
        is_anew = len({one.optimizer for one in windows}) > 1
        if len(stages) > 2 and (is_anew or len(stages) >= len(windows) - 1) and not is_staged:
            yield (
                windows[0].origin,
                f"the state of {type(windows[0].optimizer).__name__} is lost {len(stages) - 1} "
                "times",
                "make the optimizer once, before the loop, and let it keep its state",
            )


def moves(trace: Trace) -> Faults:
    """Trained parameters move, and frozen ones do not."""
    if any(step.moved is None for step in trace.of(Step)):
        raise NotApplicable("too many parameters to compare")
    for steps in trace.by_optimizer:
        yield from _find_parameters_at_rest(trace, steps)
        yield from _find_steps_without_effect(trace, steps)


def _find_parameters_at_rest(trace: Trace, steps: Sequence[Step]) -> Faults:
    """Find parameters of an optimizer that do not move, or that only decay moves."""
    optimizer = steps[0].optimizer
    kind = type(optimizer).__name__
    last = steps[-1]
    number = len(steps)
    # A warm-up by epochs may begin with a rate of 0.
    first = steps[:5] if not any(any(step.rates) for step in steps[:5]) else steps
    if number > 1 and not any(step.moved for step in first):
        hint = (
            "give it the parameters of the model that is trained, and a learning rate; where your "
            "code sets the rate, look at its first values; where gradients are 0, look for a loss "
            "that is the same for all weights, as of equal rewards, or of a ratio of new to old "
            "probabilities that is always 1"
        )
        measured = f"no parameter of {kind} moves: {_explain_no_change(first)}"
        yield steps[0].origin, measured, hint
    elif number > 5 and not any(step.slopes for step in steps[-4:]):
        hint = (
            "make the optimizer for the model that is trained now, after it is made anew, loaded "
            "or frozen"
        )
        yield last, f"no parameter of {kind} has a gradient any more", hint
    if number < FEWEST_STEPS:
        return
    # The last backward call, where there is one.
    where = [last, *last.calls][-1]
    flat = {one for one in last.slopes if not any(it.slopes.get(one, 1.0) for it in steps)}
    if flat and not any(step.has_gradients for step in steps):
        hint = "look for a rounding, a clamp, an argmax or a ratio of equal values before the loss"
        yield where, f"all gradients of {kind} are 0", hint
    # Of two matrices that are multiplied one that is 0 alone has a gradient.
    shapes = [one.shape for one in flat if one.dim() == 2]
    # Square ones may well be unused so far, as a table of zeros for each stage.
    fits = {rows for rows, columns in shapes if rows < columns}
    fits &= {columns for rows, columns in shapes if columns < rows}
    is_product = fits and len(flat) == len(shapes) and not all(one.any() for one in flat)
    # A bias that has a gradient tells that the layer is used, also what rounding leaves of it.
    used = {trace.names.get(one) for one in last.slopes.keys() - flat}
    dead = [
        one
        for one in flat
        if is_product or trace.names.get(one, "").removesuffix("weight") + "bias" in used
    ]
    if dead:
        yield (
            where,
            f"the gradient of {trace.named(dead)} is 0 in each step",
            "look for inputs or activations that are all 0, a dropout of 1, a hook, a factor of 0, "
            "or two matrices that are multiplied and both begin at 0",
        )
    # A rate may be set after the first step alone.
    moved = frozenset().union(*(step.moved or () for step in steps[number > 3 :]))
    still = frozenset.intersection(*(step.graded for step in steps)) - moved
    for group in optimizer.param_groups:
        # A schedule, or the loop that sets the rates, may let a part of the model wait.
        is_set = len({sum(it.rates) for it in steps}) > 2
        if not group.get("lr", True) and group.get("initial_lr", is_set):
            still -= {*group["params"]}
    is_half = any(one.itemsize < 4 for one in still)
    is_known = not is_half or _is_of_torch(optimizer)
    if moved and still and is_known and all(any(step.rates) for step in steps):
        hint = "give their group a learning rate, or freeze them by requires_grad_(False)"
        if is_half:
            hint = "updates are rounded to nothing: keep them in float32, and use autocast"
        yield last, f"{trace.named(still)} have gradients and do not move", hint


def _explain_no_change(steps: Sequence[Step]) -> str:
    if not any(any(step.rates) for step in steps):
        return "its learning rate is 0"
    if not any(step.has_gradients for step in steps):
        return "its gradients are None or 0"
    return "its updates are 0"


def _is_of_torch(optimizer: Optimizer) -> bool:
    """Return whether it rounds as torch does: others may keep what is lost, or round at random."""
    return type(optimizer).step.__module__.startswith("torch.")


def _find_steps_without_effect(trace: Trace, steps: Sequence[Step]) -> Faults:
    """Find steps whose updates are rounded to nothing, or undone."""
    first = steps[0]
    optimizer = first.optimizer
    for group in optimizer.param_groups:
        # Of the optimizers that multiply weights by what is left.
        decays = group.get("decoupled_weight_decay") or isinstance(optimizer, torch.optim.SGD)
        share = float(group["lr"] * group["weight_decay"]) if decays else 0.0
        betas = group.get("betas", (0, 1))
        if _is_of_torch(optimizer) and betas[0] > betas[1]:
            hint = "the average of gradients comes first, that of squares second: (0.9, 0.999)"
            yield first.origin, f"the betas are {betas}", hint
        if share > MOST_DECAY:
            hint = "lower weight_decay, which is multiplied by the learning rate"
            yield first.origin, f"each step takes {share:.0%} of the weights by decay", hint
    states = [one for one in tensors_of([*optimizer.state.values()]) if one.dim()]
    is_used = len(steps) >= FEWEST_STEPS and any(step.has_gradients for step in steps)
    if is_used and states and not (_is_of_torch(optimizer) or any(map(torch.any, states))):
        hint = "change the tensors in place: buffer.mul_(momentum).add_(gradient)"
        yield first.origin, "the state of the optimizer stays 0", hint
    half = [step.half_moved for step in steps if step.half_moved is not None and any(step.rates)]
    if len(half) > 1 and max(half) < 0.5 and _is_of_torch(optimizer):
        yield (
            first,
            f"{1 - max(half):.0%} of the updates in half precision are rounded to nothing",
            "keep the parameters in float32, and use autocast",
        )
    # Where another optimizer steps, a copy of its model may begin anew.
    for old, new in itertools.pairwise(steps) if len(trace.by_optimizer) == 1 else ():
        before, after = old.weights
        if old.moved and before == new.weights[0] != after:
            yield (
                new,
                "parameters are at this step what they were at the one before",
                "make or load the model once, before the loop, and look at what copies into it",
            )


def without_gradient(trace: Trace) -> Faults:
    """Find trained parameters that ran and get no gradient, where it is known why."""
    idle = set[Tensor]()
    for module, place in (trace.modules_run[False] | trace.modules_run[True]).items():
        own = [one for one in nn.Module.parameters(module, recurse=False) if one.requires_grad]
        still = trace.idle_parameters.intersection(own)
        if module in trace.modules_run[True]:
            idle |= still
        elif still:
            yield (
                place or trace.of(Step)[-1],
                "trained parameters get no gradient, because they ran without a graph: "
                + trace.named(still),
                "remove the no_grad; with reentrant checkpointing the input of a block needs a "
                "gradient: use_reentrant=False, or model.enable_input_require_grads()",
            )
    used = {call.lines for call in trace.of(LossCall) if call.is_used}
    unused = [call for call in trace.of(LossCall) if call.lines not in used]
    if idle and unused:
        yield (
            unused[0],
            f"no backward call reaches this loss, and {trace.named(idle)} get no gradient",
            "add it to the loss that backward is called on",
        )
    # The last one before the step of these parameters: others cut off what is trained elsewhere.
    for step in trace.windows:
        for cut in reversed(step.of(Cut)):
            if detached := cut.behind & trace.idle_parameters & step.own:
                measured = "trained parameters are detached, and get no gradient: "
                hint = "remove the detach, .data, numpy or argmax, or freeze them"
                yield cut, measured + trace.named(detached), hint
                break


def wrongly_frozen(trace: Trace) -> Faults:
    """Find adapters that are frozen, and parts that an attribute is to freeze, without effect."""
    for one in (*trace.roots.modules(), *trace.roots.parameters()):
        own = one.parameters() if isinstance(one, nn.Module) else [one]
        flags = {name for name, value in vars(one).items() if value is False}
        for flag in flags & FLAGS if trace.with_gradient.intersection(own) else ():
            places = [*trace.places(rf"\.{flag} *= *False"), ""]
            hint = "module.requires_grad_(False), or parameter.requires_grad = False for each"
            yield places[0], f"{flag} of a {type(one).__name__} freezes nothing", hint
    adapters = {one.requires_grad for one, name in trace.names.items() if ".lora_" in name}
    if adapters == {False}:
        hint = "freeze the other parameters alone; load an adapter with is_trainable=True"
        yield trace.of(Step)[-1].origin, "all adapters (lora) are frozen", hint


def alike(trace: Trace) -> Faults:
    """Find weights that learn the same in all rows, because they began so."""
    living = trace.with_gradient & trace.held_parameters
    if equal := [one for one in living if has_equal_rows(one) and one.any()]:
        measured = f"all rows of {trace.named(equal)} are alike, and learn the same"
        yield trace.of(Step)[-1], measured, "initialize weights by random numbers"
    made_once = trace.places(r"\[\w[\w.]*\(.*\)\] *\* *\w")
    for one in trace.roots.modules() if made_once else ():
        if isinstance(one, nn.ModuleList | nn.Sequential) and len({*one}) < len(one):
            hint = "make each: nn.ModuleList(Block() for _ in range(6))"
            yield made_once[0], "a layer is in a list several times, with one set of weights", hint


def same_loss(trace: Trace) -> Faults:
    """Find a loss that compares equal things, as a model with itself, or two answers."""
    windows = [window for window in trace.windows if window.calls and window.moved]
    values = {call.value for window in windows for call in window.calls}
    is_same = all(
        {(one.weights, one.digests) for one in window.forwards}
        & {(one.weights, one.digests) for one in window.of(Forward) if not one.is_trained_on}
        for window in windows
    )
    given = {one.digests for window in windows for one in window.forwards}
    slopes = [slope for window in windows for slope in window.slopes.values()]
    is_flat = len(given) >= FEWEST_STEPS and max(slopes, default=1.0) < MOST_NOISE
    is_known = (is_same or is_flat) and len(windows) >= FEWEST_STEPS
    # A loss of 0 or 1 may be made for its gradient alone.
    if is_known and len(values) == 1 and max(values) % 1:
        yield (
            windows[0].calls[0],
            f"the loss is {max(values):.3g} in each step, as it compares what is equal",
            "compare with a copy, copy.deepcopy(model), not with the model itself; look at the "
            "pairs that the loss is given, and at the outputs of the model",
        )


def schedule(trace: Trace) -> Faults:
    """A schedule steps at most once per step of the optimizer, after it."""
    events = trace.of(Schedule)
    for first, *others in grouped(events, "scheduler"):
        one = first.scheduler
        last = getattr(one, "_schedulers", [one])[-1]
        made = {place: text for place, of, text in trace.schedules if of is one.optimizer}
        # Of one that wraps the optimizer that steps, the groups are the same.
        groups = one.optimizer.param_groups
        windows = [window for window in trace.windows if window.optimizer.param_groups is groups]
        for window in windows:
            own = [event for event in window.of(Schedule) if event.scheduler is one]
            if own and len(own) > own[0].num_expected:
                yield (
                    own[0],
                    f"{len(own)} steps of the schedule per optimizer step",
                    "step the schedule once per optimizer step, not per microbatch",
                )
            if own and trace.events[0] is window.events[0]:
                yield (
                    own[0],
                    "the schedule steps before the optimizer's first step",
                    "call scheduler.step() after optimizer.step()",
                )
        length, is_cosine = _read_length(last)
        if is_cosine and last.last_epoch > length:
            yield (
                [first.place, *made][-1],
                f"the {length:.0f} steps of a cosine are over, and the rate rises again",
                f"give it the number of all its steps, which are made at {first.place}",
            )
        number = sum(window.at < first.at for window in windows)
        # A number of epochs may be a multiple, too.
        if number > 2 and length % number == 0 and OF_BATCHES.search("".join(made.values())):
            yield (
                first,
                f"a schedule of {length} steps makes one for {number} of the optimizer",
                "call its step() after each of the optimizer, or count its length in epochs",
            )
        # The measure of a plateau, by the name that the user gives it.
        mode = getattr(one, "mode", "")
        measure = {"max": "loss|error|perplexity", "min": "acc|accuracy|f1|auc"}.get(mode, "^")
        if first.place in trace.places(rf"\.step\([^-)]*({measure})\b"):
            hint = "mode='max' for a measure that is to grow, 'min' for a loss"
            yield first, f"a schedule of mode {mode!r} is given the wrong measure", hint
        if others and not windows:
            yield (
                first,
                "the schedule is of an optimizer that makes no step",
                "make the schedule for the optimizer that steps",
            )
    for windows in trace.by_optimizer:
        yield from _find_schedules_without_effect(trace, windows)
    yield from _find_doubled_schedules(trace, {event.scheduler: None for event in events})


def _read_length(scheduler: LRScheduler) -> tuple[float, bool]:
    """Return the steps of a schedule, if it has an end, and whether it rises again after them."""
    # Of transformers.
    way = getattr(scheduler, "lr_lambdas", [None])[0]
    given = vars(scheduler) | getattr(way, "keywords", {})
    is_cosine = "_get_cosine_schedule_with_warmup_lr" in repr(way)
    names = ("T_max", "total_steps", "num_training_steps")
    length = next((given[name] for name in names if name in given), math.inf)
    return length, is_cosine or type(scheduler) is CosineAnnealingLR


def _find_doubled_schedules(trace: Trace, schedulers: Iterable[LRScheduler]) -> Faults:
    """Find two schedules of one optimizer, where another one has none."""
    for first, second in itertools.combinations(schedulers, 2):
        own = [place for place, one, _ in trace.schedules if one is second.optimizer]
        is_twice = type(first) is type(second) and first.optimizer is second.optimizer
        if own and is_twice and len(trace.by_optimizer) > len(grouped(schedulers, "optimizer")):
            measured = "two schedules are of one optimizer, and another one has none"
            yield own[-1], measured, "make each for its own optimizer"


def groups_made_equal(trace: Trace) -> Faults:
    """Find settings of an optimizer's groups that differed at first, and that the loop sets."""
    for steps in trace.by_optimizer:
        one = steps[0].optimizer
        for name, given in trace.groups.get(one, {}).items():
            now = {group.get(name) for group in one.param_groups}
            # Rates may meet at the end of a schedule, and a group may wait for its rate.
            is_other = name != "lr" or (all(given) and all(len({*it.rates}) == 1 for it in steps))
            if len({*given}) > 1 == len(now) and any(now) and is_other and len(steps) > 2:
                yield (
                    [*trace.places(rf"^\s*[\w.\[\]]+\[.{name}.\] *=[^=]"), steps[-1].place][0],
                    f"groups that differed in their {name} all have {now.pop():.3g}",
                    "keep what each was given: multiply its own first value by a factor",
                )


def never_stepped(trace: Trace) -> Faults:
    """Find a schedule without a step, where the code has no call of `step` that did not run."""
    moved = {id(one.scheduler.optimizer.param_groups) for one in trace.of(Schedule)}
    ran = {line for one in [*trace.of(Stepping), *trace.of(Scaling)] for line in one.lines}
    # A name in a line of its own is no call.
    calls = trace.places(r"\.step\b\s*[^\s#]|[=,(].*\.step\s*(#|$)")
    for place, optimizer, _ in trace.schedules if calls and ran.issuperset(calls) else ():
        steps = [one for one in trace.of(Step) if one.optimizer is optimizer]
        if len(steps) >= FEWEST_STEPS and id(optimizer.param_groups) not in moved:
            hint = f"call its step() after the optimizer's, at {steps[-1].place}"
            yield place, "this schedule never makes a step", hint


def _find_schedules_without_effect(trace: Trace, windows: Sequence[Step]) -> Faults:
    """Find a schedule that has no effect, or that leaves no learning rate."""
    groups = windows[0].optimizer.param_groups
    own = [one for one in trace.of(Schedule) if one.scheduler.optimizer.param_groups is groups]
    is_anew = len({one.scheduler for one in own}) == len(own)
    if len(own) > 2 and is_anew and len({one.lines for one in own}) == 1:
        hint = "make the schedule once, before the loop"
        yield own[0], "a new schedule in each step begins anew", hint
    setters = [
        {
            one.scheduler: one.place
            for one in window.of(Schedule)
            if one in own and type(one.scheduler) is LambdaLR
        }
        for window in windows[-2:]
    ]
    # At the end of an epoch one for warm-up may give place to another one.
    if min(map(len, setters)) > 1:
        hint = "multiply them in one lr_lambda, or join them by SequentialLR"
        yield (
            [*setters[-1].values()][-1],
            "several LambdaLR set the rate of one optimizer; the last one counts",
            hint,
        )
    rates = [window.rates for window in windows]
    # A schedule by epochs leaves the rate for many steps, and a warm-up by hand changes it.
    late = windows[-FEWEST_STEPS - 1 :]
    before = [[one.rates for one in own if one.at < window.at][-1:] for window in late]
    is_late = len(late) > FEWEST_STEPS and len(own) >= len(rates) - 1
    if (
        is_late
        and len({tuple(window.rates) for window in late}) == 1
        and any(planned and planned != [late[0].rates] for planned in before)
    ):
        hint = "leave the rate to the schedule, which begins with the rate of the optimizer"
        yield own[0], "the loop sets its own rate over that of the schedule", hint
    schedule = own[0].scheduler if own else None
    if type(schedule) is LambdaLR:
        bases = schedule.base_lrs
        most = max(rates)
        is_squared = all(map(math.isclose, most, [base**2 for base in bases]))
        # At the end of the steps a warm-up may be anywhere.
        if is_squared and 0 < max(bases) < 1 and (rates[0] == most or rates.count(most) > 1):
            hint = "return a factor of the optimizer's rate: 1.0 leaves it as it is"
            yield own[0], "the lambda returns a rate in place of a factor", hint
    # The last steps of a cosine have next to no rate.
    ends = rates[-3 - len(rates) // 20 :]
    recent = max(itertools.chain(*ends), default=0)
    # One of a measure falls as long as that stays.
    is_of_a_measure = isinstance(schedule, ReduceLROnPlateau)
    # A loop that sets it by hand may have changed it before the first step.
    least = (1e-3 if own else 1e-2) * max(itertools.chain(*rates), default=0)
    if len(rates) > 3 and recent < least and not is_of_a_measure:
        hint = (
            "count the steps of the optimizer for the length of the schedule, not epochs; by hand, "
            "multiply the first rate, not that of the step before"
        )
        places: list[Event | str] = [
            *own[:1],
            *trace.places(r"\[.lr.\] *(\*=|=.*\[.lr.\])"),
            windows[0],
        ]
        yield places[0], f"the rate has fallen to {recent:.1g}, and steps go on", hint


def clipping(trace: Trace) -> Faults:
    """Gradients are clipped after the last backward call and unscaling, before the step."""
    for clip in trace.of(Clip):
        if clip.parameters and not clip.parameters & trace.held_parameters:
            hint = "clip the parameters of the model that is trained"
            yield clip, "it clips parameters that no optimizer has", hint
    for window in trace.windows:
        if not window.is_by_hand:
            yield from _find_misplaced_clipping(window)


def _find_misplaced_clipping(window: Step) -> Faults:
    for clip in window.of(Clip):
        before = {call.lines for call in window.all_calls if call.at < clip.at}
        after = {call.lines for call in window.calls if call.at > clip.at}
        if not clip.parameters & window.own:
            continue
        if after and not before:
            hint = "clip between the last backward and the step"
            yield clip, "gradients are clipped after the step, or before the backward", hint
        if before & after and window.calls[0].at < clip.at:
            hint = "clip once per step, after the last backward"
            yield clip, "a part of the window's gradient is clipped", hint


def scaler(trace: Trace) -> Faults:
    """A scaler scales each loss, steps and is updated."""
    calls = trace.of(Scaling)
    if not calls:
        for window in trace.windows:
            if window.calls and any(one.autocast == torch.float16 for one in window.forwards):
                yield (
                    window.calls[0],
                    "float16 without a scaler: small gradients become 0",
                    "use torch.amp.GradScaler, or bfloat16",
                )
        return
    yield from _find_partial_scaling(trace)
    if all(one.call != "update" for one in calls) and len(trace.of(Step)) > 1:
        yield calls[0], "the scale is never updated", "call scaler.update()"
    scalers = grouped((one for one in calls if one.call in ("scale", "update")), "scaler")
    for last, one in itertools.chain(*map(itertools.pairwise, scalers)):
        if last.call == one.call == "update":
            hint = "call scaler.update() once, after the steps of all optimizers"
            yield one, "the scale is updated again, without a loss in between", hint
    if len(scalers) > len(trace.by_optimizer) + 1:
        hint = "make the scaler once, before the loop, and let it keep its scale"
        yield calls[0], f"{len(scalers)} scalers, each with the scale of the first step", hint


def _find_partial_scaling(trace: Trace) -> Faults:
    """Find losses of a window that are not scaled, and gradients that are unscaled too early."""
    for window in trace.windows:
        plain = [call for call in window.calls if call.scale == 1]
        if plain and len(plain) < len(window.calls):
            hint = "call scaler.scale(loss).backward() for each loss"
            yield plain[0], "one loss is scaled and another is not", hint
        events = window.of(Scaling)
        names = {one.call for one in events}
        if window.calls and not plain and "step" not in names:
            measured = "the optimizer steps on scaled gradients"
            if "unscale_" in names:
                measured = "the optimizer steps also where scaling made gradients infinite"
            if not ("unscale_" in names and trace.places("isfinite|isinf|isnan|found_inf")):
                yield window, measured, "call scaler.step(optimizer) in place of optimizer.step()"
        # A model may have a scaler of its own.
        for event in events:
            is_own = event.scaler is events[-1].scaler
            is_within = len({call.at < event.at for call in window.calls}) > 1
            if is_own and is_within and event.call in ("unscale_", "update"):
                hint = f"call scaler.{event.call} once per step, after the last backward"
                yield event, f"{event.call} within the window of a step", hint


CHECKS = {
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
}
