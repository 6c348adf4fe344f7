"""Behaviours: ways to run backward, and what hooks and functions see."""

import contextlib
import functools
import gc
import re
import weakref
from typing import ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

from .peer_table import (
    Block,
    X,
    backward,
    behaviour,
    blocks_of,
    gradients,
    limit,
    loss_of,
    pair,
    recomputing,
    step,
    train,
    trains,
    trains_inside,
)

# Backward in parts, again, and of higher order.


@step("a graph that is kept, and backward through it twice")
def kept_graph(model):
    loss = loss_of(model(X))
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def require_error(loss, words):
    message = ""
    try:
        loss.backward()
    except RuntimeError as error:
        message = str(error)
    assert re.search(words, message), "no error"


@behaviour("a second backward through a freed graph is an error")
def freed_graph(change):
    for model in pair(change):
        loss = loss_of(model(X))
        loss.backward()
        require_error(loss, "second time|extra time")


@step("gradients of gradients")
def gradient_penalty(model):
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
    slope.square().sum().backward()
    return gradients(model)


@step("torch.autograd.grad for the input alone")
def input_gradient(model):
    x = X.clone().requires_grad_()
    return torch.autograd.grad(loss_of(model(x)), x)


@step("backward for some of the weights: backward(inputs=...)")
def some_inputs(model):
    loss_of(model(X)).backward(inputs=[model.layers[1].first.weight])
    return gradients(model)


@step("backward of one half of the output and then of the other")
def halves(model):
    output = model(X)
    output[:2].square().sum().backward(retain_graph=True)
    output[2:].square().sum().backward()
    return gradients(model)


@step("two forwards before their backwards, in either order")
def two_forwards(model):
    for order in ((0, 1), (1, 0)):
        losses = [loss_of(model(X)), loss_of(model(2 * X))]
        for index in order:
            losses[index].backward()
    return gradients(model)


@step("one backward through several forwards")
def several_forwards(model):
    (loss_of(model(X)) + loss_of(model(2 * X))).backward()
    return gradients(model)


@step("a forward without backward leaves nothing behind")
def no_backward(model):
    model(X)
    return train(model)


@step("a block is called twice in one forward")
def called_twice(model):
    return backward(model, model.layers[3](model.layers[3](X)))


@trains("backward inside of forward, as for forces")
class Forces(Block):
    def forward(self, x):
        with torch.enable_grad():
            place = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.inner(place).square().sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return x + force


@step("mixed: some blocks are frozen")
def frozen(model):
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    model.layers[2].norm.requires_grad_(False)
    return train(model)


@step("no input of the block requires grad")
def no_grad_inputs(model):
    model.embed.requires_grad_(False)
    return train(model)


# Early stop, debug, nesting.


trains_inside(
    {
        "early stop switched off by torch's context": lambda: set_checkpoint_early_stop(False),
        "torch's debug mode, which logs the operations of both runs": (
            lambda: set_checkpoint_debug_enabled(True)
        ),
        "anomaly detection": lambda: torch.autograd.detect_anomaly(check_nan=True),
    }
)


@trains("torch's checkpoint inside of the block")
class Inside(Block):
    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)


@step("torch's checkpoint around the whole model")
def torch_around(model):
    return backward(model, checkpoint(model, X, use_reentrant=False))


@step("torch's reentrant checkpoint around the whole model")
def reentrant_around(model):
    return backward(model, checkpoint(model, X.clone().requires_grad_(), use_reentrant=True))


@step("save_on_cpu around the whole model")
def hooks_around(model):
    with torch.autograd.graph.save_on_cpu():
        output = model(X)
    return backward(model, output)


@step(
    "saved-tensor hooks are forbidden around the model",
    every=limit("not today"),
    torch=limit("not today"),
)
def hooks_forbidden(model):
    with torch.autograd.graph.disable_saved_tensors_hooks("not today"):
        return train(model)


# Hooks.


@step("forward hooks of a block run once", segments=limit("the results differ"))
def forward_hooks(model):
    calls = []
    for index, layer in enumerate(blocks_of(model)):
        layer.register_forward_pre_hook(lambda *_, i=index: calls.append(f"before {i}"))
        layer.register_forward_hook(lambda *_, i=index: calls.append(f"after {i}"))
    return [train(model), calls]


@step("a forward hook changes the output of a block")
def changing_hooks(model):
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: output * 1.5)
    return train(model)


@step("backward hooks of a block run once and see the gradients")
def backward_hooks(model):
    seen = []
    for layer in model.layers:
        layer.register_full_backward_pre_hook(lambda module, above: seen.append(above))
        layer.register_full_backward_hook(lambda module, below, above: seen.append(below))
    return [train(model), seen]


class Hooked(Block):
    seen: ClassVar[list] = []

    def forward(self, x):
        hidden = self.inner(x)
        hidden.register_hook(self.seen.append)
        return x + hidden


