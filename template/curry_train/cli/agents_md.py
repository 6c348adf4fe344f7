"""Command `curry-train agents-md`: ten lines in the user's AGENTS.md that name our commands.

The lines, in `agents_md.md`, stand between two marks. Outside of these no byte of the file changes,
and a removal gives back the file as it was.

Proof: `python -m pytest tests/cli/test_agents_md.py`.
"""

import re
from pathlib import Path

import click

from .screen import ScreenCommand, UnusableInput

LINES = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
# The second one begins a file that had to be made, and that is removed with the lines.
BEGINS = (b"<!-- curry-train: begin -->", b"<!-- curry-train: begin, in a file of its own -->")
END = b"<!-- curry-train: end -->"
MARKED = re.compile(b"(?:%s).*?%s" % (b"|".join(map(re.escape, BEGINS)), re.escape(END)), re.DOTALL)


@click.command("agents-md", cls=ScreenCommand, example="CLAUDE.md")
@click.argument(
    "file", type=click.Path(dir_okay=False, path_type=Path), default="AGENTS.md", required=False
)
@click.option("--remove", is_flag=True, help="Remove the lines, and a file made for them.")
@click.option("--print", "only_print", is_flag=True, help="Print the lines, and write nothing.")
def agents_md_command(file: Path, remove: bool, only_print: bool) -> None:
    """Write ten lines for agents into AGENTS.md.

    They name the question and the command. A second time they are replaced. FILE is another file,
    such as CLAUDE.md; nothing else in it changes.
    """
    if only_print:
        click.echo(LINES, nl=False)
        return
    is_there = file.exists()
    before = file.read_bytes() if is_there else b""
    found = MARKED.search(before)
    if found is None and (END in before or any(begin in before for begin in BEGINS)):
        raise UnusableInput(f"{file}: one of the two marks of curry-train is missing: delete both")
    if remove:
        _remove(file, before, found)
        return
    ending = b"\r\n" if b"\r\n" in before else b"\n"
    begin = BEGINS[0] if is_there else BEGINS[1]
    if found is not None:
        begin = next(one for one in BEGINS if found.group().startswith(one))
    lines = ending.join([begin, *LINES.encode().splitlines(), END])
    if found is not None:
        after = before[: found.start()] + lines + before[found.end() :]
    else:
        after = before + (ending if before else b"") + lines + ending
    if after == before:
        click.echo(f"{file} has the lines already")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(after)
    click.echo(f"{file}: wrote {len(LINES.splitlines())} lines; --remove takes them out again")


def _remove(file: Path, before: bytes, found: re.Match[bytes] | None) -> None:
    if found is None:
        click.echo(f"{file} has no lines of curry-train")
        return
    head, tail = before[: found.start()], before[found.end() :]
    # The line's end before and after the marks came with them, if nothing was written since.
    tail = re.sub(rb"^\r?\n", b"", tail)
    if not tail:
        head = re.sub(rb"\r?\n\Z", b"", head)
    if found.group().startswith(BEGINS[1]) and not head + tail:
        file.unlink()
        click.echo(f"removed {file}, which had nothing else")
        return
    file.write_bytes(head + tail)
    click.echo(f"{file}: removed the lines of curry-train")
