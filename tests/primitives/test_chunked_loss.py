"""Chunked cross-entropy equals torch's, one chunk of logits at a time.

python -m pytest tests/primitives/test_chunked_loss.py"""

import contextlib
import copy
import itertools
import math
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from curry_train.core.measure import FlopCount, LiveStorages
from curry_train.core.parity import compare, record_step
from curry_train.primitives import (
    apply_chunked_loss,
    chunked_loss_report,
    cross_entropy,
    remove_chunked_loss,
)
from curry_train.primitives.chunked_loss import LazyLogits
from curry_train.primitives.cross_entropy import chunked_cross_entropy

CLASSES, WIDTH = 301, 16
# Sums of some hundred float32 terms in another order; half precision rounds each product once.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Which of input, weight and bias are trained.
NEEDS = list(itertools.product((False, True), repeat=3))


def inputs(dtype=torch.float64, *, rows=(3, 37), ignored=30):
    make = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*s, WIDTH, generator=make).to(dtype) for s in (rows, (CLASSES,), (CLASSES,))
    )
    targets = torch.randint(CLASSES, rows, generator=make)
    targets[0, :ignored] = -100  # the first chunks hold few or none that count
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        bias[:, 0].detach().requires_grad_(),
        targets,
    )


def plain(hidden, weight, targets, *, bias=None, chunk_tokens=None, **options):
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    return F.cross_entropy(
        logits if logits.dtype is torch.float64 else logits.float(), targets.flatten(), **options
    )


def outcome(loss, given, *, scale=3.0, **options):
    """The loss and the gradients, of copies."""
    hidden, weight, bias, targets = given
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in (hidden, weight, bias)]
    value = loss(leaves[0], leaves[1], targets, bias=leaves[2], **options)
    if value.requires_grad:
        (value * scale).backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]


def errors(found, expected):
    assert [t is None for t in found] == [t is None for t in expected]
    pairs = [
        (a.double(), b.double()) for a, b in zip(found, expected, strict=True) if a is not None
    ]
    return [
        ((a - b).norm() / b.norm()).item() if b.norm() else (a - b).norm().item() for a, b in pairs
    ]


# The function, against torch's.


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunk_tokens", [1, 10, 111, 1000, None])
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 7}]
)
def test_loss_and_gradients_are_torchs(dtype, chunk_tokens, options):
    given = inputs(dtype, ignored=0 if "ignore_index" in options else 30)
    found = outcome(chunked_cross_entropy, given, chunk_tokens=chunk_tokens, **options)
    assert max(errors(found, outcome(plain, given, **options))) < TOLERANCE[dtype]
    assert found[0].dtype == (dtype if dtype is torch.float64 else torch.float32)
    assert all(gradient.dtype == dtype for gradient in found[1:])


