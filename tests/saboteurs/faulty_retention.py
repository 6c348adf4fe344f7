"""Faults of retention, of a resume, and of saves that coincide.

Proof: `python -m pytest tests/gates/test_checkpoint_policy_retention.py`.
"""

import dataclasses

from saboteurs import planted

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


FAULTS = [
    planted(
        "checkpoint-policy.retention",
        "by-text",
        rules=Rules(delete=by_text),
        hint="the newest good state is gone",
    ),
    planted(
        "checkpoint-policy.line",
        "stale-counts",
        rules=Rules(delete=stale_counts),
        hint="a stale higher step stays",
    ),
    planted(
        "checkpoint-policy.nan-not-best",
        "nan-is-best",
        rules=Rules(among_best=nan_is_best),
        hint="a NaN or infinite metric is among the best",
    ),
    planted(
        "checkpoint-policy.retention",
        "nan-saved",
        rules=Rules(saves=lambda healthy: True),
        hint="fewer good states stay",
    ),
    planted(
        "checkpoint-policy.retention", "nothing-deleted", rules=Rules(delete=nothing), hint="stay"
    ),
    planted(
        "checkpoint-policy.fallback", "unverified", load=unverified, hint="verify before loading"
    ),
    planted(
        "checkpoint-policy.reported", "in-silence", load=in_silence, hint="report every checkpoint"
    ),
    planted(
        "checkpoint-policy.fallback",
        "first-or-none",
        load=first_or_none,
        hint="try the checkpoint before it",
    ),
    planted(
        "checkpoint-policy.fallback",
        "from-nothing",
        load=from_nothing,
        hint="is not that of the older",
    ),
    planted("checkpoint-policy.once", "each", policy=Each, hint="written twice"),
    planted(
        "checkpoint-policy.once",
        "shorter-alone",
        policy=ShorterAlone,
        hint="the recovery is missing",
    ),
    planted("checkpoint-policy.once", "nothing", policy=Nothing, hint="the recovery is missing"),
    planted(
        "checkpoint-policy.once", "without-best", policy=WithoutBest, hint="the best-K is missing"
    ),
]
