"""Chunked cross-entropy equals torch's, one chunk of logits at a time.

python -m pytest tests/primitives/test_chunked_loss.py"""

import copy
import itertools
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F

from curry_train.core.measure import FlopCount, LiveStorages
from curry_train.core.parity import compare, record_step
from curry_train.primitives import (
    GradFlow,
    apply_chunked_loss,
    chunked_cross_entropy,
    chunked_loss_report,
    plain_blocks,
    remove_chunked_loss,
)
from curry_train.primitives.chunked_loss import LazyLogits
from curry_train.primitives.cross_entropy import CHUNK_BYTES, product_dtype

from ..gates.constructs import word_model
from ..plan_models import Called
from ..toy_steps import all_equal, copies_of, drawn

CLASSES = 256
# Half precision rounds each product once.
TOLERANCE = {torch.float64: 1e-14, torch.bfloat16: 1e-2}


# The head of a model, without an edit.


TOKENS = torch.randint(CLASSES, (4, 33), generator=torch.Generator().manual_seed(0))


def both(use, *, dtype=torch.float64, tolerance=None, **options):
    """Compare a plain step with a changed one, and return what became of the logits."""
    records = []
    for apply in (lambda model: None, lambda model: apply_chunked_loss(model, chunk_tokens=20)):
        torch.manual_seed(0)
        model = word_model(**options).to(dtype).train()
        model.norm = nn.Linear(16, 16, dtype=dtype)
        apply(model)
        records.append(record_step(model, TOKENS, lambda model, tokens: use(model(tokens), tokens)))
    # This compares dtypes as well.
    found = compare(*records, tolerance=tolerance or TOLERANCE[dtype])
    assert found.holds, found.describe()
    return chunked_loss_report(model)["head"]


def flat_loss(logits, tokens):
    return F.cross_entropy(logits.flatten(0, -2), tokens.flatten())


def viewed_loss(logits, tokens):
    return F.cross_entropy(logits.view(-1, CLASSES), tokens.view(-1))


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


TABLE = torch.tensor([[[3, 1, 1]]])
STAYS = {
    "view": lambda y, t: viewed_loss(y.to("cpu"), t),
    "reshape": lambda y, t: F.cross_entropy(y[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1)),
    "mask": lambda y, t: F.cross_entropy(y[t > 9], t[t > 9]),
    "a table of rows": lambda y, t: flat_loss(y[TABLE], t[TABLE]),
    "mask of rows": lambda y, t: flat_loss(y[t[:, 0] > 99], t[t[:, 0] > 99]),
    "transpose": lambda y, t: F.cross_entropy(
        y.transpose(1, 2).contiguous(memory_format=torch.contiguous_format),
        t,
        label_smoothing=0.1,
    ),
    "reduction none of classes in dimension 1": lambda y, t: (
        F.cross_entropy(y.transpose(1, 2), t, reduction="none")[:, 1:].square().sum()
    ),
}


@pytest.mark.parametrize("way", STAYS)
def test_loss_runs_in_chunks_behind(way):
    assert str(both(STAYS[way])) == "losses in chunks: 1"


def test_two_losses_of_the_same_logits_run_in_chunks():
    use = both(lambda y, t: flat_loss(y[:, ::2], t[:, ::2]) + flat_loss(y[:, 1::2], t[:, 1::2]))
    assert str(use) == "losses in chunks: 2"


@pytest.mark.parametrize(
    ("operation", "use"),
    [
        (
            "cross_entropy with targets that are no indices",
            lambda y, t: F.cross_entropy(y.flatten(0, 1), F.one_hot(t.flatten(), CLASSES).double()),
        ),
        (
            "cross_entropy with scaled logits of a head with a bias",
            lambda y, t: flat_loss(y / 2, t),
        ),
        ("__setitem__", lambda y, t: (y.__setitem__((..., 0), -9.0), flat_loss(y, t))[1]),
        ("__getitem__", lambda y, t: flat_loss(y[..., 1:], t.clamp(max=9))),
        ("__getitem__", lambda y, t: F.cross_entropy(y[t > 9, :], t[t > 9])),
        ("mul", lambda y, t: flat_loss(y.mul(other=2), t)),
        ("square", lambda y, t: flat_loss(y, t) + y.square().mean()),
        (
            "cross_entropy with classes that are not in dimension 1",
            lambda y, t: F.cross_entropy(y, torch.zeros(4, CLASSES).long()),
        ),
        ("square", lambda y, t: Custom.apply(y[:, 1:].flatten(0, 1))),
    ],
)
def test_logits_are_made_for(operation, use):
    assert both(use).whole == [operation]


