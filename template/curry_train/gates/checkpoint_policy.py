"""Gates of checkpoint-policy: interrupted saves, resumes to the bit, damage, and two ranks.

They save the user's model and optimizer in a temporary folder of the user's disk.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_checkpoint_policy.py`.
"""

import contextlib
import functools
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from ..core.generators import seeded
from ..core.wording import unheard
from ..runs.attach import saving
from ..runs.layout import MANIFEST_FILE_NAME, SavedCheckpoint
from ..runs.ranks import DamagedCheckpoint, RunError
from ..runs.resume import Resumed, load_chosen
from ..runs.state import TrainingState
from ..runs.store import SavedRun, Store
from ..workloads.workload import Case
from .implementation import spec_of
from .own_training import different_names, new_batch, new_training, printed_state, take_user_step
from .two_ranks import (
    Found,
    Wrapped,
    load_function,
    on_two_ranks,
    under_both,
    verdict_of_ranks,
)
from .verdict import Gate, NotApplicable, Verdict

NUM_FLIPS = 40
# Most bits of the manifest are in hashes, where any change is detected; only a few are elsewhere.
NUM_FLIPS_OF_MANIFEST = 80
# In bytes: a gate writes or reads the state dozens of times.
LARGEST_STATE_BYTES = 2**30
# Steps of the training on two ranks, and where it is stopped.
NUM_STEPS = 3
STOPPED_AFTER = 2


@contextlib.contextmanager
def trained_state(case: Case) -> Iterator[tuple[TrainingState, Path]]:
    """Yield the state of the user's training after one step, and an empty folder."""
    with seeded(case.seed), tempfile.TemporaryDirectory(prefix="checkpoint-gate-") as folder:
        state = TrainingState(*new_training(case, seed=case.seed))
        train_step(case, state)
        yield state, Path(folder)


def train_step(case: Case, state: TrainingState) -> None:
    take_user_step(case, state.model, state.optimizers[0], new_batch(case))
    state.step += 1
    state.position += case.batch_size


def facts_of_training(state: TrainingState) -> dict[str, str]:
    """Return everything that a resume restores, as text."""
    return printed_state(
        state.model,
        state.optimizers[0],
        generator={
            "torch": torch.get_rng_state(),
            "python": repr(random.getstate()),
            "numpy": repr(numpy.random.get_state()),
        },
        counter={name: getattr(state, name) for name in ("step", "position")},
    )


def save(state: TrainingState, folder: Path) -> SavedCheckpoint:
    with Store(folder) as store:
        return store.save("rollback", state.step, state)


def resume(case: Case, folder: Path) -> tuple[TrainingState, Resumed]:
    """Load the newest whole checkpoint into a training with other values."""
    state = TrainingState(*new_training(case, seed=case.seed + 1))
    with unheard(load_chosen.__module__):
        return state, load_chosen(SavedRun(folder), state, "latest")


def require_small(case: Case, state: TrainingState, *, required: str) -> None:
    size = sum(tensor.nbytes for tensor in state.snapshot().tensors.values())
    if size > LARGEST_STATE_BYTES:
        why = f"the state takes {size / 2**30:.1f} GiB, and would be written dozens of times"
        raise NotApplicable(why, required=required)


def compare_resumed(case: Case) -> Verdict:
    """Save after a step, and compare a resumed training and its next step."""
    with trained_state(case) as (state, folder):
        expected = facts_of_training(state)
        save(state, folder)
        train_step(case, state)
        expected_next = facts_of_training(state)

        found, found_next = _resumed_facts(case, folder)
        wrong = different_names(found, expected)
        wrong_next = different_names(found_next, expected_next)
        comparison = "not equal" if wrong_next else "equal"
        if wrong_next and not wrong and _resumed_facts(case, folder)[1] != found_next:
            wrong_next = []
            comparison = "not repeatable on this device"

    num_equal = len(expected) - len(wrong)
    hint = ""
    if wrong:
        hint = f"not saved, or not restored: {', '.join(wrong[:3])}"
    elif wrong_next:
        hint = f"{wrong_next[0]} differs: a part of the model is not in its state_dict()"
    return Verdict(
        "checkpoint-policy/bitwise",
        not hint,
        f"{num_equal} of {len(expected)} values equal, next step {comparison}",
        "state and next step equal to the bit",
        hint,
    )


