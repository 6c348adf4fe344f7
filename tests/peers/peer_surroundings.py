"""Behaviours: threads, modes, compiled code, loops and optimizers around the blocks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..toy_steps import gradients_of
from .peer_table import (
    Block,
    X,
    backward,
    behaviour,
    gradients,
    loss_of,
    pair,
    refused,
    require_same,
    same,
    step,
    train,
    trains_inside,
)

# Threads.


def in_thread(act):
    """Run a function in a thread of its own; return its result or raise its error."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(act).result()


@step("forward in one thread and backward in another")
def other_thread(model):
    loss = in_thread(lambda: loss_of(model(X)))
    in_thread(loss.backward)
    return gradients(model)


@behaviour("two models train in two threads at once")
def two_threads(change):
    plain, one = pair(change)
    _, other = pair(change)
    expected = train(plain)
    barrier = threading.Barrier(2)

    def run(model):
        barrier.wait()
        return [train(model) for _ in range(3)]

    with ThreadPoolExecutor(max_workers=2) as pool:
        found = list(pool.map(run, (one, other)))
    assert same(found, [[expected] * 3] * 2), "the results differ"


# Modes and instruments of others.


trains_inside(
    {
        "torch's counter of operations around the step": lambda: FlopCounterMode(display=False),
        "torch's profiler around the step": (
            lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        ),
    }
)


@step("torch's tracker of modules around the step")
def tracked(model):
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        return train(model)


@step("a default device for new tensors")
def default_device(model):
    with torch.device("cpu"):
        output = model(X)
    return backward(model, output)


@step("a model on the meta device")
def on_meta(model):
    model.to("meta")
    loss_of(model(X.to("meta"))).backward()
    return [weight.grad.shape for weight in model.parameters()]


@step("fake tensors, as planners use them")
def fake(model):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        loss_of(model(torch.empty(4, 8))).backward()
        return [weight.grad.shape for weight in model.parameters()]


@step("deterministic algorithms are demanded")
def deterministic(model):
    torch.use_deterministic_algorithms(True)
    try:
        return train(model)
    finally:
        torch.use_deterministic_algorithms(False)


# Loops.


@step("microbatches accumulate, and steps of an optimizer follow each other")
def accumulation(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        for part in X.split(2):
            loss_of(model(part)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach() for weight in model.parameters()]


@step("other shapes in each step")
def other_shapes(model):
    for rows in (4, 1, 3):
        backward(model, model(X[:rows]))
    return gradients(model)


@step("a loop that adds what the blocks return", segments=refused("does not take the output of"))
def residual_loop(model):
    output = model.embed(X)
    for layer in model.layers:
        output = output + layer.inner(output) + layer(output)
    return backward(model, output)


@step("blocks are skipped at random")
def skipped(model):
    loss_of(model.layers[2](model.layers[0](model.embed(X)))).backward()
    return gradients_of(model.layers[0])


# Compiled code.


def compiled(function):
    return torch.compile(function, backend="aot_eager")


def close(found, expected):
    return all(map(torch.allclose, found, expected))


@behaviour("the whole model is compiled")
def whole_model(change):
    plain, changed = pair(change, depth=2)
    torch._dynamo.reset()
    loss_of(compiled(changed)(X)).backward()
    loss_of(plain(X)).backward()
    # Compiled code may round otherwise, with and without a lever.
    assert close(gradients(changed), gradients(plain)), "the results differ"


@behaviour("a compiled function inside of the block")
def function_inside(change):
    torch._dynamo.reset()
    run = compiled(lambda x, weight: nn.functional.gelu(x @ weight).sin())

    class Compiled(Block):
        def add(self):
            self.weight = nn.Parameter(torch.eye(8) / 2)

        def inner(self, x):
            return super().inner(run(self.norm(x), self.weight))

    require_same(change, block=Compiled)
