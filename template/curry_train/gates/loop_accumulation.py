"""Check what a loss adds up: the weights of its terms in a window, and its sign.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from .loop_events import Backward, Check, Fault, Faults, LossCall, Step, Trace, grouped, world_size
from .loop_loss import LOG_PROBABILITY, TOLERANCE, Term
from .verdict import NotApplicable


def accumulation(trace: Trace) -> Faults:
    """Each term of the losses of a window weighs as in one batch."""
    is_known = False
    for window in trace.windows:
        for call in window.calls:
            yield from _find_faults_of_one_call(call, window)
        yield from _find_same_batch(window)
        for several in _group_microbatches(trace, window):
            columns = _align_terms(several)
            is_known |= bool(columns)
            yield from _find_unequal_weights(several, columns, window)
    for several in grouped((call for window in trace.windows for call in window.calls), "lines"):
        yield from _find_division_by_masked(several)
        faults = [
            [*_find_needless_division(call, window)]
            for window in trace.windows
            for call in window.calls
            if call in several
        ]
        if len(faults) > 1 and all(faults):
            yield from faults[0]
    for windows in trace.by_optimizer:
        yield from _find_early_first_step(windows)
    if not is_known:
        raise NotApplicable("no window has several microbatches whose loss can be read")


def _find_early_first_step(windows: Sequence[Step]) -> Faults:
    """Find a first step that comes before the microbatches that its loss is divided by."""
    first, number, again, *_ = [*(len(window.calls) for window in windows[:3]), 0, 0]
    divisors = [by for call in windows[0].calls for term in call.terms for by in term.divisors]
    if first < number == again and number in divisors:
        yield (
            windows[0],
            f"the first step comes after {first} of the {number} microbatches that its loss is "
            "divided by",
            f"step where (number + 1) % {number} == 0, for numbers from 0 on",
        )


def _find_faults_of_one_call(call: Backward, window: Step) -> Faults:
    if call.is_second and not window.is_clean(call):
        hint = "call backward once on each loss; a running total of losses has the earlier ones too"
        yield call, "the same loss a second time", hint
    # The number of samples in one microbatch.
    samples = window.num_samples / sum(one.lines == call.lines for one in window.calls)
    for term in call.terms:
        # A mask of samples chooses among them, as that of labels of which a model is sure.
        if term.num_masked and term.name != "Sum" and term.num_terms > samples:
            yield _describe_mean_over_masked(call, term)


def _describe_mean_over_masked(call: Backward, term: Term) -> Fault:
    return (
        call,
        f"a mean over {term.num_terms:.0f} terms, of which {term.num_masked} are masked",
        "divide the sum by the number of terms that are not masked",
    )


def _find_division_by_masked(calls: Sequence[Backward]) -> Faults:
    """Find sums of a line that are divided by all their terms, also by those that are masked."""
    for column in _align_terms(calls):
        masked = [term.num_masked for term in column]
        is_all = all(
            any(abs(by - term.num_terms - term.num_masked) < 0.5 for by in term.divisors)
            for term in column
        )
        # The count of a window, or of all ranks, may be that of one microbatch by chance.
        if is_all and len(set(masked)) > 1:
            at = masked.index(max(masked))
            yield _describe_mean_over_masked(calls[at], column[at])


def _find_same_batch(window: Step) -> Faults:
    """Find backward calls of one line that add up gradients of the same batch."""
    forwards = window.forwards
    calls = window.calls
    # A backward call without a call of a loss function is like no other.
    pairs = {
        (call.lines, getattr(call.cause, "targets", call), one.module, one.digests)
        for call, one in zip(calls, forwards, strict=False)
    }
    is_added = not any(map(window.is_clean, calls[1:]))
    # Other random numbers than those of dropout are drawn for each on purpose, as of weights.
    is_drawn = len({one.value for one in calls}) > 1 and not any(one.acts for one in forwards)
    if len(pairs) == 1 < len(calls) == len(forwards) and is_added and not is_drawn:
        hint = "fetch a batch for each microbatch"
        yield forwards[1], "the microbatches of a step are the same", hint


def _group_microbatches(trace: Trace, window: Step) -> Iterator[list[Backward]]:
    """Yield backward calls of the same lines that have a batch each."""
    digests = [one.digests for one in window.forwards]
    loaders = [
        {fetch.loader for fetch in trace.fetches[digest]}
        for one in digests
        for digest in one
        if digest in trace.fetches
    ]
    # Several loaders are several tasks.
    if window.is_by_hand or (loaders and not set.intersection(*loaders)):
        return
    for several in grouped(window.calls, "lines"):
        # Without batches of their own they are several losses of one.
        has_own = not digests or len({*digests}) >= len(several)
        # Calls whose gradients are set to zero in between are no accumulation, as in a closure that
        # an optimizer calls several times.
        is_sum = not any(map(window.is_clean, several[1:]))
        # Each of several tasks reaches a head of its own.
        first, last = several[0].reached, several[-1].reached
        is_sum &= first <= last or last <= first
        if len(several) > 1 and has_own and is_sum:
            yield several


def _align_terms(calls: Sequence[Backward]) -> list[list[Term]]:
    """Return for each part of the loss what it was in each call; nothing if calls differ."""
    if len({tuple((term.name, term.reduction) for term in call.terms) for call in calls}) > 1:
        return []
    columns = [list(column) for column in zip(*(call.terms for call in calls), strict=True)]
    return [one for one in columns if all(t.reduction and t.num_terms and t.factor for t in one)]


def totals(calls: Sequence[Backward]) -> list[float]:
    """Return the weight of each part of a window's loss that is a mean, or divided to be one."""
    several = grouped(calls, "lines")
    found = []
    # Microbatches may have a line each, as with and without sync.
    for of_line in several[-1:] if len(several) < 2 else [several[-1], calls]:
        by_name = defaultdict[str, float](float)
        for column in _align_terms(of_line):
            if column[0].reduction == "mean" or max(column[0].divisors, default=0) > 1:
                found.append(sum(term.strength for term in column))
                by_name[column[0].name] += found[-1]
        # Parts of one kind may be averaged, as those of two passes.
        found += by_name.values()
    return found


