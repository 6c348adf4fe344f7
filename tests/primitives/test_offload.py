"""Offload trains the same model, moves each storage once and returns every buffer.

python -m pytest tests/primitives/test_offload.py
"""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from curry_train.core.measure import LiveStorages, measure_memory
from curry_train.primitives import offload, offload_blocks, offload_report, recompute_blocks
from curry_train.primitives.offload import OffloadReport

from ..plan_models import Runs
from ..toy_steps import (
    activated,
    copies_of,
    drawn,
    in_bfloat16,
    require_same_step,
    seeded_stack,
    square_sum,
)


def block():
    return activated(32, nn.Sigmoid)


BATCH = drawn(64, 32)


def twins(block, depth=3, **options):
    plain, model = (seeded_stack(block, depth) for _ in range(2))
    offload_blocks(model, **{"keep_last": 0} | options)
    return plain, model


# Tensors that move, and tensors that stay.


def views(rows):
    return rows[:, 32:64], rows.t(), rows[3:9, ::2], rows.view(torch.int32)


class Views(torch.autograd.Function):
    """Save views of one storage, the last unknown to autograd, and record what comes back."""

    @staticmethod
    def forward(ctx, x, seen):
        rows = torch.randn(64, 96)
        seen["rows"] = rows.clone()
        ctx.save_for_backward(*views(rows))
        ctx.seen = seen
        return x + rows[:, :32]

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen["back"] = ctx.saved_tensors
        return gradient, None


def test_views_share_one_copy_and_come_back_with_shape_stride_and_offset():
    seen = {}
    linear = nn.Linear(32, 32)
    model = nn.Sequential(Runs(lambda inner, x: Views.apply(inner[0](x), seen), linear))
    offload_blocks(model, blocks="0", keep_last=0)
    model(BATCH).sum().backward()
    for saved, back in zip(views(seen["rows"]), seen["back"], strict=True):
        assert torch.equal(saved, back)
        assert back.stride() == saved.stride()
        assert back.storage_offset() == saved.storage_offset()
    assert len({back.untyped_storage().data_ptr() for back in seen["back"][:3]}) == 1
    report = offload_report(model)
    assert (
        report.moved_bytes == report.brought_back_bytes == 64 * (32 + 96) * 4
    )  # the batch and the rows
    assert report.skipped["alias of what moved"] == (1, 64 * 96 * 4)


def transposed(inner, x, table):
    """Read a weight as a transposed view, and a table that the model owns."""
    return (x @ inner[0].weight.t()) * table


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Runs(transposed, nn.Linear(64, 64, bias=False)) for _ in "123")
        self.register_buffer("table", torch.rand(64, 64))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, self.table[: len(x)])
        return x


def test_no_parameter_and_no_buffer_moves_though_another_module_owns_it():
    changed = WithTable()
    offload_blocks(changed, keep_last=0)
    for model in copies_of(changed):
        square_sum(model, torch.randn(64, 64)).backward()
        report = offload_report(model)
        assert report.skipped == {
            "parameter or buffer": (5, 5 * 64 * 64 * 4)
        }  # the batch needs no gradient: 2 weights
        # The batch, and the inputs of the second and third; a product with a table that needs no
        # gradient saves that table.
        assert report.moved_bytes == 3 * 64 * 64 * 4


def test_small_sliced_and_sparse_tensors_stay():
    def run(inner, x):
        weight, small, complex_weight = inner[0]
        sparse = torch.eye(64).to_sparse()
        negative = (complex_weight * 2).conj().imag.sin()
        product = torch.sparse.mm(sparse, x * weight + negative)
        return product.sum() + torch.exp(small * 2).sum()

    weights = torch.ones(64, 32), torch.ones(8), torch.ones(64, 32, dtype=torch.complex64)
    model = nn.Sequential(Runs(run, nn.ParameterList(weights)))
    offload_blocks(model, blocks="0", keep_last=0)
    model(torch.randn(1024, 32)[64:128]).backward()
    assert set(offload_report(model).skipped) == {
        "slice of data",
        "too small",
        "no plain tensor of the device",
    }
    assert offload_report(model).num_moved == 0


def test_the_table_has_what_moved_and_what_stayed():
    report = OffloadReport(3 * 2**19, 2**30, 1234)
    report.skip(torch.ones(64, 2**10), "too small")
    for _ in range(2):
        report.skip(torch.ones(3 * 2**17), "slice of data")
    report.skip(torch.eye(3).to_sparse(), "no plain tensor of the device")
    assert report.table().splitlines() == [
        "      1.50 MiB  moved to the host, 1,234 storages",
        "  1,024.00 MiB  brought back",
        "      0.25 MiB  not moved, 1 tensors: too small",
        "      3.00 MiB  not moved, 2 tensors: slice of data",
        "      0.00 MiB  not moved, 1 tensors: no plain tensor of the device",
    ]


# The same training, in every kind of step.


def cell():
    return Runs(lambda inner, x: inner[0](x)[0], nn.LSTMCell(32, 32))


def attention():
    return Runs(lambda inner, x: inner[0](x, x, x)[0], nn.MultiheadAttention(32, 4))


