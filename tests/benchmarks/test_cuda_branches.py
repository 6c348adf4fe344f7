"""Streams and figures of CUDA, under a stand-in whose streams run as late as they may.

python -m pytest tests/benchmarks/test_cuda_branches.py
"""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from curry_train.bench import savings
from curry_train.core import measure
from curry_train.core.timing import wait_for
from curry_train.core.wording import provenance
from curry_train.plan import timeline
from curry_train.primitives import compile_budget, offload, offload_blocks, strategies
from curry_train.runs import background, state
from curry_train.runs.random_state import restore_random_state, take_random_state

from ..toy_steps import all_equal, feed_forward, gradients_of, seeded_stack, square_sum

CUDA = torch.device("cuda")


class LateStream:
    """A stream whose copies run when somebody waits for them; the default one runs at once."""

    def __init__(self, device=None):
        self.device = device
        self.queue = []
        self.num_run = 0
        self.log = []

    def wait_stream(self, other):
        self.log.append("waits for computation")
        other.run(len(other.queue))

    def wait_event(self, event):
        self.log.append("waits for event")
        event.synchronize()

    def record_event(self):
        event = LateEvent()
        event.record(self)
        return event

    def run(self, until):
        while self.num_run < until:
            self.queue[self.num_run]()
            self.num_run += 1


class LateEvent:
    stream = None
    place = 0

    def record(self, stream):
        self.stream = stream
        self.place = len(stream.queue)

    def query(self):
        return self.stream.num_run >= self.place

    def synchronize(self):
        self.stream.run(self.place)


class Deferred(TorchFunctionMode):
    """Put copies that block nobody into the queue of a stream."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            target, source = args
            self.stream.log.append("copies")
            self.stream.queue.append(lambda: target.detach().copy_(source.detach()))
            return target
        return func(*args, **(kwargs or {}))


class Counted:
    """Memory that torch.cuda reports: what is alive, and the most since the last reset."""

    def __init__(self):
        self.calls = []
        self.alive = 1000
        self.most = 5000

    def synchronize(self, device=None):
        self.calls.append("synchronize")

    def reset_peak_memory_stats(self, device=None):
        self.calls.append("reset")
        self.most = self.alive

    def memory_allocated(self, device=None):
        return self.alive

    def max_memory_allocated(self, device=None):
        self.calls.append("read")
        return self.most

    def memory_stats(self, device=None):
        asked = {"requested_bytes.all.current": self.alive, "requested_bytes.all.peak": self.most}
        return asked | dict.fromkeys(("allocated_bytes.all.current", "allocated_bytes.all.peak"), 0)

    def hold(self, num_bytes):
        self.calls.append("work")
        self.alive += num_bytes
        self.most = max(self.most, self.alive)


@pytest.fixture
def default_stream(monkeypatch):
    """The default stream of a stand-in that replaces the streams and events of torch.cuda."""
    stream = LateStream()
    monkeypatch.setattr(torch.cuda, "Stream", LateStream)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "stream", Deferred)
    return stream


@pytest.fixture
def counted(monkeypatch):
    found = Counted()
    for name in (
        "synchronize",
        "reset_peak_memory_stats",
        "memory_allocated",
        "memory_stats",
        "max_memory_allocated",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return found


# Copies between host and device, for offload.


@pytest.fixture
def copies(default_stream):
    """Copies of a CUDA device, whose memory is the host's here."""
    made = offload.HostCopies(CUDA)
    made.device = torch.device("cpu")
    return made


def test_a_copy_waits_for_what_was_computed_and_is_awaited(copies):
    source = torch.arange(8, dtype=torch.uint8)
    host = torch.zeros(16, dtype=torch.uint8)
    copies.out(source, host, most_bytes=100)
    assert copies.stream.log == ["waits for computation", "copies"]
    assert not host.any()  # the stream is late

    target, done = copies.back(host, 8)
    copies.wait(done)
    assert torch.equal(target, source)
    assert torch.equal(host[:8], source)


def test_sources_are_held_until_they_are_copied_and_not_beyond_a_limit(copies):
    host = torch.zeros(8, dtype=torch.uint8)
    for _ in range(3):
        copies.out(torch.ones(8, dtype=torch.uint8), host, most_bytes=16)
        assert copies._leaving_bytes <= 16
    assert len(copies._leaving) == 2
    copies.stream.run(3)
    copies.out(torch.ones(8, dtype=torch.uint8), host, most_bytes=16)
    assert len(copies._leaving) == 1


def trained(model):
    square_sum(model, torch.ones(3, 8)).backward()
    return gradients_of(model)


@pytest.mark.parametrize("waits", [True, False])
def test_offload_trains_alike_where_copies_are_as_late_as_they_may(
    default_stream, monkeypatch, waits
):
    """Without its waits the gradients differ, so the stand-in is late enough to tell."""

    class Copies(offload.HostCopies):
        def __init__(self, device):
            super().__init__(CUDA)
            self.device = device

        def wait(self, done):
            if waits:
                super().wait(done)

        def back(self, host, nbytes):
            target, done = super().back(host, nbytes)
            return target.fill_(0), done

    monkeypatch.setattr(offload, "HostCopies", Copies)
    model = seeded_stack(lambda: feed_forward(8, 1024), 4)
    expected = trained(model)
    model.zero_grad()
    offload_blocks(model, min_bytes=0)
    assert all_equal(trained(model), expected) is waits


