"""The contract of `sac`: policies by name, list and function, eager and compiled.

python -m pytest tests/primitives/test_sac_contract.py
"""

import copy
import functools
import pickle
from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from curry_train.core.measure import count_flops, measure_memory, recompute_flops
from curry_train.core.parity import StepRecord, compare, record_step
from curry_train.gates.sac import torch_sac
from curry_train.primitives import POLICIES
from curry_train.primitives.sac import (
    PolicyError,
    apply_sac,
    make_policy,
)
from curry_train.workloads.models import transformer
from curry_train.workloads.workload import Case

aten = torch.ops.aten
CASE = Case(transformer(depth=2), batch_size=4)
LOSS = CASE.workload.mean_loss


def figures(apply, case=CASE):
    model = case.build()
    batch = case.batch()
    loss = case.workload.mean_loss
    apply(model)
    return (
        record_step(model, batch, loss),
        measure_memory(model, batch, loss),
        count_flops(model, batch, loss),
    )


def nothing(model):
    return []


@functools.cache
def plain():
    return figures(nothing)


# Policies.


@pytest.mark.parametrize("name", POLICIES)
def test_a_named_policy_is_the_same_training(name):
    record, memory, _ = figures(lambda model: apply_sac(model, name))
    assert compare(plain()[0], record).bit_equal
    assert memory.held_bytes < plain()[1].held_bytes


def test_bytes_and_flops_equal_those_of_torchs_own():
    ours, theirs = figures(apply_sac), figures(torch_sac)
    assert ours[1:] == theirs[1:]
    assert compare(theirs[0], ours[0]).bit_equal


class Attending(nn.Module):
    """Attention with dropout, then dropout: on CUDA the kernel draws, on CPU separate calls."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        heads = [part.view(*x.shape[:2], 4, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=0.2, is_causal=True)
        return x + F.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), 0.2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dropout_inside_and_after_attention_is_drawn_the_same(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    dtype = (
        torch.bfloat16 if device == "cuda" else torch.float32
    )  # flash attention takes no float32
    model = nn.Sequential(*[Attending() for _ in range(2)]).to(device, dtype)
    x, records = torch.randn(2, 16, 32, device=device, dtype=dtype), []
    for apply in (nothing, lambda model: apply_sac(model)):
        changed = copy.deepcopy(model)
        apply(changed)
        torch.manual_seed(1)
        records.append(record_step(changed, x, lambda model, x: model(x).square().mean()))
    assert compare(*records).bit_equal


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_each_attention_kernel_of_cuda_is_kept(backend):
    case = Case(transformer(depth=2, dim=256), torch.device("cuda"), torch.bfloat16)
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        model = case.build()
        before = count_flops(model, case.batch(), case.workload.mean_loss)
        apply_sac(model, "save_matmuls_and_attention")
        assert (
            recompute_flops(before, count_flops(model, case.batch(), case.workload.mean_loss)) == 0
        )


# What is refused.


def step(policy):
    model = CASE.build()
    apply_sac(model, policy)
    return LOSS(model, CASE.batch())


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("save_matmul", "did you mean 'save_matmuls'"),
        ("keep", "there are save_expensive, save_matmuls"),
        (["aten.mul_"], r"aten.mul_.\w+ writes in place"),
        (["aten.nm"], "no operation 'aten.nm'"),
        (None, "a policy is a name, a list of operations or a function"),
        (
            ["aten.linear"],
            "saves no output of layers.0.* Its operations are .*aten.mm, .*Composite ones such as",
        ),
        (["aten.silu", "aten.mul"], "wrong way round for layers.0: it saves 14 outputs"),
        (lambda *_, **__: CheckpointPolicy.MUST_CPU_OFFLOAD, "MUST_CPU_OFFLOAD .* offload_blocks"),
        (lambda *_, **__: "save", "must return a CheckpointPolicy or a bool, got 'save'"),
        (lambda *_, **__: True, "saves aten.add_.Scalar, which writes in place"),
    ],
)
def test_a_policy_that_would_not_help_is_an_error(policy, message):
    with pytest.raises(ValueError, match=message):
        step(policy)


def test_an_error_of_the_user_is_not_hidden_by_ours():
    model = CASE.build()
    apply_sac(model, ["aten.linear"])
    model.layers[0].feed_forward.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LOSS(model, CASE.batch())


def test_an_undetected_overwrite_of_a_kept_output_is_refused():
    """Use `nn.GRU` on a CPU, which adds in place to views with their own version counters."""
    x, weights = torch.randn(3, 2, 4), []
    for kept in (False, True):
        torch.manual_seed(0)
        layer = nn.GRU(4, 4)
        contexts = functools.partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
        )
        out, _ = (
            checkpoint(layer, x, use_reentrant=False, context_fn=contexts) if kept else layer(x)
        )
        out.square().sum().backward()
        weights.append(layer.weight_hh_l0.grad)
    assert not torch.equal(*weights)  # when torch detects it, this refusal can go
    model = nn.ModuleList([nn.GRU(4, 4)])
    apply_sac(model, blocks="0")
    with pytest.raises(
        PolicyError,
        match=r"0 runs aten.unsafe_split.Tensor, as nn.GRU does .* use recompute_blocks",
    ):
        model[0](x)


# The module does not change otherwise.


def keep_products(context, operation, *args, **kwargs):
    return operation is aten.mm.default


@pytest.mark.parametrize("policy", [["aten.mm", "aten.addmm"], keep_products])
def test_a_users_own_policy_can_be_pickled(policy):
    assert pickle.loads(pickle.dumps(make_policy(policy))) == make_policy(policy)


# Under torch.compile.


def compiled_step(policy):
    """Run a step, and count the products in the compiled backward."""
    counted = Counter()

    def count(name):
        def compiler(graph, inputs):
            counted[name] += sum(node.target is aten.mm.default for node in graph.graph.nodes)
            return graph

        return compiler

    torch._dynamo.reset()
    model = CASE.build()
    if policy:
        apply_sac(model, policy)
    backend = aot_autograd(
        fw_compiler=count("forward"),
        bw_compiler=count("backward"),
        partition_fn=torch._functorch.partitioners.min_cut_rematerialization_partition,
    )
    record = record_step(torch.compile(model, backend=backend), CASE.batch(), LOSS)
    gradients = {name.removeprefix("_orig_mod."): value for name, value in record.gradients.items()}
    buffers = {name.removeprefix("_orig_mod."): value for name, value in record.buffers.items()}
    torch._dynamo.reset()
    return StepRecord(record.loss, gradients, buffers, record.generators), counted


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_keep_the_operations_of_the_policy():
    bare, products = compiled_step(None)
    kept, none_again = compiled_step("save_expensive")
    every_second, some_again = compiled_step("every_second_matmul")
    assert none_again == products
    assert (
        some_again["backward"] == products["backward"] + 2 * 3
    )  # three of the seven products of each block run again
    for record in (kept, every_second):
        assert compare(bare, record, tolerance=1e-5).holds