def _find_unequal_weights(
    calls: Sequence[Backward], columns: Sequence[Sequence[Term]], window: Step
) -> Faults:
    begin = calls[0]
    # The loop may divide gradients in place of losses.
    factor = window.factor or 1.0
    totals = [factor * sum(term.strength for term in column) for column in columns]
    number, is_alone = len(calls), world_size() == 1
    # How many times each part is divided by the number of microbatches.
    divisions = [
        sum(abs(by - number) < TOLERANCE for by in (*column[0].divisors, 1 / factor))
        for column in columns
    ]
    # A part may weigh more than 1 by a factor of the user's, and parts may be averaged.
    is_one = any(abs(total - 1) < TOLERANCE for total in (*totals, sum(totals)))
    for total, column, times in () if is_one else zip(totals, columns, divisions, strict=True):
        first, weights = column[0], [factor * term.strength for term in column]
        # A sum over the values of samples, or of positions, may be divided by their number.
        num_values = sum(term.num_terms for term in column) / max(1, window.num_samples)
        is_mean = first.reduction == "mean"
        # A sum with weights of classes may be divided by their sum.
        of_weights = factor * sum(term.strength * term.class_weight for term in column)
        is_divided = is_mean or min(abs(total - num_values), abs(total - first.width)) > TOLERANCE
        # Of a sum by hand it is not known how many terms count, and a rank may weigh more than
        # others where they divide by the terms of all.
        is_certain = (is_alone and first.name != "Sum") or min(weights) > 1 - TOLERANCE
        is_certain &= abs(of_weights - 1) > TOLERANCE
        is_certain &= _have_one_factor(column)
        # A mean times the samples of its microbatch is meant as the sum over them.
        num_samples = window.num_samples / number
        is_certain &= not any(round(by * num_samples) == 1 for by in first.divisors)
        if is_divided and is_certain and max(weights) < 1 + TOLERANCE < total:
            yield (
                begin,
                f"the gradients of a window are {total:.3g} times those of one batch",
                f"divide the loss by the {number} microbatches of the window, or its sum by "
                "the number of terms in all of them (num_items_in_batch of a Trainer, which "
                "divides itself if model.accepts_loss_kwargs is False); where an epoch ends "
                "within a window, step or call zero_grad() there",
            )
        # Whether a division by the ranks is one too many is seen where they are compared.
        is_twice = times > is_mean and number != world_size()
        if is_twice and abs(total * number - 1) < TOLERANCE:
            yield (
                begin,
                f"the loss is divided by the {number} microbatches twice",
                "divide once; accelerator.backward and Trainers do it themselves",
            )
    is_known = all(by or abs(of - 1) > TOLERANCE for by, of in zip(divisions, totals, strict=True))
    if is_alone and any(divisions) and not all(divisions) and is_known:
        hint = f"divide each part of the loss by the {number} microbatches, as the others"
        yield begin, "a part of the loss counts once per microbatch", hint
    # An epoch may end with a short batch.
    if len({one.num_samples for one in window.forwards}) > 1:
        return
    for column in columns:
        weights = [abs(term.weight) for term in column]
        spread = max(weights) / min(weights)
        if spread > 1 + TOLERANCE and _have_one_factor(column):
            yield (
                begin,
                f"a term of one microbatch weighs {spread:.3g} times that of another",
                "sum each loss and divide by the number of terms of the whole window",
            )


