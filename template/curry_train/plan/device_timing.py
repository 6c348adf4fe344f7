"""Time a device: matrix products, elementwise operations, host copies and dispatch.

Each measurement takes well under a second. Each figure is the fastest of several runs after a
warm-up, because other load only makes a run longer, and threads that wait for each other make most
runs longer. The random generators of torch are left untouched.

Proof: `python -m pytest tests/test_device_profile.py`.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

RUNS = 7
LONG_ENOUGH = 0.01  # seconds; a larger product would not change the rate
PRODUCT_SIDES = {"cpu": (128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
MANY_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}  # size of one tensor, far beyond any cache
TINY_OPERATIONS = 300


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of square matrix products, up to the largest that runs in short time."""
    rate = 0.0
    before = float("inf")
    for side in PRODUCT_SIDES[device.type]:
        left = _random(side, device, dtype)
        right = _random(side, device, dtype)
        seconds = _least_seconds(device, partial(torch.matmul, left, right))
        rate = max(rate, 2 * side**3 / seconds)
        # A long time that did not grow with the size is threads waiting for each other: go on.
        if seconds > max(LONG_ENOUGH, 2 * before):
            break
        before = seconds
    return rate


def elementwise_rate(device: torch.device) -> float:
    """Measure the bytes read and written per second by the sum of two large tensors."""
    first = torch.ones(MANY_BYTES[device.type] // 4, device=device)
    second = torch.ones_like(first)
    out = torch.empty_like(first)
    seconds = _least_seconds(device, lambda: torch.add(first, second, out=out))
    return 3 * MANY_BYTES[device.type] / seconds


def copy_rate(device: torch.device) -> float:
    """Measure the bytes per second between pinned host memory and the device.

    The figure is the slower of the two directions.
    """
    on_device = torch.ones(MANY_BYTES["cuda"], dtype=torch.uint8, device=device)
    on_host = torch.empty_like(on_device, device="cpu", pin_memory=True)
    to_host = _least_seconds(device, lambda: on_host.copy_(on_device, non_blocking=True))
    to_device = _least_seconds(device, lambda: on_device.copy_(on_host, non_blocking=True))
    return MANY_BYTES["cuda"] / max(to_host, to_device)


def dispatch_seconds(device: torch.device) -> float:
    """Measure the time of an operation on a tiny tensor in grad mode, where recompute runs too."""
    start = torch.ones(8, device=device, requires_grad=True)

    def chain() -> Tensor:
        value = start
        with torch.enable_grad():
            for _ in range(TINY_OPERATIONS):
                value = value * 1.0
        return value

    return _least_seconds(device, chain) / TINY_OPERATIONS


def _random(side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a random square matrix.

    Constant values take less power than those of a training, and so run faster on a GPU.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randn(side, side, generator=generator, dtype=torch.float32).to(device, dtype)


def _least_seconds(device: torch.device, operation: Callable[[], object]) -> float:
    """Time an operation and return the fastest run."""
    seconds = []
    with torch.no_grad():
        for _ in range(1 + RUNS):
            _wait(device)
            start = time.perf_counter()
            operation()
            _wait(device)
            seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
