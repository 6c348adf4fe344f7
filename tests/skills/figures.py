"""Figures that a page quotes from a recorded run, and whether they equal the record.

A quote is `33.8% (evidence/FILE.json: dotted.key)`, or a link titled with the key,
`[33.8%](evidence/FILE.json "dotted.key")`, which a browser shows as the figure alone. It must equal
the record, in its unit, rounded to the significant digits of the page.
Proof: `python -m pytest tests/skills/test_docs.py`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LINK = re.compile(r"\[(?P<shown>[^\]]*)\]\((?P<file>evidence/[\w./-]+\.json) \"(?P<key>[^\"]*)\"\)")
OPENING = re.compile(r"(?<!\])\(`?evidence/")  # a link to a record, ](evidence/..., is not a mark
MARK = re.compile(r"\(`?(?P<file>evidence/[\w./-]+\.json)`?:\s*`?(?P<key>[\w.-]+)`?\)")
# The figure before a mark, with its unit: '33.8%', '1.65x', '**656.5** MiB', '12 ms per step'.
VALUE = re.compile(
    r"(?P<value>-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)\**(?: ?%|x)?"
    r"(?: ?[^\W\d]+(?:/[^\W\d]+)?){0,3}\**\s*$"
)
RECORD_KEYS = {"command", "date", "device", "torch", "python"}


@dataclass(frozen=True)
class Figure:
    """A mark on a page, with the number that stands before it."""

    page: str
    line: int
    value: str
    file: str
    key: str


def quoted_figures(root: Path) -> list[Figure]:
    """List the figures of the README and of the skills."""
    return [
        figure
        for page in _pages(root)
        for figure in _marks(page, root)
        if isinstance(figure, Figure)
    ]


def _pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted(root.glob("skills/**/*.md"))]


def _marks(page: Path, root: Path) -> Iterator[Figure | str]:
    """Yield each figure, or the fault of a mark that cannot be read."""
    text, name = page.read_text(encoding="utf-8"), page.relative_to(root).as_posix()
    for link in LINK.finditer(text):
        line = text.count("\n", 0, link.start()) + 1
        shown = VALUE.search(link["shown"])
        if shown is None:
            yield f"{name}:{line} links {link['shown']!r} to a record's key: link the number"
        else:
            yield Figure(name, line, shown["value"], link["file"], link["key"])
    for opening in OPENING.finditer(text):
        line = text.count("\n", 0, opening.start()) + 1
        mark = MARK.match(text, opening.start())
        before = VALUE.search(text[max(0, opening.start() - 80) : opening.start()])
        if mark is None or before is None:
            yield (
                f"{name}:{line} opens a mark that cannot be read: "
                "write VALUE (evidence/FILE.json: dotted.key)"
            )
        else:
            yield Figure(name, line, before["value"], mark["file"], mark["key"])


def wrong_figures(root: Path) -> list[str]:
    """List the quoted figures that differ from the record."""
    marks = [mark for page in _pages(root) for mark in _marks(page, root)]
    problems = [mark if isinstance(mark, str) else _problem(mark, root) for mark in marks]
    return [problem for problem in problems if problem]


def _problem(figure: Figure, root: Path) -> str | None:
    source = f"{figure.file}: {figure.key}"
    quotes = f"{figure.page}:{figure.line} quotes {figure.value}"
    try:
        recorded = json.loads((root / figure.file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return (
            f"{quotes} from {figure.file}, which is not there: record the run or correct the name"
        )
    for step in figure.key.split("."):
        try:
            recorded = recorded[int(step) if isinstance(recorded, list) else step]
        except (KeyError, IndexError, TypeError, ValueError):
            return f"{quotes} from {source}, and there is no {step!r}: correct the key"
    if isinstance(recorded, bool) or not isinstance(recorded, int | float):
        return f"{quotes} from {source}, which records {recorded!r}: quote a number"
    rounded = _rounded(recorded, like=figure.value)
    if rounded == float(figure.value.replace(",", "")):
        return None
    return f"{quotes} and {source} records {recorded}: quote {rounded:g}, or record the run again"


def _rounded(recorded: float, *, like: str) -> float:
    """Round to as many significant digits as `like` shows."""
    digits = re.sub(r"e.*|\D", "", like).lstrip("0")
    return float(f"{recorded:.{max(len(digits), 1) - 1}e}")


def incomplete_records(root: Path) -> list[str]:
    """List the recorded runs that lack facts about their origin."""
    violations = []
    for path in sorted(root.glob("evidence/**/*.json")):
        lacking = sorted(RECORD_KEYS - set(json.loads(path.read_text(encoding="utf-8"))))
        if lacking:
            name = path.relative_to(root).as_posix()
            violations.append(f"{name} lacks {', '.join(lacking)}: record it with the run")
    return violations
