"""Plot of a benchmark: step times, paired ratios and peak memory.

    plot_bench(bench, "bench.png")

Proof: `python -m pytest tests/test_bench_command.py -k plot`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .bench_table import format_seconds
from .core.paired import NO_DIFFERENCE, TOO_FEW
from .plan.bench_report import MEASURED, Bench, Figures
from .plots import require_matplotlib

MEGABYTE = 2**20
# Of Paul Tol's palettes for colour-blind readers.
PLAIN = "#555555"
SLOWER = "#EE6677"
FASTER = "#228833"
ALIKE = "#4477AA"
GREY = "#B8B8B8"
# Steps slower than this multiple of the slowest configuration's median become an arrow at the edge.
FAR = 1.6


def plot_bench(bench: Bench, path: str | Path, *, device: str = "") -> list[str]:
    """Write a PNG of the measured configurations and return their names."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in bench.rows if row.outcome == MEASURED]
    figure = Figure(figsize=(10.5, 1.9 + 0.52 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(1.7, 1))
    figure.suptitle(
        f"{bench.workload}, batch size {bench.batch_size}, {bench.dtype}, {bench.optimizer}, on "
        f"{device or bench.device}: one optimizer step",
        x=0.01,
        ha="left",
        fontsize=12,
    )
    _draw_times(times, rows)
    _draw_memory(memory, rows)
    times.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
    times.set_ylim(len(rows) - 0.4, -0.6)
    intervals = "brackets: 95% interval of the median ratio to the plain step of the same round"
    figure.supxlabel(
        f"{bench.rounds} rounds in turns; dots: steps, line: median, bar: 10% to 90%; {intervals}",
        x=0.01,
        ha="left",
        fontsize=8,
        color="#666666",
    )
    figure.savefig(path, format="png", dpi=150)
    return [row.name for row in rows]


def _draw_times(axes: Any, rows: Sequence[Figures]) -> None:
    scale, unit = (1.0, "s") if max(_median(row) for row in rows) >= 1 else (1000.0, "ms")
    end = scale * min(
        1.02 * max(max(row.seconds) for row in rows), FAR * max(_median(row) for row in rows)
    )
    for place, row in enumerate(rows):
        if row.step is None:
            continue
        colour = _colour(row)
        shown = [scale * taken for taken in row.seconds if scale * taken <= end]
        left = min(end, scale * row.step.lower)
        right = min(end, scale * row.step.upper)
        axes.barh(
            place,
            right - left,
            left=left,
            height=0.5,
            color=colour,
            alpha=0.25,
            linewidth=0,
            zorder=2,
        )
        # Spread the dots so that they do not overlap; a fixed pattern keeps plots reproducible.
        heights = [place + 0.18 * ((turn * 7) % 5 - 2) / 2 for turn in range(len(shown))]
        axes.plot(
            shown, heights, ".", color=colour, markersize=4, alpha=0.55, linestyle="none", zorder=3
        )
        if beyond := len(row.seconds) - len(shown):
            axes.plot([end], [place], ">", color=colour, markersize=5, clip_on=False, zorder=4)
            axes.text(
                0.985 * end,
                place - 0.3,
                f"{beyond} slower",
                fontsize=7,
                color=colour,
                ha="right",
                va="center",
            )
        axes.vlines(
            scale * row.step.median, place - 0.3, place + 0.3, colour, linewidth=2.5, zorder=4
        )
        axes.text(
            1.03 * end, place, _said(row), fontsize=9, color=colour, va="center", clip_on=False
        )

    axes.axvline(scale * _median(rows[0]), color=PLAIN, linewidth=0.8, linestyle=":", zorder=1)
    axes.set_xlim(0, 1.75 * end)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= end])
    axes.set_xlabel(f"step time, {unit}, and ratio to the plain step", fontsize=9, loc="left")
    _plain_frame(axes)
    axes.spines["bottom"].set_bounds(0, end)


def _draw_memory(axes: Any, rows: Sequence[Figures]) -> None:
    peaks = [(row.peak_bytes or 0) / MEGABYTE for row in rows]
    bars = axes.barh(range(len(rows)), peaks, height=0.5, color=GREY, zorder=2)
    labels = [
        "not measured" if not row.peak_bytes else f"{_size(row)}  {_share(row)}".rstrip()
        for row in rows
    ]
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.set_xlim(0, 1.42 * max(peaks))
    axes.set_xlabel("step peak, MiB, weights and optimizer included", fontsize=9, loc="left")
    axes.tick_params(left=False)
    _plain_frame(axes)


def _plain_frame(axes: Any) -> None:
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _median(row: Figures) -> float:
    return row.step.median if row.step else 0.0


def _colour(row: Figures) -> str:
    if row.ratio is None:
        return PLAIN
    return {"slower": SLOWER, "faster": FASTER}.get(row.ratio.verdict, ALIKE)


def _said(row: Figures) -> str:
    """Return the label of a row: median step time, ratio to plain, and interval."""
    median = format_seconds(_median(row))
    if row.ratio is None:
        return median
    if row.ratio.verdict == TOO_FEW:
        return f"{median}, {row.ratio.median:.2f}x"
    interval = f"[{row.ratio.lower:.2f}, {row.ratio.upper:.2f}]"
    alike = ", no difference seen" if row.ratio.verdict == NO_DIFFERENCE else ""
    return f"{median}, {row.ratio.median:.2f}x {interval}{alike}"


def _size(row: Figures) -> str:
    size = (row.peak_bytes or 0) / MEGABYTE
    return f"{size:,.0f}" if size >= 100 else f"{size:.3g}"


def _share(row: Figures) -> str:
    return "" if row.peak_ratio is None or row.ratio is None else f"({row.peak_ratio:.0%})"
