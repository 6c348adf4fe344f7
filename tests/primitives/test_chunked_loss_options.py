"""Each option of the chunked loss equals a plain float64 reference, in value and gradients.

python -m pytest tests/primitives/test_chunked_loss_options.py
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from curry_train.core.measure import FlopCount, LiveStorages
from curry_train.primitives.cross_entropy import (
    CHUNK_BYTES,
    chunked_cross_entropy,
)

IGNORED = -100
SMALLEST_SIZE = 1e-3
# Half precision rounds logits and their gradients once; float32 sums in another order.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def reference(hidden, weight, targets, *, bias, options):
    """The same loss from whole logits and single steps of torch, as its definition reads."""
    kept = targets != IGNORED
    smoothing = options.get("label_smoothing", 0.0)
    class_weights = options.get("class_weights")
    logits = F.linear(hidden, weight, bias)
    if options.get("softcap"):
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    classes = logits.shape[-1]
    if class_weights is None:
        class_weights = torch.ones(classes, dtype=logits.dtype)
    class_weights = class_weights.to(logits.dtype)
    minus_log = -logits.log_softmax(-1)
    index = targets.clamp(min=0)
    at_target = minus_log.gather(-1, index[..., None])[..., 0]
    losses = (1 - smoothing) * class_weights[index] * at_target
    losses = losses + smoothing / classes * (minus_log * class_weights).sum(-1)
    losses = losses + options.get("z_loss", 0.0) * logits.logsumexp(-1).square()
    token_weights = options.get("token_weights")
    if isinstance(token_weights, str):
        token_weights = (-at_target).exp().detach()
    if token_weights is not None:
        losses = losses * token_weights.to(losses.dtype)
    losses = losses.where(kept, 0.0)
    if options.get("reduction") == "none":
        return losses
    if options.get("reduction") == "sum":
        return losses.sum()
    return losses.sum() / (class_weights[index] * kept).sum()


def make(seed, *, tokens, width, classes, ignored, biased, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(classes, width, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(classes, generator=generator).to(dtype).requires_grad_() if biased else None
    targets = torch.randint(classes, (2, tokens), generator=generator)
    drop = torch.rand(2, tokens, generator=generator) < ignored
    return hidden, weight, bias, targets.masked_fill(drop, IGNORED)


def outcome(loss, tensors, incoming):
    """The loss and the gradients of an uneven combination of its elements, of a graph kept once."""
    value = loss()
    leaves = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    assert value.requires_grad is bool(leaves)
    if not leaves:
        return [value]
    weights = incoming if value.dim() else torch.tensor(0.7)
    total = (value * weights.to(value)).sum()
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    gradients = torch.autograd.grad(total, leaves)
    torch.testing.assert_close(first, gradients, rtol=0, atol=0, equal_nan=True)
    return [value.detach(), *gradients]


def worst(found, expected):
    assert len(found) == len(expected)
    errors = []
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert torch.equal(ours.isnan(), theirs.isnan())
        difference = (ours.double() - theirs.double()).nan_to_num()
        # A gradient of 0, as with a single class, is the rounding of terms whose size is near 1.
        size = max(SMALLEST_SIZE, theirs.double().nan_to_num().norm())
        errors.append((difference.norm() / size).item())
    return max(errors)


def compared(tensors, options, *, chunk_tokens=5):
    hidden, weight, bias, targets = tensors
    generator = torch.Generator().manual_seed(1)
    incoming = torch.randn(targets.shape, dtype=torch.float64, generator=generator)
    exact = [
        None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)
        for tensor in (hidden, weight, bias)
    ]
    found = outcome(
        lambda: chunked_cross_entropy(
            hidden, weight, targets, bias=bias, chunk_tokens=chunk_tokens, **options
        ),
        (hidden, weight, bias),
        incoming,
    )
    expected = outcome(
        lambda: reference(exact[0], exact[1], targets, bias=exact[2], options=options),
        exact,
        incoming,
    )
    if options.get("reduction", "mean") == "mean" and not (targets != IGNORED).any():
        # 0 / 0 is the loss of both. Ours has gradients of 0, as F.cross_entropy has.
        assert all(gradient.count_nonzero() == 0 for gradient in found[1:])
        return worst(found[:1], expected[:1])
    return worst(found, expected)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "z_loss": st.sampled_from([0.0, 1e-2]),
        "softcap": st.sampled_from([None, 2.0, 30.0]),
    },
)


SINGLE_CLASS = dict(
    options={"reduction": "mean", "softcap": None, "z_loss": 0.0, "label_smoothing": 0.1},
    weighted="",
    tokens=1,
    width=1,
    classes=1,
    ignored=0.0,
    biased=False,
    chunk_tokens=1,
    seed=0,
    needs=(True, True, True),
)


@settings(max_examples=60, deadline=None)
@example(**SINGLE_CLASS)
@given(
    options=OPTIONS,
    weighted=st.sampled_from(["", "class", "token", "both", "probability"]),
    tokens=st.integers(0, 9),
    width=st.integers(1, 6),
    classes=st.integers(1, 12),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    biased=st.booleans(),
    chunk_tokens=st.sampled_from([1, 4, 100, None]),
    seed=st.integers(0, 5),
    needs=st.tuples(*[st.booleans()] * 3),
)
def test_every_combination_of_options_is_the_reference(
    options, weighted, tokens, width, classes, ignored, biased, chunk_tokens, seed, needs
):
    tensors = make(
        seed, tokens=tokens, width=width, classes=classes, ignored=ignored, biased=biased
    )
    for tensor, need in zip(tensors[:3], needs, strict=True):
        if tensor is not None:
            tensor.requires_grad_(need)
    add_weights(options, weighted, tensors)
    assert compared(tensors, options, chunk_tokens=chunk_tokens) < TOLERANCE[torch.float64]


def add_weights(options, weighted, tensors):
    if weighted in ("class", "both"):
        options["class_weights"] = torch.linspace(0.2, 2, len(tensors[1]), dtype=torch.float64)
    if weighted in ("token", "both"):
        size = tensors[3].numel()
        options["token_weights"] = torch.linspace(0, 3, size).reshape(tensors[3].shape)
    if weighted == "probability":
        options["token_weights"] = "probability"


EACH = [
    {"reduction": "none"},
    {"z_loss": 1e-2},
    {"softcap": 3.0},
    {"label_smoothing": 0.1, "class": True},
    {"class": True, "reduction": "sum"},
    {"token": True},
    {"token_weights": "probability"},
    {"token_weights": "probability", "reduction": "none", "z_loss": 1e-2, "softcap": 3.0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", EACH, ids=str)
def test_options_hold_in_low_precision_and_under_autocast(options, autocast, dtype):
    options = dict(options)
    tensors = make(3, tokens=40, width=16, classes=70, ignored=0.3, biased=True, dtype=dtype)
    chosen = [name for name in ("class", "token") if options.pop(name, False)]
    add_weights(options, "".join(chosen), tensors)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        error = compared(tensors, options)
    assert error < TOLERANCE[torch.bfloat16 if autocast else dtype]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_float16_gradients_do_not_overflow_with_a_loss_scale(reduction):
    hidden, weight, _, targets = make(
        4, tokens=9, width=5, classes=11, ignored=0.0, biased=False, dtype=torch.float16
    )
    options = {"reduction": reduction, "chunk_tokens": 4}
    loss = chunked_cross_entropy(hidden, weight, targets, **options).mean() * 65536.0
    exact = hidden.detach().double().requires_grad_()
    expected = reference(exact, weight.detach().double(), targets, bias=None, options=options)
    found = [torch.autograd.grad(loss, hidden)[0].double()]
    found.append(torch.autograd.grad(expected.mean() * 65536.0, exact)[0])
    assert ((found[0] - found[1]).norm() / found[1].norm()).item() < 2e-3


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_tokens_cost_no_product_and_may_hold_anything(reduction):
    hidden, weight, _, targets = make(5, tokens=40, width=6, classes=30, ignored=0.6, biased=False)
    counted = int((targets != IGNORED).sum())
    spoiled = hidden.detach().clone()
    spoiled[targets == IGNORED] = float("nan")
    spoiled.requires_grad_()
    outcomes = []
    for inputs in (hidden, spoiled):
        with FlopCount() as counter:
            loss = chunked_cross_entropy(
                inputs, weight, targets, reduction=reduction, chunk_tokens=8
            ).sum()
            outcomes.append([loss, *torch.autograd.grad(loss, (inputs, weight))])
        products = 3 if reduction == "mean" else 4
        assert counter.flops == 2 * counted * 6 * 30 * products
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.parametrize(
    ("tokens", "width", "classes"), [(2048, 32, 512), (64, 16, 4096), (4096, 1024, 8192)]
)
def test_a_chunk_takes_at_most_half_of_the_gradients(tokens, width, classes):
    with torch.device("meta"):
        hidden = torch.zeros(tokens, width, requires_grad=True)
        weight = torch.zeros(classes, width, requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.int64)
    with LiveStorages() as alive:
        chunked_cross_entropy(hidden, weight, targets).backward()
    gradients = 4 * (tokens + classes) * width
    floor = 16 * 4 * (classes + width)
    most = max(floor, min(CHUNK_BYTES, gradients // 2))
    assert alive.bytes_peak <= gradients + most + 40 * tokens
