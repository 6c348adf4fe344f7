"""Judge and render the records of grad-flow: findings, a table of layers, and JSON.

    print(flow_table(flow.records))        # of a `GradFlow`, problems first
    flow_findings(flow.records)[0].layers

It reads records of any probe that has the fields of `StepFlow`, such as those of an owned copy.

Proof: `python -m pytest tests/primitives/test_grad_flow_findings.py`.
"""

import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from ..core.wording import some_of
from .grad_flow import AFTER_BACKWARD, GradFlow, LayerFlow, StepFlow
from .grad_flow_probe import ValueSpread

Records = Sequence[StepFlow]

# Faults that grad-flow finds in its records, worst first.

# Bound on the RMS gradient of the first block relative to the last; its inverse means exploding.
VANISHING_RATIO = 1e-3
# Fraction of an activation's elements that are exactly 0.
DEAD_ZERO_FRACTION = 0.9
# Expected size of one step's update relative to the norm of the weights.
UPDATE_RATIO_RANGE = (1e-4, 1e-2)
# Number of latest records that are judged together, since one step may have an unusual batch.
NUM_RECENT_RECORDS = 5
# Minimum number of layers to compare for vanishing and exploding gradients.
SHORTEST_CHAIN = 2


@dataclass(frozen=True)
class Finding:
    """One fault of the training, with the layers that have it."""

    kind: str  # nonfinite, skipped, no-gradient, vanishing, exploding, dead, update or scaled
    layers: tuple[str, ...]  # with this fault, worst first; empty if it concerns the whole model
    step: int  # of the record in which it was found
    value: float  # the figure of the worst layer
    message: str  # for the user


def flow_findings(records: Records) -> list[Finding]:
    """Return all faults: the first nonfinite step, and those of the latest probed steps."""
    if not records:
        return []
    found = [*_find_nonfinite(records), *_find_skipped(records)]
    sound = [record for record in records if record.stepped and not record.nonfinite]
    recent = sound[-NUM_RECENT_RECORDS:]
    if recent:
        for judge in (
            _find_without_gradient,
            _find_vanishing,
            _find_dead,
            _find_wrong_updates,
            _find_scaling,
        ):
            found += judge(recent)
    return found


def _find_nonfinite(records: Records) -> Iterator[Finding]:
    record = next((record for record in records if record.nonfinite), None)
    if record is None:
        return

    # If forward was finite, the fault arose in backward, which reaches the last layer first.
    places = [(name, "activation", "the first layer in forward order") for name in record.order]
    places += [
        (name, "gradient", "the first layer in backward order; all activations were finite")
        for name in (*reversed(record.order), *record.layers)
        if not _holds_another(name, record)
    ]
    for name, kind, position in places:
        spread = getattr(record.layers[name], kind)
        if spread is not None and spread.nonfinite:
            number = f"{spread.nonfinite:,} of its {spread.elements:,} {kind}s"
            message = f"{number} are inf or nan, {position}{_describe_weights(record)}"
            yield Finding("nonfinite", (name,), record.step, spread.bad, message)
            return
    broken = [
        name
        for name, layer in record.layers.items()
        if layer.update
        and not math.isfinite(layer.update.distance)
        and not _holds_another(name, record)
    ]
    message = "a gradient outside of the probed layers is inf or nan"
    if broken:
        message = (
            "the optimizer made its weights inf or nan; all activations and gradients were finite"
        )
    yield Finding("nonfinite", tuple(broken[:1]), record.step, math.nan, message)


def _describe_weights(record: StepFlow) -> str:
    """Return the end of a message where the weights were not finite before the step."""
    for name, layer in record.layers.items():
        if layer.update and not math.isfinite(layer.update.weight_norm):
            return (
                f"; weights are too, starting with {name}: an earlier step broke them, so probe "
                "with every=1"
            )
    return ""


def _holds_another(name: str, record: StepFlow) -> bool:
    """Return whether other probed layers are inside this one."""
    return any(other.startswith(f"{name}.") for other in record.layers)


def _find_skipped(records: Records) -> Iterator[Finding]:
    skipped = [record for record in records if not record.stepped]
    if not skipped:
        return
    message = (
        f"{len(skipped)} of {len(records)} probed steps were skipped: "
        "the optimizer did not use their gradients"
    )
    yield Finding("skipped", (), skipped[0].step, len(skipped) / len(records), message)


