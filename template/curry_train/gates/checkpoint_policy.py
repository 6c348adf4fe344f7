"""Gates of checkpoint-policy and run-journal: saves, resume, retention, journal.

Each gate takes the component of the store that it checks, so that its tests can plant a wrong one.

Why so long: the gates of one technique, in three groups that share the trial of a store.

Proof: `python -m pytest tests/gates`.
"""

import contextlib
import math
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.wording import unheard
from ..runs.format import INDEX_FILE_NAME, METADATA_FILE_NAME
from ..runs.history import History, read_history
from ..runs.journal import JOURNAL_FILE_NAME, Journal, JournalError, JournalReading
from ..runs.layout import BEST_KIND, MANIFEST_FILE_NAME, FileEntry, hash_bytes, read_manifest
from ..runs.policy import SavingPolicy
from ..runs.policy_config import PolicyConfig, Retention
from ..runs.ranks import DamagedCheckpoint, HostileCheckpoint, RunError, SaveError
from ..runs.resume import Resumed, load_chosen
from ..runs.store import SavedRun, Store, Writing
from ..workloads.workload import Case
from .saved_forms import FORMS_GATES, JUDGED_FORMS
from .saved_state import FORGED_CALLS, JOURNAL_EVENT_GATES, JUDGED_HERE, SAVED_STATE_GATES
from .trials import (
    SOUND_STORE,
    Interrupted,
    InterruptedFiles,
    Rules,
    StoreComponents,
    backward_of,
    broken_promise,
    differing,
    new_saved,
    new_state,
    random_history,
    restored_facts,
    same_bits,
    tensors_of,
    train_step,
    trained,
)
from .two_ranks import RESUME_GATE
from .verdict import (
    Gate,
    Implementation,
    Judged,
    Takes,
    Verdict,
    as_ours,
    not_applicable,
    with_errors,
)

# Gates of checkpoints: atomic commits, bitwise resume, detected damage, safe reading.

NUM_FLIPS = 40
# Most bits of the manifest are in hashes, where any change is detected; only a few are elsewhere.
NUM_FLIPS_OF_MANIFEST = 80
NUM_FAILURES = 40
# In bytes: a gate writes or reads the state dozens of times.
LARGEST_STATE_BYTES = 2**30
ROLLBACK_KIND = "rollback"


def committed(case: Case, *, parts: StoreComponents = SOUND_STORE) -> Verdict:
    """Interrupt the save of step 2 at each change it makes on the disk, after a save of step 1."""
    gate = "checkpoint-policy/committed"
    required = "after each, the newest committed checkpoint is complete and as saved"
    with trained(case, parts) as (state, folder), unheard(Store.__module__):
        expected = {1: tensors_of(state)}
        if too_large := _too_large(expected[1]):
            return not_applicable(gate, required=required, why=too_large)
        num_interruptions = 0
        wrong = list[str]()
        with Store(folder / "first") as store:
            _commit_by(store, parts).save(ROLLBACK_KIND, 1, state)
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
                        store.save(ROLLBACK_KIND, 2, state)
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


def bitwise(case: Case, *, parts: StoreComponents = SOUND_STORE) -> Verdict:
    """Load a checkpoint into a fresh training; compare its whole state and the next step.

    The checkpoint is made between two steps, with gradients. Compared are model, gradients,
    optimizer, scheduler, scaler, extra, counters, and the generators of torch, Python and NumPy.
    """
    gate = "checkpoint-policy/bitwise"
    required = "state and next step equal to the bit"
    with trained(case, parts) as (state, folder):
        backward_of(case, state)
        expected = restored_facts(state)
        with Store(folder) as store:
            saved = store.save(ROLLBACK_KIND, 1, state)
        next_loss = train_step(case, state)
        after_next = restored_facts(state)

        other = new_state(case, parts, seed=case.seed + 1)
        parts.load(SavedRun(folder), saved.folder, other)
        wrong = differing(expected, restored_facts(other))
        other_loss = train_step(case, other)
        is_next_step_right = torch.equal(next_loss, other_loss) and not differing(
            after_next, restored_facts(other)
        )
        comparison = "equal" if is_next_step_right else "not equal"
        is_only_step_wrong = not wrong and not is_next_step_right
        if is_only_step_wrong and not _repeats(case, parts, folder, saved.folder):
            is_next_step_right = True
            comparison = "not repeatable on this device"

    num_equal = len(expected) - len(wrong)
    measured = f"{num_equal} of {len(expected)} values equal, next step {comparison}"
    hint = ""
    if wrong or not is_next_step_right:
        missing = ", ".join(wrong[:3]) or "a generator, or state of the model itself"
        hint = f"not saved, or not restored: {missing}"
    return Verdict(gate, not hint, measured, required, hint)