@step("hooks of tensors inside of a block run once", block=Hooked)
def tensor_hooks(model):
    Hooked.seen.clear()
    return [train(model), [*Hooked.seen]]


@step("hooks of weights run once, after each gradient is complete")
def weight_hooks(model):
    seen = []
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.clone()))
    train(model)
    return [len(seen), sum(tensor.sum() for tensor in seen)]


@step("an optimizer step in the hook of each weight")
def optimizer_in_backward(model):
    for weight in model.parameters():
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def update(_, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        weight.register_post_accumulate_grad_hook(update)
    loss_of(model(X)).backward()
    loss_of(model(X)).backward()
    return [weight.detach() for weight in model.parameters()]


# Functions of the user's own, and the tensors that they save.


class Cube(torch.autograd.Function):
    """Reads its saved tensors `reads` times, and notes what it finds."""

    reads = 1
    notes: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x, weight, mask):
        ctx.save_for_backward(x, weight, mask)
        ctx.mask = mask
        return x**3 * weight * mask

    @staticmethod
    def backward(ctx, gradient):
        for _ in range(Cube.reads):
            x, weight, mask = ctx.saved_tensors
        Cube.notes.append((mask is ctx.mask, hasattr(weight, "main_grad")))
        return 3 * x**2 * gradient * weight * mask, (gradient * x**3 * mask).sum(0), None


class Cubed(Block):
    def add(self):
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return Cube.apply(super().forward(x), self.gain, torch.ones_like(x))


def cubed(model, *, reads=1):
    """Train, and return the results and what backward has found of each block."""
    for layer in blocks_of(model):
        layer.gain.main_grad = torch.zeros(8)
    Cube.reads = reads
    Cube.notes.clear()
    return train(model), zip(*Cube.notes, strict=True)


@step("a function of one's own saves tensors", block=Cubed)
def own_function(model):
    return cubed(model)[0]


@step(
    "a function reads its saved tensors twice",
    block=Cubed,
    **recomputing(limit("already unpacked once")),
)
def reads_twice(model):
    return cubed(model, reads=2)[0]


class Kept(Cubed):
    mask = torch.ones(4, 8)

    def forward(self, x):
        return Cube.apply(Block.forward(self, x), self.gain, self.mask)


@step("a saved tensor without grad is the same object in backward", block=Kept)
def identity(model):
    is_same, _ = cubed(model)[1]
    return is_same


@step(
    "attributes of a saved weight (main_grad) are found in backward",
    every=limit("the results differ"),
    torch=limit("the results differ"),
    block=Cubed,
)
def attributes(model):
    _, has_attribute = cubed(model)[1]
    return has_attribute


@trains("writes in place inside of a block", sac=limit("has been mutated"))
class Writing(Block):
    def forward(self, x):
        hidden = self.first(self.norm(x))
        hidden.relu_()
        out = torch.zeros_like(x)
        out[:2] = self.last(hidden)[:2]
        return x + out


@behaviour(
    "a weight changed in place between forward and backward is an error", torch=limit("no e")
)
def changed_weight(change):
    for model in pair(change):
        loss = loss_of(model(X))
        with torch.no_grad():
            model.layers[0].last.weight.mul_(2)
        require_error(loss, "inplace operation|changed in place")


# What stays alive.


@behaviour("activations of a block are freed after backward")
def freed(change):
    inside = []

    class Noting(Block):
        def forward(self, x):
            hidden = self.first(self.norm(x))
            inside.append(weakref.ref(hidden))
            return x + self.last(nn.functional.gelu(hidden))

    for model in pair(change, Noting):
        inside.clear()
        gc.disable()
        try:
            loss = loss_of(model(X))
            loss.backward()
            alive = [hidden() for hidden in inside if hidden() is not None]
        finally:
            gc.enable()
        assert alive == [], "activations are alive"
        assert loss.grad_fn is not None


@behaviour("an output that is dropped frees everything without the garbage collector")
def dropped(change):
    for model in pair(change):
        x = torch.randn(4, 8, requires_grad=True) * 1
        alive = weakref.ref(x)
        gc.disable()
        try:
            output = model(x)
            del output, x
            assert alive() is None, "the input is alive"
        finally:
            gc.enable()


class Failing(Block):
    def forward(self, x, error):
        output = super().forward(x)
        if error is not None:
            raise error
        return output


def after_an_error(model, *, error):
    with contextlib.suppress(error):
        model(X, error)
    return train(model, None)


for place, error in {"an error": KeyError, "an interrupt": KeyboardInterrupt}.items():
    step(f"{place} in the forward of a block passes, and the next step is right", block=Failing)(
        functools.partial(after_an_error, error=error)
    )


@step("an error in backward passes, and the next step is right")
def backward_error(model):
    def fail(_):
        raise ArithmeticError("planned")

    handle = model.layers[1].last.weight.register_hook(fail)
    with contextlib.suppress(ArithmeticError):
        loss_of(model(X)).backward()
    handle.remove()
    return train(model)
