"""Run a module and restore its buffers, its gradients and every random generator afterwards.

Proof: `python -m pytest tests/test_untouched.py tests/test_measure.py`.
"""

import contextlib
import gc
import random
import sys
from collections.abc import Iterator

import torch
from torch import nn

# Disables function modes: even where a mode maps CUDA to the CPU, CUDA's generators are CUDA's.
unwatched = torch._C.DisableTorchFunction


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of torch, CUDA, Python and, if it is loaded, NumPy on exit."""
    numpy = sys.modules.get("numpy")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with unwatched():
        torch_state = torch.get_rng_state()
        cuda_states = [torch.cuda.get_rng_state(device) for device in devices]
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        with unwatched():
            torch.set_rng_state(torch_state)
            for device, state in zip(devices, cuda_states, strict=True):
                torch.cuda.set_rng_state(state, device)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def generator_states(module: nn.Module) -> list[torch.Tensor]:
    """Return the states of torch's generators that a module's operations may draw from."""
    devices: set[torch.device] = set()
    if torch.cuda.is_initialized():
        devices = {parameter.device for parameter in module.parameters()}
    with unwatched():
        return [
            torch.get_rng_state(),
            *(torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"),
        ]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every generator inside the context, and restore them on exit."""
    with generators_kept():
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        yield


@contextlib.contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore every buffer on exit: its value, and the tensor itself if forward replaced it."""
    owners = [(owner, name) for owner in module.modules() for name in owner._buffers]
    before = [(owner, name, owner._buffers[name]) for owner, name in owners]
    values = [None if buffer is None else buffer.detach().clone() for _, _, buffer in before]
    try:
        yield
    finally:
        with torch.no_grad():
            for (owner, name, buffer), value in zip(before, values, strict=True):
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                owner._buffers[name] = buffer


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Start without gradients; on exit restore buffers and generators and drop the gradients."""
    module.zero_grad(set_to_none=True)
    try:
        with generators_kept(), buffers_kept(module):
            yield
    finally:
        module.zero_grad(set_to_none=True)


@contextlib.contextmanager
def heap_kept() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which every measurement runs first."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
