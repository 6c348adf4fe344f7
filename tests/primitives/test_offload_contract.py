"""Offload refuses what it can't do, returns host memory, and waits for its copies.

python -m pytest tests/primitives/test_offload_contract.py
"""

import collections
import contextlib
import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trained_on_ranks import compare_on_ranks

from curry_train.core.measure import measure_memory
from curry_train.core.parity import compare, record_step
from curry_train.gates.two_ranks import run_on_ranks
from curry_train.primitives import offload
from curry_train.primitives.offload import (
    HostCopies,
    HostMemoryShort,
    offload_blocks,
    offload_report,
)


def block(width=32):
    return nn.Sequential(nn.Linear(width, width), nn.Sigmoid())


def chain(depth=3):
    torch.manual_seed(0)
    return nn.Sequential(*[block() for _ in range(depth)])


def square_sum(module, batch):
    return module(batch).square().sum()


@pytest.fixture
def batch():
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


# Refusals and their messages.


def test_a_model_is_offloaded_once_and_before_the_report():
    model = chain()
    with pytest.raises(ValueError, match="call offload_blocks"):
        offload_report(model)
    assert offload_blocks(model) == ["0", "1"]
    with pytest.raises(ValueError, match="remove_offload"):
        offload_blocks(model, blocks="2", keep_last=0)


# Host memory.


def test_too_little_host_memory_is_an_error_where_a_step_moves_more_than_any_before(
    batch, monkeypatch
):
    model = chain()
    offload_blocks(model)
    square_sum(model, batch).backward()
    monkeypatch.setattr(offload, "available_host_bytes", lambda: 20 * 1024)
    square_sum(model, batch).backward()  # no more bytes are needed
    with pytest.raises(
        HostMemoryShort, match=r"needs 0.04 MiB more.*0.02 MiB is available: offload fewer blocks"
    ):
        square_sum(model, batch.repeat(5, 1))


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
    value.backward()
    yield
    first = next(model.parameters())
    torch.autograd.grad(square_sum(model, batch), first)
    yield
    last = model[2]
    model[2] = Fails()
    with contextlib.suppress(ArithmeticError):
        model(batch)
    model[2] = last
    yield
    model[1][1] = Fails()
    with contextlib.suppress(ArithmeticError):
        model(batch)
    model[1][1] = nn.Sigmoid()
    yield
    for index in (0, 2):  # in the middle of backward, with copies in progress, and at its start
        handle = model[index].register_forward_hook(fail_in_backward)
        with contextlib.suppress(ArithmeticError):
            model(batch).sum().backward()
        handle.remove()
        yield


@pytest.fixture
def buffers(monkeypatch):
    """Weak references to the host buffers that were allocated."""
    found = []
    plain = offload.host_buffer

    def allocate(nbytes, *, pinned):
        buffer = plain(nbytes, pinned=pinned)
        found.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(offload, "host_buffer", allocate)
    return found


def alive(buffers):
    return [buffer for buffer in buffers if buffer() is not None]


def test_nothing_leaks_over_steps_with_and_without_backward_and_with_errors(batch, buffers):
    model = chain()
    offload_blocks(model)
    gc.collect()
    gc.disable()  # a reference cycle would keep buffers alive
    try:
        for _ in range(2):
            for _ in steps_that_leave_nothing(model, batch):
                assert buffers
                assert alive(buffers) == []
    finally:
        gc.enable()
    assert model[0]._offloader.step() is None


