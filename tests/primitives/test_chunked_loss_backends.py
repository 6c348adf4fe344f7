"""The chunked loss takes the leanest exact backend, and says why one can't be used.

Liger and cut-cross-entropy need CUDA, so stand-ins take their places here.
python -m pytest tests/primitives/test_chunked_loss_backends.py
"""

import copy
import pickle
import sys
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from curry_train.primitives import apply_chunked_loss, chunked_loss_report, loss_backends
from curry_train.primitives.cross_entropy import chunked_cross_entropy
from curry_train.primitives.loss_backends import BackendEntry, loss_backend

TOKENS, WIDTH, CLASSES = 96, 16, 200
HAS_TORCHS = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy"
)


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch):
    monkeypatch.setattr(loss_backends, "MEASURED_BACKENDS", {})


def make(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(CLASSES, (TOKENS,), generator=generator)
    targets[:30] = -100
    return hidden, weight, targets


def outcome(backend, given, **options):
    hidden, weight, targets = given
    loss = chunked_cross_entropy(hidden, weight, targets, backend=backend, **options)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), (hidden, weight))]


def entry(loss, *, device_types=("cpu",), options=("ignore_index", "reduction")):
    return BackendEntry(loss, "torch.nn", device_types, frozenset(options))


def plain(hidden, weight, bias, targets, **options):
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, **options)


def lean(hidden, weight, bias, targets, **options):
    """A backend with one token per chunk: less memory than the reference."""
    return chunked_cross_entropy(hidden, weight, targets, bias=bias, chunk_tokens=1, **options)


def inexact(hidden, weight, bias, targets, **options):
    """As lean, and leaves out a little, as a filter of small gradients would."""
    return lean(hidden, weight.detach() + 1.001 * (weight - weight.detach()), bias, targets)


def failing(hidden, weight, bias, targets, **options):
    raise torch.OutOfMemoryError("CUDA out of memory")


@HAS_TORCHS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 3}]
)
def test_torchs_backend_computes_the_same(options, dtype):
    given = make(dtype)
    if "ignore_index" in options:
        given[2].clamp_(min=0)
    found, expected = (outcome(backend, given, **options) for backend in (TORCHS, None))
    most = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= most * theirs.norm()


TORCHS = loss_backend("torch")


@HAS_TORCHS
def test_torchs_backend_takes_class_weights_and_autocast():
    hidden, weight, targets = make()
    class_weights = torch.linspace(0.1, 2, CLASSES)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (
            outcome(backend, (hidden, weight, targets), class_weights=class_weights)
            for backend in (TORCHS, None)
        )
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm()


@pytest.mark.parametrize(
    ("others", "taken"),
    [
        ({"lean": lean}, "lean"),
        ({"plain": plain}, "reference"),
        ({"inexact": inexact}, "reference"),
        ({"failing": failing, "lean": lean}, "lean"),
        ({"inexact": inexact, "plain": plain, "lean": lean}, "lean"),
    ],
)
def test_auto_takes_the_least_bytes_that_are_exact_enough(monkeypatch, others, taken):
    calls = []

    def counted(name, loss):
        def call(*args, **options):
            calls.append(name)
            return loss(*args, **options)

        return call

    entries = {name: entry(counted(name, loss)) for name, loss in others.items()}
    monkeypatch.setattr(loss_backends, "BACKENDS", entries)
    given = make()
    expected = outcome(None, given)
    for repeat in range(2):
        calls.clear()
        found = outcome(loss_backend("auto"), given)
        torch.testing.assert_close(found, expected)
        used = [] if taken == "reference" else [taken]
        assert calls == (used if repeat else [*others, *used])
    ((_, measured),) = loss_backends.MEASURED_BACKENDS.items()
    assert min(measured, key=measured.get) == taken
    assert not {"inexact", "failing"} & measured.keys()


def test_auto_measures_anew_for_another_shape_dtype_or_option(monkeypatch):
    monkeypatch.setattr(
        loss_backends, "BACKENDS", {"lean": entry(lean, options=("ignore_index", "reduction"))}
    )
    auto = loss_backend("auto")
    given = make()
    outcome(auto, given)
    outcome(auto, (given[0][-20:], given[1], given[2][-20:]))
    outcome(auto, make(torch.float64))
    outcome(auto, given, reduction="sum")
    assert len(loss_backends.MEASURED_BACKENDS) == 4
    # Nothing but ignored targets: 0 / 0 compares nothing.
    outcome(auto, (given[0][:9], given[1], given[2][:9]))
    assert len(loss_backends.MEASURED_BACKENDS) == 4
    # Only the reference takes this one, so there is nothing to measure.
    outcome(auto, given, z_loss=1e-3)
    assert len(loss_backends.MEASURED_BACKENDS) == 4


