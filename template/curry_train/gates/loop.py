"""Check the user's own training loop, as it runs, without a reference.

    verdicts = preflight(train)             # `train()` is the loop; it ends after a few steps
    assert all(verdict.passed is not False for verdict in verdicts)

Each check reads the trace of a few windows. Where it can't know, it does not apply.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import length_hint
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from ..core.digest import is_plain
from ..workloads.optimizers import parameter_ids, parameters_of
from .loop_events import (
    FEWEST_STEPS,
    STEPS,
    Backward,
    Clip,
    Dropout,
    Fault,
    Fetch,
    Forward,
    LossCall,
    Scaling,
    Schedule,
    Seeding,
    Step,
    Targets,
    Trace,
    grouped,
    world_size,
)
from .loop_loss import TOLERANCE, Doubt, Term
from .loop_trace import observe
from .loop_weights import has_equal_rows
from .verdict import NotApplicable, Verdict, not_applicable

DEFAULT_STEPS = 8
FEWEST_LABELS = 24
# A larger share of weights that a step takes by decay leaves nothing of them.
MOST_DECAY = 0.1
# Attributes that people set to freeze a module or parameter, without effect.
FLAGS = {"require_grad", "requires_grad"}


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
    for place, measured, hint in faults:
        measured = f"{place}: {measured}" if place else measured
        return Verdict(f"loop/{name}", False, measured, required, hint, ran=("loop",))
    return Verdict(f"loop/{name}", True, "held", required, ran=("loop",))


# The loss.


def accumulation(trace: Trace) -> Iterator[Fault]:
    """Each term of the losses of a window weighs as in one batch."""
    is_known = False
    for window in trace.windows:
        for call in window.calls:
            yield from _wrong_alone(call, window)
        yield from _same_batch(window)
        for several in _microbatches(trace, window):
            columns = _columns(several)
            is_known |= bool(columns)
            yield from _unequal(several, columns, window)
    calls = [(call, window) for window in trace.windows for call in window.calls]
    for pairs in grouped(calls, lambda pair: pair[0].lines):
        yield from _divided_by_masked([call for call, _ in pairs])
        faults = [[*_divided_for_nothing(*pair)] for pair in pairs]
        if len(faults) > 1 and all(faults):
            yield from faults[0]
    if not is_known:
        raise NotApplicable("no loss of several microbatches can be read")


def _wrong_alone(call: Backward, window: Step) -> Iterator[Fault]:
    if call.is_second and not window.is_clean(call):
        hint = "call backward once on each loss; a running total of losses has the earlier ones too"
        yield call.place, "the same loss a second time", hint
    # The number of samples in one microbatch.
    num_calls = sum(one.lines == call.lines for one in window.calls)
    samples = sum(one.num_samples for one in window.forwards) / num_calls
    for term in call.terms:
        # A mask of samples chooses among them, as that of labels of which a model is sure.
        if term.num_masked and term.name != "Sum" and term.num_terms > samples:
            yield _mean_over_masked(call, term)


def _mean_over_masked(call: Backward, term: Term) -> Fault:
    return (
        call.place,
        f"a mean over {term.num_terms:.0f} terms, of which {term.num_masked} are masked",
        "divide the sum by the number of terms that are not masked",
    )


def _divided_by_masked(calls: Sequence[Backward]) -> Iterator[Fault]:
    """Find sums of a line that are divided by all their terms, also by those that are masked."""
    for column in _columns(calls):
        masked = [term.num_masked for term in column]
        is_all = all(
            any(abs(by - term.num_terms - term.num_masked) < 0.5 for by in term.divisors)
            for term in column
        )
        # The count of a window, or of all ranks, may be that of one microbatch by chance.
        if column[0].name == "Sum" and is_all and len(set(masked)) > 1:
            at = masked.index(max(masked))
            yield _mean_over_masked(calls[at], column[at])


def _same_batch(window: Step) -> Iterator[Fault]:
    """Find backward calls of one line that add up gradients of the same batch."""
    calls = [one for one in window.calls if not one.in_step]
    lines = {one.lines for one in calls}
    targets = {one.cause.targets for one in calls if isinstance(one.cause, LossCall)}
    batches = {(id(one.module), one.digests) for one in window.forwards}
    is_added = not any(map(window.is_clean, calls[1:]))
    # Other random numbers than those of dropout are drawn for each on purpose, as of weights.
    is_drawn = len({one.value for one in calls}) > 1 and not any(
        one.drops or _acts(one.module) for one in window.forwards
    )
    is_same = len(lines) == len(batches) == len(targets) == 1 and not is_drawn
    if is_same and is_added and len(calls) == len(window.forwards) > 1:
        hint = "fetch a batch for each microbatch"
        yield window.forwards[1].place, "the microbatches of a step are the same", hint


def _microbatches(trace: Trace, window: Step) -> Iterator[list[Backward]]:
    """Yield backward calls of the same lines that have a batch each."""
    digests = [one.digests for one in window.forwards]
    loaders = [
        {id(fetch.loader) for fetch in trace.fetches[digest]}
        for one in digests
        for digest in one
        if digest in trace.fetches
    ]
    # Several loaders are several tasks.
    if window.is_by_hand or (loaders and not set.intersection(*loaders)):
        return
    for several in grouped(window.calls, lambda call: call.lines):
        # A closure that an optimizer calls several times is no accumulation.
        is_closure = all(call.in_step for call in several)
        # Without batches of their own they are several losses of one.
        has_own = not digests or len({*digests}) >= len(several)
        if len(several) > 1 and has_own and not is_closure:
            yield several


def _columns(calls: Sequence[Backward]) -> list[list[Term]]:
    """Return for each part of the loss what it was in each call; nothing if calls differ."""
    shapes = [[(term.name, term.reduction) for term in call.terms] for call in calls]
    if any(one != shapes[0] for one in shapes):
        return []
    columns = [list(column) for column in zip(*(call.terms for call in calls), strict=True)]
    return [one for one in columns if all(t.reduction and t.num_terms and t.factor for t in one)]


def totals(calls: Sequence[Backward]) -> list[float]:
    """Return the weight of each part of a window's loss that is a mean, or divided to be one."""
    several = grouped(calls, lambda call: call.lines)
    # Microbatches may have a line each, as with and without sync.
    return [
        sum(term.strength for term in column)
        for of_line in (several[-1:] if len(several) < 2 else [several[-1], calls])
        for column in _columns(of_line)
        if column[0].reduction == "mean" or column[0].divisors
    ]