# Copies for a save in the background.


class OnCuda(torch.Tensor):
    """A tensor that says that it is on a CUDA device."""

    is_cuda = True


def test_a_save_copies_on_its_own_stream_and_the_next_step_waits(default_stream, monkeypatch):
    """The sources change right after `wait`, while the copies are as late as they may be."""
    # Without a GPU no memory can be pinned.
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, **_: torch.zeros(shape, dtype=dtype))
    sources = [torch.arange(4.0).as_subclass(OnCuda), torch.ones(2).as_subclass(OnCuda)]
    copied = []
    writing = SimpleNamespace(
        tensors=dict(enumerate(sources)),
        snapshot=SimpleNamespace(optimizers=[]),
        write=lambda: copied.extend(writing.tensors.values()),
    )
    store = SimpleNamespace(begin=lambda *_, **__: writing, finish=lambda _, write: write())
    saver = background.BackgroundSaver(store)
    with monkeypatch.context() as patched:
        # The thread's own wait is held back, so that only the training's wait runs the copies.
        held = threading.Event()
        run = LateEvent.synchronize

        def wait_in_turn(event):
            if threading.current_thread() is not threading.main_thread():
                held.wait(10)
            run(event)

        patched.setattr(LateEvent, "synchronize", wait_in_turn)
        saver.save("rollback", 1, None)
        for source in sources:
            source.fill_(-1)
        held.set()
        saver.finish()
    assert "waits for event" in saver._staging.stream.log  # what the training computed before
    assert all_equal(copied, [torch.arange(4.0), torch.ones(2)])


# Measuring.


def test_a_peak_is_read_between_two_waits_for_the_device(counted):
    found = measure.peak_of_step(lambda: counted.hold(700), CUDA)
    assert counted.calls == ["synchronize", "reset", "work", "synchronize", "read"]
    assert found == 700  # what was alive before does not count


def test_held_bytes_and_peak_are_those_after_a_first_step(counted, monkeypatch):
    monkeypatch.setattr(measure, "_device", lambda module: CUDA)
    model = nn.Linear(2, 2)

    def loss(module, batch):
        counted.hold(100)
        return module(batch).sum()

    found = measure.measure_memory(model, torch.ones(1, 2), loss)
    assert counted.calls[:3] == ["work", "synchronize", "reset"]
    assert (found.held_bytes, found.peak_bytes) == (100, 100)


def test_a_step_waits_for_its_device_and_a_record_names_the_card(counted, monkeypatch):
    wait_for(CUDA)
    assert counted.calls == ["synchronize"]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert provenance(CUDA)["device"] == "NVIDIA H200"


# Random generators of two devices.


def test_a_checkpoint_has_the_generators_of_all_devices(cuda_generators):
    taken = take_random_state()
    saved = {name: state for name, state in taken.items() if "cuda" in name}
    assert saved == {"cuda-0": 3, "cuda-1": 5}
    cuda_generators[1] = 6
    assert restore_random_state(taken) == []
    assert cuda_generators[1] == 5
    del cuda_generators[1]
    notes = restore_random_state(taken)
    assert notes == ["the generator cuda-1 was saved, but does not exist here"]


# Profiles of devices, and what a gate asks of one.


def test_what_operations_use_inside_is_part_of_a_peak(counted):
    counted.most = 1900
    record = SimpleNamespace(cuda=CUDA, before=1000, lives=[], phases=["forward"])
    found = timeline._build_peak(record, 0, {timeline.ALLOCATOR_GROUP: 0, "parameters": 600})
    assert found.bytes_alive == 900
    assert found.owners[timeline.ALLOCATOR_GROUP] == 300


def test_a_limit_is_that_of_the_card_and_a_tensor_comes_back_to_the_current_one(monkeypatch):
    properties = SimpleNamespace(total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda on: properties)
    savings.check_limit(2**30, CUDA)
    with pytest.raises(ValueError, match=r"a limit of 2.00 GiB is more than the 1.00 GiB of cuda"):
        savings.check_limit(2**31, CUDA)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = []
    monkeypatch.setattr(torch, "zeros_like", lambda saved, *, device: made.append(device))
    for kind in ("cuda", None):
        state._make_tensor(SimpleNamespace(device=kind), None, None)
    assert made == ["cuda", "cpu"]  # torch takes a device without a number for the current one


def test_compiled_code_is_for_the_device_of_the_parameters(monkeypatch):
    on_cuda = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=CUDA)]))
    used = []
    monkeypatch.setattr(
        compile_budget, "memory_budget", lambda model, share, **options: used.append(options) or []
    )
    sample = SimpleNamespace(blocks=None, batch=None)
    for model in (on_cuda, nn.Linear(1, 1)):
        strategies._apply_memory_budget(model, sample)
    assert [options["backend"] for options in used] == ["inductor", "aot_eager"]
