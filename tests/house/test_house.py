"""The tree keeps the rules of the house, and each rule catches the violations planted in a copy of it.

Run: `python -m pytest tests/house/test_house.py`.
"""

import shutil

import pytest
from house import ROOT, RULES
from house_planted import PLANTED, append, write
from house_tree import files, python_files, relative

CASES = [
    pytest.param(rule, plant, expected, id=f"{rule}-{number}")
    for rule, plants in PLANTED.items()
    for number, (plant, expected) in enumerate(plants, start=1)
]


@pytest.fixture
def copy(tmp_path):
    for path in files(ROOT):
        target = tmp_path / relative(path, ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return tmp_path


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rule(rule):
    assert RULES[rule](ROOT) == []


@pytest.mark.parametrize("rule", RULES)
def test_somebody_has_seen_the_rule_catch_something(rule):
    assert PLANTED.get(rule), f"plant a violation of {rule} in tests/house/house_planted.py"


@pytest.mark.parametrize(("rule", "plant", "expected"), CASES)
def test_the_rule_catches_what_is_planted(copy, rule, plant, expected):
    plant(copy)
    assert expected in "\n".join(RULES[rule](copy))


@pytest.mark.parametrize(
    "line", ['x = f"{{{name}}}"', 'x = f"{{ name }}"', "x = {1: {2: 3}}", "x = {(1,), (2,)}"]
)
def test_braces_of_python_are_not_taken_for_jinja(copy, line):
    write("template/x.py", f'"""Braces."""\n{line}\n')(copy)
    assert RULES["template_runs_where_it_is_written"](copy) == []


@pytest.mark.parametrize(
    "text", ["tests/test_<any>.py", "https://host/template/gone", "my/scripts/gone.py"]
)
def test_placeholders_and_paths_of_others_are_not_taken_for_dead_ones(copy, text):
    append("AGENTS.md", f"{text}\n")(copy)
    assert not [found for found in RULES["mentioned_paths_exist"](copy) if text in found]


def test_discovery_finds_the_rules_and_the_files_they_judge():
    assert len(RULES) >= 18
    assert len(python_files(ROOT)) >= 30