def _unequal(
    calls: Sequence[Backward],
    columns: Sequence[Sequence[Term]],
    window: Step,
) -> Iterator[Fault]:
    # The loop may divide gradients in place of losses.
    factor = window.factor or 1.0
    strengths = [[factor * term.strength for term in column] for column in columns]
    totals = [sum(column) for column in strengths]
    number, is_alone = len(calls), world_size() == 1
    # How many times each part is divided by the number of microbatches.
    divisions = [
        sum(abs(by - number) < TOLERANCE for by in (*column[0].divisors, 1 / factor))
        for column in columns
    ]
    if not any(abs(total - 1) < TOLERANCE for total in totals):
        # A part may weigh more than 1 by a factor of the user's.
        samples = max(1, sum(one.num_samples for one in window.forwards))
        parts = zip(totals, strengths, columns, divisions, strict=True)
        for total, weights, column, times in parts:
            # A sum over the values of samples, or of positions, may be divided by their number.
            num_values = sum(term.num_terms for term in column) / samples
            is_mean = column[0].reduction == "mean" or not any(
                abs(total - by) <= TOLERANCE for by in (num_values, column[0].width)
            )
            # Of a sum by hand it is not known how many terms count, and a rank may weigh more than
            # others where they divide by the terms of all.
            is_certain = (is_alone and column[0].name != "Sum") or min(weights) > 1 - TOLERANCE
            if is_mean and is_certain and max(weights) < 1 + TOLERANCE < total:
                yield (
                    calls[0].place,
                    f"the gradients of a window are {total:.3g} times those of one batch",
                    f"divide the loss by the {number} microbatches of the window, or its sum by "
                    "the number of terms in all of them (num_items_in_batch of a Trainer, which "
                    "divides itself if model.accepts_loss_kwargs is False); where an epoch ends "
                    "within a window, step or call zero_grad() there",
                )
            is_twice = times > (column[0].reduction == "mean")
            # Whether a division by the ranks is one too many is seen where they are compared.
            if is_twice and number != world_size() and abs(total * number - 1) < TOLERANCE:
                yield (
                    calls[0].place,
                    f"the loss is divided by the {number} microbatches twice",
                    "divide once; accelerator.backward and Trainers do it themselves",
                )
    is_known = all(by or abs(of - 1) > TOLERANCE for by, of in zip(divisions, totals, strict=True))
    if is_alone and any(divisions) and not all(divisions) and is_known:
        hint = f"divide each part of the loss by the {number} microbatches, as the others"
        yield calls[0].place, "a part of the loss counts once per microbatch", hint
    # An epoch may end with a short batch.
    if len({one.num_samples for one in window.forwards}) > 1:
        return
    for column in columns:
        weights = [abs(term.weight) for term in column]
        spread = max(weights) / min(weights)
        if spread > 1 + TOLERANCE:
            yield (
                calls[0].place,
                f"a term of one microbatch weighs {spread:.3g} times that of another",
                "sum each loss and divide by the number of terms of the whole window",
            )


def _divided_for_nothing(call: Backward, window: Step) -> Iterator[Fault]:
    """Find the one loss of a step that is a mean, and is divided again."""
    if len(window.calls) > 1 or len(call.terms) != 1:
        return
    (term,) = call.terms
    by = [one for one in term.divisors if one > 1.5 and abs(one - round(one)) < 1e-6]
    is_half = by == [2] and term.name in ("Mean", "Mse", "mse_loss")
    # A division by the ranks is looked at where they are compared.
    if term.reduction != "mean" or len(by) != 1 or is_half or by == [world_size()]:
        return
    if abs(term.strength * by[0] - 1) <= TOLERANCE:
        yield (
            call.place,
            f"a mean loss is divided by {by[0]:.0f}, and the step at {window.place} has one "
            "microbatch",
            "divide by the microbatches of a step, and step after that many of them",
        )


def _unused(trace: Trace) -> Iterator[Fault]:
    """Find a line whose losses are computed several times in each window, and used once."""
    for own in trace.by_optimizer:
        of_windows = [
            several
            for window in own
            for several in grouped(window.of(LossCall), lambda call: call.lines)
        ]
        for windows in grouped(of_windows, lambda several: several[0].lines):
            flags = [[call.is_used for call in several] for several in windows]
            if len(flags) > 1 and all(sum(one) == one[-1] == 1 < len(one) for one in flags):
                yield (
                    windows[0][0].place,
                    f"of {len(flags[0])} losses of a window only the last is used",
                    "call backward for each, or add them up",
                )


