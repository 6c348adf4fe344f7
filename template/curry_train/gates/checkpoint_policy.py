"""Gates of checkpoint-policy: a training resumes to the bit, on one process and on two ranks.

They save the user's model and optimizer in a temporary folder of the user's disk.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_checkpoint_policy.py`.
"""

import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..core.digest import generator_digests
from ..core.generators import seeded
from ..plan.optimizers import make_optimizer
from ..runs.attach import saving
from ..workloads.workload import Case
from .own_training import (
    describe_state,
    draw_batch,
    find_differences,
    make_training,
    take_user_step,
)
from .two_ranks import Found, Measured, Wrapped, compare_on_ranks, measure_under_both
from .verdict import Gate, Outcome

# Steps of the training, and where it is stopped.
NUM_STEPS = 3
STOPPED_AFTER = 2


def compare_resumed(case: Case, *, attach: Callable[..., Any] = saving) -> Outcome:
    """Stop a training, resume it in new objects, and compare it with one that was not stopped."""

    def make(resumes: bool) -> tuple[nn.Module, Optimizer]:
        return make_training(replace(case, seed=case.seed + resumes))

    with tempfile.TemporaryDirectory(prefix="checkpoint-gate-") as folder:
        train, expected, wrong = _train_and_resume(case, make, attach, Path(folder), seed=case.seed)
        hint = ""
        if wrong:
            saved = train("stopped", until=STOPPED_AFTER)
            restored = train("stopped", until=STOPPED_AFTER, resumes=True)
            hint = f"{wrong[0]} differs: a part of the model is not in its state_dict()"
            if lost := find_differences(restored, saved):
                hint = f"not saved, or not restored: {', '.join(lost[:3])}"
            elif train("again", until=NUM_STEPS) != expected:
                hint = ""
    measured = f"{len(expected) - len(wrong)} of {len(expected)} values equal after a step more"
    if wrong and not hint:
        measured = f"{len(expected)} values restored; steps do not repeat on this device"
    return measured, f"state of step {NUM_STEPS} equal to the bit", hint


def compare_resumed_ranks(case: Case, *, attach: Callable[..., Any] = saving) -> Outcome:
    """Stop a training of two ranks, resume it in new objects, and compare it with one unstopped."""
    with tempfile.TemporaryDirectory(prefix="two-ranks-") as folder:
        return compare_on_ranks(
            _resume_on_rank,
            case,
            required=f"state of step {NUM_STEPS} equal to the bit on each rank",
            hint="save the shards and the generators of every rank, and load each into its own",
            folder=folder,
            attach=attach,
        )


def _resume_on_rank(case: Case, folder: str, attach: Callable[..., Any]) -> Found:
    """Compare a resumed training on this rank with one that was not stopped."""

    def measure(wrapped: Wrapped, kind: str) -> Measured:
        def make(resumes: bool) -> tuple[nn.Module, Optimizer]:
            model = wrapped(seeds_further=resumes)
            return model, make_optimizer("adamw", model)

        seed = case.seed + dist.get_rank()
        _, expected, wrong = _train_and_resume(case, make, attach, Path(folder, kind), seed=seed)
        first = f" ({wrong[0]})" if wrong else ""
        return f"{len(expected):,} values, {len(wrong)} differ{first}", not wrong

    # Routed experts are used at some steps alone.
    return measure_under_both(case, [case.batch()], measure, unused=True)


# Trains a run of this name until a step, from what its folder holds, and returns the state by name.
Train = Callable[..., dict[str, str]]


def _train_and_resume(
    case: Case,
    make: Callable[[bool], tuple[nn.Module, Optimizer]],
    attach: Callable[..., Any],
    folder: Path,
    *,
    seed: int,
) -> tuple[Train, dict[str, str], list[str]]:
    """Train straight on, and with a stop; return how, the state at the end and what differs then.

    `make` gets whether the run resumes; then the model has other values, and random numbers start
    from another seed, where they are not restored.
    """

    def train(name: str, *, until: int, resumes: bool = False) -> dict[str, str]:
        model, optimizer = make(resumes)
        with seeded(seed + 10 * resumes):
            with attach(model, optimizer, runs=folder / name, rollback_every=STOPPED_AFTER) as run:
                for _ in run.batches(range(NUM_STEPS + 1)):
                    if run.steps == until:
                        break
                    batch = draw_batch(case)
                    # These generators move in each step too, and a checkpoint has to hold how far.
                    random.random()
                    numpy.random.rand()
                    # Blocks that drop out at random have to be the same ones on each rank.
                    with seeded(case.seed + run.steps):
                        loss = take_user_step(case, model, optimizer, batch)
                    run.step(loss=loss)
            counter = {"step": run.steps, "position": run.state.position}
            return describe_state(model, optimizer, generator=generator_digests(), counter=counter)

    expected = train("straight", until=NUM_STEPS)
    train("resumed", until=STOPPED_AFTER)
    found = train("resumed", until=NUM_STEPS, resumes=True)
    return train, expected, find_differences(found, expected)


GATES = (
    Gate("checkpoint-policy/bitwise", compare_resumed, machine=True, steps=6),
    Gate(
        "checkpoint-policy/two-ranks", compare_resumed_ranks, machine=True, on_ranks=True, steps=30
    ),
)
