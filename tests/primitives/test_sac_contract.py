"""The contract of `sac`: policies by name, list and function, eager and compiled.

python -m pytest tests/primitives/test_sac_contract.py
"""

import functools
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import set_checkpoint_early_stop

from curry_train.core.measure import count_flops, measure_memory
from curry_train.core.parity import compare, record_step
from curry_train.primitives import apply_regions, apply_sac, sac
from curry_train.primitives.sac import Policy, PolicyError
from curry_train.workloads import Case
from curry_train.workloads.models import transformer

from ..plan_models import Called, Runs
from ..toy_steps import copies_of, in_bfloat16, require_same_step, seeded_stack

aten = torch.ops.aten
CASE = Case(transformer(depth=2), batch_size=4)
LOSS = CASE.workload.mean_loss


# Policies.


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_each_attention_kernel_of_cuda_is_kept(backend):
    # The efficient kernel takes as many heads of keys as of queries.
    model = transformer(depth=2, dim=256, heads=4, kv_heads=4)
    case = Case(model, torch.device("cuda"), torch.bfloat16)
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        model = case.build()
        before = count_flops(model, case.batch(), LOSS)
        apply_sac(model, "save_matmuls_and_attention")
        assert count_flops(model, case.batch(), LOSS).backward == before.backward


# What is refused.


def step(policy):
    model = CASE.build()
    apply_sac(model, policy)
    return LOSS(model, CASE.batch())


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("keep", "^no policy is called 'keep'; there are save_expensive, save_matmuls"),
        (
            ["aten.mul_"],
            r"aten.mul_.\w+ writes in place, and a tensor that is written into can't be saved: "
            "leave it out$",
        ),
        (["mm"], "^an operation is named as torch.ops.aten.mm or 'aten.mm', got 'mm'$"),
        (["aten.mmm"], "^an operation is named as torch.ops.aten.mm or .*, got 'aten.mmm'$"),
        (7, "^a policy is a name, a list of operations or a function, got 7"),
        (
            ["aten.linear"],
            "^policy 'the list' saves no output of layers.0, so the block would be recomputed "
            r"whole; use recompute_blocks if that is intended. Its operations are aten.\w+, .*"
            r"aten.mm, .*[.] \(Composite ones such as aten.linear never appear here, and calls "
            r"that draw random numbers are always recomputed.\)$",
        ),
        (
            ["aten.silu", "aten.mul"],
            "^policy 'the list' is the wrong way round for layers.0: it saves 14 outputs of "
            "cheap operations, and recomputes all 8 matrix products, convolutions and attentions; "
            "use 'save_expensive', which saves those and recomputes the rest$",
        ),
        (lambda *_, **__: "save", "must return a CheckpointPolicy or a bool, got 'save'"),
        (lambda *_, **__: True, "saves aten.add_.Scalar, which writes in place: leave it out$"),
    ],
)
def test_a_policy_that_would_not_help_is_an_error(policy, message):
    with pytest.raises(ValueError, match=message):
        step(policy)


@pytest.mark.parametrize("option", [{"use_reentrant": True}, {"context_fn": tuple}])
def test_an_option_in_whose_place_the_policy_stands_is_refused(option):
    with pytest.raises(
        PolicyError,
        match=r"^reentrant checkpointing does not support policies, and a policy takes the place "
        "of context_fn: leave both out$",
    ):
        apply_sac(CASE.build(), **option)


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_kept_output_that_is_changed_through_a_view_is_refused_unless_it_is_asked_for(is_allowed):
    product = nn.Linear(4, 4, bias=False)
    model = nn.ModuleList([Runs(lambda inner, x: inner[0](x).mul_(2).tanh(), product)])
    apply_sac(model, ["aten.mm"], blocks="0", allow_cache_entry_mutation=is_allowed)
    refused = pytest.raises(RuntimeError, match="has been mutated")
    with nullcontext() if is_allowed else refused:
        model[0](torch.randn(2, 3, 4)).sum().backward()


class Choosing(nn.Linear):
    def forward(self, rows):
        return rows if rows.sum() > 0 else super().forward(rows)


