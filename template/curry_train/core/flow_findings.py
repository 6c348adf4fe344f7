"""What the figures of grad-flow say is wrong, worst first, and the table that opens with it.

The bounds are rules of thumb for training in float32 or bfloat16 with Adam's kind of optimizer; each finding says the
figure, so that a user with other habits can judge. Proof: `python -m pytest tests/test_grad_flow_findings.py`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .flow_record import AFTER_BACKWARD, LayerFlow, StepFlow, plain

VANISHED = 1e-3  # of the last block's gradient, for one element, at the first block
DEAD = 0.9  # of an activation's elements are exactly 0
UPDATE = (1e-4, 1e-2)  # of the weights' norm, by one step
RECENT = 5  # records; one step alone may be an accident of its batch
CHAIN = 2


@dataclass(frozen=True)
class Finding:
    """`kind` is one of nonfinite, skipped, no-gradient, vanishing, exploding, dead, update, scaled. `layers` has the
    worst first, and is empty where it is about the whole model; `value` is the worst one's."""

    kind: str
    layers: tuple[str, ...]
    step: int
    value: float
    said: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"layers": list(self.layers), "value": plain(self.value)}


def find(records: Sequence[StepFlow]) -> list[Finding]:
    """All that is wrong: the first step that was not finite, and what holds over the last probed steps."""
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
    where = _first_bad(record.order, lambda layer: layer.activation, record)
    part, of = "activations", "in the order of forward"
    if where is None:  # forward was finite, so backward made it, and comes to the last layer first
        rest = [name for name in record.layers if name not in record.order]
        inner = [name for name in [*rest, *record.order] if not _holds_another(name, record)]
        where = _first_bad(inner[::-1], lambda layer: layer.gradient, record)
        part, of = "gradients", "in the order of backward; all activations were finite"
    weights = [
        name
        for name, layer in record.layers.items()
        if layer.update and not _finite(layer.update.weight_norm)
    ]
    if where is None:
        return [
            Finding(
                "nonfinite",
                (),
                record.step,
                float("nan"),
                "a gradient outside of the probed layers",
            )
        ]
    spread = (
        record.layers[where].activation if part == "activations" else record.layers[where].gradient
    )
    assert spread is not None
    said = f"{spread.bad:.1%} of its {part} are inf or nan, the first {of}"
    if weights:
        said += f"; weights are too, as of {weights[0]}: an earlier step broke them, so probe with every=1"
    return [Finding("nonfinite", (where,), record.step, spread.bad, said)]


def _first_bad(
    names: Sequence[str], part: Callable[[LayerFlow], Any], record: StepFlow
) -> str | None:
    for name in names:
        spread = part(record.layers[name])
        if spread is not None and spread.nonfinite:
            return name
    return None


def _holds_another(name: str, record: StepFlow) -> bool:
    return any(other.startswith(f"{name}.") for other in record.layers)


def _skipped(records: Sequence[StepFlow]) -> list[Finding]:
    skipped = [record for record in records if not record.stepped]
    if not skipped:
        return []
    said = f"{len(skipped)} of {len(records)} probed steps were skipped: their gradients were dropped unused"
    return [Finding("skipped", (), skipped[0].step, len(skipped) / len(records), said)]


def _no_gradient(recent: Sequence[StepFlow]) -> list[Finding]:
    """Trained parameters that no step has reached; one that is reached now and then, as an expert is, is alive."""
    last, found = recent[-1], {}
    for name, layer in last.layers.items():
        if _holds_another(name, last):
            continue
        seen = [record.layers[name] for record in recent]
        never = [
            absent
            for absent in layer.without_gradient
            if all(absent in one.without_gradient for one in seen)
        ]
        if never:
            found[name] = f"{never[0]} gets no gradient at all"
        elif layer.gradient is not None and all(
            one.gradient is not None and not one.gradient.squares for one in seen
        ):
            found[name] = "its gradient is exactly 0"
    if not found:
        return []
    said = f"{next(iter(found.values()))}, and it is not frozen{_more(len(found))}"
    return [Finding("no-gradient", tuple(found), last.step, 0.0, said)]


def _more(number: int) -> str:
    return (
        f"; so {number - 1} layers more"
        if number > 2
        else "; so 1 layer more"
        if number == 2
        else ""
    )


def _vanishing(recent: Sequence[StepFlow]) -> list[Finding]:
    chain = gradient_chain(recent[-1])
    if len(chain) < CHAIN:
        return []
    first, last = chain[0], chain[-1]
    ratios = [_rms(record, first) / _rms(record, last) for record in recent if _rms(record, last)]
    ratio = statistics.median(ratios) if ratios else 1.0
    if VANISHED <= ratio <= 1 / VANISHED:
        return []
    kind = "vanishing" if ratio < 1 else "exploding"
    said = f"an element's gradient is {ratio:.1e} of that in {last}"
    return [Finding(kind, (first,), recent[-1].step, ratio, said)]


def gradient_chain(record: StepFlow) -> list[str]:
    """Layers that follow each other and can be compared: the blocks, or those with weights, in the order of forward."""
    place = {name: index for index, name in enumerate(record.order)}
    of_kind = [name for name, layer in record.layers.items() if layer.is_block]
    if len(of_kind) < CHAIN:
        of_kind = [name for name in record.layers if not _holds_another(name, record)]
    having = [name for name in of_kind if record.layers[name].gradient is not None]
    return sorted(having, key=lambda name: place.get(name, len(place)))


def _rms(record: StepFlow, name: str) -> float:
    gradient = record.layers[name].gradient
    return 0.0 if gradient is None else gradient.rms


def _dead(recent: Sequence[StepFlow]) -> list[Finding]:
    zero = {}
    for name in recent[-1].layers:
        seen = [record.layers[name].activation for record in recent]
        parts = [spread.zero for spread in seen if spread is not None]
        if parts and statistics.median(parts) > DEAD:
            zero[name] = statistics.median(parts)
    names = sorted(zero, key=lambda name: -zero[name])
    if not names:
        return []
    said = f"{zero[names[0]]:.1%} of its activations are exactly 0{_more(len(names))}"
    return [Finding("dead", tuple(names), recent[-1].step, zero[names[0]], said)]


def _updates(recent: Sequence[StepFlow]) -> list[Finding]:
    """Layers that move too far, and layers that hardly move, each with the worst."""
    last, ratios = recent[-1], {}
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
    found = []
    for names, way in ((far, "moves far"), (near, "hardly moves")):
        if names:
            ratio = ratios[names[0]]
            way = way if ratio else "does not move"
            said = f"{way}: {ratio:.1e} of its weights in a step, expected 1e-4 to 1e-2{_more(len(names))}"
            found.append(Finding("update", tuple(names), last.step, ratio, said))
    return found


def _scaled(recent: Sequence[StepFlow]) -> list[Finding]:
    factors = [record.scaled for record in recent if record.scaled is not None]
    factor = statistics.median(factors) if factors else 1.0
    if 0.1 <= factor <= 1.001 or recent[-1].gradients_read != AFTER_BACKWARD:
        return []
    said = f"between backward and the step gradients became {factor:.1e} of what they were: clipping, or a GradScaler"
    return [Finding("scaled", (), recent[-1].step, factor, f"{said} that scaler= should name")]


def _finite(value: float) -> bool:
    return abs(value) < float("inf")
