"""Digest the bits of tensors, so that two processes can compare what they computed.

    digest(tensor)  # "float32[4, 8]:9f0c1b6e2a7d4438"

The bits are summed with a weight for each position, so another order of the elements has another
digest; `torch.hash_tensor` combines them by xor, without positions.

Proof: `python -m pytest tests/core/test_digest.py`.
"""

import functools
import hashlib
import pickle

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .generators import generator_states, unwatched

WORD_BYTES = 8
# Words that are multiplied at once. On the CPU they and their weights stay in the cache.
PIECE_WORDS = 2**16
PIECE_WORDS_ELSEWHERE = 2**22
# Odd constants that spread the bits of a position (of SplitMix64, as signed numbers).
SPREAD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has values of its own in one storage."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """Return dtype, shape and 64 bits that depend on each bit of a tensor and on its position.

    A tensor of several ranks is gathered, so all of them have to call this. Of tensors without
    values, and of classes with operations of their own, the digest is their type alone.
    """
    with unwatched():
        # torch 2.11 can't gather a parameter without grad mode.
        tensor = tensor.detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        elif tensor.is_sparse:
            tensor = tensor.to_dense()
        elif tensor.is_nested:
            # Its own shape counts the nested tensors that the process has made.
            tensor = tensor.to_padded_tensor(0)
        # A class that only adds methods.
        if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
            tensor = tensor.as_subclass(Tensor)
        kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        if not is_plain(tensor) or tensor.is_quantized:
            return f"{kind}:{type(tensor).__name__}"
        return f"{kind}:{_hash_bits(tensor)}"


@torch.no_grad()
def digest_rows(tensor: Tensor) -> list[str]:
    """Return a digest for each entry of the first dimension, as for the samples of a batch."""
    with unwatched():
        return [_hash_bits(row) for row in tensor] if is_plain(tensor) else []


def _hash_bits(tensor: Tensor) -> str:
    sums = _sums(_words(tensor))
    while len(sums) > 2:
        sums = _sums(torch.stack(sums))
    return hash_of(b"".join(int(one).to_bytes(WORD_BYTES, "little", signed=True) for one in sums))


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as a row of 64-bit integers, with zeros to fill the last one."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    num_bytes = flat.numel() * flat.element_size()
    begins_within_word = flat.storage_offset() * flat.element_size() % WORD_BYTES
    if num_bytes % WORD_BYTES or begins_within_word:
        flat = F.pad(flat.view(torch.uint8), (0, -num_bytes % WORD_BYTES))
    return flat.view(torch.int64)


def _sums(words: Tensor) -> list[Tensor]:
    """Return two sums of weighted words, modulo 2**64, for each piece of a tensor.

    The sum of the words can't see two flips of highest bits, which cancel. The second sum, of the
    upper halves as signed numbers, does.
    """
    size = PIECE_WORDS if words.is_cpu else PIECE_WORDS_ELSEWHERE
    weights = _weights(size, words.device)
    sums = []
    for piece in words.split(size):
        weight = weights[: len(piece)]
        for part in (piece, piece >> 32):
            # torch has no dot product of integers on CUDA; on the CPU it needs no memory.
            sums.append(part.dot(weight) if words.is_cpu else (part * weight).sum())
    return sums


@functools.cache
def _weights(size: int, device: torch.device) -> Tensor:
    """Return an odd number for each position, the same on every machine."""
    step, first, second = SPREAD
    weights = torch.arange(1, size + 1, device=device) * step
    weights = (weights ^ (weights >> 30)) * first
    weights = (weights ^ (weights >> 27)) * second
    return (weights ^ (weights >> 31)) | 1


def generator_digests() -> dict[str, str]:
    """Return a digest of the state of each generator, by its name."""
    return {
        # The bytes of a pickled tensor are not always the same.
        name: hash_of(pickle.dumps(state.numpy() if isinstance(state, Tensor) else state))
        for name, state in generator_states().items()
    }


def hash_of(content: bytes) -> str:
    """Return 16 hexadecimal digits that identify some bytes."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()