def test_a_call_that_skips_its_block_by_a_value_is_not_refused():
    model = nn.Sequential(Choosing(8, 8))
    apply_sac(model, "save_matmuls", blocks="0")
    model(torch.ones(2, 8, requires_grad=True)).sum().backward()


def test_an_error_of_the_user_is_not_hidden_by_ours():
    model = CASE.build()
    apply_sac(model, ["aten.linear"])
    model.layers[0].feed_forward.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LOSS(model, CASE.batch())


def test_an_undetected_overwrite_of_a_kept_output_is_refused():
    """Use `nn.GRU` on a CPU, which adds in place to views with their own version counters."""
    model = nn.ModuleList([nn.GRU(4, 4)])
    apply_sac(model, blocks="0")
    with pytest.raises(
        PolicyError,
        match=r"0 runs aten.unsafe_split.Tensor, as nn.GRU does on a CPU, and overwrites the "
        "outputs, which torch does not detect: a saved output would have another value in "
        "backward; use recompute_blocks, or leave the block out$",
    ):
        model[0](torch.randn(3, 2, 4))


# Under torch.compile.


def compiled_step(policy):
    """Run a step, and count the products in the compiled backward."""
    counted = Counter()

    def count(name):
        def compiler(graph, inputs):
            counted[name] += sum(node.target is aten.mm.default for node in graph.graph.nodes)
            return graph

        return compiler

    case = Case(transformer(depth=1), batch_size=4)
    model = case.build()
    if policy:
        apply_sac(model, policy, blocks="layers.*")
    backend = aot_autograd(
        fw_compiler=count("forward"),
        bw_compiler=count("backward"),
        partition_fn=torch._functorch.partitioners.min_cut_rematerialization_partition,
    )
    record = record_step(torch.compile(model, backend=backend), case.batch(), LOSS)
    torch._dynamo.reset()
    return record, counted


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_keep_the_operations_of_the_policy():
    bare, products = compiled_step(None)
    changed, again = compiled_step("every_second_matmul")
    # Three of the seven products of the block run again.
    assert again["backward"] == products["backward"] + 3
    assert compare(bare, changed, tolerance=1e-5).holds


def test_operations_are_found_by_text_and_packet_where_torch_has_them():
    assert sac.find_operations(["torch.ops.aten.mm"]) == sac._find_overloads("aten", "mm", "absent")
    attend = torch.ops.higher_order.flex_attention
    kernels = [
        getattr(aten, f"_scaled_dot_product_{name}_attention")
        for name in ("flash", "efficient", "cudnn")
    ]
    assert {sac.FAMILIES[one] for one in sac.find_operations([attend, *kernels])} == {"attention"}
    assert all(map(sac.is_cheap, (aten._softmax.default, aten.sum.default)))
    assert not sac.is_cheap(attend)


def test_attention_draws_only_with_dropout():
    flash = aten._scaled_dot_product_flash_attention.default
    query = torch.zeros(1)
    given = (query, query, query)
    assert not sac.draws(flash, given, {})
    assert not sac.draws(flash, (*given, 0.0, True), {})
    assert sac.draws(flash, (*given, 0.1), {})
    assert sac.draws(flash, given, {"dropout_p": 0.1})
    assert sac.draws(aten.bernoulli_.float, (query,), {})
    assert not sac.draws(aten.mm.default, (query, query), {})


WIDTH = 256
BATCH = torch.ones(64, WIDTH)
# By a part of the operation's name.
COUNTED = {
    "aten.mm.": "product",
    "scaled_dot_product": "attention",
    "aten.sin.": "sine",
    "aten.tanh.": "tanh",
    "aten.rand_like.": "noise",
    "aten.add_.": "sum",
    "aten.native_layer_norm.": "norm",
}


def operations_of(model, batch):
    """Count the operations of a step without early stop."""
    model.zero_grad()
    with set_checkpoint_early_stop(False), Called() as called:
        model(batch).sum().backward()
    names = map(str, called.operations)
    return Counter(kind for name in names for text, kind in COUNTED.items() if text in name)


# Policies.


