"""The savings command: what each strategy saves and costs, as a table and a picture.

    curry-train savings --model transformer --out savings

Proof: `python -m pytest tests/bench/test_savings.py`.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..bench.savings import (
    MEASURED_OUTCOME,
    REFERENCE_STRATEGY,
    REFUSED_OUTCOME,
    SavingsRow,
    StepSeconds,
    check_limit,
    choose_strategies,
    count_steps,
    load_with_depth,
    measure_savings,
)
from ..core.blocks import find_blocks
from ..core.wording import (
    format_bytes,
    format_mebibytes,
    format_percent,
    format_seconds,
    parse_bytes,
    provenance,
    three_digits,
    write_json,
)
from ..primitives.running_blocks import BlockChoice
from ..primitives.strategies import STRATEGIES
from ..workloads.workload import Case
from .options import (
    DTYPES,
    UnusableInput,
    blocks_option,
    blocks_text,
    choose_device,
    device_option,
    dtype_option,
    echo_notes,
    json_option,
    require_matplotlib,
    samples_of,
    seed_option,
    settle_blocks,
    training_options,
)
from .screen import SCREEN_WIDTH, ScreenCommand, align, fill_screen

# Plot of savings: peak memory against step time and recomputed FLOPs, per case.

MOST_CASES = 4
BYTES_PER_MIB = 2**20
# From Paul Tol's palettes for colour-blind readers; shapes distinguish the strategies too.
STRATEGY_COLOURS = (
    *("#555555", "#4477AA", "#EE6677", "#228833", "#AA3377", "#CCBB44", "#66CCEE"),
    *("#EE8866", "#999933", "#882255", "#117733", "#332288", "#AA4499", "#DDAA33"),
)
STRATEGY_MARKERS = "osD^vP<X>hpd8H"
# Places for a label, in points from its mark, the best place first.
LABEL_OFFSETS = [
    offset
    for lines in range(0, 84, 12)
    for offset in ((8, 5 + lines), (8, -12 - lines), (-8, 5 + lines), (-8, -12 - lines))
]
LABEL_LINE_DISTANCE = 14  # distance in points from which a line connects a label with its mark
TIME_LINE_WIDTH = (
    0.9  # width of a line of times; such lines are long on a shared machine, and marks count
)
TIME_AXIS_LABEL = (
    "step time / that of none in the same round\n"
    "mark: the median; thin line: the 95% interval of the median"
)
PARETO_FRONT_NOTE = "dashed: the Pareto front; on grey, another strategy is better in both"

Cost = Callable[[SavingsRow], float | None]


def plot_savings(rows: Sequence[SavingsRow], path: str | Path, *, device: str = "") -> list[str]:
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
    figure.supxlabel(PARETO_FRONT_NOTE, x=0.01, ha="left", fontsize=8, color="#666666")

    panels = []
    for case, pair in zip(cases, figure.subplots(len(cases), 2, squeeze=False), strict=True):
        for axes, cost in zip(pair, (_time_label, _recomputed), strict=True):
            panels.append((axes, _draw(axes, case, names, cost)))
        pair[0].set_title(case[0].label, fontsize=10, loc="left", fontweight="bold", pad=8)
        pair[0].set_xlabel(TIME_AXIS_LABEL, fontsize=9)
        pair[1].set_xlabel("recomputed FLOPs, % of one forward", fontsize=9)
        pair[0].set_ylabel("peak, MiB", fontsize=9)

    canvas.draw()  # fix the layout before labels are placed
    for axes, marks in panels:
        _label(axes, marks, canvas.get_renderer())
    figure.savefig(path, format="png", dpi=150)
    return [case[0].label for case in cases]


def choose_cases(rows: Sequence[SavingsRow]) -> list[list[SavingsRow]]:
    """Group the measured rows by case.

    Of too many cases, take the last of each workload, usually its largest.
    """
    groups = []
    for _, group in itertools.groupby(rows, key=lambda row: row.label):
        measured = [row for row in group if row.outcome == MEASURED_OUTCOME]
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


def _time_label(row: SavingsRow) -> float | None:
    return row.seconds.ratio if row.seconds else None


def _recomputed(row: SavingsRow) -> float | None:
    return None if row.recompute_ratio is None else 100 * row.recompute_ratio


def _draw(
    axes: Any, rows: Sequence[SavingsRow], names: Sequence[str], cost: Cost
) -> list[tuple[float, float, str, str]]:
    """Draw marks, front and grid; return position, text and colour of each label."""
    marks = []
    for row in rows:
        place = cost(row)
        peak = row.peak_bytes
        if place is None or peak is None:
            continue
        index = names.index(row.strategy)
        colour = STRATEGY_COLOURS[index % len(STRATEGY_COLOURS)]
        shape = STRATEGY_MARKERS[index % len(STRATEGY_MARKERS)]
        if cost is _time_label and row.seconds and row.seconds.ratio_lower is not None:
            axes.hlines(
                peak / BYTES_PER_MIB,
                row.seconds.ratio_lower,
                row.seconds.ratio_upper,
                colour,
                linewidth=TIME_LINE_WIDTH,
                alpha=0.5,
                zorder=3,
            )
        axes.plot(
            [place],
            [peak / BYTES_PER_MIB],
            shape,
            color=colour,
            markersize=8,
            markeredgecolor="white",
            zorder=4,
        )
        marks.append((place, peak / BYTES_PER_MIB, _mark_label(row), colour))

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
        left = max(left, 0.0) if cost is _time_label else left
        _draw_pareto_front(axes, front, right=right, top=1.22 * highest)
        axes.set_xlim(left, right)

    axes.grid(color="#E4E4E4", linewidth=0.6, zorder=1)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return marks


def _mark_label(row: SavingsRow) -> str:
    """Return the strategy with its share of the reference's peak, or that it changes nothing."""
    if row.strategy == REFERENCE_STRATEGY:
        return row.strategy
    if not row.modules:
        return f"{row.strategy} (changes nothing)"
    return row.strategy if row.peak_ratio is None else f"{row.strategy} {row.peak_ratio:.0%}"


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
        for right, up in LABEL_OFFSETS:
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
            if abs(best[3][1]) > LABEL_LINE_DISTANCE:
                line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6}
                axes.annotate(
                    "", (place, peak), xytext=best[3], textcoords="offset points", arrowprops=line
                )


