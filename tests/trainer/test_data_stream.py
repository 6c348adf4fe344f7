"""The stream of microbatches: shared by ranks, resumed from one integer.

Run with `python -m pytest tests/trainer/test_data_stream.py`.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curry_train.data import Stream


class Numbers:
    """A dataset whose batch is the list of its samples."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def batch(self, samples):
        return [int(sample) for sample in samples]


def stream(size=100, batch_size=8, microbatch=2, **options):
    return Stream(Numbers(size), batch_size=batch_size, microbatch=microbatch, **options)


def chained(parts):
    return list(itertools.chain.from_iterable(parts))


def windows(source, count):
    """Return the samples of each window, in the order of this rank."""
    per_window = source.microbatches_per_window
    parts = list(itertools.islice(source, count * per_window))
    return [
        chained(parts[start : start + per_window]) for start in range(0, len(parts), per_window)
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_trains_on_the_same_samples_in_each_window(ranks):
    alone = windows(stream(), 20)
    shared = [windows(stream(ranks=ranks, rank=rank), 20) for rank in range(ranks)]
    for number, window in enumerate(alone):
        assert sorted(window) == sorted(chained(mine[number] for mine in shared))


def test_a_stream_goes_on_from_a_position_with_another_number_of_ranks():
    whole = windows(stream(), 12)
    begun = stream()
    windows(begun, 5)
    assert begun.position == 40
    rest = [windows(stream(ranks=2, rank=rank, position=begun.position), 7) for rank in range(2)]
    assert [sorted(window) for window in whole[5:]] == [
        sorted(a + b) for a, b in zip(*rest, strict=True)
    ]


def test_position_moves_with_the_last_microbatch_of_a_window():
    """Move the position only then: a state saved between windows repeats and loses no sample."""
    source = stream()
    seen = [source.position for _ in itertools.islice(source, 9)]
    assert seen == [0, 0, 0, 8, 8, 8, 8, 16, 16]


@given(
    ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=4),
    start=st.integers(0, 70),
    batch=st.sampled_from([4, 8]),
)
@settings(max_examples=80, deadline=None)
def test_exactly_the_skipped_positions_are_left_out(ranges, start, batch):
    skipped = [(first, first + length) for first, length in ranges]
    source = stream(batch_size=batch, shuffle=False, size=1000, skipped=skipped, position=start)
    inside = {place for first, stop in skipped for place in range(first, stop)}
    wanted = [place for place in range(start, start + 400) if place not in inside]
    assert chained(windows(source, 10)) == wanted[: 10 * batch]
    assert set(range(wanted[10 * batch - 1] + 1, source.position)) <= inside


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 9},
            r"a window of 9 samples can't be cut into microbatches of 2 on 1 ranks: .* 2 x 1 = 2",
        ),
        ({"ranks": 3}, r"multiple of 2 x 3 = 6"),
        ({"skipped": [(5, 5)]}, "can't skip positions 5 to 5"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        stream(**options)