def test_half_precision_is_no_farther_from_float64_than_torchs():
    given = inputs(torch.bfloat16)
    exact = outcome(plain, [t.detach().double().requires_grad_() for t in given[:3]] + [given[3]])
    ours, theirs = (
        errors(outcome(f, given), exact) for f in (lambda *a, **k: chunked(a, k), plain)
    )
    assert all(a <= 1.2 * b + 1e-6 for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


def chunked(args, options):
    return chunked_cross_entropy(*args, **options, chunk_tokens=10)


@pytest.mark.parametrize("scale", [1e-7, 65536.0])
def test_float16_loss_scaling_neither_overflows_nor_vanishes(scale):
    given = inputs(torch.float16)
    found = outcome(chunked_cross_entropy, given, scale=65536.0, chunk_tokens=10)
    exact = outcome(
        plain, [t.detach().double().requires_grad_() for t in given[:3]] + [given[3]], scale=65536.0
    )
    assert max(errors(found, exact)) < 2e-3


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_frozen_parts_get_no_gradient_and_cost_no_product(frozen):
    given = inputs()
    for place in frozen:
        given[place].requires_grad_(False)
    with FlopCount() as counted:
        found = outcome(chunked_cross_entropy, given, chunk_tokens=10)
    with FlopCount() as expected:
        reference = outcome(plain, given)
    assert max(errors(found, reference)) < 1e-14
    of_token = 2 * WIDTH * CLASSES * (3 - len(set(frozen) & {0, 1}))
    assert expected.flops == 111 * of_token
    assert counted.flops == 81 * of_token  # 30 of the 111 tokens are ignored


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("needs", NEEDS)
def test_a_graph_that_is_kept_gives_the_same_gradients_to_those_that_need_them(needs, reduction):
    given = inputs()
    given[0].data[0] *= 1000  # another highest logit in each row
    for leaf, need in zip(given[:3], needs, strict=True):
        leaf.requires_grad_(need)
    leaves = list(itertools.compress(given, needs))
    for loss in (chunked_cross_entropy, plain):
        value = loss(*given[:2], given[3], bias=given[2], reduction=reduction).sum()
        assert value.requires_grad is any(needs)
        both = [
            torch.autograd.grad(3 * value, leaves, retain_graph=True) for _ in range(2 * any(needs))
        ]
        found = [value.detach(), *itertools.chain(*both)]
        if loss is chunked_cross_entropy:
            ours = found
    assert max(errors(ours, found)) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    # A token has the bytes of its logits, of their copies and of its input.
    [
        (torch.float32, {"chunk_tokens": 30}, [30, 30, 21]),
        (torch.float32, {"chunk_bytes": 2 * 4 * (CLASSES + WIDTH) - 1}, [1] * 81),
        (torch.float32, {"chunk_bytes": 30 * 4 * (CLASSES + WIDTH)}, [30, 30, 21]),
        (torch.float64, {"chunk_bytes": 40 * 8 * (CLASSES + WIDTH)}, [40, 40, 1]),
        (torch.bfloat16, {"chunk_bytes": 80 * (6 * CLASSES + 2 * WIDTH)}, [80, 1]),
        (
            torch.float32,
            {"chunk_bytes": 60 * 4 * (2 * CLASSES + WIDTH), "softcap": 3.0},
            [60, 21],
        ),
        (torch.float32, {"chunk_bytes": 1}, [1] * 81),
        (torch.float32, {}, [16] * 5 + [1]),
    ],
)
def test_chunks_have_as_many_tokens_as_fit(dtype, options, expected):
    hidden, weight, _, targets = inputs(dtype)
    with ProductRows() as found:
        chunked_cross_entropy(hidden, weight, targets, **options)
    assert found.rows == expected


