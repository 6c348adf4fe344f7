"""What stays is what is needed, damage of the newest is passed over, and nothing is written twice.

Each gate takes the part that it is about, so that its tests can plant a wrong one.
Proof: `python -m pytest tests/test_checkpoint_policy_retention.py`.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.quiet import unheard
from ..core.verdict import Gate, Verdict
from ..core.workload import Case
from ..runs.errors import RunError
from ..runs.policy import SavingPolicy
from ..runs.policy_config import PolicyConfig
from ..runs.resume import Resumed, load_chosen
from ..runs.retention_trial import Rules, broken_promise, random_history
from ..runs.saved_run import SavedRun
from ..runs.store import Store
from ..runs.trial import SOUND, InterruptedFiles, new_state, same, tensors_of, train_step, trained

NUM_HISTORIES = 400
EVERY_STEP = PolicyConfig(rollback_every=1, recovery_every=1, best_k=1)


def retention(case: Case, *, rules: Rules | None = None) -> Verdict:
    """Random histories of saves, NaN, damage, readers, rollbacks and restarts, with steps of eight and nine digits."""
    gate, required = (
        "checkpoint-policy/retention",
        "in each, the newest good state and the best stay, and no more than asked",
    )
    generator, broken = random.Random(case.seed), list[str]()
    for _ in range(NUM_HISTORIES):
        history, config = random_history(generator)
        if said := broken_promise(history, config, rules or Rules()):
            broken.append(said)
    hint = ""
    if broken:
        hint = f"{max(set(broken), key=broken.count)}: count steps as numbers, those of this line only, and never NaN"
    return Verdict(
        gate, not broken, f"{NUM_HISTORIES} histories, {len(broken)} broken", required, hint
    )


def fallback(case: Case, *, load: Callable[[SavedRun, Any, str], Resumed] = load_chosen) -> Verdict:
    """Of two checkpoints a bit is flipped in the newer; a fresh model resumes from latest."""
    gate, required = (
        "checkpoint-policy/fallback",
        "the older state to the bit, and a word on the newer",
    )
    with trained(case, SOUND) as (state, folder):
        with Store(folder, files=InterruptedFiles(folder)) as store:
            store.save("rollback", 1, state)
            expected = tensors_of(state)
            train_step(case, state)
            newer = store.save("rollback", 2, state)
        _flip_a_bit(folder / newer.folder)
        other = new_state(case, SOUND, seed=case.seed + 1)
        try:
            with unheard(load_chosen.__module__):
                resumed = load(SavedRun(folder), other, "latest")
        except RunError as error:
            return Verdict(
                gate,
                False,
                "nothing was loaded",
                required,
                f"{error}: try the checkpoint before it",
            )
        found = tensors_of(other)
        wrong = [name for name, held in expected.items() if not same(held, found.get(name))]
        told = newer.folder in resumed.words
    named = "damage named" if told else "damage not named"
    measured = (
        f"step {other.step}, {len(expected) - len(wrong)} of {len(expected)} tensors equal, {named}"
    )
    hint = ""
    if wrong or other.step != 1:
        hint = f"{wrong[0] if wrong else 'the step'} is not that of the older: verify before loading, newest first"
    elif not told:
        hint = "a run that lost steps must say so: name what was passed over, and why"
    return Verdict(gate, not hint, measured, required, hint)


def once(case: Case, *, policy: Callable[[Store, PolicyConfig], Any] = SavingPolicy) -> Verdict:
    """A step at which a rollback, a recovery and a best-K fall together, against one save by itself."""
    gate, required = (
        "checkpoint-policy/once",
        "1.00 times the bytes, counted as a recovery, and one best-K",
    )
    with trained(case, SOUND) as (state, folder):
        state.step = 1
        with Store(folder / "alone", files=InterruptedFiles(folder / "alone")) as store:
            alone = store.save("recovery", 1, state).num_bytes
        with Store(folder / "run", files=InterruptedFiles(folder / "run")) as store:
            policy(store, EVERY_STEP).after_step(
                1, state, {"loss": 1.0, EVERY_STEP.best_k_metric: 0.5}
            )
        written = {kind: _bytes_in(folder / "run" / kind) for kind in ("rollback", "recovery")}
        run = SavedRun(folder / "run")
        recoveries, best = len(run.committed("recovery")), len(run.committed("best-k"))
    ratio = sum(written.values()) / alone
    hint = ""
    if ratio > 1.01:
        hint = "the same bytes are written twice: a recovery holds all that a rollback does"
    elif not recoveries:
        hint = "the recovery is missing: what falls together has to be kept as long as the longer of both"
    elif best != 1:
        hint = "the best is missing: it holds other bytes, which stay when the recovery goes"
    return Verdict(
        gate,
        not hint,
        f"{ratio:.2f} times the bytes, {recoveries} recoveries, {best} best-K",
        required,
        hint,
    )


GATES = (
    Gate("checkpoint-policy/retention", retention),
    Gate("checkpoint-policy/fallback", fallback),
    Gate("checkpoint-policy/once", once),
)


def _flip_a_bit(folder: Path) -> None:
    """In the middle of the largest file."""
    path = max(folder.glob("*.distcp"), key=lambda one: one.stat().st_size)
    with path.open("r+b") as stream:
        place = path.stat().st_size // 2
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 4]))


def _bytes_in(folder: Path) -> int:
    """Of the checkpoints, without their manifests."""
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    )
