"""Behaviours: random numbers, state of blocks, precision, copies."""

import copy
import io
import pickle
import random
from collections import deque
from operator import attrgetter

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from .peer_arguments import Embedding
from .peer_table import (
    Block,
    Chain,
    X,
    backward,
    behaviour,
    blocks_of,
    gradients,
    limit,
    loss_of,
    pair,
    recomputing,
    same,
    step,
    train,
    trains,
)

# Random numbers.


class Dropping(Block):
    def inner(self, x):
        return nn.functional.dropout(super().inner(x), 0.4)


@step("dropout draws the same mask again, and the generator ends where it did", block=Dropping)
def dropout(model):
    return [train(model), torch.get_rng_state()]


DIFFERENT = limit("the results differ")


def masked(block, x, generator):
    mask = torch.rand(x.shape, generator=generator) > 0.5
    return x + block.inner(x * mask) * mask


@trains("a generator of the block's own", torch=DIFFERENT)
class Noisy(Block):
    def add(self):
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return masked(self, x, self.generator)


class Chance(Block):
    def forward(self, x):
        scale = random.random()
        return x + self.inner(x * scale) * scale


@step("numbers of Python's random in the block", block=Chance, **recomputing(DIFFERENT))
def python_random(model):
    random.seed(3)
    return train(model)


GENERATOR = torch.Generator()


class Elsewhere(Block):
    def forward(self, x):
        return masked(self, x, GENERATOR)


@step(
    "a generator that is neither the block's nor an argument",
    block=Elsewhere,
    **recomputing(DIFFERENT),
)
def global_generator(model):
    GENERATOR.manual_seed(3)
    return train(model)


@step("random numbers drawn between forward and backward do not matter", block=Dropping)
def drawn_between(model):
    loss = loss_of(model(X))
    torch.rand(17)
    loss.backward()
    return [gradients(model), torch.rand(3)]


# State of blocks.


@trains("running statistics of batch norms move once", torch=DIFFERENT)
class Normed(Block):
    def add(self):
        self.norm = nn.BatchNorm1d(8)


@trains("a counter in a buffer moves once, and its value is that of forward", torch=DIFFERENT)
class Counting(Block):
    def add(self):
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        self.count += 1
        return x + self.inner(x) * self.count.clone()


class Remembering(Block):
    """A block with state in plain attributes: numbers, tensors, containers, one made late."""

    def add(self):
        self.calls = 0
        self.mean = torch.zeros(8)
        self.total = torch.zeros(())
        self.seen = []
        self.facts = {"rows": 0}
        self.recent = deque(maxlen=2)

    def forward(self, x):
        self.calls += 1
        x = x - self.mean
        self.mean = x.detach().mean(0)
        self.total += x.detach().mean()
        self.seen.append(self.calls)
        self.facts["rows"] += len(x)
        self.recent.append(self.calls)
        is_first = not hasattr(self, "noise")
        if is_first:
            self.noise = torch.rand(8)
        factor = self.calls + is_first + sum([*self.seen, *self.recent, *self.facts.values()])
        return x + self.inner(x) * factor + self.total * self.noise


REMEMBERED = attrgetter("calls", "mean", "total", "seen", "facts", "recent", "noise")


@step("an attribute that forward changes moves once", torch=DIFFERENT, block=Remembering)
def attribute(model):
    for loss in [loss_of(model(X)), loss_of(model(2 * X))]:
        loss.backward()
    return [gradients(model), [*map(REMEMBERED, blocks_of(model))]]


class Dropout(Block):
    def add(self):
        self.dropout = nn.Dropout(0.4)

    def inner(self, x):
        return self.last(self.dropout(nn.functional.gelu(self.first(self.norm(x)))))


@step(
    "eval() between forward and backward",
    torch=limit("number of tensors|the results differ"),
    block=Dropout,
)
def eval_between(model):
    loss = loss_of(model(X))
    model.eval()
    loss.backward()
    model.train()
    return gradients(model)


@step("training in eval mode", block=Dropping)
def eval_mode(model):
    return train(model.eval())


@step("forward without grad mode and in inference mode")
def no_grad(model):
    with torch.no_grad():
        found = [model(X)]
    with torch.inference_mode():
        found.append(model(X).clone())
    return [found, train(model)]


@step("weights replaced between forward and backward", torch=DIFFERENT)
def replaced(model):
    first = list(model.parameters())
    loss = loss_of(model(X))
    for module in model.modules():
        # The first one stays.
        for name, weight in list(module.named_parameters(recurse=False))[1:]:
            setattr(module, name, nn.Parameter(weight * 3 + 1))
    loss.backward()
    return [weight.grad for weight in first]