# Table of savings, at most 80 columns wide.

TABLE_LEGEND = (
    "of none: peak of forward and backward, gradients included, relative to none",
    "again: FLOPs recomputed in backward, relative to one forward",
    "time: median ratio to none in the same round; interval: 95% of that median",
)


def savings_table(
    rows: Sequence[SavingsRow], *, limit: int | None = None, shows_unused: bool = True
) -> str:
    """Return one table for each case, and below them a legend of the columns.

    Without `shows_unused`, strategies that a model has no use for are listed in one line.
    """
    legend = list(TABLE_LEGEND)
    if limit is not None:
        legend.append(
            f"fits: the largest batch whose step, parameters included, fits {format_bytes(limit)}"
        )
    blocks = [
        _block(label, list(group), limit, shows_unused)
        for label, group in itertools.groupby(rows, key=lambda row: row.label)
    ]
    return "\n\n".join([*blocks, "\n".join(legend)])


def _block(label: str, rows: list[SavingsRow], limit: int | None, shows_unused: bool) -> str:
    unused = [] if shows_unused else [row.strategy for row in rows if _is_unused(row)]
    rows = [row for row in rows if row.strategy not in unused]
    plain = rows[0].seconds
    title = f"{label} (MiB)"
    if plain:
        title = f"{label} (MiB; a step of {rows[0].strategy} takes {format_seconds(plain.median)})"
    heads = ["strategy", "modules", "held", "peak", "of none"]
    heads += ["again", "time", "interval", "fits", "parity"]
    cells = [heads, *(_cells(row) for row in rows if row.outcome == MEASURED_OUTCOME)]
    if limit is None:
        cells = [line[:8] + line[9:] for line in cells]
    lines = [title[:SCREEN_WIDTH], *align(cells), *_remarks(rows)]
    if unused:
        advice = "--strategy NAME measures one and gives the reason"
        lines.append(fill_screen(f"no use here: {', '.join(unused)}; {advice}", indent="    "))
    return "\n".join(lines)


def _is_unused(row: SavingsRow) -> bool:
    """Return whether a strategy refuses the model, or changes nothing in it."""
    if row.outcome == MEASURED_OUTCOME:
        return row.strategy != REFERENCE_STRATEGY and not row.modules
    return row.outcome == REFUSED_OUTCOME


