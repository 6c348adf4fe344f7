"""Run a model again with a part of its input changed, and compare its outputs.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..core.measure import as_trained
from ..workloads.models import LIBRARIES
from .loop_events import Faults, Forward, LossCall, Trace, tensors_of


def probe(trace: Trace) -> None:
    """Look for outputs that depend on what they must not, once for each model."""
    forward = trace.last.get(Forward)
    # Targets may stand behind a call of another model, as of one that judges.
    if (
        forward is None
        or forward.module not in trace.roots
        or forward.module in trace.probed_models
    ):
        return
    trace.probed_models.append(forward.module)
    # Another rank may have no reason to run it as often, and this one would wait for it.
    if forward.exchanges:
        return
    # A model may refuse to run in eval mode, or have other outputs in each call.
    with contextlib.suppress(Exception):
        for find in (_probe_tokens, _probe_padding, _probe_samples):
            for place, measured, hint in find(trace, forward):
                trace.fault("targets", measured, hint, place)


def _probe_tokens(trace: Trace, forward: Forward) -> Faults:
    """Find outputs that change with a later token, or with the first one alone."""
    module, tokens, time = forward.module, forward.tokens, forward.time_dim
    if tokens is None or (last := tokens.shape[time] - 1) < 2:
        return
    # The first token in place of the last one.
    at = torch.arange(last + 1, device=tokens.device) % last
    both = _run_both(trace, tokens, tokens.index_select(time, at))
    # Cross-entropy takes outputs whose last dimension is time, too.
    plain = both[0]
    shape = plain.shape
    dims = [dim for dim in (time, 2) if len(shape) == 3 and shape[dim] == last + 1]
    # The outputs of as many samples as tokens may have time first.
    if (
        len(dims) == 1
        and _differ(*(one.narrow(dims[0], 0, last) for one in both))
        and _differ(*(one[:last] for one in both))
    ):
        trace.sees_all.append(module)
        for one in trace.next_tokens:
            if one.model is module:
                hint = "mask attention to later tokens, is_causal=True; no bidirectional layer"
                yield one, "the model sees the tokens that it has to predict", hint
    elif len(dims) == 1 and _differ(*both):
        trace.sees_last.append(module)
    # The later tokens of another sample.
    mixed = torch.cat([tokens[:, :1], tokens.flip(0)[:, 1:]], 1)
    is_known = plain.dim() == 2 and not torch.equal(plain, plain.flip(0))
    if (
        is_known
        and not torch.equal(tokens, mixed)
        and torch.equal(*_run_both(trace, tokens, mixed))
    ):
        yield (
            forward,
            "the outputs of the model depend on the first token alone",
            "use the output at the last token, or attention without a causal mask",
        )


def _probe_padding(trace: Trace, forward: Forward) -> Faults:
    """Find outputs that change with other tokens in place of padding, or another embedding."""
    module, tokens = forward.module, forward.tokens
    parts = [*module.modules()]
    # Some layers reach over padding, whatever a mask is.
    kinds = nn.RNNBase | nn.modules.conv._ConvNd
    if tokens is None or any(isinstance(one, kinds) for one in parts):
        return
    other, embeddings = tokens, list[nn.Module]()
    is_known = not inspect.getfile(type(module).forward).startswith(LIBRARIES)
    padded = _find_padding(tokens, trace.model_call.tensors)
    if padded is not None:
        other = torch.where(padded, tokens[:, :1], tokens)
    # A mean over words and padding may be meant, but no attention to padding.
    elif any("Attention" in type(one).__name__ for one in parts):
        is_known = True
        for one in parts:
            if isinstance(one, nn.Embedding) and one.padding_idx is not None:
                padded = _find_padding(tokens, [tokens != one.padding_idx])
                embeddings.append(one)
    if padded is None:
        return
    outputs, others = _run_both(trace, tokens, other, embeddings)
    if outputs.dim() == 3 and outputs.shape[:2] == tokens.shape:
        outputs, others = outputs[~padded], others[~padded]
    elif outputs.dim() > 2 or not is_known:
        return
    if _differ(outputs, others):
        hint = "give the attention a mask of the padding; which of its values stands for that?"
        yield forward, "the outputs of the model change with the padding", hint


def _embed_padding_as_word(embedding: Any, given: tuple[Tensor], output: Tensor) -> Tensor:
    """Embed padding as the word before it; the weights may be the output layer's too."""
    is_padding = (given[0] == embedding.padding_idx).unsqueeze(-1)
    return torch.where(is_padding, embedding.weight[embedding.padding_idx - 1], output)