class ProductRows(TorchDispatchMode):
    """Note the rows of each product whose columns are classes."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "mm" in func.__name__ and out.shape[-1] == CLASSES:
            self.rows.append(out.shape[0])
        return out


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}])
def test_nothing_but_ignored_targets_is_as_in_torch(options):
    given = inputs()
    given[3].fill_(-100)
    found, expected = (outcome(loss, given, **options) for loss in (chunked_cross_entropy, plain))
    assert torch.equal(found[0].isnan(), expected[0].isnan())
    assert all(gradient.count_nonzero() == 0 for gradient in found[1:] + expected[1:])


def test_no_grad_computes_the_loss_alone():
    hidden, weight, bias, targets = inputs()
    with torch.no_grad(), FlopCount() as counted:
        loss = chunked_cross_entropy(hidden, weight, targets, bias=bias, chunk_tokens=10)
    torch.testing.assert_close(
        loss, plain(hidden, weight, targets, bias=bias).detach(), rtol=1e-14, atol=0
    )
    assert counted.flops == 2 * 81 * WIDTH * CLASSES


@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_as_linear_would(dtype, rows):
    hidden, *others = inputs(dtype)
    given = [hidden.detach().to(rows).requires_grad_(), *others]
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (outcome(loss, given) for loss in (chunked_cross_entropy, plain))
    assert torch.equal(found[0], expected[0])
    assert max(errors(found, expected)) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_graph_that_is_kept_are_not_scaled_in_place(dtype):
    given = inputs(dtype)
    loss = chunked_cross_entropy(*given[:2], given[3], chunk_tokens=10)
    first = torch.autograd.grad(4 * loss, given[:2], retain_graph=True)
    second = torch.autograd.grad(8 * loss, given[:2])
    assert all(torch.equal(2 * a, b) for a, b in zip(first, second, strict=True))


def test_torch_still_says_whether_a_graph_is_kept():
    assert cross_entropy.graph_is_kept is torch._C._autograd._get_current_graph_task_keep_graph


def test_differentiating_twice_is_refused():
    hidden, weight, _, targets = inputs()
    model = Model()
    apply_chunked_loss(model)
    for loss in (chunked_cross_entropy(hidden, weight, targets), Custom.apply(model(TOKENS))):
        with pytest.raises(RuntimeError, match="differentiated twice"):
            loss.backward(create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pretend", [False, True])
def test_peak_is_one_chunk_and_the_gradients(dtype, pretend):
    rows = 4096
    classes = 2048
    width = 32
    chunk = 128
    with FakeTensorMode() if pretend else torch.enable_grad():
        hidden = torch.zeros(rows, width, dtype=dtype, requires_grad=True)
        weight = torch.zeros(classes, width, dtype=dtype, requires_grad=True)
        targets = torch.zeros(rows, dtype=torch.int64)
        with LiveStorages() as alive:
            chunked_cross_entropy(hidden, weight, targets, chunk_tokens=chunk).backward()
    size = dtype.itemsize
    gradients = rows * width * size + classes * width * 4
    logits = chunk * classes * (4 if size == 4 else 4 + size)
    products = classes * width * size + chunk * width * 4  # of one chunk, before they are added up
    assert gradients + logits <= alive.bytes_peak <= gradients + logits + products + 64 * rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda h, w, t: chunked_cross_entropy(h[..., :5], w, t),
            r"hidden must be \(\.\.\., width\)",
        ),
        (lambda h, w, t: chunked_cross_entropy(h, w, t[:, :5]), r"targets of \(3, 37\)"),
        (lambda h, w, t: chunked_cross_entropy(h, w, t.double()), "convert with .long"),
        (
            lambda h, w, t: chunked_cross_entropy(h, w.float(), t),
            "cast one of them, or use autocast",
        ),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, bias=w[0]), r"bias must be \(301,\)"),
        (
            lambda h, w, t: chunked_cross_entropy(h, w, t, reduction="max"),
            "reduction must be one of",
        ),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, chunk_bytes=0), "chunk_bytes must be"),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, chunk_bytes=9, chunk_tokens=9), "both set"),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, z_loss=-1.0), "z_loss must be"),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, softcap=0.0), "softcap must be above 0"),
        (
            lambda h, w, t: chunked_cross_entropy(h, w, t, class_weights=torch.ones(5)),
            r"class_weights must be floating-point of shape \(301,\)",
        ),
        (
            lambda h, w, t: chunked_cross_entropy(h, w, t, token_weights=t),
            r"token_weights must be floating-point of shape \(3, 37\)",
        ),
        (
            lambda h, w, t: chunked_cross_entropy(h, w, t, token_weights=h[..., 0]),
            "token_weights get no gradient here",
        ),
        (
            lambda h, w, t: chunked_cross_entropy(h, w, t, token_weights="loss"),
            "must be a tensor or 'probability'",
        ),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, label_smoothing=2), "from 0 to 1"),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, chunk_tokens=0), "at least 1"),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, chunk_tokens=True), "at least 1"),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, chunk_tokens=2.5), "at least 1"),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, chunk_bytes=0.5), "chunk_bytes must be"),
        (lambda h, w, t: chunked_cross_entropy(h[0, 0, 0], w, t), "do not fit"),
        (lambda h, w, t: chunked_cross_entropy(h, w[0], t), "do not fit"),
        (lambda h, w, t: chunked_cross_entropy(h.long(), w.long(), t), "floating-point dtype"),
        (
            lambda h, w, t: chunked_cross_entropy(h, w, t, bias=w[:, 0].half()),
            "bias are torch.float64, torch.float16|bias are torch.float16, torch.float64",
        ),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, label_smoothing=-0.1), "from 0 to 1"),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, z_loss=math.inf), "z_loss must be"),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, softcap=math.inf), "above 0 and finite"),
        (
            lambda h, w, t: chunked_cross_entropy(h, w, t, class_weights=torch.ones(301).long()),
            "class_weights must be floating-point",
        ),
        (
            lambda h, w, t: chunked_cross_entropy(h, w, t, class_weights=w[:, 0]),
            "class_weights get no gradient here",
        ),
        (
            lambda h, w, t: chunked_cross_entropy(h, w, t, token_weights=torch.ones(37)),
            "token_weights must be floating-point",
        ),
        (lambda h, w, t: chunked_cross_entropy(h, w, t, backend="none"), "got 'none'"),
    ],
)
def test_what_does_not_fit_is_said(change, message):
    hidden, weight, _, targets = inputs()
    with pytest.raises(ValueError, match=message):
        change(hidden, weight, targets)


# The head of a model, without an edit.


class Model(nn.Module):
    """A table, a block and a head with a bias."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(CLASSES, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(F.silu(self.body(self.table(tokens))))


