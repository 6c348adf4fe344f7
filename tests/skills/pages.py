"""Read the pages of the project: fenced blocks, and figures that they quote from recorded runs.

A figure stands behind its paragraph, `(evidence/FILE.json: dotted.key 33.8, other.key 12)`, or is a
link titled with its key, `[33.8%](evidence/FILE.json "dotted.key")`, which a browser shows as the
figure alone. It equals the record, rounded to the digits of the page.
Proof: `python -m pytest tests/skills/test_pages.py`.
"""

import json
import re
from dataclasses import dataclass

from markdown_it import MarkdownIt

from ..tree import ROOT

LINK = re.compile(r"\[([^\]]*)\]\((evidence/[\w./-]+\.json) \"([^\"]*)\"\)")
MARK = re.compile(r"\((evidence/[\w./-]+\.json):\s([^)]*)\)")
OPENING = re.compile(r"(?<!\])\(evidence/")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
RECORD_KEYS = {"command", "date", "device", "torch", "python"}


def pages(root=ROOT):
    """List the README and the pages of docs/ and skills/."""
    return [root / "README.md", *sorted([*root.glob("docs/**/*.md"), *root.glob("skills/**/*.md")])]


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is the line of its opening fence, counted from 1."""

    language: str
    line: int
    text: str


def fenced_blocks(page, *, language=None):
    """List the blocks of a page in order, those of one language when it is given."""
    lines = page.splitlines()
    blocks = []
    for token in MarkdownIt().parse(page):
        if token.type != "fence":
            continue
        start, end = token.map
        if not lines[end - 1].lstrip().startswith(token.markup):
            raise ValueError(f"the block that opens on line {start + 1} is never closed")
        blocks.append(Block(token.info.partition(" ")[0], start + 1, token.content))
    return [block for block in blocks if language in (None, block.language)]


def quoted_figures(text):
    """List what a page quotes, as record, key and shown number."""
    found = [(file, key, shown) for shown, file, key in LINK.findall(text)]
    for file, figures in MARK.findall(text):
        for figure in re.split(r",\s", figures):
            key, *shown = figure.split(maxsplit=1)
            found.append((file, key, " ".join(shown)))
    return found


def wrong_figures(text, root=ROOT):
    """Yield the marks that cannot be read, and the figures that differ from their record."""
    unread = len(OPENING.findall(text)) - len(MARK.findall(text))
    if unread:
        yield f"{unread} marks can't be read: write (evidence/FILE.json: dotted.key VALUE)"
    for file, key, shown in quoted_figures(text):
        try:
            recorded = recorded_figure(root / file, key)
        except (FileNotFoundError, KeyError, IndexError, TypeError, ValueError) as error:
            yield f"{file}: {key} is not recorded: {error!r}"
            continue
        number = NUMBER.search(shown)
        if isinstance(recorded, bool) or not isinstance(recorded, int | float):
            yield f"{file}: {key} is {recorded!r}: quote a number"
        elif number is None:
            yield f"{file}: {key} has no number next to it but {shown!r}"
        elif rounded(recorded, like=number[0]) != float(number[0].replace(",", "")):
            yield f"{file}: {key} is {recorded} and the page quotes {shown}"


def recorded_figure(path, key):
    recorded = json.loads(path.read_text())
    for step in key.split("."):
        recorded = recorded[int(step) if isinstance(recorded, list) else step]
    return recorded


def rounded(recorded, *, like):
    """Round to as many significant digits as `like` shows."""
    digits = re.sub(r"e.*|\D", "", like).lstrip("0")
    return float(f"{recorded:.{max(len(digits), 1) - 1}e}")