def _probe_samples(trace: Trace, forward: Forward) -> Faults:
    """Find layers that take the samples of a batch for the steps of a sequence."""
    tensors = trace.model_call.tensors
    call = trace.last.get(LossCall)
    is_known = call is not None and call.columns is not None
    # Where the targets are the next tokens of a row, the rows are the samples.
    is_language = forward.time_dim and any(one.model is forward.module for one in trace.next_tokens)
    if not tensors or not (is_known or is_language):
        return
    given = tensors[0]
    # Of equal sizes, and of a batch of one, it is not known which one is the batch.
    if not (given is forward.tokens or given.dim() > 2) or given.shape[1] in (1, len(given)):
        return
    # A recurrent layer sees no later steps.
    outputs, others = _run_both(trace, given, torch.cat([given[-1:], given[1:]]))
    # A table of samples has each one with each on purpose.
    if outputs.shape[:1] != given.shape[:1] or outputs.shape == (len(given), len(given)):
        return
    if not torch.equal(given[0], given[-1]) and torch.equal(outputs[0], others[0]):
        hint = "look for a token that is mixed with no other one: batch_first? a mask?"
        yield forward, "the outputs of the model do not depend on its input", hint
    if _differ(outputs[1:], others[1:]):
        modules = [*forward.module.modules()]
        is_sequence = any(
            isinstance(one, nn.RNNBase | nn.MultiheadAttention) and not one.batch_first
            for one in modules
        )
        # A loader's batch and rows of tokens are known to be no nodes of a graph.
        is_loaded = any({*one.digests} & {*forward.digests} for one in trace.last_fetches.values())
        is_loaded |= given is forward.tokens and is_known
        is_loaded &= all(getattr(one, "track_running_stats", True) for one in modules)
        if is_sequence or is_loaded:
            yield (
                forward,
                "the outputs of a sample change with the other samples of the batch",
                "give recurrent layers and attention batch_first=True, or a tensor with time "
                "first; look for a softmax, a sum, a view or a product over the samples in the "
                "model",
            )
    # With an input more the first sample is another one than the last, and sums in half
    # precision may depend on the place.
    elif len(tensors) == 1 and outputs.itemsize > 2 and _differ(outputs[-1], others[0]):
        yield (
            forward,
            "the outputs of a sample change with its place in the batch",
            "add codes of positions along the sequence: codes[:x.size(1)] with batch first",
        )


def _run_both(
    trace: Trace,
    given: Tensor,
    other: Tensor,
    embeddings: Sequence[nn.Module] = (),
) -> tuple[Tensor, Tensor]:
    """Return the output of the last model for a tensor that it was given, and for another one.

    For the other one some embeddings embed padding as a word.

    It raises where the same input gives another output.
    """
    call = trace.model_call
    module = call.owner

    def run(value: Tensor) -> Tensor:
        # Also where it is in a dictionary.
        args, words = tree_map(
            lambda one: value if one is given else one, (call.args[1:], call.options)
        )
        logits = (
            one
            for one in tensors_of(module(*args, **words))
            if 0 < one.dim() < 4 and one.is_floating_point()
        )
        return next(logits, torch.zeros(()))

    with (
        contextlib.ExitStack() as hooks,
        mock.patch.object(trace, "depth", trace.depth + 1),
        torch.no_grad(),
        torch.random.fork_rng(),
        as_trained(module),
    ):
        module.eval()
        first, again = run(given), run(given)
        for one in embeddings:
            hooks.enter_context(one.register_forward_hook(_embed_padding_as_word))
        changed = run(other)
    if _differ(first, again):
        raise RuntimeError("it draws random numbers that are not torch's")
    return again, changed


def _find_padding(tokens: Tensor, given: list[Tensor]) -> Tensor | None:
    """Return where tokens are padding at the end, by a mask among what a model was given."""
    for mask in given:
        if mask.shape != tokens.shape or mask.max() > 1:
            continue
        differs = mask != mask[:, :1]
        is_at_end = (differs[:, 1:] >= differs[:, :-1]).all()
        if is_at_end and len(tokens[differs].unique()) == 1 == len(mask[:, 0].unique()):
            return differs
    return None


def _differ(first: Tensor, second: Tensor) -> bool:
    # Outputs of new weights may be small. Sums in half precision may depend on their order.
    share = 1e-4 if first.itemsize > 2 else 1e-2
    largest = float(first.nan_to_num().abs().max()) if first.numel() else 0.0
    return first.shape != second.shape or not torch.allclose(
        first, second, share, share * largest, equal_nan=True
    )