def damage(case: Case, *, parts: StoreComponents = SOUND_STORE) -> Verdict:
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
            saved = store.save(ROLLBACK_KIND, 1, state)
        reader = SavedRun(folder)
        parts.verify(reader, saved.folder)

        paths = sorted((folder / saved.folder).iterdir())
        targets = (paths * NUM_FLIPS)[:NUM_FLIPS]
        targets += [folder / saved.folder / MANIFEST_FILE_NAME] * NUM_FLIPS_OF_MANIFEST
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


def hostile(case: Case, *, parts: StoreComponents = SOUND_STORE) -> Verdict:
    """Load forged checkpoints with valid hashes.

    Their indexes call functions when they are unpickled, by names that a reader may let through, or
    name a file outside of the checkpoint.
    """
    gate = "checkpoint-policy/hostile"
    required = "all refused, nothing called, nothing changed"
    wrong = []
    with trained(case, parts) as (state, folder):
        with Store(folder) as store:
            saved = store.save(ROLLBACK_KIND, 1, state)
        # Unpickling is safe here: this process has just written the file.
        metadata = pickle.loads((folder / saved.folder / METADATA_FILE_NAME).read_bytes())
        calls = folder / "calls"
        calls.mkdir()
        attacks = {
            f"a call of {call.module}.{call.name}": call.pickled(calls / str(number))
            for number, call in enumerate(FORGED_CALLS)
        }
        in_index = _Call(calls / "in the index")
        attacks["a call in the index"] = pickle.dumps(replace(metadata, planner_data=in_index))
        place = next(iter(metadata.storage_data.values()))
        for path in OUTSIDE_PATHS:
            place.relative_path = path
            attacks[f"a file at {path}"] = pickle.dumps(metadata)

        other = new_state(case, parts, seed=case.seed + 1)
        before = tensors_of(other)
        for name, forged in attacks.items():
            _forge(SavedRun(folder), saved.folder, forged)
            try:
                parts.load(SavedRun(folder), saved.folder, other)
                wrong.append(f"{name} was loaded")
            except HostileCheckpoint:
                pass
            except Exception as error:  # noqa: BLE001 - a reader may fail later, with any error
                wrong.append(f"{name} raised {type(error).__name__}")

        if called := sorted(calls.iterdir()):
            wrong.insert(0, f"a function of the index was called {len(called)} times")
        if any(not same_bits(held, before.get(name)) for name, held in tensors_of(other).items()):
            wrong.append("the state was changed")
    hint = ""
    if wrong:
        hint = f"{wrong[0]}: unpickle with an allow-list, and read only files in the manifest"
    return Verdict(gate, not wrong, f"{len(attacks)} attacks, {len(wrong)} wrong", required, hint)


# Paths of data that lead out of a checkpoint.
OUTSIDE_PATHS = ("../../../elsewhere", "/etc/hostname", "../state.json", ".")
STORE_ERRORS = (DamagedCheckpoint, HostileCheckpoint, SaveError)


def _store_component(name: str) -> Takes:
    """Take one component of the store, beside those that were taken before."""

    def adapt(given: Implementation, present: Any) -> StoreComponents:
        value = given.value if name == "state" else as_ours(given.value, *STORE_ERRORS)
        return replace(present or SOUND_STORE, **{name: value})

    return Takes("parts", adapt)


