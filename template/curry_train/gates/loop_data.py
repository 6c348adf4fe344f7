"""Check what models are given: inputs of a loss, targets, modes, batches and random numbers.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter, length_hint
from typing import Any

from torch import nn
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_convert,
)

from .loop_events import (
    FEWEST_STEPS,
    NO_LOSS,
    Check,
    Faults,
    Fetch,
    Forward,
    LossCall,
    Scoring,
    Seeding,
    Shuffle,
    Step,
    Stepping,
    Targets,
    Trace,
    depends_on_mode,
    grouped,
    tensors_of,
)
from .loop_loss import Doubts, digest
from .loop_weights import sum_of_small
from .verdict import NotApplicable

FEWEST_LABELS = 24
UNTRAINED = "a model that is not trained is in training mode"
CALL_EVAL = "call eval() on a teacher or another model that is not trained, after each train()"


def targets(trace: Trace) -> Faults:
    """Targets are the ones to learn."""
    found = trace.of(Targets)
    # Other heads of a model that predicts the next token may predict later ones.
    known = {one.model for one in trace.next_tokens}
    for one in found:
        is_other = one.may_be_shifted and one.model not in trace.sees_last
        sees_all = is_other or one.model in known.union(trace.sees_all)
        for measured, hint in _find_wrong_tokens(one, sees_all):
            yield one, measured, hint
    fillers = Counter((one.place, one.filler) for one in found)
    for (place, filler), number in fillers.items():
        if filler is not None and number >= FEWEST_STEPS:
            hint = f"set labels of padding to -100, or ignore_index={filler}"
            yield place, f"the targets {filler}, which are padding, count", hint
    yield from _find_wrong_labels(trace, trace.of(LossCall))


def _find_wrong_tokens(targets: Targets, sees_all: bool) -> Doubts:
    """Find targets that are the tokens of the model's input, or other ones than the next."""
    same = targets.same_as_input
    # A model that sees all tokens does not predict the next one.
    if same[1] < 0.9 and not sees_all:
        if same[0] > 0.99:
            hint = "shift them by one token to the left; a decoder is given them one place later"
            yield "the targets are the model's own input", hint
        if same[2] > 0.99:
            hint = "shift once: models of Hugging Face shift the labels themselves"
            yield "the targets are shifted by two tokens", hint
    if targets.counts_padding and max(same[0], same[1]) > 0.5:
        hint = "set labels of padding to the ignored index, -100"
        yield "targets count where the attention mask is 0", hint


def _find_wrong_labels(trace: Trace, calls: Sequence[LossCall]) -> Faults:
    """Labels of the data are several, in each batch, and not among the inputs."""
    for of_line in grouped(calls, "lines"):
        columns = frozenset.intersection(*(call.columns or frozenset() for call in of_line))
        if columns and sum(call.term.num_terms for call in of_line) >= FEWEST_LABELS:
            measured = f"column {min(columns)} of the model's input is the target"
            yield of_line[0], measured, "leave the target out of the input"
    labelled = [one for one in trace.trained_fetches if len(one.labels) > 3]
    shuffled = [one for one in calls if one.is_shuffled]
    if len(shuffled) >= FEWEST_STEPS and not any(one.is_used for one in trace.of(Fetch)):
        hint = "index inputs and labels by the same permutation"
        yield shuffled[0], "the labels are in another order than the inputs", hint
    kinds = {label for one in labelled for label in one.labels}
    for several in grouped(labelled, "loader"):
        labels = [label for one in several for label in one.labels]
        # Labels that name the loader, as domains do, differ between loaders.
        if len(kinds) == 1 and len(labels) >= FEWEST_LABELS:
            measured = f"all {len(labels)} labels are {labels[0]}"
            yield several[0], measured, "look at how labels are made"
        elif (
            len({*labels}) > 1
            and len(several) > 2
            and all(len({*one.labels}) == 1 for one in several)
        ):
            hint = "shuffle the data: DataLoader(..., shuffle=True)"
            yield several[0], "each batch has samples of one class only", hint


