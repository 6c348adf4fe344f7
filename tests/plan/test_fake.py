"""Tensors without values hold the bytes that CUDA's kernels keep, also in recomputation.

python -m pytest tests/plan/test_fake.py
"""

import copy
import io
import re

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from curry_train.core.measure import LiveStorages
from curry_train.plan import Sketch
from curry_train.plan.shapes import KERNEL_DEVICES, NEEDS_VALUES_ERRORS, pretended
from curry_train.primitives import Recompute
from curry_train.workloads import WorkloadError
from curry_train.workloads.workload import IndivisibleBatch
from large_models import llama_8b

from ..command_runs import in_python
from ..plan_models import Called, Runs, estimated, squares

# What CUDA's kernels keep.


def test_a_block_of_8b_keeps_the_bytes_computed_by_hand():
    tokens = 4096
    width = 4096
    heads = 32
    kv_heads = 8
    hidden = 14336
    row = 128
    half = 2
    single = 4
    stream = tokens * width * half
    statistic = tokens * single  # of RMS norm, one for each token
    query, key = tokens * heads * row * half, tokens * kv_heads * row * half
    attention = (
        query + 2 * key + query + tokens * heads * single + 3 * 8
    )  # q, k, v, output, log-sum-exp, generator state
    kept = (
        statistic
        + stream  # what wq, wk and wv take
        + attention
        + query  # the output once more, in the order that wo takes
        + stream  # attention's sum with the stream, for the second norm
        + statistic
        + stream  # what gate and up take
        + 4 * tokens * hidden * half  # gate, up, silu of gate, and their product, which down takes
    )
    assert kept // 2**19 == 2 * 656.5
    step = estimated(llama_8b(depth=2), 1, dtype=torch.bfloat16, kernels="cuda")
    # And its input, for the first norm.
    assert [block.held for block in step.blocks.values()] == [kept + stream] * 2
    norms, matrices = 2 * width, 2 * width * width + 2 * width * kv_heads * row + 3 * width * hidden
    around = 2 * 128256 * width + width
    assert step.gradients == half * (2 * (norms + matrices) + around)


def attend(dtype, *, mask=None, kernels="cuda", kv_heads=4, width=64):
    """Return bytes kept besides query, key and value, and the kernels of forward and backward."""
    with pretended(kernels=kernels), LiveStorages() as storages, Called() as called:
        query = torch.randn(2, 4, 96, 64, dtype=dtype, requires_grad=True)
        key, value = (
            torch.randn(2, kv_heads, 96, size, dtype=dtype, requires_grad=True)
            for size in (64, width)
        )
        there = storages.bytes_alive
        if mask is not None:
            mask = torch.ones(96, 96, dtype=mask)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=kv_heads < 4
        )
        kept = storages.bytes_alive - there
        output.sum().backward()
        assert key.grad.shape == key.shape
    names = " ".join(map(str, called.operations))
    return kept, re.findall(r"_scaled_dot_product_(\w+)\.default", names)


def test_attention_uses_the_kernel_that_cuda_would():
    output, rows = 2 * 4 * 96 * 64, 2 * 4 * 96 * 4
    flash = ["flash_attention", "flash_attention_backward"]
    efficient = ["efficient_attention", "efficient_attention_backward"]
    assert attend(torch.bfloat16) == (2 * output + rows + 24, flash)
    assert attend(torch.float16, kv_heads=2) == (2 * output + rows + 24, flash)
    assert attend(torch.float32) == (4 * output + rows + 16, efficient)
    # Values narrower than keys, as in DeepSeek's attention.
    assert attend(torch.bfloat16, width=32) == (output + rows + 16, efficient)
    kept, names = attend(torch.bfloat16, mask=torch.bool)
    assert names == efficient
    assert kept - 96 * 96 * (1 + 2) == 2 * output + rows + 16  # the mask, and the mask as numbers
    kept, names = attend(torch.bfloat16, mask=torch.bfloat16, kv_heads=2)
    assert names == efficient
    assert (
        kept - 96 * 96 * 2 == 2 * output + rows + 16 + 2 * 2 * output
    )  # keys and values for each head
    assert attend(torch.bfloat16, kernels="cpu")[1][0] == "flash_attention_for_cpu"


def test_softmax_multiplies_into_a_tensor_of_its_own_in_backward():
    def build():
        return Runs(lambda layers, x: layers[0](x).softmax(-1), nn.LayerNorm(64))

    workload = squares(build, 64, loss=lambda module, x: module(x).sum())
    on_cpu, on_cuda = (estimated(workload, 64, kernels=one) for one in KERNEL_DEVICES)
    assert on_cuda.peak_bytes - on_cpu.peak_bytes == 4 * 64 * 64