TOKENS = torch.randint(CLASSES, (4, 33), generator=torch.Generator().manual_seed(0))


def both(loss, *, dtype=torch.float64, tied=False, chunk_tokens=20):
    """The record of a plain step and of a changed one, and what became of the logits."""
    records = []
    for apply in (
        lambda model: None,
        lambda model: apply_chunked_loss(model, chunk_tokens=chunk_tokens),
    ):
        model = Model(tied).to(dtype).train()
        apply(model)
        records.append(record_step(model, TOKENS, loss))
    return compare(*records, tolerance=TOLERANCE[dtype]), chunked_loss_report(model)["head"]


def shifted(model, tokens):
    return model(tokens)[:, :-1], tokens[:, 1:]


class Custom(torch.autograd.Function):
    """A loss that takes its tensors past `__torch_function__`, as kernels of others do."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return gradient * 2 * logits


STAYS = {
    "view": lambda m, t: F.cross_entropy(m(t).view(-1, CLASSES), t.view(-1)),
    "reshape": lambda m, t: F.cross_entropy(
        m(t)[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1)
    ),
    "view of four dimensions": lambda m, t: F.cross_entropy(
        m(t).view(2, 2, 33, CLASSES).flatten(0, 2), t.flatten()
    ),
    "flatten": lambda m, t: F.cross_entropy(m(t).flatten(0, 1), t.flatten(), reduction="sum"),
    "flatten of torch": lambda m, t: F.cross_entropy(torch.flatten(m(t), end_dim=-2), t.flatten()),
    "slice": lambda m, t: F.cross_entropy(
        m(t)[..., :-1, :].contiguous().view(-1, CLASSES), t[:, 1:].flatten()
    ),
    "number": lambda m, t: F.cross_entropy(m(t)[:, -1], t[:, -1]),
    "mask": lambda m, t: F.cross_entropy(m(t)[t > 9], t[t > 9]),
    "to": lambda m, t: F.cross_entropy(m(t).to(t.device).flatten(0, 1), t.flatten()),
    "transpose": lambda m, t: F.cross_entropy(m(t).transpose(1, 2), t, label_smoothing=0.1),
    "permute": lambda m, t: F.cross_entropy(m(t).permute(0, 2, 1).contiguous(), t, ignore_index=5),
    "class weights": lambda m, t: F.cross_entropy(
        m(t).flatten(0, 1), t.flatten(), weight=torch.linspace(0, 1, CLASSES, dtype=torch.float64)
    ),
    "reduction none": lambda m, t: (
        F.cross_entropy(m(t).flatten(0, 1), t.flatten(), reduction="none").square().sum()
    ),
    "reduction none of classes in dimension 1": lambda m, t: (
        F.cross_entropy(m(t).transpose(1, 2), t, reduction="none")[:, 1:].square().sum()
    ),
    "module": lambda m, t: nn.CrossEntropyLoss()(m(t).flatten(0, 1), t.flatten()),
    "sizes": lambda m, t: (
        lambda y: F.cross_entropy(y.view(y.size(0) * y.shape[1], y.shape[-1]), t.flatten())
    )(m(t)),
    "two losses": lambda m, t: (
        lambda y: sum(
            F.cross_entropy(y[:, i::2].flatten(0, 1), t[:, i::2].flatten()) for i in (0, 1)
        )
    )(m(t)),
}
MADE = {
    "log_softmax": lambda m, t: F.nll_loss(m(t).log_softmax(-1).flatten(0, 1), t.flatten()),
    "cross_entropy with targets that are no indices": lambda m, t: F.cross_entropy(
        m(t).flatten(0, 1), F.one_hot(t.flatten(), CLASSES).double()
    ),
    "cross_entropy with scaled logits of a head with a bias": lambda m, t: F.cross_entropy(
        m(t).flatten(0, 1) / 2, t.flatten()
    ),
    "mul_": lambda m, t: (lambda y: (y.mul_(2), F.cross_entropy(y.flatten(0, 1), t.flatten()))[1])(
        m(t)
    ),
    "__setitem__": lambda m, t: (
        lambda y: (y.__setitem__((..., 0), -9.0), F.cross_entropy(y.flatten(0, 1), t.flatten()))[1]
    )(m(t)),
    "__getitem__": lambda m, t: F.cross_entropy(
        m(t)[..., 1:].flatten(0, 1), t.flatten().clamp(max=9)
    ),
    "square": lambda m, t: (
        lambda y: F.cross_entropy(y.flatten(0, 1), t.flatten()) + y.square().mean()
    )(m(t)),
    "cat": lambda m, t: torch.cat([m(t), torch.ones(4, 1, CLASSES)], dim=1).square().mean(),
    "float": lambda m, t: F.cross_entropy(m(t).float().flatten(0, 1), t.flatten()),
    "view": lambda m, t: m(t).view(-1).square().mean(),
    "__deepcopy__": lambda m, t: (
        lambda y: (copy.deepcopy(y.detach()), F.cross_entropy(y.flatten(0, 1), t.flatten()))[1]
    )(m(t)),
    "argmax": lambda m, t: (
        lambda y: (y.argmax(-1), F.cross_entropy(y.flatten(0, 1), t.flatten()))[1]
    )(m(t)),
    "T": lambda m, t: m(t)[0].T.square().mean(),
    "__rsub__": lambda m, t: (1 - m(t)).square().mean(),
    "mul": lambda m, t: m(t).mul(True).square().mean(),
    "to": lambda m, t: m(t).to(torch.float32).square().mean(),
    "cross_entropy with classes that are not in dimension 1": lambda m, t: F.cross_entropy(
        m(t), torch.zeros(4, CLASSES).long()
    ),
    "Function": lambda m, t: Custom.apply(m(t)),
    "Function on a view": lambda m, t: Custom.apply(m(t)[:, 1:].flatten(0, 1)),
    "Function and more": lambda m, t: (
        lambda y: Custom.apply(y) + y.square().sum() + F.cross_entropy(y.flatten(0, 1), t.flatten())
    )(m(t)),
}


@pytest.mark.parametrize("way", STAYS)
def test_loss_runs_in_chunks_behind(way):
    found, use = both(STAYS[way])
    assert found.holds, found.describe()
    assert str(use) == ("2 losses in chunks" if way == "two losses" else "1 loss in chunks")


@pytest.mark.parametrize("way", MADE)
def test_logits_are_made_for(way):
    found, use = both(MADE[way])
    assert found.holds, found.describe()
    assert use.whole, use
    if "Function" not in way and way != "__deepcopy__":
        assert use.whole == [way]


ROWS = torch.tensor([3, 1, 1])
INDICES = {
    "slice": (slice(1, None), True),
    "number": (2, True),
    "rows": (ROWS, True),
    "rows in a tuple": ((ROWS,), True),
    "mask of rows": (torch.tensor([True, False, True, True]), True),
    "ellipsis": (..., True),
    "rows and a number": ((ROWS, 0), False),
    "rows and tokens": ((ROWS, torch.tensor([0, 5, 32])), False),
    "mask and all classes": ((TOKENS > 9, slice(None)), False),
    "a list": ([3, 1], False),
    "mask of single logits": (torch.ones(4, 33, CLASSES, dtype=torch.bool), False),
}
# The index of the targets, where it is not that of the logits.
TARGETS = {"mask and all classes": TOKENS > 9, "mask of single logits": ...}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_picks_the_same_logits_and_terms(name):
    where, is_chunked = INDICES[name]

    def loss(model, tokens):
        logits = model(tokens)[where]
        targets = tokens[TARGETS.get(name, where)]
        return F.cross_entropy(logits.reshape(-1, CLASSES), targets.reshape(-1))

    found, use = both(loss)
    assert found.holds, found.describe()
    assert bool(use.num_chunked) is is_chunked
    assert bool(use.whole) is not is_chunked


def one_step(model, instrument=contextlib.nullcontext):
    """Run a step under an instrument; return the instrument and the gradients."""
    with instrument() as entered:
        F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
    return entered, [parameter.grad for parameter in model.parameters()]


def tracked(model):
    """Track a step with torch's own memory tracker, and return the bytes at the peak."""
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
    return sum(place["Total"] for place in tracker.get_tracker_snapshot("peak").values())


