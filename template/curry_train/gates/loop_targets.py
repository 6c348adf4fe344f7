"""Compare the targets of a loss with the batches that were read, and with what the model was given.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from ..core.digest import is_plain
from .loop_events import Forward, LossCall, Targets, Trace, tensors_of
from .loop_loss import ON_VALUES, digest, num_left_out


def of_batch(batch: Any) -> dict[str, Any]:
    """Return what is noted of a batch, by whose values targets are known."""
    several = [one for one in tensors_of(batch) if one.dim() and len(one) > 1 and is_plain(one)]
    return {
        "digests": () if batch is None else tuple(map(digest, several)) or (0.0,),
        "sums": tuple(map(_sum_up, several)),
        "integers": {
            one.data_ptr(): one.tolist()
            for one in several
            if one.dim() == 1 and not one.is_floating_point()
        },
        "whole": tuple(
            digest(one.trunc())
            for one in several
            if one.dtype.is_floating_point and one.numel() == len(one) and one.frac().any()
        ),
    }


def _sum_up(one: Tensor) -> float:
    """Return a digest of the sum over the samples, without the bits that rounding may change."""
    return round(digest(one.real.double().sum(0)), 6)


def note_batches(trace: Trace, target: Tensor, call: LossCall) -> None:
    """Note the batches whose labels, or a part of them, are the targets of a loss."""
    is_float = target.is_floating_point()
    is_index = target.device.type == "cpu" and not is_float
    at = target.data_ptr() if is_index and is_plain(target) else -1
    own = [] if is_float else target.flatten().tolist()
    given = trace.last.get(Forward)
    for fetch in trace.last_fetches.values():
        # Other targets may be 0 as well.
        is_same = call.targets in fetch.digests and (call.targets != 0 or not is_index)
        for first, values in fetch.integers.items():
            if (
                first <= at < first + target.itemsize * len(values)
                or (target.dim() == 2 and target.argmax(1).tolist() == values)
                or (is_same and values == own)
            ):
                fetch.labels = fetch.labels or values
                fetch.is_used = True
        fetch.is_used |= is_same
        # A mask of ones is in each batch, and the next batch may have been fetched already.
        if given is not None and is_index and given.digests[:1] == fetch.digests[:1]:
            call.is_shuffled |= any(
                own != one and sorted(own) == sorted(one) for one in fetch.integers.values()
            )
        forwards = (one for one in trace.of(Forward) if one.at > fetch.at)
        if (
            is_same
            and all({*one.digests}.isdisjoint(fetch.digests) for one in forwards)
            and any(
                _sum_up(one) in fetch.sums for one in filter(is_plain, trace.model_call.tensors)
            )
        ):
            trace.fault(
                "targets",
                "the inputs are in another order than the labels",
                "index both by the same permutation",
                value=call.targets,
            )
        if call.targets in fetch.whole and call.term.name in ON_VALUES:
            trace.fault(
                "targets",
                "the targets have lost their fractions",
                "leave out the long() or int() of the targets",
                call,
            )


def columns_of(given: Tensor | None, target: Tensor) -> frozenset[int] | None:
    """Compare a target for each sample with what the model was given."""
    if given is None or given.dim() < 2 or not len(given) == target.numel() > 1:
        return None
    # A token may well be what a model has to repeat, and a value what it has to follow.
    is_table = given.dim() == 2 and given.is_floating_point()
    if not is_table or target.is_floating_point() or given.device != target.device:
        return frozenset()
    # Equal by chance, where there is one label.
    equal = (given.detach() == target.reshape(-1, 1)).all(0) & (target != target[0]).any()
    return frozenset(equal.nonzero().flatten().tolist())


def tokens_of(given: Any) -> Tensor | None:
    """Return what a model was given first, where that is rows of tokens."""
    is_tokens = isinstance(given, Tensor) and given.dim() == 2 and not given.is_floating_point()
    return given if is_tokens else None


def note_targets(
    trace: Trace,
    forward: Forward,
    target: Tensor,
    ignored: int = -100,
    logits: Tensor | None = None,
    *,
    is_whole: bool = True,
) -> None:
    """Compare targets that are indices with the tokens that the model was given.

    Logits are those of a loss, which may leave out the first ones of a model. Where the loss is not
    whole yet, the loop may leave out padding itself.
    """
    given, options = trace.model_call.tensors, trace.model_call.options
    labels = options.get("labels")
    has_other_tokens = False
    # The targets in rows, where it is known how they are flattened.
    known = target._base
    # The input whose rows, or columns, the targets continue, as that of a decoder.
    for one in given:
        is_like = one.dim() == 2 and one.numel() == target.numel()
        if is_like and one is not labels and one.device == target.device:
            # A decoder may be given its targets by mistake; a model needs them for a loss.
            is_later = one is not given[0] and not trace.depth
            targets = target.reshape(one.shape)
            same = _share_ahead(targets, one, ignored)
            if _share_ahead(targets.T, one.T, ignored)[1] > 0.99:
                forward.tokens, forward.time_dim = one, 0
            elif max(same[1], is_later and same[0]) > 0.99:
                forward.tokens, forward.time_dim = one, 1
                known = targets
            # A model that computes its loss may be given the targets first, and its input then.
            is_inside = trace.depth > 0 and one.dtype == target.dtype
            has_other_tokens |= is_inside and max(same) < 0.9 and bool((one > 1).any())
    _compare_orders(trace, logits, known, target)
    tokens = forward.tokens
    # Of speech or pictures the rows are those of the labels.
    rows = (tokens_of(one) for one in (tokens, labels, target, target._base))
    num_rows = next((len(one) for one in rows if one is not None), 0)
    if not num_rows or target.is_floating_point() or target.numel() % num_rows:
        return
    targets = target.reshape(num_rows, -1)
    if tokens is not None and not forward.time_dim:
        tokens, targets = tokens.T, targets.T
    counted = targets != ignored
    if not counted.any():
        return
    same_as_input = defaultdict[int, float](float)
    event = trace.note(
        Targets,
        model=forward.module,
        same_as_input=same_as_input,
        filler=_find_filler(targets, counted) if is_whole else None,
    )
    # Targets of a part of the tokens, whose first or last ones are left out.
    if (
        tokens is None
        or len(tokens) != len(targets)
        or not 0 <= tokens.shape[1] - targets.shape[1] <= 2
    ):
        return
    same = _share_ahead(targets, tokens, ignored)
    left_out = 0 if logits is None else num_left_out(logits, forward.time_dim)
    event.may_be_shifted = forward.tokens is not given[0] or has_other_tokens
    same_as_input |= {ahead - left_out: share for ahead, share in enumerate(same)}
    mask = options.get("attention_mask")
    # The mask of an encoder says nothing of what its decoder is given.
    is_known = (
        isinstance(mask, Tensor)
        and mask.shape == tokens.shape
        and tokens is not options.get("decoder_input_ids")
    )
    # Without a mask, what repeats at the end of a row is padding.
    repeats = (tokens == tokens[:, -1:]).flip(1).cumprod(1).flip(1) > 0
    hidden: Any = mask == 0 if is_known else repeats
    shift = int(same[1] > same[0])
    width = min(tokens.shape[1] - shift, targets.shape[1])
    places = slice(shift, shift + width)
    counted = counted[:, :width]
    event.counts_padding = is_known & is_whole and bool((hidden[:, places] & counted).any())
    # The first of the repeated tokens may be the end of the text: the longest text has it alone.
    is_first = bool(torch.equal(hidden, repeats) and repeats.sum(1).min() == 1)
    hidden = repeats.roll(1, 1) & repeats if is_first else hidden
    ids, padding = tokens[:, places], hidden[:, places]
    # The last place of each row that is not padding.
    ends = width - 1 - padding.int().flip(1).argmin(1, keepdim=True)
    is_padding = ids[padding].unique().tolist() == ids.gather(1, ends).unique().tolist()
    if is_padding and not counted.gather(1, ends).any():
        trace.fault(
            "targets",
            "the last token of each text is never a target",
            "give padding a token of its own: with that of the end, both are ignored",
            event.place,
            # Batches of one width may be wider than their longest text.
            width if is_first else event.at,
        )


def _compare_orders(trace: Trace, logits: Any, rows: Any, target: Tensor) -> None:
    """Find outputs that are flattened in another order of positions than the targets."""
    viewed = getattr(getattr(logits, "grad_fn", None), "_saved_self_sym_sizes", ())[:2]
    is_known = rows is not None and rows.numel() == target.numel()
    if is_known and viewed == rows.shape[::-1] != rows.shape:
        trace.fault(
            "targets",
            f"outputs of {[*viewed]} positions are compared with targets of {[*rows.shape]}",
            "transpose one of them before both are flattened",
        )


def _share_ahead(targets: Tensor, tokens: Tensor, ignored: int) -> list[float]:
    """Return the share of targets that are the tokens none, one and two places ahead."""
    same = []
    for ahead in range(3):
        width = min(targets.shape[1], tokens.shape[1] - ahead)
        own = targets[:, :width]
        counted = own != ignored
        equal = (own == tokens[:, ahead : ahead + width]) & counted
        same.append(float(equal.sum() / counted.sum().clamp(1)))
    return same


def _find_filler(targets: Tensor, counted: Tensor) -> int | None:
    """Return the index at the end of rows of different lengths, if it counts."""
    last = targets[:, -1:]
    length = (targets == last).flip(1).cumprod(1).sum(1)
    is_long = (length > 2) & counted[:, -1]
    fillers = last[is_long].unique().tolist()
    if is_long.sum() < 2 or len(fillers) > 1 or len(length.unique()) < 2:
        return None
    is_nowhere_else = (targets == fillers[0]).sum() == length[last[:, 0] == fillers[0]].sum()
    # Rows may well end in one of a few classes.
    return fillers[0] if is_nowhere_else and targets.max() > 4 else None
