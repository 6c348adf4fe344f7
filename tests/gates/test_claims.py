"""Tests of the claims: each has a gate and a planted fault, and pages promise only claims.

python -m pytest tests/gates/test_claims.py
"""

import fnmatch
import re
from collections import Counter

import pytest

from curry_train.gates.verdict import TECHNIQUES, claims, discover, technique_of

from ..saboteurs.saboteurs import claims_by_name, faults
from ..tree import ROOT

PAGES = [ROOT / "docs/validate.md", *sorted(ROOT.glob("skills/*/SKILL.md"))]
# <!-- claims: sac.products sac.regions -->, or <!-- claims: sac.* --> for all of a technique
MARK = re.compile(r"<!-- claims: ([a-z0-9.* -]+?) -->")


def marked_in(page):
    """Return the claims that a page names; a pattern that matches none stays as it is."""
    patterns = [pattern for mark in MARK.findall(page.read_text()) for pattern in mark.split()]
    return {
        name
        for pattern in patterns
        for name in fnmatch.filter(claims_by_name(), pattern) or [pattern]
    }


def test_every_claim_has_a_gate_and_every_gate_a_claim():
    assert sorted({claim.gate for claim in claims()}) == sorted(gate.name for gate in discover())
    assert Counter(claim.name for claim in claims()).most_common(1)[0][1] == 1
    assert {technique_of(claim.gate) for claim in claims()} == set(TECHNIQUES)


def test_a_claim_is_a_sentence_with_what_breaks_it():
    for claim in claims():
        assert claim.text[0].isupper(), claim
        assert claim.text.endswith("."), claim
        assert claim.broken_by, claim


def test_every_claim_has_a_planted_fault():
    broken = {fault.claim for fault in faults()}
    names = claims_by_name().keys()
    assert broken == names, broken ^ names
    by_gate = Counter(claims_by_name()[fault.claim].gate for fault in faults())
    assert min(by_gate.values()) >= 2, by_gate
    assert Counter(map(str, faults())).most_common(1)[0][1] == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_promises_claims_that_exist(page):
    names = claims_by_name().keys()
    marked = marked_in(page)
    assert marked, f"{page} names no claim: mark what it promises"
    assert marked <= names, marked - names


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_skill_names_every_claim_of_its_gates(technique):
    marked = marked_in(ROOT / "skills" / technique / "SKILL.md")
    assert marked == {claim.name for claim in claims() if technique_of(claim.gate) == technique}