def _cells(row: SavingsRow) -> list[str]:
    if row.parity == "bit-equal":
        parity = "equal"
    else:
        parity = "DIFFERS" if row.is_wrong else f"{row.worst_error or 0:.0e}"
    return [
        row.strategy,
        str(len(row.modules)),
        "" if row.held_bytes is None else format_mebibytes(row.held_bytes),
        "" if row.peak_bytes is None else format_mebibytes(row.peak_bytes),
        "" if row.peak_ratio is None else format_percent(row.peak_ratio),
        "" if row.recompute_ratio is None else format_percent(row.recompute_ratio),
        _time_cell(row.seconds),
        "" if row.strategy == REFERENCE_STRATEGY else _interval(row.seconds),
        "" if row.largest_batch is None else str(row.largest_batch),
        parity,
    ]


def _remarks(rows: Sequence[SavingsRow]) -> Iterator[str]:
    """Explain rows that were not measured, lack a figure, or changed the training."""
    for row in rows:
        remarks = []
        if row.outcome != MEASURED_OUTCOME:
            remarks.append(f"{row.outcome}: {row.why}" if row.why else row.outcome)
        elif row.why:
            remarks.append(row.why)
        if row.parity.startswith("differs"):
            remarks.append(f"changes the training; {row.parity}")
        for remark in remarks:
            yield fill_screen(f"{row.strategy} {remark}", indent="    ")


def _time_cell(seconds: StepSeconds | None) -> str:
    if seconds is None:
        return ""
    return (
        format_seconds(seconds.median)
        if seconds.ratio is None
        else f"{three_digits(seconds.ratio)}x"
    )


def _interval(seconds: StepSeconds | None) -> str:
    if seconds is None or seconds.ratio_lower is None or seconds.ratio_upper is None:
        return ""
    return f"{three_digits(seconds.ratio_lower)}-{three_digits(seconds.ratio_upper)}"


# Command `savings`: measure every strategy on models, depths and batch sizes.

DEFAULT_SAMPLES = 8  # where the factory has no batch of its own
CaseAtDepth = tuple[Case, int | None]


