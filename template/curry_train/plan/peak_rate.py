"""Peak FLOP/s of a device, as the reference for MFU and HFU.

Utilisation is a fraction of the peak on the data sheet. The rate that large products reach, which
`device_profile` holds, is lower and would make utilisation look too high.

Proof: `python -m pytest tests/test_bench_steps.py -k rate`.
"""

from dataclasses import dataclass

import torch

from .device_profile import PRODUCT_EFFICIENCY, PROFILE_OF_CARD, PROFILES, profile_of

MEASURED = "measured"


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
        return PeakRate(float(given), "as given")
    name = str(dtype).removeprefix("torch.")
    on_data_sheet = device.type == "cuda" and torch.cuda.get_device_name(device) in PROFILE_OF_CARD
    if given == MEASURED and not on_data_sheet:
        rate = profile_of(device).flops_per_second.get(name)
        if rate:
            return PeakRate(rate, f"large products in {name}, measured here")
        return PeakRate(rate, f"no rate was measured in {name}")
    if given not in (None, MEASURED):
        raise ValueError(f"the peak {given!r} is neither a number of FLOP/s nor {MEASURED!r}")
    if device.type != "cuda":
        return PeakRate(
            None,
            f"no peak of this processor is known: --peak {MEASURED} uses the rate that large "
            "products reach",
        )

    card = torch.cuda.get_device_name(device)
    if card not in PROFILE_OF_CARD:
        return PeakRate(
            None, f"no peak of the {card} is known: give --peak, in TFLOP/s, from its data sheet"
        )
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return PeakRate(
            None, "products in float32 run as TF32 here: give --peak, in TFLOP/s, for TF32"
        )

    rate = PROFILES[PROFILE_OF_CARD[card]].flops_per_second.get(name)
    if rate is None:
        return PeakRate(
            None, f"the data sheet of the {card} has no peak in {name}: give --peak, in TFLOP/s"
        )
    return PeakRate(rate / PRODUCT_EFFICIENCY, f"data sheet of the {card}, dense {name}")