class CastsOfWeights(TorchDispatchMode):
    """Weak references to the storages of all casts of a parameter."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket is torch.ops.aten._to_copy and isinstance(args[0], nn.Parameter):
            self.storages.append(weakref.ref(result.untyped_storage()))
        return result


def test_no_cast_of_a_weight_stays_alive_until_backward(batch):
    model = chain()
    offload_blocks(model, keep_last=0, min_bytes=256)
    with CastsOfWeights() as casts, torch.autocast("cpu", torch.bfloat16):
        loss = square_sum(model, batch)
    assert len(casts.storages) >= 3
    assert [cast() for cast in casts.storages if cast() is not None] == []
    loss.backward()


# Slow copies, as on CUDA.


class Event:
    def __init__(self, copies, copy):
        self.copies, self.copy = copies, copy

    def query(self):
        if (
            self.copies.queue and self.copies.chance.random() < 0.3
        ):  # one more copy was done meanwhile
            self.copies.queue[0].synchronize()
        return self.copy is None

    def synchronize(self):
        while self.copy is not None:
            event = self.copies.queue.popleft()
            event.copy()
            event.copy = None


class Late(HostCopies):
    """Copy in the order of calls, each when its result is awaited, and check both memories."""

    def __init__(self, device):
        super().__init__(device)
        self.queue, self.chance = collections.deque(), random.Random(0)

    def _copy(self, target, source):
        nbytes, offset = source.nbytes, target.storage_offset()
        here, there = (weakref.ref(each.untyped_storage()) for each in (source, target))
        if (
            target.data_ptr() == target.untyped_storage().data_ptr()
            and target.untyped_storage().nbytes() == nbytes
        ):
            target.fill_(255)  # reading it before the copy gives wrong numbers

        def copy():
            assert here() is not None, "the source of a copy was freed before it"
            assert there() is not None, "a copy writes to freed memory"
            whole = torch.empty(0, dtype=torch.uint8)
            whole.set_(there(), offset, (nbytes,)).copy_(
                torch.empty(0, dtype=torch.uint8).set_(here(), 0, (nbytes,))
            )

        self.queue.append(Event(self, copy))
        return self.queue[-1]

    def wait(self, done):
        done.synchronize()


class WithoutWaiting(Late):
    def wait(self, done):
        pass


class WithoutSources(Late):
    def out(self, source, host, *, most_bytes):
        super().out(source, host, most_bytes=most_bytes)
        self._leaving.clear()
        self._leaving_bytes = 0


def late_steps(batch, monkeypatch, copies):
    monkeypatch.setattr(offload, "HostCopies", copies)
    plain, model = chain(6), chain(6)
    offload_blocks(model)
    for size in (64, 48, 64):
        steps = [record_step(module, batch[:size], square_sum) for module in (plain, model)]
        assert compare(*steps).bit_equal
    return model


def test_the_computation_waits_for_copies_and_both_memories_stay_until_they_are_done(
    batch, monkeypatch
):
    model = late_steps(batch, monkeypatch, Late)
    for _ in steps_that_leave_nothing(model, batch):
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # freeing raises too
@pytest.mark.parametrize("copies", [WithoutWaiting, WithoutSources])
def test_a_missing_wait_for_copies_is_caught(batch, monkeypatch, copies):
    with pytest.raises(AssertionError):
        late_steps(batch, monkeypatch, copies)


@pytest.mark.cuda
def test_copies_on_cuda_run_beside_the_computation_into_pinned_memory(batch):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    plain = chain(6).cuda()
    model = chain(6).cuda()
    batch = batch.cuda().repeat(64, 1)
    offload_blocks(model)
    for _ in range(3):
        assert compare(
            record_step(plain, batch, square_sum), record_step(model, batch, square_sum)
        ).bit_equal
    (copies,) = model[0]._offloader.copies.values()
    assert copies.stream not in (None, torch.cuda.current_stream())
    before, after = (measure_memory(module, batch, square_sum) for module in (plain, model))
    assert after.held_bytes < 0.5 * before.held_bytes


# Offload is applied before DDP and FSDP2, and changes nothing else.


def gradients_on_ranks():
    return compare_on_ranks("transformer", offload_blocks, report=moved_bytes)


def moved_bytes(model):
    report = offload_report(model)
    in_parameters, _ = report.skipped["parameter or buffer"]
    return [report.moved_bytes, report.brought_back_bytes, in_parameters]


def test_two_ranks_have_the_same_gradients_and_move_the_same_bytes():
    for found in run_on_ranks(f"{__file__}:gradients_on_ranks"):
        for figures in found.values():
            assert figures["syncs"][0] == figures["syncs"][1] > 0
            assert figures["differences"] == [0.0]
            ((moved, brought_back, _),) = figures["reports"]
            assert moved == brought_back > 0
        assert found["ddp"]["reports"] == found["fsdp2"]["reports"]
