"""Table of savings, at most 80 columns wide.

Proof: `python -m pytest tests/test_savings.py -k table`.
"""

import itertools
import textwrap
from collections.abc import Iterator, Sequence

from .core.sizes import format_bytes
from .savings_row import MEASURED, PLAIN, Row, StepSeconds

WIDTH = 80
MEGABYTE = 2**20
LEGEND = (
    "of none: peak of forward and backward, gradients included, relative to none",
    "again: FLOPs recomputed in backward, relative to one forward",
    "time: median ratio to the step of none in the same round; middle: its quartiles",
)


def table(rows: Sequence[Row], *, limit: int | None = None) -> str:
    """Return one table for each case, and below them a legend of the columns."""
    legend = list(LEGEND)
    if limit is not None:
        legend.append(
            f"fits: the largest batch whose step, parameters included, fits {format_bytes(limit)}"
        )
    blocks = [
        _block(label, list(group), limit)
        for label, group in itertools.groupby(rows, key=lambda row: row.label)
    ]
    return "\n\n".join([*blocks, "\n".join(legend)])


def _block(label: str, rows: list[Row], limit: int | None) -> str:
    plain = rows[0].seconds
    title = f"{label} (MiB)"
    if plain:
        title = f"{label} (MiB; a step of {rows[0].strategy} takes {_seconds(plain.median)})"
    heads = [
        "strategy",
        "modules",
        "held",
        "peak",
        "of none",
        "again",
        "time",
        "middle",
        "fits",
        "parity",
    ]
    cells = [heads, *(_cells(row) for row in rows if row.outcome == MEASURED)]
    if limit is None:
        cells = [line[:8] + line[9:] for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    gap = "  " if sum(widths) + 2 * len(widths) - 2 <= WIDTH else " "
    lines = [title[:WIDTH]]
    for first, *others in cells:
        right = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append(gap.join([first.ljust(widths[0]), *right]).rstrip())
    return "\n".join(lines + list(_remarks(rows)))


def _cells(row: Row) -> list[str]:
    if row.parity == "bit-equal":
        parity = "equal"
    else:
        parity = "DIFFERS" if row.is_wrong else f"{row.worst_error or 0:.0e}"
    return [
        row.strategy,
        str(len(row.modules)),
        _mebibytes(row.held_bytes),
        _mebibytes(row.peak_bytes),
        _percent(row.peak_ratio),
        _percent(row.recompute_ratio),
        _time(row.seconds),
        "" if row.strategy == PLAIN else _middle(row.seconds),
        "" if row.largest_batch is None else str(row.largest_batch),
        parity,
    ]


def _remarks(rows: Sequence[Row]) -> Iterator[str]:
    """Explain rows that were not measured, lack a figure, or changed the training."""
    for row in rows:
        remarks = []
        if row.outcome != MEASURED:
            remarks.append(f"{row.outcome}: {row.why}" if row.why else row.outcome)
        elif row.why:
            remarks.append(row.why)
        if row.parity.startswith("differs"):
            remarks.append(f"changes the training; {row.parity}")
        for remark in remarks:
            yield textwrap.fill(f"{row.strategy} {remark}", WIDTH, subsequent_indent="    ")


def _time(seconds: StepSeconds | None) -> str:
    if seconds is None:
        return ""
    return _seconds(seconds.median) if seconds.ratio is None else f"{_figure(seconds.ratio)}x"


def _middle(seconds: StepSeconds | None) -> str:
    if seconds is None or seconds.ratio_lower is None or seconds.ratio_upper is None:
        return ""
    return f"{_figure(seconds.ratio_lower)}-{_figure(seconds.ratio_upper)}"


def _figure(number: float) -> str:
    """Format to three digits, or as a whole number from 100 on."""
    if number >= 100:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _mebibytes(size: int | None) -> str:
    return "" if size is None else _figure(size / MEGABYTE)


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0%}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