def _find_without_gradient(recent: Records) -> Iterator[Finding]:
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
            if all(parameter in flow.without_gradient for flow in history)
        ]
        if never:
            reasons[name] = f"{never[0]} gets no gradient at all"
        elif all(flow.gradient is not None and not flow.gradient.squares for flow in history):
            reasons[name] = "its gradient is exactly 0"
    if not reasons:
        return
    message = f"{next(iter(reasons.values()))}, and it is not frozen"
    yield Finding("no-gradient", tuple(reasons), last.step, 0.0, message)


def _find_vanishing(recent: Records) -> Iterator[Finding]:
    rms = _compute_medians(recent, "gradient", "rms")
    record = recent[-1]
    # Layers that forward did not call come last.
    names = dict.fromkeys([*record.order, *record.layers])
    # The blocks, or else the innermost layers.
    chain = [name for name in names if record.layers[name].is_block]
    if len(chain) < SHORTEST_CHAIN:
        chain = [name for name in names if not _holds_another(name, record)]
    chain = [name for name in chain if record.layers[name].gradient is not None]
    if len(chain) < SHORTEST_CHAIN or not rms[chain[-1]]:
        return
    first = chain[0]
    last = chain[-1]
    ratio = rms[first] / rms[last]
    if VANISHING_RATIO <= ratio <= 1 / VANISHING_RATIO:
        return
    kind = "vanishing" if ratio < 1 else "exploding"
    message = f"its RMS gradient is {ratio:.1e} times that of {last}"
    yield Finding(kind, (first,), record.step, ratio, message)


def _compute_medians(recent: Records, part: str, figure: str) -> dict[str, float]:
    """Return the median of a part's figure over the records, for each layer that has it."""
    medians = {}
    for name in recent[-1].layers:
        parts = [getattr(record.layers[name], part) for record in recent]
        values = [getattr(one, figure) for one in parts if one is not None]
        if known := [value for value in values if value is not None]:
            medians[name] = statistics.median(known)
    return medians


def _find_dead(recent: Records) -> Iterator[Finding]:
    zero = _compute_medians(recent, "activation", "zero")
    ranked = sorted(zero, key=lambda name: -zero[name])
    names = [name for name in ranked if zero[name] > DEAD_ZERO_FRACTION]
    if names:
        worst = zero[names[0]]
        message = f"{worst:.1%} of its activations are exactly 0"
        yield Finding("dead", tuple(names), recent[-1].step, worst, message)


def _find_wrong_updates(recent: Records) -> Iterator[Finding]:
    """Find layers whose weights move too far, and layers whose weights hardly move."""
    last = recent[-1]
    medians = _compute_medians(recent, "update", "ratio")
    ratios = {name: ratio for name, ratio in medians.items() if not _holds_another(name, last)}
    ranked = sorted(ratios, key=ratios.__getitem__)
    least, most = UPDATE_RATIO_RANGE
    near = [name for name in ranked if ratios[name] < least]
    far = [name for name in reversed(ranked) if ratios[name] > most]
    for names, movement in ((far, "moves far"), (near, "hardly moves")):
        if names:
            ratio = ratios[names[0]]
            message = (
                f"{movement}: {ratio:.1e} of its weights' norm per step, expected 1e-4 to 1e-2"
            )
            yield Finding("update", tuple(names), last.step, ratio, message)


def _find_scaling(recent: Records) -> Iterator[Finding]:
    factors = [record.scaled for record in recent if record.scaled is not None]
    factor = statistics.median(factors) if factors else 1.0
    if 0.1 <= factor <= 1.001 or recent[-1].gradients_read != AFTER_BACKWARD:
        return
    message = (
        f"gradients were multiplied by {factor:.1e} between backward and the step: "
        "by clipping, or by a GradScaler that was not passed as scaler="
    )
    yield Finding("scaled", (), recent[-1].step, factor, message)


def flow_json(flow: GradFlow) -> dict[str, Any]:
    """Return all records and findings; non-finite figures become the words `inf` and `nan`."""
    return {
        "every": flow.every,
        "findings": _to_json(flow_findings(flow.records)),
        "steps": _to_json(flow.records),
    }


