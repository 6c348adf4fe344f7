"""Datasets of tokens: samples, documents, masks, and files.

Run with `python -m pytest tests/trainer/test_data_tokens.py`.
"""

import numpy
import pytest
import torch

from curry_train.data import (
    Tokens,
    layout_of,
    open_tokens,
    read_library_text,
)
from curry_train.workloads import load_workload

EXAMPLE = {
    "tokens": torch.zeros(1, 4, dtype=torch.int64),
    "targets": torch.zeros(1, 4, dtype=torch.int64),
}
LAYOUT, LENGTH = layout_of(EXAMPLE)


def tokens(*arrays, **options):
    return Tokens(
        [numpy.asarray(array) for array in arrays], length=LENGTH, layout=LAYOUT, **options
    )


def test_targets_are_the_tokens_that_follow_and_samples_do_not_overlap():
    data = tokens(range(10, 20))
    batch = data.batch([0, 1])
    assert len(data) == 2
    assert batch["tokens"].tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert batch["targets"].tolist() == [[11, 12, 13, 14], [15, 16, 17, 18]]


def test_samples_do_not_cross_from_one_array_to_the_next():
    data = tokens(range(5), range(100, 109))
    assert len(data) == 1 + 2
    assert data.batch([0, 1, 2])["targets"].tolist() == [
        [1, 2, 3, 4],
        [101, 102, 103, 104],
        [105, 106, 107, 108],
    ]


def test_documents_are_padded_and_no_target_is_from_the_next_one():
    data = tokens(range(12), documents=[[0, 3, 4]])
    batch = data.batch([0, 1, 2])
    assert (
        len(data) == 3
    )  # the documents of 3 and 8 tokens, the latter in two samples; a single token has no target
    assert batch["tokens"].tolist() == [[0, 1, 0, 0], [4, 5, 6, 7], [8, 9, 10, 0]]
    assert batch["targets"].tolist() == [[1, 2, -100, -100], [5, 6, 7, 8], [9, 10, 11, -100]]


def test_targets_outside_of_the_mask_are_not_learned():
    data = tokens(range(9), masks=[numpy.array([0, 0, 1, 1, 0, 1, 0, 0, 1])])
    assert data.batch([0, 1])["targets"].tolist() == [[-100, 2, 3, -100], [5, -100, -100, 8]]


def test_hugging_face_gets_labels_that_it_shifts_itself():
    example = {"input_ids": EXAMPLE["tokens"], "labels": EXAMPLE["tokens"], "use_cache": False}
    layout, length = layout_of(example | {"attention_mask": EXAMPLE["tokens"]})
    batch = Tokens([numpy.arange(12)], length=length, layout=layout, documents=[[0, 3, 4]]).batch(
        [0, 1]
    )
    assert batch["use_cache"] is False
    assert batch["input_ids"].tolist() == [[0, 1, 0, 0], [4, 5, 6, 7]]
    assert batch["labels"].tolist() == [[-100, 1, 2, -100], [-100, 5, 6, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert "attention_mask" not in layout_of(example)[0](*[EXAMPLE["tokens"]] * 3)


def test_a_model_without_token_input_is_refused_with_its_input():
    with pytest.raises(ValueError, match=r"this one takes a tuple: use data\.source=workload"):
        layout_of(load_workload("mlp").batch(1))
    with pytest.raises(ValueError, match="a mapping of pixels"):
        layout_of({"pixels": torch.zeros(1)})


def test_a_token_outside_of_the_vocabulary_is_named_with_its_place():
    with pytest.raises(
        ValueError, match=r"array 0 has token 9 at 3, but the model's vocabulary has 9 tokens: "
    ):
        tokens([1, 2, 3, 9, 4], vocabulary=9).batch([0])


def test_files_are_mapped_in_order_with_their_masks_and_documents(tmp_path):
    numpy.save(tmp_path / "b.npy", numpy.arange(100, 109, dtype="uint16"))
    numpy.save(tmp_path / "a.npy", numpy.arange(9, dtype="uint32"))
    for name in "ab":
        numpy.save(tmp_path / f"{name}.documents.npy", numpy.array([0, 5]))
        numpy.save(tmp_path / f"{name}.mask.npy", numpy.ones(9, dtype=bool))
    data = open_tokens(str(tmp_path / "*.npy"), length=4, layout=LAYOUT, documents=True, mask=True)
    assert [type(array) for array in data.arrays] == [numpy.memmap] * 2
    assert data.batch(range(4))["tokens"].tolist() == [
        [0, 1, 2, 3],
        [5, 6, 7, 0],
        [100, 101, 102, 103],
        [105, 106, 107, 0],
    ]


def test_raw_files_hold_16_bit_numbers(tmp_path, monkeypatch):
    numpy.arange(60_000, 60_009, dtype="uint16").tofile(tmp_path / "raw.bin")
    monkeypatch.chdir(tmp_path)
    assert open_tokens("raw.bin", length=4, layout=LAYOUT).batch([1])["targets"].tolist() == [
        [60005, 60006, 60007, 60008]
    ]


@pytest.mark.parametrize(
    ("write", "options", "message"),
    [
        (None, {}, r"no token file matches .*numpy\.save"),
        (numpy.arange(4), {}, r"for a sample of 4 tokens and a target: .*0\.npy 4"),
        (
            numpy.ones(9),
            {},
            r"0\.npy holds float64 of shape \(9,\): tokens must be a one-dimensional array",
        ),
        (numpy.arange(9), {"mask": True}, r"0\.mask\.npy does not exist"),
        (numpy.array([{}]), {}, "holds no array that can be mapped"),
    ],
)
def test_invalid_token_files_are_refused(tmp_path, write, options, message):
    if write is not None:
        numpy.save(tmp_path / "0.npy", write, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        open_tokens(str(tmp_path / "0.npy"), length=4, layout=LAYOUT, **options)


def test_mask_of_another_length_and_documents_out_of_order_are_refused():
    with pytest.raises(ValueError, match="array 0 has 9 tokens, but its mask has 8"):
        tokens(range(9), masks=[numpy.ones(8)])
    with pytest.raises(ValueError, match="must begin in rising order inside its 9 tokens"):
        tokens(range(9), documents=[[0, 7, 3]])
    with pytest.raises(ValueError, match="must begin in rising order"):
        tokens(range(9), documents=[[0, 12]])


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
