"""Tensors without values hold the bytes that CUDA's kernels keep, also in recomputation.

python -m pytest tests/plan/test_fake.py
"""

import copy
import io
import itertools
import re

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from curry_train.core.measure import LiveStorages, OperationMode, operation_flops
from curry_train.plan import Sketch
from curry_train.plan.shapes import (
    GROUPED_MM_OPERATION,
    KERNEL_DEVICES,
    NEEDS_VALUES_ERRORS,
    KernelsAsTheyRun,
    pretended,
)
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
    narrow = torch.bfloat16
    flash = ["flash_attention", "flash_attention_backward"]
    efficient = ["efficient_attention", "efficient_attention_backward"]
    assert attend(narrow) == (2 * output + rows + 24, flash)
    assert attend(torch.float16, kv_heads=2) == (2 * output + rows + 24, flash)
    assert attend(torch.float32) == (4 * output + rows + 16, efficient)
    # Values narrower than keys, as in DeepSeek's attention.
    assert attend(narrow, width=32) == (output + rows + 16, efficient)
    kept, names = attend(narrow, mask=torch.bool)
    assert names == efficient
    assert kept - 96 * 96 * (1 + 2) == 2 * output + rows + 16  # the mask, and the mask as numbers
    kept, names = attend(narrow, mask=narrow, kv_heads=2)
    assert names == efficient
    assert (
        kept - 96 * 96 * 2 == 2 * output + rows + 16 + 2 * 2 * output
    )  # keys and values for each head
    assert attend(narrow, kernels="cpu")[1][0] == "flash_attention_for_cpu"


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


@pytest.mark.parametrize(
    "entry", [torch.dropout, lambda x, p, train: nn.Dropout(p).train(train)(x)]
)
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
        weight = module[1].weight = module[0].weight
        weight.kind = "tied"
        assert module.to("cuda", torch.bfloat16)[0].weight is weight is module[1].weight
        assert (weight.dtype, weight.untyped_storage().nbytes(), weight.requires_grad) == (
            torch.bfloat16,
            32,
            True,
        )
        copied, other = (one.weight for one in copy.deepcopy(module))
        assert copied is other is not weight
        assert (copied.kind, copied.fake_mode) == ("tied", mode)
        assert weight.data_ptr() != copied.data_ptr()


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
class Ragged(torch.nn.Linear):
    def forward(self, input):
        return super().forward(input).to_padded_tensor(0.0)
def ragged():
    rows = [torch.randn(length, 8) for length in (2, 3)]
    return Ragged(8, 8), {"input": torch.nested.nested_tensor(rows, layout=torch.jagged)}
"""


def test_nodes_of_a_graph_are_not_divided(tmp_path, monkeypatch):
    (tmp_path / "graphs.py").write_text(GRAPHS)
    monkeypatch.syspath_prepend(tmp_path)
    for factory in ("indexed", "selected"):
        with Sketch(f"graphs:{factory}") as sketch:
            assert sketch.step(6).peak_bytes > 0
            with pytest.raises(IndivisibleBatch, match="its own batch of 6 alone, and one of 2 is"):
                sketch.step(2)
    with Sketch("graphs:ragged") as sketch:
        assert "a nested tensor" in sketch.why_real


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


# Kernels whose bytes torch misstates are corrected, as long as it does.


class Theirs(KernelsAsTheyRun):
    """Torch's own mode."""

    dispatch = FakeTensorMode.dispatch


def test_a_view_of_a_tensor_with_values_has_them():
    real, kinds = torch.arange(6), []
    for mode in (KernelsAsTheyRun(), Theirs()):
        with mode:
            kinds.append(isinstance(real.view(2, 3), FakeTensor))
    assert kinds == [False, True]


def layer_norm_gradient():
    """Run the backward of a norm before a convolution, which has channels first."""
    x = torch.ones(4, 6, 8)
    weight = torch.ones(8)
    mean = torch.zeros(4, 6, 1)
    call = torch.ops.aten.native_layer_norm_backward.default
    gradient = torch.ones(4, 8, 6).transpose(1, 2)
    return call(gradient, x, [8], mean, mean, weight, weight, [True, True, True])[0].stride()


def test_the_backward_of_layer_norm_is_contiguous():
    strides = [layer_norm_gradient()]
    for make in (KernelsAsTheyRun, Theirs):
        with make():
            strides.append(layer_norm_gradient())
    assert strides[0] == strides[1] != strides[2]


@pytest.mark.parametrize("dims", [(2, 3), (2, 2), (3, 2), (3, 3)])
def test_grouped_products_work_in_float32_as_on_the_cpu(dims):
    ends = torch.tensor([8, 16], dtype=torch.int32)
    a = torch.randn(*([2] if dims[0] == 3 else []), 16, 16)
    b = torch.randn(*([2] if dims[1] == 3 else []), 16, 16)
    given = None if dims == (3, 3) else ends
    real = GROUPED_MM_OPERATION(a, b, given)
    with KernelsAsTheyRun() as mode:
        fake = GROUPED_MM_OPERATION(mode.from_tensor(a), mode.from_tensor(b), given)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    with Theirs() as mode, pytest.raises(RuntimeError):
        GROUPED_MM_OPERATION(mode.from_tensor(a), mode.from_tensor(b), given)
    assert operation_flops(GROUPED_MM_OPERATION, (a, b), {}, real) == 2 * 16**3 * (
        2 if dims == (3, 3) else 1
    )