def test_a_probed_step_makes_no_logits():
    model = word_model()
    apply_chunked_loss(model)
    optimizer = torch.optim.SGD(model.parameters())
    with GradFlow(model, optimizer, every=1) as flow:
        F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
        optimizer.step()
    assert str(chunked_loss_report(model)["head"]) == "losses in chunks: 1"
    assert all(one.gradient for one in flow.records[0].layers.values())


def test_hooks_on_the_node_of_the_logits_run_in_backward():
    # FSDP2, module trackers and pipelines learn from them that backward has come this far.
    model = word_model()
    apply_chunked_loss(model)
    calls = []
    logits = model(TOKENS)
    assert logits._base is None  # FSDP2 looks for views among the outputs
    assert logits.untyped_storage().nbytes() == 0
    register_multi_grad_hook([logits], lambda gradients: calls.append("all"))
    logits.grad_fn.register_hook(lambda *gradients: calls.append("node"))
    flat_loss(logits, TOKENS).backward()
    assert sorted(calls) == ["all", "node"]
    assert str(chunked_loss_report(model)) == "{'head': losses in chunks: 1}"


@pytest.mark.parametrize("use", [viewed_loss, lambda y, t: viewed_loss(y.float(), t)])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_of_half_precision_has_the_dtype_of_torchs(use, tied):
    assert both(use, dtype=torch.bfloat16, is_tied=tied).num_chunked == 1


def test_written_logits_and_their_views_stay_in_step():
    def use(logits, tokens):
        flat, wide = logits.flatten(end_dim=1), logits.float()
        logits.mul_(2)
        return F.cross_entropy(flat.float(), tokens.flatten()) + flat_loss(wide, tokens)

    both(use, dtype=torch.bfloat16)


@pytest.mark.parametrize("scale", [2.0, 1 / 30, 3e-8, 1e-13])
def test_scaled_logits_keep_every_digit_of_the_scale(scale):
    use = both(lambda y, t: flat_loss(scale * y, t), tolerance=1e-12, is_tied=True)
    assert use.num_chunked == 1


def test_logits_asked_for_after_the_weight_changed_are_refused():
    model = word_model()
    apply_chunked_loss(model)
    logits = model(TOKENS)
    with torch.no_grad():
        model.head.weight.mul_(2)
    for use in (torch.Tensor.argmax, lambda y: flat_loss(y, TOKENS)):
        with pytest.raises(
            RuntimeError,
            match=r"^the logits of a head in chunks, weight \(256, 16\), were read after "
            r"its input, weight or bias had changed or was freed; compute the loss, and read logits"
            r", before that \(before optimizer.step\(\)\), shard the head with the model and not "
            "by itself, or use remove_chunked_loss$",
        ):
            use(logits)


def test_eval_no_grad_names_copies_and_removal_are_the_bare_models():
    bare = word_model()
    model = copy.deepcopy(bare)
    assert apply_chunked_loss(model, head="he*", chunk_tokens=5) == ["head"]
    assert list(model.state_dict()) == list(bare.state_dict())
    assert isinstance(model.head, nn.Linear)
    expected = bare(TOKENS)
    assert type(model.train()(TOKENS)) is LazyLogits
    assert type(model.head(input=torch.ones(model.head.in_features))) is LazyLogits
    with plain_blocks():
        assert type(model(TOKENS)) is torch.Tensor
    for other in copies_of(model):
        assert other.head._technique.chunk_tokens == 5
        with torch.no_grad():
            assert type(other(TOKENS)) is torch.Tensor
        assert torch.equal(other.eval()(TOKENS), expected)
    assert remove_chunked_loss(model) == ["head"]
    assert type(model.head) is nn.Linear
    assert vars(model.head).keys() == vars(bare.head).keys()