def _to_json(value: Any) -> Any:
    """Convert records for JSON, with their properties; infinities and nan become words."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(entry) for entry in value]
    if not is_dataclass(value):
        return value
    return {name: _to_json(getattr(value, name)) for name in dir(value) if name[0] != "_"}


# Text report of grad-flow: findings, then a table of layers, in at most 80 columns.

TEXT_WIDTH = 80
# Width of the column of layer names.
LAYER_NAME_WIDTH = 31
FLOW_TABLE_HEAD = (
    f"{'layer':<{LAYER_NAME_WIDTH}} {'activation':>18}  {'gradient':>17}  {'update':>7}"
)
FLOW_TABLE_SUBHEAD = (
    f"{'':<{LAYER_NAME_WIDTH}} {'rms':>8} zero  bad  {'norm':>7} zero  bad  {'ratio':>7}"
)


def flow_table(records: Records, *, most: int = 24) -> str:
    """Return the report with at most `most` layers, preferring layers with a finding."""
    if not records:
        return "no step was probed: the first record is made after the optimizer's first step"
    last = records[-1]
    findings = flow_findings(records)
    lines = [_write_opening(records)]
    if not findings:
        text = (
            f"nothing is wrong in the outputs, gradients and updates of {len(last.layers)} layers "
            f"in {len(records)} steps: all finite, no layer dead, updates 1e-4 to 1e-2 of the "
            "weights"
        )
        lines += textwrap.wrap(text, TEXT_WIDTH)
    for finding in findings:
        where = f"{some_of(finding.layers, 1)}: " if finding.layers else ""
        text = f"{finding.kind:<11} {where}{finding.message} (step {finding.step})"
        lines += textwrap.wrap(text, TEXT_WIDTH, subsequent_indent=" " * 12, break_long_words=False)
    lines += ["", FLOW_TABLE_HEAD, FLOW_TABLE_SUBHEAD]
    flagged = {finding.layers[0] for finding in findings if finding.layers}
    inside = tuple(f"{name}." for name in last.layers)
    ranked = sorted(last.layers, key=lambda name: (name not in flagged, name.startswith(inside)))
    lines += [
        _format_row(name, layer) for name, layer in last.layers.items() if name in ranked[:most]
    ]
    num_hidden = len(ranked[most:])
    if num_hidden:
        lines.append(f"... and {num_hidden} more layers: choose with layers=, all are in the JSON")
    return "\n".join(line.rstrip() for line in lines)


def _write_opening(records: Records) -> str:
    last = records[-1]
    norm = "none" if last.gradient is None else f"{last.gradient.norm:.3g}"
    unscaled = last.scaled is None or not math.isfinite(last.scaled) or 0.999 < last.scaled < 1.001
    scaling = "" if unscaled else f", then multiplied by {last.scaled:.2g}"
    ranks = f", {last.ranks} ranks" if last.ranks > 1 else ""
    text = (
        f"{len(records)} steps probed, the last is {last.step}: {last.forwards} forwards{ranks}, "
        f"gradient norm {norm} {last.gradients_read}{scaling}"
    )
    return "\n".join(textwrap.fill(one, TEXT_WIDTH) for one in (text, *last.notes))


def _format_row(name: str, layer: LayerFlow) -> str:
    short = name if len(name) <= LAYER_NAME_WIDTH else f"...{name[3 - LAYER_NAME_WIDTH :]}"
    activation = "not called"
    if layer.activation is not None:
        spread = layer.activation
        activation = f"{spread.rms:>8.1e} {_format_shares(spread)}"
    ratio = "-"
    if layer.update is not None:
        ratio = "new" if layer.update.ratio is None else f"{layer.update.ratio:.1e}"
    return f"{short:<{LAYER_NAME_WIDTH}} {activation:>18}  {_format_gradient(layer)}  {ratio:>7}"


def _format_gradient(layer: LayerFlow) -> str:
    spread = layer.gradient
    if spread is not None:
        return f"{spread.norm:>7.1e} {_format_shares(spread)}"

    if layer.without_gradient:
        reason = "none"
    elif layer.tied:
        reason = "tied"
    elif layer.frozen:
        reason = "frozen"
    else:
        reason = "-"
    return f"{reason:>17}"


def _format_shares(spread: ValueSpread) -> str:
    """Format the percentages of zeros and of nonfinite elements, rounded up: 0% has none."""
    percentages = (-(-100 * part // spread.elements) for part in (spread.zeros, spread.nonfinite))
    return " ".join(f"{percentage:>3}%" for percentage in percentages)
