"""How fast a device is at matrix products, at moving bytes and at starting operations; each in well under a second.

Every figure is of the fastest of several runs after a warm-up: what else the machine does only makes a run longer, and
where threads wait for each other it makes most of them longer. The generators of torch are left as they are.
Proof: `python -m pytest tests/test_device_profile.py`.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

RUNS = 7
LONG_ENOUGH = 0.01  # seconds; a larger product would tell no more
PRODUCT_SIDES = {"cpu": (128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
MANY_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}  # of one tensor, far more than a cache holds
TINY_OPERATIONS = 300


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the largest square product that there is time for."""
    rate, before = 0.0, float("inf")
    for side in PRODUCT_SIDES[device.type]:
        left, right = _random(side, device, dtype), _random(side, device, dtype)
        seconds = _least_seconds(device, partial(torch.matmul, left, right))
        rate = max(rate, 2 * side**3 / seconds)
        if seconds > max(
            LONG_ENOUGH, 2 * before
        ):  # not where it is threads that wait, whatever the size
            break
        before = seconds
    return rate


def elementwise_rate(device: torch.device) -> float:
    """Bytes read and written per second by the sum of two large tensors."""
    first = torch.ones(MANY_BYTES[device.type] // 4, device=device)
    second, out = torch.ones_like(first), torch.empty_like(first)
    return (
        3
        * MANY_BYTES[device.type]
        / _least_seconds(device, lambda: torch.add(first, second, out=out))
    )


def copy_rate(device: torch.device) -> float:
    """Bytes per second between pinned host memory and the device, in the slower direction."""
    there = torch.ones(MANY_BYTES["cuda"], dtype=torch.uint8, device=device)
    here = torch.empty_like(there, device="cpu", pin_memory=True)
    out = _least_seconds(device, lambda: here.copy_(there, non_blocking=True))
    back = _least_seconds(device, lambda: there.copy_(here, non_blocking=True))
    return MANY_BYTES["cuda"] / max(out, back)


def dispatch_seconds(device: torch.device) -> float:
    """The time of an operation on next to nothing, in grad mode, where recompute runs too."""
    start = torch.ones(8, device=device, requires_grad=True)

    def chain() -> Tensor:
        value = start
        with torch.enable_grad():
            for _ in range(TINY_OPERATIONS):
                value = value * 1.0
        return value

    return _least_seconds(device, chain) / TINY_OPERATIONS


def _random(side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Equal numbers would take less power than a training's do, and so run faster on a GPU."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(side, side, generator=generator, dtype=torch.float32).to(device, dtype)


def _least_seconds(device: torch.device, operation: Callable[[], object]) -> float:
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
