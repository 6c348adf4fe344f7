"""Decide which checkpoints stay on the disk.

These are pure functions over the list of saved checkpoints, so that every history can be tested.
Steps are compared as numbers, never as text. A recovery counts as a rollback too.

Proof: `python -m pytest tests/runs/test_retention.py`.
"""

import math
from collections.abc import Iterable, Sequence

from .layout import BEST_KIND, SavedCheckpoint
from .policy_config import PolicyConfig


def newest_first(saved: Iterable[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Return the states among these, the newest first; a recovery before a rollback."""
    states = [one for one in saved if one.is_state]
    return sorted(states, key=lambda one: (one.step, one.kind == "recovery"), reverse=True)


def to_delete(saved: Sequence[SavedCheckpoint], config: PolicyConfig) -> list[SavedCheckpoint]:
    """Return the checkpoints to delete after a save.

    The newest state and the best ones always stay. So do best-Ks of another metric, because the
    configuration does not cover them.
    """
    retention = config.retention
    states = newest_first(saved)
    recoveries = [one for one in states if one.kind == "recovery"]
    keep = states[: retention.rollback_keep] + recoveries[: retention.recovery_keep]
    if every := retention.keep_every:
        keep += [one for one in states if one.step % every == 0]
    best = best_first(saved, config) if config.best_k else []
    keep += best[: config.best_k]
    return [one for one in saved if one not in keep and (one.is_state or one in best)]


def best_first(saved: Iterable[SavedCheckpoint], config: PolicyConfig) -> list[SavedCheckpoint]:
    """Return the best-Ks of the configured metric, best first; the earlier one of equals."""
    sign = 1 if config.best_k_direction == "minimize" else -1
    ranked = [
        (sign * one.metric[1], one.step, number, one)
        for number, one in enumerate(saved)
        if one.metric and one.metric[0] == config.best_k_metric
    ]
    return [one for *_, one in sorted(ranked)]


def is_among_best(
    value: float, step: int, saved: Sequence[SavedCheckpoint], config: PolicyConfig
) -> bool:
    """Return whether a state with this value would be among the best K; never if not finite."""
    new = SavedCheckpoint(BEST_KIND, step, {}, (config.best_k_metric, value))
    best = best_first([*saved, new], config)[: config.best_k]
    return math.isfinite(value) and new in best
