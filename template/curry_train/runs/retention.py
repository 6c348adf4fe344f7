"""Which checkpoints stay. Pure functions over what is saved, so that every history can be tried.

Steps are numbers, never text. A state beyond the step where training is belongs to a line that was given up: it does
not count, and the newest of this line stays. A recovery counts as a rollback too. What is damaged counts for nothing.
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
    """What goes after a save, training being at `step`. `damaged` and `protected` name folders; what is protected (it
    is being read, or somebody wants it kept) never goes. What `turned_back` notes as given up is not to be in `saved`.

    Always stays: the newest that is good and of this line, and the best. Best-Ks of another metric stay as well: the
    configuration does not judge them.
    """
    every = list(saved)
    good = [one for one in every if one.folder not in damaged]
    line = newest_first(one for one in good if one.step <= step)
    recoveries = [one for one in line if one.kind == "recovery"]
    keep = {one.folder for one in _steps(line, config.retention.rollback_keep)}
    keep |= {one.folder for one in recoveries[: config.retention.recovery_keep]}
    keep |= {one.folder for one in best_first(good, config)[: config.best_k]}
    keep |= {one.folder for one in _parameters(good, step)[: config.retention.rollback_keep]}
    if every_so_many := config.retention.keep_every:
        lasting = [
            one for one in [*line, *_parameters(good, step)] if one.step % every_so_many == 0
        ]
        keep |= {one.folder for one in _steps(lasting, len(lasting))}
    stale = {one.folder for one in every if one.kind in RESUMABLE and one.step > step}
    if not line:  # nothing of this line is saved yet, so what is there is all there is
        keep |= stale
    superseded = {one.folder for one in every if line and one.step < line[0].step}
    judged = {config.best_k_metric, PARAMETERS} if config.best_k else {PARAMETERS}
    return [
        one
        for one in every
        if one.folder not in keep
        and one.folder not in protected
        and (one.kind in RESUMABLE or _metric(one) in judged)
        and (one.folder not in damaged or one.folder in superseded)
    ]


def newest_first(saved: Iterable[Saved]) -> list[Saved]:
    """Those that training resumes from; of one step, a recovery before a rollback."""
    resumable = [one for one in saved if one.kind in RESUMABLE]
    return sorted(resumable, key=lambda one: (one.step, one.kind == "recovery"), reverse=True)


def is_of_line(saved: Saved) -> bool:
    """Whether it says where training was, and not how good it was."""
    return saved.serves_as in RESUMABLE


def best_first(saved: Iterable[Saved], config: PolicyConfig) -> list[Saved]:
    """Best-Ks by the metric of the configuration; of equals, the earlier is the better."""
    judged = [one for one in saved if one.kind == BEST and _metric(one) == config.best_k_metric]
    return sorted(judged, key=lambda one: _badness(one.metric, one.step, config))


def is_among_best(value: float, step: int, saved: Iterable[Saved], config: PolicyConfig) -> bool:
    """Whether a state of this value would be one of the best K. NaN and infinities never are."""
    if config.best_k == 0 or not float("-inf") < value < float("inf"):
        return False
    mine = _badness(Metric(config.best_k_metric, value), step, config)
    better = [
        one for one in best_first(saved, config) if _badness(one.metric, one.step, config) <= mine
    ]
    return len(better) < config.best_k


def _badness(metric: Metric | None, step: int, config: PolicyConfig) -> tuple[float, int]:
    assert metric is not None
    return (metric.value if config.minimize else -metric.value), step


def _steps(line: list[Saved], count: int) -> list[Saved]:
    """The newest of so many steps: a rollback beside a recovery of its step is the same state."""
    found: dict[int, Saved] = {}
    for one in line:
        found.setdefault(one.step, one)
    return list(found.values())[:count]


def _parameters(saved: Iterable[Saved], step: int) -> list[Saved]:
    held = [
        one
        for one in saved
        if one.kind == BEST and one.serves_as == "rollback" and one.step <= step
    ]
    return sorted(held, key=lambda one: one.step, reverse=True)


def _metric(saved: Saved) -> str | None:
    return saved.metric.name if saved.metric else None