def test_weights_drawn_by_rejection_need_no_values():
    def build():
        layer = nn.Linear(4, 4)
        nn.init.trunc_normal_(layer.weight)
        return layer

    with pretended():
        assert isinstance(build().weight, nn.Parameter)
    assert build().weight.abs().max() <= 2


@pytest.mark.parametrize("dtype", [bool, int])
def test_dtypes_may_be_written_as_python_has_them(dtype):
    with pretended():
        assert not isinstance(torch.ones(2, dtype=dtype), FakeTensor)


class NormOutputs(OperationMode):
    """Record shape, stride and dtype of what each norm kernel returns."""

    def __init__(self):
        super().__init__()
        self.made = []

    def run(self, func, args, kwargs):
        out = func(*args, **kwargs)
        if "norm" in str(func):
            self.made += [
                None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype)
                for tensor in out
            ]
        return out


def transposed(*shape):
    """Make a tensor whose second and third dimension are swapped in memory."""
    return torch.randn(shape[0], shape[2], shape[1], *shape[3:]).transpose(1, 2)


NORM_INPUTS = {
    "3d transposed": lambda: transposed(4, 6, 5),
    "4d transposed": lambda: transposed(4, 6, 5, 3),
    "4d channels last": lambda: torch.randn(4, 6, 5, 3).to(memory_format=torch.channels_last),
    "5d channels last": lambda: torch.randn(2, 6, 5, 3, 4).to(memory_format=torch.channels_last_3d),
}


def run_norms(make, dtype, *, affine, training):
    """Run each norm forward and backward, with float32 parameters; return the kernels' outputs."""
    with NormOutputs() as outputs:
        for norm in ("batch", "group", "layer"):
            x = make().to(dtype).requires_grad_()
            size = x.shape[-1] if norm == "layer" else 6
            weight = torch.ones(size, requires_grad=True) if affine else None
            bias = torch.zeros(size, requires_grad=True) if affine else None
            if norm == "batch":
                y = F.batch_norm(x, torch.zeros(6), torch.ones(6), weight, bias, training)
            elif norm == "group":
                y = F.group_norm(x, 2, weight, bias)
            else:
                y = F.layer_norm(x, [size], weight, bias)
            y.backward(torch.ones(y.shape, dtype=y.dtype))
    return outputs.made


@pytest.mark.parametrize("make", NORM_INPUTS.values(), ids=NORM_INPUTS)
def test_norms_have_the_layout_and_dtypes_of_the_real_kernels(make):
    """Batch norm of a transposed tensor is contiguous; statistics of half precision are float32."""
    num_wrong = 0
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, is_full in itertools.product(dtypes, (True, False)):
        options = {"affine": is_full, "training": is_full}
        real = run_norms(make, dtype, **options)
        with pretended():
            assert run_norms(make, dtype, **options) == real, (dtype, options)
        with pretended(mode=Theirs()):
            num_wrong += run_norms(make, dtype, **options) != real
    assert num_wrong > 0, "torch states the outputs of norms correctly now: drop the correction"


def vectors(run):
    """Call a function of a weight and a vector."""
    return lambda weight, x: run(weight, x[0])


HALF_ON_CUDA = {
    "einsum": lambda weight, x: torch.einsum("bi,oi->bo", x, weight),
    "mv": vectors(torch.mv),
    "addmv": vectors(lambda weight, x: torch.addmv(x, weight, x)),
    "multi_dot": lambda weight, x: torch.linalg.multi_dot([x, weight, weight]),
    "prelu": lambda weight, x: F.prelu(x, weight[0]),
}


@pytest.mark.parametrize("run", HALF_ON_CUDA.values(), ids=HALF_ON_CUDA)
def test_autocast_of_cuda_runs_products_in_half_precision(run):
    with pretended(kernels="cuda"), torch.autocast("cuda", torch.bfloat16):
        assert run(nn.Parameter(torch.empty(8, 8)), torch.empty(4, 8)).dtype is torch.bfloat16


@pytest.mark.parametrize("cached", [True, False])
def test_autocast_of_cuda_converts_a_weight_once_and_keeps_it_until_it_ends(cached):
    size = 64
    with pretended(kernels="cuda"), torch.no_grad(), LiveStorages() as storages:
        weight = nn.Parameter(torch.empty(size, size))
        x = torch.empty(4, size)
        before = storages.bytes_alive
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=cached):
            for _ in range(3):
                torch.einsum("bi,oi->bo", x, weight)
            with torch.autocast("cuda", enabled=False):
                pass
            kept = storages.bytes_alive - before
        assert storages.bytes_alive == before
    assert kept == (2 * size * size if cached else 0)