def _resumed_facts(case: Case, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the facts of a resumed training, and those after its next step."""
    with seeded(case.seed + 1):
        state, _ = resume(case, folder)
        found = facts_of_training(state)
        train_step(case, state)
        return found, facts_of_training(state)


def detect_damage(case: Case) -> Verdict:
    """Flip one bit at a time in the files of a checkpoint, including its manifest and index."""
    required = "all detected before loading"
    generator = random.Random(case.seed)
    missed = list[str]()
    with trained_state(case) as (state, folder):
        require_small(case, state, required=required)
        saved = save(state, folder)
        place = folder / saved.folder
        run = SavedRun(folder)
        run.verify(saved.folder)
        paths = (sorted(place.iterdir()) * NUM_FLIPS)[:NUM_FLIPS]
        paths += [place / MANIFEST_FILE_NAME] * NUM_FLIPS_OF_MANIFEST
        for path in paths:
            byte = generator.randrange(path.stat().st_size)
            with flipped_bit(path, byte, generator.randrange(8)):
                try:
                    run.verify(saved.folder)
                    missed.append(f"byte {byte} of {path.name}")
                except DamagedCheckpoint:
                    continue

    hint = ""
    if missed:
        hint = f"a bit in {missed[0]} was not detected: hash every file, and the manifest too"
    measured = f"{len(paths) - len(missed)} of {len(paths)} flipped bits detected"
    return Verdict("checkpoint-policy/damage", not missed, measured, required, hint)


@contextlib.contextmanager
def flipped_bit(path: Path, byte: int, bit: int) -> Iterator[None]:
    """Flip a bit of a file inside the context."""

    def flip() -> None:
        with path.open("r+b") as stream:
            stream.seek(byte)
            value = stream.read(1)[0]
            stream.seek(byte)
            stream.write(bytes([value ^ 1 << bit]))

    flip()
    try:
        yield
    finally:
        flip()


def fall_back(case: Case) -> Verdict:
    """Flip a bit in the newer of two checkpoints, and resume from the newest."""
    gate = "checkpoint-policy/fallback"
    required = "the older state to the bit, and the newer one reported"
    with trained_state(case) as (state, folder):
        save(state, folder)
        expected = facts_of_training(state)
        train_step(case, state)
        newer = save(state, folder)
        largest = max((folder / newer.folder).iterdir(), key=lambda path: path.stat().st_size)
        with flipped_bit(largest, largest.stat().st_size // 2, 2):
            try:
                other, resumed = resume(case, folder)
            except RunError as error:
                hint = f"{error}: try the checkpoint before it"
                return Verdict(gate, False, "nothing was loaded", required, hint)
        wrong = different_names(facts_of_training(other), expected)

    is_reported = newer.folder in resumed.words
    report = "damage reported" if is_reported else "damage not reported"
    measured = f"step {other.step}, {len(expected) - len(wrong)} of {len(expected)} equal, {report}"
    hint = ""
    if wrong:
        hint = f"{wrong[0]} is not that of the older one: verify before loading, newest first"
    elif not is_reported:
        hint = "report every checkpoint that was skipped, and why: the run has lost steps"
    return Verdict(gate, not hint, measured, required, hint)


def compare_resumed_ranks(case: Case, *, attach: Callable[..., Any] = saving) -> Verdict:
    """Stop a training of two ranks, resume it in new objects, and compare it with one unstopped."""
    required = f"state of step {NUM_STEPS} equal to the bit on each rank"
    # Raises here, and not in the other processes, if it can't make one of this size.
    case.workload.batch(case.batch_size)
    with tempfile.TemporaryDirectory(prefix="two-ranks-") as folder:
        target = f"{__name__}:_resume_on_rank"
        attached = spec_of(attach)
        results = on_two_ranks(target, case, required=required, folder=folder, attach=attached)

    def figure(of_ranks: Sequence[dict[str, Any]]) -> tuple[bool, str]:
        wrong = [
            f"{name} of rank {rank}"
            for rank, found in enumerate(of_ranks)
            for name in found["wrong"]
        ]
        words = f"{sum(found['facts'] for found in of_ranks):,} facts, {len(wrong)} differ"
        return not wrong, words + (f" ({wrong[0]})" if wrong else "")

    return verdict_of_ranks(
        "checkpoint-policy/two-ranks",
        results,
        required=required,
        figure=figure,
        hint="save the shards and the generators of every rank, and load each into its own rank",
    )


def _resume_on_rank(case: Case, folder: str, attach: str) -> Found:
    """Compare a resumed training on this rank with one that was not stopped."""

    def measure(wrapped: Wrapped, kind: str) -> dict[str, Any]:
        train = functools.partial(_train_on_rank, case, wrapped, load_function(attach))
        expected = train(Path(folder, kind, "straight"), until=NUM_STEPS)
        train(Path(folder, kind, "resumed"), until=STOPPED_AFTER)
        found = train(Path(folder, kind, "resumed"), until=NUM_STEPS, resumes=True)
        return {"facts": len(expected), "wrong": different_names(found, expected)}

    # Routed experts are used at some steps alone.
    return under_both(case, case.batch(), measure, unused=True)


def _train_on_rank(
    case: Case,
    wrapped: Wrapped,
    attach: Callable[..., Any],
    runs: Path,
    *,
    until: int,
    resumes: bool = False,
) -> dict[str, str]:
    """Train on batches of this rank's own until a step, and return its state by name.

    What resumes starts from other values than those that were saved.
    """
    model = wrapped()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    if resumes:
        with torch.no_grad():
            for parameter in trained:
                parameter.zero_()
    with seeded(case.seed + dist.get_rank() + 10 * resumes):
        with attach(model, optimizer, runs=runs, rollback_every=STOPPED_AFTER) as run:
            for _ in run.batches(range(NUM_STEPS + 1)):
                if run.steps == until:
                    break
                batch = new_batch(case)
                weight = 1 + 0.01 * (random.random() + numpy.random.rand())
                # Blocks that drop out at random have to be the same ones on each rank.
                with seeded(case.seed + run.steps):
                    loss = weight * case.workload.mean_loss(model, batch)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss=loss)
        drawn = [torch.rand(1), random.random(), float(numpy.random.rand())]
        return printed_state(model, optimizer, generator=drawn, step=run.steps)


GATES = (
    Gate("checkpoint-policy/bitwise", compare_resumed, machine=True, steps=4),
    Gate("checkpoint-policy/damage", detect_damage, machine=True, steps=1),
    Gate("checkpoint-policy/fallback", fall_back, machine=True, steps=2),
    Gate(
        "checkpoint-policy/two-ranks",
        compare_resumed_ranks,
        machine=True,
        on_ranks=True,
        steps=30,
    ),
)
