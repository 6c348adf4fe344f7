"""Grad-flow in words: what is wrong, then the layers of the last probed step, in at most 80 columns.

Proof: `python -m pytest tests/test_grad_flow_findings.py`.
"""

import math
import textwrap
from collections.abc import Sequence

from .flow_findings import Finding, find
from .flow_record import LayerFlow, Spread, StepFlow

WIDTH = 80
NAME = 31
HEAD = f"{'layer':<{NAME}} {'activation':>19}  {'gradient':>17}  {'update':>7}"
UNITS = f"{'':<{NAME}} {'rms':>8} {'zero':>5} {'bad':>4}  {'norm':>7} {'zero':>5} {'bad':>3}  {'ratio':>7}"


def table(records: Sequence[StepFlow], *, most: int = 24) -> str:
    """At most `most` layers, those with a finding first where there are more."""
    if not records:
        return "no step was probed: the first is when the optimizer has stepped once"
    last, findings = records[-1], find(records)
    lines = [_opening(records), *_said(findings), "", HEAD, UNITS]
    flagged = {finding.layers[0] for finding in findings if finding.layers}
    names = list(last.layers)
    if len(names) > most:
        inner = {
            name
            for name in names
            if any(name.startswith(f"{block}.") for block in names if block != name)
        }
        ranked = sorted(names, key=lambda name: (name not in flagged, name in inner))
        names = [name for name in last.layers if name in set(ranked[:most])]
    lines += [_row(name, last.layers[name]) for name in names]
    if len(last.layers) > len(names):
        lines.append(
            f"... and {len(last.layers) - len(names)} layers more: layers= chooses, to_json() has all"
        )
    return "\n".join(line.rstrip() for line in lines)


def _opening(records: Sequence[StepFlow]) -> str:
    last = records[-1]
    norm = "none" if last.gradient is None else f"{last.gradient.norm:.3g}"
    kept = last.scaled is None or not math.isfinite(last.scaled) or 0.999 < last.scaled < 1.001
    clipped = "" if kept else f", then x {last.scaled:.2g}"
    ranks = f", {last.ranks} ranks" if last.ranks > 1 else ""
    text = (
        f"{len(records)} steps probed, the last is {last.step}: {last.forwards} forwards{ranks}, gradient norm {norm} "
        f"{last.gradients_read}{clipped}"
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
    return f"{layer.activation.rms:>8.1e} {_share(layer.activation.zero):>5} {_bad(layer.activation):>4}"


def _gradient(layer: LayerFlow) -> str:
    if layer.gradient is not None:
        return f"{layer.gradient.norm:>7.1e} {_share(layer.gradient.zero):>5} {_bad(layer.gradient):>3}"
    why = (
        "none"
        if layer.without_gradient
        else "tied"
        if layer.tied
        else "frozen"
        if layer.frozen
        else "-"
    )
    return f"{why:>17}"


def _ratio(layer: LayerFlow) -> str:
    if layer.update is None:
        return "-"
    return "new" if layer.update.ratio is None else f"{layer.update.ratio:.1e}"


def _share(part: float) -> str:
    return "0" if part == 0 else f"{part:.1%}" if part < 0.9995 else f"{part:.0%}"


def _bad(spread: Spread) -> str:
    return "0" if spread.nonfinite == 0 else f"{max(spread.bad, 0.01):.0%}"