class Products(nn.Module):
    """Three products, and around them a sine, a tanh, noise, a sum in place and attention."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(3))

    def forward(self, x):
        first, second, third = self.weights
        drawn = torch.tanh(x.sin() @ first) * torch.rand_like(x)
        drawn.add_(1.0)
        heads = (drawn @ second).view(1, 2, 4, 8)
        return F.scaled_dot_product_attention(heads, heads, heads).view(8, 8) @ third


def starts_with(names, context, operation, *args, **kwargs):
    assert args
    assert kwargs or "rand_like" not in str(operation)
    return not context.is_recompute and str(operation).startswith(names)


def keep(*names):
    return functools.partial(starts_with, tuple(f"aten.{name}." for name in names))


def calls(*chosen):
    return Policy("by place", calls=frozenset(chosen))


# What is cheap runs again once, unless a policy keeps it. Noise is drawn again, and a sum in place
# is made again with what it is added to, whatever the policy.
CHEAP = {"sine": 1, "tanh": 1, "noise": 1, "sum": 1}


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ("save_expensive", {}),
        ("save_matmuls", {"attention": 1}),
        ("save_attention", {"product": 3}),
        ("save_matmuls_and_attention", {}),
        ("every_second_matmul", {"product": 1}),
        (["aten.mm.default", aten.tanh], {"attention": 1, "tanh": 0}),
        (keep("tanh", "mm", "rand_like"), {"attention": 1, "tanh": 0}),
        # A third of what is cheap may be kept without a product, and more with one.
        (keep("tanh"), {"product": 3, "attention": 1, "tanh": 0}),
        (calls(("attention", 0)), {"product": 3}),
        # One call of three is enough.
        (calls(("matmul", 0)), {"product": 2, "attention": 1}),
    ],
)
def test_exactly_what_a_policy_leaves_out_runs_again_in_copies_too(policy, again):
    x = torch.ones(8, 8)
    model = seeded_stack(Products)
    plain = operations_of(model, x)
    assert apply_sac(model, policy, blocks="[12]") == ["1", "2"]
    expected = Counter({kind: 2 * number for kind, number in (CHEAP | again).items()})
    for changed in copies_of(model):
        assert operations_of(changed, x) - plain == +expected


# Regions.


def chain(length):
    """Return a product, whose output is multiplied by some weights in a row."""
    weights = nn.ParameterList(torch.ones(WIDTH) for _ in range(length))
    product = nn.Linear(WIDTH, WIDTH)
    return Runs(
        lambda inner, x: functools.reduce(torch.mul, inner[1], inner[0](x)), product, weights
    )


def total(model, batch):
    return model(batch).float().sum()


# Three blocks keep so many float32 tensors of the batch's size. A chain keeps its product and
# every fifth factor, and a block the input that the one before it computed. Under autocast the
# first block keeps its cast batch too, which nothing can compute again.
@pytest.mark.parametrize(
    ("length", "loss", "num_tensors"),
    [
        (5, in_bfloat16(total), 1.5 + 1 + 0.5),
        (6, total, 3 + 3),
    ],
)
def test_regions_hold_what_a_count_by_hand_gives(length, loss, num_tensors):
    model = seeded_stack(lambda: chain(length))
    apply_regions(model)
    assert round(measure_memory(model, BATCH, loss).held_bytes / BATCH.nbytes, 1) == num_tensors


def between(output):
    """Return two products and a module between them that returns its values in another form."""

    def act(_, x, factor, shift=None):
        assert (factor, shift) == (2.0, 3)
        return output(x)

    def run(inner, x):
        x = inner[0](x)
        found = inner[1](x, 2.0, shift=3)
        return x + inner[2](found[0] if isinstance(found, tuple) else found)

    first, last = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
    return Runs(run, first, Runs(act), last)


OUTPUTS = {
    "its input": lambda x: x,
    "a view": lambda x: torch.sigmoid(x).view(-1, 2, WIDTH // 2).flatten(1),
    "a pair": lambda x: (torch.sigmoid(x), None),
    "no gradient": lambda x: torch.sigmoid(x.detach()),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_named_module_may_take_and_return_values_in_any_form(output):
    plain, changed = (seeded_stack(lambda: between(OUTPUTS[output])) for _ in range(2))
    apply_regions(changed, also=["*.inner.1"])
    require_same_step(plain, changed, BATCH, total)
