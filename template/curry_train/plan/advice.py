"""What a planner says of its result: why a candidate won, and where nothing fits, by how much and what would help.

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
    """Against the same batch with all activations held, and against the next best candidate."""
    assert best.step_seconds is not None
    text = f"It costs {best.step_seconds / plain_seconds - 1:.1%} over the same batch with all activations held."
    others = [other for other in found if other.step_seconds is not None and other is not best]
    if others and others[0].step_seconds is not None:
        second, slower = others[0], others[0].step_seconds / best.step_seconds - 1
        text += f" The next best is microbatch {second.microbatch} with {second.summary()}, {slower:.1%} slower."
    return text


def what_microbatches_change(module: nn.Module, best: Candidate) -> str:
    """What of the model sees the microbatch, so that the training is another than with the whole batch."""
    if best.steps == 1:
        return ""
    named = list(module.named_modules())
    drawing = [name for name, layer in named if _dropout(layer) > 0]
    norms = [name for name, layer in named if isinstance(layer, BATCH_NORMS)]
    said = [f"draws its own dropout ({drawing[0]})"] if drawing else []
    said += [f"has its own statistics ({norms[0]})"] if norms else []
    if not said:
        return ""
    whole = best.steps * best.microbatch
    return f" Each microbatch {' and '.join(said)}: for the very losses of the whole batch give --microbatch {whole}."


def _dropout(layer: nn.Module) -> float:
    part = getattr(layer, "p" if isinstance(layer, DROPOUTS) else "dropout", 0)
    return float(part) if isinstance(part, int | float) else 0.0


def why_nothing_fits(
    least: Candidate,
    chain: Chain,
    sharding: Sharding,
    budget_bytes: int,
    not_tried: Sequence[tuple[str, int]] = (),
) -> str:
    """The least peak, who owns it, and the levers that are left, each with its figure; at most 80 columns."""
    over = format_bytes(least.peak_bytes - budget_bytes)
    first = (
        f"nothing fits {format_bytes(budget_bytes)}: the least peak is {format_bytes(least.peak_bytes)}, {over} too "
        f"much, with microbatch {least.microbatch} and {least.summary()}"
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
    def told(peak: int) -> str:
        return f"a peak of {format_bytes(peak)}" + (", which fits" if peak <= budget_bytes else "")

    step, accumulated = chain.steps[-1], least.steps > 1
    there = step.fixed + (step.gradients if accumulated else 0)
    yield (
        f"before the activations there are {format_bytes(there)}: parameters and optimizer state"
        + (", and gradients of the microsteps before" if accumulated else "")
        + (
            ", more than the budget, so that no choice for activations helps"
            if there > budget_bytes
            else ""
        )
    )
    for lever, peak in not_tried:
        yield f"{lever}: {told(peak)}"
    alone = least.peak_bytes - sharding.extra_bytes(step, accumulated=accumulated)
    more = [ranks for ranks in RANKS if ranks > sharding.ranks]
    peaks = {
        ranks: alone + Sharding("fsdp2", ranks).extra_bytes(step, accumulated=accumulated)
        for ranks in more
    }
    enough = [ranks for ranks, peak in peaks.items() if peak <= budget_bytes]
    if ranks := (enough or more[-1:]):
        yield f"FSDP2 on {ranks[0]} ranks: {told(peaks[ranks[0]])}"
    saved = step.fixed - chain.fixed_with("adamw-8bit")
    if saved > 0:
        yield f"optimizer state of 2 bytes for each parameter: {told(least.peak_bytes - saved)}"
    if least.steps > 1 and step.gradients:
        yield (
            "one microstep in a window, without the gradients of others: up to "
            f"{format_bytes(step.gradients)} less, with {least.steps} times fewer samples"
        )
