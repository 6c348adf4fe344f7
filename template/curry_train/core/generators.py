"""Save, restore, compare and seed the states of random generators.

Proof: `python -m pytest tests/core tests/primitives`.
"""

import contextlib
import importlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# Disables function modes: even where a mode maps CUDA to the CPU, CUDA's generators are CUDA's.
unwatched = torch._C.DisableTorchFunction


def generator_states() -> dict[str, Any]:
    """Return the states of Python, NumPy if it is loaded, torch, and CUDA or another device."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {"python": random.getstate()}
    if numpy is not None:
        states["numpy"] = numpy.random.get_state(legacy=False)
    other = torch.accelerator.current_accelerator()
    with unwatched():
        states["torch"] = torch.get_rng_state()
        for device in range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ():
            states[f"cuda-{device}"] = torch.cuda.get_rng_state(device)
        if other is not None and other.type != "cuda":
            states[other.type] = torch.get_device_module(other).get_rng_state()
    return states


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Set generators to states that `generator_states` returned."""
    with unwatched():
        for name, state in states.items():
            if name == "python":
                random.setstate(state)
            elif name == "numpy":
                importlib.import_module("numpy").random.set_state(state)
            elif name == "torch":
                torch.set_rng_state(state)
            else:
                kind, *index = name.split("-")
                torch.get_device_module(kind).set_rng_state(state, *map(int, index))


def same_state(one: Any, other: Any) -> bool:
    """Compare two states of generators: tensors, arrays and numbers in dicts and tuples."""
    parts, others = tree_leaves(one), tree_leaves(other)
    return len(parts) == len(others) and all(
        torch.as_tensor(a == b).all() for a, b in zip(parts, others, strict=True)
    )


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of torch, CUDA, Python and, if it is loaded, NumPy on exit."""
    before = generator_states()
    try:
        yield
    finally:
        set_generator_states(before)


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, Python and, if it is loaded, NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every generator inside the context, and restore them on exit."""
    with generators_kept():
        seed_generators(seed)
        yield
