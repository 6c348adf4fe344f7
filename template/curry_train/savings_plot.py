"""Plot of savings: peak memory against step time and recomputed FLOPs, per case.

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
# From Paul Tol's palettes for colour-blind readers; shapes distinguish the strategies too.
COLOURS = (
    *("#555555", "#4477AA", "#EE6677", "#228833", "#AA3377", "#CCBB44", "#66CCEE"),
    *("#EE8866", "#999933", "#882255", "#117733", "#332288", "#AA4499", "#DDAA33"),
)
SHAPES = "osD^vP<X>hpd8H"
# Places for a label, in points from its mark, the best place first.
OFFSETS = [
    offset
    for lines in range(0, 84, 12)
    for offset in ((8, 5 + lines), (8, -12 - lines), (-8, 5 + lines), (-8, -12 - lines))
]
FAR = 14  # distance in points from which a line connects a label with its mark
THIN = 0.9  # width of a line of times; such lines are long on a shared machine, and marks count
TIMES = (
    "step time / that of none in the same round\n"
    "mark: the median; thin line: from the lower to the upper quartile"
)
FRONT = "dashed: the Pareto front; on grey, another strategy is better in both"

Cost = Callable[[Row], float | None]


def plot_savings(rows: Sequence[Row], path: str | Path, *, device: str = "") -> list[str]:
    """Write a PNG and return the labels of the cases in it.

    Of many cases, only the last of each workload is drawn.
    """
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
        pair[1].set_xlabel("recomputed FLOPs, % of one forward", fontsize=9)
        pair[0].set_ylabel("peak, MiB", fontsize=9)

    canvas.draw()  # fix the layout before labels are placed
    for axes, marks in panels:
        _label(axes, marks, canvas.get_renderer())
    figure.savefig(path, format="png", dpi=150)
    return [case[0].label for case in cases]


def choose_cases(rows: Sequence[Row]) -> list[list[Row]]:
    """Group the measured rows by case.

    Of too many cases, take the last of each workload, usually its largest.
    """
    groups = []
    for _, group in itertools.groupby(rows, key=lambda row: row.label):
        measured = [row for row in group if row.outcome == MEASURED]
        if measured:
            groups.append(measured)
    if len(groups) > MOST_CASES:
        groups = list({group[0].workload: group for group in groups}.values())[:MOST_CASES]
    if not groups:
        raise ValueError("nothing was measured, so there is nothing to draw; see the rows for why")
    return groups


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front from left to right; lower is better in both coordinates."""
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
    """Draw marks, front and grid; return position, text and colour of each label."""
    marks = []
    for row in rows:
        place = cost(row)
        peak = row.peak_bytes
        if place is None or peak is None:
            continue
        index = names.index(row.strategy)
        colour = COLOURS[index % len(COLOURS)]
        shape = SHAPES[index % len(SHAPES)]
        if cost is _time and row.seconds:
            quartiles = (row.seconds.ratio_lower, row.seconds.ratio_upper)
            axes.hlines(peak / MEGABYTE, *quartiles, colour, linewidth=THIN, alpha=0.5, zorder=3)
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
        unchanged = " (changes nothing)" if not row.modules and row.strategy != PLAIN else ""
        marks.append((place, peak / MEGABYTE, f"{row.strategy}{unchanged or share}", colour))

    front = pareto([(place, peak) for place, peak, _, _ in marks])
    highest = max((peak for _, peak, _, _ in marks), default=1.0)
    axes.margins(x=0.25)
    if cost is _recomputed:
        most = max([20.0, *(place for place, *_ in marks)])
        axes.set_xlim(-0.12 * most, 1.3 * most)
        axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= 1.3 * most])
    axes.set_ylim(0, 1.22 * highest)

    if front:
        left, right = axes.get_xlim()
        left = max(left, 0.0) if cost is _time else left
        _draw_pareto_front(axes, front, right=right, top=1.22 * highest)
        axes.set_xlim(left, right)

    axes.grid(color="#E4E4E4", linewidth=0.6, zorder=1)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return marks


def _draw_pareto_front(
    axes: Any, front: Sequence[tuple[float, float]], *, right: float, top: float
) -> None:
    """Draw the front as dashed steps, and the area above it in grey."""
    x = [front[0][0], *(place for place, _ in front), right]
    y = [top, *(peak for _, peak in front), front[-1][1]]
    dashed = {"linestyle": "--", "drawstyle": "steps-post"}
    axes.plot(x, y, color="#999999", linewidth=1.0, zorder=2, **dashed)
    axes.fill_between(x, y, top, step="post", color="#F3F3F3", linewidth=0, zorder=0)


def _label(axes: Any, marks: Sequence[tuple[float, float, str, str]], renderer: Any) -> None:
    """Put each label at its first place that covers nothing, or else the one that covers least."""
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
