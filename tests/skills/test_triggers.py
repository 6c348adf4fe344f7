"""A user's prompt finds the right skill by its description, and no similar one.

Run: `python -m pytest tests/skills/test_triggers.py`.
"""

import itertools

import pytest
from tree import ROOT
from trigger_ranking import Vectors, Words, descriptions, named, rank, share, triggers
from word_vectors import stems

DATA, TEXTS = triggers(), descriptions()
OURS = set(TEXTS)
ALL = TEXTS | named(DATA["others"])
LEAST = 0.9
# No description was written for these prompts, so words alone find fewer. Chance is one in nine.
LEAST_HELD_OUT = 0.7
BASELINES = [Words, Vectors]


def test_every_skill_has_prompts():
    assert {path.name for path in (ROOT / "skills").iterdir() if path.is_dir()} <= set(
        DATA["prompts"]
    )
    assert set(DATA["prompts"]) == set(DATA["held_out"]) == OURS
    assert all(len(prompts) >= 15 for prompts in DATA["prompts"].values())
    assert all(len(prompts) >= 8 for prompts in DATA["held_out"].values())
    assert len(DATA["near_misses"]) >= 20


def test_no_prompt_occurs_twice_or_repeats_a_description():
    every = [
        text for part in ("prompts", "held_out") for each in DATA[part].values() for text in each
    ]
    assert len(every + DATA["near_misses"]) == len(set(every + DATA["near_misses"]))
    for prompt, text in itertools.product(every, TEXTS.values()):
        words = stems(prompt)
        runs = {tuple(words[start : start + 6]) for start in range(len(words) - 5)}
        described = stems(text)
        assert not runs & {
            tuple(described[start : start + 6]) for start in range(len(described) - 5)
        }, prompt


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_right_skill_is_first(baseline):
    ranked = rank(baseline(TEXTS), DATA["prompts"])
    assert share(ranked) >= LEAST, [each for each in ranked if each.found != each.right]


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_right_skill_is_first_for_most_unseen_prompts(baseline):
    assert share(rank(baseline(TEXTS), DATA["held_out"])) >= LEAST_HELD_OUT


@pytest.mark.parametrize("baseline", BASELINES)
def test_every_overlap_has_an_explanation(baseline):
    found = {
        " ".join(sorted((each.found, each.right))): each.prompt
        for each in rank(baseline(TEXTS), DATA["prompts"])
        if each.found not in (None, each.right)
    }
    assert {pair: prompt for pair, prompt in found.items() if pair not in DATA["overlaps"]} == {}


def test_overlaps_name_existing_skills():
    for pair, reason in DATA["overlaps"].items():
        assert pair.split() == sorted(pair.split())
        assert set(pair.split()) <= OURS
        assert len(reason) > 20


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_near_miss_goes_to_another_skill_of_the_agent(baseline):
    ranked = rank(baseline(ALL), {"none of ours": DATA["near_misses"]})
    lured = {each.prompt for each in ranked if each.found in OURS}
    assert lured <= set(DATA["shared_words"]), (
        "name the words that attract it, or change the description"
    )
    assert len(lured) <= len(DATA["near_misses"]) / 3


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_prompt_is_not_lost_to_another_skill_of_the_agent(baseline):
    ranked = rank(baseline(ALL), DATA["prompts"])
    assert sum(each.found in DATA["others"] for each in ranked) <= 0.05 * len(ranked)


def test_empty_descriptions_are_caught():
    texts = {name: f"{name}: helps with training. Use when training needs help." for name in TEXTS}
    assert share(rank(Words(texts), DATA["prompts"])) < LEAST


def test_two_swapped_descriptions_are_caught():
    texts = TEXTS | {"bench": TEXTS["grad-flow"], "grad-flow": TEXTS["bench"]}
    assert share(rank(Words(texts), DATA["prompts"])) < LEAST


def test_a_prompt_without_a_known_word_finds_nothing():
    (ranked,) = rank(Words(TEXTS), {"bench": ["zucchini"]})
    assert ranked.found is None
