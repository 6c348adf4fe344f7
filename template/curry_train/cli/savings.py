"""The savings command: what each strategy saves and costs, as a table and a picture.

    curry-train savings --model transformer --out savings

Proof: `python -m pytest tests/bench/test_savings.py`.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from click import echo

from ..bench.savings import (
    SavingsRow,
    check_limit,
    choose_strategies,
    load_with_depth,
    measure_savings,
)
from ..bench.steps import MEASURED_OUTCOME
from ..core.timing import Ratio
from ..core.wording import (
    format_bytes,
    format_mebibytes,
    format_percent,
    format_seconds,
    parse_bytes,
    three_digits,
    write_json,
)
from ..plan.available import load_that_fits, require_available
from ..primitives.running_blocks import BlockChoice
from ..primitives.strategies import STRATEGIES
from ..workloads.workload import Case
from .figures import plot_savings
from .options import (
    CaseOptions,
    blocks_text,
    echo_notes,
    facts_of,
    named_once,
    require_matplotlib,
    settle_blocks,
    training_options,
)
from .parameters import number_option, option, together
from .screen import SCREEN_WIDTH, Ended, fill_screen, messages_on_screen, screen_command, table

# Table of savings, at most 80 columns wide.

TABLE_LEGEND = """\
of none: peak of forward and backward, gradients included, relative to none
again: FLOPs recomputed in backward, relative to one forward
time: median ratio to none in the same round; interval: 95% of that median"""


def savings_table(rows: Sequence[SavingsRow], *, limit: int | None = None) -> str:
    """Return one table for each case, and below them a legend of the columns."""
    legend = TABLE_LEGEND
    if limit is not None:
        fits = format_bytes(limit)
        legend += f"\nfits: the largest batch whose step, parameters included, fits {fits}"
    blocks = [
        _format_block(label, list(group), limit)
        for label, group in itertools.groupby(rows, key=lambda row: row.label)
    ]
    return "\n\n".join([*blocks, legend])


def _format_block(label: str, rows: list[SavingsRow], limit: int | None) -> str:
    plain = rows[0].step
    title = f"{label} (MiB)"
    if plain:
        title = f"{label} (MiB; a step of {rows[0].name} takes {format_seconds(plain.median)})"
    heads = ["strategy", "modules", "held", "peak", "of none"]
    heads += ["again", "time", "interval", "fits", "parity"]
    cells = [heads, *(_format_cells(row) for row in rows if row.outcome == MEASURED_OUTCOME)]
    if limit is None:
        cells = [line[:8] + line[9:] for line in cells]
    return "\n".join([title[:SCREEN_WIDTH], table(cells), *_list_remarks(rows)])


def _format_cells(row: SavingsRow) -> list[str]:
    time = "" if row.step is None else format_seconds(row.step.median)
    if row.ratio is not None:
        time = f"{three_digits(row.ratio.median)}x"
    if row.parity == "bit-equal":
        parity = "equal"
    else:
        parity = "DIFFERS" if row.is_wrong else f"{row.worst_error or 0:.0e}"
    return [
        row.name,
        str(len(row.modules)),
        format_mebibytes(row.held_bytes or 0),
        format_mebibytes(row.peak_bytes or 0),
        format_percent(row.peak_ratio),
        format_percent(row.recompute_ratio),
        time,
        interval_cell(row.ratio),
        "" if row.largest_batch is None else str(row.largest_batch),
        parity,
    ]


def _list_remarks(rows: Sequence[SavingsRow]) -> Iterator[str]:
    """Explain rows that were not measured, lack a figure, or changed the training."""
    for row in rows:
        remarks = []
        if row.outcome != MEASURED_OUTCOME:
            remarks.append(f"{row.outcome}: {row.why}")
        elif row.why:
            remarks.append(row.why)
        elif row.stays_here:
            remarks.append("moves activations within this machine: no win on a CPU, and not drawn")
        if row.parity.startswith("differs"):
            remarks.append(f"changes the training; {row.parity}")
        for remark in remarks:
            yield fill_screen(f"{row.name} {remark}", indent="    ")


def interval_cell(ratio: Ratio | None) -> str:
    """Return the 95% interval of a ratio."""
    if ratio is None or ratio.lower is None or ratio.upper is None:
        return ""
    return f"{three_digits(ratio.lower)}-{three_digits(ratio.upper)}"


# Command `savings`: measure every strategy on models, depths and batch sizes.

DEFAULT_SAMPLES = 8  # where the factory has no batch of its own
CaseAtDepth = tuple[Case, int | None]


def _parse_numbers(values: Sequence[str]) -> list[int]:
    """Parse `--batch-size 8,32 --batch-size 64` as 8, 32 and 64."""
    words = [word.strip() for value in values for word in value.split(",")]
    for word in words:
        if not (word.isdecimal() and int(word)):
            raise ValueError(
                f"{word!r} is not a whole number from 1 up; several are written 8,32,128"
            )
    return list(dict.fromkeys(map(int, words)))


@screen_command("savings", example="--out savings --model mlp --strategy full")
def savings_command(
    out: Path = option(
        "Folder for savings.json and savings.png.",
        "DIR",
        type=click.Path(file_okay=False, path_type=Path),
        required=True,
    ),
    models: Sequence[str] = training_options(
        multiple=True, more="Repeatable; default: transformer."
    ),
    strategies: tuple[str, ...] = option(
        f"Repeatable; default: all of {', '.join(STRATEGIES)}. none is always measured.",
        "NAME",
        "--strategy",
    ),
    sizes: dict[str, Any] = together(
        dict,
        batch_sizes=option(
            f"Samples per step; default: as in the factory's batch, or {DEFAULT_SAMPLES}.",
            "N,N",
            "--batch-size",
            parse=_parse_numbers,
            multiple=True,
        ),
        depths=option(
            "Numbers of blocks of a built-in model.",
            "N,N",
            "--depth",
            parse=_parse_numbers,
            multiple=True,
        ),
    ),
    limit: int | None = option(
        "Also find the largest batch whose step fits, such as 2GiB.", "SIZE", parse=parse_bytes
    ),
    repeats: int = number_option("Timed steps of each strategy.", default=10),
    asked: CaseOptions = together(functools.partial(CaseOptions, batch_size=None)),
) -> Ended:
    """Measure what each strategy saves and costs.

    Exit status: 0 measured, 1 a strategy changed the training, 2 wrong usage, 3 device not
    available.
    """
    # Before a long run rather than at its end.
    require_matplotlib()
    names = choose_strategies(strategies)
    cases, choices = _make_cases(models or ("transformer",), asked, **sizes)
    if limit is not None:
        check_limit(limit, asked.device)
    facts = facts_of([case for case, _ in cases])
    rows = list[SavingsRow]()
    with messages_on_screen() as show:
        for case, depth in cases:
            rows += measure_savings(
                case, names, depth=depth, repeats=repeats, limit=limit, tell=show
            )
    out.mkdir(parents=True, exist_ok=True)
    data = facts | {
        "repeats": repeats,
        "blocks": {name: choice.to_json() for name, choice in choices.items()},
        "limit_bytes": limit,
        "rows": [asdict(row) for row in rows],
    }
    write_json(str(out / "savings.json"), data)
    title = f"{facts['device']}, torch {facts['torch']}"
    written = [out / "savings.json"]
    if any(row.outcome == MEASURED_OUTCOME for row in rows):
        plot_savings(rows, out / "savings.png", device=title)
        written.append(out / "savings.png")
    for workload in {case.workload.spec: case.workload for case, _ in cases}.values():
        echo_notes(workload)
    echo(f"{title}, {facts['dtype']}, seed {asked.seed}\n")
    echo("\n".join(f"{name}: {blocks_text(choice)}" for name, choice in choices.items()))
    echo("\n" + savings_table(rows, limit=limit))
    echo(f"\nwrote {' and '.join(map(str, written))}")
    return data, any(row.is_wrong for row in rows)


def _make_cases(
    models: Sequence[str],
    asked: CaseOptions,
    *,
    depths: Sequence[int | None] | None,
    batch_sizes: Sequence[int] | None,
) -> tuple[list[CaseAtDepth], dict[str, BlockChoice]]:
    """Return models at each depth and, together, its batch sizes; and the blocks of each depth."""
    cases: list[CaseAtDepth] = []
    choices: dict[str, BlockChoice] = {}
    asked_for = list(itertools.product(models, depths or [None]))
    workloads = named_once(
        [
            load_with_depth(spec, depth) if depth else load_that_fits(spec, asked.case).workload
            for spec, depth in asked_for
        ]
    )
    for workload, (_, depth) in zip(workloads, asked_for, strict=True):
        default = workload.own_batch or DEFAULT_SAMPLES
        name = workload.name if depth is None else f"{workload.name}, depth {depth}"
        for size in batch_sizes or [default]:
            make_case = replace(asked, batch_size=size).case
            require_available(workload, make_case)
            case = make_case(workload)
            if name not in choices:
                choices[name] = settle_blocks(case)[1]
            cases.append((replace(case, blocks=choices[name].blocks or case.blocks), depth))
    return cases, choices
