"""Planted faults of all techniques, each by the claim that it breaks.

    FAULTS = [planted("recompute.off", "always", apply=always, hint="only while")]

A module `faulty_*.py` lists the faults of a skill.

Proof: `python -m pytest tests/gates/test_claims.py`.
"""

import contextlib
import functools
import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from curry_train.gates.verdict import Gate, claims, discover
from curry_train.workloads import Case
from curry_train.workloads.models import load_workload, transformer

CASES = {
    "small": transformer(depth=2, dim=32, length=16, vocabulary=64),
    "dropout": transformer(depth=2, dim=32, length=8, vocabulary=64, dropout=0.2),
}


@dataclass(frozen=True)
class Saboteur:
    """A fault, the claim that it breaks, and how it is planted."""

    claim: str
    name: str
    # Of the gate's check.
    arguments: dict
    # A text of the hint or of what was measured; several, of which one is there, with | between.
    hint: str = ""
    # A name of CASES, of a built-in model, or a workload.
    model: object = "small"
    # Attributes that are replaced while the check runs: (owner, name, value).
    patches: tuple = ()

    def __str__(self):
        return f"{self.claim}-{self.name}"

    def check(self):
        """Assert that the gate of the claim fails with this fault planted, with the right hint."""
        gate = gates()[claims_by_name()[self.claim].gate]
        check = functools.partial(gate.check, **self.arguments)
        with contextlib.ExitStack() as stack:
            for owner, name, value in self.patches:
                stack.enter_context(mock.patch.object(owner, name, value))
            verdict = replace(gate, check=check).run(case_of(self.model))
        assert verdict.passed is False, verdict
        texts = self.hint.split("|")
        assert any(text in verdict.hint or text in verdict.measured for text in texts), verdict


def planted(claim, name, *, hint="", model="small", patches=(), **arguments):
    return Saboteur(claim, name, arguments, hint, model, patches)


@functools.cache
def case_of(model):
    """Make each case once: gates keep the plain training of the last one."""
    found = CASES.get(model, model) if isinstance(model, str) else model
    return Case(load_workload(found) if isinstance(found, str) else found)


def verdict_of(check, case, **options):
    """Return the verdict of a gate with this check."""
    return Gate("a/gate", functools.partial(check, **options)).run(case)


def require(verdict, passed, words=""):
    """Fail unless a gate held, failed or did not apply (None), with these words in its hint."""
    assert verdict.passed is passed, verdict
    assert words in verdict.hint, verdict


@functools.cache
def gates():
    return {gate.name: gate for gate in discover()}


@functools.cache
def claims_by_name():
    return {claim.name: claim for claim in claims()}


def faults():
    """Return the faults of all modules."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("faulty_*.py"))
    return [
        one for name in names for one in importlib.import_module(f"{__package__}.{name}").FAULTS
    ]
