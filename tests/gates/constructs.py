"""Models and losses of unusual form that train well, as factories of workloads."""

import functools
import random
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from curry_train.workloads import Workload

from ..toy_steps import square_sum, stacked

WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = stacked(block, 3)

    def forward(self, x):
        return self.run(self.embed(x))

    def run(self, x):
        return self.layers(x)


# Models that run their blocks in another way.


class CallsForward(Model):
    """Calls forward of its blocks, past their hooks."""

    def run(self, x):
        for layer in self.layers:
            x = layer.forward(x)
        return x


class CheckpointsAll(Model):
    def run(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


class CheckpointsSegments(Model):
    """Checkpoints all segments but the last, as torch's function does."""

    def run(self, x):
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


class DropsLayers(Model):
    """Runs each layer or leaves it out, at random."""

    def run(self, x):
        for layer in self.layers:
            if not self.training or random.random() < 0.5 or layer is self.layers[0]:
                x = layer(x)
        return x


class KeepsLast(Model):
    """Keeps its last output, for a regularizer or a plot."""

    def run(self, x):
        self.last = self.layers(x)
        return self.last


class RaisesInEval(Model):
    def run(self, x):
        if not self.training:
            raise RuntimeError("call generate() in eval mode")
        return self.layers(x)


class Communicates(Model):
    """Sums its output over ranks, as expert parallel models do."""

    def run(self, x):
        y = self.layers(x)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(y.detach())
        return y


class MasksInTraining(Model):
    """Has a parameter that eval mode does not use."""

    def __init__(self):
        super().__init__()
        self.mask = nn.Parameter(torch.ones(WIDTH))

    def run(self, x):
        return self.layers(x * self.mask if self.training else x)


class Scales(Model):
    """Has a scalar parameter, which FSDP2 refuses."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def run(self, x):
        return self.scale * self.layers(x)


# Blocks.


class KeepsInClosure(Block):
    """Keeps the last activation in the closure of a function."""

    def __init__(self):
        super().__init__()
        kept = []

        def keep(x):
            kept[:] = [x]
            return x

        self.keep = keep

    def forward(self, x):
        return x + self.down(F.gelu(self.keep(self.up(x))))


class Counts(Block):
    """Counts its calls in a buffer or a Python number; a share of them enters the output."""

    def __init__(self, calls, share=0.0):
        super().__init__()
        self.share = share
        if isinstance(calls, torch.Tensor):
            self.register_buffer("calls", calls.clone())
        else:
            self.calls = calls

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + self.share * self.calls)


class Skips(Block):
    """Returns its input instead of running, at random."""

    def forward(self, x):
        return x if self.training and torch.rand(()) < 0.2 else super().forward(x)


class OwnGenerator(Block):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return super().forward(x + torch.rand(x.shape, generator=self.generator) / 10)


class Spectral(Block):
    """Has a weight that is divided by its norm, which a buffer estimates."""

    def __init__(self):
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(self.up)


class Differentiates(Block):
    """Takes a derivative inside of its forward."""

    def forward(self, x):
        energy = torch.func.grad(
            lambda value: super(Differentiates, self).forward(value).square().sum()
        )
        return x + torch.func.vmap(energy)(x)


# Losses and batches.


def with_derivative(model, batch):
    """Penalize the derivative by the input, as physics-informed losses do."""
    batch = batch.detach().requires_grad_()
    out = model(batch)
    (slope,) = torch.autograd.grad(out.tanh().sum(), batch, create_graph=True)
    return slope.square().sum() + out.square().sum()


def noisy(model, batch):
    return square_sum(model, batch) * torch.rand(())


def rows(size):
    return torch.randn(size, 32, WIDTH)


class Rows:
    """A batch of the user's own class."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def to(self, device):
        return Rows(self.x.to(device))


def with_momentum(model):
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True)


def words(size):
    return torch.randint(0, 50, (size, 32))


def of_block(*args, **options):
    return functools.partial(Model, functools.partial(*args, **options))


def compiled():
    return torch.compile(Model(), backend="aot_eager")


def compiled_blocks():
    model = Model()
    for block in model.layers:
        block.compile(backend="aot_eager")
    return model


