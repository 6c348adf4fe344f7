"""Faults of checkpoints: saves that harm others, and state that is not restored.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import contextlib
import copy
import random
from unittest import mock

import numpy
import torch
import torch.distributed as dist

from curry_train.runs import SavingPolicy, TrainingState, saving, state
from curry_train.runs.random_state import restore_random_state

from .saboteurs import planted


def not_restored(read, write, owner=SavingPolicy, name="resume"):
    """Plant a resume that leaves something as it was."""
    restore = getattr(owner, name)

    def load(*args):
        training = next(one for one in args if isinstance(one, TrainingState))
        before = copy.deepcopy(read(training))
        resumed = restore(*args)
        write(training, before)
        return resumed

    return [(owner, name, load)]


def generator(read, write):
    return not_restored(
        lambda _: read(), lambda _, before: write(before), TrainingState, "restore_random"
    )


def moments_anew(training, _):
    for entry in training.optimizers[0].state.values():
        entry["exp_avg_sq"].zero_()


def nothing(_):
    return None


def counter(name):
    return not_restored(
        lambda training: getattr(training, name),
        lambda training, before: setattr(training, name, before),
    )


def restored_from_first(taken, generators=None):
    """Restore the generators that the first rank saved, on every rank."""
    shared = [taken]
    dist.broadcast_object_list(shared, src=0)
    return restore_random_state(shared[0], generators)


@contextlib.contextmanager
def with_generators_of_first(*args, **options):
    with (
        mock.patch.object(state, "restore_random_state", restored_from_first),
        saving(*args, **options) as run,
    ):
        yield run


def without_own_moments(model, optimizer, **options):
    """Attach `saving`, and lose the moments of the second rank."""
    run = saving(model, optimizer, **options)
    for moments in optimizer.state.values() if dist.get_rank() else ():
        moments["exp_avg"].zero_()
    return run


def fault(claim, name, patches, hint):
    return planted(f"checkpoint-policy.{claim}", name, patches=patches, hint=hint)


FAULTS = [
    fault(
        "model",
        "weights",
        not_restored(
            lambda training: training.model.state_dict(),
            lambda training, before: training.model.load_state_dict(before),
        ),
        "not restored: model",
    ),
    fault("optimizer", "moments", not_restored(nothing, moments_anew), "exp_avg_sq"),
    fault(
        "generators", "python", generator(random.getstate, random.setstate), "generator['python']"
    ),
    fault(
        "generators",
        "numpy",
        generator(numpy.random.get_state, numpy.random.set_state),
        "generator['numpy']",
    ),
    fault(
        "generators",
        "torch",
        generator(torch.get_rng_state, torch.set_rng_state),
        "generator['torch']",
    ),
    fault("counters", "position", counter("position"), "position"),
    fault("counters", "step", counter("step"), "not restored"),
    planted(
        "checkpoint-policy.two-ranks",
        "one-generator",
        attach=with_generators_of_first,
        hint="on rank 0|on rank 1",
        model="mlp",
    ),
    planted(
        "checkpoint-policy.two-ranks",
        "moments-of-one",
        attach=without_own_moments,
        hint="on rank 1",
        model="mlp",
    ),
]