@pytest.mark.parametrize("way", ["traced", "in shards"])
def test_traced_code_and_a_head_in_shards_have_plain_logits(way, monkeypatch):
    model = word_model()
    apply_chunked_loss(model)
    if way == "traced":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    else:
        model.head.weight.full_tensor = None  # as shards have
    assert type(model(TOKENS)) is torch.Tensor
    whole = "" if way == "traced" else "; all logits made for a head in shards"
    assert str(chunked_loss_report(model)["head"]) == f"losses in chunks: 0{whole}"


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(8, 32), nn.Linear(8, 32)),
            {},
            "^Sequential has no output layer: no Linear is wider than all others and than its own "
            "input; name it with head=$",
        ),
        (word_model, {"head": "x"}, "^head 'x' matches no module; there are head$"),
        (
            lambda: Doubled(8, 32),
            {},
            "^the model is a Doubled, not a plain nn.Linear, so its loss can't run in chunks; "
            r"leave it out, or undo first what changed it \(remove_chunked_loss\)$",
        ),
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
        (two_heads, "heads.*", ["heads.a", "heads.b"]),
        (lambda: with_embeddings(nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 9)), 0), None, ["0"]),
        (lambda: with_embeddings(nn.Sequential(nn.Linear(4, 9)), None), None, ["0"]),
    ],
)
def test_the_head_is_the_output_layer_or_the_one_that_is_named(build, head, expected):
    model = build()
    assert apply_chunked_loss(model, head=head) == expected
    assert {str(use) for use in chunked_loss_report(model).values()} == {"losses in chunks: 0"}
    assert remove_chunked_loss(model) == expected


IGNORED = -100
UNWEIGHTED = torch.ones(1)


def reference(
    hidden,
    weight,
    targets,
    *,
    bias,
    softcap=None,
    class_weights=UNWEIGHTED,
    label_smoothing=0.0,
    z_loss=0.0,
    token_weights=UNWEIGHTED,
    reduction="mean",
):
    """The same loss from whole logits and torch's own function."""
    kept = targets != IGNORED
    logits = F.linear(hidden, weight, bias)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    classes = class_weights.to(logits.dtype).expand(len(weight))

    def each(**more):
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none", **more
        ).view_as(targets)

    losses = each(weight=classes, label_smoothing=label_smoothing)
    losses = losses + z_loss * logits.logsumexp(-1).square()
    if isinstance(token_weights, str):
        token_weights = (-each()).exp().detach()
    losses = (losses * token_weights.to(losses.dtype)).where(kept, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (classes[targets.clamp(min=0)] * kept).sum()


def make(seed, *, tokens, width, classes, ignored, biased, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    leaves = leaf(2, tokens, width), leaf(classes, width), leaf(classes) if biased else None
    targets = torch.randint(classes, (2, tokens), generator=generator)
    drop = torch.rand(2, tokens, generator=generator) < ignored
    return *leaves, targets.masked_fill(drop, IGNORED)


def outcome(loss, tensors, targets, options):
    """The loss and the gradients of an uneven combination of its elements, of a graph kept once."""
    hidden, weight, bias = tensors
    value = loss(hidden, weight, targets, bias=bias, **options)
    leaves = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    assert value.requires_grad is bool(leaves)
    if not leaves:
        return [value]
    weights = drawn(*targets.shape) if value.dim() else torch.tensor(0.7)
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
        size = max(1e-2, theirs.double().nan_to_num().norm())
        errors.append((difference.norm() / size).item())
    return max(errors)


def compared(tensors, options, *, chunk_tokens=5):
    *leaves, targets = tensors
    exact = [
        None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)
        for tensor in leaves
    ]
    ours = partial(chunked_cross_entropy, chunk_tokens=chunk_tokens)
    found = outcome(ours, leaves, targets, options)
    expected = outcome(reference, exact, targets, options)
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


# Arguments of `make`, which Hypothesis draws.
DRAWN = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 5),
        "tokens": st.integers(0, 9),
        "width": st.integers(1, 6),
        "classes": st.integers(1, 12),
        "ignored": st.sampled_from([0.0, 0.4, 1.0]),
        "biased": st.booleans(),
    }
)
ONE = {"seed": 0, "tokens": 1, "width": 1, "classes": 1, "ignored": 0.0, "biased": False}


@settings(max_examples=60, deadline=None)
@example({"softcap": None, "label_smoothing": 0.1}, "", ONE, 1, (True, True, True))
@example({"softcap": 2.0}, "", ONE | {"classes": 3}, 1, (False, True, True))
@given(
    OPTIONS,
    st.sampled_from(["", "class", "token", "both", "probability"]),
    DRAWN,
    st.sampled_from([1, 4, 100, None]),
    st.tuples(*[st.booleans()] * 3),
)
def test_every_combination_of_options_is_the_reference(
    options, weighted, made, chunk_tokens, needs
):
    tensors = make(**made)
    for tensor, need in zip(tensors[:3], needs, strict=True):
        if tensor is not None:
            tensor.requires_grad_(need)
    add_weights(options, weighted, tensors)
    assert compared(tensors, options, chunk_tokens=chunk_tokens) < 1e-12