def _parse_limit(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Parse `--limit 2GiB`."""
    try:
        return None if value is None else parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _parse_numbers(
    context: click.Context, option: click.Parameter, values: Sequence[str]
) -> list[int]:
    """Parse `--batch-size 8,32 --batch-size 64` as 8, 32 and 64."""
    words = [word.strip() for value in values for word in value.split(",")]
    for word in words:
        if not (word.isascii() and word.isdecimal() and int(word)):
            raise click.BadParameter(
                f"{word!r} is not a whole number from 1 up; several are written 8,32,128"
            )
    return list(dict.fromkeys(map(int, words)))


@click.command("savings", cls=ScreenCommand, example="--out savings --model mlp --strategy full")
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for savings.json and savings.png.",
)
@training_options("models", multiple=True, more="Repeatable; default: transformer.")
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAME",
    help=f"Repeatable; default: all of {', '.join(STRATEGIES)}. none is always measured.",
)
@click.option(
    "--batch-size",
    "batch_sizes",
    multiple=True,
    metavar="N,N",
    callback=_parse_numbers,
    help=f"Samples per step; default: as in the factory's batch, or {DEFAULT_SAMPLES}.",
)
@click.option(
    "--depth",
    "depths",
    multiple=True,
    metavar="N,N",
    callback=_parse_numbers,
    help="Numbers of blocks of a built-in model.",
)
@click.option(
    "--limit",
    metavar="SIZE",
    callback=_parse_limit,
    help="Also find the largest batch whose step fits, such as 2GiB.",
)
@click.option(
    "--repeats",
    default=10,
    type=click.IntRange(1),
    show_default=True,
    help="Timed steps of each strategy.",
)
@blocks_option()
@device_option()
@dtype_option()
@seed_option()
@click.option(
    "--redraw",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="JSON",
    help="Measure nothing; draw the picture of an earlier savings.json.",
)
@json_option()
def savings_command(
    out: Path,
    models: Sequence[str],
    strategies: Sequence[str],
    limit: int | None,
    repeats: int,
    device: str,
    json_path: str | None,
    redraw: Path | None,
    **options: Any,
) -> None:
    """Measure what each strategy saves and costs.

    Exit status: 0 measured, 1 a strategy changed the training, 2 wrong usage, 3 device not
    available.
    """
    if redraw is not None:
        click.echo(_redraw(redraw, out))
        return
    place = choose_device(device)
    try:
        names = choose_strategies(strategies)
        cases, choices = _cases(models or ("transformer",), place, options)
        if limit is not None:
            check_limit(limit, place)
        out.mkdir(parents=True, exist_ok=True)
        facts = provenance(place) | {key: options[key] for key in ("dtype", "seed")}
        facts |= {"repeats": repeats, "blocks": {n: one.to_json() for n, one in choices.items()}}
        rows = _measure(cases, names, repeats=repeats, limit=limit)
        data = facts | {"limit_bytes": limit, "rows": [row.to_json() for row in rows]}
        write_json(str(out / "savings.json"), data)
        title = f"{facts['device']}, torch {facts['torch']}"
        picture = _write_picture(rows, out / "savings.png", device=title)
    except (ValueError, OSError) as error:
        raise UnusableInput(str(error)) from error
    if json_path:
        write_json(json_path, data)
    echo = partial(click.echo, err=json_path == "-")
    for workload in {case.workload.spec: case.workload for case, _ in cases}.values():
        echo_notes(workload, err=json_path == "-")
    echo(f"{title}, {options['dtype']}, seed {options['seed']}\n")
    echo("\n".join(f"{name}: {blocks_text(choice)}" for name, choice in choices.items()))
    echo("\n" + savings_table(rows, limit=limit, shows_unused=bool(strategies)))
    echo(f"\nwrote {out / 'savings.json'}\n{picture}")
    if any(row.is_wrong for row in rows):
        sys.exit(1)


def _cases(
    models: Sequence[str], device: torch.device, options: dict[str, Any]
) -> tuple[list[CaseAtDepth], dict[str, BlockChoice]]:
    """Return models at each depth and, together, its batch sizes; and the blocks of each depth."""
    cases: list[CaseAtDepth] = []
    choices: dict[str, BlockChoice] = {}
    blocks = options["blocks"]
    for spec in models:
        for depth in options["depths"] or [None]:
            workload = load_with_depth(spec, depth)
            own = workload.own_batch or DEFAULT_SAMPLES
            for asked in options["batch_sizes"] or [own]:
                size = samples_of(workload, asked)
                dtype = DTYPES[options["dtype"]]
                case = Case(workload, device, dtype, size, options["seed"], blocks)
                if blocks is not None:
                    # A pattern that matches no module is reported before anything is measured.
                    find_blocks(case.build(), blocks)
                name = workload.name if depth is None else f"{workload.name}, depth {depth}"
                if name not in choices:
                    choices[name] = settle_blocks(case)[1]
                case = replace(case, blocks=choices[name].blocks or blocks)
                cases.append((case, depth))
    return cases, choices


def _measure(
    cases: Sequence[CaseAtDepth], names: Sequence[str], *, repeats: int, limit: int | None
) -> list[SavingsRow]:
    """Measure the cases one after the other, with a bar on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    rows = list[SavingsRow]()
    hints: dict[Any, dict[str, int]] = {}
    steps = len(cases) * count_steps(len(names), repeats=repeats, limit=limit)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=steps, completed=-1)
        for case, depth in cases:

            def show_message(message: str, case: Case = case) -> None:
                description = f"{case.workload.name}, {case.batch_size}: {message}"
                progress.update(task, advance=1, description=description)

            guesses = hints.setdefault((case.workload.spec, depth), {})
            rows += measure_savings(
                case,
                names,
                depth=depth,
                repeats=repeats,
                limit=limit,
                hints=guesses,
                tell=show_message,
            )
    return rows


def _redraw(path: Path, out: Path) -> str:
    """Draw the figures of an earlier savings.json and return what was written."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = [SavingsRow.from_json(row) for row in data["rows"]]
        device = f"{data['device']}, torch {data['torch']}"
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableInput(
            f"{path} is no savings.json of this command: {type(error).__name__}: {error}"
        ) from error
    out.mkdir(parents=True, exist_ok=True)
    return _write_picture(rows, out / "savings.png", device=device)


def _write_picture(rows: Sequence[SavingsRow], path: Path, *, device: str) -> str:
    """Draw the rows that were measured and return a line on what the picture shows."""
    if not any(row.outcome == MEASURED_OUTCOME for row in rows):
        return "drew no picture, because nothing was measured"
    drawn = plot_savings(rows, path, device=device)
    num_left_out = len({row.label for row in rows}) - len(drawn)
    if not num_left_out:
        return f"wrote {path}"
    return "\n  ".join([f"wrote {path}, which leaves out {num_left_out} and shows", *drawn])
