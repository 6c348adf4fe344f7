"""Compare retention with an independent model over histories that hypothesis generates.

A history trains, measures, resumes, turns back, meets NaN and damage, and crashes at any change.
Proof: `python -m pytest tests/benchmarks/test_torture_retention.py`.
"""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from curry_train.runs import policy
from curry_train.runs.policy_config import PolicyConfig, Retention
from torture_history import History

KINDS_OF_EVENT = ("train", "rollback", "restart", "crash", "branch", "rot")
VALUES = (0.1, 0.2, 0.2, 0.3, 5.0, -1.0, 1e-9, math.nan, math.inf)
TRAIN = st.tuples(
    st.integers(1, 4),
    st.one_of(st.none(), st.sampled_from(VALUES)),
    st.sampled_from([True] * 5 + [False]),
)
PICK = st.integers(0, 9)
EVENTS = st.one_of(
    st.tuples(st.just("train"), TRAIN),
    st.tuples(st.just("train"), TRAIN),
    st.tuples(st.just("train"), TRAIN),
    st.tuples(st.just("rollback"), PICK),
    st.tuples(st.just("restart"), st.none()),
    st.tuples(st.just("crash"), st.tuples(st.integers(0, 12), st.one_of(TRAIN, PICK))),
    st.tuples(st.just("branch"), PICK),
    st.tuples(st.just("rot"), PICK),
)
CONFIGS = st.builds(
    PolicyConfig,
    rollback_every=st.sampled_from([1, 2, 3, None]),
    recovery_every=st.sampled_from([2, 3, 5]),
    best_k=st.integers(0, 3),
    best_k_direction=st.sampled_from(["minimize", "maximize"]),
    retention=st.builds(
        Retention, rollback_keep=st.integers(1, 4), recovery_keep=st.integers(1, 3)
    ),
)


def run_history(config: PolicyConfig, events: list[tuple[str, Any]]) -> None:
    history = History(config)
    for name, what in events:
        getattr(history, name)(what)


def histories(
    number: int,
    *,
    seed: int = 0,
    shorten: bool = True,
    progress: Callable[[int], None] = lambda number: None,
) -> dict[str, Any]:
    """Run a number of hypothesis's histories; a failing one is shortened."""
    count = {
        "histories": 0,
        "events": 0,
        **dict.fromkeys(KINDS_OF_EVENT, 0),
    }

    def check(config: PolicyConfig, events: list[tuple[str, Any]]) -> None:
        count["histories"] += 1
        count["events"] += len(events)
        for name, _ in events:
            count[name] += 1
        progress(count["histories"])
        run_history(config, events)

    phases = [Phase.generate, *([Phase.shrink] if shorten else [])]
    quiet = settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    found: list[str] = []
    try:
        hypothesis.seed(seed)(
            quiet(given(CONFIGS, st.lists(EVENTS, min_size=4, max_size=24))(check))
        )()
    except AssertionError as error:
        found.append("; ".join([str(error), *getattr(error, "__notes__", [])])[:3000])
    return {**count, "wrong": found}


def with_rules(**planted: Any) -> Any:
    """Replace some rules of the policy."""
    return mock.patch.multiple(policy, **planted)
