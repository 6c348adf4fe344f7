"""Gates of checkpoints: atomic commits, bitwise resume, detected damage, safe reading.

Each gate takes the component of the store that it checks, so that its tests can plant a wrong one.

Proof: `python -m pytest tests/test_checkpoint_policy.py`.
"""

import contextlib
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.verdict import Gate, Verdict, not_applicable
from ..core.workload import Case
from ..runs.digests import hash_bytes
from ..runs.errors import DamagedCheckpoint, HostileCheckpoint, SaveError
from ..runs.hashing_writer import METADATA
from ..runs.manifest import MANIFEST, FileEntry, read_manifest
from ..runs.saved_run import SavedRun
from ..runs.store import Store
from ..runs.trial import (
    SOUND,
    Interrupted,
    InterruptedFiles,
    Parts,
    new_state,
    same,
    tensors_of,
    train_step,
    trained,
)
from ..runs.writing import Writing

NUM_FLIPS = 40
# Most bits of the manifest are in hashes, where any change is detected; only a few are elsewhere.
NUM_FLIPS_OF_MANIFEST = 80
NUM_FAILURES = 40
# In bytes: a gate writes or reads the state dozens of times.
LARGEST = 2**30
KIND = "rollback"


def committed(case: Case, *, parts: Parts = SOUND) -> Verdict:
    """Interrupt the save of step 2 at each change it makes on the disk, after a save of step 1."""
    gate = "checkpoint-policy/committed"
    required = "after each, the newest committed checkpoint is complete and as saved"
    with trained(case, parts) as (state, folder):
        expected = {1: tensors_of(state)}
        if too_large := _too_large(expected[1]):
            return not_applicable(gate, required=required, why=too_large)
        num_interruptions = 0
        wrong = list[str]()
        with Store(folder / "first") as store:
            _commit_by(store, parts).save(KIND, 1, state)
        for left in range(NUM_FAILURES):
            files = InterruptedFiles(
                shutil.copytree(folder / "first", folder / str(left), symlinks=True)
            )
            with Store(files.root, files=files) as store:
                _commit_by(store, parts)
                files.left = left
                try:
                    with _parameters_changed(state.model):
                        expected[2] = tensors_of(state)
                        store.save(KIND, 2, state)
                    break
                except (SaveError, Interrupted):
                    num_interruptions += 1
                finally:
                    files.left = None
            wrong += _judged(case, parts, files.root, expected, f"interrupted at change {left + 1}")
        else:
            wrong.append(f"the save did not finish within {NUM_FAILURES} changes")

    measured = f"{num_interruptions} interruptions, {len(wrong)} wrong"
    hint = ""
    if wrong:
        hint = f"{wrong[0]}: write to a temporary folder, sync, write the manifest, and rename"
    elif num_interruptions < 3:
        hint = "the save makes fewer than 3 changes on the disk, so it can't sync and rename"
    return Verdict(gate, not hint, measured, required, hint)


def bitwise(case: Case, *, parts: Parts = SOUND) -> Verdict:
    """Load a checkpoint into a fresh model and optimizer; compare the state and the next step."""
    gate = "checkpoint-policy/bitwise"
    required = "state and next step equal to the bit"
    with trained(case, parts) as (state, folder):
        with Store(folder) as store:
            saved = store.save(KIND, 1, state)
        expected = tensors_of(state)
        next_loss = train_step(case, state)
        after_next = tensors_of(state)

        other = new_state(case, parts, seed=case.seed + 1)
        parts.load(SavedRun(folder), saved.folder, other)
        differing = [
            name for name, held in tensors_of(other).items() if not same(held, expected.get(name))
        ]
        differing += sorted(expected.keys() - tensors_of(other).keys())

        other_loss = train_step(case, other)
        is_next_step_right = torch.equal(next_loss, other_loss) and all(
            same(held, after_next.get(name)) for name, held in tensors_of(other).items()
        )
        comparison = "equal" if is_next_step_right else "not equal"
        is_only_step_wrong = not differing and not is_next_step_right
        if is_only_step_wrong and not _repeats(case, parts, folder, saved.folder):
            is_next_step_right = True
            comparison = "not repeatable on this device"

    num_equal = len(expected) - len(differing)
    measured = f"{num_equal} of {len(expected)} tensors equal, next step {comparison}"
    hint = ""
    if differing or not is_next_step_right:
        missing = ", ".join(differing[:3]) or "a generator, or state of the model itself"
        hint = f"not saved, or not restored: {missing}"
    return Verdict(gate, not hint, measured, required, hint)


def damage(case: Case, *, parts: Parts = SOUND) -> Verdict:
    """Flip one bit at a time in the files of a checkpoint, including its manifest and index."""
    gate = "checkpoint-policy/damage"
    required = "all detected before loading"
    generator = random.Random(case.seed)
    missed = list[str]()
    num_flips = 0
    with trained(case, parts) as (state, folder):
        if too_large := _too_large(tensors_of(state)):
            return not_applicable(gate, required=required, why=too_large)

        with Store(folder) as store:
            saved = store.save(KIND, 1, state)
        reader = SavedRun(folder)
        parts.verify(reader, saved.folder)

        paths = sorted((folder / saved.folder).iterdir())
        targets = (paths * NUM_FLIPS)[:NUM_FLIPS]
        targets += [folder / saved.folder / MANIFEST] * NUM_FLIPS_OF_MANIFEST
        for path in targets:
            place = generator.randrange(path.stat().st_size)
            bit = generator.randrange(8)
            with _flipped(path, place, bit):
                num_flips += 1
                try:
                    parts.verify(reader, saved.folder)
                except DamagedCheckpoint:
                    continue
            missed.append(f"bit {bit} of byte {place} of {path.name}")

    measured = f"{num_flips - len(missed)} of {num_flips} flipped bits detected"
    hint = ""
    if missed:
        hint = f"{missed[0]} was not detected: hash every file, and the whole manifest too"
    return Verdict(gate, not missed, measured, required, hint)


