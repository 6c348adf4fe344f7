"""Check that flipped, cut, missing and swapped files are refused before anything changes.

After each fault the previous state loads bit-equal.
Proof: `python -m pytest tests/benchmarks/test_torture.py`.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curry_train.runs import DamagedCheckpoint, SavedRun, Store, load_chosen
from curry_train.runs.layout import BEST_KIND
from torture_ranks import start
from torture_training import Training

NUM_STATES = 3
TWO_RANKS = "two-ranks"


@dataclass(frozen=True)
class Subject:
    """A run with three checkpoints of a kind, and the training after loading each."""

    name: str
    root: Path
    loaded: dict[int, str]

    @property
    def kind(self) -> str:
        return "rollback" if self.name == TWO_RANKS else self.name

    @property
    def what(self) -> str:
        return "best" if self.kind == BEST_KIND else "latest"

    def folder(self, step: int) -> Path:
        return next(self.root.glob(f"{self.kind}/*step-{step:08d}.dcp"))

    def hash_of(self, training: Training) -> str:
        return training.live(model_only=self.kind == BEST_KIND)

    def files(self) -> list[Path]:
        return sorted(self.folder(NUM_STATES).iterdir())

    def faults(self, training: Training, *, newest: int = NUM_STATES - 1) -> list[str]:
        """List what is wrong when the last state is damaged; `newest` is the newest intact one."""
        run = SavedRun(self.root)
        wrong = []
        folder = f"{self.kind}/{self.folder(NUM_STATES).name}"
        before = training.live()
        for act in (run.verify, lambda folder: run.load(folder, training.state)):
            try:
                act(folder)
                wrong.append("it was taken for whole")
            except DamagedCheckpoint:
                continue
            except Exception as error:  # noqa: BLE001 - unforeseen errors are what this looks for
                wrong.append(f"it was met with {type(error).__name__}: {error}")
        if training.live() != before:
            wrong.append("it was refused after something was changed")
        return wrong + self.goes_on(training, newest)

    def goes_on(self, training: Training, newest: int) -> list[str]:
        """Load the state that training continues from and return every error in it."""
        _forget(training)
        try:
            step = load_chosen(self.root, training.state, self.what).saved.step
        except Exception as error:  # noqa: BLE001
            return [f"nothing loads: {type(error).__name__}: {error}"]
        if step != newest:
            return [f"step {step} was loaded, and {newest} is the newest that is whole"]
        return (
            []
            if self.hash_of(training) == self.loaded[step]
            else [f"step {step} is not what was saved"]
        )


def _forget(training: Training) -> None:
    """Change every parameter and generator, so that a load has something to restore."""
    for parameter in training.state.model.parameters():
        parameter.data.fill_(7.0)
    training.order.manual_seed(1)


def subjects(root: Path) -> list[Subject]:
    """Make a run of each kind saved by one rank, and one saved by two."""
    found, reported = [], dict[int, tuple[str, str]]()
    for name in ("rollback", "recovery", BEST_KIND, TWO_RANKS):
        folder = root / name
        if name == TWO_RANKS:
            ranks = start(2, save_all, folder=folder, kind="rollback")
            ranks.end()
            if any(ranks.statuses.values()):
                raise RuntimeError(f"two ranks could not save: {ranks.reports}")
        else:
            save_all(
                0,
                1,
                lambda word, what: reported.update({what[0]: what[1:]}),
                folder=folder,
                kind=name,
            )
        subject, run = Subject(name, folder, {}), SavedRun(folder)
        for saved in run.committed("rollback" if name == TWO_RANKS else name):
            training = Training()
            _forget(training)
            run.load(saved, training.state)
            subject.loaded[saved.step] = subject.hash_of(training)
            if name != TWO_RANKS and subject.loaded[saved.step] not in reported[saved.step]:
                raise RuntimeError(
                    f"{saved.location} differs from the saved state before any damage"
                )
        found.append(subject)
    return found


def save_all(rank: int, world: int, say: Callable[..., None], *, folder: Path, kind: str) -> None:
    training = Training(rank, world)
    with Store(folder) as store:
        for step in range(1, NUM_STATES + 1):
            training.step()
            say("saved", (step, training.live(), training.live(model_only=True)))
            store.save(
                kind,
                step,
                training.state,
                metric=("dev_loss", 1.0 / step) if kind == BEST_KIND else None,
            )


@contextmanager
def put_back(path: Path) -> Iterator[bytes]:
    """Return the bytes of a file, and restore them afterwards."""
    data = path.read_bytes()
    try:
        yield data
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(data)


def flips(
    every: list[Subject], number: int, *, seed: int = 0, progress: Callable[[int], None] = print
) -> dict[str, Any]:
    """Flip single bits, equally many in each file, including its first and last byte."""
    generator = random.Random(seed)
    by_file = dict[str, int]()
    wrong = []
    training = Training()
    files = [(subject, path) for subject in every for path in subject.files()]
    for subject, path in files:
        with put_back(path) as data:
            share = -(-number // len(files))
            places = [0, len(data) - 1, *(generator.randrange(len(data)) for _ in range(share - 2))]
            for place in places[:share]:
                bit = generator.randrange(8)
                path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
                by_file[f"{subject.name}/{path.name}"] = (
                    by_file.get(f"{subject.name}/{path.name}", 0) + 1
                )
                wrong += [
                    f"{subject.name}/{path.name} bit {bit} of byte {place}: {fault}"
                    for fault in subject.faults(training)
                ]
        progress(sum(by_file.values()))
    wrong += [
        f"{subject.name}: {fault}"
        for subject in every
        for fault in subject.goes_on(training, NUM_STATES)
    ]
    return {
        "flips": sum(by_file.values()),
        "files": len(by_file),
        "each_file": min(by_file.values()),
        "wrong": wrong,
    }


def cut(every: list[Subject], lengths: int, *, seed: int = 0, stride: int = 1) -> dict[str, Any]:
    """Cut each file at several lengths, make it longer, and remove it."""
    generator = random.Random(seed)
    wrong = []
    training = Training()
    counts = {"truncated": 0, "longer": 0, "missing": 0}
    for subject in every:
        for path in subject.files():
            with put_back(path) as data:
                kept = {
                    0,
                    1,
                    len(data) // 2,
                    len(data) - 1,
                    *(generator.randrange(len(data)) for _ in range(lengths)),
                }
                trials: list[tuple[str, bytes | None]] = [
                    ("truncated", data[:length]) for length in sorted(kept)
                ]
                trials += [("longer", data + b"\0"), ("longer", data + data), ("missing", None)]
                for how, content in trials[seed % stride :: stride]:
                    path.unlink(missing_ok=True)
                    if content is not None:
                        path.write_bytes(content)
                    counts[how] += 1
                    length = "" if content is None else f" to {len(content)} bytes"
                    wrong += [
                        f"{subject.name}/{path.name} {how}{length}: {fault}"
                        for fault in subject.faults(training)
                    ]
    return {**counts, "wrong": wrong}


def swapped(every: list[Subject], *, stride: int = 1) -> dict[str, Any]:
    """Swap files between states, folders between steps and files between kinds, hashes valid."""
    number = 0
    wrong = []
    training = Training()
    for subject in every:
        last, before = subject.folder(NUM_STATES), subject.folder(NUM_STATES - 1)
        for path in subject.files()[::stride]:
            other = before / path.name
            with put_back(path) as data, put_back(other) as others:
                if data == others:
                    continue
                path.write_bytes(others)
                found = subject.faults(training)
                other.write_bytes(data)  # both are damaged now
                found += subject.faults(training, newest=NUM_STATES - 2)
            number += 2
            wrong += [f"{subject.name}/{path.name} swapped: {fault}" for fault in found]
        _swap(last, before)
        number += 1
        wrong += [
            f"{subject.name}: folders swapped: {fault}"
            for fault in subject.faults(training, newest=NUM_STATES - 2)
        ]
        _swap(last, before)
    for subject in every:
        for giver in every:
            if giver.name == subject.name:
                continue
            for path in subject.files()[::stride]:
                other = giver.folder(NUM_STATES) / path.name
                if not other.exists() or other.read_bytes() == path.read_bytes():
                    continue
                with put_back(path):
                    shutil.copyfile(other, path)
                    number += 1
                    wrong += [
                        f"{subject.name}/{path.name} of {giver.name}: {fault}"
                        for fault in subject.faults(training)
                    ]
    return {"swaps": number, "wrong": wrong}


def _swap(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