def _have_one_factor(column: Sequence[Term]) -> bool:
    """Return whether a part has one factor of the user's in all microbatches, as none."""
    # Besides what counts terms or microbatches.
    factors = [
        term.factor * math.prod(by for by in term.divisors if abs(by - round(by)) < 1e-3)
        for term in column
    ]
    return max(factors) - min(factors) <= TOLERANCE * abs(factors[0])


def _find_needless_division(call: Backward, window: Step) -> Faults:
    """Find the one loss of a step that is a mean, and is divided again."""
    if len(window.calls) > 1 or len(call.terms) != 1:
        return
    (term,) = call.terms
    by = [one for one in term.divisors if one > 1.5 and abs(one - round(one)) < 1e-6]
    is_meant = by == [2] and term.name in ("Mean", "Mse", "mse_loss")
    # A division by the ranks is looked at where they are compared, and a sum over time may be meant
    # as a mean.
    is_meant |= by in ([world_size()], [term.num_added])
    if term.reduction != "mean" or len(by) != 1 or is_meant:
        return
    if abs(term.strength * by[0] - 1) <= TOLERANCE:
        yield (
            call,
            f"a mean loss is divided by {by[0]:.0f}, and the step at {window.place} has one "
            "microbatch",
            "divide by the microbatches of a step, and step after that many of them",
        )


def unused(trace: Trace) -> Faults:
    """Find a line whose losses are computed several times in each window, and used once."""
    for own in trace.by_optimizer:
        for of_line in grouped((call for one in own for call in one.of(LossCall)), "lines"):
            of_windows = ([one for one in window.of(LossCall) if one in of_line] for window in own)
            flags = [[call.is_used for call in calls] for calls in of_windows if calls]
            if len(flags) > 1 and all(sum(one) == one[-1] == 1 < len(one) for one in flags):
                yield (
                    of_line[0],
                    f"of {len(flags[0])} losses of a window only the last is used",
                    "call backward for each, or add them up",
                )


def sign(trace: Trace) -> Faults:
    """Losses are made smaller, and are finite."""
    by_loss = (
        "cross_entropy",
        LOG_PROBABILITY,
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
    )
    windows = trace.windows if len(trace.by_optimizer) == 1 else []
    for calls in grouped((call for window in windows for call in window.calls), "lines"):
        window = windows[0]
        is_up = bool(window.optimizer.defaults.get("maximize"))
        hint = "give the loss the other sign, or remove maximize=True"
        # An attack learns a change of the inputs that makes the loss larger.
        is_model = not window.own.isdisjoint(trace.roots.parameters())
        # A reward may have either sign.
        terms = [term for call in calls for term in call.terms]
        is_known = is_model and all(term.name in by_loss for term in terms)
        # A log-probability is to be made larger.
        ups = [(term.factor > 0) == (term.name == LOG_PROBABILITY) for term in terms]
        if is_known and ups and is_up not in ups:
            yield window if is_up else calls[0], "the loss is made larger", hint


CHECKS = {
    "accumulation": Check(
        "a window's gradient is that of the same samples in one batch",
        (unused, accumulation),
    ),
    "sign": Check("finite losses and gradients, and a loss that is made smaller", (sign,)),
}
