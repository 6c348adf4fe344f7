"""Owners of the peak of a snapshot are those of the training that made it.

python -m pytest tests/plan/test_owners.py
"""

from collections import Counter

import pytest

from curry_train.plan.cuda_step import HOPPER_WORKSPACE_BYTES

from ..snapshot_files import owned_blocks, trained


def wrong_owners(owned, training):
    """Return the blocks whose owner is not that of the script."""
    found = []
    for life in owned.history.lives:
        owner = life.owner
        expected = training.truth[life.address, life.born]
        if owner != expected:
            found.append((life.born, life.requested_bytes, owner, expected))
    return found


def true_owners(owned, training):
    """Return the bytes at the peak by the owners of the script."""
    found = Counter()
    for life in owned.history.alive_at(owned.history.peak_index):
        own = life.own_bytes
        found[training.truth[life.address, life.born]] += own
        found["unsplit rests"] += life.num_bytes - own
    return {owner: size for owner, size in found.items() if size}


STYLES = [
    {},
    {"native_frames": False},
    {"windows": True},
    {"foreach": False},
    {"clips": True},
    # A matrix of 4096 x 4096 in bfloat16 has the bytes of a cuBLAS workspace on Hopper.
    {"matrix_bytes": HOPPER_WORKSPACE_BYTES},
]
MICROBATCHES = [{"num_microbatches": 3}, {"num_microbatches": 3, "foreach": False}]


@pytest.mark.parametrize("recorded_from", [None, 0])
@pytest.mark.parametrize("style", STYLES + MICROBATCHES, ids=str)
def test_every_block_has_the_owner_of_the_script(tmp_path, recorded_from, style):
    training = trained(recorded_from=recorded_from, steps=3, **style)
    owned = owned_blocks(tmp_path, training.snapshot())
    assert wrong_owners(owned, training) == []
    assert owned.owners == true_owners(owned, training)
    # Steps are those of the optimizer, and not of microbatches.
    assert len(owned.steps()) == 3
    assert sum(owned.owners.values()) == owned.history.peak_allocated


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("until", [None, "forward", "backward"])
def test_a_record_that_begins_later_has_the_same_owners(tmp_path, style, until):
    # Parameters and optimizer state are known by the sizes of the gradients alone.
    training = trained(recorded_from=1, steps=3, until=until, **style)
    owned = owned_blocks(tmp_path, training.snapshot())
    assert owned.owners == true_owners(owned, training)
    assert len(owned.steps()) == 2


def test_owners_of_a_record_without_stacks_add_up_to_the_peak(tmp_path):
    snapshot = trained(recorded_from=0, steps=4).snapshot()
    for event in snapshot["device_traces"][0]:
        del event["frames"]
    owned = owned_blocks(tmp_path, snapshot)
    assert not owned.has_stacks
    assert sum(owned.owners.values()) == owned.history.peak_allocated
