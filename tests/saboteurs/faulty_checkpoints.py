"""Faults of checkpoints: what is not restored, not synced, not refused, and deleted.

Proof: `python -m pytest tests/gates/test_checkpoint_policy.py`.
"""

import contextlib
import dataclasses
import io
import json
import os
import pickle
import random
import warnings

import numpy
import torch
import torch.distributed.checkpoint as dcp
from saboteurs import planted

from curry_train.gates.trials import StoreComponents
from curry_train.runs import policy
from curry_train.runs.background import BackgroundSaver
from curry_train.runs.files import LocalFiles
from curry_train.runs.format import Contents, read_tensors
from curry_train.runs.layout import (
    MANIFEST_FILE_NAME,
    FileEntry,
    Manifest,
    read_manifest,
    verify_files,
)
from curry_train.runs.policy import SavingPolicy, what_is_wrong
from curry_train.runs.ranks import DamagedCheckpoint, HostileCheckpoint
from curry_train.runs.state import TrainingState
from curry_train.runs.store import Writing


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


def without_argument(name):
    """Return a training state that is made without one of its arguments."""

    class Without(TrainingState):
        def __init__(self, *args, **options):
            number = {"scheduler": 2, "scaler": 3}.get(name)
            if number is None:
                del options[name]
            else:
                args = [*args[:number], None, *args[number + 1 :]]
            super().__init__(*args, **options)

    return Without


def not_restored(read, write):
    """Return a training state whose load leaves something as it was."""

    class Without(TrainingState):
        def begin_load(self, contents, *, strict=True):
            loading = super().begin_load(contents, strict=strict)

            def finish():
                before = read(self)
                loading.finish()
                write(self, before)

            return dataclasses.replace(loading, finish=finish)

    return Without


def counter(name):
    return not_restored(
        lambda state: getattr(state, name), lambda state, value: setattr(state, name, value)
    )


def gradients_dropped(state, before):
    state.model.zero_grad()


def rate_kept(state, before):
    for group, rate in zip(state.optimizers[0].param_groups, before, strict=True):
        group["lr"] = rate


def rates(state):
    return [group["lr"] for group in state.optimizers[0].param_groups]


def lenient(lets_through):
    """Return a load by an unpickler that lets some names through before the right one looks."""

    class Lenient(pickle.Unpickler):
        def find_class(self, module, name):
            if lets_through(module, name):
                return super().find_class(module, name)
            raise HostileCheckpoint(f"{module}.{name}")

    def load(run, folder, state):
        data = run.files.read(f"{folder}/.metadata")
        with contextlib.suppress(HostileCheckpoint):
            Lenient(io.BytesIO(data)).load()
        return run.load(folder, state)

    return load


class NoWait(BackgroundSaver):
    """A save in the background that no step waits for."""

    def _before_step(self, *_):
        pass


class NoHook(BackgroundSaver):
    def _hook(self, optimizers):
        pass


class NeverFinished(BackgroundSaver):
    """A save in the background whose commit fails in silence."""

    def _run(self, writing):
        self._staging.copy()


class Unsynced(LocalFiles):
    def finish(self, stream):
        stream.close()


class FoldersUnsynced(LocalFiles):
    def sync_folder(self, key):
        pass


class SyncedTooEarly(LocalFiles):
    """Files that are synced before the last of their content is written."""

    def finish(self, stream):
        os.fsync(stream.fileno())
        stream.close()


class RenameUnsynced(LocalFiles):
    def sync_folder(self, key):
        if "/" in key:
            super().sync_folder(key)


def looks_at(*, parameters=False, buffers=False):
    """Return a check of a state that looks at the loss and at some tensors alone."""

    def wrong(state, metrics, **_):
        tensors = [value for value in metrics.values() if isinstance(value, torch.Tensor)]
        tensors += [torch.tensor(value) for value in metrics.values() if isinstance(value, float)]
        model = getattr(state, "state", state).model
        tensors += [*model.parameters()] if parameters else []
        tensors += [*model.buffers()] if buffers else []
        return None if all(bool(one.isfinite().all()) for one in tensors) else "not finite"

    return wrong