def mode(trace: Trace) -> Faults:
    """The model is in training mode in forward passes that are trained on, and only there."""
    # One of several models may be in eval mode from the start on purpose, as a frozen BatchNorm.
    in_training = {one.module for one in trace.trained_forwards if one.training}
    evaluated = {*_find_evaluations(trace)}
    # An evaluation in every step belongs to the step, as where it makes targets.
    is_part = len(trace.windows) >= FEWEST_STEPS and all(
        evaluated.intersection(window.events) for window in trace.windows
    )
    for one in trace.of(Forward):
        if one.module not in trace.roots or not one.acts:
            continue
        is_left = one.module in in_training or not in_training
        # The gradients of an attack are for what the model was given.
        is_attack = any(not isinstance(leaf, nn.Parameter) for leaf in one.behind)
        if one.is_trained_on and not one.training and is_left and not is_attack:
            yield (
                one.origin,
                f"in eval mode from here on: the trained forward pass at {one.place}",
                "call model.train() before training, and again after each evaluation; a method "
                "train of your own calls super().train(mode)",
            )
        elif one in evaluated and not is_part:
            hint = "call model.eval() before evaluation, and model.train() after it"
            yield one, "an evaluation in training mode", hint


def _find_evaluations(trace: Trace) -> Iterator[Forward]:
    """Yield the forward passes of an evaluation that are in training mode."""
    # Digests of batches from loaders for evaluation: no model was trained on any of them.
    loaders = {one.loader for one in trace.trained_fetches}
    others = {
        digest for one in trace.of(Fetch) if one.loader not in loaders for digest in one.digests
    }
    # Whether the next of the other forward passes of a model is in eval mode: statistics of norms
    # may be made anew before it.
    before_eval = dict[Any, bool]()
    for _, several in itertools.groupby(
        reversed(trace.of(Forward)), attrgetter("module", "digests")
    ):
        one, *more = several
        if one.is_trained_on or not one.training:
            before_eval[one.module] = not one.training
        # An input with a gradient is attacked. Several predictions are drawn on purpose.
        elif others & {*one.digests} and not (more or one.behind or before_eval.get(one.module)):
            yield one


def untrained(trace: Trace) -> Faults:
    """Find a model that is not trained, as a teacher, and that is always in training mode."""
    found = []
    for window in trace.windows:
        for one in {event.module: event for event in window.of(Forward)}.values():
            is_trained = any(
                own.requires_grad and own in trace.held_parameters
                for own in one.module.parameters()
            )
            if one.training and not (one.is_trained_on or is_trained):
                found.append(one)
    for forwards in grouped(found, "module"):
        if (
            len(forwards) >= FEWEST_STEPS
            # An average of the model moves.
            and len({one.weights for one in forwards}) == 1
            and depends_on_mode(forwards[0].module)
        ):
            yield forwards[0], UNTRAINED, CALL_EVAL
    for part, before in {*trace.frozen_parts.values()}:
        own = [*part.parameters()]
        # A teacher that is an average of its student moves.
        is_frozen = sum_of_small(own) == before
        is_frozen &= (trace.held_parameters | trace.with_gradient).isdisjoint(own)
        if is_frozen and part not in trace.modules_run[True] and depends_on_mode(part):
            yield trace.causes.get(part, trace.modules_run[False][part]), UNTRAINED, CALL_EVAL


def without_statistics(trace: Trace) -> Faults:
    """Find an average of a model that is evaluated with the statistics of new norms."""
    for forwards in grouped(trace.of(Forward), "module"):
        buffers = forwards[0].module.named_buffers()
        means = [one for name, one in buffers if name.endswith("running_mean")]
        # Weights that are made and loaded have changed in place a few times.
        changed = (one for one in forwards[0].module.parameters() if not one.is_inference())
        most = max((one._version for one in changed), default=0)
        if (
            means
            and (len({one.weights for one in forwards}) > 1 or most > 2 * FEWEST_STEPS)
            and not any(one.training or one.is_trained_on for one in forwards)
            and not any(one.any() for one in means)
        ):
            hint = "copy the buffers too, or call torch.optim.swa_utils.update_bn before"
            yield forwards[0], "an average of weights has the statistics of a new BatchNorm", hint
    for forward in trace.trained_forwards:
        for one in forward.module.modules():
            own = dict(one.named_buffers(recurse=False))
            mean = own.get("running_mean") if one.training else None
            if mean is not None and own.get("num_batches_tracked") and not mean.any():
                hint = "in torch momentum is the share of the newest batch: 0.1 is usual"
                yield forward, "the statistics of a BatchNorm never move", hint