def test_torchs_memory_tracker_sees_the_same_step_in_less_memory():
    plain_model = Model()
    model = Model()
    apply_chunked_loss(model, chunk_tokens=4)
    whole = tracked(plain_model)
    found = tracked(model)
    use = chunked_loss_report(model)["head"]
    assert str(use) == "1 loss in chunks"
    logits = TOKENS.numel() * CLASSES * 4
    assert found < whole - 2 * logits + 3 * 4 * CLASSES * 4


@pytest.mark.parametrize(
    "instrument",
    [
        lambda: FlopCounterMode(display=False),
        lambda: profile(profile_memory=True, record_shapes=True, with_stack=True),
        LiveStorages,
        ModuleTracker,
    ],
    ids=["flop counter", "profiler", "live storages", "module tracker"],
)
def test_an_instrument_sees_the_same_step_in_chunks(instrument):
    model = Model()
    apply_chunked_loss(model, chunk_tokens=20)
    _, expected = one_step(model)
    model.zero_grad()
    _, found = one_step(model, instrument)
    assert str(chunked_loss_report(model)["head"]) == "1 loss in chunks"
    # The flop counter takes `silu` apart, which rounds otherwise, with whole logits too.
    torch.testing.assert_close(found, expected)


def test_hooks_on_the_node_of_the_logits_run_in_backward():
    # FSDP2, module trackers and pipelines learn from them that backward has come this far.
    model = Model()
    apply_chunked_loss(model)
    calls = []
    logits = model(TOKENS)
    register_multi_grad_hook([logits], lambda gradients: calls.append("all"))
    logits.grad_fn.register_hook(lambda *gradients: calls.append("node"))
    F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()).backward()
    assert sorted(calls) == ["all", "node"]
    assert str(chunked_loss_report(model)["head"]) == "1 loss in chunks"


