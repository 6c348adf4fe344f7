"""Tests of the chunked loss; torch and pytest are all they need.

Chunks add the same terms in another order, so results are compared in float64 with a relative
tolerance of 1e-12, a few thousand times its rounding error.
"""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curry_train.primitives.cross_entropy import chunked_cross_entropy, chunked_log_probabilities

TOKENS = 40
WIDTH = 8
CLASSES = 97


def make_tensors():
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(CLASSES, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(CLASSES, (TOKENS,))
    targets[::3] = -100
    targets[1::3] = 3
    return hidden, weight, bias, targets


class Largest(TorchDispatchMode):
    """Note the largest tensor that any operation makes, and the number of matrix products."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0
        self.num_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        self.num_products += func.overloadpacket in (aten.mm, aten.addmm)
        for leaf in tree_leaves(output):
            if type(leaf) is torch.Tensor and leaf.device.type == "cpu":
                self.num_elements = max(self.num_elements, leaf.numel())
        return output


OPTIONS = [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 3}]
CLASS_WEIGHTS = torch.linspace(0.1, 2, CLASSES, dtype=torch.float64)


@pytest.mark.parametrize("chunk_tokens", [1, 7, TOKENS, None])
@pytest.mark.parametrize("options", OPTIONS)
def test_loss_and_gradients_are_those_of_the_whole_logits(options, chunk_tokens):
    hidden, weight, bias, targets = make_tensors()
    targets = targets.clamp(min=0) if "ignore_index" in options else targets
    expected = F.cross_entropy(F.linear(hidden, weight, bias), targets, CLASS_WEIGHTS, **options)
    gradients = torch.autograd.grad(3 * expected, (hidden, weight, bias))
    options = {"chunk_tokens": chunk_tokens, "class_weights": CLASS_WEIGHTS, **options}
    loss = chunked_cross_entropy(hidden, weight, targets, bias=bias, **options)
    ours = torch.autograd.grad(3 * loss, (hidden, weight, bias))
    torch.testing.assert_close((loss, *ours), (expected, *gradients), rtol=1e-12, atol=1e-14)


def test_log_probabilities_of_tokens_have_a_gradient_each():
    hidden, weight, bias, targets = make_tensors()
    found = chunked_log_probabilities(hidden, weight, targets, bias=bias, chunk_tokens=7)
    logs = -F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="none")
    ours = torch.autograd.grad(found.exp().square().sum(), (hidden, weight, bias))
    expected = torch.autograd.grad(logs.exp().square().sum(), (hidden, weight, bias))
    torch.testing.assert_close((found, *ours), (logs, *expected), rtol=1e-12, atol=1e-14)


def test_float16_gradients_do_not_overflow_with_a_loss_scale():
    found = []
    for dtype in (torch.float16, torch.float64):
        tensors = make_tensors()
        hidden, weight = (one.detach().half().to(dtype).requires_grad_() for one in tensors[:2])
        loss = chunked_cross_entropy(hidden, weight, tensors[3], chunk_tokens=7) * 65536.0
        found += torch.autograd.grad(loss, hidden)
    # Half precision rounds each product once.
    assert (found[0].double() - found[1]).norm() < 2e-3 * found[1].norm()


def test_no_tensor_is_as_large_as_the_logits_and_no_product_runs_twice():
    hidden, weight, bias, targets = make_tensors()
    with Largest() as largest:
        chunked_cross_entropy(hidden, weight, targets, bias=bias, chunk_tokens=8).backward()
    assert largest.num_elements == CLASSES * WIDTH < CLASSES * TOKENS
    # 14 of the 40 tokens are ignored, and have no product.
    assert largest.num_products == 3 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"chunk_tokens": 2.5},
            "^chunk_tokens must be a whole number of at least 1, or None to choose one, got 2.5$",
        ),
        ({"chunk_tokens": 0}, "^chunk_tokens must be a whole number of at least 1"),
        ({"reduction": "max"}, r"^reduction must be one of .*, got 'max'$"),
        (
            {"z_loss": math.inf},
            "^label_smoothing is from 0 to 1, z_loss at least 0, softcap above 0 or None, and all "
            "are finite; got 0.0, inf and None$",
        ),
        ({"softcap": 0.0}, "softcap above 0 or None, .* got 0.0, 0.0 and 0.0$"),
        ({"label_smoothing": 2}, "from 0 to 1"),
        ({"class_weights": torch.ones(5)}, r"class_weights must be a tensor of shape \(97,\)"),
        (
            {"class_weights": torch.ones(CLASSES, requires_grad=True)},
            "without gradient, or for tokens 'probability'; got tensor",
        ),
        ({"class_weights": "probability"}, r"^class_weights must be a tensor of shape .97,. with"),
        (
            {"token_weights": torch.ones(37)},
            r"^token_weights must be a tensor of shape \(40,\) without",
        ),
        (
            {"token_weights": "loss"},
            "For weights that are trained multiply the losses of reduction=.none. by them$",
        ),
    ],
)
def test_values_that_an_option_can_not_have_are_refused(options, message):
    hidden, weight, _, targets = make_tensors()
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(hidden, weight, targets, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda h, w, t: (h, w, t[:-1]),
            r"^hidden is \(40, 8\) and must be \(39, 8\): targets are .39,., weight .voca",
        ),
        (
            lambda h, w, t: (h, w, t.double()),
            r"got torch.float64: convert with .long\(\), or use F.cross_entropy for class prob",
        ),
        (
            lambda h, w, t: (h.float(), w, t),
            "they must have the same floating-point dtype; cast one of them, or use autocast$",
        ),
        (
            lambda h, w, t: (h.long(), w.long(), t),
            "^hidden is torch.int64, weight and bias are torch.int64: they ",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message):
    hidden, weight, _, targets = make_tensors()
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(*change(hidden, weight, targets))


def test_a_second_derivative_is_refused():
    hidden, weight, _, targets = make_tensors()
    loss = chunked_cross_entropy(hidden, weight, targets)
    with pytest.raises(
        RuntimeError,
        match=r"^a chunked loss can't be differentiated twice, which create_graph=True requires: "
        "call remove_chunked_loss, and use F.cross_entropy on the logits$",
    ):
        torch.autograd.grad(loss, hidden, create_graph=True)