class Shortened(Block):
    """A block that takes some rows of its input; their number is that of the class."""

    rows = 4

    def forward(self, x):
        rows = Shortened.rows
        return x + nn.functional.pad(self.inner(x[:rows]), (0, 0, 0, 4 - rows))


@step(
    "a global number that changes the shapes between the two runs",
    block=Shortened,
    **recomputing(limit("different (metadata|number)")),
)
def global_shape(model):
    Shortened.rows = 4
    loss = loss_of(model(X))
    Shortened.rows = 3
    loss.backward()
    return gradients(model)


@trains("spectral norm and weight norm", torch=DIFFERENT)
class Parametrized(Block):
    def add(self):
        self.first = weight_norm(self.first)
        self.last = spectral_norm(self.last)


@behaviour("one weight shared by two blocks, and by the layer before them")
def tied(change):
    class Tied(Block):
        def add(self):
            self.inside = nn.Linear(8, 8)

        def inner(self, x):
            return super().inner(self.inside(x))

    plain = Chain(Tied)
    for layer in plain.layers:
        layer.inside.weight = plain.embed.weight
    changed = copy.deepcopy(plain)
    change(changed)
    assert same(train(plain), train(changed)), "the results differ"


@trains("an LSTM in the block")
class Recurrent(Block):
    def add(self):
        self.lstm = nn.LSTM(8, 8)

    def inner(self, x):
        return super().inner(self.lstm(x[:, None])[0][:, 0])


@trains("attention with dropout in the block")
class Attending(Block):
    def inner(self, x):
        rows = self.norm(x)[None]
        attended = nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.2)
        return super().inner(attended[0])


class Sparse(Embedding):
    def add(self):
        self.table = nn.Embedding(5, 8, sparse=True)


@step("sparse gradients of an embedding", block=Sparse)
def sparse(model):
    loss_of(model(X, torch.tensor([0, 3, 3, 1]))).backward()
    return [weight.grad.to_dense() for weight in model.parameters()]


# Precision.


@step("autocast around forward, and backward outside of it")
def autocast(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(X).float()
    return backward(model, output)


class Exact(Block):
    def inner(self, x):
        with torch.autocast("cpu", enabled=False):
            x = self.norm(x.float())
        return self.last(nn.functional.gelu(self.first(x))).float()


@step("autocast switched off in a part of the block", block=Exact)
def autocast_off(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return train(model)


@trains("autocast inside of the block alone")
class Half(Block):
    def inner(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().inner(x).float()


@step("autocast and one weight in all blocks")
def autocast_tied(model):
    for layer in model.layers[1:]:
        layer.first = model.layers[0].first
    return autocast(model)


@step("weights and inputs in bfloat16 and in double precision")
def dtypes(model):
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        model.to(dtype)
        found.append(backward(model, model(X.to(dtype))))
    return found


# Copies.


@step("a deep copy of the model trains the same")
def deep_copy(model):
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    return train(copied)


@step("a pickled model trains the same")
def pickled(model):
    return train(pickle.loads(pickle.dumps(model)))


@step("the model saved whole by torch.save trains the same")
def saved_whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return train(torch.load(file, weights_only=False))


@behaviour("names, state dict and class of modules stay")
def names(change):
    plain, changed = pair(change)
    for model in (plain, changed):
        assert [name for name, _ in model.named_modules()] == [
            name for name, _ in plain.named_modules()
        ]
        assert list(model.state_dict()) == list(plain.state_dict())
        assert all(isinstance(layer, Block) for layer in model.layers)
    plain.load_state_dict(changed.state_dict())
    changed.load_state_dict(plain.state_dict())


@step("functional_call with other weights", torch=DIFFERENT)
def functional(model):
    weights = {
        name: (weight.detach() * 1.5).requires_grad_() for name, weight in model.named_parameters()
    }
    loss_of(functional_call(model, weights, (X,))).backward()
    return [weight.grad for weight in weights.values()]


NOT_IN_FUNC = limit("torch.func|functorch|saved tensor hooks|saved_tensors_hooks")


@step("torch.func.grad through the blocks", every=NOT_IN_FUNC, torch=NOT_IN_FUNC)
def func_grad(model):
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    found = torch.func.grad(lambda values: loss_of(functional_call(model, values, (X,))))(weights)
    return list(found.values())


# Any dispatch mode rounds derivatives of composite operations otherwise.
@step("forward-mode derivatives", sac=DIFFERENT)
def forward_mode(model):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent.detach()
