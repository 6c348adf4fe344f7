"""Gates of checkpoint-policy: a training resumes to the bit, on one process and on two ranks.

They save the user's model and optimizer in a temporary folder of the user's disk.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_checkpoint_policy.py`.
"""

import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from ..core.generators import seeded
from ..core.wording import unheard
from ..runs.attach import saving
from ..runs.resume import load_chosen
from ..runs.state import TrainingState
from ..runs.store import SavedRun, Store
from ..workloads.workload import Case
from .implementation import spec_of
from .own_training import different_names, new_batch, new_training, printed_state, take_user_step
from .two_ranks import (
    Found,
    Wrapped,
    compare_on_ranks,
    differing,
    load_function,
    under_both,
)
from .verdict import Gate, NotApplicable, Outcome

# Steps of the training on two ranks, and where it is stopped.
NUM_STEPS = 3
STOPPED_AFTER = 2


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


def compare_resumed(case: Case) -> Outcome:
    """Save after a step, and compare a resumed training and its next step."""
    with seeded(case.seed), tempfile.TemporaryDirectory(prefix="checkpoint-gate-") as folder:
        state = TrainingState(*new_training(case, seed=case.seed))
        train_step(case, state)
        expected = facts_of_training(state)
        try:
            with Store(folder) as store:
                store.save("rollback", state.step, state)
        except ValueError as error:
            raise NotApplicable(f"the state can't be saved: {error}") from error
        train_step(case, state)
        expected_next = facts_of_training(state)

        found, found_next = _resumed_facts(case, Path(folder))
        wrong = different_names(found, expected)
        wrong_next = different_names(found_next, expected_next)
        comparison = "not equal" if wrong_next else "equal"
        if wrong_next and not wrong and _resumed_facts(case, Path(folder))[1] != found_next:
            wrong_next = []
            comparison = "not repeatable on this device"

    num_equal = len(expected) - len(wrong)
    hint = ""
    if wrong:
        hint = f"not saved, or not restored: {', '.join(wrong[:3])}"
    elif wrong_next:
        hint = f"{wrong_next[0]} differs: a part of the model is not in its state_dict()"
    measured = f"{num_equal} of {len(expected)} values equal, next step {comparison}"
    return measured, "state and next step equal to the bit", hint


def _resumed_facts(case: Case, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Resume in a training with other values; return its facts, and those after its next step."""
    with seeded(case.seed + 1), unheard(load_chosen.__module__):
        state = TrainingState(*new_training(case, seed=case.seed + 1))
        load_chosen(SavedRun(folder), state, "latest")
        found = facts_of_training(state)
        train_step(case, state)
        return found, facts_of_training(state)


def compare_resumed_ranks(case: Case, *, attach: Callable[..., Any] = saving) -> Outcome:
    """Stop a training of two ranks, resume it in new objects, and compare it with one unstopped."""
    # Raises here, and not in the other processes, if it can't make one of this size.
    case.workload.batch(case.batch_size)
    with tempfile.TemporaryDirectory(prefix="two-ranks-") as folder:
        return compare_on_ranks(
            f"{__name__}:_resume_on_rank",
            case,
            required=f"state of step {NUM_STEPS} equal to the bit on each rank",
            hint="save the shards and the generators of every rank, and load each into its own",
            folder=folder,
            attach=spec_of(attach),
        )


def _resume_on_rank(case: Case, folder: str, attach: str) -> Found:
    """Compare a resumed training on this rank with one that was not stopped."""

    def measure(wrapped: Wrapped, kind: str) -> dict[str, Any]:
        train = functools.partial(_train_on_rank, case, wrapped, load_function(attach))
        expected = train(Path(folder, kind, "straight"), until=NUM_STEPS)
        train(Path(folder, kind, "resumed"), until=STOPPED_AFTER)
        found = train(Path(folder, kind, "resumed"), until=NUM_STEPS, resumes=True)
        return differing(len(expected), "facts", different_names(found, expected))

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
    Gate(
        "checkpoint-policy/two-ranks",
        compare_resumed_ranks,
        machine=True,
        on_ranks=True,
        steps=30,
    ),
)
