"""Random generator states, saved and restored so that a function draws the same numbers.

These are the generators of torch, Python, numpy if it is loaded, and the devices of given tensors.

Proof: `python -m pytest tests/test_snn_timesteps_contract.py`.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from .untouched import generators_kept


class Generators:
    """A snapshot of the current generator states.

    The tensors among `values` give the devices whose generators are included.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = {value.device: value for value in values if isinstance(value, Tensor)}
        numpy = sys.modules.get("numpy")
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = numpy.random.get_state(legacy=False) if numpy else None
        self._devices, self._states = get_device_states(*self._values.values())

    def moved(self) -> bool:
        """Return whether a generator was used since the snapshot."""
        return not self.are_as(Generators(list(self._values.values())))

    def are_as(self, other: "Generators") -> bool:
        if self._python != other._python or not torch.equal(self._torch, other._torch):
            return False
        if self._devices != other._devices or not all(
            map(torch.equal, self._states, other._states)
        ):
            return False
        return _same_numpy(self._numpy, other._numpy)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Use these states inside the context, and restore the current ones afterwards."""
        with generators_kept():
            torch.set_rng_state(self._torch)
            random.setstate(self._python)
            if self._numpy is not None:
                sys.modules["numpy"].random.set_state(self._numpy)
            if self._devices:
                kind = next(device.type for device in self._values if device.type != "cpu")
                set_device_states(self._devices, self._states, device_type=kind)
            yield


def _same_numpy(one: Any, other: Any) -> bool:
    """Compare two numpy states: nested dicts of numbers and arrays, None if not loaded."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_same_numpy(one[key], other[key]) for key in one)
    if hasattr(one, "tobytes") and other is not None:
        return bool(one.tobytes() == other.tobytes())
    return bool(one == other)
