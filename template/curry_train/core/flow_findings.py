"""Faults that grad-flow finds in its records, worst first.

The bounds are rules of thumb for training in float32 or bfloat16 with optimizers like Adam. Each
finding contains the measured figure, so that users of other settings can judge it.

Proof: `python -m pytest tests/test_grad_flow_findings.py`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .flow_record import AFTER_BACKWARD, LayerFlow, StepFlow, plain

# Bound on the RMS gradient of the first block relative to the last; its inverse means exploding.
VANISHED = 1e-3
# Fraction of an activation's elements that are exactly 0.
DEAD = 0.9
# Expected size of one step's update relative to the norm of the weights.
UPDATE = (1e-4, 1e-2)
# Number of latest records that are judged together, since one step may have an unusual batch.
RECENT = 5
# Minimum number of layers to compare for vanishing and exploding gradients.
CHAIN = 2


@dataclass(frozen=True)
class Finding:
    """One fault of the training, with the layers that have it."""

    # nonfinite, skipped, no-gradient, vanishing, exploding, dead, update or scaled.
    kind: str
    # The layers with this fault, worst first; empty if it concerns the whole model.
    layers: tuple[str, ...]
    # The step of the record in which it was found.
    step: int
    # The figure of the worst layer.
    value: float
    # The message for the user.
    said: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"layers": list(self.layers), "value": plain(self.value)}


def find(records: Sequence[StepFlow]) -> list[Finding]:
    """Return all faults: the first nonfinite step, and those of the latest probed steps."""
    if not records:
        return []
    found = _nonfinite(records) + _skipped(records)
    recent = [record for record in records if record.stepped and not record.nonfinite][-RECENT:]
    if recent:
        found += [
            *_no_gradient(recent),
            *_vanishing(recent),
            *_dead(recent),
            *_updates(recent),
            *_scaled(recent),
        ]
    return found


def _nonfinite(records: Sequence[StepFlow]) -> list[Finding]:
    record = next((record for record in records if record.nonfinite), None)
    if record is None:
        return []

    first = _first_bad(record.order, lambda layer: layer.activation, record)
    if first is not None:
        spread = record.layers[first].activation
        kind = "activations"
        position = "the first layer in forward order"
    else:
        # Forward was finite, so the fault arose in backward, which reaches the last layer first.
        uncalled = [name for name in record.layers if name not in record.order]
        inner = [name for name in [*uncalled, *record.order] if not _holds_another(name, record)]
        first = _first_bad(inner[::-1], lambda layer: layer.gradient, record)
        if first is None:
            message = "a gradient outside of the probed layers is inf or nan"
            return [Finding("nonfinite", (), record.step, float("nan"), message)]
        spread = record.layers[first].gradient
        kind = "gradients"
        position = "the first layer in backward order; all activations were finite"

    assert spread is not None
    message = f"{spread.bad:.1%} of its {kind} are inf or nan, {position}"
    weights = [
        name
        for name, layer in record.layers.items()
        if layer.update and not _finite(layer.update.weight_norm)
    ]
    if weights:
        message += (
            f"; weights are too, starting with {weights[0]}: an earlier step broke them, "
            "so probe with every=1"
        )
    return [Finding("nonfinite", (first,), record.step, spread.bad, message)]


def _first_bad(
    names: Sequence[str], select: Callable[[LayerFlow], Any], record: StepFlow
) -> str | None:
    """Return the first layer whose selected elements include inf or nan."""
    for name in names:
        spread = select(record.layers[name])
        if spread is not None and spread.nonfinite:
            return name
    return None


def _holds_another(name: str, record: StepFlow) -> bool:
    """Return whether other probed layers are inside this one."""
    return any(other.startswith(f"{name}.") for other in record.layers)


def _skipped(records: Sequence[StepFlow]) -> list[Finding]:
    skipped = [record for record in records if not record.stepped]
    if not skipped:
        return []
    message = (
        f"{len(skipped)} of {len(records)} probed steps were skipped: "
        "the optimizer did not use their gradients"
    )
    return [Finding("skipped", (), skipped[0].step, len(skipped) / len(records), message)]


def _no_gradient(recent: Sequence[StepFlow]) -> list[Finding]:
    """Find trainable parameters without gradient, or with a gradient of 0, in all these steps.

    Parameters that get a gradient in some steps, such as those of an expert, are not reported.
    """
    last = recent[-1]
    reasons: dict[str, str] = {}
    for name, layer in last.layers.items():
        if _holds_another(name, last):
            continue
        history = [record.layers[name] for record in recent]
        never = [
            parameter
            for parameter in layer.without_gradient
            if _always_without_gradient(parameter, history)
        ]
        if never:
            reasons[name] = f"{never[0]} gets no gradient at all"
        elif all(flow.gradient is not None and not flow.gradient.squares for flow in history):
            reasons[name] = "its gradient is exactly 0"
    if not reasons:
        return []
    first_reason = next(iter(reasons.values()))
    message = f"{first_reason}, and it is not frozen{_more(len(reasons))}"
    return [Finding("no-gradient", tuple(reasons), last.step, 0.0, message)]


def _always_without_gradient(parameter: str, history: Sequence[LayerFlow]) -> bool:
    return all(parameter in flow.without_gradient for flow in history)


def _more(number: int) -> str:
    """Return a suffix for findings of several layers, of which the message names one."""
    if number == 1:
        return ""
    layers = "layer" if number == 2 else "layers"
    return f"; the same in {number - 1} more {layers}"


def _vanishing(recent: Sequence[StepFlow]) -> list[Finding]:
    chain = gradient_chain(recent[-1])
    if len(chain) < CHAIN:
        return []
    first = chain[0]
    last = chain[-1]
    ratios = [_rms(record, first) / _rms(record, last) for record in recent if _rms(record, last)]
    ratio = statistics.median(ratios) if ratios else 1.0
    if VANISHED <= ratio <= 1 / VANISHED:
        return []
    kind = "vanishing" if ratio < 1 else "exploding"
    message = f"its RMS gradient is {ratio:.1e} times that of {last}"
    return [Finding(kind, (first,), recent[-1].step, ratio, message)]


def gradient_chain(record: StepFlow) -> list[str]:
    """Return comparable layers in forward order: the blocks, or else the innermost layers.

    Layers without a gradient are left out.
    """
    position = {name: index for index, name in enumerate(record.order)}
    candidates = [name for name, layer in record.layers.items() if layer.is_block]
    if len(candidates) < CHAIN:
        candidates = [name for name in record.layers if not _holds_another(name, record)]
    chain = [name for name in candidates if record.layers[name].gradient is not None]
    return sorted(chain, key=lambda name: position.get(name, len(position)))


def _rms(record: StepFlow, name: str) -> float:
    gradient = record.layers[name].gradient
    return 0.0 if gradient is None else gradient.rms


def _dead(recent: Sequence[StepFlow]) -> list[Finding]:
    dead: dict[str, float] = {}
    for name in recent[-1].layers:
        activations = [record.layers[name].activation for record in recent]
        fractions = [spread.zero for spread in activations if spread is not None]
        if fractions and statistics.median(fractions) > DEAD:
            dead[name] = statistics.median(fractions)
    if not dead:
        return []
    names = sorted(dead, key=lambda name: -dead[name])
    worst = dead[names[0]]
    message = f"{worst:.1%} of its activations are exactly 0{_more(len(names))}"
    return [Finding("dead", tuple(names), recent[-1].step, worst, message)]


def _updates(recent: Sequence[StepFlow]) -> list[Finding]:
    """Find layers whose weights move too far, and layers whose weights hardly move."""
    last = recent[-1]
    ratios: dict[str, float] = {}
    for name in last.layers:
        updates = [record.layers[name].update for record in recent]
        known = [
            update.ratio for update in updates if update is not None and update.ratio is not None
        ]
        if known and not _holds_another(name, last):
            ratios[name] = statistics.median(known)

    far = sorted(
        (name for name in ratios if ratios[name] > UPDATE[1]), key=lambda name: -ratios[name]
    )
    near = sorted(
        (name for name in ratios if ratios[name] < UPDATE[0]), key=lambda name: ratios[name]
    )
    findings = []
    for names, movement in ((far, "moves far"), (near, "hardly moves")):
        if not names:
            continue
        ratio = ratios[names[0]]
        if not ratio:
            movement = "does not move"
        message = (
            f"{movement}: {ratio:.1e} of its weights' norm per step, "
            f"expected 1e-4 to 1e-2{_more(len(names))}"
        )
        findings.append(Finding("update", tuple(names), last.step, ratio, message))
    return findings


def _scaled(recent: Sequence[StepFlow]) -> list[Finding]:
    factors = [record.scaled for record in recent if record.scaled is not None]
    factor = statistics.median(factors) if factors else 1.0
    if 0.1 <= factor <= 1.001 or recent[-1].gradients_read != AFTER_BACKWARD:
        return []
    message = (
        f"gradients were multiplied by {factor:.1e} between backward and the step: "
        "by clipping, or by a GradScaler that was not passed as scaler="
    )
    return [Finding("scaled", (), recent[-1].step, factor, message)]


def _finite(value: float) -> bool:
    return abs(value) < float("inf")
