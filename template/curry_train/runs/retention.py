"""Decide which checkpoints stay on the disk.

These are pure functions over the list of saved checkpoints, so that every history can be tested.
Steps are compared as numbers, never as text. A recovery counts as a rollback too.

Proof: `python -m pytest tests/runs/test_retention.py`.
"""

import math
from collections.abc import Iterable

from .layout import SavedCheckpoint
from .policy_config import PolicyConfig

# Retention: which checkpoints to keep and which to delete.


def to_delete(saved: Iterable[SavedCheckpoint], config: PolicyConfig) -> list[SavedCheckpoint]:
    """Return the checkpoints to delete after a save; `saved` must not hold those given up.

    The newest state and the best ones always stay. So do best-Ks of another metric, because the
    configuration does not cover them.
    """
    everything = list(saved)
    retention = config.retention
    line = newest_first(everything)
    recoveries = [one for one in line if one.kind == "recovery"]
    keep = [*_steps(line, retention.rollback_keep), *recoveries[: retention.recovery_keep]]
    if retention.keep_every:
        permanent = [one for one in line if one.step % retention.keep_every == 0]
        keep += _steps(permanent, len(permanent))
    keep += best_first(everything, config)[: config.best_k]
    covered_metrics = {config.best_k_metric} if config.best_k else set()
    return [
        one
        for one in everything
        if one not in keep and (one.is_state or _metric(one) in covered_metrics)
    ]


def newest_first(saved: Iterable[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Return the resumable states, newest first; a recovery before a rollback of its step."""
    resumable = [one for one in saved if one.is_state]
    return sorted(resumable, key=lambda one: (one.step, one.kind == "recovery"), reverse=True)


def best_first(saved: Iterable[SavedCheckpoint], config: PolicyConfig) -> list[SavedCheckpoint]:
    """Return the best-Ks of the configured metric, best first; the earlier one of equals."""
    ranked = [one for one in saved if _metric(one) == config.best_k_metric]
    return sorted(
        ranked, key=lambda one: _badness(one.metric and one.metric.value, one.step, config)
    )


def is_among_best(
    value: float, step: int, saved: Iterable[SavedCheckpoint], config: PolicyConfig
) -> bool:
    """Return whether a state with this value would be among the best K; never if not finite."""
    if config.best_k == 0 or not math.isfinite(value):
        return False
    # Of two equal ones the earlier is better.
    better = [
        one
        for one in best_first(saved, config)
        if one.metric
        and _badness(one.metric.value, one.step, config) <= _badness(value, step, config)
    ]
    return len(better) < config.best_k


def _badness(value: float | None, step: int, config: PolicyConfig) -> tuple[float, int]:
    return (value or 0.0) * (1 if config.minimize else -1), step


def _steps(line: list[SavedCheckpoint], count: int) -> list[SavedCheckpoint]:
    """Return one state for each of the newest `count` steps.

    A rollback and a recovery of the same step hold the same state.
    """
    by_step: dict[int, SavedCheckpoint] = {}
    for one in line:
        by_step.setdefault(one.step, one)
    return list(by_step.values())[:count]


def _metric(saved: SavedCheckpoint) -> str | None:
    return saved.metric.name if saved.metric else None
