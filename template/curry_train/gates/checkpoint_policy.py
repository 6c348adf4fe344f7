"""A checkpoint is whole or not there, comes back to the bit, shows every damage, and runs nothing when it is read.

Each gate takes the part of the store that it is about, so that its tests can plant a wrong one.
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
NUM_FLIPS_OF_MANIFEST = (
    80  # most of its bits are in hashes, whose change shows in any case; the others are few
)
NUM_FAILURES = 40
LARGEST = 2**30  # bytes of a state that is saved, or read, dozens of times in a gate
KIND = "rollback"


def committed(case: Case, *, parts: Parts = SOUND) -> Verdict:
    """A save of step 2 is interrupted at each change that it makes on the disk; step 1 is there before."""
    gate, required = (
        "checkpoint-policy/committed",
        "of each, the newest that counts is whole and is what was saved",
    )
    with trained(case, parts) as (state, folder):
        expected = {1: tensors_of(state)}
        if too_large := _too_large(expected[1]):
            return not_applicable(gate, required=required, why=too_large)
        interruptions, wrong = 0, list[str]()
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
                    with torch.no_grad():
                        original = [parameter.clone() for parameter in state.model.parameters()]
                        for parameter in state.model.parameters():
                            parameter.add_(1)
                        expected[2] = tensors_of(state)
                        store.save(KIND, 2, state)
                    break
                except (SaveError, Interrupted):
                    interruptions += 1
                finally:
                    files.left = None
                    with torch.no_grad():
                        for parameter, value in zip(
                            state.model.parameters(), original, strict=True
                        ):
                            parameter.copy_(value)
            wrong += _judged(case, parts, files.root, expected, f"interrupted at change {left + 1}")
        else:
            wrong.append(f"it was not done after {NUM_FAILURES} changes")
    measured = f"{interruptions} interruptions, {len(wrong)} wrong"
    hint = f"{wrong[0]}: write beside, sync, and rename once the manifest holds" if wrong else ""
    if not wrong and interruptions < 3:
        hint = (
            "the save changes the disk in so few places that it can't be one that syncs and renames"
        )
    return Verdict(gate, not hint, measured, required, hint)


def bitwise(case: Case, *, parts: Parts = SOUND) -> Verdict:
    """Saved after one step, loaded into a fresh model and optimizer: the state, and the step that follows."""
    gate, required = "checkpoint-policy/bitwise", "state and next step equal to the bit"
    with trained(case, parts) as (state, folder):
        with Store(folder) as store:
            saved = store.save(KIND, 1, state)
        expected = tensors_of(state)
        ahead, after = train_step(case, state), tensors_of(state)
        other = new_state(case, parts, seed=case.seed + 1)
        parts.load(SavedRun(folder), saved.folder, other)
        differing = [
            name for name, held in tensors_of(other).items() if not same(held, expected.get(name))
        ]
        differing += sorted(expected.keys() - tensors_of(other).keys())

        def goes_on(fresh: Any) -> bool:
            loss = train_step(case, fresh)
            return torch.equal(ahead, loss) and all(
                same(held, after.get(name)) for name, held in tensors_of(fresh).items()
            )

        same_step = goes_on(other)
        told = "equal" if same_step else "not equal"
        if not differing and not same_step and not _repeats(case, parts, folder, saved.folder):
            same_step, told = True, "not repeatable on this device"
    measured = (
        f"{len(expected) - len(differing)} of {len(expected)} tensors equal, next step {told}"
    )
    hint = ""
    if differing or not same_step:
        hint = f"not saved, or not put back: {', '.join(differing[:3]) or 'a generator, or state of the model itself'}"
    return Verdict(gate, not hint, measured, required, hint)


def damage(case: Case, *, parts: Parts = SOUND) -> Verdict:
    """One bit at a time is flipped in the files of a checkpoint, the manifest and the index among them."""
    gate, required = "checkpoint-policy/damage", "all found before loading"
    generator, missed, flips = random.Random(case.seed), list[str](), 0
    with trained(case, parts) as (state, folder):
        if too_large := _too_large(tensors_of(state)):
            return not_applicable(gate, required=required, why=too_large)
        with Store(folder) as store:
            saved = store.save(KIND, 1, state)
        reader = SavedRun(folder)
        paths = sorted((folder / saved.folder).iterdir())
        parts.verify(reader, saved.folder)
        for path in [
            *(paths * NUM_FLIPS)[:NUM_FLIPS],
            *[folder / saved.folder / MANIFEST] * NUM_FLIPS_OF_MANIFEST,
        ]:
            place, bit = generator.randrange(path.stat().st_size), generator.randrange(8)
            with _flipped(path, place, bit):
                flips += 1
                try:
                    parts.verify(reader, saved.folder)
                except DamagedCheckpoint:
                    continue
            missed.append(f"bit {bit} of byte {place} of {path.name}")
    measured = f"{flips - len(missed)} of {flips} flipped bits found"
    hint = (
        f"{missed[0]} was not seen: hash every file, and the whole manifest too" if missed else ""
    )
    return Verdict(gate, not missed, measured, required, hint)


def hostile(case: Case, *, parts: Parts = SOUND) -> Verdict:
    """Checkpoints with right hashes whose index would call a function, or place a tensor in a file elsewhere."""
    gate, required = "checkpoint-policy/hostile", "all refused, nothing called, nothing changed"
    wrong = []
    with trained(case, parts) as (state, folder):
        with Store(folder) as store:
            saved = store.save(KIND, 1, state)
        metadata = pickle.loads(
            (folder / saved.folder / METADATA).read_bytes()
        )  # our own, just written
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
            except Exception as error:  # noqa: BLE001 - a reader that breaks later than it should have refused
                wrong.append(f"{name} led to {type(error).__name__}")
        if (folder / "called").exists():
            wrong.append("the index's function was called")
        if any(not same(held, before.get(name)) for name, held in tensors_of(other).items()):
            wrong.append("the state was changed")
    hint = (
        f"{wrong[0]}: unpickle by an allow-list, and read no file that the manifest does not name"
        if wrong
        else ""
    )
    return Verdict(gate, not wrong, f"{len(attacks)} attacks, {len(wrong)} wrong", required, hint)


GATES = (
    Gate("checkpoint-policy/committed", committed),
    Gate("checkpoint-policy/bitwise", bitwise),
    Gate("checkpoint-policy/damage", damage),
    Gate("checkpoint-policy/hostile", hostile),
)


class _Call:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _too_large(tensors: dict[str, Tensor]) -> str:
    size = sum(tensor.nbytes for tensor in tensors.values())
    return (
        f"the state has {size / 2**30:.1f} GiB, and would be written dozens of times"
        if size > LARGEST
        else ""
    )


def _repeats(case: Case, parts: Parts, folder: Path, saved: str) -> bool:
    """Whether two loads of one checkpoint go on alike."""
    losses, states = [], []
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
        return [f"{when}, nothing is left"]
    other = new_state(case, parts, seed=case.seed + 1)
    try:
        reader.load(newest, other)
    except DamagedCheckpoint as error:
        return [f"{when}, {error}"]
    found = tensors_of(other)
    mixed = [
        name for name, held in found.items() if not same(held, expected[newest.step].get(name))
    ]
    return [f"{when}, step {newest.step} is not what was saved"] if mixed else []


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
    """Put another index into a checkpoint, and make the hashes fit: they tell damage, not who wrote."""
    manifest = read_manifest(reader.files, folder)
    entry = FileEntry(len(data), hash_bytes(manifest.algorithm, data))
    forged = replace(manifest, files={**manifest.files, METADATA: entry})
    for name, content in ((METADATA, data), (MANIFEST, forged.render())):
        Path(reader.files.location(f"{folder}/{name}")).write_bytes(content)