@pytest.mark.parametrize("block", [block, cell, attention])
def test_autocast_has_the_same_gradients_and_moves_no_cast_of_a_weight(block):
    loss = in_bfloat16(lambda model, batch: square_sum(model, batch).float())
    plain, model = twins(block, min_bytes=256)
    require_same_step(plain, model, BATCH, loss)
    assert offload_report(model).skipped["cast of a parameter"][0] > 0
    loss(model, BATCH).backward(create_graph=False)


def test_offload_works_with_recompute_of_inner_blocks():
    plain = seeded_stack(lambda: nn.Sequential(block(), block()))
    model = copy.deepcopy(plain)
    offload_blocks(model, blocks="[01]", keep_last=0)
    recompute_blocks(model, blocks=["0.*", "1.*"], preserve_rng_state=False)
    require_same_step(plain, model, BATCH)
    assert offload_report(model).num_moved == 4  # the inputs of the recomputed blocks


# Every buffer is freed.


class Fails(nn.Module):
    def forward(self, x):
        raise ArithmeticError("planted")


def fail_in_backward(module, args, output):
    output.register_hook(Fails().forward)


def steps_that_leave_nothing(model, batch):
    square_sum(model, batch).backward()
    yield
    square_sum(model, batch)
    yield
    value = square_sum(model, batch)
    value.backward(retain_graph=True)
    report = offload_report(model)
    square_sum(model, batch)
    # A forward while the graph of the last step is kept is another step.
    assert offload_report(model) is not report
    value.backward()
    # What the first backward brought back did not wait on the device for the second.
    assert report.brought_back_bytes > report.moved_bytes
    yield
    torch.autograd.grad(square_sum(model, batch), next(model.parameters()))
    yield
    for layers in (model, model[1]):  # between blocks and inside of one
        last, layers[-1] = layers[-1], Fails()
        with contextlib.suppress(ArithmeticError):
            model(batch)
        layers[-1] = last
        yield
    for index in (0, 2):  # in the middle of backward, with copies in progress, and at its start
        handle = model[index].register_forward_hook(fail_in_backward)
        with contextlib.suppress(ArithmeticError):
            model(batch).sum().backward()
        handle.remove()
        yield


def alive(buffers):
    return [buffer for buffer in buffers if buffer() is not None]


def test_nothing_leaks_over_steps_with_and_without_backward_and_with_errors(monkeypatch):
    plain = offload.host_buffer
    buffers = []

    def allocate(nbytes, *, pinned):
        buffer = plain(nbytes, pinned=pinned)
        buffers.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(offload, "host_buffer", allocate)
    _, model = twins(block, keep_last=1)
    gc.collect()
    gc.disable()  # a reference cycle would keep buffers alive
    try:
        for _ in range(2):
            for _ in steps_that_leave_nothing(model, BATCH):
                assert buffers
                assert alive(buffers) == []
    finally:
        gc.enable()
    assert model[0]._technique.step() is None


def test_backward_brings_back_two_storages_at_most_ahead_of_the_one_in_use(monkeypatch):
    back = offload.HostCopies.back
    found, counts = [], []

    def count(*arguments):
        flat, done = back(*arguments)
        found.append(weakref.ref(flat))
        counts.append(len(alive(found)))
        return flat, done

    monkeypatch.setattr(offload.HostCopies, "back", count)
    _, model = twins(block, depth=9)
    square_sum(model, BATCH).backward()
    assert max(counts) == 3


def test_no_cast_of_a_weight_stays_alive_until_backward():
    _, model = twins(block, min_bytes=256)
    with LiveStorages() as storages, torch.autocast("cpu", torch.bfloat16):
        loss = square_sum(model, BATCH)
    # Nothing else has the bytes of a weight in half precision.
    casts = [life for life in storages.lives if life.nbytes == 2 * 32 * 32]
    assert len(casts) == 3
    assert all(life.died for life in casts)
    loss.backward()


def test_the_compiler_of_a_function_in_a_block_leaves_the_hooks_alone():
    wave = torch.compile(lambda x, weight: (x @ weight).sin(), backend="aot_eager")
    model = Runs(lambda inner, x: wave(x, inner[0].weight), nn.Linear(32, 32))
    # After a call under a dispatch mode torch runs the function as it is, and compiles its calls.
    measure_memory(model, BATCH, square_sum)
    offload_blocks(model := nn.Sequential(model), blocks="0", keep_last=0)
    for rows in (32, 48, 40):
        square_sum(model, BATCH[:rows]).backward()


# Slow copies, as on CUDA.


@pytest.mark.cuda
def test_copies_on_cuda_run_beside_the_computation_into_pinned_memory():
    plain, model = (one.cuda() for one in twins(block, 6, keep_last=1))
    batch = BATCH.cuda().repeat(64, 1)
    for _ in range(3):
        require_same_step(plain, model, batch)
    copies = model[0]._technique.copies(batch.device)
    assert copies.stream not in (None, torch.cuda.current_stream())
    before, after = (measure_memory(module, batch, square_sum) for module in (plain, model))
    assert after.held_bytes < 0.5 * before.held_bytes
