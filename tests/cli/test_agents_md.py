"""`curry-train agents-md` writes its lines once, and removes them to the byte.

python -m pytest tests/cli/test_agents_md.py
"""

import re
import shlex
import sys
from pathlib import Path

import pytest

from curry_train.cli.agents_md import LINES

from ..command_runs import finished, ran

TEXTS = {
    "a line": b"# Rules\nBe brief.\n",
    "no end of line": b"# Rules\nBe brief.",
    "many ends": b"# Rules\n\n\n",
    "windows": b"# Rules\r\nBe brief.\r\n",
    "windows, no end": b"# Rules\r\nBe brief.",
    "no UTF-8": b"\xff\xfe caf\xe9\n",
}


def run(*words, **options):
    return ran("agents-md", *words, **options).output


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_lines_are_written_once_and_removed_to_the_byte(text):
    file = Path("CLAUDE.md")
    file.write_bytes(text)
    run(file.name)
    once = file.read_bytes()
    assert once.startswith(text)
    assert b"curry-train plan" in once
    assert (b"\r\n" in text) == (b"\r\n" in once)
    assert "already" in run(file.name)
    assert file.read_bytes() == once
    run(file.name, "--remove")
    assert file.read_bytes() == text
    assert "has no lines" in run(file.name, "--remove")
    assert file.read_bytes() == text


@pytest.mark.parametrize("words", [(), ("new/CLAUDE.md",)])
def test_a_file_that_was_made_for_the_lines_goes_with_them(words):
    file = Path((*words, "AGENTS.md")[0])
    run(*words)
    run(*words)
    assert len(file.read_text().splitlines()) == len(LINES.splitlines()) + 2
    run(*words, "--remove")
    assert not file.exists()


def test_text_of_the_user_before_and_after_stays():
    file = Path("AGENTS.md")
    run()
    file.write_text("# Mine\n" + file.read_text() + "# After\n")
    run("--remove")
    assert file.read_text() == "# Mine\n# After\n"


def test_older_lines_are_replaced_in_place():
    file = Path("AGENTS.md")
    file.write_text("one\n\n<!-- curry-train: begin -->\nold\n<!-- curry-train: end -->\ntwo\n")
    run()
    assert file.read_text() == (
        f"one\n\n<!-- curry-train: begin -->\n{LINES}<!-- curry-train: end -->\ntwo\n"
    )


def test_a_mark_alone_is_refused():
    Path("AGENTS.md").write_text("<!-- curry-train: begin -->\nmine\n")
    assert "one of the two marks" in run(status=2)


def test_print_writes_nothing():
    assert run("--print") == LINES
    assert not [*Path().iterdir()]
    assert len(LINES.splitlines()) == 10


@pytest.mark.parametrize("command", re.findall(r"`(curry-train [^`]+)`", LINES))
def test_each_command_has_the_options_that_the_lines_name(command):
    _, *words = shlex.split(command.replace(" TRAIN", ""))
    names = words[:2] if words[0] == "runs" else words[:1]
    page = ran(*names, "--help")
    assert all(word in page.output for word in words if word.startswith("--"))


def test_a_full_disk_leaves_the_file_of_the_user():
    (file := Path("AGENTS.md")).write_text("mine\n" * 400)
    finished("sh", "-c", f"ulimit -f 1; {sys.executable} -m curry_train agents-md", status=2)
    assert file.read_text() == "mine\n" * 400