WEIGHTED = {
    "class": {"label_smoothing": 0.1},
    "token": {"reduction": "sum"},
    "probability": {"reduction": "none", "z_loss": 1e-2, "softcap": 3.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("weighted", WEIGHTED)
def test_options_hold_in_low_precision_and_under_autocast(weighted, autocast, dtype):
    tensors = make(3, tokens=40, width=16, classes=70, ignored=0.3, biased=True, dtype=dtype)
    options = dict(WEIGHTED[weighted])
    add_weights(options, weighted, tensors)
    # Half precision rounds logits and their gradients once; float32 sums in another order.
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        error = compared(tensors, options)
    assert error < (2e-2 if autocast or dtype == torch.bfloat16 else 1e-5)


def add_weights(options, weighted, tensors):
    if weighted in ("class", "both"):
        options["class_weights"] = torch.linspace(0.2, 2, len(tensors[1]), dtype=torch.float64)
    if weighted in ("token", "both"):
        size = tensors[3].numel()
        options["token_weights"] = torch.linspace(0, 3, size).reshape(tensors[3].shape)
    if weighted == "probability":
        options["token_weights"] = "probability"


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_tokens_cost_no_product_and_may_hold_anything(reduction):
    hidden, weight, _, targets = make(5, tokens=40, width=6, classes=30, ignored=0.6, biased=False)
    ignored = targets == IGNORED
    spoiled = hidden.detach().masked_fill(ignored[..., None], float("nan")).requires_grad_()
    outcomes = []
    for inputs in (hidden, spoiled):
        with FlopCount() as counter:
            loss = chunked_cross_entropy(
                inputs, weight, targets, reduction=reduction, chunk_tokens=8
            ).sum()
            outcomes.append([loss, *torch.autograd.grad(loss, (inputs, weight))])
        products = 3 if reduction == "mean" else 4
        assert counter.flops == 2 * (~ignored).sum() * 6 * 30 * products
    assert all_equal(*outcomes)


def on_meta(tokens, width, classes, dtype=torch.float32):
    with torch.device("meta"):
        hidden, weight = (
            torch.zeros(rows, width, requires_grad=True, dtype=dtype) for rows in (tokens, classes)
        )
        return hidden, weight, torch.zeros(tokens, dtype=torch.int64)


# A chunk within 64 MiB would have 87 tokens: on an H200 a step took 1.76 times the plain one. Half
# of the gradients' bytes hold 361 tokens, and 339 without those of the input. In float32, of which
# no copy is made, 130 tokens of the narrow head fit into 64 MiB, and 512 are a quarter of a width.
@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "frozen", "products"),
    [
        (8192, 2048, torch.bfloat16, False, 3 * -(-8192 // 361)),
        (8192, 2048, torch.bfloat16, True, 2 * -(-8192 // 339)),
        (8320, 512, torch.float32, False, 3 * -(-8320 // 130)),
        (8192, 2048, torch.float32, False, 3 * -(-8192 // 512)),
    ],
)
def test_a_wide_head_is_read_for_a_quarter_of_its_width_in_tokens_at_a_time(
    tokens, width, dtype, frozen, products
):
    hidden, weight, targets = on_meta(tokens, width, 128_256, dtype)
    with Called() as called:
        chunked_cross_entropy(hidden.requires_grad_(not frozen), weight, targets)
    assert sum("mm" in str(one) for one in called.operations) == products


# Which of input, weight and bias are trained.
@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)))
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
        with torch.autocast("cpu", torch.float16):
            logits = model(leaves[0])
            assert product_dtype(leaves[0]) is torch.float16
        value = value + F.cross_entropy(logits.float().flatten(0, 1), torch.arange(6))
        # Read after autocast has ended, they are still its product.
        whole = Custom.apply(logits)
        assert whole.dtype == torch.float16
        value = value + whole
        wanted = list(itertools.compress(leaves, needs))
        found.append([value.detach(), *(torch.autograd.grad(value, wanted) if wanted else ())])
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("tokens", "width", "classes"), [(2048, 32, 512), (64, 16, 4096), (4096, 1024, 8192)]
)
def test_a_chunk_takes_at_most_half_of_the_gradients(tokens, width, classes):
    hidden, weight, targets = on_meta(tokens, width, classes)
    with LiveStorages() as alive:
        chunked_cross_entropy(hidden, weight, targets).backward()
    gradients = 4 * (tokens + classes) * width
    most = max(16 * 4 * (classes + width), min(CHUNK_BYTES, gradients // 2))
    assert alive.bytes_peak <= gradients + most + 40 * tokens
