"""Command `curry-train agents-md`: ten lines in the user's AGENTS.md that name our commands.

The lines, in `agents_md.md`, stand between two marks. Outside of these no byte of the file changes,
and a removal gives back the file as it was.

Proof: `python -m pytest tests/cli/test_agents_md.py`.
"""

import re
from pathlib import Path

import click
from click import echo

from .merge import content_of, line_end, replaced, write_changes
from .parameters import argument, option
from .screen import UnusableInput, screen_command

LINES = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
BEGIN = b"<!-- curry-train: begin -->"
END = b"<!-- curry-train: end -->"
MARKED = rb"(?s:%s.*?%s)" % (re.escape(BEGIN), re.escape(END))
# With the ends of lines that came with them.
ADDED = rb"(?:\r?\n)?%s\s*\Z|%s\r?\n" % (MARKED, MARKED)


@screen_command("agents-md", example="CLAUDE.md")
def agents_md_command(
    file: Path = argument(type=click.Path(dir_okay=False, path_type=Path), default="AGENTS.md"),
    remove: bool = option("Remove the lines, and a file that has no others."),
    only_print: bool = option("Print the lines, and write nothing.", flags="--print"),
) -> None:
    """Write ten lines for agents into AGENTS.md.

    They name the question and the command. A second time they are replaced. FILE is another file,
    such as CLAUDE.md; nothing else in it changes.
    """
    if only_print:
        echo(LINES, nl=False)
        return
    before = content_of(file) or b""
    newline = line_end(before)
    lines = newline.join([BEGIN, *LINES.encode().splitlines(), END])
    after, num_found = re.subn(MARKED, lambda _: lines, before, count=1)
    if not num_found and (BEGIN in before or END in before):
        raise UnusableInput(f"{file}: one of the two marks of curry-train is missing: delete both")
    if remove:
        after = re.sub(ADDED, b"", before, count=1)
    elif not num_found:
        after = before + (newline if before else b"") + lines + newline
    # Staged next to it: a full disk must not cost the user's own lines.
    place = file.resolve()
    write_changes(place.parent, [replaced(place.name, before or None, after or None)])
    if after == before:
        echo(f"{file} has {'no lines of curry-train' if remove else 'the lines already'}")
    elif not after:
        echo(f"removed {file}, which had nothing else")
    else:
        done = f"wrote {len(LINES.splitlines())} lines; --remove takes them out again"
        echo(f"{file}: {'removed the lines of curry-train' if remove else done}")
