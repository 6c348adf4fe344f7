"""Every generator continues, and so does a pass over the data.

python -m pytest tests/runs/test_random_state.py
"""

import contextlib
import copy
import os
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from curry_train.runs import DamagedCheckpoint, random_state
from curry_train.runs.random_state import (
    DataPosition,
    generators_of,
    inexact,
    restore_random_state,
    restore_threads,
    seed_new_rank,
    take_random_state,
)

SEED = 4193658238329649397


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draws(own):
    # The second of two normal numbers is stored with the first.
    numbers = random.gauss(0, 1), numpy.random.randn(), torch.rand(1).item()
    return [*numbers, torch.rand(1, generator=own).item()]


def test_a_generator_that_only_one_side_has_is_noted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    own = generator()
    draws(own)
    taken = take_random_state({"own": own})
    expected = draws(own)
    assert restore_random_state(taken, {"own": own}) == []
    assert draws(own) == expected
    # The generators of a loader are registered later.
    assert restore_random_state(taken | {"generator-data-loader": taken["generator-own"]}) == [
        "the generator generator-own was saved, but does not exist here"
    ]
    assert restore_random_state(take_random_state(), {"new": own}) == [
        "the generator new was not saved"
    ]
    assert restore_random_state({"torch": taken["torch"], "cuda-0": torch.zeros(16)}) == [
        "the generator cuda-0 was saved, but does not exist here",
        "the generator numpy was not saved",
        "the generator python was not saved",
    ]
    with pytest.raises(DamagedCheckpoint, match=r"^the saved random state can't be restored"):
        restore_random_state({"torch": torch.zeros(3, dtype=torch.uint8)})


def test_as_many_threads_compute_as_at_the_save_where_the_cores_are_there(monkeypatch, caplog):
    changed = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", changed.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: [*range(3 + process)])
    assert restore_threads(3) == "torch computes with 3 threads, as at the save; 2 were set"
    other = (
        "saved with 4 threads, but 2 are set, and this process has 3 cores: the last bits of sums "
        "on the CPU will differ; call torch.set_num_threads(4) for the same results"
    )
    assert restore_threads(4) == other
    assert "saved with 0 threads" in restore_threads(0)
    assert "saved with 3 threads" in restore_threads(3, may_restore=False)
    assert caplog.messages[0] == other
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert "has 1 cores" in restore_threads(2)
    restore_threads(1)
    assert changed == [3, 1]


def test_a_new_rank_draws_its_own_numbers_and_the_same_ones_each_time():
    own = generator()
    first = take_random_state()
    torch.rand(1)
    columns = []
    for state, rank in ((first, 1), (first, 2), (take_random_state(), 1)):
        seed_new_rank(state, rank, {"own": own})
        columns.append(draws(own))
        seed_new_rank(state, rank, {"own": own})
        assert draws(own) == columns[-1]
    assert all(len({*drawn}) == 3 for drawn in zip(*columns, strict=True))
    # A run that goes on later draws the same numbers.
    seed_new_rank({"torch": torch.zeros(4, dtype=torch.uint8)}, 3, {"own": own})
    assert torch.initial_seed() == own.initial_seed() == SEED


SAMPLES = range(10)
LOADERS = {
    "loader": lambda own: DataLoader(SAMPLES, 2, shuffle=True, generator=own),
    "sampler": lambda own: DataLoader(SAMPLES, 2, sampler=RandomSampler(SAMPLES, generator=own)),
    "inner-sampler": lambda own: DataLoader(
        SAMPLES, batch_sampler=BatchSampler(RandomSampler(SAMPLES, generator=own), 2, False)
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_pass_goes_on_with_the_batches_that_are_left(name, monkeypatch, caplog):
    spared = []
    monkeypatch.setattr(
        random_state, "spared_workers", lambda one: contextlib.nullcontext(spared.append(one))
    )
    loader = LOADERS[name](generator(3))
    assert list(generators_of(loader)) == [name]
    place = DataPosition()
    place.begin_epoch(4)
    data = place.iterator(loader, generators_of(loader))
    for _ in range(2):
        next(data)
        place.advance()
    saved = copy.deepcopy(place.state_dict())
    now = take_random_state(generators_of(loader))
    left = [batch.tolist() for batch in data]

    loader = LOADERS[name](generator(8))
    again = DataPosition()
    again.load_state_dict(saved)
    data = again.iterator(loader, generators_of(loader))
    restore_random_state(now, generators_of(loader))
    assert [batch.tolist() for batch in data] == left
    assert spared[1:] == [loader]
    assert not caplog.messages
    again.iterator([0] * 7, {})
    assert caplog.messages == [
        f"a pass had {len(loader)} batches before the save, and has 7 now: the 2 that are skipped "
        "may hold other samples than those that were trained on. Use the data and the batch size "
        "of the saved run"
    ]
    with pytest.raises(
        ValueError,
        match=r"^2 batches of epoch 4 were taken before the save, and the loader now has only 1: "
        "use the data and the batch size of the saved run, or start a new run$",
    ):
        again.iterator([1], {})


def test_a_window_of_microbatches_passes_over_those_that_are_skipped():
    place = DataPosition()
    place.skip(1, 3)
    place.skip(6, 7)
    assert [place.advance() for _ in range(5)] == [True, False, False, True, True]
    assert (place.position, place.batch) == (5, 5)
    assert place.after(5, windows=1) == 7
    # Three batches to a step, of which two more are skipped.
    place.stepped()
    assert [place.after(0, windows=number) for number in range(3)] == [0, 5, 9]
    place.begin_epoch(2)
    assert place.state_dict() == {"epoch": 2, "batch": 0, "began": None, "length": 0}
    place.stepped()
    assert place.after(7, windows=2) == 9
    batches = SimpleNamespace(generator=generator())
    assert list(generators_of(SimpleNamespace(batch_sampler=batches))) == ["batch-sampler"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, None),
        ({"num_workers": 1}, None),
        ({"persistent_workers": True, "in_order": False}, None),
        (
            {"num_workers": 1, "persistent_workers": True},
            "persistent_workers keep their generators from epoch to epoch, and a resumed run has "
            "new workers: random augmentation in them will differ; the order of the samples "
            "will not",
        ),
        (
            {"num_workers": 1, "in_order": False},
            "in_order=False yields batches in the order in which the workers finish them, so a "
            "resumed run may skip other batches than those that were taken",
        ),
    ],
)
def test_loaders_whose_batches_can_not_be_taken_again_are_named(options, named):
    assert inexact(SimpleNamespace(**options)) == named


def test_a_loader_that_draws_a_batch_ahead_is_named():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert inexact(accelerator.prepare(DataLoader(range(4)))) == (
        "Accelerate draws each batch one step early, before the numbers that the step before "
        "draws: random augmentation in the dataset will differ after a resume within an epoch; "
        "the order of the samples will not. Give the DataLoader num_workers of at least 1"
    )
    assert inexact(accelerator.prepare(DataLoader(range(4), num_workers=1))) is None
