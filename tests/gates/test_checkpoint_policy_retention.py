"""Tests of the gates of retention, fallback and coinciding saves: planted faults fail.

tests/gates/test_checkpoint_policy.py tests that they hold on the right implementation.

python -m pytest tests/gates/test_checkpoint_policy_retention.py
"""

import dataclasses

import pytest

from curry_train.gates import checkpoint_policy
from curry_train.gates.trials import Rules
from curry_train.runs.format import (
    Contents,
    LoadReport,
    facts_of,
    read_checkpoint_metadata,
    read_tensors,
)
from curry_train.runs.layout import read_manifest
from curry_train.runs.policy import SavingPolicy
from curry_train.runs.policy_config import PolicyConfig
from curry_train.runs.resume import Resumed, load_chosen
from curry_train.runs.retention import best_first, newest_first, to_delete
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case

CASE = Case(transformer(dropout=0.1, depth=1))


# Saboteurs of retention: text order, NaN as best, a stale higher step, NaN saved as latest,
# nothing deleted.


def by_text(every, config, *, step, damaged=(), protected=()):
    held = sorted(newest_first(every), key=lambda one: str(one.step), reverse=True)
    kept = {one.folder for one in held[: config.retention.rollback_keep]}
    gone = to_delete(
        [one for one in every if one.kind == "best-k"], config, step=step, protected=protected
    )
    return gone + [one for one in held if one.folder not in kept and one.folder not in protected]


def stale_counts(every, config, *, step, damaged=(), protected=()):
    return to_delete(every, config, step=10**12, damaged=damaged, protected=protected)


def nan_is_best(value, step, every, config):
    """Accept NaN as best, as code does that rejects by `value >= worst`, False for NaN."""
    ranked = best_first(every, config)
    return config.best_k > 0 and (
        len(ranked) < config.best_k or not value >= ranked[-1].metric.value
    )


def nothing(every, config, **_):
    return []


# Saboteurs of a resume: no verification, damage unreported, stop at the first error, the oldest.


def unverified(run, state, what):
    newest = run.latest()
    values = run._values(newest.folder)
    metadata = read_checkpoint_metadata(
        run.files, newest.folder, read_manifest(run.files, newest.folder)
    )
    contents = Contents(facts_of(metadata), values["values"], values["ranks"], values["ties"])
    loading = state.begin_load(contents)
    read_tensors(run.files, newest.folder, metadata, loading.first)
    loading.prepare()
    read_tensors(run.files, newest.folder, metadata, loading.targets)
    loading.finish()
    return Resumed(newest, loading.report, {newest.folder: "looks well"})


def in_silence(run, state, what):
    return dataclasses.replace(load_chosen(run, state, what), damaged={})


def first_or_none(run, state, what):
    return Resumed(run.latest(), run.load(run.latest(), state))


def from_nothing(run, state, what):
    return Resumed(
        run.latest(), LoadReport(), {run.latest().folder: "damaged, so training begins anew"}
    )


# Saboteurs of two kinds of saves at one step: both written, only the shorter, none, no best.


class Each(SavingPolicy):
    def after_step(self, step, state, metrics):
        first = super().after_step(step, state, metrics)
        return [*first, self.store.save("rollback", step, state)]


class ShorterAlone(SavingPolicy):
    def __init__(self, store, config):
        super().__init__(store, dataclasses.replace(config, recovery_every=None))


class Nothing(SavingPolicy):
    def after_step(self, step, state, metrics):
        return []


class WithoutBest(SavingPolicy):
    def __init__(self, store, config: PolicyConfig):
        super().__init__(store, dataclasses.replace(config, best_k=0))


@pytest.mark.parametrize(
    ("check", "planted", "message"),
    [
        (
            checkpoint_policy.retention,
            {"rules": Rules(delete=by_text)},
            "the newest good state is gone",
        ),
        (
            checkpoint_policy.retention,
            {"rules": Rules(delete=stale_counts)},
            "a stale higher step stays",
        ),
        (
            checkpoint_policy.retention,
            {"rules": Rules(among_best=nan_is_best)},
            "a NaN or infinite metric is among the best",
        ),
        (
            checkpoint_policy.retention,
            {"rules": Rules(saves=lambda healthy: True)},
            "fewer good states stay",
        ),
        (checkpoint_policy.retention, {"rules": Rules(delete=nothing)}, "stay"),
        (checkpoint_policy.fallback, {"load": unverified}, "verify before loading"),
        (checkpoint_policy.fallback, {"load": in_silence}, "report every checkpoint"),
        (checkpoint_policy.fallback, {"load": first_or_none}, "try the checkpoint before it"),
        (checkpoint_policy.fallback, {"load": from_nothing}, "is not that of the older"),
        (checkpoint_policy.coinciding_saves_once, {"policy": Each}, "written twice"),
        (
            checkpoint_policy.coinciding_saves_once,
            {"policy": ShorterAlone},
            "the recovery is missing",
        ),
        (checkpoint_policy.coinciding_saves_once, {"policy": Nothing}, "the recovery is missing"),
        (checkpoint_policy.coinciding_saves_once, {"policy": WithoutBest}, "the best-K is missing"),
    ],
)
def test_gate_catches(check, planted, message):
    verdict = check(CASE, **planted)
    assert verdict.passed is False, verdict
    assert message in verdict.hint, verdict
