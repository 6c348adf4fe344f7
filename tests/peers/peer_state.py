"""Behaviours: random numbers, state of blocks, precision, copies."""

import copy
import io
import pickle
import random
import warnings
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
    require_same,
    same,
    train,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

# Random numbers.


class Dropping(Block):
    def inner(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().inner(x), 0.4)


@behaviour("dropout draws the same mask again, and the generator ends where it did")
def dropout(change: Change) -> None:
    require_same(change, lambda model: [train(model), torch.get_rng_state()], Dropping)


class Noisy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, generator=self.generator) > 0.5
        return x + self.inner(x * mask) * mask


DIFFERENT = limit("the results differ")


@behaviour("a generator of the block's own", torch=DIFFERENT)
def own_generator(change: Change) -> None:
    require_same(change, block=Noisy)


@behaviour(
    "numbers of Python's random in the block",
    recompute=DIFFERENT,
    sac=DIFFERENT,
    segments=DIFFERENT,
    torch=DIFFERENT,
)
def python_random(change: Change) -> None:
    class Chance(Block):
        def forward(self, x: Tensor) -> Tensor:
            scale = random.random()
            return x + self.inner(x * scale) * scale

    def step(model: nn.Module) -> Any:
        random.seed(3)
        return train(model)

    require_same(change, step, Chance)


@behaviour(
    "a generator that is neither the block's nor an argument",
    recompute=DIFFERENT,
    sac=DIFFERENT,
    segments=DIFFERENT,
    torch=DIFFERENT,
)
def global_generator(change: Change) -> None:
    generator = torch.Generator()

    class Elsewhere(Block):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.rand(x.shape, generator=generator) > 0.5
            return x + self.inner(x * mask) * mask

    def step(model: nn.Module) -> Any:
        generator.manual_seed(3)
        return train(model)

    require_same(change, step, Elsewhere)


