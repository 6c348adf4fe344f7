"""The table of behaviours that users of torch's checkpoint rely on, for each lever.

A behaviour is a function that gets `change`, which applies a lever to the blocks of a model in
place, and fails if training with it is not the plain training. Each cell of the table is one of:
it holds, it is refused with a message of ours, or it is torch's own limit: then torch's own form
of the lever fails the same behaviour. `step` and `trains` register one from a step or a block.

python -m pytest tests/peers
"""

import copy
import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from curry_train.primitives import (
    apply_regions,
    apply_sac,
    offload_blocks,
    recompute_blocks,
    recompute_segments,
)

from ..toy_steps import drawn

# The levers, and what torch itself has for each.

BLOCKS = "layers.*"
LEVERS = {
    "recompute": lambda model: recompute_blocks(model, blocks=BLOCKS),
    "sac": lambda model: apply_sac(model, "save_matmuls", blocks=BLOCKS),
    "segments": lambda model: recompute_segments(model, 2, blocks=BLOCKS),
    "regions": lambda model: apply_regions(model, blocks=BLOCKS),
    "offload": lambda model: offload_blocks(model, blocks=BLOCKS, min_bytes=0, keep_last=0),
}
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def around_layers(model, around, **options):
    """Run each layer through a function, which gets its forward and its arguments."""
    for layer in model.layers:
        layer.forward = functools.partial(around, layer.forward, **options)


def torch_checkpoints(model, **options):
    around_layers(model, checkpoint, use_reentrant=False, **options)


def torch_saves_products(model):
    torch_checkpoints(
        model, context_fn=functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
    )


class CheckpointedPair(nn.Module):
    """Two blocks that torch recomputes together."""

    def __init__(self, first, second):
        super().__init__()
        self.first = first
        self.second = second

    def run(self, x, *args, **kwargs):
        output = self.first(x, *args, **kwargs)
        return self.second(output[0] if isinstance(output, tuple) else output, *args, **kwargs)

    def forward(self, *args, **kwargs):
        return checkpoint(self.run, *args, use_reentrant=False, **kwargs)


def torch_checkpoints_pairs(model):
    """Recompute the first two of four blocks as one, as two segments do."""
    first, second, *others = model.layers
    model.layers = nn.ModuleList([CheckpointedPair(first, second), *others])


def saved_on_cpu(forward, *args, **kwargs):
    with torch.autograd.graph.save_on_cpu():
        return forward(*args, **kwargs)


def torch_saves_on_cpu(model):
    around_layers(model, saved_on_cpu)


TORCHS_OWN = {
    "recompute": torch_checkpoints,
    "sac": torch_saves_products,
    "segments": torch_checkpoints_pairs,
    "regions": torch_saves_on_cpu,
    "offload": torch_saves_on_cpu,
}

# The table.


@dataclass(frozen=True)
class Outcome:
    """The result of a behaviour under a lever; `words` are a part of the error where it fails."""

    kind: str
    words: str = ""


HOLDS = Outcome("holds")


def refused(words):
    """Our own error, before anything is wrong."""
    return Outcome("refused", words)


def limit(words):
    """Torch's own form of the lever fails with these words too."""
    return Outcome("torch's own limit", words)


@dataclass(frozen=True)
class Behaviour:
    name: str
    # Gets `change`, which applies a lever to the blocks of a model.
    run: object
    # By lever; `torch` is `torch.utils.checkpoint.checkpoint` around each block.
    outcomes: dict
    # Runs on two ranks, in one start for all levers.
    on_ranks: bool = False


BEHAVIOURS = []


def recomputing(outcome):
    """Return the cells of the levers that run a block again, of torch too."""
    return dict.fromkeys(("recompute", "sac", "segments", "torch"), outcome)


def behaviour(name, *, every=HOLDS, torch=HOLDS, on_ranks=False, **outcomes):
    """Register a behaviour that holds under each lever that is not named."""

    def register(run):
        cells = {**dict.fromkeys(LEVERS, every), **outcomes, "torch": torch}
        BEHAVIOURS.append(Behaviour(name, run, cells, on_ranks))
        return run

    return register


ERRORS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def error_of(behaviour, change):
    """Return the error that a behaviour fails with, or None."""
    try:
        behaviour.run(change)
    except ERRORS as error:
        return error
    return None


# A model, and steps of it that are compared.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 8)
        self.add()

    def add(self):
        """Add what a block of another class has."""

    def inner(self, x):
        return self.last(nn.functional.gelu(self.first(self.norm(x))))

    def forward(self, x):
        return x + self.inner(x)


class Chain(nn.Module):
    def __init__(self, block=Block, depth=4):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x, *args, **kwargs):
        output = self.embed(x)
        for layer in self.layers:
            output = layer(output[0] if isinstance(output, tuple) else output, *args, **kwargs)
        return output


def blocks_of(model):
    return [module for module in model.modules() if isinstance(module, Block)]


X = drawn(4, 8)


def loss_of(output):
    tensor = output[0] if isinstance(output, tuple) else output
    return tensor.square().sum()


def gradients(model):
    return [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]


def backward(model, output):
    """Run backward from an output, and return the gradients."""
    loss_of(output).backward()
    return gradients(model)


def train(model, *args, **kwargs):
    """Run one step, and return the loss, all gradients and all buffers."""
    model.zero_grad()
    loss = loss_of(model(X, *args, **kwargs))
    loss.backward()
    return [loss.detach(), gradients(model), [buffer.clone() for buffer in model.buffers()]]


def same(one, other):
    """Compare nested values bit by bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def pair(change, block=Block, depth=4):
    """Return the plain model and a copy that is changed."""
    plain = Chain(block, depth)
    changed = copy.deepcopy(plain)
    change(changed)
    return plain, changed


def require_same(change, step=train, block=Block):
    """Fail unless a step gives the same with and without the lever."""
    found = []
    for model in pair(change, block):
        torch.manual_seed(7)
        found.append(step(model))
    assert same(*found), "the results differ"


def step(name, *, block=Block, **cells):
    """Register a step that must give the same with and without the lever."""

    def register(run):
        behaviour(name, **cells)(functools.partial(require_same, step=run, block=block))
        return run

    return register


def trains_inside(contexts):
    """Register contexts around a step, by the names of the behaviours."""
    for name, context in contexts.items():

        def inside(model, context=context):
            with context():
                return train(model)

        step(name)(inside)


def trains(name, **cells):
    """Register a block whose model must train the same with and without the lever."""

    def register(block):
        behaviour(name, **cells)(functools.partial(require_same, block=block))
        return block

    return register


# The table as a page shows it.

MARKS = {"holds": "yes", "refused": "refused", "torch's own limit": "limit"}
HEADINGS = {**{lever: lever for lever in LEVERS}, "torch": "torch's `checkpoint`"}


def rendered():
    """Format the behaviours that do not hold everywhere, and the number that hold."""
    counts = [sum(one.outcomes[lever] == HOLDS for one in BEHAVIOURS) for lever in HEADINGS]
    lines = [
        f"| | {' | '.join(HEADINGS.values())} |",
        f"|---|{'---|' * len(HEADINGS)}",
        f"| holds, of {len(BEHAVIOURS)} | {' | '.join(map(str, counts))} |",
    ]
    for one in BEHAVIOURS:
        cells = [MARKS[one.outcomes[lever].kind] for lever in LEVERS]
        cells.append("yes" if one.outcomes["torch"] == HOLDS else "no")
        if set(cells) != {"yes"}:
            lines.append(f"| {one.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
