"""Device profiles: the time formula by hand, known figures, a measurement that repeats.

python -m pytest tests/plan/test_device_profile.py
"""

import time

import numpy
import pytest
import torch

from curry_train.plan import device as module
from curry_train.plan.device import (
    PROFILES,
    DeviceProfile,
    find_profile,
    measure_profile,
    profile_of,
)


def plain_profile():
    """Return a profile of 10 or 20 FLOP/s, 5 bytes/s, and at least half a second."""
    return DeviceProfile(
        name="plain",
        flops_per_second={"float32": 10.0, "bfloat16": 20.0},
        bytes_per_second=5.0,
        host_bytes_per_second=None,
        dispatch_seconds=0.5,
        memory_bytes=None,
        source="measured",
    )


# The formula.


@pytest.mark.parametrize(
    ("flops", "num_bytes", "options", "seconds"),
    [
        ([100, 0, 0, 100], [0, 100, 0, 1000], {}, [10.0, 20.0, 0.5, 200.0]),
        ([100], [0], {"dtype": "bfloat16"}, [5.0]),
        # A formula that adds them to the maximum gives 10.25 for the first.
        ([100, 0], [0, 0], {"extra_seconds": 0.25}, [10.0, 0.75]),
        ([0, 0], 0, {"extra_seconds": [0.0, 1.0]}, [0.5, 1.5]),
    ],
)
def test_the_time_of_an_operation_is_the_longest_of_flops_bytes_and_lengthened_dispatch(
    flops, num_bytes, options, seconds
):
    options = {"dtype": "float32"} | options
    found = plain_profile().operation_seconds(flops, num_bytes, **options)
    assert isinstance(found, numpy.ndarray)
    assert found.tolist() == seconds


def test_a_dtype_without_a_rate_is_refused_with_those_that_have_one():
    with pytest.raises(
        ValueError,
        match=r"'plain' has no rate for the dtype 'float64': use one of float32, bfloat16",
    ):
        plain_profile().operation_seconds([1], [1], dtype="float64")


# The built-in profiles.


def test_names_are_found_in_any_spelling():
    assert len(PROFILES) == 6
    assert find_profile("H100") is PROFILES["h100"]
    assert find_profile("RTX 4090") is find_profile("rtx-4090") is PROFILES["rtx4090"]


# Devices of this machine.


def test_measuring_the_cpu_takes_seconds_and_draws_nothing():
    state = torch.random.get_rng_state()
    start = time.process_time()
    found = measure_profile("cpu")
    assert time.process_time() - start < 3 * torch.get_num_threads()
    assert torch.equal(state, torch.random.get_rng_state())
    assert found.name == f"cpu, {torch.get_num_threads()} threads"
    assert (found.host_bytes_per_second, found.memory_bytes) == (None, None)
    assert set(found.flops_per_second) == {"float32", "bfloat16", "float16"}
    assert 1e9 < found.flops_per_second["float32"] < 1e12
    assert min(found.flops_per_second.values()) > 1e7
    assert 1e8 < found.bytes_per_second < 1e12
    assert 1e-7 < found.dispatch_seconds < 1e-3


@pytest.mark.parametrize(
    ("card", "known"), [("NVIDIA H200", "h200"), ("NVIDIA H100 PCIe", None), ("NVIDIA L40S", None)]
)
def test_a_card_with_a_data_sheet_has_its_profile_and_a_similar_one_is_measured(
    monkeypatch, card, known
):
    """Rates of cards with "H100" or "L4" in their name differ by up to 2x."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    monkeypatch.setattr(module, "_measure_once", lambda device, threads: plain_profile())
    assert profile_of("cuda") == PROFILES.get(known, plain_profile())


def test_the_cpu_is_measure_once_for_each_number_of_threads(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "measure_profile", calls.append)
    for number in (1001, 1002, 1001):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        profile_of("cpu")
    assert len(calls) == 2


def test_a_device_that_has_no_profile_is_refused():
    with pytest.raises(
        ValueError, match="there is no profile of the device 'meta': give 'cpu' or 'cuda'"
    ):
        profile_of("meta")


@pytest.mark.cuda
def test_a_gpu_is_measured_in_seconds():
    start = time.perf_counter()
    profile = measure_profile("cuda")
    assert time.perf_counter() - start < 10
    assert profile.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert 1e9 < profile.host_bytes_per_second < profile.bytes_per_second
    assert profile.flops_per_second["float16"] > profile.flops_per_second["float32"]
