"""Compare what the ranks of a loop did: their steps, weights, samples and syncs.

Proof: `python -m pytest tests/gates/test_loop_run.py`.
"""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace

from torch.distributed.tensor import DTensor

from .loop_accumulation import totals
from .loop_events import Dividing, Fault, Faults, Joining, Trace, grouped
from .loop_loss import TOLERANCE

REQUIRED = "equal weights and steps on all ranks, samples of their own, one sync per window"


def rank_facts(trace: Trace) -> list[SimpleNamespace]:
    """Return what a rank did: for each step its line, weights, samples and syncs."""
    steps = []
    fetches = [one.place for one in trace.trained_fetches]
    for step in trace.windows:
        forwards, calls = step.forwards, step.calls
        # The last one of each module before each backward call.
        last = {(one.module, sum(call.at < one.at for call in calls)): one for one in forwards}
        place = forwards[0].place if forwards else ""
        # Shards differ from rank to rank, as they should.
        is_sharded = any(isinstance(one, DTensor) for one in step.own)
        # FSDP2 averages them, unless the loop sets what it divides by.
        gradient = [1.0, 1.0] if is_sharded else [step.made_gradient, step.used_gradient]
        steps.append(
            SimpleNamespace(
                place=step.place,
                joins=bool(trace.of(Joining)),
                weights=None if is_sharded or step.moved is None else step.weights[1],
                # After the step before, and when this one began.
                between=(step.previous and step.previous.weights[1], step.weights[0]),
                inputs=[one.digests for one in forwards],
                input_place=place,
                data_place=[*fetches, place][0],
                # Of each module: the lines of its backward calls, and whether they sync.
                syncs=[
                    [(next((c.place for c in calls if c.at > one.at), ""), one.syncs) for one in of]
                    for of in grouped(last.values(), "module")
                ],
                gradient=None if trace.of(Dividing) else gradient,
                loss_place=calls[-1].place if calls else "",
                totals=totals(calls),
            )
        )
    return steps


def faults_of_ranks(ranks: Sequence[Sequence[SimpleNamespace] | None]) -> Faults:
    """Find faults of all ranks; one that has not ended gave nothing."""
    there = [rank for rank in ranks if rank is not None]
    first = there[0]
    counts = [None if rank is None else len(rank) for rank in ranks]
    joins = any(one.joins for one in first)
    if not joins and len(set(counts)) > 1:
        place = first[-1].place if first else ""
        yield (
            place,
            f"steps {counts}",
            "give each rank the same number of batches (drop_last=True): one that made None waits",
        )
    apart: list[Fault] = []
    scaled: list[Fault] = []
    # Whether ranks that were apart begin a step with equal weights, as in local SGD.
    is_averaged = False
    for steps in () if joins else zip(*there, strict=False):
        last, begun = map(set, zip(*(one.between for one in steps), strict=True))
        is_averaged |= len(last) > 1 == len(begun)
        own = steps[0]
        for syncs in own.syncs:
            lines = [line for line, is_synced in syncs if is_synced]
            # Losses of several lines are parts of one microbatch.
            most = max(map(lines.count, lines), default=0)
            if syncs[-1][1] is False:
                hint = "leave no_sync() for the last microbatch of a window"
                measured = "a step without a sync between ranks"
                apart.append((own.input_place, measured, hint))
            elif most > 1:
                hint = "use model.no_sync() for all microbatches but the last"
                yield own.input_place, f"{most} syncs in a window", hint
        weights = [one.weights for one in steps]
        if None not in weights and len(set(weights)) > 1:
            hint = (
                "wrap the model in DistributedDataParallel and call the wrapper, or begin with the "
                "same weights on all ranks and average all gradients"
            )
            measured = "weights differ from rank to rank after the step"
            apart.append((own.place, measured, hint))
        scaled += _find_wrong_averages(steps)
    yield from () if is_averaged else apart
    # The last window of an epoch may be a short one.
    yield from scaled if len(scaled) > min(map(len, there)) / 2 else ()
    inputs = [[step.inputs for step in rank] for rank in there]
    if inputs.count(inputs[0]) == len(inputs) > 1 and any(inputs[0]):
        hint = "use DistributedSampler, or seed each rank's data by its rank"
        yield first[0].data_place, "all ranks see the same samples", hint


def _find_wrong_averages(steps: Sequence[SimpleNamespace]) -> Faults:
    """Find gradients that are not the mean over the ranks of the gradients of mean losses."""
    number = len(steps)
    gradients = [one.gradient for one in steps]
    # Where each rank divides by the terms of all, the ranks weigh differently.
    columns = [*itertools.zip_longest(*(one.totals for one in steps))]
    if None in gradients or any(None in column for column in columns):
        return
    weights = [sum(column) / number for column in columns]
    mean = sum(made for made, _ in gradients) / number
    used = gradients[0][1]
    # A difference of the ranks' gradients that cancels leaves nothing to compare with.
    if abs(mean) < 0.1 * max(abs(made) for made, _ in gradients) or not used:
        return

    def is_one(factor: float) -> bool:
        return any(abs(factor * used / mean * weight - 1) < TOLERANCE for weight in weights)

    if is_one(1 / number) and not is_one(1):
        hint = "divide the sum of the gradients by the ranks; DistributedDataParallel does it"
        yield steps[0].loss_place, "gradients are summed over the ranks", hint
    if is_one(number) and not is_one(1):
        hint = (
            "leave out the division by the ranks, or multiply by them what is divided by the terms "
            "of all: DistributedDataParallel averages"
        )
        yield steps[0].loss_place, "gradients are averaged over the ranks twice", hint
