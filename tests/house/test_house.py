"""The tree keeps the house rules, and each rule catches the violations planted for it.

Run: `python -m pytest tests/house/test_house.py`.
"""

import re

import pytest
from planted import PLANTED, SOUND
from rules import RULES
from rules_text import summary_problem
from small_tree import write_small_tree
from tree import ROOT, modules, python_files

CASES = [
    pytest.param(rule, plant, expected, id=f"{rule}-{number}")
    for rule, plants in PLANTED.items()
    for number, (plant, expected) in enumerate(plants, start=1)
]
SOUND_CASES = [
    pytest.param(rule, plant, id=f"{rule}-{number}")
    for rule, plants in SOUND.items()
    for number, plant in enumerate(plants, start=1)
]


@pytest.fixture
def small_tree(tmp_path):
    write_small_tree(tmp_path)
    return tmp_path


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rule(rule):
    violations = RULES[rule](ROOT)
    assert not violations, "\n".join(["", *violations])


def test_the_small_tree_keeps_every_rule_until_something_is_planted(small_tree):
    assert [(name, found) for name, rule in RULES.items() if (found := rule(small_tree))] == []


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_has_two_planted_violations(rule):
    assert len(PLANTED.get(rule, [])) >= 2, f"plant two violations of {rule} (planted_*.py)"


@pytest.mark.parametrize(("rule", "plant", "expected"), CASES)
def test_the_rule_catches_what_is_planted(small_tree, rule, plant, expected):
    plant(small_tree)
    violations = RULES[rule](small_tree)
    assert any(expected in violation for violation in violations), violations


@pytest.mark.parametrize(("rule", "plant"), SOUND_CASES)
def test_the_rule_catches_nothing_else(small_tree, rule, plant):
    plant(small_tree)
    assert RULES[rule](small_tree) == []


def test_a_message_says_where_and_what_to_do(small_tree):
    for rule, plants in PLANTED.items():
        plants[0][0](small_tree)
        for violation in RULES[rule](small_tree):
            assert re.search(r"\w", violation), rule
            assert re.search(r"[:;,] \w+", violation), f"{rule} says nothing to do: {violation}"


@pytest.mark.parametrize(
    "riddle",
    [
        "The name that was meant where one was typed that is none, as in what that is that is",
        "What is said on the way where the end says it better: loggers that are silent.",
        "Whether this call draws random numbers: attention does with dropout alone.",
        "Those of them that this version of torch has.",
    ],
)
def test_riddles_of_the_first_edition_are_caught(riddle):
    assert summary_problem(riddle)


def test_discovery_finds_the_rules_and_the_files_they_judge():
    assert len(RULES) >= 40
    assert len(PLANTED) == len(RULES)
    assert len(CASES) >= 120
    assert len(python_files(ROOT)) >= 200
    assert len(modules(ROOT)) >= 60
