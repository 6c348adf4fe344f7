"""The state of every generator that a training step may draw from: torch, CUDA, Python, numpy, and the user's own.

Each rank has its own, so its keys end in the rank. Proof: `python -m pytest tests/test_state.py`.
"""

import hashlib
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .plain_values import decode, encode


@dataclass(frozen=True)
class RandomState:
    """`tensors`: torch's generators, by name. `values`: the others, as JSON."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)


def take_random_state(generators: Mapping[str, torch.Generator] | None = None) -> RandomState:
    """The state of every generator as it stands."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors |= {
            f"cuda-{index}": torch.cuda.get_rng_state(index)
            for index in range(torch.cuda.device_count())
        }
    tensors |= {
        f"generator-{name}": generator.get_state() for name, generator in (generators or {}).items()
    }
    values = {"python": encode(random.getstate(), "python")}
    if "numpy" in sys.modules:
        values["numpy"] = encode(sys.modules["numpy"].random.get_state(legacy=False), "numpy")
    return RandomState(tensors, values)


def restore_random_state(
    state: RandomState, generators: Mapping[str, torch.Generator] | None = None
) -> list[str]:
    """Put every generator back; returns what could not be, in words."""
    notes, own = [], generators or {}
    for name, saved in state.tensors.items():
        kind, _, rest = name.partition("-")
        if kind == "torch":
            torch.set_rng_state(saved)
        elif kind == "generator" and rest in own:
            own[rest].set_state(saved)
        elif kind == "cuda" and torch.cuda.is_available() and int(rest) < torch.cuda.device_count():
            torch.cuda.set_rng_state(saved, int(rest))
        else:
            notes.append(f"the generator {name} was saved and is not here")
    notes += [
        f"the generator {name} was not saved"
        for name in own
        if f"generator-{name}" not in state.tensors
    ]
    if "python" in state.values:
        random.setstate(decode(state.values["python"]))
    if "numpy" in state.values:
        import numpy

        numpy.random.set_state(decode(state.values["numpy"]))
    elif "numpy" in sys.modules:
        notes.append("numpy's generator was not saved: numpy was not imported then")
    return notes


def seed_new_rank(
    state: RandomState, rank: int, generators: Mapping[str, torch.Generator] | None = None
) -> None:
    """Seed the generators of a rank that was not there at the save, from the first rank's state and its own number."""
    digest = hashlib.sha256(
        state.tensors["torch"].numpy().tobytes() + rank.to_bytes(8, "big")
    ).digest()
    seed = int.from_bytes(digest[:8], "big") >> 1
    torch.manual_seed(seed)  # CUDA's too
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    for generator in (generators or {}).values():
        generator.manual_seed(seed)
