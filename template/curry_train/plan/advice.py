"""Explain a plan: why a candidate won, or what would help where nothing fits.

Proof: `python -m pytest tests/test_plan.py`.
"""

import textwrap
from collections.abc import Iterator, Sequence

from torch import nn

from ..core.sizes import format_bytes
from .chain_of_blocks import Chain
from .saved_plan import Candidate
from .sharding import Sharding

DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
RANKS = (2, 4, 8, 16, 32, 64)


def why_it_won(best: Candidate, found: Sequence[Candidate], plain_seconds: float) -> str:
    """Compare the best candidate with the plain step and with the second-best candidate.

    The plain step is the same batch with all activations held.
    """
    assert best.step_seconds is not None
    slowdown = best.step_seconds / plain_seconds - 1
    text = f"It costs {slowdown:.1%} over the same batch with all activations held."

    others = [other for other in found if other.step_seconds is not None and other is not best]
    if others and others[0].step_seconds is not None:
        second = others[0]
        slower = others[0].step_seconds / best.step_seconds - 1
        text += (
            f" The next best is microbatch {second.microbatch} with {second.summary()}, "
            f"{slower:.1%} slower."
        )
    return text


def what_microbatches_change(module: nn.Module, best: Candidate) -> str:
    """Warn about layers that make training with microbatches differ from the whole batch.

    These are dropout, which draws per microbatch, and batch norm, which takes its statistics per
    microbatch. The text is empty for a single microbatch and for a model without such layers.
    """
    if best.steps == 1:
        return ""
    layers = list(module.named_modules())
    dropouts = [name for name, layer in layers if _dropout(layer) > 0]
    norms = [name for name, layer in layers if isinstance(layer, BATCH_NORMS)]

    effects = []
    if dropouts:
        effects.append(f"draws its own dropout ({dropouts[0]})")
    if norms:
        effects.append(f"has its own statistics ({norms[0]})")
    if not effects:
        return ""

    whole = best.steps * best.microbatch
    return (
        f" Each microbatch {' and '.join(effects)}: to get exactly the losses of the whole batch, "
        f"use --microbatch {whole}."
    )


def _dropout(layer: nn.Module) -> float:
    """Return the dropout probability of a layer, 0 if it has none."""
    probability = getattr(layer, "p" if isinstance(layer, DROPOUTS) else "dropout", 0)
    return float(probability) if isinstance(probability, int | float) else 0.0


def why_nothing_fits(
    least: Candidate,
    chain: Chain,
    sharding: Sharding,
    budget_bytes: int,
    not_tried: Sequence[tuple[str, int]] = (),
) -> str:
    """Name the least peak and the levers that are left, each with its peak, in 80 columns."""
    over = format_bytes(least.peak_bytes - budget_bytes)
    first = (
        f"nothing fits {format_bytes(budget_bytes)}: the least peak is "
        f"{format_bytes(least.peak_bytes)}, {over} too much, with microbatch {least.microbatch} "
        f"and {least.summary()}"
    )
    lines = textwrap.wrap(first, 80)
    for lever in _levers(least, chain, sharding, budget_bytes, not_tried):
        lines += textwrap.wrap(lever, 80, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _levers(
    least: Candidate,
    chain: Chain,
    sharding: Sharding,
    budget_bytes: int,
    not_tried: Sequence[tuple[str, int]],
) -> Iterator[str]:
    def describe(peak: int) -> str:
        return f"a peak of {format_bytes(peak)}" + (", which fits" if peak <= budget_bytes else "")

    step = chain.steps[-1]
    accumulated = least.steps > 1

    before_activations = step.fixed + (step.gradients if accumulated else 0)
    line = f"before any activation {format_bytes(before_activations)} is in use: "
    line += "parameters and optimizer state"
    if accumulated:
        line += ", and gradients of earlier microbatches"
    if before_activations > budget_bytes:
        line += "; that alone is over the budget, so no choice for activations helps"
    yield line

    for lever, peak in not_tried:
        yield f"{lever}: {describe(peak)}"

    alone = least.peak_bytes - sharding.extra_bytes(step, accumulated=accumulated)
    more = [ranks for ranks in RANKS if ranks > sharding.ranks]
    peaks = {
        ranks: alone + Sharding("fsdp2", ranks).extra_bytes(step, accumulated=accumulated)
        for ranks in more
    }
    enough = [ranks for ranks, peak in peaks.items() if peak <= budget_bytes]
    if ranks := (enough or more[-1:]):
        yield f"FSDP2 on {ranks[0]} ranks: {describe(peaks[ranks[0]])}"

    saved = step.fixed - chain.fixed_with("adamw-8bit")
    if saved > 0:
        yield f"optimizer state of 2 bytes per parameter: {describe(least.peak_bytes - saved)}"

    if least.steps > 1 and step.gradients:
        yield (
            "one microbatch per window, which accumulates no gradients: up to "
            f"{format_bytes(step.gradients)} less, with {least.steps} times fewer samples"
        )
