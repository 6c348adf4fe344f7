"""Datasets of tokens: samples and files.

Run with `python -m pytest tests/trainer/test_data.py`.
"""

import itertools

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curry_train.cli.train import open_named_data
from curry_train.config import load_config
from curry_train.data import (
    Stream,
    Tokens,
    layout_of,
    open_tokens,
    ordered,
    read_library_text,
    split_dev,
)
from curry_train.workloads import Case, load_workload

EXAMPLE = {
    "tokens": torch.zeros(1, 4, dtype=torch.int64),
    "targets": torch.zeros(1, 4, dtype=torch.int64),
}
LAYOUT, LENGTH = layout_of(EXAMPLE)


def tokens(*arrays, **options):
    return Tokens(
        [numpy.asarray(array) for array in arrays], length=LENGTH, layout=LAYOUT, **options
    )


def test_hugging_face_gets_labels_that_it_shifts_itself():
    example = {"input_ids": EXAMPLE["tokens"], "labels": EXAMPLE["tokens"], "use_cache": False}
    layout, length = layout_of(example | {"attention_mask": EXAMPLE["tokens"]})
    batch = Tokens([numpy.arange(12)], length=length, layout=layout).batch([0, 1])
    assert batch["use_cache"] is False
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch["labels"].tolist() == [[-100, 1, 2, 3], [-100, 5, 6, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert "attention_mask" not in layout_of(example)[0](*[EXAMPLE["tokens"]] * 2)


def test_a_model_without_token_input_is_refused_with_its_input():
    with pytest.raises(ValueError, match="this one takes pixels: "):
        layout_of({"pixels": torch.zeros(1)})


def test_a_token_outside_of_the_vocabulary_is_named_with_its_place():
    with pytest.raises(
        ValueError, match=r"array 0 has token 9 at 3, but the model's vocabulary has 9 tokens: "
    ):
        tokens([1, 2, 3, 9, 4], vocabulary=9).batch([0])


def test_files_are_mapped_in_order(tmp_path):
    numpy.save(tmp_path / "b.npy", numpy.arange(100, 109, dtype="uint16"))
    numpy.save(tmp_path / "a.npy", numpy.arange(9, dtype="uint32"))
    data = open_tokens(str(tmp_path / "*.npy"), length=4, layout=LAYOUT)
    assert [type(array) for array in data.arrays] == [numpy.memmap] * 2
    assert data.batch(range(4))["tokens"].tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [100, 101, 102, 103],
        [104, 105, 106, 107],
    ]


def test_raw_files_hold_16_bit_numbers(tmp_path, monkeypatch):
    numpy.arange(60_000, 60_009, dtype="uint16").tofile(tmp_path / "raw.bin")
    monkeypatch.chdir(tmp_path)
    assert open_tokens("raw.bin", length=4, layout=LAYOUT).batch([1])["targets"].tolist() == [
        [60005, 60006, 60007, 60008]
    ]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (None, r"no token file matches .*numpy\.save"),
        (numpy.arange(4), "for a sample of 4 tokens and a target, the longest has 4: use"),
        (
            numpy.ones(9),
            r"0\.npy holds float64 of shape \(9,\): tokens must be a one-dimensional array",
        ),
        (numpy.array([{}]), "holds no array that can be mapped"),
    ],
)
def test_invalid_token_files_are_refused(tmp_path, write, message):
    if write is not None:
        numpy.save(tmp_path / "0.npy", write, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        open_tokens(str(tmp_path / "0.npy"), length=4, layout=LAYOUT)


def test_library_text_is_that_of_this_python():
    text = read_library_text()
    assert text.dtype == numpy.uint8
    assert len(text) > 2_000_000
    assert b"def dataclass(" in text.tobytes()


def test_a_python_without_sources_gets_a_message_with_the_fix(tmp_path):
    with pytest.raises(
        RuntimeError, match=r"holds no Python sources to train on .* data\.source=tokens"
    ):
        read_library_text(tmp_path)


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


def test_any_number_of_ranks_trains_on_the_same_samples_in_each_window():
    alone = windows(stream(position=40), 20)
    shared = [windows(stream(ranks=4, rank=rank, position=40), 20) for rank in range(4)]
    for number, window in enumerate(alone):
        assert sorted(window) == sorted(chained(mine[number] for mine in shared))


def test_position_moves_with_the_last_microbatch_of_a_window():
    """Move the position only then: a state saved between windows repeats and loses no sample."""
    source = stream()
    assert [source.position for _ in itertools.islice(source, 9)] == [0, 0, 0, 8, 8, 8, 8, 16, 16]


@given(
    ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=4),
    start=st.integers(0, 70),
    batch=st.sampled_from([4, 8]),
)
@settings(max_examples=80, deadline=None)
def test_exactly_the_skipped_positions_are_left_out(ranges, start, batch):
    skipped = [(first, first + length) for first, length in ranges]
    source = stream(batch_size=batch, shuffle=False, skipped=skipped, position=start)
    inside = {place for first, stop in skipped for place in range(first, stop)}
    wanted = [place for place in range(start, start + 400) if place not in inside]
    assert chained(windows(source, 10)) == [place % 100 for place in wanted[: 10 * batch]]
    assert set(range(wanted[10 * batch - 1] + 1, source.position)) <= inside


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ranks": 3},
            r"a window of 8 samples can't be cut into microbatches of 2 on 3 ranks: .* 2 x 3 = 6",
        ),
        ({"skipped": [(5, 5)]}, "can't skip positions 5 to 5"),
        ({"size": 0}, "the data has no sample to train on"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        stream(**options)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_every_epoch_has_every_sample_once(size, seed, epoch):
    found = ordered(numpy.arange(epoch * size, (epoch + 1) * size), size, seed=seed)
    assert sorted(found) == list(range(size))


def test_order_of_a_seed_never_changes():
    """Keep the order, so that a run resumed with a later version sees the same samples."""
    assert ordered(range(10), 100).tolist() == [37, 34, 32, 2, 27, 68, 75, 67, 39, 78]
    assert ordered(range(100, 110), 100).tolist() == [21, 16, 5, 74, 39, 27, 95, 70, 67, 59]


def opened(model, *words):
    config = load_config(None, words).data
    return split_dev(open_named_data(config, Case(load_workload(model))), config.dev_fraction)


def test_dev_samples_are_the_last_ones_and_are_not_trained_on():
    train, dev = opened("tests.training_models:tiny", "data.dev_fraction=0.25", "data.length=5")
    assert len(dev) == round((len(train) + len(dev)) / 4)
    assert (train.start, train.stop, dev.stop) == (0, dev.start, len(train) + len(dev))
    # The length that is given replaces the model's own.
    assert train.batch([0])["tokens"].shape == (1, 5)


def test_too_few_samples_to_train_on_are_refused(tmp_path):
    numpy.save(tmp_path / "0.npy", numpy.arange(20))
    with pytest.raises(
        ValueError,
        match=r"data\.dev_fraction=0\.05 of 1 samples leaves none to train on or to measure",
    ):
        opened(
            "tests.training_models:tiny",
            "data.source=tokens",
            f"data.path={tmp_path}/*.npy",
        )
