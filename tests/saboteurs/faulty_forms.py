"""Faults of optimizers, generators, loaders, locks, retention and room on the disk.

Proof: `python -m pytest tests/gates/test_saved_forms.py`.
"""

import math

from saboteurs import planted

from curry_train.gates import saved_forms, trials
from curry_train.gates.trials import Rules
from curry_train.runs import lock, optimizer_state, random_state, retention
from curry_train.runs.lock import RunLock
from curry_train.runs.optimizer_state import FrozenBase, OptimizerState
from curry_train.runs.random_state import DataPosition
from curry_train.runs.retention import (
    estimate_disk,
    is_among_best,
    to_delete,
)
from curry_train.runs.state import TrainingState

# Optimizers and the names of their state.


def only_tensors(self, read):
    """Restore the state of parameters, and neither the groups nor what belongs to none."""
    self.optimizer.state.update(read.parameters)


def as_it_is(model, name):
    return name


def one_hash(self, algorithm):
    return "same"


def any_groups(self, saved):
    """Compare nothing, so that state of one class is taken for that of another."""


# Generators and the position in the data.


def without_python(generators=None):
    taken = take_random_state(generators)
    return random_state.RandomState(taken.tensors, {"numpy": taken.values["numpy"]})


take_random_state = random_state.take_random_state


class FromTheStart(DataPosition):
    """Draws the pass anew, with generators that have moved on."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.began = None


class WithoutBatch(DataPosition):
    """Saves the epoch alone."""

    def load_state_dict(self, state):
        super().load_state_dict(state | {"batch": 0})


# Locks.


class FileAlone(RunLock):
    """Takes the lock of anybody."""

    def _require_dead(self, holder, *, free_is_proof):
        return None


class NeverReleased(RunLock):
    """Keeps the lock for ever."""

    def release(self):
        return None


def any_start(process):
    """Take another process that got the number later for the one of the claim."""
    return is_alive(process | {"started": None})


is_alive = lock.is_alive


def every_kernel(path):
    return True


def nobody_reads(files, folder):
    return False


# Retention.


def without_note(store):
    """Delete nothing that was read at first."""


def reads_no_note(files):
    return frozenset()


def oldest_of_equals(value, step, saved, config):
    return is_among_best(value, -math.inf, saved, config)


def recoveries_alone(saved, config, *, step, damaged=(), protected=()):
    gone = to_delete(saved, config, step=step, damaged=damaged, protected=protected)
    return [one for one in gone if one.kind != "recovery"]


def without_current(parameters, config=None, **options):
    """Estimate as if the checkpoint that is being written took no space."""
    found = estimate_disk(parameters, config, **options)
    return found.__class__(**{**found.__dict__, "in_flight": 0})


def best_with_optimizer(parameters, config=None, **options):
    found = estimate_disk(parameters, config, **options)
    kept = {**found.kept, "best-k": found.kept["best-k"] * 3}
    return found.__class__(**{**found.__dict__, "kept": kept, "total": sum(kept.values())})


def no_values(snapshot, *, model_only=False):
    return sum(tensor.nbytes for tensor in snapshot.tensors.values())


def of_one_kind(files, kind, num_bytes):
    """Look at the volume of rollbacks, whatever is saved."""
    return require_room(files, "rollback", num_bytes)


require_room = retention.require_room


def optimizers_fault(name, owner, attribute, value, *, claim="optimizer-forms"):
    patches = [(owner, attribute, value)]
    return planted(f"checkpoint-policy.{claim}", name, patches=patches)


class Forgetful(TrainingState):
    """Saves the first of several optimizers."""

    def __init__(self, model, optimizer=(), *rest, **options):
        optimizers = list(optimizer) if isinstance(optimizer, list) else optimizer
        super().__init__(model, optimizers, *rest, **options)

    def snapshot(self):
        kept, self.optimizers = self.optimizers, self.optimizers[:1]
        try:
            return super().snapshot()
        finally:
            self.optimizers = kept


FAULTS = [
    planted("checkpoint-policy.optimizer-forms", "first-alone", state=Forgetful),
    optimizers_fault("only-tensors", OptimizerState, "restore", only_tensors),
    optimizers_fault(
        "with-prefix", optimizer_state, "bare_name", as_it_is, claim="optimizer-names"
    ),
    optimizers_fault("any-groups", OptimizerState, "_same_groups", any_groups),
    optimizers_fault("one-hash", FrozenBase, "_hash", one_hash, claim="frozen-base"),
    planted(
        "checkpoint-policy.every-generator",
        "without-python",
        patches=[(saved_forms, "take_random_state", without_python)],
    ),
    planted(
        "checkpoint-policy.every-generator",
        "rank-without-number",
        patches=[
            (
                saved_forms,
                "seed_new_rank",
                lambda state, rank, own: random_state.seed_new_rank(state, 0, own),
            )
        ],
        hint="two new ranks draw the same",
    ),
    planted("checkpoint-policy.data-position", "from-the-start", position=FromTheStart),
    planted("checkpoint-policy.data-position", "without-batch", position=WithoutBatch),
    planted("checkpoint-policy.one-writer", "file-alone", lock=FileAlone, hint="which is running"),
    planted("checkpoint-policy.one-writer", "never-released", lock=NeverReleased),
    planted(
        "checkpoint-policy.one-writer",
        "every-kernel",
        patches=[(lock, "kernel_locks_reach_all", every_kernel)],
    ),
    planted(
        "checkpoint-policy.one-writer",
        "any-start",
        patches=[(lock, "is_alive", any_start)],
        hint="another process of the same number",
    ),
    planted(
        "checkpoint-policy.given-up",
        "never",
        finish=without_note,
    ),
    planted(
        "checkpoint-policy.given-up",
        "reads-no-note",
        patches=[(retention, "given_up", reads_no_note)],
    ),
    planted(
        "checkpoint-policy.given-up",
        "nobody-reads",
        patches=[(retention, "is_being_read", nobody_reads)],
        hint="what is read stays",
    ),
    planted("checkpoint-policy.kept", "recoveries", rules=Rules(delete=recoveries_alone)),
    planted("checkpoint-policy.kept", "oldest", rules=Rules(among_best=oldest_of_equals)),
    planted("checkpoint-policy.disk-estimate", "without-current", estimate=without_current),
    planted("checkpoint-policy.disk-estimate", "best", estimate=best_with_optimizer),
    planted(
        "checkpoint-policy.no-room",
        "no-values",
        patches=[(saved_forms, "bytes_to_write", no_values)],
        hint="are required",
    ),
    planted(
        "checkpoint-policy.no-room",
        "another-volume",
        patches=[(trials, "require_room", of_one_kind)],
        hint="recovery_keep",
    ),
]
