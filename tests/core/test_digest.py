"""A digest changes with each bit and each position, for every dtype and layout.

Run: `python -m pytest tests/core/test_digest.py`.
"""

import pytest
import torch

from curry_train.core import digest as digest_module
from curry_train.core.digest import digest, digest_rows

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
OTHERS = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]


def some(dtype, *shape):
    torch.manual_seed(0)
    if dtype in FLOATS:
        return torch.randn(*shape, dtype=dtype)
    return torch.randint(2 if dtype == torch.bool else 100, shape).to(dtype)


def flipped(tensor, *bits):
    """Return a copy with these bits flipped, counted from the first byte."""
    found = tensor.clone().contiguous()
    flat = found.reshape(-1).view(torch.uint8)
    for bit in bits:
        flat[bit // 8] ^= 1 << bit % 8
    return found


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS])
def test_equal_values_have_equal_digests_and_another_order_has_another(dtype):
    tensor = some(dtype, 7, 9)
    assert digest(tensor) == digest(tensor.clone())
    assert digest(torch.empty(9, 7, dtype=dtype).t().copy_(tensor)) == digest(tensor)
    assert digest(tensor[[1, 0, 2, 3, 4, 5, 6]]) != digest(tensor)
    assert digest(tensor[:, [1, 0, *range(2, 9)]]) != digest(tensor)
    assert digest(tensor.reshape(9, 7)) != digest(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_each_flip_and_each_pair_of_flips_is_seen(dtype):
    tensor = some(dtype, 5, 3)
    num_bits = tensor.numel() * tensor.element_size() * 8
    single = {digest(flipped(tensor, bit)) for bit in range(num_bits)}
    assert len(single | {digest(tensor)}) == num_bits + 1
    # All signs, and so the highest bits of all words: in pairs, which a sum would not see.
    width = tensor.element_size() * 8
    signs = range(width - 1, num_bits, width)
    pairs = {digest(flipped(tensor, one, two)) for one in signs for two in signs if one < two}
    assert len(pairs | {digest(tensor)}) == len(signs) * (len(signs) - 1) // 2 + 1
    assert digest(-tensor) != digest(tensor)


def test_signs_of_every_other_element_are_seen():
    tensor = some(torch.complex64, 4, 8)
    assert digest(tensor.conj()) != digest(tensor)
    assert digest(tensor.conj()) == digest(tensor.conj().resolve_conj())


def test_swaps_between_the_pieces_of_a_large_tensor_are_seen(monkeypatch):
    monkeypatch.setattr(digest_module, "PIECE_WORDS", 16)
    tensor = some(torch.float32, 64, 32)
    assert len({digest(tensor), digest(tensor.roll(1, 0)), digest(flipped(tensor, 63, 16447))}) == 3
    shards = tensor.chunk(4)
    assert digest(torch.cat([shards[1], shards[0], *shards[2:]])) != digest(tensor)


def test_a_slice_that_begins_within_a_word_equals_its_copy():
    tensor = some(torch.float32, 11)
    assert digest(tensor[1:]) == digest(tensor[1:].clone())
    assert digest(tensor[1:8]) == digest(tensor[1:8].clone())


def test_a_digest_is_the_same_on_every_machine():
    assert digest(torch.arange(6, dtype=torch.float32)) == "float32[6]:3db5f98d71d43461"


class Named(torch.Tensor):
    pass


def test_tensors_of_other_layouts_and_classes_have_digests():
    dense = torch.eye(3)
    parts = [dense.split(sizes) for sizes in ([1, 2], [2, 1], [1, 2])]
    nested = [torch.nested.as_nested_tensor([*one], layout=torch.jagged) for one in parts]
    first, other, again = map(digest, nested)
    assert first == again != other
    assert digest(dense.to_sparse()) == digest(dense.as_subclass(Named)) == digest(dense)
    assert digest(torch.empty(3, device="meta")) == "float32[3]:Tensor"


def test_rows_are_found_again_in_another_order():
    tensor = some(torch.int64, 6, 4)
    rows = digest_rows(tensor)
    order = [3, 1, 5, 0, 2, 4]
    assert digest_rows(tensor[order]) == [rows[place] for place in order]
    assert len(set(rows)) == 6
