"""Save and restore random generators and the position in the data.

Each rank has its own state, so its keys end in the rank.

Proof: `python -m pytest tests/runs/test_random_state.py tests/runs/test_state.py`.
"""

import contextlib
import copy
import functools
import itertools
import logging
import operator
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar
from unittest import mock

import numpy
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from ..core.digest import hash_of
from ..core.generators import generator_states, seed_generators, set_generator_states
from .ranks import reading
from .values import Facts, Values

# Random state of torch, CUDA, Python, numpy and the user's own generators; number of threads.

logger = logging.getLogger(__name__)
# Prefix of the names under which the generators of a loader are saved.
DATA_PREFIX = "data-"


def take_random_state(generators: Mapping[str, torch.Generator] = {}) -> Facts:
    """Return the current state of every generator, by name."""
    own = {f"generator-{name}": one.get_state() for name, one in generators.items()}
    return generator_states() | own


def restore_random_state(
    states: Values, generators: Mapping[str, torch.Generator] = {}
) -> list[str]:
    """Restore every generator; return a note for each one that could not be restored.

    Raises DamagedCheckpoint for a state that its generator refuses.
    """
    here = take_random_state(generators).keys()
    own = {f"generator-{name}": one for name, one in generators.items()}
    # NumPy may not be loaded yet, nor a GPU be in use.
    known = {*here, "numpy", *(f"cuda-{index}" for index in range(torch.cuda.device_count()))}
    notes = []
    with reading("the saved random state can't be restored", RuntimeError):
        for name, state in states.items():
            if name in own:
                own[name].set_state(state)
            elif name in known:
                set_generator_states({name: state})
            # Those of a loader are registered later.
            elif not name.startswith(f"generator-{DATA_PREFIX}"):
                notes.append(f"the generator {name} was saved, but does not exist here")
    for name in sorted(here - states.keys()):
        notes.append(f"the generator {name.removeprefix('generator-')} was not saved")
    return notes


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def restore_threads(saved: int, *, may_restore: bool = True) -> str:
    """Compute with as many threads as at the save where the machine has them; return a note.

    Sums on the CPU are divided among the threads, so their last bits depend on the number.
    """
    current = torch.get_num_threads()
    cores = num_cores()
    if may_restore and 0 < saved <= cores:
        torch.set_num_threads(saved)
        return f"torch computes with {saved} threads, as at the save; {current} were set"
    note = (
        f"saved with {saved} threads, but {current} are set, and this process has {cores} cores: "
        f"the last bits of sums on the CPU will differ; call torch.set_num_threads({saved}) for "
        f"the same results"
    )
    logger.warning("%s", note)
    return note


def seed_new_rank(states: Values, rank: int, generators: Mapping[str, torch.Generator]) -> None:
    """Seed the generators of a rank that did not exist at the save.

    The seed comes from the state of the first rank and this rank's number.
    """
    first_state = states["torch"].numpy().tobytes()
    seed = int(hash_of(first_state + rank.to_bytes(8)), 16) >> 1
    seed_generators(seed)
    for generator in generators.values():
        generator.manual_seed(seed)


# The position in the training data, with any DataLoader.

BatchT = TypeVar("BatchT")


class Stateful:
    """Save and load the attributes that `STATE` names."""

    STATE: ClassVar[Sequence[str]]

    def state_dict(self) -> Facts:
        return {name: copy.copy(getattr(self, name)) for name in self.STATE}

    def load_state_dict(self, state: Values) -> None:
        vars(self).update({name: state[name] for name in self.STATE})


# The positions from the first one up to, but not including, the second.
Range = tuple[int, int]


class SkippedPositions:
    """Ranges of positions in the data that are left out; the others keep their numbers."""

    skipped: Sequence[Range] = ()

    def skip(self, start: int, stop: int) -> None:
        """Leave out the positions from `start` up to `stop`, from now on."""
        if not 0 <= start < stop:
            raise ValueError(
                f"can't skip positions {start} to {stop}: the first must be at least 0 and below "
                f"the second"
            )
        self.skipped = sorted([*self.skipped, (start, stop)])

    def positions(self, position: int, count: int) -> NDArray[numpy.int64]:
        """Return the next `count` positions from `position` on that are not left out."""
        found = numpy.arange(position, position + count)
        for start, stop in self.skipped:
            # A view of those that follow `start`, of which the first becomes `stop`.
            later = found[numpy.searchsorted(found, start) :]
            later += stop - later.min(initial=stop)
        return found


