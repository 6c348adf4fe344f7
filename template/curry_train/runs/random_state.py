"""Random state of torch, CUDA, Python, numpy and the user's own generators.

Each rank has its own state, so its keys end in the rank.
Proof: `python -m pytest tests/test_state.py`.
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
    """The state of all generators at one moment."""

    # The state of torch's generators, by name.
    tensors: Mapping[str, Tensor]
    # The state of the other generators, as JSON.
    values: Mapping[str, Any] = field(default_factory=dict)


def take_random_state(generators: Mapping[str, torch.Generator] | None = None) -> RandomState:
    """Return the current state of every generator."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            tensors[f"cuda-{index}"] = torch.cuda.get_rng_state(index)
    for name, generator in (generators or {}).items():
        tensors[f"generator-{name}"] = generator.get_state()

    values = {"python": encode(random.getstate(), "python")}
    if "numpy" in sys.modules:
        values["numpy"] = encode(sys.modules["numpy"].random.get_state(legacy=False), "numpy")
    return RandomState(tensors, values)


def restore_random_state(
    state: RandomState, generators: Mapping[str, torch.Generator] | None = None
) -> list[str]:
    """Restore every generator; return a note for each one that could not be restored."""
    notes = []
    own = generators or {}
    for name, saved in state.tensors.items():
        kind, _, key = name.partition("-")
        if kind == "torch":
            torch.set_rng_state(saved)
        elif kind == "generator" and key in own:
            own[key].set_state(saved)
        elif kind == "cuda" and torch.cuda.is_available() and int(key) < torch.cuda.device_count():
            torch.cuda.set_rng_state(saved, int(key))
        else:
            notes.append(f"the generator {name} was saved, but does not exist here")

    for name in own:
        if f"generator-{name}" not in state.tensors:
            notes.append(f"the generator {name} was not saved")

    if "python" in state.values:
        random.setstate(decode(state.values["python"]))
    if "numpy" in state.values:
        import numpy

        numpy.random.set_state(decode(state.values["numpy"]))
    elif "numpy" in sys.modules:
        notes.append("numpy's generator was not saved: numpy was not imported at the save")
    return notes


def seed_new_rank(
    state: RandomState, rank: int, generators: Mapping[str, torch.Generator] | None = None
) -> None:
    """Seed the generators of a rank that did not exist at the save.

    The seed comes from the state of the first rank and this rank's number.
    """
    first_state = state.tensors["torch"].numpy().tobytes()
    digest = hashlib.sha256(first_state + rank.to_bytes(8, "big")).digest()
    seed = int.from_bytes(digest[:8], "big") >> 1

    # This seeds CUDA's generators too.
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    for generator in (generators or {}).values():
        generator.manual_seed(seed)