def hostile(case: Case, *, parts: Parts = SOUND) -> Verdict:
    """Load forged checkpoints with valid hashes.

    One index calls a function when it is unpickled; the other names a file outside the checkpoint.
    """
    gate = "checkpoint-policy/hostile"
    required = "all refused, nothing called, nothing changed"
    wrong = []
    with trained(case, parts) as (state, folder):
        with Store(folder) as store:
            saved = store.save(KIND, 1, state)
        # Unpickling is safe here: this process has just written the file.
        metadata = pickle.loads((folder / saved.folder / METADATA).read_bytes())
        place = next(iter(metadata.storage_data.values()))
        attacks = {"a call in the index": replace(metadata, planner_data=_Call(folder / "called"))}
        place.relative_path = "../../../elsewhere"
        attacks["a file elsewhere"] = metadata

        other = new_state(case, parts, seed=case.seed + 1)
        before = tensors_of(other)
        for name, forged in attacks.items():
            _forge(SavedRun(folder), saved.folder, pickle.dumps(forged))
            try:
                parts.load(SavedRun(folder), saved.folder, other)
                wrong.append(f"{name} was loaded")
            except HostileCheckpoint:
                pass
            except Exception as error:  # noqa: BLE001 - a reader may fail later, with any error
                wrong.append(f"{name} raised {type(error).__name__}")

        if (folder / "called").exists():
            wrong.append("the index's function was called")
        if any(not same(held, before.get(name)) for name, held in tensors_of(other).items()):
            wrong.append("the state was changed")
    hint = ""
    if wrong:
        hint = f"{wrong[0]}: unpickle with an allow-list, and read only files in the manifest"
    return Verdict(gate, not wrong, f"{len(attacks)} attacks, {len(wrong)} wrong", required, hint)


GATES = (
    Gate("checkpoint-policy/committed", committed),
    Gate("checkpoint-policy/bitwise", bitwise),
    Gate("checkpoint-policy/damage", damage),
    Gate("checkpoint-policy/hostile", hostile),
)


@contextlib.contextmanager
def _parameters_changed(model: Any) -> Iterator[None]:
    """Add 1 to every parameter inside the context, which runs without grad mode."""
    with torch.no_grad():
        original = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.add_(1)
        try:
            yield
        finally:
            for parameter, value in zip(model.parameters(), original, strict=True):
                parameter.copy_(value)


class _Call:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _too_large(tensors: dict[str, Tensor]) -> str:
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size <= LARGEST:
        return ""
    return f"the state takes {size / 2**30:.1f} GiB, and would be written dozens of times"


def _repeats(case: Case, parts: Parts, folder: Path, saved: str) -> bool:
    """Whether the step after two loads of one checkpoint is the same."""
    losses = []
    states = []
    for _ in range(2):
        fresh = new_state(case, parts, seed=case.seed + 1)
        parts.load(SavedRun(folder), saved, fresh)
        losses.append(train_step(case, fresh))
        states.append(tensors_of(fresh))
    return torch.equal(*losses) and all(
        same(held, states[1].get(name)) for name, held in states[0].items()
    )


def _commit_by(store: Store, parts: Parts) -> Store:
    if parts.commit is not Writing.commit:
        begin = store.begin

        def begun(*args: Any, **options: Any) -> Any:
            writing: Any = begin(*args, **options)
            writing.commit = lambda given: parts.commit(writing, given)
            return writing

        store.begin = begun  # type: ignore[method-assign]
    return store


def _judged(case: Case, parts: Parts, root: Path, expected: dict[int, Any], when: str) -> list[str]:
    reader = SavedRun(root)
    newest = reader.latest()
    if newest is None:
        return [f"{when}, no checkpoint is left"]

    other = new_state(case, parts, seed=case.seed + 1)
    try:
        reader.load(newest, other)
    except DamagedCheckpoint as error:
        return [f"{when}, {error}"]
    found = tensors_of(other)
    mixed = [
        name for name, held in found.items() if not same(held, expected[newest.step].get(name))
    ]
    return [f"{when}, step {newest.step} differs from what was saved"] if mixed else []


@contextlib.contextmanager
def _flipped(path: Path, place: int, bit: int) -> Iterator[None]:
    with path.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 1 << bit]))
    try:
        yield
    finally:
        with path.open("r+b") as stream:
            stream.seek(place)
            stream.write(bytes([byte]))


def _forge(reader: SavedRun, folder: str, data: bytes) -> None:
    """Replace the index of a checkpoint and recompute its hashes, which detect damage only."""
    manifest = read_manifest(reader.files, folder)
    entry = FileEntry(len(data), hash_bytes(manifest.algorithm, data))
    forged = replace(manifest, files={**manifest.files, METADATA: entry})
    for name, content in ((METADATA, data), (MANIFEST, forged.render())):
        Path(reader.files.location(f"{folder}/{name}")).write_bytes(content)
