"""Behaviours: what blocks are given, and what they return."""

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..toy_steps import drawn
from .peer_table import (
    Block,
    X,
    backward,
    behaviour,
    gradients,
    limit,
    loss_of,
    refused,
    require_same,
    step,
    train,
    trains,
)

# Arguments.


def new_scale():
    return torch.full((8,), 1.5, requires_grad=True)


class Scaled(Block):
    def forward(self, x, *values, **named):
        for value in [*values, *named.values()]:
            x = x * factor_of(value)
        return x + self.inner(x)


def factor_of(value):
    """Return the factor in an argument of any kind."""
    if isinstance(value, dict):
        return factor_of(next(iter(value.values())))
    if isinstance(value, list | tuple):
        return factor_of(value[0])
    return getattr(value, "factor", value)


@step("tensors by keyword", block=Scaled)
def by_keyword(model):
    return train(model, scale=torch.full((8,), 1.5))


@step(
    "keywords of the block that torch's function has too",
    torch=limit("incompatible with non-default context_fn"),
    block=Scaled,
)
def keywords_of_torch(model):
    scale = torch.full((8,), 1.5)
    return train(model, debug=2.0, context_fn=scale, preserve_rng_state=0.5, early_stop=3)


@step("a keyword requires grad and no other input of the model does", block=Scaled)
def keyword_requires_grad(model):
    scale = new_scale()
    model.requires_grad_(False)
    loss_of(model(X, scale=scale)).backward()
    return scale.grad


class WithoutTensors(Scaled):
    def forward(self, x, factor, mode, mask):
        assert (mode, mask) == ("mode", None)
        return super().forward(x, factor)


@step("numbers, text and None as arguments", block=WithoutTensors)
def no_tensors(model):
    return train(model, 1.5, "mode", None)


@step("tensors that require grad inside nested containers", block=Scaled)
def in_containers(model):
    scale = new_scale()
    return [train(model, {"scales": [(scale,)]}), scale.grad]


Named = namedtuple("Named", ["factor", "label"])


@step("a named tuple as argument", block=Scaled)
def named_tuple(model):
    return train(model, Named(torch.ones(8) * 2, "label"))


@dataclass
class Settings:
    factor: Tensor


@step("a dataclass as argument", block=Scaled)
def a_dataclass(model):
    scale = new_scale()
    return [train(model, Settings(scale)), scale.grad]


class Appending(Block):
    def forward(self, x, seen):
        seen.append(len(seen))
        return super().forward(x)


@step("a list to which the block appends", torch=limit("the results differ"), block=Appending)
def appends(model):
    seen = []
    return [train(model, seen), seen]


class Popping(Block):
    def forward(self, x, scales):
        return super().forward(x * scales.pop())


@step(
    "a list from which each block takes a value", torch=limit("pop from empty list"), block=Popping
)
def pops(model):
    return train(model, [2.0, 3.0, 4.0, 5.0])


class Small(Block):
    def forward(self, x, scale, empty):
        return super().forward(x) * scale * (1 + (empty * scale).sum())


@step("a tensor without dimensions as input, and one without elements", block=Small)
def small_tensors(model):
    scale = torch.tensor(1.5, requires_grad=True)
    return [train(model, scale, torch.zeros(0, 8, requires_grad=True)), scale.grad]


@step("inputs that are slices and transposed", block=Scaled)
def views(model):
    table = drawn(8, 16, seed=3)
    return train(model, table[::2, 1::2], table.t()[4:12, :1].t())


class Embedding(Block):
    def add(self):
        self.table = nn.Embedding(5, 8)

    def forward(self, x, tokens):
        return super().forward(x + self.table(tokens))


@step("integer inputs that choose rows of a table", block=Embedding)
def integers(model):
    return train(model, torch.tensor([0, 3, 3, 1]))


@trains("complex numbers")
class Complex(Block):
    def forward(self, x):
        values = torch.polar(torch.ones_like(x), self.inner(x))
        return x + (values * values.conj().exp()).real


@step("the same tensor given twice", block=Scaled)
def given_twice(model):
    scale = new_scale()
    return [train(model, scale, scale), scale.grad]


class Constant(Block):
    def forward(self):
        return self.inner(X)


@step(
    "a block without arguments",
    segments=refused("can't take the output of layers.0"),
    block=Constant,
)
def without_arguments(model):
    return backward(model, model.layers[0]() + model.layers[1]())


# Outputs.


@trains("a tuple as output, and None in it")
class Several(Block):
    def forward(self, x):
        return super().forward(x), None, x.detach(), "label"


class Dictionary(Block):
    def forward(self, x):
        return {"out": super().forward(x), "twice": 2 * x}


@step(
    "a dictionary as output",
    segments=refused("segments need blocks that return a tensor"),
    block=Dictionary,
)
def dictionaries(model):
    output = X
    for layer in model.layers:
        found = layer(output)
        output = found["out"] + found["twice"]
    return backward(model, output)


@behaviour("an output that is the input itself")
def input_returned(change):
    class Identity(Block):
        def forward(self, x):
            return x, self.inner(x)

    class Sum(Block):
        def forward(self, x):
            self.inner(x)
            return x

    for block in (Identity, Sum):
        require_same(change, block=block)


@trains("a part of the block is detached")
class Detached(Block):
    def forward(self, x):
        with torch.no_grad():
            scale = self.first(x).sum()
        return x + self.inner(x) * scale + self.inner(x).detach()


class Two(Block):
    def forward(self, x):
        return self.norm(x) + x, self.inner(x)


@step(
    "one of two outputs is not used",
    segments=refused("does not take the output of layers.0"),
    block=Two,
)
def unused_output(model):
    used = [layer(X)[index % 2] for index, layer in enumerate(model.layers)]
    return backward(model, torch.stack(used))


class Sum(Block):
    def forward(self, x):
        return self.inner(x * 2) + 1


@step(
    "the output is changed in place afterwards",
    segments=refused("does not take the output of"),
    block=Sum,
)
def output_written(model):
    output = X
    for layer in model.layers:
        output = layer(output)
        output.add_(1)
    return backward(model, output)


class Loss(Block):
    def forward(self, x, target):
        hidden = super().forward(x)
        return hidden, nn.functional.mse_loss(hidden, target)


@step("the model's loss is computed in the last block", block=Loss)
def loss_inside(model):
    model(X, torch.ones_like(X))[1].backward()
    return gradients(model)
