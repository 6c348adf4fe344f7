"""The bench command: its measurement, table and picture.

Proof: `python -m pytest tests/cli/test_bench_command.py`.
"""

from collections.abc import Iterator

import click

from ..bench.report import Bench, Figures, measure_levers
from ..bench.steps import MEASURED_OUTCOME, find_lever, list_levers
from ..core.timing import FEWEST_ROUNDS, NO_DIFFERENCE_VERDICT, TOO_FEW_VERDICT
from ..core.wording import (
    format_count,
    format_mebibytes,
    format_percent,
    format_seconds,
    three_digits,
)
from ..plan.available import load_that_fits
from ..plan.device import MEASURED_PEAK
from ..plan.optimizers import OPTIMIZERS, make_optimizer
from ..workloads.models import load_workload
from .figures import plot_bench
from .options import (
    CaseOptions,
    blocks_text,
    echo_notes,
    facts_of,
    plot_option,
    settle_blocks,
    training_options,
)
from .parameters import number_option, option, together
from .savings import interval_cell
from .screen import Ended, fill_screen, messages_on_screen, screen_command, table

# Table of a benchmark, at most 80 columns wide.


def bench_table(bench: Bench) -> str:
    """Return the measured setup, the figures, remarks on them, and a legend."""
    plain = bench.rows[0]
    setup = [
        f"{bench.workload}, batch size {bench.batch_size}, {bench.dtype}, {bench.optimizer}, on "
        f"{bench.device}: {bench.rounds} rounds after {bench.warmup} to warm up, all "
        "configurations in turns",
        f"one optimizer step is {plain.num_terms:,} {bench.unit} and "
        f"{format_count(plain.model_flops or 0)}FLOP of the model; loading data is not included",
    ]
    heads = ["", "step", "10-90%", "ratio", "95%", f"{bench.unit}/s", "MiB", "MFU", "HFU"]
    rows = [row for row in bench.rows if row.outcome == MEASURED_OUTCOME]
    blocks = [
        fill_screen("\n".join(setup), indent=""),
        table([heads, *map(_format_cells, rows)]),
        fill_screen("\n".join(_list_remarks(bench))),
        fill_screen("\n".join(_write_legend(bench))),
    ]
    return "\n\n".join(filter(None, blocks))


def _format_cells(row: Figures) -> list[str]:
    step = row.step
    assert step is not None  # as a row that was measured has it
    scale = 1000 if step.median < 1 else 1
    return [
        row.name,
        format_seconds(step.median),
        "-".join(three_digits(end * scale) for end in (step.lower, step.upper)),
        "" if row.ratio is None else f"{three_digits(row.ratio.median)}x",
        interval_cell(row.ratio),
        format_count(row.terms_per_second or 0),
        "-" if row.peak_bytes is None else format_mebibytes(row.peak_bytes),
        format_percent(row.mfu),
        format_percent(row.hfu),
    ]


def _list_remarks(bench: Bench) -> Iterator[str]:
    verdicts = {row.name: row.ratio.verdict for row in bench.rows if row.ratio is not None}
    alike = [name for name, verdict in verdicts.items() if verdict == NO_DIFFERENCE_VERDICT]
    if alike:
        yield f"{NO_DIFFERENCE_VERDICT} to plain: {', '.join(alike)} (1 is within the interval)"
    if TOO_FEW_VERDICT in verdicts.values():
        yield (
            f"no intervals: {bench.rounds} rounds are too few, use --steps {FEWEST_ROUNDS} or more"
        )
    for row in bench.rows:
        if row.outcome != MEASURED_OUTCOME:
            yield f"{row.name}: {row.outcome}: {row.why}"
        for note in row.notes:
            yield f"{row.name}: {note}"
    yield from bench.notes


def _write_legend(bench: Bench) -> Iterator[str]:
    yield "ratio: median of step time over the plain step of the same round, with interval"
    yield "MiB: peak memory of a step, weights and optimizer state included"
    known = [row for row in bench.rows if row.peak_flops_per_second]
    if not known:
        yield f"MFU and HFU are unknown: {bench.rows[0].peak_source}"
        return
    yield "MFU: the model's FLOPs over peak; HFU: executed FLOPs, recompute included"
    for rate, source in dict.fromkeys(
        (row.peak_flops_per_second, row.peak_source) for row in known
    ):
        yield f"peak: {(rate or 0) / 1e12:.3g} TFLOP/s, {source}"


# Command `bench`: time training steps per lever, or compare models.

FLOPS_PER_TFLOP = 1e12


def _parse_peak(text: str) -> float | str:
    if text == MEASURED_PEAK:
        return text
    try:
        rate = float(text) * FLOPS_PER_TFLOP
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ValueError(f"{text!r} is not a peak: give TFLOP/s, such as 989, or {MEASURED_PEAK!r}")
    return rate


@screen_command("bench", example="--model transformer --lever full")
def bench_command(
    spec: str = training_options(),
    levers: tuple[str, ...] = option(
        f"Repeatable; + joins several: {', '.join(list_levers())}.", "NAME", "--lever"
    ),
    against: tuple[str, ...] = option(
        "Also time another model on the same batch. Repeatable.", "MODEL"
    ),
    steps: int = number_option("Timed rounds.", default=20),
    warmup: int = number_option("Rounds before timing.", default=5, least=0),
    optimizer: str | None = option(
        f"{', '.join(OPTIMIZERS)}, bytes per parameter; default: own or adamw.", "NAME"
    ),
    peak: float | str | None = option(
        "Or measured, for MFU and HFU; default: the data sheet.", "TFLOPS", parse=_parse_peak
    ),
    plot_path: str | None = plot_option("Draw times and peaks as PNG; needs matplotlib."),
    asked: CaseOptions = together(CaseOptions),
) -> Ended:
    """Time optimizer steps with each lever.

    The plain step and all levers are timed in turns, as whole optimizer steps.

    Exit status: 0 measured, even if a lever does not apply, 2 wrong usage, 3 device not available.
    """
    chosen = [find_lever(name) for name in dict.fromkeys(levers)]
    case, choice = settle_blocks(load_that_fits(spec, asked.case))
    workload = case.workload
    others = [load_workload(other) for other in dict.fromkeys(against)]
    steps_by = optimizer or workload.optimizer or "adamw"
    make_optimizer(steps_by, case.build())

    with messages_on_screen() as show_message:
        bench = measure_levers(
            case,
            chosen,
            against=others,
            optimizer=steps_by,
            rounds=steps,
            warmup=warmup,
            peak=peak,
            tell=show_message,
        )

    echo_notes(workload)
    click.echo(f"{blocks_text(choice)}\n\n{bench_table(bench)}")
    facts = facts_of([case])
    bench.device = facts["device"]
    if plot_path:
        plot_bench(bench, plot_path)
    return facts | bench.to_json() | {"blocks": choice.to_json()}, 0
