"""Quoted figures equal the recorded ones, and every record has its origin.

Run: `python -m pytest tests/skills/test_docs.py`.
"""

import json
from pathlib import Path

import pytest
from figures import RECORD_KEYS, incomplete_records, quoted_figures, wrong_figures
from markdown import Block, fenced_blocks
from tree import ROOT

RECORD = {
    **dict.fromkeys(RECORD_KEYS, "recorded"),
    "held": {"percent": 33.82, "bytes": 7_012_345, "error": 2.449e-7},
    "runs": [{"name": "mlp", "seconds": 0.0512}],
    "none": 0,
}


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence/run.json").write_text(json.dumps(RECORD))
    return tmp_path


def quote(tree: Path, text: str, *, page: str = "README.md") -> list[str]:
    (tree / "README.md").write_text("# Title\n")
    (tree / page).parent.mkdir(parents=True, exist_ok=True)
    (tree / page).write_text(f"# Title\n\n{text}\n")
    return wrong_figures(tree)


def test_every_quoted_figure_is_the_recorded_one():
    assert wrong_figures(ROOT) == []


def test_the_pages_quote_figures_at_all():
    assert len(quoted_figures(ROOT)) >= 1


def test_every_record_has_its_origin():
    assert incomplete_records(ROOT) == []


@pytest.mark.parametrize(
    "text",
    [
        "34% (evidence/run.json: held.percent)",
        "holds 33.8% (`evidence/run.json`: `held.percent`) of it",
        "| mlp | **33.82** % (evidence/run.json: held.percent) |",
        "7,012,345 bytes per step (evidence/run.json: held.bytes)",
        "2.4e-7 (evidence/run.json: held.error)",
        "0.051 s (evidence/run.json: runs.0.seconds)",
        "0 collectives\n(evidence/run.json: none)",
        '[34%](evidence/run.json "held.percent") of it',
        "a [record](evidence/run.json) and a plain evidence/run.json are no figures",
    ],
)
def test_a_figure_rounded_to_the_digits_shown_is_right(tree, text):
    assert quote(tree, text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "33.9% (evidence/run.json: held.percent)",
            "quotes 33.9 and evidence/run.json: held.percent records 33.82",
        ),
        ("33.0% (evidence/run.json: held.percent)", "quote 33.8"),  # the zero claims a third digit
        ("1 collective (evidence/run.json: none)", "records 0"),
        ("34% (evidence/gone.json: held.percent)", "evidence/gone.json, which is not there"),
        ("34% (evidence/run.json: held.part)", "there is no 'part'"),
        ("34% (evidence/run.json: runs.7.seconds)", "there is no '7'"),
        ("34% (evidence/run.json: held.percent.value)", "there is no 'value'"),
        ("34% (evidence/run.json: runs.0.name)", "records 'mlp'"),
        ("a third (evidence/run.json: held.percent)", "cannot be read"),
        ("34% (evidence/run.json held.percent)", "cannot be read"),
        ('[33.9%](evidence/run.json "held.percent")', "records 33.82"),
        ('[a third](evidence/run.json "held.percent")', "link the number"),
        ('[34%](evidence/run.json "held percent")', "there is no 'held percent'"),
    ],
)
@pytest.mark.parametrize("page", ["README.md", "skills/x/SKILL.md", "skills/x/references/ddp.md"])
def test_a_planted_wrong_figure_is_caught(tree, text, expected, page):
    (problem,) = quote(tree, text, page=page)
    assert problem.startswith(f"{page}:3 ")
    assert expected in problem


@pytest.mark.parametrize("key", sorted(RECORD_KEYS))
def test_a_record_without_its_origin_is_caught(tree, key):
    (tree / "evidence/run.json").write_text(
        json.dumps({name: value for name, value in RECORD.items() if name != key})
    )
    assert incomplete_records(tree) == [f"evidence/run.json lacks {key}: record it with the run"]


def test_blocks_are_read_with_their_language_and_line():
    page = (
        "text\n```bash\nmake test\n```\n- item\n"
        "  ~~~~python title\n  x = '''\n  ~~~\n  '''\n  ~~~~\n```\nplain\n```\n"
    )
    assert fenced_blocks(page) == [
        Block("bash", 2, "make test\n"),
        Block("python", 6, "x = '''\n~~~\n'''\n"),
        Block("", 11, "plain\n"),
    ]
    assert [block.line for block in fenced_blocks(page, language="bash")] == [2]


def test_a_block_that_is_never_closed_is_not_skipped():
    with pytest.raises(ValueError, match="opens on line 2 is never closed"):
        fenced_blocks("text\n```bash\nmake test\n")


def test_the_plan_that_the_readme_shows_is_the_recorded_one():
    record = json.loads((ROOT / "evidence/plan.json").read_text())
    shown = [
        block.text for block in fenced_blocks((ROOT / "README.md").read_text(), language="text")
    ]
    assert record["text"] in [text.rstrip("\n") for text in shown]