def refuses_masks(state, metrics, **options):
    """Check rightly, and refuse each infinite buffer as well."""
    model = getattr(state, "state", state).model
    is_infinite = any(bool(buffer.isinf().any()) for buffer in model.buffers())
    return what_is_wrong(state, metrics, **options) or ("a mask" if is_infinite else None)


class DeletesTheBest(SavingPolicy):
    def _superseded(self, step):
        best = [saved for saved in self._there() if saved.kind == "best-k"]
        return [*super()._superseded(step), *best[:1]]


class DeletesNothing(SavingPolicy):
    def _superseded(self, step):
        return []


class KeepsOneLess(SavingPolicy):
    def __init__(self, store, config, **options):
        fewer = dataclasses.replace(config.retention, rollback_keep=1)
        super().__init__(store, dataclasses.replace(config, retention=fewer), **options)


FAULTS = [
    planted(
        "checkpoint-policy.killed",
        "over-the-old",
        parts=StoreComponents(commit=over_the_old),
        hint="interrupted at change",
    ),
    planted(
        "checkpoint-policy.killed",
        "old-one-first",
        parts=StoreComponents(commit=old_one_first),
        hint="no checkpoint is left",
    ),
    planted(
        "checkpoint-policy.killed",
        "without-manifest",
        parts=StoreComponents(commit=without_manifest),
        hint="no checkpoint is left",
    ),
    planted(
        "checkpoint-policy.model",
        "without-model",
        parts=StoreComponents(state=WithoutModel),
        hint="not restored: model",
    ),
    planted(
        "checkpoint-policy.model",
        "without-gradients",
        parts=StoreComponents(state=not_restored(lambda state: None, gradients_dropped)),
        hint="gradient",
    ),
    planted(
        "checkpoint-policy.optimizer",
        "without-optimizer",
        parts=StoreComponents(state=WithoutOptimizer),
        hint="not restored|raised",
    ),
    planted(
        "checkpoint-policy.optimizer",
        "second-moment-anew",
        parts=StoreComponents(state=SecondMomentAnew),
        hint="exp_avg_sq",
    ),
    planted(
        "checkpoint-policy.optimizer",
        "rate-kept",
        parts=StoreComponents(state=not_restored(rates, rate_kept)),
        hint="lr",
    ),
    planted(
        "checkpoint-policy.schedule",
        "not-saved",
        parts=StoreComponents(state=without_argument("scheduler")),
        hint="scheduler",
    ),
    planted(
        "checkpoint-policy.scaler",
        "not-saved",
        parts=StoreComponents(state=without_argument("scaler")),
        hint="scaler",
    ),
    planted(
        "checkpoint-policy.extra",
        "not-saved",
        parts=StoreComponents(state=without_argument("extra")),
        hint="extra",
    ),
    planted(
        "checkpoint-policy.generators",
        "none",
        parts=StoreComponents(state=WithoutRandom),
        hint="generator",
    ),
    planted(
        "checkpoint-policy.generators",
        "own",
        parts=StoreComponents(state=without_argument("generators")),
        hint="generator['own']",
    ),
    planted(
        "checkpoint-policy.generators",
        "python",
        parts=StoreComponents(
            state=not_restored(
                lambda state: random.getstate(), lambda state, held: random.setstate(held)
            )
        ),
        hint="generator['python']",
    ),
    planted(
        "checkpoint-policy.generators",
        "numpy",
        parts=StoreComponents(
            state=not_restored(
                lambda state: numpy.random.get_state(),
                lambda state, held: numpy.random.set_state(held),
            )
        ),
        hint="generator['numpy']",
    ),
    planted(
        "checkpoint-policy.counters",
        "position",
        parts=StoreComponents(state=counter("position")),
        hint="position",
    ),
    planted(
        "checkpoint-policy.counters",
        "microstep",
        parts=StoreComponents(state=counter("microstep")),
        hint="microstep|gradient",
    ),
    planted(
        "checkpoint-policy.flipped-bit",
        "nothing",
        parts=StoreComponents(verify=nothing),
        hint="was not detected",
    ),
    planted(
        "checkpoint-policy.flipped-bit",
        "sizes-only",
        parts=StoreComponents(verify=sizes_only),
        hint="was not detected",
    ),
    planted(
        "checkpoint-policy.flipped-bit",
        "data-files-only",
        parts=StoreComponents(verify=data_files_only),
        hint="was not detected",
    ),
    planted(
        "checkpoint-policy.flipped-bit",
        "manifest-unhashed",
        parts=StoreComponents(verify=without_the_manifests_own_hash),
        hint="of manifest.json was not detected",
    ),
    planted(
        "checkpoint-policy.no-call",
        "as-torch-loads",
        parts=StoreComponents(load=as_torch_loads),
        hint="called|a call",
    ),
    planted(
        "checkpoint-policy.no-call",
        "unpickled-first",
        parts=StoreComponents(load=unpickled_first),
        hint="was called",
    ),
    planted(
        "checkpoint-policy.no-call",
        "all-of-torch",
        parts=StoreComponents(load=lenient(lambda module, name: module.split(".")[0] == "torch")),
        hint="was called",
    ),
    planted(
        "checkpoint-policy.no-call",
        "torch-itself",
        parts=StoreComponents(load=lenient(lambda module, name: module == "torch")),
        hint="was called",
    ),
    planted(
        "checkpoint-policy.no-call",
        "checkpoint-package",
        parts=StoreComponents(
            load=lenient(lambda module, name: module.startswith("torch.distributed.checkpoint"))
        ),
        hint="was called",
    ),
    planted(
        "checkpoint-policy.no-call",
        "serialization",
        parts=StoreComponents(load=lenient(lambda module, name: module == "torch.serialization")),
        hint="was called",
    ),
    planted(
        "checkpoint-policy.no-call",
        "builtins",
        parts=StoreComponents(load=lenient(lambda module, name: module == "builtins")),
        hint="was called",
    ),
    planted(
        "checkpoint-policy.no-call",
        "numpy",
        parts=StoreComponents(load=lenient(lambda module, name: module.startswith("numpy"))),
        hint="was called",
    ),
    planted(
        "checkpoint-policy.no-call",
        "all-but-os",
        parts=StoreComponents(
            load=lenient(lambda module, name: module not in ("os", "posix", "subprocess"))
        ),
        hint="was called",
    ),
    planted(
        "checkpoint-policy.no-path",
        "every-path",
        parts=StoreComponents(load=every_path),
        hint="called|a call|raised",
    ),
    planted("checkpoint-policy.background", "no-wait", saver=NoWait, hint="wait for the copies"),
    planted("checkpoint-policy.background", "no-hook", saver=NoHook, hint="wait for the copies"),
    planted(
        "checkpoint-policy.background",
        "never-finished",
        saver=NeverFinished,
        hint="wait until the save",
    ),
    planted("checkpoint-policy.power-cut", "unsynced", files=Unsynced, hint="not synced"),
    planted(
        "checkpoint-policy.power-cut", "folders-unsynced", files=FoldersUnsynced, hint="not synced"
    ),
    planted(
        "checkpoint-policy.power-cut",
        "rename-unsynced",
        files=RenameUnsynced,
        hint="after the rename",
    ),
    planted("checkpoint-policy.power-cut", "too-early", files=SyncedTooEarly, hint="not synced"),
    planted(
        "checkpoint-policy.finite",
        "loss-alone",
        patches=[(policy, "what_is_wrong", looks_at())],
        hint="NaN in a parameter",
    ),
    planted(
        "checkpoint-policy.finite",
        "parameters-alone",
        patches=[(policy, "what_is_wrong", looks_at(parameters=True))],
        hint="NaN in a buffer",
    ),
    planted(
        "checkpoint-policy.masks",
        "every-buffer",
        patches=[(policy, "what_is_wrong", refuses_masks)],
        hint="sound state was not saved",
    ),
    planted(
        "checkpoint-policy.deletes-old",
        "nothing",
        policy=DeletesNothing,
        hint="the rollbacks are|the best are",
    ),
    planted(
        "checkpoint-policy.deletes-old", "one-less", policy=KeepsOneLess, hint="the rollbacks are"
    ),
    planted(
        "checkpoint-policy.best-stays",
        "deletes-the-best",
        policy=DeletesTheBest,
        hint="the best are",
    ),
    planted(
        "checkpoint-policy.reader-stays",
        "ignores-readers",
        patches=[(policy, "is_being_read", lambda files, folder: False)],
        hint="the rollbacks are",
    ),
]
