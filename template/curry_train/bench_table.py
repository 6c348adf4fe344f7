"""Table of a benchmark, at most 80 columns wide.

Proof: `python -m pytest tests/test_bench_command.py -k table`.
"""

import textwrap
from collections.abc import Iterator, Sequence

from .core.paired import FEWEST, NO_DIFFERENCE, TOO_FEW
from .plan.bench_report import MEASURED, Bench, Figures

WIDTH = 80
LONGEST = 18  # longest name, in characters, on the line of its figures; a longer one stands above
MEGABYTE = 2**20
HEADS = ("", "step", "10-90%", "ratio", "95%", "{unit}/s", "MiB", "MFU", "HFU")


def table(bench: Bench) -> str:
    """Return the measured setup, the figures, remarks on them, and a legend."""
    plain = bench.plain
    setup = [
        f"{bench.workload}, batch size {bench.batch_size}, {bench.dtype}, {bench.optimizer}, on "
        f"{bench.device}: {bench.rounds} rounds after {bench.warmup} to warm up, all "
        "configurations in turns",
        f"one optimizer step is {plain.num_terms:,} {bench.unit} and "
        f"{_flops(plain.model_flops)} of the model; loading data is not included",
    ]
    blocks = [
        "\n".join(_wrapped(line, indent="") for line in setup),
        "\n".join(_grid(bench)),
        "\n".join(_wrapped(line) for line in _remarks(bench)),
        "\n".join(_wrapped(line, indent="  ") for line in _legend(bench)),
    ]
    return "\n\n".join(block for block in blocks if block)


def _grid(bench: Bench) -> Iterator[str]:
    rows = [row for row in bench.rows if row.outcome == MEASURED]
    heads = [head.format(unit=bench.unit) for head in HEADS]
    cells = [heads, *(_cells(row) for row in rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns[1:]]
    name_width = max([len(row.name) for row in rows if len(row.name) <= LONGEST], default=LONGEST)
    gap = "  " if name_width + sum(widths) + 2 * len(widths) <= WIDTH else " "

    for name, *others in cells:
        figures = gap.join(cell.rjust(width) for cell, width in zip(others, widths, strict=True))
        if len(name) > name_width:
            yield name if len(name) <= WIDTH else f"{name[: WIDTH - 3]}..."
            name = ""
        yield f"{name.ljust(name_width)}{gap}{figures}".rstrip()


def _cells(row: Figures) -> list[str]:
    median = ""
    spread = ""
    if row.step is not None:
        median = format_seconds(row.step.median)
        scale = 1000 if row.step.median < 1 else 1
        spread = _range(row.step.lower, row.step.upper, scale=scale)

    ratio = ""
    interval = ""
    if row.ratio is not None:
        ratio = f"{row.ratio.median:.2f}x"
        if row.ratio.lower is not None and row.ratio.upper is not None:
            interval = f"{row.ratio.lower:.2f}-{row.ratio.upper:.2f}"

    return [
        row.name,
        median,
        spread,
        ratio,
        interval,
        _count(row.terms_per_second),
        "-" if row.peak_bytes is None else _mebibytes(row.peak_bytes),
        _percent(row.mfu),
        _percent(row.hfu),
    ]


def _remarks(bench: Bench) -> Iterator[str]:
    alike = [
        row.name
        for row in bench.rows
        if row.ratio is not None and row.ratio.verdict == NO_DIFFERENCE
    ]
    if alike:
        yield f"{NO_DIFFERENCE} to plain: {', '.join(alike)} (1 is within the interval)"
    if any(row.ratio is not None and row.ratio.verdict == TOO_FEW for row in bench.rows):
        yield f"no intervals: {bench.rounds} rounds are too few, use --steps {FEWEST} or more"
    for row in bench.rows:
        if row.outcome != MEASURED:
            yield f"{row.name}: {row.outcome}: {row.why}"
        for note in row.notes:
            yield f"{row.name}: {note}"
    for note in bench.notes:
        yield note


def _legend(bench: Bench) -> Iterator[str]:
    yield "ratio: median of step time over the plain step of the same round, with interval"
    yield "MiB: peak memory of a step, weights and optimizer state included"
    known = [row for row in bench.rows if row.peak_flops_per_second]
    if not known:
        yield f"MFU and HFU are unknown: {bench.plain.peak_source}"
        return
    yield "MFU: the model's FLOPs over peak; HFU: executed FLOPs, recompute included"
    for rate, source in dict.fromkeys(
        (row.peak_flops_per_second, row.peak_source) for row in known
    ):
        yield f"peak: {(rate or 0) / 1e12:.3g} TFLOP/s, {source}"


def _wrapped(text: str, *, indent: str = "  ") -> str:
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def format_seconds(seconds: float) -> str:
    return f"{_digits(seconds)} s" if seconds >= 1 else f"{_digits(1000 * seconds)} ms"


def _range(lower: float, upper: float, *, scale: int) -> str:
    return f"{_digits(lower * scale)}-{_digits(upper * scale)}"


def _digits(number: float) -> str:
    """Format to three digits, or as a whole number from 100 on."""
    if number >= 100:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _mebibytes(size: int) -> str:
    return _digits(size / MEGABYTE) if size >= MEGABYTE / 10 else f"{size / MEGABYTE:.1g}"


def _count(number: float | None) -> str:
    if number is None:
        return ""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{_digits(number / (1e3 if letter == 'k' else size))}{letter}"
    return _digits(number)


def _flops(number: int | None) -> str:
    scales: Sequence[tuple[float, str]] = (
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
    )
    for size, letter in scales:
        if number is not None and number >= size:
            return f"{_digits(number / size)} {letter}FLOP"
    return f"{number or 0} FLOP"


def _percent(part: float | None) -> str:
    if part is None:
        return "-"
    return f"{100 * part:.2g}%" if part < 0.1 else f"{part:.0%}"
