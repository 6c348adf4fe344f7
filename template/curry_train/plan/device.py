"""Describe a device: bandwidth, product rates and dispatch time, measured or known.

Each measurement takes well under a second. Each figure is the fastest of several runs after a
warm-up, because other load only makes a run longer, and threads that wait for each other make most
runs longer. The random generators of torch are left untouched.

Proof: `python -m pytest tests/plan/test_device_profile.py tests/bench/test_bench_steps.py`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..core.timing import find_device, time_in_turns, wait_for

# Time a device: matrix products, elementwise operations, host copies and dispatch.

TIMED_RUNS = 7
LONG_PRODUCT_SECONDS = 0.01  # seconds; a larger product would not change the rate
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
        if seconds > max(LONG_PRODUCT_SECONDS, 2 * before):
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
    wait = partial(wait_for, device)
    with torch.no_grad():
        (seconds,) = time_in_turns([operation], rounds=TIMED_RUNS, warmup=1, wait=wait)
    return min(seconds)


# Device profiles: rates from which a planner predicts the time of each operation.

PROFILE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Fractions of the data sheet's peak that large operations typically reach.
PRODUCT_EFFICIENCY = 0.7
BANDWIDTH_EFFICIENCY = 0.85
LINK_EFFICIENCY = 0.8

# Extra host time of an eager operation under selective recompute, on one x86 core: measured on a
# CPU, not yet on CUDA. The time of regions is scaled by the number of Python calls per step: 2,866
# with regions and 23,690 with selective recompute, against 370 with neither.
SAC_SECONDS = 26e-6
REGIONS_SECONDS = SAC_SECONDS * (2866 - 370) / (23690 - 370)

# Typical of a launch from Python in eager mode with autograd; not yet measured on CUDA.
GPU_DISPATCH_SECONDS = 6e-6


@dataclass(frozen=True)
class DeviceProfile:
    """Rates that large operations reach, and the least time of any operation."""

    name: str
    flops_per_second: Mapping[str, float]  # of matrix products, by dtype
    bytes_per_second: float  # read and written by elementwise operations
    host_bytes_per_second: float | None  # link to host memory, one direction; None on the CPU
    dispatch_seconds: float  # the least time of an operation
    memory_bytes: int | None  # nominal size, of which the driver takes a part; None if unknown
    source: str  # data sheet or measured
    usable_bytes: int | None = None  # of the memory, what CUDA gives to processes; None if unknown

    def operation_seconds(
        self,
        flops: ArrayLike,
        bytes_moved: ArrayLike,
        *,
        dtype: str,
        extra_seconds: ArrayLike = 0.0,
    ) -> NDArray[numpy.float64]:
        """Predict the time of each operation from its FLOPs, bytes moved and dispatch.

        The longest of the three counts. `extra_seconds` are added to the dispatch time, which
        overlaps with the device's work: `SAC_SECONDS`, for example.
        """
        if dtype not in self.flops_per_second:
            raise ValueError(
                f"the profile {self.name!r} has no rate for the dtype {dtype!r}: use one of "
                f"{', '.join(self.flops_per_second)} (--dtype), or measure_profile on the device"
            )
        products = numpy.divide(flops, self.flops_per_second[dtype])
        moves = numpy.divide(bytes_moved, self.bytes_per_second)
        dispatch = numpy.add(self.dispatch_seconds, extra_seconds)
        times: NDArray[numpy.float64] = numpy.maximum(numpy.maximum(products, moves), dispatch)
        return times

    def work_seconds(self, flops: Any, moved: Any, **options: Any) -> float:
        """Predict the time of all operations; views, which move no bytes, take none.

        `options` are those of `operation_seconds`.
        """
        return float(self.operation_seconds(flops, moved, **options)[moved > 0].sum())

    def optimizer_seconds(self, fixed_bytes: int, gradient_bytes: int) -> float:
        """Predict the time of the optimizer step, which is limited by bandwidth.

        It reads gradients and parameters, and writes state and parameters.
        """
        return (2 * fixed_bytes + gradient_bytes) / self.bytes_per_second


# Bytes/s of sixteen lanes in one direction.
PCIE4_BYTES_PER_SECOND = 32e9
PCIE5_BYTES_PER_SECOND = 64e9

# Peaks as published, without sparsity, and float32 without TF32. FLOP/s in float32, dense FLOP/s in
# bfloat16 and float16, bytes/s of the memory and of the link to the host, GiB of the nominal size,
# and GiB that torch reports: it is lower, by firmware and driver.
DATA_SHEETS = {
    "h100": (67e12, 989e12, 3.35e12, PCIE5_BYTES_PER_SECOND, 80, 79.1),  # SXM
    "h200": (67e12, 989e12, 4.8e12, PCIE5_BYTES_PER_SECOND, 141, 139.7),  # SXM
    "a100": (19.5e12, 312e12, 2.039e12, PCIE4_BYTES_PER_SECOND, 80, 79.1),  # SXM
    "l4": (30.3e12, 121e12, 300e9, PCIE4_BYTES_PER_SECOND, 24, 21.9),
    "rtx4090": (82.6e12, 165e12, 1008e9, PCIE4_BYTES_PER_SECOND, 24, 23.6),
}


def _read_data_sheet(name: str) -> DeviceProfile:
    """Build a profile from what is published of a card."""
    float32, half, bandwidth, link, memory_gib, usable_gib = DATA_SHEETS[name]
    peaks = {"float32": float32, "bfloat16": half, "float16": half}
    return DeviceProfile(
        name=name,
        flops_per_second={dtype: peak * PRODUCT_EFFICIENCY for dtype, peak in peaks.items()},
        bytes_per_second=bandwidth * BANDWIDTH_EFFICIENCY,
        host_bytes_per_second=link * LINK_EFFICIENCY,
        dispatch_seconds=GPU_DISPATCH_SECONDS,
        memory_bytes=round(memory_gib * 2**30),
        source="data sheet",
        usable_bytes=round(usable_gib * 2**30),
    )


PROFILES = {name: _read_data_sheet(name) for name in DATA_SHEETS} | {
    # From measure_profile on two cores of an AMD EPYC with AVX2, without half-precision products.
    "cpu": DeviceProfile(
        name="cpu",
        flops_per_second={"float32": 165e9, "bfloat16": 3.1e9, "float16": 3.6e9},
        bytes_per_second=20e9,
        host_bytes_per_second=None,
        dispatch_seconds=4.5e-6,
        memory_bytes=None,
        source="measured",
    )
}

# Only exact matches: other cards of these families (H100 PCIe, A100 with 40 GB, L40S, parts of a
# card) have other rates, and are measured.
PROFILE_OF_CARD = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA L4": "l4",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}


def find_profile(name: str) -> DeviceProfile:
    """Return the profile of a name, ignoring case and punctuation.

    "measured" measures the current GPU, or the CPU if there is no GPU.
    """
    key = "".join(letter for letter in name.lower() if letter.isalnum())
    if key == "measured":
        return measure_profile()
    if key not in PROFILES:
        raise ValueError(
            f"there is no profile {name!r}. Use one of: {', '.join(PROFILES)}, measured. To plan "
            "for another card give the most similar one, and the card's own memory as --budget, "
            "such as 12GiB"
        )
    return PROFILES[key]


def profile_of(device: torch.device | str) -> DeviceProfile:
    """Return the profile of a device: from the data sheet if there is one, or measured.

    The CPU is always measured, because processors differ too much for one figure. For plans that
    are the same on every machine use `find_profile("cpu")`. A device is measured once per process.
    """
    device = _check_device(device)
    if device.type == "cuda":
        card = torch.cuda.get_device_name(device)
        if card in PROFILE_OF_CARD:
            return PROFILES[PROFILE_OF_CARD[card]]
    return _measure_once(device, torch.get_num_threads())


def measure_profile(device: torch.device | str | None = None) -> DeviceProfile:
    """Measure a device with the current settings of torch, such as TF32 and threads.

    The default is the GPU, or the CPU if there is no GPU. What selective recompute adds to an
    operation is not measured: `SAC_SECONDS` and `REGIONS_SECONDS` are constants.
    """
    device = _check_device(device or find_device("auto"))
    cuda = device.type == "cuda"
    on_cpu = f"cpu, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if cuda else on_cpu
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else None
    return DeviceProfile(
        name=name,
        flops_per_second={
            name: product_rate(device, dtype) for name, dtype in PROFILE_DTYPES.items()
        },
        bytes_per_second=elementwise_rate(device),
        host_bytes_per_second=copy_rate(device) if cuda else None,
        dispatch_seconds=dispatch_seconds(device),
        memory_bytes=memory,
        source="measured",
        usable_bytes=memory,
    )


@functools.cache
def _measure_once(device: torch.device, _num_threads: int) -> DeviceProfile:
    """Cache the measured profile by device and number of threads."""
    return measure_profile(device)


def _check_device(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type not in {"cpu", "cuda"}:
        raise ValueError(
            f"there is no profile of the device {str(device)!r}: give 'cpu' or 'cuda', "
            "or a DeviceProfile"
        )
    return device


# Peak FLOP/s of a device, as the reference for MFU and HFU.

MEASURED_PEAK = "measured"


@dataclass(frozen=True)
class PeakRate:
    """FLOP/s of dense matrix products, and the source of the figure."""

    flops_per_second: float | None  # None if unknown
    source: str  # the reason, if unknown


def peak_rate(
    device: torch.device, dtype: torch.dtype, *, given: float | str | None = None
) -> PeakRate:
    """Return the peak of a device, by the name of the card unless one is given.

    `given` is a peak in FLOP/s, or "measured" for the rate that large products reach.
    """
    if isinstance(given, int | float):
        if not given > 0:
            raise ValueError(f"the peak must be above 0 FLOP/s, got {given}")
        return PeakRate(given, "as given")
    name = str(dtype).removeprefix("torch.")
    if given == MEASURED_PEAK:
        rate = _measure_once(device, torch.get_num_threads()).flops_per_second.get(name)
        return PeakRate(rate, f"large products in {name}, measured here")
    if given is not None:
        raise ValueError(f"the peak {given!r} is neither a number of FLOP/s nor {MEASURED_PEAK!r}")
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"
    if card not in PROFILE_OF_CARD:
        return PeakRate(
            None,
            f"no peak of this {card} is known: --peak {MEASURED_PEAK} uses the rate that large "
            "products reach",
        )
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return PeakRate(
            None, "products in float32 run as TF32 here: give --peak TFLOPS, or --peak measured"
        )

    rate = PROFILES[PROFILE_OF_CARD[card]].flops_per_second.get(name)
    if rate is None:
        return PeakRate(
            None, f"the data sheet of the {card} has no peak in {name}: give --peak, in TFLOP/s"
        )
    return PeakRate(rate / PRODUCT_EFFICIENCY, f"data sheet of the {card}, dense {name}")
