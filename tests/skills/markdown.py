"""Fenced blocks of a Markdown page, with language and line, for tests that run them.

Proof: `python -m pytest tests/skills/test_docs.py`.
"""

import re
from dataclasses import dataclass

FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>.*)")


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is the line of its opening fence, counted from 1."""

    language: str
    line: int
    text: str


def fenced_blocks(page: str, *, language: str | None = None) -> list[Block]:
    """List the blocks of a page in order, those of one language when it is given."""
    blocks: list[Block] = []
    opening: re.Match[str] | None = None
    start, inside = 0, [""]
    for number, line in enumerate(page.splitlines(), start=1):
        found = FENCE.fullmatch(line)
        if opening is None:
            if found:
                opening, start, inside = found, number, []
        elif found and found["fence"].startswith(opening["fence"]) and not found["info"].strip():
            info = opening["info"].split()
            blocks.append(Block(info[0] if info else "", start, "".join(inside)))
            opening = None
        else:
            inside.append(line.removeprefix(opening["indent"]) + "\n")
    if opening is not None:
        raise ValueError(
            f"the block that opens on line {start} is never closed: "
            f"close it with {opening['fence']}"
        )
    return [block for block in blocks if language in (None, block.language)]