@pytest.mark.parametrize("entry", [F.rms_norm, torch.rms_norm])
def test_rms_norm_keeps_its_input_and_a_number_for_each_row(entry):
    with pretended(kernels="cuda"), LiveStorages() as storages:
        x = torch.randn(96, 64, dtype=torch.bfloat16)
        weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        there = storages.bytes_alive
        output = entry(x, (64,), weight)
        assert storages.bytes_alive - there == 2 * 96 * 64 + 4 * 96
        output.sum().backward()
        assert weight.grad.shape == (64,)


def by_module(x, p, train):
    return nn.Dropout(p).train(train)(x)


@pytest.mark.parametrize("entry", [torch.dropout, by_module])
def test_dropout_keeps_a_byte_for_each_number(entry):
    with pretended(kernels="cuda"), LiveStorages() as storages:
        x = torch.empty(4, 64, dtype=torch.bfloat16, requires_grad=True)
        before = storages.bytes_alive
        y = entry(x, 0.1, True)
        held = storages.bytes_alive - before
        y.sum().backward()
        assert x.grad.dtype is torch.bfloat16
        assert entry(x, 0.1, False) is x
        nothing = entry(x, 1.0, True)
    assert held == 4 * 64 * (2 + 1)
    assert nothing.shape == (4, 64)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torchs_checkpoint_recomputes_under_the_autocast_of_cuda(use_reentrant):
    """Autocast of the CPU runs the norm in bfloat16."""
    dtypes = []

    def normed(x):
        dtypes.append(F.layer_norm(x @ x, (64,)).dtype)
        return x @ x

    with pretended(kernels="cuda"), torch.autocast("cuda", dtype=torch.bfloat16):
        x = torch.randn(64, 64, requires_grad=True)
        checkpoint(normed, x, use_reentrant=use_reentrant).sum().backward()
    assert dtypes == [torch.float32, torch.float32]


def test_autocast_for_cuda_is_on_where_cuda_is_meant():
    with pretended(kernels="cuda"):
        norm = nn.LayerNorm(64)
        linear = nn.Linear(64, 64)
        x = torch.randn(4, 64)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            hidden = linear(x)
            assert hidden.dtype == torch.bfloat16
            assert {
                norm(hidden).dtype,
                hidden.softmax(-1).dtype,
                hidden.sum().dtype,
                hidden.exp().dtype,
            } == {torch.float32}
            assert F.gelu(hidden).dtype == torch.bfloat16
        with torch.autocast("cuda", dtype=torch.float16):
            assert linear(x).dtype == torch.float16
        assert linear(x).dtype == torch.float32
    with (
        pretended(kernels="cpu"),
        pytest.warns(UserWarning, match="CUDA|cuda"),
        torch.autocast("cuda"),
    ):
        assert linear(x).dtype == torch.float32


# Recomputation sees the same modes.


