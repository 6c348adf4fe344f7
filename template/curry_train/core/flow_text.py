"""Text report of grad-flow: findings, then a table of layers, in at most 80 columns.

Proof: `python -m pytest tests/test_grad_flow_findings.py`.
"""

import math
import textwrap
from collections.abc import Sequence

from .flow_findings import Finding, find
from .flow_record import LayerFlow, Spread, StepFlow

WIDTH = 80
# Width of the column of layer names.
NAME = 31
HEAD = f"{'layer':<{NAME}} {'activation':>19}  {'gradient':>17}  {'update':>7}"
UNITS = (
    f"{'':<{NAME}} {'rms':>8} {'zero':>5} {'bad':>4}  "
    f"{'norm':>7} {'zero':>5} {'bad':>3}  {'ratio':>7}"
)


def table(records: Sequence[StepFlow], *, most: int = 24) -> str:
    """Return the report with at most `most` layers, preferring layers with a finding."""
    if not records:
        return "no step was probed: the first record is made after the optimizer's first step"
    last = records[-1]
    findings = find(records)
    lines = [_opening(records), *_said(findings), "", HEAD, UNITS]
    flagged = {finding.layers[0] for finding in findings if finding.layers}
    names = list(last.layers)
    if len(names) > most:
        inner = {name for name in names if _is_inside_another(name, names)}
        ranked = sorted(names, key=lambda name: (name not in flagged, name in inner))
        shown = set(ranked[:most])
        names = [name for name in names if name in shown]

    lines += [_row(name, last.layers[name]) for name in names]
    num_hidden = len(last.layers) - len(names)
    if num_hidden:
        lines.append(f"... and {num_hidden} more layers: choose with layers=, all are in to_json()")
    return "\n".join(line.rstrip() for line in lines)


def _is_inside_another(name: str, names: Sequence[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in names)


def _opening(records: Sequence[StepFlow]) -> str:
    last = records[-1]
    norm = "none" if last.gradient is None else f"{last.gradient.norm:.3g}"
    unscaled = last.scaled is None or not math.isfinite(last.scaled) or 0.999 < last.scaled < 1.001
    scaling = "" if unscaled else f", then multiplied by {last.scaled:.2g}"
    ranks = f", {last.ranks} ranks" if last.ranks > 1 else ""
    text = (
        f"{len(records)} steps probed, the last is {last.step}: {last.forwards} forwards{ranks}, "
        f"gradient norm {norm} {last.gradients_read}{scaling}"
    )
    notes = [textwrap.fill(note, WIDTH) for note in last.notes]
    return "\n".join([textwrap.fill(text, WIDTH), *notes])


def _said(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["nothing is wrong: all finite, no layer dead, updates 1e-4 to 1e-2 of the weights"]
    lines = []
    for finding in findings:
        where = f"{finding.layers[0]}: " if finding.layers else ""
        text = f"{finding.kind:<11} {where}{finding.said} (step {finding.step})"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent=" " * 12, break_long_words=False)
    return lines


def _row(name: str, layer: LayerFlow) -> str:
    short = name if len(name) <= NAME else f"...{name[3 - NAME :]}"
    return f"{short:<{NAME}} {_activation(layer)}  {_gradient(layer)}  {_ratio(layer):>7}"


def _activation(layer: LayerFlow) -> str:
    if layer.activation is None:
        return f"{'not called':>19}"
    spread = layer.activation
    return f"{spread.rms:>8.1e} {_share(spread.zero):>5} {_bad(spread):>4}"


def _gradient(layer: LayerFlow) -> str:
    spread = layer.gradient
    if spread is not None:
        return f"{spread.norm:>7.1e} {_share(spread.zero):>5} {_bad(spread):>3}"

    if layer.without_gradient:
        reason = "none"
    elif layer.tied:
        reason = "tied"
    elif layer.frozen:
        reason = "frozen"
    else:
        reason = "-"
    return f"{reason:>17}"


def _ratio(layer: LayerFlow) -> str:
    if layer.update is None:
        return "-"
    return "new" if layer.update.ratio is None else f"{layer.update.ratio:.1e}"


def _share(fraction: float) -> str:
    """Format a fraction as a percentage of at most five characters."""
    if fraction == 0:
        return "0"
    return f"{fraction:.1%}" if fraction < 0.9995 else f"{fraction:.0%}"


def _bad(spread: Spread) -> str:
    """Format the percentage of nonfinite elements, at least 1% if there are any."""
    return "0" if spread.nonfinite == 0 else f"{max(spread.bad, 0.01):.0%}"