class GrowsList(nn.Module):
    """Appends to the list that it gets, where torch's SAC raises."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, before):
        before.append(self.layers(torch.cat(before, -1)))
        return before


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(GrowsList(WIDTH * (depth + 1)) for depth in range(3))

    def forward(self, x):
        outputs = [x]
        for block in self.blocks:
            outputs = block(outputs)
        return torch.cat(outputs, -1)


class SharesWeight(Model):
    """Shares a weight among blocks under autocast, which casts it once for all."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.up.weight = self.layers[0].up.weight

    def run(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.layers(x).float()


class Part(nn.Module):
    """Has parameters that are frozen or not used, and returns a dict."""

    def __init__(self):
        super().__init__()
        self.first, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        return {"hidden": F.relu(self.frozen(F.relu(self.first(x)))), "count": len(x)}


class Parts(Model):
    def __init__(self):
        super().__init__(Part)

    def run(self, x):
        for layer in self.layers:
            x = layer(x)["hidden"]
        return x


class Scale(nn.Module):
    """Has no matrix product, and so no FLOPs to count."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return torch.sigmoid(x * self.scale)


def word_model(*, is_tied=False):
    """Return a model whose head is tied to its embedding or has a bias."""
    table = nn.Embedding(256, WIDTH)
    head = nn.Linear(WIDTH, 256, bias=not is_tied)
    if is_tied:
        head.weight = table.weight
    return nn.Sequential(OrderedDict(table=table, norm=nn.LayerNorm(WIDTH), head=head))


def texts(size):
    return torch.randint(256, (size, 32))


def next_words(model, tokens, **options):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), **options) * len(tokens)


def weighted(model, tokens):
    losses = next_words(model, tokens, reduction="none")
    return (losses * torch.linspace(0.5, 1.5, losses.numel())).sum()


def penalized(model, tokens):
    loss = next_words(model, tokens)
    (gradient,) = torch.autograd.grad(loss, model.table.weight, create_graph=True)
    return loss + gradient.square().sum()


def lazy_block():
    """Return a block that gets its widths in the first forward."""
    return nn.Sequential(nn.LazyLinear(4 * WIDTH), nn.GELU(), nn.LazyLinear(WIDTH))


class Frozen(Model):
    """Runs its blocks in eval mode."""

    def run(self, x):
        return self.layers.eval()(x)


class OtherBlock(Block):
    """Repeats the block as another kind of one."""


class PartlyUnused(Frozen):
    """Has blocks of another kind that never run."""

    def __init__(self):
        super().__init__()
        self.unused = nn.ModuleList(OtherBlock() for _ in range(3))


class Quantized(Model):
    """Rounds what its encoder returns, so that no gradient comes back."""

    def __init__(self):
        super().__init__()
        self.decoder = stacked(Block, 3)

    def run(self, x):
        return self.decoder(self.layers(x).detach().round())


def in_place():
    """Return a block that writes to its own input."""
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))


def overwrites():
    """Return a block that writes to the output of its product, and has buffers."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.BatchNorm1d(32))


def ragged(size):
    return torch.nested.nested_tensor(
        [torch.randn(3 + row % 2, WIDTH) for row in range(size)], layout=torch.jagged
    )


MODELS = {
    "calls_forward": CallsForward,
    "checkpoints_all": CheckpointsAll,
    "checkpoints_segments": CheckpointsSegments,
    "drops_layers": DropsLayers,
    "keeps_in_closure": of_block(KeepsInClosure),
    "raises_in_eval": RaisesInEval,
    "communicates": Communicates,
    "masks_in_training": MasksInTraining,
    "scales": Scales,
    "counts_in_buffer": of_block(Counts, torch.tensor(0)),
    "counted_in_buffer": of_block(Counts, torch.tensor(0), share=0.1),
    "counted_in_python": of_block(Counts, 0, share=0.1),
    "skips": of_block(Skips),
    "own_generator": of_block(OwnGenerator),
    "spectral": of_block(Spectral),
    "differentiates": of_block(Differentiates),
    "scripted": lambda: Model(lambda: torch.jit.script(Block())),
    "data_parallel": lambda: nn.DataParallel(Model()),
    "compiled": compiled,
    "compiled_blocks": compiled_blocks,
    "grows_a_list": Dense,
    "normalized": of_block(lambda: nn.Sequential(nn.BatchNorm1d(32), Block())),
    "shares_a_weight": SharesWeight,
    "partly_frozen": Parts,
    "lone_layers": of_block(nn.Linear, WIDTH, WIDTH),
    "no_products": lambda: stacked(Scale, 3),
    "flat": lambda: nn.Linear(WIDTH, WIDTH),
    "lazy": of_block(lazy_block),
    "frozen": Frozen,
    "partly_unused": PartlyUnused,
    "quantized": Quantized,
    "opens_in_place": of_block(in_place),
    "overwrites": of_block(overwrites),
}
CONSTRUCTS = {name: [build] for name, build in MODELS.items()} | {
    "keeps_last": [KeepsLast, lambda model, x: square_sum(model, x) + model.last.abs().sum()],
    "derivative_in_loss": [Model, with_derivative],
    "noisy_loss": [Model, noisy],
    "own_batch": [
        Model,
        lambda model, batch: square_sum(model, batch.x),
        lambda size: Rows(rows(size)),
        {"count": len},
    ],
    "own_optimizer": [Model, square_sum, rows, {"optimizer": with_momentum}],
    "sparse": [
        lambda: nn.Sequential(nn.Embedding(50, WIDTH, sparse=True), Model()),
        square_sum,
        words,
    ],
    "tied_words": [functools.partial(word_model, is_tied=True), next_words, texts],
    "weighted_words": [word_model, weighted, texts],
    "penalized_words": [word_model, penalized, texts],
    "ragged": [Model, lambda model, batch: model(batch).values().square().sum(), ragged],
}


def workload(name, build, loss=square_sum, batch=rows, more=None):
    return Workload(name, build, batch, loss, spec=f"{__file__}:{name}", **more or {})


for _name, _parts in CONSTRUCTS.items():
    globals()[_name] = functools.partial(workload, _name, *_parts)