@behaviour("random numbers drawn between forward and backward do not matter")
def drawn_between(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        model.zero_grad()
        loss = loss_of(model(X))
        torch.rand(17)
        loss.backward()
        return [gradients(model), torch.rand(3)]

    require_same(change, step, Dropping)


# State of blocks.


@behaviour("running statistics of batch norms move once", torch=DIFFERENT)
def batch_norm(change: Change) -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

    require_same(change, block=Normed)


@behaviour("a counter in a buffer moves once, and its value is that of forward", torch=DIFFERENT)
def counter(change: Change) -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x + self.inner(x) * self.count.clone()

    require_same(change, block=Counting)


@behaviour("an attribute that forward changes moves once", torch=DIFFERENT)
def attribute(change: Change) -> None:
    class Remembering(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            return x + self.inner(x) * float(self.calls)

    def step(model: nn.Module) -> Any:
        found = [train(model), train(model)]
        return [
            found,
            [(layer.calls, layer.seen) for layer in model.modules() if hasattr(layer, "calls")],
        ]

    require_same(change, step, Remembering)


@behaviour(
    "eval() between forward and backward", torch=limit("number of tensors|the results differ")
)
def eval_between(change: Change) -> None:
    class Dropout(Block):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.4)

        def inner(self, x: Tensor) -> Tensor:
            return self.last(self.dropout(nn.functional.gelu(self.first(self.norm(x)))))

    def step(model: nn.Module) -> Any:
        model.zero_grad()
        loss = loss_of(model(X))
        model.eval()
        loss.backward()
        model.train()
        return gradients(model)

    require_same(change, step, Dropout)


@behaviour("training in eval mode")
def eval_mode(change: Change) -> None:
    require_same(change, lambda model: train(model.eval()), Dropping)


@behaviour("forward without grad mode and in inference mode")
def no_grad(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        with torch.no_grad():
            found = [model(X)]
        with torch.inference_mode():
            found.append(model(X).clone())
        return [found, train(model)]

    require_same(change, step)


@behaviour("weights replaced between forward and backward", torch=DIFFERENT)
def replaced(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        first = list(model.parameters())
        loss = loss_of(model(X))
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(weight.detach() * 3 + 1))
        loss.backward()
        return [weight.grad for weight in first]

    require_same(change, step)


@behaviour(
    "a global number that changes the shapes between the two runs",
    torch=limit("different (metadata|number)"),
    recompute=limit("different (metadata|number)"),
    segments=limit("different (metadata|number)"),
    sac=limit("different (metadata|number)"),
)
def global_shape(change: Change) -> None:
    rows = [4]

    class Global(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + nn.functional.pad(self.inner(x[: rows[0]]), (0, 0, 0, 4 - rows[0]))

    def step(model: nn.Module) -> Any:
        rows[0] = 4
        loss = loss_of(model(X))
        rows[0] = 3
        loss.backward()
        return gradients(model)

    require_same(change, step, Global)


@behaviour("spectral norm and weight norm", torch=DIFFERENT)
def parametrized(change: Change) -> None:
    class Parametrized(Block):
        def __init__(self) -> None:
            super().__init__()
            self.first = weight_norm(self.first)
            self.last = spectral_norm(self.last)

    require_same(change, block=Parametrized)


@behaviour("one weight shared by two blocks, and by the layer before them")
def tied(change: Change) -> None:
    class Tied(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(8, 8)

        def inner(self, x: Tensor) -> Tensor:
            return super().inner(self.inside(x))

    found = []
    plain, changed = pair(lambda model: None, Tied)
    for model in (plain, changed):
        for layer in model.layers:
            layer.inside.weight = model.embed.weight
    change(changed)
    for model in (plain, changed):
        found.append(train(model))
    assert same(*found), "the results differ"


@behaviour("an LSTM in the block")
def recurrent(change: Change) -> None:
    class Recurrent(Block):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8)

        def inner(self, x: Tensor) -> Tensor:
            return super().inner(self.lstm(x[:, None])[0][:, 0])

    require_same(change, block=Recurrent)


@behaviour("attention with dropout in the block")
def attention(change: Change) -> None:
    class Attending(Block):
        def inner(self, x: Tensor) -> Tensor:
            rows = self.norm(x)[None]
            attended = nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.2)
            return super().inner(attended[0])

    require_same(change, block=Attending)


@behaviour("sparse gradients of an embedding")
def sparse(change: Change) -> None:
    class Sparse(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 8, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x + self.table(torch.tensor([0, 3, 3, 1])))

    def step(model: nn.Module) -> Any:
        model.zero_grad()
        loss_of(model(X)).backward()
        return [weight.grad.to_dense() for weight in model.parameters()]

    require_same(change, step, Sparse)


# Precision.


@behaviour("autocast around forward, and backward outside of it")
def autocast(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(X).float())
        loss.backward()
        return gradients(model)

    require_same(change, step)


@behaviour("autocast switched off in a part of the block")
def autocast_off(change: Change) -> None:
    class Exact(Block):
        def inner(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                x = self.norm(x.float())
            return self.last(nn.functional.gelu(self.first(x))).float()

    def step(model: nn.Module) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return train(model)

    require_same(change, step, Exact)


@behaviour("autocast inside of the block alone")
def autocast_inside(change: Change) -> None:
    class Half(Block):
        def inner(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().inner(x).float()

    require_same(change, block=Half)


@behaviour("autocast and one weight in all blocks")
def autocast_tied(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        for layer in model.layers[1:]:
            layer.first = model.layers[0].first
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(X).float())
        loss.backward()
        return gradients(model)

    require_same(change, step)


@behaviour("weights and inputs in bfloat16 and in double precision")
def dtypes(change: Change) -> None:
    for dtype in (torch.bfloat16, torch.float64):

        def step(model: nn.Module, dtype: torch.dtype = dtype) -> Any:
            model.to(dtype)
            loss_of(model(X.to(dtype))).backward()
            return gradients(model)

        require_same(change, step)


# Copies.


@behaviour("a deep copy of the model trains the same")
def deep_copy(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        return train(copied)

    require_same(change, step)


@behaviour("a pickled model trains the same")
def pickled(change: Change) -> None:
    require_same(change, lambda model: train(pickle.loads(pickle.dumps(model))))


@behaviour("the model saved whole by torch.save trains the same")
def saved_whole(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return train(torch.load(file, weights_only=False))

    require_same(change, step)


@behaviour("names, state dict and class of modules stay")
def names(change: Change) -> None:
    plain, changed = pair(change)
    for model in (plain, changed):
        assert [name for name, _ in model.named_modules()] == [
            name for name, _ in plain.named_modules()
        ]
        assert list(model.state_dict()) == list(plain.state_dict())
        assert all(isinstance(layer, Block) for layer in model.layers)
    plain.load_state_dict(changed.state_dict())
    changed.load_state_dict(plain.state_dict())


@behaviour("functional_call with other weights", torch=DIFFERENT)
def functional(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        weights = {
            name: (weight.detach() * 1.5).requires_grad_()
            for name, weight in model.named_parameters()
        }
        loss_of(functional_call(model, weights, (X,))).backward()
        return [weight.grad for weight in weights.values()]

    require_same(change, step)


NOT_IN_FUNC = limit("torch.func|functorch|saved tensor hooks|saved_tensors_hooks")


@behaviour("torch.func.grad through the blocks", every=NOT_IN_FUNC, torch=NOT_IN_FUNC)
def func_grad(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        found = torch.func.grad(lambda values: loss_of(functional_call(model, values, (X,))))(
            weights
        )
        return list(found.values())

    require_same(change, step)


# Any dispatch mode rounds derivatives of composite operations otherwise.
@behaviour("forward-mode derivatives", sac=DIFFERENT)
def forward_mode(change: Change) -> None:
    def step(model: nn.Module) -> Any:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
            return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent.detach()

    with warnings.catch_warnings():
        # Torch's own rules of derivatives are scripted.
        warnings.simplefilter("ignore", DeprecationWarning)
        require_same(change, step)
