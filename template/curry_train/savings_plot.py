"""The rows of `measure_savings` as a picture: memory against what it costs, two panels for each case.

    plot_savings(rows, "savings.png")

Proof: `python -m pytest tests/test_savings.py -k plot`.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .plots import require_matplotlib
from .savings_row import MEASURED, PLAIN, Row

MOST_CASES = 4
MEGABYTE = 2**20
# Of Paul Tol's palettes for colour-blind readers; the shapes tell the strategies apart without colour as well.
COLOURS = (
    *("#555555", "#4477AA", "#EE6677", "#228833", "#AA3377", "#CCBB44", "#66CCEE"),
    *("#EE8866", "#999933", "#882255", "#117733", "#332288", "#AA4499", "#DDAA33"),
)
SHAPES = "osD^vP<X>hpd8H"
# Where a label may stand, in points from its mark, the best place first.
OFFSETS = [
    offset
    for lines in range(0, 84, 12)
    for offset in ((8, 5 + lines), (8, -12 - lines), (-8, 5 + lines), (-8, -12 - lines))
]
FAR = 14  # points from which on a line leads from the label to its mark
THIN = 0.9  # of a line of times: they are wide where the machine is shared, and the marks are what counts
TIMES = "step time / that of none in the same round\nmark: the median; thin line: from the lower to the upper quartile"
FRONT = "dashed: the Pareto front; on grey, another strategy is better in both"

Cost = Callable[[Row], float | None]


def plot_savings(rows: Sequence[Row], path: str | Path, *, device: str = "") -> list[str]:
    """Write a PNG and return the labels of the cases in it: all, or where they are many the last of each workload."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = choose_cases(rows)
    names = list(dict.fromkeys(row.strategy for row in rows))
    figure = Figure(figsize=(10.5, 0.5 + 4.0 * len(cases)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    title = f"What each strategy saves, and what it costs{f', on {device}' if device else ''}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.supxlabel(FRONT, x=0.01, ha="left", fontsize=8, color="#666666")
    panels = []
    for case, pair in zip(cases, figure.subplots(len(cases), 2, squeeze=False), strict=True):
        for axes, cost in zip(pair, (_time, _recomputed), strict=True):
            panels.append((axes, _draw(axes, case, names, cost)))
        pair[0].set_title(case[0].label, fontsize=10, loc="left", fontweight="bold", pad=8)
        pair[0].set_xlabel(TIMES, fontsize=9)
        pair[1].set_xlabel("FLOPs computed again, % of one forward", fontsize=9)
        pair[0].set_ylabel("peak, MiB", fontsize=9)
    canvas.draw()  # labels are placed where the layout has put everything else
    for axes, marks in panels:
        _label(axes, marks, canvas.get_renderer())
    figure.savefig(path, format="png", dpi=150)
    return [case[0].label for case in cases]


def choose_cases(rows: Sequence[Row]) -> list[list[Row]]:
    """The measured rows by case; of too many the last of each workload, which is the largest as a rule."""
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.label)]
    groups = [
        found for group in groups if (found := [row for row in group if row.outcome == MEASURED])
    ]
    if len(groups) > MOST_CASES:
        groups = list({group[0].workload: group for group in groups}.values())[:MOST_CASES]
    if not groups:
        raise ValueError("nothing was measured that could be drawn; the rows say why")
    return groups


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one is at most equal to in both coordinates and below in one, from left to right."""
    front: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _time(row: Row) -> float | None:
    return row.seconds.ratio if row.seconds else None


def _recomputed(row: Row) -> float | None:
    return None if row.recompute_ratio is None else 100 * row.recompute_ratio


def _draw(
    axes: Any, rows: Sequence[Row], names: Sequence[str], cost: Cost
) -> list[tuple[float, float, str, str]]:
    """Marks, front and grid; the labels' places and texts are handed back."""
    marks = []
    for row in rows:
        place, peak = cost(row), row.peak_bytes
        if place is None or peak is None:
            continue
        index = names.index(row.strategy)
        colour, shape = COLOURS[index % len(COLOURS)], SHAPES[index % len(SHAPES)]
        if cost is _time and row.seconds:
            between = row.seconds.ratio_lower, row.seconds.ratio_upper
            axes.hlines(peak / MEGABYTE, *between, colour, linewidth=THIN, alpha=0.5, zorder=3)
        axes.plot(
            [place],
            [peak / MEGABYTE],
            shape,
            color=colour,
            markersize=8,
            markeredgecolor="white",
            zorder=4,
        )
        share = "" if row.peak_ratio is None or row.strategy == PLAIN else f" {row.peak_ratio:.0%}"
        nothing = " (changes nothing)" if not row.modules and row.strategy != PLAIN else ""
        marks.append((place, peak / MEGABYTE, f"{row.strategy}{nothing or share}", colour))
    front = pareto([(place, peak) for place, peak, _, _ in marks])
    highest = max((peak for _, peak, _, _ in marks), default=1.0)
    axes.margins(x=0.25)
    if cost is _recomputed:
        most = max([place for place, *_ in marks], default=0.0)
        axes.set_xlim(-0.12 * max(most, 20.0), 1.3 * max(most, 20.0))
        axes.set_xticks(
            [tick for tick in axes.get_xticks() if tick >= 0 and tick <= 1.3 * max(most, 20.0)]
        )
    axes.set_ylim(0, 1.22 * highest)
    if front:
        left, right = axes.get_xlim()
        left = max(left, 0.0) if cost is _time else left
        across = [front[0][0], *(place for place, _ in front), right]
        up = [1.22 * highest, *(peak for _, peak in front), front[-1][1]]
        axes.plot(
            across,
            up,
            color="#999999",
            linewidth=1.0,
            linestyle="--",
            drawstyle="steps-post",
            zorder=2,
        )
        axes.fill_between(
            across, up, 1.22 * highest, step="post", color="#F3F3F3", linewidth=0, zorder=0
        )
        axes.set_xlim(left, right)
    axes.grid(color="#E4E4E4", linewidth=0.6, zorder=1)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return marks


def _label(axes: Any, marks: Sequence[tuple[float, float, str, str]], renderer: Any) -> None:
    """Put each label at the first of its places where it covers nothing, or else where it covers least."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    inside = axes.get_window_extent(renderer)
    reach = 5 * axes.figure.dpi / 72
    centres = [axes.transData.transform((place, peak)) for place, peak, _, _ in marks]
    taken = [Bbox.from_extents(x - reach, y - reach, x + reach, y + reach) for x, y in centres]
    for place, peak, text, colour in marks:
        best = None
        for right, up in OFFSETS:
            label = axes.annotate(
                text,
                (place, peak),
                xytext=(right, up),
                textcoords="offset points",
                ha="left" if right > 0 else "right",
                color=colour,
                fontsize=9,
                zorder=5,
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )
            box = label.get_window_extent(renderer)
            covered = sum(1 for other in taken if box.overlaps(other))
            covered += 2 * (
                box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1
            )
            if best is None or covered < best[0]:
                if best is not None:
                    best[1].remove()
                best = (covered, label, box, (right, up))
            else:
                label.remove()
            if covered == 0:
                break
        if best is not None:
            taken.append(best[2])
            if abs(best[3][1]) > FAR:
                line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6}
                axes.annotate(
                    "", (place, peak), xytext=best[3], textcoords="offset points", arrowprops=line
                )