class DataPosition(Stateful, SkippedPositions):
    """The position in the training data.

    `epoch` counts passes from 0, `batch` the batches taken in the current pass, and `position` all
    of them.
    """

    # Saved separately for every rank, because the generators of the ranks differ.
    of_each_rank = True
    STATE = ("epoch", "batch", "began", "length")

    def __init__(self) -> None:
        self.begin_epoch(0)
        # The number of batches in a pass; 0 where the loader does not know it.
        self.length = 0
        self.position = 0
        # The batches that the last optimizer step took, and those taken since then.
        self._window = 1
        self.taken = 0

    def advance(self) -> bool:
        """Count a batch; return whether to train on it."""
        is_taken = bool(self.positions(self.position, 1) == self.position)
        self.batch += 1
        self.position += 1
        self.taken += is_taken
        return is_taken

    def stepped(self) -> None:
        self._window = max(1, self.taken)
        self.taken = 0

    def after(self, position: int, *, windows: int) -> int:
        """Return the position that lies so many steps after `position`."""
        return int(self.positions(position, windows * self._window + 1)[-1])

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.batch = 0
        # The generators' states where the pass began.
        self.began: Facts | None = None

    def iterator(
        self, loader: Iterable[BatchT], generators: dict[str, torch.Generator]
    ) -> Iterator[BatchT]:
        """Return an iterator over the remaining batches of this pass.

        On a resume the caller still has to restore the generators to their saved states.
        """
        length = operator.length_hint(loader)
        if self.began is None:
            self.batch = 0
            self.began = take_random_state(generators)
            self.length = length
        else:
            restore_random_state(self.began, generators)
            if self.batch and length != self.length:
                logger.warning(
                    "a pass had %d batches before the save, and has %d now: the %d that are "
                    "skipped may hold other samples than those that were trained on. Use the data "
                    "and the batch size of the saved run",
                    self.length,
                    length,
                    self.batch,
                )
        with spared_workers(loader):
            iterator = iter(loader)
        num_taken = sum(1 for _ in itertools.islice(iterator, self.batch))
        if num_taken < self.batch:
            raise ValueError(
                f"{self.batch} batches of epoch {self.epoch} were taken before the save, and the "
                f"loader now has only {num_taken}: use the data and the batch size of the saved "
                "run, or start a new run"
            )
        return iterator


def _start_spared(then: Callable[[int], None] | None, worker: int) -> None:
    """Begin a worker that only the process that started it can end with SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if then is not None:
        then(worker)


def _end_with(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


@contextlib.contextmanager
def spared_workers(loader: Any) -> Iterator[None]:
    """Let a loader start workers that a SIGTERM to the whole process group does not end.

    Slurm and `timeout` signal all processes of a job. Torch raises an error in the middle of a step
    when a worker ends, so the training could not finish the step and save.
    """
    has_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
    if not has_workers or not hasattr(signal, "sigwaitinfo"):
        yield
        return
    begin = functools.partial(_start_spared, loader.worker_init_fn)
    # The workers inherit the mask, so the signal can't end them before their start is done.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with mock.patch.object(loader, "worker_init_fn", begin):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """Return the generators that belong to a loader and its samplers."""
    batches = getattr(loader, "batch_sampler", None)
    owners = {
        "loader": loader,
        "sampler": getattr(loader, "sampler", None),
        "batch-sampler": batches,
        "inner-sampler": getattr(batches, "sampler", None),
    }
    found: dict[str, torch.Generator] = {}
    for name, owner in owners.items():
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found.values():
            found[name] = generator
    return found


def inexact(loader: Any) -> str | None:
    """Return why a resume in the middle of a pass may not be exact; None if it is exact."""
    has_workers = getattr(loader, "num_workers", None)
    if has_workers and getattr(loader, "persistent_workers", None):
        return (
            "persistent_workers keep their generators from epoch to epoch, and a resumed run has "
            "new workers: random augmentation in them will differ; the order of the samples "
            "will not"
        )
    if has_workers and not getattr(loader, "in_order", True):
        return (
            "in_order=False yields batches in the order in which the workers finish them, so a "
            "resumed run may skip other batches than those that were taken"
        )
    # Workers draw the numbers of a batch from its place in the pass, at whatever time.
    if type(loader).__module__ == "accelerate.data_loader" and not has_workers:
        return (
            "Accelerate draws each batch one step early, before the numbers that the step before "
            "draws: random augmentation in the dataset will differ after a resume within an epoch; "
            "the order of the samples will not. Give the DataLoader num_workers of at least 1"
        )
    return None
