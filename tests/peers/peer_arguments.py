"""Behaviours: what blocks are given, and what they return."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from peer_table import (
    Block,
    Change,
    X,
    behaviour,
    gradients,
    limit,
    loss_of,
    pair,
    refused,
    require_same,
    train,
)
from torch import Tensor, nn

# Arguments.


class Scaled(Block):
    def forward(self, x: Tensor, *values: Any, **named: Any) -> Any:
        for value in [*values, *named.values()]:
            x = x * factor_of(value)
        return x + self.inner(x)


def factor_of(value: Any) -> Any:
    """Return the factor in an argument of any kind."""
    if isinstance(value, dict):
        return factor_of(next(iter(value.values())))
    if isinstance(value, list | tuple):
        return factor_of(value[0])
    return getattr(value, "factor", value)


@behaviour("tensors by keyword")
def by_keyword(change: Change) -> None:
    scale = torch.full((8,), 1.5)
    require_same(change, lambda model: train(model, scale=scale), Scaled)


@behaviour(
    "keywords of the block that torch's function has too",
    torch=limit("incompatible with non-default context_fn"),
)
def keywords_of_torch(change: Change) -> None:
    scale = torch.full((8,), 1.5)
    named = {"debug": 2.0, "context_fn": scale, "preserve_rng_state": 0.5, "early_stop": 3}
    require_same(change, lambda model: train(model, **named), Scaled)


@behaviour("a keyword requires grad and no other input of the model does")
def keyword_requires_grad(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        scale = torch.full((8,), 1.5, requires_grad=True)
        model.requires_grad_(False)
        loss_of(model(X, scale=scale)).backward()
        return scale.grad

    require_same(change, step, Scaled)


@behaviour("numbers, text and None as arguments")
def no_tensors(change: Change) -> None:
    class Named(Scaled):
        def forward(self, x: Tensor, factor: float, mode: str, mask: Any) -> Any:
            assert (mode, mask) == ("mode", None)
            return super().forward(x, factor)

    require_same(change, lambda model: train(model, 1.5, "mode", None), Named)


@behaviour("tensors that require grad inside nested containers")
def in_containers(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        scale = torch.full((8,), 1.5, requires_grad=True)
        return [train(model, {"scales": [(scale,)]}), scale.grad]

    require_same(change, step, Scaled)


Named = namedtuple("Named", ["factor", "label"])


@behaviour("a named tuple as argument")
def named_tuple(change: Change) -> None:
    require_same(change, lambda model: train(model, Named(torch.ones(8) * 2, "label")), Scaled)


@dataclass
class Settings:
    factor: Tensor


@behaviour("a dataclass as argument")
def a_dataclass(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        scale = torch.full((8,), 1.5, requires_grad=True)
        return [train(model, Settings(scale)), scale.grad]

    require_same(change, step, Scaled)


@behaviour("a list to which the block appends", torch=limit("appended again"))
def appends(change: Change) -> None:
    class Appending(Block):
        def forward(self, x: Tensor, seen: list[int]) -> Tensor:
            seen.append(len(seen))
            return super().forward(x)

    for model in pair(change, Appending):
        seen: list[int] = []
        train(model, seen)
        assert seen == [0, 1, 2, 3], "appended again"


@behaviour("a list from which each block takes a value", torch=limit("pop from empty list"))
def pops(change: Change) -> None:
    class Popping(Block):
        def forward(self, x: Tensor, scales: list[float]) -> Tensor:
            return super().forward(x * scales.pop())

    require_same(change, lambda model: train(model, [2.0, 3.0, 4.0, 5.0]), Popping)


@behaviour("a tensor without dimensions as input, and one without elements")
def small_tensors(change: Change) -> None:
    class Small(Block):
        def forward(self, x: Tensor, scale: Tensor, empty: Tensor) -> Tensor:
            return super().forward(x) * scale * (1 + (empty * scale).sum())

    def step(model: nn.Module) -> Any:
        scale = torch.tensor(1.5, requires_grad=True)
        return [train(model, scale, torch.zeros(0, 8, requires_grad=True)), scale.grad]

    require_same(change, step, Small)


@behaviour("inputs that are slices and transposed")
def views(change: Change) -> None:
    table = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    require_same(
        change, lambda model: train(model, table[::2, 1::2], table.t()[4:12, :1].t()), Scaled
    )


@behaviour("integer inputs that choose rows of a table")
def integers(change: Change) -> None:
    class Embedding(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 8)

        def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
            return super().forward(x + self.table(tokens))

    require_same(change, lambda model: train(model, torch.tensor([0, 3, 3, 1])), Embedding)


@behaviour("complex numbers")
def complex_numbers(change: Change) -> None:
    class Complex(Block):
        def forward(self, x: Tensor) -> Tensor:
            values = torch.polar(torch.ones_like(x), self.inner(x))
            return x + (values * values.conj().exp()).real

    require_same(change, block=Complex)


@behaviour("the same tensor given twice")
def given_twice(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        scale = torch.full((8,), 1.5, requires_grad=True)
        return [train(model, scale, scale), scale.grad]

    require_same(change, step, Scaled)


@behaviour("a block without arguments", segments=refused("can't take the output of layers.0"))
def without_arguments(change: Change) -> None:
    class Constant(Block):
        def forward(self) -> Tensor:
            return self.inner(X)

    def step(model: nn.Module) -> Any:
        model.zero_grad()
        loss_of(model.layers[0]() + model.layers[1]()).backward()
        return gradients(model)

    require_same(change, step, Constant)


# Outputs.


@behaviour("a tuple as output, and None in it")
def tuples(change: Change) -> None:
    class Several(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None, x.detach(), "label"

    require_same(change, block=Several)


@behaviour("a dictionary as output", segments=refused("segments need blocks that return a tensor"))
def dictionaries(change: Change) -> None:
    class Dictionary(Block):
        def forward(self, x: Tensor) -> Any:
            return {"out": super().forward(x), "twice": 2 * x}

    def step(model: nn.Module) -> Any:
        model.zero_grad()
        output = X
        for layer in model.layers:
            found = layer(output)
            output = found["out"] + found["twice"]
        loss_of(output).backward()
        return gradients(model)

    require_same(change, step, Dictionary)


@behaviour("an output that is the input itself")
def input_returned(change: Change) -> None:
    class Identity(Block):
        def forward(self, x: Tensor) -> Any:
            return x, self.inner(x)

    class Sum(Block):
        def forward(self, x: Tensor) -> Any:
            self.inner(x)
            return x

    for block in (Identity, Sum):
        require_same(change, block=block)


@behaviour("a part of the block is detached")
def detached(change: Change) -> None:
    class Detached(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.first(x).sum()
            return x + self.inner(x) * scale + self.inner(x).detach()

    require_same(change, block=Detached)


@behaviour(
    "one of two outputs is not used", segments=refused("does not take the output of layers.0")
)
def unused_output(change: Change) -> None:
    class Two(Block):
        def forward(self, x: Tensor) -> Any:
            return self.norm(x) + x, self.inner(x)

    def step(model: nn.Module) -> Any:
        model.zero_grad()
        used = [layer(X)[index % 2] for index, layer in enumerate(model.layers)]
        loss_of(torch.stack(used)).backward()
        return gradients(model)

    require_same(change, step, Two)


@behaviour(
    "the output is changed in place afterwards", segments=refused("does not take the output of")
)
def output_written(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        model.zero_grad()
        output = X
        for layer in model.layers:
            output = layer(output)
            output.add_(1)
        loss_of(output).backward()
        return gradients(model)

    class Sum(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * 2) + 1

    require_same(change, step, Sum)


@behaviour("the model's loss is computed in the last block")
def loss_inside(change: Change) -> None:
    class Loss(Block):
        def forward(self, x: Tensor, target: Tensor) -> Any:
            hidden = super().forward(x)
            return hidden, nn.functional.mse_loss(hidden, target)

    def step(model: nn.Module) -> Any:
        model.zero_grad()
        model(X, torch.ones_like(X))[1].backward()
        return gradients(model)

    require_same(change, step, Loss)