def data(trace: Trace) -> Faults:
    """Batches differ from step to step where the data has more than one."""
    fetches = [one for one in trace.of(Fetch) if length_hint(one.loader) != 1]
    if not fetches:
        raise NotApplicable("no DataLoader of several batches is known")
    # A loader may be made anew in each epoch.
    for several in grouped(fetches, "dataset" if len(trace.by_optimizer) == 1 else "loader"):
        first = several[0]
        # Inputs that the loop has augmented are known by their targets.
        if any(fetch.is_used or fetch in trace.trained_fetches for fetch in several):
            yield from _compare_epochs(several, trace)
        # A part whose labels are used means that the whole dataset is read without its labels.
        parts = {
            id(getattr(one.loader.dataset, "dataset", None)): one.is_used
            for one in sorted(trace.of(Fetch), key=attrgetter("is_used"))
        }
        if parts.get(first.dataset) is False and trace.places(r"random_split\("):
            hint = "train on the part that random_split returned for it"
            yield first, "samples that random_split set apart are trained on", hint
        # It draws places in its weights.
        sampler, number = first.loader.sampler, length_hint(first.loader.dataset)
        if isinstance(sampler, WeightedRandomSampler) and len(sampler.weights) < number:
            yield (
                [*trace.places("WeightedRandomSampler\\("), first.place][0],
                f"of {number} samples only the first {len(sampler.weights)} are drawn",
                "give it a weight for each sample: weights[labels]",
            )
    windows = [[one.digests for one in window.forwards] for window in trace.windows]
    windows = [one for one in windows if any(one)]
    # A batch that the loop fetched only once is repeated on purpose.
    is_fetched_again = sum(bool(one.digests) for one in fetches) >= len(windows)
    is_same = is_fetched_again and all(one == windows[0] for one in windows)
    # A model may be given other inputs as well, as those of a generator.
    trained = [one.digests for one in fetches if one in trace.trained_fetches]
    is_same |= len({*trained}) == 1 < len(trained) - 1
    if len(windows) > 2 and is_same:
        yield (
            fetches[0],
            f"{len(windows)} steps on the same batch",
            "iterate over the loader, which next(iter(loader)) begins anew; shuffle it where a "
            "step takes all of its batches",
        )


def changed_in_reading(trace: Trace) -> Faults:
    """Find a dataset whose first sample is another one when it is read again, as by +=."""
    for first, *_ in grouped(trace.of(Fetch), "dataset"):
        data = first.loader.dataset
        # A dataset that is iterated over has no first sample.
        with contextlib.suppress(Exception):
            sample = tensors_of(default_convert(data[0]))
            before = str([*map(digest, sample)])
            data[0]
            if before != str([*map(digest, sample)]):
                yield (
                    first,
                    "stored samples change each time that they are read",
                    "clone() what is stored, or add by x = x + noise in place of x += noise",
                )


def same_order(trace: Trace) -> Faults:
    """Find epochs of one order that the loop draws anew by itself."""
    begun = trace.of(Step)[0].at
    late = [one for one in trace.of(Shuffle) if one.at > begun]
    # In each step random numbers serve another purpose.
    is_known = late and len(late) < len(trace.windows) - 1 and not trace.of(Fetch)
    # Several trainings may begin alike, each with a model of its own.
    for forwards in grouped(trace.trained_forwards, "module") if is_known else ():
        order = [one.digests for one in forwards]
        length = 1 + [*order[1:], order[0]].index(order[0])
        again = order[length : 2 * length]
        if len(again) > 2 and again == order[: len(again)]:
            hint = "make and seed the generator once, before the loop"
            yield late[0], "two epochs have the same order", hint


def same_samples(trace: Trace) -> Faults:
    """Find batches whose samples are all the same, in each step."""
    forwards = trace.trained_forwards
    # A policy may draw several actions in one state.
    is_alike = len(forwards) > 2 and all(one.is_one_sample for one in forwards)
    is_alike &= not trace.of(Scoring)
    places = [one.place for one in trace.trained_fetches]
    # Values that come from no loader and never change may stand for data.
    if is_alike and (places or len({one.digests for one in forwards}) > 2):
        hint = "look at the dataset and its collate function; clone() a buffer before it is kept"
        yield [*places, forwards[0].place][0], "all samples of a batch are the same", hint


def same_views(trace: Trace) -> Faults:
    """Find steps in which a model gets the same values twice, in other tensors."""
    again = []
    for window in trace.windows:
        trained = [one for one in window.forwards if one.num_samples > 1]
        # A pass through which another model is trained too is no view of the data.
        for first, *others in grouped(trained, "module", "digests", "returned", "behind"):
            again += [one for one in others if {*first.addresses}.isdisjoint(one.addresses)]
    if len({one.digests for one in again}) >= FEWEST_STEPS:
        yield again[0], "two views of a batch are the same", "draw a random view for each pass"


