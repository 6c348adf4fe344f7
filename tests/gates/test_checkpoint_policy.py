"""Tests of the checkpoint gates: they hold on real workloads and fail on planted faults.

python -m pytest tests/gates/test_checkpoint_policy.py
"""

import dataclasses
import json
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from curry_train.gates import checkpoint_policy
from curry_train.gates.trials import StoreComponents
from curry_train.runs.format import Contents, read_tensors
from curry_train.runs.layout import (
    MANIFEST_FILE_NAME,
    FileEntry,
    Manifest,
    read_manifest,
    verify_files,
)
from curry_train.runs.ranks import DamagedCheckpoint
from curry_train.runs.state import TrainingState
from curry_train.runs.store import Writing
from curry_train.workloads.models import BUILTIN_WORKLOADS, load_workload, transformer
from curry_train.workloads.workload import Case

CHECKS = {
    gate.name: gate.check
    for gate in (*checkpoint_policy.CHECKPOINT_GATES, *checkpoint_policy.RETENTION_GATES)
}
CASE = Case(transformer(dropout=0.1, depth=1))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_gates_hold_on_built_in_workloads(name, check):
    verdict = CHECKS[check](Case(load_workload(name)))
    assert verdict.passed, verdict


@pytest.mark.parametrize("check", CHECKS)
def test_gates_hold_with_dropout_and_bfloat16(check):
    verdict = CHECKS[check](Case(transformer(dropout=0.1, depth=1), dtype=torch.bfloat16))
    assert verdict.passed, verdict


def test_gates_hold_on_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for check in CHECKS.values():
        verdict = check(Case(transformer(depth=1), device=torch.device("cuda")))
        assert verdict.passed, verdict


def test_a_state_too_large_to_be_written_often_is_left_out(monkeypatch):
    monkeypatch.setattr(checkpoint_policy, "LARGEST_STATE_BYTES", 100)
    for check in (checkpoint_policy.committed, checkpoint_policy.damage):
        verdict = check(CASE)
        assert verdict.passed is None
        assert "dozens of times" in verdict.hint


# Saboteurs of a commit: they write into the old checkpoint, remove the old one first, or write no
# manifest.


def over_the_old(writing, parts):
    """Write into the old checkpoint, as saving to the same path again does."""
    for name in writing.files.names(writing.folder) if writing.step == 2 else ():
        old = writing.files.path("rollback/step-00000001.dcp") / name
        old.write_bytes((writing.files.path(writing.folder) / name).read_bytes())
    return Writing.commit(writing, parts)


def old_one_first(writing, parts):
    """Delete the old checkpoint before the new one is complete."""
    if writing.step == 2:
        writing.files.remove_folder("rollback/step-00000001.dcp")
    return Writing.commit(writing, parts)


def without_manifest(writing, parts):
    manifest = Writing.commit(writing, parts)
    (writing.files.path(writing.final) / MANIFEST_FILE_NAME).unlink()
    return manifest


# Saboteurs of a state: each leaves out one component.


class WithoutRandom(TrainingState):
    def restore_random(self):
        return []


class WithoutOptimizer(TrainingState):
    def _optimizer_states(self):
        return []

    def _compare_parts(self, values, report):
        """Report no difference."""


class SecondMomentAnew(TrainingState):
    def begin_load(self, contents, *, strict=True):
        loading = super().begin_load(contents, strict=strict)

        def finish():
            loading.finish()
            for entry in self.optimizers[0].state.values():
                entry["exp_avg_sq"].zero_()

        return dataclasses.replace(loading, finish=finish)


class WithoutModel(TrainingState):
    def begin_load(self, contents, *, strict=True):
        others = {
            name: facts for name, facts in contents.tensors.items() if not name.startswith("model.")
        }
        return super().begin_load(
            Contents(others, contents.values, contents.rank_values, contents.ties), strict=False
        )


# Saboteurs of the verification: no hash, only the manifest's sizes, or only data files.


def nothing(run, folder):
    return None


def sizes_only(run, folder):
    return read_manifest(run.files, folder)


def data_files_only(run, folder):
    manifest = read_manifest(run.files, folder)
    verify_files(
        run.files, folder, manifest, [name for name in manifest.files if name.endswith(".distcp")]
    )


def without_the_manifests_own_hash(run, folder):
    try:
        content = json.loads(run.files.read(f"{folder}/{MANIFEST_FILE_NAME}"))
        files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        manifest = Manifest(content["algorithm"], content["kind"], content["step"], files)
        verify_files(run.files, folder, manifest, files)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(str(error)) from error


# Saboteurs of a load: torch's own reader, with and without the hashes.


def as_torch_loads(run, folder, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.load(state.snapshot().tensors, checkpoint_id=run.files.location(folder))
        except dcp.CheckpointException as error:  # a BaseException
            raise RuntimeError(str(error)) from error


def unpickled_first(run, folder, state):
    run.verify(folder)
    pickle.loads(run.files.read(f"{folder}/.metadata"))
    return run.load(folder, state)


def every_path(run, folder, state):
    """Read any path that the index names."""
    metadata = pickle.loads(run.files.read(f"{folder}/.metadata"))
    read_tensors(run.files, folder, metadata, state.snapshot().tensors)


@pytest.mark.parametrize(
    ("check", "parts", "in_hint"),
    [
        (
            checkpoint_policy.committed,
            StoreComponents(commit=over_the_old),
            "interrupted at change",
        ),
        (
            checkpoint_policy.committed,
            StoreComponents(commit=old_one_first),
            "no checkpoint is left",
        ),
        (
            checkpoint_policy.committed,
            StoreComponents(commit=without_manifest),
            "no checkpoint is left",
        ),
        (checkpoint_policy.bitwise, StoreComponents(state=WithoutRandom), "not restored"),
        (checkpoint_policy.bitwise, StoreComponents(state=WithoutOptimizer), "not restored"),
        (checkpoint_policy.bitwise, StoreComponents(state=SecondMomentAnew), "exp_avg_sq"),
        (checkpoint_policy.bitwise, StoreComponents(state=WithoutModel), "not restored: model."),
        (checkpoint_policy.damage, StoreComponents(verify=nothing), "was not detected"),
        (checkpoint_policy.damage, StoreComponents(verify=sizes_only), "was not detected"),
        (checkpoint_policy.damage, StoreComponents(verify=data_files_only), "was not detected"),
        (
            checkpoint_policy.damage,
            StoreComponents(verify=without_the_manifests_own_hash),
            "of manifest.json was not detected",
        ),
        (checkpoint_policy.hostile, StoreComponents(load=as_torch_loads), "a call in the index"),
        (checkpoint_policy.hostile, StoreComponents(load=unpickled_first), "function was called"),
        (checkpoint_policy.hostile, StoreComponents(load=every_path), "a call in the index"),
    ],
)
def test_gate_catches(check, parts, in_hint):
    verdict = check(CASE, parts=parts)
    assert verdict.passed is False, verdict
    assert in_hint in verdict.hint, verdict