def test_a_hook_that_reads_the_gradient_of_the_logits_gets_it():
    gradients = []
    for apply in (lambda model: None, apply_chunked_loss):
        model = Model()
        apply(model)
        logits = model(TOKENS)
        logits.register_hook(gradients.append)
        F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()).backward()
    torch.testing.assert_close(*gradients)
    assert chunked_loss_report(model)["head"].whole == ["register_hook"]


@pytest.mark.parametrize("needs", NEEDS)
def test_logits_that_are_read_train_what_is_trained(needs):
    found = []
    for apply in (lambda model: None, apply_chunked_loss):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 9))
        apply(model)
        leaves = [torch.linspace(-1, 1, 24).view(2, 3, 4), *model.parameters()]
        for leaf, need in zip(leaves, needs, strict=True):
            leaf.requires_grad_(need)
        value = Custom.apply(model(leaves[0])[:, :-1])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(leaves[0])
        value = value + F.cross_entropy(logits.float().flatten(0, 1), torch.arange(6))
        wanted = list(itertools.compress(leaves, needs))
        found.append([value.detach(), *(torch.autograd.grad(value, wanted) if wanted else ())])
    assert max(errors(*found)) < 1e-2


def test_logits_may_be_doubled():
    records = []
    for apply in (lambda model: None, apply_chunked_loss):
        model = Model().double()
        model.head.bias = None
        apply(model)
        records.append(
            record_step(
                model,
                TOKENS,
                lambda m, t: F.cross_entropy(2 * m(t).flatten(0, 1), t.flatten(), reduction="sum"),
            )
        )
    assert compare(*records, tolerance=TOLERANCE[torch.float64]).holds
    assert chunked_loss_report(model)["head"].num_chunked == 1


def test_logits_of_one_token_are_indexed_by_class():
    plain, model = Model(), Model()
    apply_chunked_loss(model)
    classes = torch.tensor([7, 0])
    assert torch.equal(model(TOKENS)[0, 0][classes], plain(TOKENS)[0, 0][classes])


def test_logits_move_to_the_device_that_is_named():
    model = Model()
    apply_chunked_loss(model)
    assert model(TOKENS).to("meta").device.type == "meta"


def test_upcast_of_half_precision_stays_in_chunks():
    found, use = both(
        lambda m, t: F.cross_entropy(m(t).float().view(-1, CLASSES), t.view(-1)),
        dtype=torch.bfloat16,
    )
    assert found.holds, found.describe()
    assert str(use) == "1 loss in chunks"


@pytest.mark.parametrize("tied", [False, True])
def test_loss_has_the_dtype_of_torchs(tied):
    found, use = both(
        lambda m, t: F.cross_entropy(m(t).view(-1, CLASSES), t.view(-1)),
        dtype=torch.bfloat16,
        tied=tied,
    )
    assert found.holds, found.describe()  # which holds dtypes against each other as well
    assert use.num_chunked == 1


