"""The fewest GPUs on which a training fits, against a search of all numbers of GPUs.

python -m pytest tests/plan/test_fewest.py
"""

from dataclasses import replace

import pytest

from curry_train.plan.device import find_profile
from curry_train.plan.fewest import CHANGES, fewest_gpus
from curry_train.plan.parallel import Sharding
from curry_train.workloads.models import mlp

MIB = 2**20
MODEL = mlp(depth=3, width=4096)


def card(num_bytes):
    return replace(find_profile("h100"), usable_bytes=num_bytes)


@pytest.fixture(scope="module")
def every_count():
    """Try each number of GPUs with memory that no change fits, and get the least peaks."""
    found = {}
    for count in (1, 2):
        alone = fewest_gpus(MODEL, card(1), global_batch=2, most=count)
        found[count] = next(one for one in alone.attempts if one.num_gpus == count)
    return found


def test_the_fewest_gpus_are_those_of_a_search_through_all_numbers(every_count):
    peaks = {count: one.peak_bytes for count, one in every_count.items()}
    assert peaks[1] > peaks[2]
    found = fewest_gpus(MODEL, card(peaks[2]), global_batch=2)
    assert found.best.num_gpus == min(n for n, peak in peaks.items() if peak <= peaks[2]) == 2
    assert found.best.margin_bytes >= 0
    alone = next(one for one in found.attempts if one.num_gpus == 1)
    assert alone.margin_bytes == peaks[2] - peaks[1] < 0
    table = found.table()
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "2 GPUs" in table
    assert "With 1, " in " ".join(table.split())
    assert "NCCL" in table
    # One GPU waits for none, and of two each waits for its gathers and scatters.
    assert alone.seconds.exposed == alone.seconds.communication == 0 < alone.seconds.compute
    assert 0 < found.best.seconds.exposed <= found.best.seconds.communication
    assert "not measured" in table
    assert found.to_json()["attempts"][-1]["communication_seconds"] > 0
    assert found.to_json()["fewest_gpus"] == 2


def test_no_change_is_needed_where_all_fits_and_nothing_fits_a_card_without_memory(every_count):
    roomy = fewest_gpus(MODEL, card(80 * 1024 * MIB), global_batch=1)
    assert [(one.num_gpus, one.change) for one in roomy.attempts] == [(1, CHANGES[0])]
    assert not every_count[2].fits


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": find_profile("cpu"), "global_batch": 4}, "the memory of cpu is not known"),
        (
            {
                "device": card(MIB),
                "global_batch": 3,
                "sharding": Sharding("hsdp", mesh={"replicate": 1, "shard": 2}),
            },
            "a global batch of 3 can't be shared",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        fewest_gpus(MODEL, **settings)