def test_auto_is_the_reference_without_values_and_under_a_profiler(monkeypatch):
    monkeypatch.setattr(loss_backends, "BACKENDS", {"lean": entry(lean)})
    with FakeTensorMode():
        hidden = torch.zeros(8, WIDTH, requires_grad=True)
        weight = torch.zeros(CLASSES, WIDTH, requires_grad=True)
        targets = torch.zeros(8, dtype=torch.int64)
        chunked_cross_entropy(hidden, weight, targets, backend=loss_backend("auto")).backward()
    with torch.profiler.profile():
        outcome(loss_backend("auto"), make())
    assert not loss_backends.MEASURED_BACKENDS


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("liger", {}, "liger_kernel is not installed"),
        ("cce", {}, "cut_cross_entropy is not installed"),
        pytest.param("torch", {"z_loss": 1e-3}, "does not take z_loss", marks=HAS_TORCHS),
        pytest.param("torch", {"chunk_tokens": 9}, "does not take chunk_tokens", marks=HAS_TORCHS),
        pytest.param(
            "torch",
            {"token_weights": "probability"},
            "does not take weighted_by_probability",
            marks=HAS_TORCHS,
        ),
    ],
)
def test_a_named_backend_that_can_not_compute_the_loss_is_refused(name, options, why):
    with pytest.raises(ValueError, match=why):
        outcome(loss_backend(name), make(), **options)
    with pytest.raises(ValueError, match="must be one of auto, torch, liger, cce"):
        loss_backend("triton")


def test_a_backend_of_other_devices_names_them():
    backend = entry(lean, device_types=("cuda", "xpu"))
    assert backend.unusable(torch.ones(1), {}) == "it runs on cuda, xpu, not on cpu"


def test_liger_and_cce_get_their_own_names_for_the_options(monkeypatch):
    """With stand-ins for their modules on the CPU; their kernels were not run."""

    class Liger:
        def __init__(self, *, ce_weight, lse_square_scale, softcap, ignore_index, reduction):
            self.options = {"class_weights": ce_weight, "z_loss": lse_square_scale}
            self.options |= {"softcap": softcap, "ignore_index": ignore_index}
            self.options["reduction"] = reduction

        def __call__(self, weight, hidden, targets, bias):
            return chunked_cross_entropy(hidden, weight, targets, bias=bias, **self.options)

    def cut(hidden, weight, targets, *, bias, ignore_index, softcap, reduction):
        return chunked_cross_entropy(
            hidden,
            weight,
            targets,
            bias=bias,
            ignore_index=ignore_index,
            softcap=softcap,
            reduction=reduction,
        )

    for name, content in {
        "liger_kernel": {},
        "liger_kernel.transformers": {"LigerFusedLinearCrossEntropyLoss": Liger},
        "cut_cross_entropy": {"linear_cross_entropy": cut},
    }.items():
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ValueError, match="it runs on cuda, not on cpu"):
        outcome(loss_backend("liger"), make())
    on_cpu = {
        name: copy.copy(found).__class__(**(vars(found) | {"device_types": ("cpu",)}))
        for name, found in loss_backends.BACKENDS.items()
    }
    monkeypatch.setattr(loss_backends, "BACKENDS", on_cpu)
    given = make()
    for name, options in {
        "liger": {"z_loss": 1e-2, "softcap": 5.0, "class_weights": torch.linspace(0, 1, CLASSES)},
        "cce": {"softcap": 5.0},
    }.items():
        found, expected = (
            outcome(backend, given, **options) for backend in (loss_backend(name), None)
        )
        torch.testing.assert_close(found, expected)


@HAS_TORCHS
@pytest.mark.parametrize("name", ["torch", "auto"])
def test_a_models_head_takes_a_backend(name):
    def step(apply):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
        apply(model)
        model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        hidden, _, targets = make()
        F.cross_entropy(model(hidden), targets).backward()
        return model, [parameter.grad for parameter in model.parameters()]

    _, expected = step(lambda model: None)
    model, found = step(lambda model: apply_chunked_loss(model, backend=loss_backend(name)))
    torch.testing.assert_close(found, expected)
    assert str(chunked_loss_report(model)["1"]) == "1 loss in chunks"


def test_a_backend_is_given_by_its_name():
    given = make()
    expected = outcome(loss_backend("auto"), given)
    assert all(map(torch.equal, outcome("auto", given), expected))
    with pytest.raises(ValueError, match="must be one of auto, torch, liger, cce, got 'triton'"):
        outcome("triton", given)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    apply_chunked_loss(model, backend="auto")
    F.cross_entropy(model(given[0]), given[2]).backward()
    assert chunked_loss_report(model)["1"].num_chunked == 1