def test_written_logits_and_their_views_stay_in_step():
    def loss(model, tokens):
        logits = model(tokens)
        flat, wide = logits.view(-1, CLASSES), logits.float()
        logits.mul_(2)
        return F.cross_entropy(flat.float(), tokens.flatten()) + F.cross_entropy(
            wide.flatten(0, 1), tokens.flatten()
        )

    found, _ = both(loss, dtype=torch.bfloat16)
    assert found.holds, found.describe()


def test_logits_asked_for_after_the_weight_changed_are_refused():
    model = Model()
    apply_chunked_loss(model)
    logits = model(TOKENS)
    with torch.no_grad():
        model.head.weight.mul_(2)
    for use in (torch.Tensor.argmax, lambda y: F.cross_entropy(y.flatten(0, 1), TOKENS.flatten())):
        with pytest.raises(RuntimeError, match="before optimizer"):
            use(logits)


def test_eval_no_grad_names_copies_and_removal_are_the_bare_models():
    bare, model = Model(), Model()
    assert apply_chunked_loss(model, head="he*", chunk_tokens=5) == ["head"]
    assert list(model.state_dict()) == list(bare.state_dict())
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in bare.named_parameters()
    ]
    assert isinstance(model.head, nn.Linear)
    expected = bare(TOKENS)
    assert type(model.train()(TOKENS)) is LazyLogits
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.head.__dict__["_chunked_loss"]["chunk_tokens"] == 5
        with torch.no_grad():
            assert type(other(TOKENS)) is torch.Tensor
        assert torch.equal(other.eval()(TOKENS), expected)
    assert remove_chunked_loss(model) == ["head"]
    assert type(model.head) is nn.Linear
    assert vars(model.head).keys() == vars(bare.head).keys()


def test_compiled_code_has_plain_logits(monkeypatch):
    model = Model()
    apply_chunked_loss(model)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert type(model(TOKENS)) is torch.Tensor


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), {}, "has no output layer"),
        (
            lambda: nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 32)),
            {},
            "name it with head=",
        ),
        (Model, {"head": "nothing"}, "matches no module"),
        (
            lambda: nn.Sequential(nn.Linear(8, 8), Doubled(8, 32)),
            {},
            "is a Doubled, not a plain nn.Linear",
        ),
        (Model, {"chunk_tokens": 0}, "at least 1"),
        (Model, {"chunk_bytes": 0}, "at least 1"),
        (Model, {"chunk_tokens": 4, "chunk_bytes": 2**20}, "both set"),
        (Model, {"head": "table"}, "matches no module"),
        (Model, {"backend": "no_such_backend"}, "got 'no_such_backend'"),
        (lambda: nn.Sequential(nn.Linear(4, 9), nn.Linear(4, 9)), {}, "has no output layer"),
        (lambda: Doubled(4, 9), {}, "the model is a Doubled"),
        (
            lambda: with_embeddings(nn.Sequential(nn.Bilinear(4, 4, 9)), 0),
            {},
            "0 is a Bilinear, not a plain nn.Linear",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused(build, options, message):
    model = build()
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        apply_chunked_loss(model, **options)
    assert [type(module) for module in model.modules()] == before


def with_embeddings(model, place):
    model.get_output_embeddings = lambda: None if place is None else model[place]
    return model


def two_heads():
    heads = nn.ModuleDict({"a": nn.Linear(4, 9), "b": nn.Linear(4, 8)})
    return nn.ModuleDict({"body": nn.Linear(4, 4), "heads": heads})


@pytest.mark.parametrize(
    ("build", "head", "expected"),
    [
        (two_heads, None, ["heads.a"]),
        (two_heads, "heads.b", ["heads.b"]),
        (two_heads, "heads.*", ["heads.a", "heads.b"]),
        (
            lambda: with_embeddings(nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 9)), 0),
            None,
            ["0"],
        ),
        (lambda: with_embeddings(nn.Sequential(nn.Linear(4, 9)), None), None, ["0"]),
    ],
)
def test_the_head_is_the_output_layer_or_the_one_that_is_named(build, head, expected):
    model = build()
    assert apply_chunked_loss(model, head=head) == expected
    assert {str(use) for use in chunked_loss_report(model).values()} == {"no loss yet"}
    assert remove_chunked_loss(model) == expected


def test_changing_a_head_twice_is_refused():
    model = Model()
    apply_chunked_loss(model)
    with pytest.raises(ValueError, match="remove_chunked_loss"):
        apply_chunked_loss(model)
