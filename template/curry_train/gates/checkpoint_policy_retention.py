"""Gates of checkpoint retention: deletion rules, fallback to an older checkpoint, one write.

Each gate takes the component that it checks, so that its tests can plant a wrong one.

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


def fallback(case: Case, *, load: Callable[[SavedRun, Any, str], Resumed] = load_chosen) -> Verdict:
    """Flip a bit in the newer of two checkpoints and resume a fresh model from `latest`."""
    gate = "checkpoint-policy/fallback"
    required = "the older state to the bit, and the newer one reported"
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


def once(case: Case, *, policy: Callable[[Store, PolicyConfig], Any] = SavingPolicy) -> Verdict:
    """Compare the bytes of a step that is rollback, recovery and best-K with one plain save."""
    gate = "checkpoint-policy/once"
    required = "1.00 times the bytes, counted as a recovery, and one best-K"
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


GATES = (
    Gate("checkpoint-policy/retention", retention),
    Gate("checkpoint-policy/fallback", fallback),
    Gate("checkpoint-policy/once", once),
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
