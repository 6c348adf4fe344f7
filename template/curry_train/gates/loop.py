"""Check the user's own training loop, as it runs, without a reference.

    verdicts = preflight(train)             # `train()` is the loop; it ends after a few steps
    assert all(verdict.passed is not False for verdict in verdicts)

Each check reads the trace of a few windows. Where it can't know, it does not apply.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler, RandomSampler

from .loop_loss import Term
from .loop_trace import (
    Backward,
    Clip,
    Dropout,
    Fetch,
    Forward,
    LossCall,
    Made,
    Scaling,
    Schedule,
    Seeding,
    Step,
    Trace,
    Window,
    Zero,
    observe,
)
from .verdict import NotApplicable, Verdict, not_applicable

DEFAULT_STEPS = 8
# Weights of terms may differ by rounding of the loss, which is in half precision at worst.
TOLERANCE = 0.02
# What is the same in so many steps stays so.
FEWEST_STEPS = 3


@dataclass(frozen=True)
class Fault:
    """A fault of the loop: the line, the measured figure, and advice."""

    place: str
    measured: str
    hint: str


Check = Callable[[Trace], Iterable[Fault]]


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
            fault = next(iter(check(trace)), None)
        except NotApplicable as error:
            verdicts.append(not_applicable(gate, required=required, why=str(error)))
            continue
        if fault is None:
            verdicts.append(Verdict(gate, True, "held", required, ran=("loop",)))
        else:
            measured = f"{fault.place}: {fault.measured}" if fault.place else fault.measured
            verdicts.append(Verdict(gate, False, measured, required, fault.hint, ran=("loop",)))
    return verdicts


# The loss.


def accumulation(trace: Trace) -> Iterator[Fault]:
    """Each term of the losses of a window weighs as in one batch."""
    yield from _unused(trace)
    yield from _without_graph(trace)
    is_known = False
    # By the lines that led to a backward call: a fault for each window with it.
    single: dict[tuple[str, ...], list[Fault | None]] = defaultdict(list)
    for window in trace.windows:
        for call in window.calls:
            is_single = len(window.calls) == 1
            single[call.lines].append(_divided_for_nothing(call) if is_single else None)
            yield from _wrong_alone(call, window.optimizer)
        yield from _same_batch(window)
        for several in [] if window.is_by_hand else _microbatches(trace, window):
            columns = _columns(several)
            is_known = is_known or bool(columns)
            yield from _unequal(several, columns, window)
    for faults in single.values():
        if len(faults) > 1 and None not in faults:
            yield from filter(None, faults)
    if not is_known:
        raise NotApplicable("no loss of several microbatches can be read", required="several")


def _wrong_alone(call: Backward, optimizer: Optimizer) -> Iterator[Fault]:
    if call.is_second and id(optimizer) not in call.clean:
        hint = "call backward once on each loss; a running total of losses has the earlier ones too"
        yield Fault(call.place, "the same loss a second time", hint)
    for term in call.terms:
        if term.num_masked:
            yield Fault(
                call.place,
                f"a mean over {term.num_terms:.0f} terms, of which {term.num_masked} are masked",
                "divide the sum by the number of terms that are not masked",
            )


def _same_batch(window: Window) -> Iterator[Fault]:
    """Find backward calls of one line that add up gradients of the same batch."""
    calls = [one for one in window.calls if not one.in_step]
    lines = {one.lines for one in calls}
    targets = {one.loss_call.facts.targets for one in calls if one.loss_call is not None}
    batches = {(id(one.module), one.digests) for one in window.forwards}
    is_added = not any(id(window.optimizer) in one.clean for one in calls[1:])
    is_same = len(lines) == len(batches) == len(targets) == 1
    if is_same and is_added and len(calls) == len(window.forwards) > 1:
        hint = "fetch a batch for each microbatch"
        yield Fault(window.forwards[1].place, "the microbatches of a step are the same", hint)


def _microbatches(trace: Trace, window: Window) -> Iterator[list[Backward]]:
    """Yield calls of the same lines that have a batch each."""
    lines = defaultdict[tuple[str, ...], list[Backward]](list)
    for call in window.calls:
        lines[call.lines].append(call)
    for several in lines.values():
        # A closure that an optimizer calls several times is no accumulation.
        is_closure = all(call.in_step for call in several)
        if len(several) > 1 and not is_closure and _are_microbatches(trace, several, window):
            yield several


def _are_microbatches(trace: Trace, calls: Sequence[Backward], window: Window) -> bool:
    """Return whether each call has a batch of its own, and is not one of several losses of it."""
    forwards = window.forwards
    loaders = {digest: id(one.loader) for one in trace.of(Fetch) for digest in one.digests}
    known = [loaders[digest] for one in forwards for digest in one.digests if digest in loaders]
    # Several loaders are several tasks.
    if len(set(known)) > 1:
        return False
    return not forwards or len({one.digests for one in forwards}) >= len(calls)


def _columns(calls: Sequence[Backward]) -> list[list[Term]]:
    """Return for each part of the loss what it was in each call; nothing if calls differ."""
    scaled = [call.terms for call in calls]
    shapes = [[(term.name, term.reduction) for term in terms] for terms in scaled]
    if any(one != shapes[0] for one in shapes):
        return []
    columns = [list(column) for column in zip(*scaled, strict=True)]
    return [one for one in columns if all(t.reduction and t.num_terms and t.factor for t in one)]


def _unequal(
    calls: Sequence[Backward], columns: Sequence[Sequence[Term]], window: Window
) -> Iterator[Fault]:
    strengths = [
        [term.strength / call.scale for term, call in zip(column, calls, strict=True)]
        for column in columns
    ]
    totals = [sum(column) for column in strengths]
    number = len(calls)
    if not any(abs(total - 1) < TOLERANCE for total in totals):
        # A part may weigh more than 1 by a factor of the user's.
        too_much = [
            total
            for total, column, terms in zip(totals, strengths, columns, strict=True)
            if total > 1 + TOLERANCE
            and max(column) < 1 + TOLERANCE
            # Of a sum by hand it is not known how many terms count.
            and (terms[0].name != "Sum" or min(column) > 1 - TOLERANCE)
        ]
        if too_much:
            yield Fault(
                calls[0].place,
                f"the gradients of a window are {too_much[0]:.3g} times those of one batch",
                f"divide the loss by the {number} microbatches of the window, or its sum by "
                "the number of terms in all of them (num_items_in_batch of a Trainer)",
            )
        for total, column in zip(totals, columns, strict=True):
            by_number = [by for by in column[0].divisors if abs(by - number) < TOLERANCE]
            is_twice = len(by_number) > (column[0].reduction == "mean")
            if is_twice and abs(total * number - 1) < TOLERANCE:
                yield Fault(
                    calls[0].place,
                    f"the loss is divided by the {number} microbatches twice",
                    "divide once; accelerator.backward and Trainers do it themselves",
                )
    divided = [any(abs(by - number) < TOLERANCE for by in one[0].divisors) for one in columns]
    is_known = all(by or abs(of - 1) > TOLERANCE for by, of in zip(divided, totals, strict=True))
    if any(divided) and not all(divided) and is_known:
        hint = f"divide each part of the loss by the {number} microbatches, as the others"
        yield Fault(calls[0].place, "a part of the loss counts once per microbatch", hint)
    # An epoch may end with a short batch.
    if len({one.num_samples for one in window.forwards}) > 1:
        return
    for column in columns:
        weights = [abs(term.weight) / call.scale for term, call in zip(column, calls, strict=True)]
        spread = max(weights) / min(weights)
        if spread > 1 + TOLERANCE:
            yield Fault(
                calls[0].place,
                f"a term of one microbatch weighs {spread:.3g} times that of another",
                "sum each loss and divide by the number of terms of the whole window",
            )


def _divided_for_nothing(call: Backward) -> Fault | None:
    """Return a fault where the one loss of a step is a mean, and is divided again."""
    if len(call.terms) != 1:
        return None
    (term,) = call.terms
    by = [one for one in term.divisors if one > 1.5 and abs(one - round(one)) < 1e-6]
    is_half = by == [2] and term.name in ("Mean", "Mse", "mse_loss")
    scale = call.scale
    if term.reduction != "mean" or len(by) != 1 or is_half:
        return None
    if abs(term.strength / scale * by[0] - 1) > TOLERANCE:
        return None
    return Fault(
        call.place,
        f"a mean loss is divided by {by[0]:.0f}, and the step has one microbatch",
        "divide by the microbatches of a step, and step after that many of them",
    )


def _without_graph(trace: Trace) -> Iterator[Fault]:
    """Find a part of a loss that changes from step to step and has no gradient."""
    values = defaultdict[str, set[float]](set)
    for call in trace.of(Backward):
        for place, number in call.numbers:
            values[place].add(number)
    for place, numbers in values.items():
        if len(numbers) > 2:
            hint = "add the tensor, without item(); use create_graph=True for a gradient in a loss"
            yield Fault(place, "a part of the loss changes and has no gradient", hint)


def _unused(trace: Trace) -> Iterator[Fault]:
    """Find a line whose losses are computed several times in each window, and used once."""
    for optimizer in trace.optimizers_that_step:
        used = defaultdict[tuple[str, ...], list[list[bool]]](list)
        for window in trace.windows_of(optimizer):
            of_window = defaultdict[tuple[str, ...], list[bool]](list)
            training = True
            for event in window.events:
                if isinstance(event, Forward):
                    training = event.training
                elif isinstance(event, LossCall) and training:
                    of_window[event.lines].append(event.is_used)
            for path, flags in of_window.items():
                used[path].append(flags)
        for path, windows in used.items():
            if len(windows) > 1 and all(
                len(flags) > 1 and flags[-1] and not any(flags[:-1]) for flags in windows
            ):
                yield Fault(
                    path[0],
                    f"of {len(windows[0])} losses of a window only the last is used",
                    "call backward for each, or add them up",
                )


def sign(trace: Trace) -> Iterator[Fault]:
    """Losses are made smaller, and are finite."""
    for call in trace.of(Backward):
        if not math.isfinite(call.value):
            yield Fault(
                call.place,
                f"the loss is {call.value}",
                "look for the first value that is not finite: curry-train grad-flow",
            )
    by_loss = ("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
    if len(trace.optimizers_that_step) == 1:
        for window in trace.windows:
            is_up = bool(window.optimizer.defaults.get("maximize"))
            hint = f"remove {'maximize=True' if is_up else 'the minus of the loss'}"
            for call in window.calls:
                is_known = all(term.name in by_loss for term in call.terms)
                if is_known and {(term.factor > 0) == is_up for term in call.terms} == {True}:
                    place = window.step.place if is_up else call.place
                    yield Fault(place, "the loss is made larger", hint)
    steps = [step for step in trace.of(Step) if not step.is_finite]
    if steps:
        hint = "look for the first value that is not finite: curry-train grad-flow"
        yield Fault(steps[0].place, "a step on gradients that are not finite", hint)


def logits(trace: Trace) -> Iterator[Fault]:
    """A loss gets logits or log-probabilities, as it needs, and targets of the same shape."""
    calls: list[LossCall] = trace.of(LossCall)
    if not calls:
        raise NotApplicable("no loss function of torch was called", required="one")
    for call in calls:
        facts = call.facts
        low, high = facts.row_sums
        sums_to_one = max(abs(low - 1), abs(high - 1)) < 1e-3
        if facts.name in ("cross_entropy", "binary_cross_entropy_with_logits"):
            has_classes = len(facts.shapes[0]) > 1 and facts.shapes[0][1] > 1
            is_distribution = sums_to_one and facts.is_nowhere_negative and has_classes
            if facts.made_by in ("Softmax", "Sigmoid") or is_distribution:
                yield Fault(
                    call.place,
                    f"{facts.name} gets probabilities",
                    "give it the values before softmax or sigmoid",
                )
            if facts.made_by == "Relu":
                yield Fault(
                    call.place,
                    f"{facts.name} gets no negative values, as a ReLU is last",
                    "remove the activation behind the last layer",
                )
        elif facts.name in ("nll_loss", "kl_div", "ctc_loss") and not (
            abs(low - 1) < TOLERANCE and abs(high - 1) < TOLERANCE
        ):
            yield Fault(
                call.place,
                f"{facts.name} gets no log-probabilities",
                "give it F.log_softmax(logits, dim=1), or use cross_entropy",
            )
        if facts.is_scrambled and facts.name in ("cross_entropy", "nll_loss"):
            yield Fault(
                call.place,
                "classes and positions are mixed up by a view",
                "give it logits.transpose(1, 2), or flatten positions of logits and targets",
            )
        given, target = facts.shapes
        is_elementwise = facts.name not in ("cross_entropy", "nll_loss", "ctc_loss")
        sizes = given.numel(), target.numel()
        together = torch.broadcast_shapes(given, target) if is_elementwise else given
        if is_elementwise and 1 not in sizes and together.numel() > max(sizes):
            yield Fault(
                call.place,
                f"values of shape {list(given)} are compared with targets of {list(target)}, "
                "each with each",
                "give both the same shape, as by squeeze(1) or unsqueeze(1)",
            )


def targets(trace: Trace) -> Iterator[Fault]:
    """Targets are the ones to learn."""
    calls: list[LossCall] = trace.of(LossCall)
    if not calls:
        raise NotApplicable("no loss function of torch was called", required="one")
    for call in calls:
        for is_wrong, measured, hint in _wrong_targets(trace, call):
            if is_wrong:
                yield Fault(call.place, measured, hint)
    for place in trace.reads_padding:
        hint = "look at the mask of the attention: which value of it stands for padding?"
        yield Fault(place, "the outputs of the model change with the padding", hint)
    fillers = Counter(
        (call.place, call.filler)
        for call in calls
        if call.filler is not None and call.facts.shapes[0][1] > 4
    )
    for (place, filler), number in fillers.items():
        if number >= FEWEST_STEPS:
            hint = f"set labels of padding to -100, or ignore_index={filler}"
            yield Fault(place, f"the targets {filler}, which are padding, count", hint)
    yield from _labels(trace)


def _wrong_targets(trace: Trace, call: LossCall) -> Iterator[tuple[bool, str, str]]:
    """Yield what may be wrong with the targets of a call, and whether it is."""
    facts, same = call.facts, call.same_as_input
    hint = "scale the targets, or leave out the activation behind the last layer"
    if facts.name.startswith("binary"):
        hint = "give it targets from 0 to 1"
    measured = f"{facts.out_of_reach:.0%} of the targets are values that the model can't give"
    is_far = facts.out_of_reach > (0 if facts.name.startswith("binary") else 0.25)
    yield is_far, measured, hint
    hint = "compute targets under torch.no_grad(), or detach them"
    yield facts.is_bootstrapped, "the targets have a gradient", hint
    if facts.name not in ("cross_entropy", "nll_loss"):
        return
    yield (
        facts.has_several_classes,
        "targets of cross_entropy are several classes at once",
        "use binary_cross_entropy_with_logits, or targets that sum to 1",
    )
    yield (
        facts.label_smoothing > 0.9,
        f"a label smoothing of {facts.label_smoothing:g} leaves nothing of the labels",
        "use 0.1",
    )
    yield (
        facts.num_terms == 0,
        "no target counts: all have the ignored index",
        "look at how labels are made",
    )
    is_next = same.get(1, 0) >= 0.9
    yield (
        same.get(0, 0) > 0.99 and not is_next,
        "the targets are the model's own input",
        "shift the targets by one token to the left",
    )
    yield (
        same.get(2, 0) > 0.99 and not is_next,
        "the targets are shifted by two tokens",
        "shift once: models of Hugging Face shift the labels themselves",
    )
    yield (
        call.counts_padding and max(same.get(0, 0), same.get(1, 0)) > 0.5,
        "targets count where the attention mask is 0",
        "set labels of padding to the ignored index, -100",
    )
    yield (
        same.get(1, 0) > 0.99 and id(call.model) in trace.sees_the_future,
        "the model sees the tokens that it has to predict",
        "mask attention to later tokens: is_causal=True",
    )


def _labels(trace: Trace) -> Iterator[Fault]:
    """Labels of the data are several, in each batch."""
    trained = _trained_digests(trace)
    of_loader = defaultdict[int, list[Fetch]](list)
    for one in trace.of(Fetch):
        if len(one.labels) > 3 and trained & set(one.digests):
            of_loader[id(one.loader)].append(one)
    for fetches in of_loader.values():
        classes = set[int]().union(*(one.labels for one in fetches))
        num_labels = sum(len(one.labels) for one in fetches)
        if len(classes) == 1 and num_labels >= 24:
            hint = "look at how labels are made"
            yield Fault(fetches[0].place, f"all {num_labels} labels are {classes.pop()}", hint)
        elif len(fetches) > 2 and all(len(set(one.labels)) == 1 for one in fetches):
            hint = "shuffle the data: DataLoader(..., shuffle=True)"
            yield Fault(fetches[0].place, "each batch has samples of one class only", hint)


def _trained_digests(trace: Trace) -> set[float]:
    forwards = [one for one in trace.of(Forward) if one.is_trained_on]
    return {number for one in forwards for number in one.digests}


# Gradients and optimizers.


def zeroed(trace: Trace) -> Iterator[Fault]:
    """Gradients are set to zero once per window, before its first backward call."""
    for window in trace.windows:
        optimizer, calls, step = window.optimizer, window.calls, window.step
        if not calls:
            if step.is_repeated and step.has_gradients and not step.in_backward:
                yield Fault(
                    step.place,
                    "a step on the gradients of the step before, without a backward call",
                    "call optimizer.step() once per backward of a window, then zero_grad()",
                )
            continue
        if window.is_by_hand:
            continue
        if not any(id(optimizer) in call.clean for call in calls):
            yield Fault(
                step.place,
                "a step with gradients of the step before",
                "call optimizer.zero_grad() once per step, before the first backward",
            )
        yield from _at_other_weights(trace, window)
        for attack, call in itertools.pairwise(calls):
            if attack.of_inputs and attack.lines != call.lines and id(optimizer) not in call.clean:
                yield Fault(
                    attack.place,
                    "gradients of an attack on the inputs are in the step",
                    "take them by torch.autograd.grad(loss, inputs), or call zero_grad() after it",
                )
        yield from _lost(window)
        yield from _of_another_loss(window)


def _at_other_weights(trace: Trace, window: Window) -> Iterator[Fault]:
    """Find faults of a step that first changes the weights and takes gradients there, as SAM."""
    weights = [one.weights for one in window.forwards if one.module is window.forwards[0].module]
    change = max(weights) - min(weights) if weights else 0
    calls, optimizer = window.calls, window.optimizer
    if not change or len({one.digests for one in window.forwards}) > 1 or len(calls) < 2:
        return
    if not any(id(optimizer) in one.clean for one in calls[1:]):
        hint = "call zero_grad() before the second backward"
        yield Fault(calls[1].place, "gradients at two points of the weights are added", hint)
    windows = trace.windows_of(optimizer)
    before = windows[windows.index(window) - 1].step.after
    if window is not windows[0] and abs(window.step.before - before) > 0.05 * change:
        hint = "put the weights back before the step"
        yield Fault(window.step.place, "weights that were changed for a trial stay so", hint)


def _lost(window: Window) -> Iterator[Fault]:
    """Find gradients of the window that are set to zero before its step."""
    optimizer, events, calls = window.optimizer, window.events, window.calls
    own = _parameter_ids(optimizer)
    of_line = [call for call in calls if call.lines == calls[-1].lines and call.reached]
    zeros = [
        (events.index(event), event)
        for event in window.of(Zero)
        if event.parameters & own and not event.in_step
    ]
    if not window.step.graded - window.step.without_slope and any(call.value for call in calls):
        last = events.index(calls[-1])
        places = [event.place for index, event in zeros if index > last]
        if places:
            hint = "move zero_grad() behind the step"
            yield Fault(places[0], "gradients are set to zero before the step", hint)
    first = events.index(of_line[0])
    for call in of_line[1:]:
        if id(optimizer) in call.clean and not call.in_step:
            at = events.index(call)
            places = [event.place for index, event in zeros if first < index < at]
            yield Fault(
                places[-1] if places else call.place,
                "gradients of earlier microbatches are set to zero",
                "call zero_grad() once per step, not per microbatch",
            )


def _of_another_loss(window: Window) -> Iterator[Fault]:
    """Find gradients of a loss that another optimizer has stepped on already."""
    optimizer, events, calls = window.optimizer, window.events, window.calls
    clean = [index for index, call in enumerate(calls) if id(optimizer) in call.clean]
    used = calls[clean[-1] :] if clean else calls
    own = [call for call in used if call.reached == {id(optimizer)}]
    for call in used:
        if call in own or not own or events.index(own[-1]) < events.index(call):
            continue
        between = events[events.index(call) : events.index(own[0])]
        if own[0].lines != call.lines and any(
            isinstance(one, Step) and id(one.optimizer) in call.reached for one in between
        ):
            yield Fault(
                window.step.place,
                f"a step with gradients of the loss at {call.place}, which another optimizer "
                "has used",
                "call optimizer.zero_grad() before the backward calls of its own loss",
            )


def optimizer(trace: Trace) -> Iterator[Fault]:
    """The optimizers hold each parameter that gets a gradient, once."""
    held = _held(trace)
    missing = []
    for root in trace.roots:
        own = [
            one for one in root.parameters() if one.requires_grad and id(one) in trace.with_gradient
        ]
        # A network of which nothing is trained only passes gradients on, as in a perceptual loss.
        if any(id(one) in held for one in own):
            missing += [trace.names.get(id(one), "?") for one in own if id(one) not in held]
            missing += _of_no_module(trace, held)
    steps = trace.of(Step)
    missing += trace.bare
    if missing:
        yield Fault(
            steps[-1].place,
            f"{_named(missing)} get gradients and are in no optimizer",
            "give the optimizer the parameters of the model that is trained, after it is moved, "
            "wrapped or copied; freeze the others by requires_grad_(False)",
        )
    for one in trace.optimizers_that_step:
        parameters = [id(p) for group in one.param_groups for p in group["params"]]
        if len(parameters) > len(set(parameters)):
            place = next(step.place for step in steps if step.optimizer is one)
            hint = "give each parameter once"
            yield Fault(place, f"a parameter is in {type(one).__name__} twice", hint)
    yield from _stepped_twice(trace)
    yield from _made_anew(trace)


def _stepped_twice(trace: Trace) -> Iterator[Fault]:
    last: Step | None = None
    for event in trace.events:
        if isinstance(event, Backward):
            last = None
        elif isinstance(event, Step) and not event.in_backward:
            if last is not None and last.optimizer is not event.optimizer:
                shared = _parameter_ids(last.optimizer) & _parameter_ids(event.optimizer)
                names = [trace.names.get(one, "?") for one in shared]
                if shared:
                    yield Fault(
                        event.place,
                        f"two optimizers step on the same gradients of {_named(names)}",
                        "give each parameter to one optimizer",
                    )
            last = event


def _of_no_module(trace: Trace, held: set[int]) -> list[str]:
    """Return parameters of modules that ran, and that no module which was called has."""
    known = {id(module) for root in trace.roots for module in root.modules()}
    return [
        f"{type(module).__name__}.{name}"
        for module in trace.ran[True].values()
        if id(module) not in known
        for name, one in module.named_parameters(recurse=False)
        if id(one) in trace.with_gradient and id(one) not in held
    ]


def _made_anew(trace: Trace) -> Iterator[Fault]:
    """Find an optimizer that is made again and again, and loses its moments each time."""
    for one in trace.optimizers_that_step:
        later = [window.step for window in trace.windows_of(one)[1:]]
        if len(later) > 1 and all(step.has_state and not step.had_state for step in later):
            yield Fault(
                later[0].place,
                f"the state of {type(one).__name__} is empty before each step",
                "let the optimizer keep its state from step to step",
            )
    made = defaultdict[tuple[str, frozenset[int]], list[Made]](list)
    stepping = {id(one) for one in trace.optimizers_that_step}
    for new in trace.of(Made):
        if id(new.optimizer) in stepping and new.optimizer.state:
            made[new.place, frozenset(_parameter_ids(new.optimizer))].append(new)
    for (place, _), several in made.items():
        if len(several) > 2:
            yield Fault(
                place,
                f"{type(several[0].optimizer).__name__} is made {len(several)} times for the same "
                "parameters, and loses its state",
                "make the optimizer once, before the loop",
            )


def _held(trace: Trace) -> set[int]:
    return set[int]().union(*map(_parameter_ids, trace.optimizers))


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def moves(trace: Trace) -> Iterator[Fault]:
    """Trained parameters move, and frozen ones do not."""
    steps: list[Step] = trace.of(Step)
    if frozen := [step for step in steps if step.frozen_moved]:
        names = [trace.names.get(one, "?") for one in frozen[0].frozen_moved]
        yield Fault(
            frozen[0].place,
            f"frozen parameters move: {_named(names)}",
            "leave frozen parameters out of the optimizer",
        )
    yield from _without_gradient(trace)
    if any(step.moved is None for step in steps):
        raise NotApplicable("too many parameters to compare", required="a smaller model")
    yield from _forgotten_loss(trace)
    for one in trace.optimizers_that_step:
        own = [step for step in steps if step.optimizer is one]
        yield from _still(trace, own)
        yield from _without_effect(own)
    if trace.symmetric:
        yield Fault(
            steps[-1].place,
            f"all rows of {_named(trace.symmetric)} are alike, and learn the same",
            "initialize weights by random numbers",
        )


def _still(trace: Trace, steps: Sequence[Step]) -> Iterator[Fault]:
    """Find parameters of an optimizer that do not move, or that only decay moves."""
    kind = type(steps[0].optimizer).__name__
    hint = "give it the parameters of the model that is trained, and a learning rate"
    if len(steps) > 1 and not any(step.moved for step in steps):
        why = _why_nothing_moves(steps)
        yield Fault(steps[0].place, f"no parameter of {kind} moves: {why}", hint)
    elif len(steps) > 5 and not any(step.graded for step in steps[-4:]):
        measured = f"no parameter of {kind} has a gradient any more"
        yield Fault(steps[-1].place, measured, hint)
    if len(steps) < 3:
        return
    graded = frozenset.intersection(*(step.graded for step in steps))
    flat = graded.intersection(*(step.without_slope for step in steps))
    if flat and not any(step.graded - step.without_slope for step in steps):
        yield Fault(
            steps[-1].place,
            f"all gradients of {kind} are 0",
            "look for a rounding, a clamp, an argmax or a ratio of equal values before the loss",
        )
    # A bias that has a gradient tells that the layer is used.
    names = [trace.names.get(one, "") for one in graded - flat]
    used = {name.rpartition(".")[0] for name in names if name.endswith("bias")}
    dead = [trace.names.get(one, "") for one in flat]
    dead = [name for name in dead if name.endswith("weight") and name.rpartition(".")[0] in used]
    if dead:
        yield Fault(
            steps[-1].place,
            f"the gradient of {_named(dead)} is 0 in each step, as where its inputs are 0",
            "look at what comes before it: a dropout of 1, a dead activation, or a hook",
        )
    # A rate may be set after the first step alone.
    moved = frozenset().union(*(step.moved or () for step in steps[len(steps) > 3 :]))
    still = [
        trace.names.get(one, "?")
        for one in graded - moved
        if not any(one in step.without_slope for step in steps)
    ]
    if moved and still and all(any(step.rates) for step in steps):
        yield Fault(
            steps[-1].place,
            f"{_named(still)} have gradients and do not move",
            "give their group a learning rate, or freeze them by requires_grad_(False)",
        )


def _without_effect(steps: Sequence[Step]) -> Iterator[Fault]:
    """Find steps whose updates are rounded to nothing, or undone."""
    half = [step.half_moved for step in steps if step.half_moved is not None and any(step.rates)]
    if len(half) > 1 and max(half) < 0.5:
        yield Fault(
            steps[0].place,
            f"{1 - max(half):.0%} of the updates in half precision are rounded to nothing",
            "keep the parameters in float32, and use autocast",
        )
    for old, new in itertools.pairwise(steps):
        if old.moved and old.before == new.before != old.after:
            yield Fault(
                new.place,
                "parameters are at this step what they were at the one before",
                "make or load the model once, before the loop",
            )


def _forgotten_loss(trace: Trace) -> Iterator[Fault]:
    """Find a loss that no backward call reaches, where parameters that ran get no gradient."""
    held = _held(trace)
    idle = [
        trace.names.get(id(one), name)
        for module in trace.ran[True].values()
        for name, one in module.named_parameters(recurse=False)
        if one.requires_grad and id(one) in held and id(one) not in trace.with_gradient
    ]
    used = {call.lines for call in trace.of(LossCall) if call.is_used}
    unused = [call for call in trace.of(LossCall) if call.lines not in used]
    if idle and unused:
        yield Fault(
            unused[0].place,
            f"no backward call reaches this loss, and {_named(idle)} get no gradient",
            "add it to the loss that backward is called on",
        )


def _without_gradient(trace: Trace) -> Iterator[Fault]:
    held = _held(trace)
    names = []
    for key, module in trace.ran[False].items():
        own = [(k, p) for k, p in module.named_parameters(recurse=False) if p.requires_grad]
        own = [(name, one) for name, one in own if id(one) in held]
        if key not in trace.ran[True] and not any(id(p) in trace.with_gradient for _, p in own):
            kind = type(module).__name__
            names += [trace.names.get(id(one), f"{kind}.{name}") for name, one in own]
    place = trace.of(Step)[-1].place
    if names:
        yield Fault(
            place,
            f"trained parameters get no gradient, because they ran without: {_named(names)}",
            "with reentrant checkpointing the input of a block needs a gradient: "
            "use_reentrant=False, or model.enable_input_require_grads(); else remove the no_grad",
        )
    for at, behind in trace.cut.items():
        if idle := sorted(trace.names.get(one, "?") for one in behind & held - trace.with_gradient):
            measured = f"trained parameters are detached, and get no gradient: {_named(idle)}"
            yield Fault(at, measured, "remove the detach, .data or numpy, or freeze them")


def _why_nothing_moves(steps: Sequence[Step]) -> str:
    if not any(any(step.rates) for step in steps):
        return "its learning rate is 0"
    if not any(step.has_gradients for step in steps):
        return "no parameter of it has a gradient"
    return "its updates are 0"


def _named(names: Sequence[str], most: int = 2) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - most} more" if len(unique) > most else ""
    return ", ".join(unique[:most]) + more


def schedule(trace: Trace) -> Iterator[Fault]:
    """A schedule steps at most once per step of the optimizer, after it."""
    events: list[Schedule] = trace.of(Schedule)
    if not events:
        raise NotApplicable("no schedule of torch made a step", required="a schedule")
    for one in {id(event.scheduler): event.scheduler for event in events}.values():
        own_steps = [event for event in events if event.scheduler is one]
        windows = trace.windows_of(one.optimizer)
        if not windows and len(own_steps) > 1:
            yield Fault(
                own_steps[0].place,
                "the schedule is of an optimizer that makes no step",
                "make the schedule for the optimizer that steps",
            )
        for number, window in enumerate(windows):
            own = [event for event in window.of(Schedule) if event.scheduler is one]
            # A scaler may have left out steps, of which the schedule does not know.
            tried = [event for event in window.of(Scaling) if event.call == "step"]
            if number == 0 and own and len(tried) < 2 and trace.events[0] is window.events[0]:
                yield Fault(
                    own[0].place,
                    "the schedule steps before the optimizer's first step",
                    "call scheduler.step() after optimizer.step()",
                )
            if own and len(own) > max(own[0].num_expected, len(tried)):
                yield Fault(
                    own[0].place,
                    f"{len(own)} steps of the schedule per optimizer step",
                    "step the schedule once per optimizer step, not per microbatch",
                )
    for optimizer in trace.optimizers_that_step:
        yield from _without_schedule(optimizer, trace.windows_of(optimizer), events)


def _without_schedule(
    optimizer: Optimizer, windows: Sequence[Window], events: Sequence[Schedule]
) -> Iterator[Fault]:
    """Find a schedule that has no effect, or that leaves no learning rate."""
    own = [one for one in events if one.scheduler.optimizer.param_groups is optimizer.param_groups]
    lines = {one.lines for one in own}
    if len(own) > 2 and len({id(one.scheduler) for one in own}) == len(own) and len(lines) == 1:
        hint = "make the schedule once, before the loop"
        yield Fault(own[0].place, "a new schedule in each step begins anew", hint)
    rates = [window.step.rates for window in windows]
    # A schedule by epochs leaves the rate for many steps.
    planned = {tuple(one.rates) for one in own}
    if len(planned) > 2 and len(own) >= len(rates) - 1 and rates.count(rates[0]) == len(rates):
        hint = "leave the rate to the schedule, which begins with the rate of the optimizer"
        yield Fault(own[0].place, "the loop sets its own rate over that of the schedule", hint)
    if own and len(rates) > 3 and any(rates[0]) and not any(map(any, rates[-3:])):
        hint = "count the steps of the optimizer for the length of the schedule, not epochs"
        yield Fault(own[0].place, "the schedule has ended at a rate of 0, and steps go on", hint)


def clipping(trace: Trace) -> Iterator[Fault]:
    """Gradients are clipped after the last backward call and unscaling, before the step."""
    clips: list[Clip] = trace.of(Clip)
    if not clips:
        raise NotApplicable("the loop does not clip", required="a clipping")
    held = _held(trace)
    for clip in clips:
        if not clip.parameters:
            hint = "pass model.parameters() anew; a generator is empty after one use"
            yield Fault(clip.place, "it clips no parameter", hint)
        elif not clip.parameters & held:
            hint = "clip the parameters of the model that is trained"
            yield Fault(clip.place, "it clips parameters that no optimizer has", hint)
        if not clip.limit:
            hint = "a norm of 1.0 is usual; leave the clipping out for none"
            yield Fault(clip.place, "gradients are clipped to 0", hint)
        if clip.is_scaled:
            hint = "call scaler.unscale_(optimizer) before it"
            yield Fault(clip.place, "gradients are clipped while they are scaled", hint)
    for window in trace.windows:
        if not window.is_by_hand:
            yield from _clipped_too_late_or_early(window)


def _clipped_too_late_or_early(window: Window) -> Iterator[Fault]:
    own = _parameter_ids(window.optimizer)
    before: list[tuple[str, ...]] = []  # of the backward calls so far
    after = [event.lines for event in window.calls]
    for event in window.events:
        if event in window.calls:
            before.append(after.pop(0))
        elif isinstance(event, Clip) and event.parameters & own:
            if after and not before:
                hint = "clip between the last backward and the step"
                yield Fault(event.place, "gradients are clipped after the step", hint)
            if set(after) & set(before):
                hint = "clip once per step, after the last backward"
                yield Fault(event.place, "a part of the window's gradient is clipped", hint)


def scaler(trace: Trace) -> Iterator[Fault]:
    """A scaler scales each loss, steps and is updated."""
    calls: list[Scaling] = [one for one in trace.of(Scaling) if one.is_enabled]
    if not calls:
        half = [
            one for one in trace.of(Forward) if one.autocast == torch.float16 and one.is_trained_on
        ]
        if half:
            yield Fault(
                half[0].place,
                "float16 without a scaler: small gradients become 0",
                "use torch.amp.GradScaler, or bfloat16",
            )
            return
        raise NotApplicable("the loop has no scaler that is on", required="a scaler")
    names = {one.call for one in calls}
    steps: list[Step] = trace.of(Step)
    if "scale" not in names:
        yield Fault(calls[0].place, "no loss is scaled", "call scaler.scale(loss).backward()")
        return
    yield from _scaled_in_part(trace)
    unscaled = [one for one in trace.of(Backward) if one.scale == 1]
    direct = [step for step in steps if not step.by_scaler and not unscaled]
    if direct and "unscale_" not in names:
        yield Fault(
            direct[0].place,
            "the optimizer steps on scaled gradients",
            "call scaler.step(optimizer) in place of optimizer.step()",
        )
    if "update" not in names and len(steps) > 1:
        yield Fault(calls[0].place, "the scale is never updated", "call scaler.update()")


def _scaled_in_part(trace: Trace) -> Iterator[Fault]:
    """Find losses of a window that are not scaled, and gradients that are unscaled too early."""
    for window in trace.windows:
        calls, events = window.calls, window.events
        plain = [call for call in calls if call.scale == 1]
        if plain and len(plain) < len(calls):
            hint = "call scaler.scale(loss).backward() for each loss"
            yield Fault(plain[0].place, "one loss is scaled and another is not", hint)
        for event in window.of(Scaling):
            index = events.index(event)
            if event.call not in ("unscale_", "update"):
                continue
            is_between = any(call in calls for call in events[:index])
            if is_between and any(call in calls for call in events[index:]):
                hint = f"call scaler.{event.call} once per step, after the last backward"
                yield Fault(event.place, f"{event.call} within the window of a step", hint)


def autocast(trace: Trace) -> Iterator[Fault]:
    """Autocast is around the forward pass alone."""
    for one in trace.of(Backward):
        if one.in_autocast:
            yield Fault(
                one.place,
                "backward runs under autocast",
                "end the autocast block before loss.backward()",
            )


# The model and the data.


def mode(trace: Trace) -> Iterator[Fault]:
    """The model is in training mode in forward passes that are trained on, and only there."""
    forwards: list[Forward] = trace.of(Forward)
    roots = [*trace.roots]
    for one in forwards:
        if not one.training and one.is_trained_on and (one.drops or _acts(one.module)):
            again = any(e.training for e in forwards if e.module is one.module)
            if any(root is one.module for root in roots):
                yield Fault(
                    one.place,
                    f"a trained forward pass in eval mode{', after one in training mode' * again}",
                    "call model.train() before training, and again after each evaluation",
                )
    trained_on = _trained_digests(trace)
    loaders = defaultdict[int, set[float]](set)
    for fetch in trace.of(Fetch):
        loaders[id(fetch.loader)] |= set(fetch.digests)
    others = set[float]().union(*(one for one in loaders.values() if not one & trained_on))
    for one in forwards:
        is_evaluation = bool(others & set(one.digests)) and not one.is_trained_on
        is_trained = any(root is one.module for root in roots)
        if one.training and is_evaluation and is_trained and (one.drops or _acts(one.module)):
            yield Fault(
                one.place,
                "an evaluation in training mode",
                "call model.eval() before evaluation, and model.train() after it",
            )
    yield from _untrained(trace)
    for event in trace.of(Dropout):
        if event.is_recomputed:
            measured = "dropout is recomputed with other random numbers"
            hint = "leave out preserve_rng_state=False of the checkpoint"
        else:
            measured = "dropout acts in evaluation mode"
            hint = "pass training=self.training to F.dropout, or use nn.Dropout"
        yield Fault(event.place, measured, hint)


def _untrained(trace: Trace) -> Iterator[Fault]:
    """Find a model that is not trained, as a teacher, and that is always in training mode."""
    held = _held(trace)
    found = defaultdict[int, list[Forward]](list)
    for window in trace.windows:
        for one in {id(event.module): event for event in window.of(Forward)}.values():
            own = [*one.module.parameters()]
            is_trained = any(p.requires_grad and id(p) in held for p in own)
            if one.training and own and not (one.is_trained_on or is_trained):
                found[id(one.module)].append(one)
    for forwards in found.values():
        # An average of the model moves.
        is_still = len({one.weights for one in forwards}) == 1
        if len(forwards) >= FEWEST_STEPS and is_still and _acts(forwards[0].module):
            hint = "call eval() on a teacher or another model that is not trained"
            yield Fault(forwards[0].place, "a model that is not trained is in training mode", hint)


def _acts(model: nn.Module) -> bool:
    """Return whether a model computes something else in training mode, at any rate."""
    return any(
        isinstance(one, nn.modules.batchnorm._BatchNorm)
        or (isinstance(value, float) and value and "drop" in f"{type(one).__name__} {name}".lower())
        for one in model.modules()
        for name, value in vars(one).items()
    )


def data(trace: Trace) -> Iterator[Fault]:
    """Batches differ from step to step where the data has more than one."""
    forwards = [one for one in trace.of(Forward) if one.is_trained_on]
    for one in forwards:
        if not one.is_finite:
            hint = "look at how the data is read and normalized"
            yield Fault(one.place, "the model is given values that are not finite", hint)
    yield from _same_randomness(trace)
    fetches = [one for one in trace.of(Fetch) if _length(one.loader) != 1]
    if not fetches:
        raise NotApplicable("no DataLoader of several batches is known", required="a DataLoader")
    trained = {number for one in forwards for number in one.digests}
    for one in {id(fetch.loader): fetch.loader for fetch in fetches}.values():
        own = [fetch for fetch in fetches if fetch.loader is one]
        if any(trained & set(fetch.digests) for fetch in own):
            yield from _epochs(own)
    windows = [[one.digests for one in window.forwards] for window in trace.windows]
    windows = [one for one in windows if any(one)]
    # A batch that the loop fetched only once is repeated on purpose.
    is_fetched_again = sum(1 for one in fetches if one.digests) >= len(windows)
    if len(windows) > 2 and is_fetched_again and all(one == windows[0] for one in windows):
        yield Fault(
            forwards[0].place,
            f"{len(windows)} steps on the same batch",
            "iterate over the loader; next(iter(loader)) begins it anew",
        )


def _epochs(fetches: Sequence[Fetch]) -> Iterator[Fault]:
    """Find batches that repeat within an epoch, and epochs of the same order."""
    full = [fetch for fetch in fetches if fetch.digests]
    by_number = defaultdict[int, list[tuple[float, ...]]](list)
    for fetch in full:
        by_number[fetch.epoch].append(fetch.digests)
    epochs = list(by_number.values())
    if len(full) > 2 and all(fetch.is_one_sample for fetch in full):
        hint = "look at the dataset and its collate function"
        yield Fault(full[0].place, "all samples of a batch are the same", hint)
    for epoch in epochs:
        if len(epoch) > 2 and len(set(epoch)) * 2 <= len(epoch):
            yield Fault(
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
        if is_shuffled and width > 2 and first[:width] == second[:width]:
            yield Fault(
                full[len(first)].place if len(full) > len(first) else full[0].place,
                "two epochs have the same order",
                "call sampler.set_epoch(epoch), and set no seed within the loop",
            )


def _same_randomness(trace: Trace) -> Iterator[Fault]:
    """Find a generator that is set to the same state before each step."""
    seeds = trace.of(Seeding)
    for one in trace.optimizers_that_step:
        windows = [window for window in trace.windows_of(one) if window.forwards]
        equal = defaultdict[int, list[Window]](list)
        for window in windows:
            equal[window.forwards[0].generator].append(window)
        # An evaluation now and then leaves other numbers to the step after it.
        several = max(equal.values(), key=len, default=[])
        moves = any(one.step.generator != one.forwards[0].generator for one in several[:-1])
        moves = moves or all(one.of(Seeding) for one in several)
        if len(several) > 2 and moves:
            place = seeds[-1].place if seeds else trace.of(Step)[0].place
            hint = "set seeds once, before the loop"
            yield Fault(place, f"{len(several)} steps begin with the same random numbers", hint)


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:  # an iterable dataset
        return 0


def graph(trace: Trace) -> Iterator[Fault]:
    """No graph is kept alive from step to step."""
    for place in trace.held_graphs:
        yield Fault(
            place,
            "a tensor of two steps ago is still held, with its graph",
            "keep loss.item() or tensor.detach() in place of the tensor",
        )


def growth(trace: Trace) -> Iterator[Fault]:
    """Nothing large and no hook is added in each step."""
    for place, measured in trace.growth:
        hint = "keep a number, a bounded number of tensors, or remove the hook's handle"
        yield Fault(place, measured, hint)


# By name: what is required, in words, and the check.
CHECKS: dict[str, tuple[str, Check]] = {
    "accumulation": ("a window's gradient is that of the same samples in one batch", accumulation),
    "sign": ("finite losses and gradients, and a loss that is made smaller", sign),
    "zeroed": ("gradients are set to zero once per step", zeroed),
    "optimizer": ("each parameter with a gradient is in one optimizer, once", optimizer),
    "moves": ("trained parameters move, frozen ones do not", moves),
    "schedule": ("one step of the schedule per optimizer step, after it", schedule),
    "clipping": ("clipped once, after the last backward, before the step", clipping),
    "scaler": ("each loss scaled, steps by the scaler, its scale updated", scaler),
    "autocast": ("autocast around the forward pass alone", autocast),
    "logits": ("logits or log-probabilities, as the loss needs", logits),
    "targets": ("targets that are to be learned, without padding", targets),
    "mode": ("training mode in training, and only there", mode),
    "data": ("new samples and random numbers at each step", data),
    "graph": ("no graph outlives its step", graph),
    "growth": ("nothing large and no hook more in each step", growth),
}