def sign(trace: Trace) -> Iterator[Fault]:
    """Losses are made smaller, and are finite."""
    by_loss = ("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
    for window in trace.windows if len(trace.by_optimizer) == 1 else ():
        is_up = bool(window.optimizer.defaults.get("maximize"))
        hint = f"remove {'maximize=True' if is_up else 'the minus of the loss'}"
        # An attack learns a change of the inputs that makes the loss larger.
        is_model = any(id(one) in window.own for root in trace.roots for one in root.parameters())
        for call in window.calls if is_model else ():
            is_known = all(term.name in by_loss for term in call.terms)
            if is_known and {(term.factor > 0) == is_up for term in call.terms} == {True}:
                place = window.place if is_up else call.place
                yield place, "the loss is made larger", hint


def logits(trace: Trace) -> Iterable[Fault]:
    """A loss gets logits or log-probabilities, as it needs; what is wrong is seen at its call."""
    _loss_calls(trace)
    return ()


def targets(trace: Trace) -> Iterator[Fault]:
    """Targets are the ones to learn."""
    found = trace.of(Targets)
    calls = trace.of(LossCall) if found else _loss_calls(trace)
    for one in found:
        for measured, hint in _wrong_tokens(one):
            yield one.place, measured, hint
    fillers = Counter((one.place, one.filler) for one in found)
    for (place, filler), number in fillers.items():
        if filler is not None and number >= FEWEST_STEPS:
            hint = f"set labels of padding to -100, or ignore_index={filler}"
            yield place, f"the targets {filler}, which are padding, count", hint
    yield from _labels(trace, calls)


def _loss_calls(trace: Trace) -> list[LossCall]:
    calls = trace.of(LossCall)
    if not calls:
        raise NotApplicable("no loss function of torch was called")
    return calls


def _wrong_tokens(targets: Targets) -> Iterator[Doubt]:
    """Find targets that are the tokens of the model's input, or other ones than the next."""
    same = targets.same_as_input
    if same.get(1, 0) < 0.9:
        if same.get(0, 0) > 0.99:
            hint = "shift the targets by one token to the left"
            yield "the targets are the model's own input", hint
        if same.get(2, 0) > 0.99:
            hint = "shift once: models of Hugging Face shift the labels themselves"
            yield "the targets are shifted by two tokens", hint
    if targets.counts_padding and max(same.get(0, 0), same.get(1, 0)) > 0.5:
        hint = "set labels of padding to the ignored index, -100"
        yield "targets count where the attention mask is 0", hint


def _labels(trace: Trace, calls: Sequence[LossCall]) -> Iterator[Fault]:
    """Labels of the data are several, in each batch, and not among the inputs."""
    for of_line in grouped(calls, lambda call: call.lines):
        columns = frozenset.intersection(*(call.columns or frozenset() for call in of_line))
        if columns and sum(call.term.num_terms for call in of_line) >= FEWEST_LABELS:
            measured = f"column {min(columns)} of the model's input is the target"
            yield of_line[0].place, measured, "leave the target out of the input"
    for one in trace.of(Fetch) if not calls else ():
        # A loss by hand does not show its targets.
        one.labels = next(iter(one.integers.values())) if len(one.integers) == 1 else ()
    labelled = [one for one in trace.trained_fetches if len(one.labels) > 3]
    shuffled = [one for one in calls if one.is_shuffled]
    if len(shuffled) >= FEWEST_STEPS and not any(one.is_used for one in trace.of(Fetch)):
        hint = "index inputs and labels by the same permutation"
        yield shuffled[0].place, "the labels are in another order than the inputs", hint
    kinds = {label for one in labelled for label in one.labels}
    for several in grouped(labelled, lambda one: id(one.loader)):
        labels = [label for one in several for label in one.labels]
        # Labels that name the loader, as domains do, differ between loaders.
        if len(kinds) == 1 and len(labels) >= FEWEST_LABELS:
            measured = f"all {len(labels)} labels are {labels[0]}"
            yield several[0].place, measured, "look at how labels are made"
        elif (
            len({*labels}) > 1
            and len(several) > 2
            and all(len({*one.labels}) == 1 for one in several)
        ):
            hint = "shuffle the data: DataLoader(..., shuffle=True)"
            yield several[0].place, "each batch has samples of one class only", hint


# Gradients and optimizers.


def zeroed(trace: Trace) -> Iterator[Fault]:
    """Gradients are set to zero once per window, before its first backward call."""
    for window in trace.windows:
        calls = window.calls
        if not calls:
            versions = window.previous and window.previous.versions
            if window.versions == versions and window.has_gradients and not window.in_backward:
                yield (
                    window.place,
                    "a step on the gradients of the step before, without a backward call",
                    "call optimizer.step() once per backward of a window, then zero_grad()",
                )
            continue
        if window.is_by_hand:
            continue
        if not any(map(window.is_clean, calls)):
            yield (
                # A zero_grad of this window comes too late, or leaves parameters out.
                [window, *window.zeros][-1].place,
                "a step with gradients of the step before",
                "call optimizer.zero_grad() once per step, before the first backward",
            )
        yield from _at_other_weights(window)
        for attack, call in itertools.pairwise(calls):
            if attack.of_inputs and attack.lines != call.lines and not window.is_clean(call):
                yield (
                    attack.place,
                    "gradients of an attack on the inputs are in the step",
                    "take them by torch.autograd.grad(loss, inputs), or call zero_grad() after it",
                )
        yield from _lost(window)
        yield from _of_another_loss(window, trace.held)


def _at_other_weights(window: Step) -> Iterator[Fault]:
    """Find faults of a step that first changes the weights and takes gradients there, as SAM."""
    weights = [one.weights for one in window.forwards if one.module is window.forwards[0].module]
    # SAM changes all weights. An attack on the outputs of one layer changes that layer alone.
    change = min((max(ends) - min(ends) for ends in zip(*weights, strict=True)), default=0.0)
    calls = window.all_calls
    if not change or len({one.digests for one in window.forwards}) > 1 or len(calls) < 2:
        return
    if not any(map(window.is_clean, calls[1:])):
        hint = "call zero_grad() before the second backward"
        yield calls[1].place, "gradients at two points of the weights are added", hint
    last = window.previous
    if last is not None and abs(window.weights[0] - last.weights[1]) > 0.05 * change:
        hint = "put the weights back before the step"
        measured = f"weights that were changed for a trial, before {calls[1].place}, stay so"
        yield window.place, measured, hint


def _lost(window: Step) -> Iterator[Fault]:
    """Find gradients of the window that are set to zero before its step."""
    calls, index = window.calls, window.events.index
    zeros = [one for one in window.zeros if not one.in_step]
    if not window.has_gradients and any(call.value for call in calls):
        for zero in zeros:
            if index(zero) > index(calls[-1]):
                hint = "move zero_grad() behind the step"
                yield zero.place, "gradients are set to zero before the step", hint
    of_line = [call for call in calls if call.lines == calls[-1].lines and call.reached]
    for call in of_line[1:]:
        # Gradients may be 0 by themselves.
        if window.is_clean(call) and not call.in_step and not call.is_next:
            between = [one for one in zeros if index(of_line[0]) < index(one) < index(call)]
            yield (
                [call, *between][-1].place,
                "gradients of earlier microbatches are set to zero",
                "call zero_grad() once per step, not per microbatch",
            )


def _of_another_loss(window: Step, held: set[int]) -> Iterator[Fault]:
    """Find gradients of a loss that another optimizer has stepped on already."""
    events, calls = window.events, window.calls
    clean = [number for number, call in enumerate(calls) if window.is_clean(call)]
    used = calls[max(clean, default=0) :]
    own = [call for call in used if call.reached & held <= window.own]
    for call in used[: used.index(own[0])] if own else ():
        between = events[events.index(call) : events.index(own[0])]
        if own[0].lines != call.lines and any(
            isinstance(one, Step) and call.reached & parameter_ids(one.optimizer) for one in between
        ):
            yield (
                window.place,
                f"a step with gradients of the loss at {call.place}, which another optimizer "
                "has used",
                "call optimizer.zero_grad() before the backward calls of its own loss",
            )


def optimizer(trace: Trace) -> Iterator[Fault]:
    """The optimizers hold each parameter that gets a gradient, once."""
    steps = trace.of(Step)
    if not steps:
        raise NotApplicable("the loop made no step of an optimizer")
    missing = [*_missing(trace), *trace.bare]
    origin = steps[-1].origin
    seen = set[int]()
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
            hint = "give each parameter once, and tie layers by head.weight = embedding.weight"
            measured = f"a parameter, or its memory, is in {type(first.optimizer).__name__} twice"
            yield first.origin, measured, hint
    if missing:
        yield (
            origin,
            f"in no optimizer, but with gradients: {trace.named(missing)}; the last step is at "
            f"{steps[-1].place}",
            "give the optimizer the parameters of the model that is trained, after it is moved, "
            "wrapped or copied; freeze the others by requires_grad_(False)",
        )


def _missing(trace: Trace) -> Iterator[int]:
    """Yield parameters that get gradients, next to others that an optimizer has."""
    inside = {id(module) for root in trace.roots for module in root.modules()}
    # Of modules that ran, and that no module which was called has.
    alone = [module for key, (module, _) in trace.ran[True].items() if key not in inside]
    stepped = (parameters_of(one.optimizer) for one, *_ in trace.by_optimizer)
    shapes = {one.shape for several in stepped for one in several}
    for root in trace.roots:
        trained = [id(one) for one in root.parameters() if one.requires_grad]
        own = [one for one in trained if one in trace.with_gradient]
        calls = [one for one in trace.trained_forwards if one.module is root]
        # A network of which nothing is trained may only pass gradients on, as in a perceptual loss.
        is_first = bool(calls) and all(one.training and not one.passes_on for one in calls)
        # The loop may step it by other means, or a copy of it, as in full precision.
        is_moved = len({one.weights for one in calls}) > 1 or shapes.issuperset(
            one.shape for one in root.parameters()
        )
        if (is_first and not is_moved) or not trace.held.isdisjoint(own):
            own += [id(one) for module in alone for one in module.parameters(recurse=False)]
            yield from [one for one in own if one in trace.with_gradient - trace.held]


def _never_steps(trace: Trace) -> Iterator[Fault]:
    """Find an optimizer without a step, whose parameters get gradients for each of another one."""
    stepping = (one.optimizer for one in trace.events if isinstance(one, STEPS))
    others = set[int]().union(*map(parameter_ids, stepping))
    for one in trace.optimizers:
        own = parameter_ids(one) - others
        windows = [[call.reached & own for call in window.all_calls] for window in trace.windows]
        windows = windows or [[call.reached & own] for call in trace.of(Backward)]
        if id(one) in trace.made and len(windows) >= FEWEST_STEPS and all(map(any, windows)):
            yield (
                trace.made[id(one)].place,
                f"this {type(one).__name__} makes no step, and its parameters get gradients",
                "call its step() too; until then, freeze its parameters by requires_grad_(False)",
            )


def _stepped_twice(trace: Trace) -> Iterator[Fault]:
    last: Step | None = None
    for event in trace.events:
        if isinstance(event, Backward):
            last = None
        elif isinstance(event, Step) and not event.in_backward:
            if last is not None and last.optimizer is not event.optimizer:
                shared = parameter_ids(last.optimizer) & parameter_ids(event.optimizer)
                if shared:
                    yield (
                        event.origin,
                        f"the optimizers of {last.origin} and {event.origin} step on the same "
                        f"gradients of {trace.named(shared)}, at {last.place} and {event.place}",
                        "give each parameter to one optimizer",
                    )
            last = event


def _made_anew(trace: Trace) -> Iterator[Fault]:
    """Find moments that are lost again and again, as where an optimizer is made anew."""
    for windows in grouped(trace.windows, lambda one: (one.origin, *sorted(one.own))):
        stages = [windows[:1]]
        # Moments that are all 0, or as after an earlier step, are lost; others the user changed.
        states = {0.0, *(after for _, after in (one.state for one in windows))}
        for last, window in itertools.pairwise(windows):
            state, _ = window.state
            if state in states and state != last.state[1]:
                stages.append([])
            stages[-1].append(window)
        # In stages of a training each has data of its own, or many steps.
        data = [
            {id(one.loader.dataset) for window in stage for one in window.of(Fetch)}
            for stage in stages
        ]
        is_staged = all(data) and not set.intersection(*data)
        is_staged |= not any(data) and min(map(len, stages)) > FEWEST_STEPS
        # One optimizer may begin anew at times; it may be loaded as it was after its first step.
        is_anew = len({id(one.optimizer) for one in windows}) > 1
        if len(stages) > 2 and (is_anew or len(stages) >= len(windows) - 1) and not is_staged:
            yield (
                windows[0].origin,
                f"the state of {type(windows[0].optimizer).__name__} is lost {len(stages) - 1} "
                "times",
                "make the optimizer once, before the loop, and let it keep its state",
            )


def moves(trace: Trace) -> Iterator[Fault]:
    """Trained parameters move, and frozen ones do not."""
    if any(step.moved is None for step in trace.of(Step)):
        raise NotApplicable("too many parameters to compare")
    for steps in trace.by_optimizer:
        yield from _still(trace, steps)
        yield from _without_effect(trace, steps)


def _still(trace: Trace, steps: Sequence[Step]) -> Iterator[Fault]:
    """Find parameters of an optimizer that do not move, or that only decay moves."""
    kind = type(steps[0].optimizer).__name__
    last = steps[-1].place
    if len(steps) > 1 and not any(step.moved for step in steps):
        hint = (
            "give it the parameters of the model that is trained, and a learning rate; where your "
            "code sets the rate, look at its first values"
        )
        why = _why_nothing_moves(steps)
        measured = f"no parameter of {kind} moves: {why}, see {steps[0].place}"
        yield steps[0].origin, measured, hint
    elif len(steps) > 5 and not any(step.graded for step in steps[-4:]):
        hint = (
            "make the optimizer for the model that is trained now, after it is made anew, loaded "
            "or frozen"
        )
        yield last, f"no parameter of {kind} has a gradient any more", hint
    if len(steps) < FEWEST_STEPS:
        return
    # The last backward call, where there is one.
    place = [steps[-1], *steps[-1].calls][-1].place
    graded = frozenset.intersection(*(step.graded for step in steps))
    flat = graded.intersection(*(step.without_slope for step in steps))
    if flat and not any(step.has_gradients for step in steps):
        hint = "look for a rounding, a clamp, an argmax or a ratio of equal values before the loss"
        yield place, f"all gradients of {kind} are 0", hint
    # Of two matrices that are multiplied one that is 0 alone has a gradient.
    wide = [one for one in parameters_of(steps[0].optimizer) if id(one) in flat and one.dim() == 2]
    # Square ones may well be unused so far, as a table of zeros for each stage.
    fits = {one.shape[0] for one in wide if one.shape[0] < one.shape[1]}
    fits &= {one.shape[1] for one in wide if one.shape[1] < one.shape[0]}
    is_product = fits and len(flat) == len(wide) and not all(one.any() for one in wide)
    # A bias that has a gradient tells that the layer is used.
    used = {trace.names.get(one) for one in graded - flat}
    dead = [
        one
        for one in flat
        if is_product or trace.names.get(one, "").removesuffix("weight") + "bias" in used
    ]
    if dead:
        measured = f"the gradient of {trace.named(dead)} is 0 in each step, as where its inputs are"
        hint = (
            "look at a dropout of 1, a dead activation, a hook, a factor of 0, or two matrices "
            "that are multiplied and both begin at 0"
        )
        yield place, measured, hint
    # A rate may be set after the first step alone.
    moved = frozenset().union(*(step.moved or () for step in steps[len(steps) > 3 :]))
    still = graded - moved - frozenset().union(*(step.without_slope for step in steps))
    for group in steps[0].optimizer.param_groups:
        # A schedule may let a part of the model wait.
        if not group["lr"] and group.get("initial_lr"):
            still -= {*map(id, group["params"])}
    if moved and still and all(any(step.rates) for step in steps):
        hint = "give their group a learning rate, or freeze them by requires_grad_(False)"
        yield last, f"{trace.named(still)} have gradients and do not move", hint


def _frozen_by_flag(trace: Trace) -> Iterator[Fault]:
    """Find parts of trained models that an attribute is to freeze, without effect."""
    for one in (it for root in trace.roots for it in (*root.modules(), *root.parameters())):
        own = one.parameters() if isinstance(one, nn.Module) else [one]
        flags = {name for name, value in vars(one).items() if value is False}
        for flag in flags & FLAGS if trace.with_gradient.intersection(map(id, own)) else ():
            places = [*trace.places(rf"\.{flag} *= *False"), ""]
            hint = "module.requires_grad_(False), or parameter.requires_grad = False for each"
            yield places[0], f"{flag} of a {type(one).__name__} freezes nothing", hint


def _alike(trace: Trace) -> Iterator[Fault]:
    """Find weights that learn the same in all rows, because they began so."""
    trained = [one for several in map(parameters_of, trace.optimizers) for one in several]
    living = (one for one in trained if id(one) in trace.with_gradient)
    if equal := [id(one) for one in living if has_equal_rows(one) and one.any()]:
        measured = f"all rows of {trace.named(equal)} are alike, and learn the same"
        yield trace.of(Step)[-1].place, measured, "initialize weights by random numbers"


def _its_own_reference(trace: Trace) -> Iterator[Fault]:
    """Find a model that is compared with itself, as by a loss on preferences."""
    windows = [window for window in trace.windows if window.calls and window.moved]
    values = {call.value for window in windows for call in window.calls}
    is_same = all(
        {(one.module, one.digests) for one in window.forwards}
        & {(one.module, one.digests) for one in window.of(Forward) if not one.is_trained_on}
        for window in windows
    )
    # A loss of 0 or 1 may be made for its gradient alone.
    if is_same and len(windows) >= FEWEST_STEPS and len(values) == 1 and max(values) % 1:
        measured = f"the loss is {max(values):.3g} in each step: the model is its own reference"
        yield windows[0].calls[0].place, measured, "compare with a copy: copy.deepcopy(model)"


def _without_effect(trace: Trace, steps: Sequence[Step]) -> Iterator[Fault]:
    """Find steps whose updates are rounded to nothing, or undone."""
    for group in steps[0].optimizer.param_groups:
        # Of the optimizers that multiply weights by what is left.
        decays = group.get("decoupled_weight_decay") or isinstance(
            steps[0].optimizer, torch.optim.SGD
        )
        share = float(group["lr"] * group["weight_decay"]) if decays else 0.0
        if share > MOST_DECAY:
            hint = "lower weight_decay, which is multiplied by the learning rate"
            yield steps[0].origin, f"each step takes {share:.0%} of the weights by decay", hint
    half = [step.half_moved for step in steps if step.half_moved is not None and any(step.rates)]
    if len(half) > 1 and max(half) < 0.5:
        yield (
            steps[0].place,
            f"{1 - max(half):.0%} of the updates in half precision are rounded to nothing",
            "keep the parameters in float32, and use autocast",
        )
    # Where another optimizer steps, a copy of its model may begin anew.
    for old, new in itertools.pairwise(steps) if len(trace.by_optimizer) == 1 else ():
        before, after = old.weights
        if old.moved and before == new.weights[0] != after:
            yield (
                new.place,
                "parameters are at this step what they were at the one before",
                "make or load the model once, before the loop, and look at what copies into it",
            )


def _without_gradient(trace: Trace) -> Iterator[Fault]:
    """Find trained parameters that ran and get no gradient, where it is known why."""
    idle = set[int]()
    for key, (module, place) in (trace.ran[False] | trace.ran[True]).items():
        own = [id(one) for one in module.parameters(recurse=False) if one.requires_grad]
        still = trace.held.difference(trace.with_gradient).intersection(own)
        if key in trace.ran[True]:
            idle |= still
        elif still:
            yield (
                place or trace.of(Step)[-1].place,
                "trained parameters get no gradient, because they ran without: "
                + trace.named(still),
                "remove the no_grad; with reentrant checkpointing the input of a block needs a "
                "gradient: use_reentrant=False, or model.enable_input_require_grads()",
            )
    used = {call.lines for call in trace.of(LossCall) if call.is_used}
    unused = [call for call in trace.of(LossCall) if call.lines not in used]
    if idle and unused:
        yield (
            unused[0].place,
            f"no backward call reaches this loss, and {trace.named(idle)} get no gradient",
            "add it to the loss that backward is called on",
        )
    for place, behind in trace.cut.items():
        if detached := behind & trace.held - trace.with_gradient:
            measured = "trained parameters are detached, and get no gradient: "
            hint = "remove the detach, .data, numpy or argmax, or freeze them"
            yield place, measured + trace.named(detached), hint


def _why_nothing_moves(steps: Sequence[Step]) -> str:
    if not any(any(step.rates) for step in steps):
        return "its learning rate is 0"
    if not any(step.has_gradients for step in steps):
        return "its gradients are None or 0"
    return "its updates are 0"


def schedule(trace: Trace) -> Iterator[Fault]:
    """A schedule steps at most once per step of the optimizer, after it."""
    events = trace.of(Schedule)
    for own_steps in grouped(events, lambda event: id(event.scheduler)):
        one = own_steps[0].scheduler
        # Of one that wraps the optimizer that steps, the groups are the same.
        groups = one.optimizer.param_groups
        windows = [window for window in trace.windows if window.optimizer.param_groups is groups]
        if type(one) is CosineAnnealingLR and one.last_epoch > one.T_max:
            places = [made for made, of in trace.schedules if of is one.optimizer]
            place = own_steps[0].place
            hint = f"give it the number of all its steps, which are made at {place}"
            yield [place, *places][-1], f"T_max={one.T_max} is over, and the rate rises again", hint
        if not windows and len(own_steps) > 1:
            yield (
                own_steps[0].place,
                "the schedule is of an optimizer that makes no step",
                "make the schedule for the optimizer that steps",
            )
        for window in windows:
            own = [event for event in window.of(Schedule) if event.scheduler is one]
            if own and trace.events[0] is window.events[0]:
                yield (
                    own[0].place,
                    "the schedule steps before the optimizer's first step",
                    "call scheduler.step() after optimizer.step()",
                )
            if own and len(own) > own[0].num_expected:
                yield (
                    own[0].place,
                    f"{len(own)} steps of the schedule per optimizer step",
                    "step the schedule once per optimizer step, not per microbatch",
                )
    for windows in trace.by_optimizer:
        yield from _without_schedule(windows, events)
    if not events:
        raise NotApplicable("no schedule of torch made a step")


def _never_stepped(trace: Trace) -> Iterator[Fault]:
    """Find a schedule without a step, where the code has no call of `step` that did not run."""
    moved = {id(one.scheduler.optimizer.param_groups) for one in trace.of(Schedule)}
    ran = {line for one in trace.events if isinstance(one, (*STEPS, Scaling)) for line in one.lines}
    calls = trace.places(r"\.step\b")
    for place, optimizer in trace.schedules if calls and ran.issuperset(calls) else ():
        steps = [one for one in trace.of(Step) if one.optimizer is optimizer]
        if len(steps) >= FEWEST_STEPS and id(optimizer.param_groups) not in moved:
            hint = f"call its step() after the optimizer's, at {steps[-1].place}"
            yield place, "this schedule never makes a step", hint


def _without_schedule(windows: Sequence[Step], events: Sequence[Schedule]) -> Iterator[Fault]:
    """Find a schedule that has no effect, or that leaves no learning rate."""
    groups = windows[0].optimizer.param_groups
    own = [one for one in events if one.scheduler.optimizer.param_groups is groups]
    is_anew = len({id(one.scheduler) for one in own}) == len(own)
    if len(own) > 2 and is_anew and len({one.lines for one in own}) == 1:
        hint = "make the schedule once, before the loop"
        yield own[0].place, "a new schedule in each step begins anew", hint
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
    # A schedule by epochs leaves the rate for many steps.
    if (
        len({tuple(one.rates) for one in own}) > 2
        and len(own) >= len(rates) - 1
        and rates.count(rates[0]) == len(rates)
    ):
        hint = "leave the rate to the schedule, which begins with the rate of the optimizer"
        yield own[0].place, "the loop sets its own rate over that of the schedule", hint
    if own and type(own[0].scheduler) is LambdaLR:
        bases = own[0].scheduler.base_lrs
        most = max(rates)
        is_squared = all(map(math.isclose, most, [base**2 for base in bases]))
        # At the end of the steps a warm-up may be anywhere.
        if is_squared and 0 < max(bases) < 1 and (rates[0] == most or rates.count(most) > 1):
            hint = "return a factor of the optimizer's rate: 1.0 leaves it as it is"
            yield own[0].place, "the lambda returns a rate in place of a factor", hint
    recent = max((rate for one in rates[-3:] for rate in one), default=0)
    # One of a measure falls as long as that stays.
    is_planned = own and not isinstance(own[0].scheduler, ReduceLROnPlateau)
    if is_planned and len(rates) > 3 and recent < 1e-3 * max(rate for one in rates for rate in one):
        hint = "count the steps of the optimizer for the length of the schedule, not epochs"
        yield own[0].place, f"the rate has fallen to {recent:.1g}, and steps go on", hint


def clipping(trace: Trace) -> Iterator[Fault]:
    """Gradients are clipped after the last backward call and unscaling, before the step."""
    clips = trace.of(Clip)
    if not clips:
        raise NotApplicable("the loop does not clip")
    for clip in clips:
        if clip.parameters and not clip.parameters & trace.held:
            hint = "clip the parameters of the model that is trained"
            yield clip.place, "it clips parameters that no optimizer has", hint
    for window in trace.windows:
        if not window.is_by_hand:
            yield from _clipped_too_late_or_early(window)


def _clipped_too_late_or_early(window: Step) -> Iterator[Fault]:
    for clip in window.of(Clip):
        at = window.events.index
        before = {call.lines for call in window.all_calls if at(call) < at(clip)}
        after = {call.lines for call in window.calls if at(call) > at(clip)}
        if not clip.parameters & window.own:
            continue
        if after and not before:
            hint = "clip between the last backward and the step"
            yield clip.place, "gradients are clipped after the step", hint
        if before & after and at(window.calls[0]) < at(clip):
            hint = "clip once per step, after the last backward"
            yield clip.place, "a part of the window's gradient is clipped", hint


def scaler(trace: Trace) -> Iterator[Fault]:
    """A scaler scales each loss, steps and is updated."""
    calls = trace.of(Scaling)
    if not calls:
        for window in trace.windows:
            if window.calls and any(one.autocast == torch.float16 for one in window.forwards):
                yield (
                    window.calls[0].place,
                    "float16 without a scaler: small gradients become 0",
                    "use torch.amp.GradScaler, or bfloat16",
                )
        raise NotApplicable("the loop has no scaler that is on")
    yield from _scaled_in_part(trace)
    if all(one.call != "update" for one in calls) and len(trace.of(Step)) > 1:
        yield calls[0].place, "the scale is never updated", "call scaler.update()"


def _scaled_in_part(trace: Trace) -> Iterator[Fault]:
    """Find losses of a window that are not scaled, and gradients that are unscaled too early."""
    for window in trace.windows:
        plain = [call for call in window.calls if call.scale == 1]
        if plain and len(plain) < len(window.calls):
            hint = "call scaler.scale(loss).backward() for each loss"
            yield plain[0].place, "one loss is scaled and another is not", hint
        events = window.of(Scaling)
        names = {one.call for one in events}
        if window.calls and not plain and "step" not in names:
            measured = "the optimizer steps on scaled gradients"
            if "unscale_" in names:
                measured = "the optimizer steps also where scaling made gradients infinite"
            if not ("unscale_" in names and trace.places("isfinite|isinf|isnan|found_inf")):
                hint = "call scaler.step(optimizer) in place of optimizer.step()"
                yield window.place, measured, hint
        # A model may have a scaler of its own.
        for event in [one for one in events if one.scaler is events[-1].scaler]:
            at = window.events.index(event)
            is_within = {call in window.events[:at] for call in window.calls} == {True, False}
            if event.call in ("unscale_", "update") and is_within:
                hint = f"call scaler.{event.call} once per step, after the last backward"
                yield event.place, f"{event.call} within the window of a step", hint


# The model and the data.


def mode(trace: Trace) -> Iterator[Fault]:
    """The model is in training mode in forward passes that are trained on, and only there."""
    # Digests of batches from loaders for evaluation: no model was trained on any of them.
    loaders = {id(one.loader) for one in trace.trained_fetches}
    others = {
        digest for one in trace.of(Fetch) if id(one.loader) not in loaders for digest in one.digests
    }
    # Forward passes whose gradients are for what the model was given.
    attacks = set[Forward]()
    is_attack = False
    for event in reversed(trace.events):
        if isinstance(event, Backward):
            is_attack = event.of_inputs
        elif isinstance(event, Forward) and is_attack:
            attacks.add(event)
    # One of several models may be in eval mode from the start on purpose, as a frozen BatchNorm.
    in_training = {one.module for one in trace.trained_forwards if one.training}
    evaluated = {
        one
        for one in trace.of(Forward)
        # An input with a gradient is attacked.
        if one.training and not (one.is_trained_on or one.passes_on) and others & {*one.digests}
    }
    # An evaluation in every step belongs to the step, as where it makes targets.
    is_part = len(trace.windows) >= FEWEST_STEPS and all(
        evaluated.intersection(window.events) for window in trace.windows
    )
    for one in trace.of(Forward):
        if one.module not in trace.roots or not (one.drops or _acts(one.module)):
            continue
        is_left = one.module in in_training or not in_training
        if one.is_trained_on and not one.training and is_left and one not in attacks:
            hint = (
                "call model.train() before training, and again after each evaluation; a method "
                "train of your own calls super().train(mode)"
            )
            measured = f"in eval mode from here on: the trained forward pass at {one.place}"
            yield one.origin, measured, hint
        elif one in evaluated and not is_part:
            hint = "call model.eval() before evaluation, and model.train() after it"
            yield one.place, "an evaluation in training mode", hint


def _recomputed_differently(trace: Trace) -> Iterator[Fault]:
    for window in trace.windows:
        drawn = [one for one in window.of(Dropout) if not one.is_recomputed]
        generators = {one.generator for one in drawn}
        places = {one.kind: one.place for one in reversed(drawn)}
        for event in window.of(Dropout):
            if event.kind in places and event.generator not in generators:
                hint = "leave out preserve_rng_state=False of the checkpoint"
                yield places[event.kind], "dropout is recomputed with other random numbers", hint


def _untrained(trace: Trace) -> Iterator[Fault]:
    """Find a model that is not trained, as a teacher, and that is always in training mode."""
    found = []
    for window in trace.windows:
        for one in {event.module: event for event in window.of(Forward)}.values():
            is_trained = any(
                own.requires_grad and id(own) in trace.held for own in one.module.parameters()
            )
            if one.training and not (one.is_trained_on or is_trained):
                found.append(one)
    for forwards in grouped(found, lambda one: one.module):
        if (
            len(forwards) >= FEWEST_STEPS
            # An average of the model moves.
            and len({one.weights for one in forwards}) == 1
            and _acts(forwards[0].module)
        ):
            hint = "call eval() on a teacher or another model that is not trained"
            yield forwards[0].place, "a model that is not trained is in training mode", hint


def _acts(model: nn.Module) -> bool:
    """Return whether a model computes something else in training mode, at any rate.

    A frozen part of a model that is trained may stay in either mode on purpose.
    """
    return any(
        isinstance(model, nn.modules.batchnorm._BatchNorm)
        or (
            isinstance(value, float)
            and value
            and "drop" in f"{type(model).__name__} {name}".lower()
        )
        for name, value in vars(model).items()
    ) or any(
        _acts(part)
        for part in model.children()
        if _trains(part) != {False} or _trains(model) == {False}
    )


def _trains(part: nn.Module) -> set[bool]:
    return {one.requires_grad for one in part.parameters()}


def data(trace: Trace) -> Iterator[Fault]:
    """Batches differ from step to step where the data has more than one."""
    fetches = [one for one in trace.of(Fetch) if length_hint(one.loader) != 1]
    if not fetches:
        raise NotApplicable("no DataLoader of several batches is known")
    for several in grouped(fetches, lambda one: id(one.loader)):
        # Inputs that the loop has augmented are known by their targets.
        if any(fetch.is_used or fetch in trace.trained_fetches for fetch in several):
            yield from _epochs(several)
        # It draws places in its weights.
        sampler, number = several[0].loader.sampler, length_hint(several[0].loader.dataset)
        if isinstance(sampler, WeightedRandomSampler) and len(sampler.weights) < number:
            measured = f"of {number} samples only the first {len(sampler.weights)} are drawn"
            hint = "give it a weight for each sample: weights[labels]"
            yield [*trace.places("WeightedRandomSampler\\("), several[0].place][0], measured, hint
    windows = [[one.digests for one in window.forwards] for window in trace.windows]
    windows = [one for one in windows if any(one)]
    # A batch that the loop fetched only once is repeated on purpose.
    is_fetched_again = sum(bool(one.digests) for one in fetches) >= len(windows)
    if len(windows) > 2 and is_fetched_again and all(one == windows[0] for one in windows):
        yield (
            fetches[0].place,
            f"{len(windows)} steps on the same batch",
            "iterate over the loader; next(iter(loader)) begins it anew",
        )


def _same_samples(trace: Trace) -> Iterator[Fault]:
    """Find batches whose samples are all the same, in each step."""
    alike = [one for one in trace.trained_forwards if one.is_one_sample]
    places = [one.place for one in trace.trained_fetches]
    # Values that come from no loader and never change may stand for data.
    is_data = places or len({one.digests for one in alike}) > 2
    if len(alike) > 2 and alike == trace.trained_forwards and is_data:
        hint = "look at the dataset and its collate function; clone() a buffer before it is kept"
        yield [*places, alike[0].place][0], "all samples of a batch are the same", hint


def _other_batches(trace: Trace) -> Iterator[Fault]:
    """Find targets that are of other batches than the inputs, in each window."""
    found = []
    for window in trace.windows:
        calls = [one for one in window.body if isinstance(one, LossCall) and one.is_used]
        forwards = [one for one in window.forwards if one in window.body]
        # A batch of inputs alone, or of targets alone, is combined with another one on purpose.
        inputs, targets = (
            {one for digest in digests for one in trace.fetches[digest] if len(one.digests) > 1}
            for digests in (
                {digest for one in forwards for digest in one.digests},
                {call.targets for call in calls},
            )
        )
        if {id(one.loader) for one in inputs} & {id(one.loader) for one in targets}:
            found.append(calls[0].place if inputs.isdisjoint(targets) else "")
    if len(found) >= FEWEST_STEPS and all(found):
        hint = "take the targets from the batch that the model is given"
        yield found[0], "the targets are of another batch than the inputs", hint


def _epochs(fetches: Sequence[Fetch]) -> Iterator[Fault]:
    """Find batches that repeat within an epoch, and epochs of the same order."""
    full = [fetch for fetch in fetches if fetch.digests]
    epochs = [[one.digests for one in epoch] for epoch in grouped(full, lambda one: one.epoch)]
    for epoch in epochs:
        if len(epoch) > 2 and len(set(epoch)) * 2 <= len(epoch):
            yield (
                full[0].place,
                f"{len(epoch)} batches of an epoch are only {len(set(epoch))} different ones",
                "give each worker its own seed and its own part of the data",
            )
    sampler = fetches[0].loader.sampler
    is_shuffled = isinstance(sampler, RandomSampler) or (
        isinstance(sampler, DistributedSampler) and sampler.shuffle
    )
    for first, second in itertools.pairwise(epochs):
        width = min(len(first), len(second))
        if (
            is_shuffled
            and width > 1
            and length_hint(sampler) > 4
            and first[:width] == second[:width]
        ):
            yield (
                full[len(first)].place,
                "two epochs have the same order",
                "call sampler.set_epoch(epoch), and set no seed within the loop",
            )


def _same_randomness(trace: Trace) -> Iterator[Fault]:
    """Find a generator that is set to the same state before each step."""
    seeds = trace.of(Seeding)
    for of_one in trace.by_optimizer:
        windows = [window for window in of_one if window.forwards]
        equal = grouped(windows, lambda window: window.forwards[0].generator)
        # An evaluation now and then leaves other numbers to the step after it.
        several = max(equal, key=len, default=[])
        moves = any(one.generator != one.forwards[0].generator for one in several[:-1])
        moves |= all(one.of(Seeding) for one in several)
        if len(several) > 2 and moves:
            place = seeds[-1].place if seeds else trace.of(Step)[0].place
            hint = "set seeds once, before the loop"
            yield place, f"{len(several)} steps begin with the same random numbers", hint


# By name: what is required, in words, and what finds faults, in this order.
CHECKS: dict[str, tuple[str, *tuple[Finder, ...]]] = {
    "accumulation": (
        "a window's gradient is that of the same samples in one batch",
        _unused,
        accumulation,
    ),
    "sign": ("finite losses and gradients, and a loss that is made smaller", sign),
    "zeroed": ("gradients are set to zero once per step", zeroed),
    "optimizer": (
        "each parameter with a gradient is in one optimizer, once",
        _never_steps,
        optimizer,
        _stepped_twice,
        _made_anew,
    ),
    "moves": (
        "trained parameters move, frozen ones do not",
        _frozen_by_flag,
        _alike,
        _without_gradient,
        moves,
        _its_own_reference,
    ),
    "schedule": ("one step of the schedule per optimizer step, after it", _never_stepped, schedule),
    "clipping": ("clipped once, after the last backward, before the step", clipping),
    "scaler": ("each loss scaled, steps by the scaler, its scale updated", scaler),
    "autocast": ("autocast around the forward pass alone",),
    "logits": ("logits or log-probabilities, as the loss needs", logits),
    "targets": ("targets that are to be learned, without padding", targets),
    "mode": (
        "training mode in training, and only there",
        mode,
        _untrained,
        _recomputed_differently,
    ),
    "data": (
        "new samples and random numbers at each step",
        _same_samples,
        _same_randomness,
        data,
        _other_batches,
    ),
    # Seen at once.
    "graph": ("no graph outlives its step",),
    "growth": ("nothing large and no hook more in each step",),
}