STATE_TAKES = {"TrainingState": _store_component("state")}
COMMIT_TAKES = {"Writing.commit": _store_component("commit")}
VERIFY_TAKES = {"SavedRun.verify": _store_component("verify")}
LOAD_TAKES = {"SavedRun.load": _store_component("load")}
CHECKPOINT_GATES = (
    Gate("checkpoint-policy/committed", committed, STATE_TAKES | COMMIT_TAKES),
    Gate("checkpoint-policy/bitwise", bitwise, STATE_TAKES | LOAD_TAKES),
    Gate("checkpoint-policy/damage", damage, STATE_TAKES | VERIFY_TAKES),
    Gate("checkpoint-policy/hostile", hostile, STATE_TAKES | LOAD_TAKES),
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
    if size <= LARGEST_STATE_BYTES:
        return ""
    return f"the state takes {size / 2**30:.1f} GiB, and would be written dozens of times"


def _repeats(case: Case, parts: StoreComponents, folder: Path, saved: str) -> bool:
    """Return whether the step after two loads of one checkpoint is the same."""
    losses = []
    states = []
    for _ in range(2):
        fresh = new_state(case, parts, seed=case.seed + 1)
        parts.load(SavedRun(folder), saved, fresh)
        losses.append(train_step(case, fresh))
        states.append(restored_facts(fresh))
    return torch.equal(*losses) and not differing(*states)


def _commit_by(store: Store, parts: StoreComponents) -> Store:
    if parts.commit is not Writing.commit:
        begin = store.begin

        def begun(*args: Any, **options: Any) -> Any:
            writing: Any = begin(*args, **options)
            writing.commit = lambda given: parts.commit(writing, given)
            return writing

        store.begin = begun  # type: ignore[method-assign]
    return store


def _judged(
    case: Case, parts: StoreComponents, root: Path, expected: dict[int, Any], when: str
) -> list[str]:
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
        name for name, held in found.items() if not same_bits(held, expected[newest.step].get(name))
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
    """Give a checkpoint a forged index and valid hashes, which detect damage only.

    It is one of format 1, whose only index is the pickle.
    """
    manifest = read_manifest(reader.files, folder)
    place = Path(reader.files.location(folder))
    (place / INDEX_FILE_NAME).unlink(missing_ok=True)
    files = {name: entry for name, entry in manifest.files.items() if name != INDEX_FILE_NAME}
    files[METADATA_FILE_NAME] = FileEntry(len(data), hash_bytes(manifest.algorithm, data))
    forged = replace(manifest, files=files, format=1)
    (place / METADATA_FILE_NAME).write_bytes(data)
    (place / MANIFEST_FILE_NAME).write_bytes(forged.render())


# Gates of the run journal: no lost events, torn ends, and attempts.

NUM_STEPS = 6
MOST_CUTS = 60


def journal_complete(case: Case, *, journal: Callable[[Path], Any] = Journal) -> Verdict:
    """Write the model's losses and a NaN, and look for each in the file when its call returns."""
    losses = [*_own_losses(case), math.nan]
    num_present = 0
    num_equal = 0
    with (
        tempfile.TemporaryDirectory(prefix="journal-gate-") as folder,
        journal(Path(folder)) as writer,
    ):
        writer.start()
        for step, loss in enumerate(losses, start=1):
            writer.step(step, loss=loss, learning_rate=1e-3)
            written = _losses_in(Path(folder))
            expected = loss if math.isfinite(loss) else str(loss)
            num_present += len(written) == step
            num_equal += bool(written) and written[-1] == expected

    number = len(losses)
    hint = ""
    if num_present < number:
        hint = (
            "append each event as it happens: events held back in memory are lost if the process "
            "is killed"
        )
    elif num_equal < number:
        hint = "write figures with all their digits, and NaN as a word"
    measured = (
        f"{num_present} of {number} present at once, {num_equal} of {number} losses to the bit"
    )
    return Verdict("run-journal/complete", not hint, measured, "all at once, all to the bit", hint)


def torn(case: Case, *, journal: Callable[[Path], Any] = Journal) -> Verdict:
    """Cut the journal at bytes of its last lines, read it, and continue it in a new process."""
    required = "all complete events after each cut, before and after continuing"
    wrong = list[str]()
    with tempfile.TemporaryDirectory(prefix="journal-gate-") as folder:
        with journal(Path(folder)) as writer:
            writer.start()
            for step, loss in enumerate(_own_losses(case), start=1):
                writer.step(step, loss=loss, learning_rate=1e-3)
        path = Path(folder, JOURNAL_FILE_NAME)
        whole = path.read_bytes()
        least = len(b"".join(whole.splitlines(keepends=True)[:-3]))
        cuts = range(least, len(whole) + 1, max(1, (len(whole) - least) // MOST_CUTS))
        for cut in cuts:
            path.write_bytes(whole[:cut])
            if problem := _goes_on(Path(folder), whole[:cut], journal):
                wrong.append(f"at byte {cut} of {len(whole)}: {problem}")

    hint = ""
    if wrong:
        hint = f"{wrong[0]}; skip a torn line, and start the next event on a new line"
    return Verdict(
        "run-journal/torn", not wrong, f"{len(cuts)} cuts, {len(wrong)} wrong", required, hint
    )


def attempts(
    case: Case,
    *,
    journal: Callable[[Path], Any] = Journal,
    read: Callable[[Path], History] = read_history,
) -> Verdict:
    """Read the journal of a run with a rollback and a resume: a step's last loss counts."""
    losses = _own_losses(case)
    losses_after_rollback = [loss + 1 for loss in losses]
    with tempfile.TemporaryDirectory(prefix="journal-gate-") as folder:
        with journal(Path(folder)) as writer:
            writer.start()
            _write(writer, losses, range(1, 6))
            writer.rollback(2, from_step=5, reason="planted")
            _write(writer, losses_after_rollback, range(3, 5))
        with journal(Path(folder)) as writer:
            writer.resume(3)
            _write(writer, losses, range(4, NUM_STEPS + 1))
        history = read(Path(folder))
        expected = [*losses[:2], losses_after_rollback[2], *losses[3:]]
        found = list(history.steps.values["loss"])
        attempts = [(attempt.number, attempt.kind, attempt.step) for attempt in history.attempts]

    num_right = 0
    if len(found) == NUM_STEPS:
        num_right = sum(loss == other for loss, other in zip(found, expected, strict=False))
    expected_attempts = [(1, "start", 0), (2, "rollback", 2), (3, "resume", 3)]
    held = num_right == NUM_STEPS and attempts == expected_attempts
    hint = ""
    if not held:
        hint = (
            "start a new attempt at each resume and rollback; of two losses of a step use the later"
        )
    measured = f"{num_right} of {NUM_STEPS} losses are the last, {len(attempts)} attempts"
    return Verdict(
        "run-journal/attempts", held, measured, f"{NUM_STEPS} of {NUM_STEPS}, 3 attempts", hint
    )


JOURNAL_TAKES = {"Journal": Takes("journal")}
JOURNAL_GATES = (
    Gate("run-journal/complete", journal_complete, JOURNAL_TAKES),
    Gate("run-journal/torn", torn, JOURNAL_TAKES),
    Gate("run-journal/attempts", attempts, JOURNAL_TAKES | {"read_history": Takes("read")}),
)


def _losses_in(folder: Path) -> list[Any]:
    """Read the losses as another process would; NaN is a word."""
    try:
        return [event.facts["loss"] for event in JournalReading(folder) if event.kind == "step"]
    except JournalError:  # the journal is still empty
        return []


def _goes_on(folder: Path, left: bytes, journal: Callable[[Path], Any]) -> str:
    """Continue a cut journal with two events in another process; return the problem, if any."""
    num_complete = left.count(b"\n")
    try:
        num_read = sum(1 for _ in JournalReading(folder))
        with journal(folder) as writer:
            writer.resume(NUM_STEPS)
            writer.step(NUM_STEPS + 1, loss=1.0, learning_rate=1e-3)
        events = list(JournalReading(folder))
    except RunError as error:
        return str(error)
    # A last line that lacks only its newline is complete as well.
    if not num_complete <= num_read <= num_complete + 1:
        return f"{num_read} of {num_complete} events were read"
    kinds = [event.kind for event in events if event.kind != "warning"][-2:]
    if len(events) < num_read + 2 or kinds != ["resume", "step"]:
        return f"{len(events)} of {num_read + 2} events are in the journal"
    return ""


def _write(writer: Any, losses: list[float], steps: range) -> None:
    for step in steps:
        writer.step(step, loss=losses[step - 1], learning_rate=1e-3)


def _own_losses(case: Case) -> list[float]:
    with trained(case, SOUND_STORE) as (state, _):
        return [float(train_step(case, state)) for _ in range(NUM_STEPS)]


# Gates of checkpoint retention: deletion rules, fallback to an older checkpoint, one write.

NUM_HISTORIES = 400
EVERY_STEP = PolicyConfig(rollback_every=1, recovery_every=1, best_k=1)


def retention(case: Case, *, rules: Rules | None = None) -> Verdict:
    """Apply the retention rules to random histories of a run.

    The histories have saves, NaN, damage, readers, rollbacks and restarts, and steps of eight and
    nine digits.
    """
    gate = "checkpoint-policy/retention"
    required = "in each, the newest good state and the best are kept, and no more than configured"
    generator = random.Random(case.seed)
    broken = list[str]()
    for _ in range(NUM_HISTORIES):
        history, config = random_history(generator)
        if problem := broken_promise(history, config, rules or Rules()):
            broken.append(problem)

    hint = ""
    if broken:
        most_common = max(set(broken), key=broken.count)
        hint = (
            f"{most_common}: compare steps as numbers, use only those of this branch of the run, "
            "and never rank NaN"
        )
    return Verdict(
        gate, not broken, f"{NUM_HISTORIES} histories, {len(broken)} broken", required, hint
    )


def fallback(
    case: Case,
    *,
    load: Callable[[Any, Any, str], Resumed] = load_chosen,
    saved_run: Callable[[Path], Any] = SavedRun,
) -> Verdict:
    """Flip a bit in the newer of two checkpoints and resume a fresh model from `latest`."""
    gate = "checkpoint-policy/fallback"
    required = "the older state to the bit, and the newer one reported"
    with trained(case, SOUND_STORE) as (state, folder):
        with Store(folder, files=InterruptedFiles(folder)) as store:
            store.save("rollback", 1, state)
            expected = tensors_of(state)
            train_step(case, state)
            newer = store.save("rollback", 2, state)
        _flip_a_bit(folder / newer.folder)
        other = new_state(case, SOUND_STORE, seed=case.seed + 1)
        try:
            with unheard(load_chosen.__module__):
                resumed = load(saved_run(folder), other, "latest")
        except RunError as error:
            return Verdict(
                gate,
                False,
                "nothing was loaded",
                required,
                f"{error}: try the checkpoint before it",
            )
        found = tensors_of(other)
        wrong = [name for name, held in expected.items() if not same_bits(held, found.get(name))]
        is_reported = newer.folder in resumed.words

    num_equal = len(expected) - len(wrong)
    report = "damage reported" if is_reported else "damage not reported"
    measured = f"step {other.step}, {num_equal} of {len(expected)} tensors equal, {report}"
    hint = ""
    if wrong or other.step != 1:
        name = wrong[0] if wrong else "the step"
        hint = f"{name} is not that of the older one: verify before loading, newest first"
    elif not is_reported:
        hint = "report every checkpoint that was skipped, and why: the run has lost steps"
    return Verdict(gate, not hint, measured, required, hint)


def coinciding_saves_once(
    case: Case, *, policy: Callable[[Store, PolicyConfig], Any] = SavingPolicy
) -> Verdict:
    """Compare the bytes of a step that is rollback, recovery and best-K with one plain save."""
    gate = "checkpoint-policy/once"
    required = "1.00 times the bytes, counted as a recovery, and one best-K"
    with trained(case, SOUND_STORE) as (state, folder):
        state.step = 1
        with Store(folder / "alone", files=InterruptedFiles(folder / "alone")) as store:
            alone = store.save("recovery", 1, state).num_bytes
        with Store(folder / "run", files=InterruptedFiles(folder / "run")) as store:
            policy(store, EVERY_STEP).after_step(
                1, state, {"loss": 1.0, EVERY_STEP.best_k_metric: 0.5}
            )
        written = {kind: _bytes_in(folder / "run" / kind) for kind in ("rollback", "recovery")}
        run = SavedRun(folder / "run")
        num_recoveries = len(run.committed("recovery"))
        num_best = len(run.committed("best-k"))

    ratio = sum(written.values()) / alone
    hint = ""
    if ratio > 1.01:
        hint = "the same bytes are written twice: a recovery holds all that a rollback does"
    elif not num_recoveries:
        hint = (
            "the recovery is missing: a save of several kinds has to be kept as long as the "
            "longest-lived of them"
        )
    elif num_best != 1:
        hint = "the best-K is missing: save it separately, so that it outlives the recovery"
    measured = f"{ratio:.2f} times the bytes, {num_recoveries} recoveries, {num_best} best-K"
    return Verdict(gate, not hint, measured, required, hint)


def _configured(*counts: int | None, **options: Any) -> PolicyConfig:
    """Return a policy with `rollback_keep`, `recovery_keep` and `keep_every`."""
    defaults = (2, 1, None)
    keep, recoveries, every = (*counts, *defaults[len(counts) :])
    return PolicyConfig(retention=Retention(keep or 2, recoveries or 1, every), **options)


def _records(text: str) -> list[Any]:
    """Return a record for each word: a letter, the step and, in a best-k, `=` and its value.

    r is a rollback, R a recovery, p a rollback of parameters only, b a best-k by dev loss and a
    one by accuracy.
    """
    found = []
    names = {"b": "dev_loss", "a": "accuracy", "p": "rollback"}
    for word in text.split():
        step, _, value = word[1:].partition("=")
        if word[0] in "rR":
            found.append(new_saved("recovery" if word[0] == "R" else "rollback", int(step)))
        else:
            name = names[word[0]]
            number = float(value or step)
            found.append(new_saved(BEST_KIND, int(step), number, name=name))
    return found


MAXIMIZED_BEST = {"best_k_direction": "maximize"}
# In each row: the checkpoints that exist, the configuration, the present step, the damaged ones,
# the protected ones, and those that must be deleted. `_records` explains the words.
KEPT_STATES: tuple[tuple[str, PolicyConfig, int, str, str, str], ...] = (
    ("r8 r9 r10 r11", _configured(), 11, "", "", "r8 r9"),
    ("r99999998 r99999999 r100000000", _configured(), 100000000, "", "", "r99999998"),
    ("r11 r8 r10 r9", _configured(1), 11, "", "r8", "r9 r10"),
    ("R4 r4 r5 r6", _configured(), 6, "", "", "r4"),
    ("R2 R4 R6 r6 r7", _configured(2, 2), 7, "", "", "R2 r6"),
    ("R2 R4 R6 r6 r7", _configured(2, 1), 7, "", "", "R2 R4 r6"),
    ("R2 r3", _configured(1, 1), 3, "", "", ""),
    ("r1 r2 r3 r4", _configured(1), 2, "", "", "r1 r3 r4"),
    ("r3 R4", _configured(1), 2, "", "", ""),
    ("r3 b4=1 R5", _configured(1, best_k=0), 2, "", "", ""),
    ("r1 r2 r3 r4", _configured(), 4, "r4 r2", "", "r2"),
    ("r1 r2 r3 r4", _configured(), 4, "r2 r1", "", "r1 r2"),
    ("r1 r2", _configured(1), 2, "r2", "", ""),
    ("r1 r2 r3 r4 r5 r6", _configured(1, 1, 2), 6, "", "", "r1 r3 r5"),
    ("r2 R2 r3 r4 p6 p7", _configured(1, 1, 2), 4, "", "", "r2 r3 p6 p7"),
    ("p2 p3 p4 p5 r6", _configured(1, 1, 2), 6, "", "", "p3"),
    ("p8 p9 p10 p11 p100", _configured(), 11, "", "", "p8 p9 p100"),
    ("p9 p10 p11", _configured(1), 11, "p10", "", "p9"),
    ("b1=3 b2=1 b3=2 b4=1", _configured(best_k=2), 4, "", "", "b1=3 b3=2"),
    ("b1=3 b2=1 b3=2 b4=3", _configured(best_k=2, **MAXIMIZED_BEST), 4, "", "", "b2=1 b3=2"),
    ("b1=3 b2=1 b3=2", _configured(best_k=1), 3, "b2=1", "", "b1=3"),
    ("b1=3 a2=1 r3", _configured(best_k=0), 3, "", "", ""),
    ("b1=3 b2=4 a3=1", _configured(best_k=1), 3, "", "", "b2=4"),
    ("b1=3 a2=1 a3=2", _configured(best_k=1, best_k_metric="accuracy"), 3, "", "", "a3=2"),
)
# In each row: the checkpoints that exist, the configuration, step and metric of the next one, and
# whether it must be saved as one of the best.
AMONG_BEST: tuple[tuple[str, PolicyConfig, int, float, bool], ...] = (
    ("", _configured(best_k=1), 1, 5.0, True),
    ("", _configured(best_k=0), 1, 5.0, False),
    ("", _configured(best_k=1), 1, math.nan, False),
    ("", _configured(best_k=1), 1, math.inf, False),
    ("", _configured(best_k=1), 1, -math.inf, False),
    ("", _configured(best_k=1, **MAXIMIZED_BEST), 1, math.inf, False),
    ("b1=3 b2=2", _configured(best_k=2), 3, 2.5, True),
    ("b1=3 b2=2", _configured(best_k=2), 3, 3.0, False),
    ("b1=3 b2=2", _configured(best_k=2), 3, 4.0, False),
    ("b1=3 b2=2", _configured(best_k=3), 3, 4.0, True),
    ("b1=3 b5=2", _configured(best_k=2), 1, 3.0, False),
    ("b4=3 b5=2", _configured(best_k=2), 1, 3.0, True),
    ("b1=3 b2=2", _configured(best_k=2, **MAXIMIZED_BEST), 3, 2.5, True),
    ("b1=3 b2=2", _configured(best_k=2, **MAXIMIZED_BEST), 3, 1.5, False),
    ("b1=-3 b2=-2", _configured(best_k=1, **MAXIMIZED_BEST), 3, -1.0, True),
    ("a1=3 a2=2", _configured(best_k=1), 3, 9.0, True),
    ("r1 R2", _configured(best_k=1), 3, 9.0, True),
)


def _folders_in(text: str) -> set[str]:
    return {one.folder for one in _records(text)}


def kept(case: Case, *, rules: Rules | None = None) -> Verdict:
    """Apply the rules of retention to a table of saved states, of all kinds and settings."""
    rules = rules or Rules()
    wrong = list[str]()
    for saved, config, step, damaged, protected, goes in KEPT_STATES:
        given = {"damaged": _folders_in(damaged), "protected": _folders_in(protected)}
        gone = rules.delete(_records(saved), config, step=step, **given) or ()
        if {one.folder for one in gone} != _folders_in(goes):
            names = " ".join(one.folder for one in gone)
            wrong.append(f"of {saved} go {names or 'none'}, not {goes or 'none'}")
    for saved, config, step, value, is_best in AMONG_BEST:
        if rules.among_best(value, step, _records(saved), config) is not is_best:
            wrong.append(f"{value} at step {step} beside {saved or 'none'}: {not is_best} is wrong")
    number = len(KEPT_STATES) + len(AMONG_BEST)
    hint = f"{wrong[0]}: the newest, the best and what is read stay" if wrong else ""
    measured = f"{number - len(wrong)} of {number} cases right"
    return Verdict("checkpoint-policy/kept", not wrong, measured, f"{number} of {number}", hint)


def _rule(name: str) -> Takes:
    return Takes("rules", lambda given, present: replace(present or Rules(), **{name: given.value}))


RULES_TAKE = {"to_delete": _rule("delete"), "is_among_best": _rule("among_best")}
RETENTION_GATES = (
    Gate("checkpoint-policy/retention", retention, RULES_TAKE),
    Gate("checkpoint-policy/kept", kept, RULES_TAKE),
    Gate(
        "checkpoint-policy/fallback",
        fallback,
        {"load_chosen": Takes("load", with_errors(RunError)), "SavedRun": Takes("saved_run")},
    ),
    Gate("checkpoint-policy/once", coinciding_saves_once, {"SavingPolicy": Takes("policy")}),
)


def _flip_a_bit(folder: Path) -> None:
    """Flip a bit in the middle of the largest file."""
    path = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with path.open("r+b") as stream:
        place = path.stat().st_size // 2
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 4]))


def _bytes_in(folder: Path) -> int:
    """Sum the bytes of the checkpoints in a folder, without their manifests."""
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    )


JUDGED_CALLABLES = (
    Judged("SavingPolicy", lambda store, config: None),
    Judged("TrainingState", lambda model, optimizer, scheduler, scaler, *, extra, generators: None),
    Judged("Writing.commit", lambda writing, state: None),
    Judged("SavedRun.verify", lambda run, folder: None),
    Judged("SavedRun.load", lambda run, folder, state: None),
    Judged("load_chosen", lambda run, state, what: None),
    Judged("SavedRun", lambda folder: None),
    Judged("to_delete", lambda saved, config, *, step, damaged, protected: None),
    Judged("is_among_best", lambda value, step, saved, config: None),
    Judged("Journal", lambda folder: None),
    Judged("read_history", lambda folder: None),
    *JUDGED_HERE,
    *JUDGED_FORMS,
)
GATES = (
    *CHECKPOINT_GATES,
    *SAVED_STATE_GATES,
    *RETENTION_GATES,
    *FORMS_GATES,
    RESUME_GATE,
    *JOURNAL_GATES,
    *JOURNAL_EVENT_GATES,
)
