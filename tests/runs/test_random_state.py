"""Every generator continues, and so does a pass over the data.

python -m pytest tests/runs/test_random_state.py
"""

import copy
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from curry_train.runs.random_state import (
    DataPosition,
    generators_of,
    inexact,
    restore_random_state,
    seed_new_rank,
    take_random_state,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draws(own):
    numbers = torch.rand(1).item(), random.random(), numpy.random.rand()
    return [*numbers, torch.rand(1, generator=own).item()]


def test_a_generator_that_only_one_side_has_is_noted():
    own = generator()
    taken = take_random_state({"own": own})
    expected = draws(own)
    assert restore_random_state(taken, {"own": own}) == []
    assert draws(own) == expected
    assert "generator-own was saved, but" in restore_random_state(taken)[0]
    assert "new was not saved" in restore_random_state(take_random_state(), {"new": own})[0]
    notes = restore_random_state({"torch": taken["torch"], "cuda-97": torch.zeros(16)})
    assert [note.split()[0:3] for note in notes] == [
        ["the", "generator", "cuda-97"],
        ["the", "generator", "numpy"],
        ["the", "generator", "python"],
    ]


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


SAMPLES = range(10)
LOADERS = {
    "own generator": lambda own: DataLoader(SAMPLES, 2, shuffle=True, generator=own),
    "sampler": lambda own: DataLoader(SAMPLES, 2, sampler=RandomSampler(SAMPLES, generator=own)),
    "batch sampler": lambda own: DataLoader(
        SAMPLES, batch_sampler=BatchSampler(RandomSampler(SAMPLES, generator=own), 2, False)
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_pass_goes_on_with_the_batches_that_are_left(name):
    loader = LOADERS[name](generator(3))
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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_workers": 1, "in_order": True}, None),
        ({"persistent_workers": True, "in_order": False}, None),
        ({"num_workers": 1, "persistent_workers": True}, "persistent_workers"),
        ({"num_workers": 1, "in_order": False}, "in_order=False"),
    ],
)
def test_loaders_whose_batches_can_not_be_taken_again_are_named(options, named):
    why = inexact(SimpleNamespace(**options))
    assert why is None if named is None else why.startswith(named)


def test_a_loader_that_draws_a_batch_ahead_is_named():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    ahead = accelerator.prepare(DataLoader(range(4)))
    why = inexact(ahead)
    assert why.startswith("Accelerate draws each batch one step early")
    assert why.endswith("Give the DataLoader num_workers of at least 1")
    assert inexact(accelerator.prepare(DataLoader(range(4), num_workers=1))) is None