def other_batches(trace: Trace) -> Faults:
    """Find targets that are of other batches than the inputs, in each window."""
    found = []
    for window in trace.windows:
        # Its losses come after the last step of another optimizer before its first backward call.
        first = window.calls[0].at if window.calls else 0
        begin = max((one.at for one in window.of(Stepping) if one.at < first), default=-1)
        calls = [one for one in window.of(LossCall) if one.is_used and one.at > begin]
        forwards = [one for one in window.forwards if one.at > begin]
        # A batch of inputs alone, or of targets alone, is combined with another one on purpose.
        inputs, targets = (
            {one for digest in digests for one in trace.fetches[digest] if len(one.digests) > 1}
            for digests in (
                {digest for one in forwards for digest in one.digests},
                {call.targets for call in calls},
            )
        )
        if {one.loader for one in inputs} & {one.loader for one in targets}:
            found.append(calls[0].place if inputs.isdisjoint(targets) else "")
    if len(found) >= FEWEST_STEPS and all(found):
        hint = "take the targets from the batch that the model is given"
        yield found[0], "the targets are of another batch than the inputs", hint


def shuffled_apart(trace: Trace) -> Faults:
    """Find labels and states of other samples, as the data is shuffled."""
    shuffled = [
        one
        for one in trace.of(Fetch)
        if isinstance(one.loader.sampler, RandomSampler) and not one.loader.sampler.generator
    ]
    inputs = [one for one in shuffled if one in trace.trained_fetches]
    labels = [
        one for one in shuffled if one.is_used and len(one.digests) == 1 and one not in inputs
    ]
    if labels and any(not one.is_used for one in inputs):
        hint = "draw both from one loader, as of a TensorDataset(inputs, labels)"
        yield labels[0], "inputs and labels are shuffled, each by its own loader", hint
    for forwards in grouped(trace.trained_forwards, "module"):
        kept = [
            one
            for last, one in itertools.pairwise(forwards)
            # Zeros are no state yet.
            if last.outputs.intersection(one.digests) - {0.0}
            and any(last.at < batch.at < one.at for batch in shuffled)
        ]
        if len(kept) >= FEWEST_STEPS:
            hint = "begin each batch without a state, or leave out shuffle=True"
            yield kept[0], "a state of other samples is kept, as the data is shuffled", hint


def _compare_epochs(fetches: Sequence[Fetch], trace: Trace) -> Faults:
    """Find batches that repeat within an epoch, and epochs of the same order."""
    full = [fetch for fetch in fetches if fetch.digests]
    epochs = grouped(full, "epoch")
    for epoch in epochs:
        num_different = len({one.digests for one in epoch})
        if len(epoch) > 2 and num_different * 2 <= len(epoch):
            yield (
                epoch[0],
                f"{len(epoch)} batches of an epoch are only {num_different} different ones",
                "give each worker its own seed and its own part of the data",
            )
    sampler = fetches[0].loader.sampler
    for first, second in itertools.pairwise(epochs):
        begin = second[0]
        pairs = [*zip(first, second, strict=False)]
        # A sampler, or a dataset that is iterated over, shuffles at the begin of an epoch.
        events = reversed(trace.events[: begin.at])
        before = (one for one in events if not isinstance(one, Seeding))
        if (
            isinstance(next(before, None), Shuffle)
            and not isinstance(sampler, SequentialSampler)
            and len(pairs) > 1
            and length_hint(sampler, 5) > 4
            and all(one.digests == other.digests for one, other in pairs)
        ):
            within = [one for one in trace.of(Seeding) if first[0].at < one.at < begin.at]
            hint = "call sampler.set_epoch(epoch), or set seeds once, before the loop"
            yield [begin, *within][-1], "two epochs have the same order", hint


def same_randomness(trace: Trace) -> Faults:
    """Find a generator that is set to the same state before each step."""
    seeds = trace.of(Seeding)
    for of_one in trace.by_optimizer:
        windows = [window for window in of_one if window.forwards]
        # An evaluation now and then leaves other numbers to the step after it.
        several = max(grouped(windows, "first.generator"), key=len, default=[])
        moves = any(one.generator != one.first.generator for one in several[:-1])
        moves |= all(one.of(Seeding) for one in several)
        if len(several) > 2 and moves:
            place = seeds[-1].place if seeds else trace.of(Step)[0].place
            hint = "set seeds once, before the loop"
            yield place, f"{len(several)} steps begin with the same random numbers", hint


CHECKS = {
    "targets": Check(
        "targets that are to be learned, without padding", (targets,), LossCall | Targets, NO_LOSS
    ),
    "mode": Check(
        "training mode in training, and only there",
        (mode, untrained, without_statistics),
    ),
    "data": Check(
        "new samples and random numbers at each step",
        (
            same_samples,
            changed_in_reading,
            same_order,
            same_randomness,
            data,
            same_views,
            other_batches,
            shuffled_apart,
        ),
    ),
}
