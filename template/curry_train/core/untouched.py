"""Run a module without leaving a trace: its buffers, gradients and every random generator are put back.

Proof: `python -m pytest tests/test_untouched.py tests/test_measure.py`.
"""

import contextlib
import gc
import random
import sys
from collections.abc import Iterator

import torch
from torch import nn

# Function modes have no say: where CUDA stands for the CPU, a device of CUDA's generators still means CUDA.
unwatched = torch._C.DisableTorchFunction


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put torch's, CUDA's, python's and, where it is loaded, numpy's generator back afterwards."""
    numpy = sys.modules.get("numpy")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with unwatched():
        states = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        with unwatched():
            torch.set_rng_state(states[0])
            for device, state in zip(devices, states[1], strict=True):
                torch.cuda.set_rng_state(state, device)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def generator_states(module: nn.Module) -> list[torch.Tensor]:
    """Torch's generators that a module's operations may draw from."""
    devices = (
        {parameter.device for parameter in module.parameters()}
        if torch.cuda.is_initialized()
        else set()
    )
    with unwatched():
        return [
            torch.get_rng_state(),
            *(torch.cuda.get_rng_state(place) for place in devices if place.type == "cuda"),
        ]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every generator, and put them back afterwards."""
    with generators_kept():
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        yield


@contextlib.contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Put every buffer back afterwards, its value and, where forward assigns another tensor, the tensor itself."""
    owners = [(owner, name) for owner in module.modules() for name in owner._buffers]
    before = [(owner, name, owner._buffers[name]) for owner, name in owners]
    values = [None if buffer is None else buffer.detach().clone() for _, _, buffer in before]
    try:
        yield
    finally:
        with torch.no_grad():
            for (owner, name, buffer), value in zip(before, values, strict=True):
                owner._buffers[name] = (
                    buffer if buffer is None or value is None else buffer.copy_(value)
                )


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Start without gradients; put buffers and generators back and drop the gradients afterwards."""
    module.zero_grad(set_to_none=True)
    try:
        with generators_kept(), buffers_kept(module):
            yield
    finally:
        module.zero_grad(set_to_none=True)


@contextlib.contextmanager
def heap_kept() -> Iterator[None]:
    """Each measurement collects garbage first; what was there before all of them need not be gone through each time."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
