"""Device profiles: rates from which a planner predicts the time of each operation.

    profile = profile_of(torch.device("cuda"))    # or find_profile("h100"), which needs no device
    profile.operation_seconds(flops, bytes_moved, dtype="bfloat16")

The profiles of GPUs come from public data sheets: dense peak rates, times an efficiency that is
typical of large operations. They were not measured. `measure_profile` measures a device in seconds.

Proof: `python -m pytest tests/test_device_profile.py`.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy
import torch
from numpy.typing import ArrayLike, NDArray

from ..core.nearest import nearest
from .device_timing import copy_rate, dispatch_seconds, elementwise_rate, product_rate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

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
    sac_seconds: float  # added to dispatch under selective recompute by policy
    regions_seconds: float  # added to dispatch under regions
    memory_bytes: int | None  # nominal size, of which the driver takes a part; None if unknown
    source: str  # data sheet or measured

    def __post_init__(self) -> None:
        if not isinstance(self.flops_per_second, Mapping) or not self.flops_per_second:
            raise ValueError(
                f"flops_per_second of the profile {self.name!r} must be a mapping of dtypes to "
                f"rates, at least for float32, got {self.flops_per_second!r}"
            )

        rates = {
            f"flops_per_second of {dtype}": rate for dtype, rate in self.flops_per_second.items()
        }
        rates |= {
            "bytes_per_second": self.bytes_per_second,
            "dispatch_seconds": self.dispatch_seconds,
        }
        if self.host_bytes_per_second is not None:
            rates["host_bytes_per_second"] = self.host_bytes_per_second
        if self.memory_bytes is not None:
            rates["memory_bytes"] = self.memory_bytes
        for what, value in rates.items():
            if not _is_number(value) or value <= 0:
                raise ValueError(
                    f"{what} of the profile {self.name!r} must be a number above 0, got {value!r}"
                )

        for what in ("sac_seconds", "regions_seconds"):
            value = getattr(self, what)
            if not _is_number(value) or value < 0:
                raise ValueError(
                    f"{what} of the profile {self.name!r} must be a number of at least 0, "
                    f"got {value!r}"
                )

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
        overlaps with the device's work: `sac_seconds`, for example.
        """
        if dtype not in self.flops_per_second:
            raise ValueError(
                f"the profile {self.name!r} has no rate for the dtype {dtype!r}: use one of "
                f"{', '.join(self.flops_per_second)}, or measure_profile on the device"
            )
        products = numpy.asarray(flops, dtype=numpy.float64) / self.flops_per_second[dtype]
        moves = numpy.asarray(bytes_moved, dtype=numpy.float64) / self.bytes_per_second
        dispatch = self.dispatch_seconds + numpy.asarray(extra_seconds, dtype=numpy.float64)
        return numpy.asarray(numpy.maximum(numpy.maximum(products, moves), dispatch))

    def to_json(self) -> str:
        """Write the profile as JSON text."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "DeviceProfile":
        """Read a profile that `to_json` wrote."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"the profile is not JSON ({error}): give the text that to_json wrote"
            ) from error
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            found = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise ValueError(
                f"a profile has the fields {sorted(names)}, got {found}: give the text that "
                "to_json wrote"
            )
        return cls(**values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _from_data_sheet(
    name: str, *, float32: float, half: float, bandwidth: float, link: float, memory_gib: int
) -> DeviceProfile:
    """Build a profile from published peaks in FLOP/s and bytes/s.

    `half` is the dense rate of bfloat16 and float16 with float32 accumulation.
    """
    peaks = {"float32": float32, "bfloat16": half, "float16": half}
    return DeviceProfile(
        name=name,
        flops_per_second={dtype: peak * PRODUCT_EFFICIENCY for dtype, peak in peaks.items()},
        bytes_per_second=bandwidth * BANDWIDTH_EFFICIENCY,
        host_bytes_per_second=link * LINK_EFFICIENCY,
        dispatch_seconds=GPU_DISPATCH_SECONDS,
        sac_seconds=SAC_SECONDS,
        regions_seconds=REGIONS_SECONDS,
        memory_bytes=memory_gib * 2**30,
        source="data sheet",
    )


# Bytes/s of sixteen lanes in one direction.
PCIE4 = 32e9
PCIE5 = 64e9

# Peaks as published: without sparsity, and float32 without TF32.
PROFILES = {
    "h100": _from_data_sheet(
        "h100", float32=67e12, half=989e12, bandwidth=3.35e12, link=PCIE5, memory_gib=80
    ),  # SXM
    "h200": _from_data_sheet(
        "h200", float32=67e12, half=989e12, bandwidth=4.8e12, link=PCIE5, memory_gib=141
    ),  # SXM
    "a100": _from_data_sheet(
        "a100", float32=19.5e12, half=312e12, bandwidth=2.039e12, link=PCIE4, memory_gib=80
    ),  # SXM
    "l4": _from_data_sheet(
        "l4", float32=30.3e12, half=121e12, bandwidth=300e9, link=PCIE4, memory_gib=24
    ),
    "rtx4090": _from_data_sheet(
        "rtx4090", float32=82.6e12, half=165e12, bandwidth=1008e9, link=PCIE4, memory_gib=24
    ),
    # From measure_profile on two cores of an AMD EPYC with AVX2, without half-precision products.
    "cpu": DeviceProfile(
        name="cpu",
        flops_per_second={"float32": 165e9, "bfloat16": 3.1e9, "float16": 3.6e9},
        bytes_per_second=20e9,
        host_bytes_per_second=None,
        dispatch_seconds=4.5e-6,
        sac_seconds=SAC_SECONDS,
        regions_seconds=REGIONS_SECONDS,
        memory_bytes=None,
        source="measured",
    ),
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
    key = _plain(name)
    if key in {"measured", "measure"}:
        return measure_profile()
    if key not in PROFILES:
        known = [*PROFILES, "measured"]
        meant = nearest(key, known)
        hint = f"Did you mean {meant!r}? " if meant else ""
        raise ValueError(f"there is no profile {name!r}. {hint}Use one of: {', '.join(known)}")
    return PROFILES[key]


def profile_of(device: torch.device | str) -> DeviceProfile:
    """Return the profile of a device: from the data sheet if there is one, or measured.

    The CPU is always measured, because processors differ too much for one figure. For plans that
    are the same on every machine use `find_profile("cpu")`. A device is measured once per process.
    """
    device = _checked(device)
    if device.type == "cuda":
        card = torch.cuda.get_device_name(device)
        if card in PROFILE_OF_CARD:
            return PROFILES[PROFILE_OF_CARD[card]]
    return _measured_once(device, torch.get_num_threads())


def measure_profile(device: torch.device | str | None = None) -> DeviceProfile:
    """Measure a device with the current settings of torch, such as TF32 and threads.

    The default is the GPU, or the CPU if there is no GPU. What selective recompute adds to an
    operation is not measured: `sac_seconds` and `regions_seconds` are this module's constants.
    """
    device = _checked(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cuda = device.type == "cuda"
    on_cpu = f"cpu, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if cuda else on_cpu
    return DeviceProfile(
        name=name,
        flops_per_second={name: product_rate(device, dtype) for name, dtype in DTYPES.items()},
        bytes_per_second=elementwise_rate(device),
        host_bytes_per_second=copy_rate(device) if cuda else None,
        dispatch_seconds=dispatch_seconds(device),
        sac_seconds=SAC_SECONDS,
        regions_seconds=REGIONS_SECONDS,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if cuda else None,
        source="measured",
    )


@functools.cache
def _measured_once(device: torch.device, _num_threads: int) -> DeviceProfile:
    """Cache the measured profile by device and number of threads."""
    return measure_profile(device)


def _checked(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type not in {"cpu", "cuda"}:
        raise ValueError(
            f"there is no profile of the device {str(device)!r}: give 'cpu' or 'cuda', "
            "or a DeviceProfile"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"torch sees no GPU for the device {str(device)!r}: use 'cpu', or find_profile('h100')"
        )
    return device


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
