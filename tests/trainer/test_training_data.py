"""Open the data that a configuration names.

Run with `python -m pytest tests/trainer/test_training_data.py`.
"""

import numpy
import pytest

from curry_train.cli.train import open_named_data
from curry_train.config import load_config
from curry_train.data import split_dev
from curry_train.workloads import load_workload
from curry_train.workloads.workload import Case, WorkloadError


def opened(model, *words, vocabulary=None):
    config = load_config(None, words).data
    whole = open_named_data(config, Case(load_workload(model)), vocabulary=vocabulary)
    return split_dev(whole, config.dev_fraction)


def test_dev_samples_are_the_last_ones_and_are_not_trained_on():
    train, dev = opened("training_models:tiny", "data.dev_fraction=0.25")
    assert len(dev) == round((len(train) + len(dev)) / 4)
    assert (train.start, train.stop, dev.stop) == (0, dev.start, len(train) + len(dev))
    assert train.batch([0])["tokens"].shape == (1, 16)


def test_the_length_defaults_to_the_models_own():
    train, _ = opened("training_models:tiny", "data.length=5")
    assert train.batch([0])["tokens"].shape == (1, 5)


def test_files_of_tokens_are_read(tmp_path):
    numpy.save(tmp_path / "0.npy", numpy.arange(200) % 50)
    train, dev = opened("training_models:tiny", "data.source=tokens", f"data.path={tmp_path}/*.npy")
    assert (len(train), len(dev)) == (11, 1)
    assert train.batch([1])["tokens"].tolist() == [list(range(16, 32))]


def test_a_users_own_dataset_is_found_by_its_name():
    train, dev = opened(
        "training_models:line", "data.source=training_models:points", "data.dev_fraction=0.1"
    )
    assert (len(train), len(dev)) == (180, 20)
    points, halves = train.batch([0, 199 - 20])
    assert points.shape == (2, 2)
    assert halves.tolist() == [0, 1]


def test_text_with_more_tokens_than_the_vocabulary_is_refused():
    with pytest.raises(
        WorkloadError, match="text needs a vocabulary of 256 bytes, and transformer has 100 tokens"
    ):
        opened("training_models:few_tokens", vocabulary=100)


def test_too_few_samples_to_train_on_are_refused(tmp_path):
    numpy.save(tmp_path / "0.npy", numpy.arange(20))
    with pytest.raises(
        ValueError,
        match=r"data\.dev_fraction=0\.05 of 1 samples leaves none to train on or to measure",
    ):
        opened("training_models:tiny", "data.source=tokens", f"data.path={tmp_path}/*.npy")


def test_an_error_in_the_users_dataset_names_the_users_line():
    with pytest.raises(
        WorkloadError,
        match="training_models:broken: the factory raised RuntimeError: no weights here",
    ):
        opened("training_models:tiny", "data.source=training_models:broken")
