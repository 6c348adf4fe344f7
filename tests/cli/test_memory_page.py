"""The page shows owners and blocks of the moment under the pointer, without a network.

python -m pytest tests/cli/test_memory_page.py
"""

import json
import re
import shutil

import pytest

from curry_train.cli.figures import plot_course
from curry_train.cli.memory_page import OWNER_COLOURS, course_of_blocks, write_page
from curry_train.plan.owners import ALL_OWNERS

from ..command_runs import finished, require_picture
from ..snapshot_files import owned_blocks, trained
from ..tree import ROOT

NODE = shutil.which("node")
# What the page leaves for its axes, and the width of the canvas in page_in_node.js.
LEFT, WIDTH = 64, 1000


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the owned blocks of two steps, and their page."""
    folder = tmp_path_factory.mktemp("page")
    training = trained(code="/home/user/</script><script>alert(1)//.py")
    owned = owned_blocks(folder, training.snapshot())
    write_page(course_of_blocks(owned, title="a <b>.pickle"), folder / "page.html")
    return owned, folder / "page.html"


def mebibytes(num_bytes):
    """Format as the page does: at most two digits after the point, rounded half away from 0."""
    return f"{num_bytes / 2**20 + 1e-9:,.2f}".rstrip("0").rstrip(".")


def owners_of(owned, index):
    shown = {owner: mebibytes(size) for owner, size in owned.owners_at(index).items()}
    free = owned.history.reserved[index + 1] - owned.history.allocated[index + 1]
    return shown | ({"free blocks": mebibytes(free)} if free else {})


def check_moment(owned, index, text, owners, blocks):
    """Check what a page shows of the moment after an event."""
    assert f"event {index}" in text
    assert f"{mebibytes(owned.history.allocated[index + 1])} MiB allocated" in text
    assert f"{mebibytes(owned.history.reserved[index + 1])} MiB reserved" in text
    assert {owner: size for owner, size, *_ in owners} == owners_of(owned, index)
    expected = {}
    for life in owned.history.alive_at(index):
        key = life.origin.line or "-", life.owner
        expected[key] = expected.get(key, 0) + life.num_bytes
    assert len(expected) > 5
    found = {(line, owner): size for line, owner, size, _ in blocks}
    assert found == {key: mebibytes(size) for key, size in expected.items()}


def in_node(path, *arguments):
    return json.loads(finished(NODE, ROOT / "tests/cli/page_in_node.js", path, *arguments).stdout)


@pytest.mark.skipif(NODE is None, reason="node runs the page's script, and is not installed")
def test_the_pointer_selects_the_moment_below_it(page):
    owned, path = page
    last = len(owned.history.events) - 1
    wanted = [40, owned.history.peak_index, last - 5]
    lefts = [LEFT + (moment + 1) / (last + 1) * WIDTH + 0.01 for moment in wanted]
    first, *others = in_node(path, "", *lefts)
    assert first[1].endswith("(the peak)")
    moments = course_of_blocks(owned, title="").moments
    for index, (_, text, *tables) in zip(wanted, others, strict=True):
        shown = max(moment for moment in moments if moment <= index)
        check_moment(owned, shown, text, *map(cells_of, tables))


def cells_of(table):
    """Return the cells of each row, without the empty text of the colour key."""
    return [[*filter(None, row.split("\t"))] for row in table]


def test_the_page_loads_nothing_and_names_end_no_script(page):
    text = page[1].read_text()
    assert "<title>a &lt;b&gt;.pickle</title>" in text
    assert "<h1>a &lt;b&gt;.pickle</h1>" in text
    assert "<b>" not in text
    assert not re.search(r"https?:|//cdn|import |fetch\(|src=|href=", text)
    assert text.count("<script") == text.count("</script>") == 2
    assert "default-src 'none'" in text


def test_a_long_record_is_drawn_at_its_highest_moments(page):
    owned, _ = page
    course = course_of_blocks(owned, title="")
    totals = [*map(sum, zip(*course.owners.values(), strict=True))]
    assert totals == [owned.history.allocated[moment + 1] for moment in course.moments]
    assert course.moments[course.peak_place] == owned.history.peak_index


def test_a_block_released_while_the_snapshot_was_taken_is_drawn(tmp_path):
    owned = owned_blocks(tmp_path, trained().snapshot() | {"segments": []})
    assert course_of_blocks(owned, title="").end == len(owned.history.events) - 1


def test_every_owner_has_a_colour(page):
    assert set(OWNER_COLOURS) >= set(ALL_OWNERS)
    plot_course(course_of_blocks(page[0], title="cost $1 and $2"), "a.png")
    require_picture("a.png")