def test_recomputation_runs_under_the_modes_of_forward():
    found = []

    class Notes(TorchFunctionMode):
        """A function mode of the user."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            found.append(func)
            return func(*args, **(kwargs or {}))

    with Notes():
        block = Recompute(lambda x: torch.sigmoid(x * 2))
        block(torch.ones(3, requires_grad=True)).sum().backward()
    assert found.count(torch.sigmoid) == 2


# State that is restored, and limits of torch.


def test_everything_is_restored_after_an_error():
    before = nn.Module._apply, F.scaled_dot_product_attention, torch.autocast.__init__
    for kernels in KERNEL_DEVICES:
        with (
            pytest.raises(RuntimeError, match="must have same reduction dim"),
            pretended(kernels=kernels),
        ):
            torch.ones(2, 3) @ torch.ones(2, 3)
        assert before == (nn.Module._apply, F.scaled_dot_product_attention, torch.autocast.__init__)
    assert not isinstance(torch.zeros(2), FakeTensor)
    with pytest.raises(ValueError, match="kernels must be one of"), pretended(kernels="metal"):
        pass


def test_conversion_keeps_parameters_and_what_is_tied():
    with pretended() as mode:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[1].weight = module[0].weight
        module[0].weight.kind = "tied"
        weight = module[0].weight
        assert module.to("cuda", torch.bfloat16)[0].weight is weight is module[1].weight
        assert (weight.dtype, weight.untyped_storage().nbytes(), weight.requires_grad) == (
            torch.bfloat16,
            32,
            True,
        )
        copied = copy.deepcopy(module)
        assert copied[0].weight is copied[1].weight is not weight
        assert (copied[0].weight.kind, copied[0].weight.fake_mode) == ("tied", mode)
        assert weight.data_ptr() != copied[0].weight.data_ptr() == copied[1].weight.data_ptr()


# Factories of any kind.

SHARED = torch.ones(16)
WEIGHTS = io.BytesIO()
torch.save(nn.Linear(16, 16).state_dict(), WEIGHTS)
WHOLE = nn.Linear(16, 16)


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 16), nn.Parameter(SHARED)
        self.register_buffer("table", torch.from_numpy(numpy.arange(16, dtype=numpy.float32)))

    def forward(self, x):
        return self.linear(x) * self.scale + self.table


class Moves(nn.Linear):
    def forward(self, x):
        return super().forward(x.to("cuda:0")) + torch.zeros(16, device="cuda", dtype=x.dtype)


def loaded():
    WEIGHTS.seek(0)
    module = nn.Linear(16, 16)
    module.load_state_dict(torch.load(WEIGHTS, weights_only=True))
    return module


def on_device():
    with torch.device("cuda"):
        return nn.Linear(16, 16)


FACTORIES = {
    "cuda()": lambda: nn.Linear(16, 16).cuda(),
    "device": lambda: nn.Linear(16, 16, device="cuda"),
    "with device": on_device,
    "to": lambda: nn.Linear(16, 16).to("cuda").to(torch.bfloat16),
    "forward": lambda: Moves(16, 16),
    "shared": Shares,
    "loaded": loaded,
    "whole": lambda: WHOLE,
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_of_any_kind(name):
    build, before = FACTORIES[name], [tensor.clone() for tensor in (SHARED, WHOLE.weight)]
    with Sketch(squares(build, 16), dtype=torch.bfloat16, kernels="cuda") as sketch:
        step = sketch.step(4)
        module = sketch.build()
        assert all(
            isinstance(tensor, FakeTensor) for tensor in (*module.parameters(), *module.buffers())
        )
    assert sketch.why_real is None
    numbers = 16 * 16 + 16 + (16 if name == "shared" else 0)
    assert step.timeline.owners["parameters"][0] == step.gradients == 2 * numbers
    for tensor, value in zip((SHARED, WHOLE.weight), before, strict=True):
        assert torch.equal(tensor, value)
        assert not isinstance(tensor, FakeTensor)


def misfit():
    return nn.Linear(16, 16), torch.randn(8, 4)


def test_the_error_of_a_factory_is_one_message(caplog):
    raised = pytest.raises(WorkloadError, match="a forward on the batch raised RuntimeError")
    with raised, Sketch(f"{__file__}:misfit", kernels="cuda"):
        pass
    assert not caplog.records  # torch would log the same error again, with its traceback
    assert not isinstance(torch.zeros(2), FakeTensor)


GRAPHS = """
import torch
from torch import nn
class Graph(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.read = read
    def forward(self, nodes, edges):
        return self.linear(self.read(nodes, edges))
def graph(read):
    edges = torch.tensor([[0, 1, 2], [5, 4, 3]])
    return lambda: (Graph(read), {"nodes": torch.randn(6, 4), "edges": edges})
indexed = graph(lambda nodes, edges: nodes[edges[1]])
selected = graph(lambda nodes, edges: nodes.index_select(0, edges[1]))
"""


def test_nodes_of_a_graph_are_not_divided(tmp_path, monkeypatch):
    (tmp_path / "graphs.py").write_text(GRAPHS)
    monkeypatch.syspath_prepend(tmp_path)
    for factory in ("indexed", "selected"):
        with Sketch(f"graphs:{factory}") as sketch:
            assert sketch.step(6).peak_bytes > 0
            with pytest.raises(IndivisibleBatch, match="its own batch of 6 alone, and 2 samples"):
                sketch.step(2)


def test_indices_behind_a_mask_need_values_and_are_not_out_of_range():
    mask = torch.ones(2, 4, dtype=torch.bool)
    with pretended(), pytest.raises(NEEDS_VALUES_ERRORS):
        torch.empty(2, 4, 10)[mask, torch.full((8,), 9)]


# Speed and memory.

MEASURES = """
import resource, sys, time
import torch
from curry_train.plan.estimate import Sketch
start = time.process_time()
sum(number * number for number in range(5_000_000))
unit = time.process_time() - start
start = time.process_time()
from large_models import llama_8b
with Sketch(llama_8b(depth=8), dtype=torch.bfloat16, kernels="cuda") as sketch:
    sketch.step(1)
scale = 1 if sys.platform == "darwin" else 1024
loops = (time.process_time() - start) / unit
print(loops, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale)
"""


def test_a_quarter_of_8b_is_estimated_in_little_time_and_memory():
    loops, memory = map(float, in_python("-c", MEASURES).stdout.split())
    # Of CPU, in the time of a loop of Python on the same machine: 11 to 20.
    assert loops < 40
    assert memory < 1.5 * 2**30
