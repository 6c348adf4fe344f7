"""Check that flipped, cut, missing and swapped files are refused before anything changes.

After each fault the newest state that is still whole loads as it was saved.
Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from store_models import equal, new_state, tensors_of, train

from curry_train.runs import DamagedCheckpoint, SavedRun, Store, TrainingState, load_chosen
from curry_train.runs.layout import BEST_KIND, CHECKPOINT_KINDS

NUM_STATES = 3


@dataclass(frozen=True)
class Damage:
    """Contents that files get, None for a missing one, in how many of the newest states."""

    part: str
    name: str
    files: dict[Path, bytes | None]
    states: int = 1


def held_by(state: TrainingState) -> dict[str, torch.Tensor]:
    """Return copies of what a load changes."""
    return {**tensors_of(state), "the generator": torch.get_rng_state()}


@dataclass
class Subject:
    """A run with three checkpoints of a kind, and what was saved in each."""

    root: Path
    kind: str
    state: TrainingState = field(default_factory=new_state)
    folders: list[Path] = field(default_factory=list)
    saved: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        state = new_state()
        with Store(self.root) as store:
            for step in range(1, NUM_STATES + 1):
                train(state, 1)
                metric = ("dev_loss", 1.0 / step) if self.kind == BEST_KIND else None
                done = store.save(self.kind, step, state, metric=metric)
                self.folders.append(self.root / done.folder)
                self.saved.append(held_by(state))

    def files(self) -> list[Path]:
        return sorted(self.folders[-1].iterdir())

    def faults(self, damaged: int) -> list[str]:
        """List what is wrong while so many of the newest states are damaged."""
        run, wrong, before = SavedRun(self.root), list[str](), held_by(self.state)
        for path in self.folders[NUM_STATES - damaged :]:
            folder = f"{self.kind}/{path.name}"
            for act in (run.verify, lambda folder: run.load(folder, self.state)):
                try:
                    act(folder)
                    wrong.append(f"{folder} was taken for whole")
                except DamagedCheckpoint:
                    continue
                except Exception as error:  # noqa: BLE001 - unforeseen errors are looked for
                    wrong.append(f"{folder} was met with {type(error).__name__}: {error}")
        if not equal(before, held_by(self.state)):
            wrong.append("it was refused after something was changed")
        return wrong + self._goes_on(NUM_STATES - 1 - damaged)

    def _goes_on(self, newest: int) -> list[str]:
        """Load what training continues from, and return every error in it."""
        for parameter in self.state.model.parameters():
            parameter.data.fill_(7.0)
        torch.manual_seed(1)
        what = "best" if self.kind == BEST_KIND else "latest"
        try:
            loaded = load_chosen(self.root, self.state, what).saved.step
        except Exception as error:  # noqa: BLE001
            return [f"nothing loads: {type(error).__name__}: {error}"]
        if loaded != newest + 1:
            return [f"step {loaded} was loaded, and {newest + 1} is the newest that is whole"]
        # The best of the models is loaded without its optimizer and generators.
        prefix = "model." if self.kind == BEST_KIND else ""
        wanted = {name: one for name, one in self.saved[newest].items() if name.startswith(prefix)}
        found = {name: one for name, one in held_by(self.state).items() if name in wanted}
        return [] if equal(found, wanted) else [f"step {loaded} is not what was saved"]


def flipped(subject: Subject, generator: random.Random, count: int) -> Iterator[Damage]:
    """Flip bits, equally many in each file, including its first and last byte."""
    for path in subject.files():
        data = path.read_bytes()
        places = [0, len(data) - 1, *(generator.randrange(len(data)) for _ in range(count))]
        for place in places[:count]:
            changed = bytearray(data)
            changed[place] ^= 1 << generator.randrange(8)
            yield Damage("flips", f"{path.name}, byte {place}", {path: bytes(changed)})


def cut(subject: Subject, generator: random.Random) -> Iterator[Damage]:
    for path in subject.files():
        data = path.read_bytes()
        lengths = {0, 1, len(data) // 2, len(data) - 1}
        lengths |= {generator.randrange(len(data)) for _ in range(10)}
        for length in sorted(lengths):
            yield Damage("cuts", f"{path.name}, {length} bytes", {path: data[:length]})
        yield Damage("cuts", f"{path.name}, longer", {path: data + b"\0"})
        yield Damage("cuts", f"{path.name}, twice", {path: data + data})
        yield Damage("cuts", f"{path.name}, missing", {path: None})


def swapped(subject: Subject, others: list[Subject]) -> Iterator[Damage]:
    """Exchange files with the state before and with other kinds; their own hashes are right."""
    every = dict[Path, bytes | None]()
    for path in subject.files():
        data, before = path.read_bytes(), subject.folders[-2] / path.name
        if before.read_bytes() != data:
            there = {path: before.read_bytes()}
            yield Damage("swaps", f"{path.name} of the state before", there)
            yield Damage("swaps", f"{path.name} with the state before", there | {before: data}, 2)
            every |= there | {before: data}
        for other in others:
            theirs = other.folders[-1] / path.name
            if theirs.exists() and theirs.read_bytes() != data:
                yield Damage("swaps", f"{path.name} of {other.kind}", {path: theirs.read_bytes()})
    yield Damage("swaps", "the folders", every, 2)


def damage(
    root: Path, flips: int, every: int, seed: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Try the damages, or each nth of those that are not flips; count them by their part."""
    generator = random.Random(seed)
    subjects = [Subject(root / kind, kind) for kind in CHECKPOINT_KINDS]
    each = -(-flips // sum(len(subject.files()) for subject in subjects))
    counts, wrong = Counter[str](), dict[str, list[str]]()
    for subject in subjects:
        others = [other for other in subjects if other is not subject]
        rest = [*cut(subject, generator), *swapped(subject, others)]
        for one in [*flipped(subject, generator, each), *rest[::every]]:
            before = {path: path.read_bytes() for path in one.files}
            for path, data in one.files.items():
                path.unlink() if data is None else path.write_bytes(data)
            faults = subject.faults(one.states)
            for path, data in before.items():
                path.write_bytes(data)
            counts[one.part] += 1
            found = wrong.setdefault(one.part, [])
            found += [f"{subject.kind}, {one.name}: {fault}" for fault in faults]
            progress(counts.total())
        wrong["flips"] += [f"{subject.kind}, put back: {one}" for one in subject.faults(0)]
    return {part: {part: number, "wrong": wrong[part]} for part, number in counts.items()}
