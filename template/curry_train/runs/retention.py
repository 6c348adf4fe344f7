"""Retention: which checkpoints to keep and which to delete.

These are pure functions over the list of saved checkpoints, so that every history can be tested.
Steps are compared as numbers, never as text. A state beyond the current step belongs to an
abandoned line: it does not count, and the newest state of the current line stays. A recovery counts
as a rollback too. A damaged checkpoint does not count.
Proof: `python -m pytest tests/test_retention.py`.
"""

from collections.abc import Collection, Iterable

from .names import BEST, PARAMETERS, RESUMABLE, Metric, Saved
from .policy_config import PolicyConfig


def to_delete(
    saved: Iterable[Saved],
    config: PolicyConfig,
    *,
    step: int,
    damaged: Collection[str] = (),
    protected: Collection[str] = (),
) -> list[Saved]:
    """Return the checkpoints to delete after a save, with training at `step`.

    `damaged` and `protected` name folders. A protected checkpoint (one that is being read, or that
    the user protected) is never deleted. `saved` must not hold the states that `turned_back`
    records as given up.

    The newest intact state of the current line and the best ones always stay. So do best-Ks of
    another metric, because the configuration does not cover them.
    """
    everything = list(saved)
    intact = [one for one in everything if one.folder not in damaged]
    line = newest_first(one for one in intact if one.step <= step)
    keep = _folders_to_keep(intact, line, config, step)

    if not line:
        # No state of the current line is saved yet, so the stale states are the only ones.
        keep |= {one.folder for one in everything if one.kind in RESUMABLE and one.step > step}

    superseded = {one.folder for one in everything if line and one.step < line[0].step}
    covered_metrics = {config.best_k_metric, PARAMETERS} if config.best_k else {PARAMETERS}
    return [
        one
        for one in everything
        if one.folder not in keep
        and one.folder not in protected
        and (one.kind in RESUMABLE or _metric(one) in covered_metrics)
        and (one.folder not in damaged or one.folder in superseded)
    ]


def _folders_to_keep(
    intact: list[Saved], line: list[Saved], config: PolicyConfig, step: int
) -> set[str]:
    """Return the folders that the counts of the configuration keep."""
    retention = config.retention
    parameters = _parameters(intact, step)
    recoveries = [one for one in line if one.kind == "recovery"]

    keep = {one.folder for one in _steps(line, retention.rollback_keep)}
    keep |= {one.folder for one in recoveries[: retention.recovery_keep]}
    keep |= {one.folder for one in best_first(intact, config)[: config.best_k]}
    keep |= {one.folder for one in parameters[: retention.rollback_keep]}
    if retention.keep_every:
        permanent = [one for one in [*line, *parameters] if one.step % retention.keep_every == 0]
        keep |= {one.folder for one in _steps(permanent, len(permanent))}
    return keep


def newest_first(saved: Iterable[Saved]) -> list[Saved]:
    """Return the resumable states, newest first; a recovery before a rollback of its step."""
    resumable = [one for one in saved if one.kind in RESUMABLE]
    return sorted(resumable, key=lambda one: (one.step, one.kind == "recovery"), reverse=True)


def is_of_line(saved: Saved) -> bool:
    """Return whether a checkpoint is a rollback or recovery, also with parameters only."""
    return saved.serves_as in RESUMABLE


def best_first(saved: Iterable[Saved], config: PolicyConfig) -> list[Saved]:
    """Return the best-Ks of the configured metric, best first; the earlier one of equals."""
    ranked = [one for one in saved if one.kind == BEST and _metric(one) == config.best_k_metric]
    return sorted(ranked, key=lambda one: _badness(one.metric, one.step, config))


def is_among_best(value: float, step: int, saved: Iterable[Saved], config: PolicyConfig) -> bool:
    """Return whether a state with this value would be among the best K; never if not finite."""
    if config.best_k == 0 or not float("-inf") < value < float("inf"):
        return False
    badness = _badness(Metric(config.best_k_metric, value), step, config)
    better = 0
    for one in best_first(saved, config):
        if _badness(one.metric, one.step, config) <= badness:
            better += 1
    return better < config.best_k


def _badness(metric: Metric | None, step: int, config: PolicyConfig) -> tuple[float, int]:
    assert metric is not None
    return (metric.value if config.minimize else -metric.value), step


def _steps(line: list[Saved], count: int) -> list[Saved]:
    """Return one state for each of the newest `count` steps.

    A rollback and a recovery of the same step hold the same state.
    """
    by_step: dict[int, Saved] = {}
    for one in line:
        by_step.setdefault(one.step, one)
    return list(by_step.values())[:count]


def _parameters(saved: Iterable[Saved], step: int) -> list[Saved]:
    """Return the rollbacks that hold parameters only, newest first."""
    rollbacks = [
        one
        for one in saved
        if one.kind == BEST and one.serves_as == "rollback" and one.step <= step
    ]
    return sorted(rollbacks, key=lambda one: one.step, reverse=True)


def _metric(saved: Saved) -> str | None:
    return saved.metric.name if saved.metric else None
