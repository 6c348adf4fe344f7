"""What rounding does is no difference under a tolerance that was measured; anything more is.

Run: `python -m pytest tests/runs/test_rounding.py`.
"""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curry_train.runs import record_run
from curry_train.runs.fingerprints import Observation, read_fingerprints
from curry_train.runs.locate import expected_values, locate
from curry_train.runs.rounding import Exchange, distances_of, is_rounding
from locate import in_two_sums

from .recorded_training import train


def recorded(folder, fault="", *, exchange=None, forward=nn.Linear.forward, dtype=torch.float32):
    # Around whole steps a cache would keep the weights of the first one.
    options = {"enabled": dtype != torch.float32, "cache_enabled": False}
    with (
        record_run(folder, steps=2, exchange=exchange),
        torch.autocast("cpu", dtype, **options),
        mock.patch.object(nn.Linear, "forward", forward),
    ):
        train(fault, steps=2)
    return read_fingerprints(folder)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Return the folder of A's values, its record, and those with noise by what they expect."""
    folder = tmp_path_factory.mktemp("kept")
    return folder / "values", recorded(folder / "a", exchange=Exchange(folder / "values")), {}


@pytest.fixture
def with_tolerance(kept):
    """Return a function that locates a fault among other sums, which are no difference."""

    def locate_again(fault="", **options):
        # With a bias in float32 a sum in bfloat16 is float32.
        options["forward"] = lambda layer, x: in_two_sums(layer, x).type_as(
            F.linear(x, layer.weight)
        )
        values, a, noises = kept
        b = recorded("b", fault, **options)
        of_a, of_b = expected_values(a, b, locate(a, b).place["step"])
        if (key := str(of_a)) not in noises:
            noises[key] = recorded("noise", exchange=Exchange(values, expected=[of_a], noise=0))
        other = recorded("other", fault, exchange=Exchange(values, expected=[of_b]), **options)
        return locate(a, other, [noises[key]])

    return locate_again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_sums_are_no_difference(with_tolerance, dtype):
    found = with_tolerance(dtype=dtype)
    assert "differ by rounding alone" in found.headline, found


FAULTS = {
    "epsilon": "1 forward model.h.1.ln",
    "backward": "1 backward model.h.1",
    "stale weight, renamed": "2 state model.h.0.up.weight",
    "flipped moment": "2 optimizer model.head.weight",
    "hooked": "1 gradients model.head.bias",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_more_than_rounding_is_named_among_other_sums(with_tolerance, fault):
    found = with_tolerance(fault)
    assert "{step} {phase} {path}".format(**found.place) == FAULTS[fault], found


def test_distances_are_those_of_elements_of_a_size():
    value = torch.tensor([0.0, 1.0, 1.5, 8.0, float("nan"), float("inf")])
    other = torch.tensor([0.0, 1.25, 1.5, 8.0, float("nan"), float("inf")])
    assert distances_of(other, value) == {"1": 0.25}
    assert distances_of(torch.zeros(2), torch.zeros(3)) == {"0": float("inf")}
    small = distances_of(torch.tensor([1.0, 1e-9, 3e-9]), torch.tensor([1.0, 0.0, 1e-9]))
    assert small == {"-3": pytest.approx(2e-9)}
    assert not is_rounding(distances_of(torch.full((2,), 1e-45), torch.zeros(2)), [], 1.0, 1)


def test_noise_reaches_what_cancels_inside_of_a_module(tmp_path):
    """A bias of keys changes no weight of attention: its gradient is what rounding leaves."""
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 8, 4).unbind()
    bias = torch.zeros(4, requires_grad=True)

    def gradient():
        attended = F.scaled_dot_product_attention(queries, keys + bias, values)
        return torch.autograd.grad(attended.square().sum(), bias)[0]

    exact = gradient()
    with record_run(tmp_path, exchange=Exchange(tmp_path, noise=0)):
        noisy = gradient()
        counts = torch.arange(5).add(1)
        copied = values.clone()[0].zero_().add_(1)
    assert 2 < (noisy - exact).abs().max() / 2.0**-23 < 100
    assert counts.tolist() == [1, 2, 3, 4, 5]
    assert copied.eq(1).all()


def test_noise_has_the_precision_of_the_coarser_run(tmp_path, kept):
    expected = expected_values(kept[1], recorded(tmp_path / "b", dtype=torch.bfloat16), 1)[0]
    # Under autocast it returns bfloat16 in one run.
    returned = expected["exit", 1, "forward", "model.head", 0]
    assert returned["0"][1] == 2.0**-7
    with record_run(tmp_path, exchange=Exchange(tmp_path, expected=[expected], noise=0)):
        noise = torch.ones(999).mul(1).sub_(1)
    assert 1e-3 < noise.abs().max() <= 2.0**-7
    # In one direction it would excuse more of a sum.
    assert noise.mean().abs() < 1e-3


def test_noise_of_far_larger_elements_excuses_none():
    assert is_rounding({"1": 1e-6}, [{}, {"1": 5e-7}], 0.0, 1)
    assert not is_rounding({"1": 1e-6}, [{"9": 1.0}], 0.0, 1)
    assert is_rounding({"1": 2.0**-22}, [], 2.0**-23, 1)
    assert not is_rounding({"1": 2.0**-12}, [], 2.0**-23, 1)


@pytest.mark.parametrize("name", ["parameter", "buffer running_var", "0"])
def test_a_sum_over_the_batch_may_differ_by_more(name):
    """As many terms as the largest tensor has elements may be in it."""
    settings = {"environment": {"world_size": 1}, "program": None, "code": {}, "variables": {}}
    start = Observation(kind="start", level="all", **settings)

    def run(distance):
        digests = {"1": "float32[1024]:0", name: f"float32[1]:{distance}"}
        call = {"kind": "exit", "step": 1, "phase": "forward", "path": "model", "call": 0}
        return [start, Observation(**call, digests=digests, distances={name: {"1": distance}})]

    noise = run(5e-7)
    # Partial sums may be far larger than the terms and their sum, and so is their rounding.
    assert locate(noise, run(5e-5), [noise]).is_equal == (name != "0")
    assert not locate(noise, run(1e-4), [noise]).is_equal
