"""Bugs that users of other projects have reported, made again as small loops.

As in `loops.py`, a loop's wrong line is marked with `# here`.
"""

import torch
from torch import nn
from torch.nn import functional as F

from .loops import (
    Language,
    accumulate,
    accumulate_language,
    classifier,
    completions,
    fit,
    fit_language,
    half,
    half_of_tokens,
    of_tokens,
    recompute,
)


def accumulate_completions(loss):
    """Train on windows of four completions of unequal length."""
    accumulate_language(completions((15, 3, 9, 4) * 4), loss=loss, every=4)


def trl_2617():
    """Completions of unequal length, each microbatch with its own mean."""
    accumulate_completions(lambda *one: of_tokens(*one) / 4)  # here: tokens


def trl_6024():
    """A sum over all tokens of the window, divided by the number of microbatches too."""

    def loss(logits, labels):
        losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(0), reduction="none")  # here
        return (losses * (labels != -100)).sum() / (2 * (15 + 3 + 9 + 4)) / 4

    accumulate_completions(loss)


def trl_6700():
    """An optimizer that was made of the trained parameters of a model in which all are frozen."""
    model, adapter = classifier().requires_grad_(False), nn.Linear(5, 5)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}])  # here
    fit(lambda inputs: adapter(model(inputs)), optimizer)


def accelerate_3877():
    """The engine steps at each microbatch, and the loss is divided by the accumulation."""
    fit(loss=lambda logits, labels: F.cross_entropy(logits, labels) / 4)  # here


def accelerate_1970():
    """The loss is divided by the loop and again by the engine."""
    accumulate(loss=lambda logits, labels: half(logits, labels) / 2)  # here: half


def transformers_37766():
    """A loss that ignores the number of items in the window, which its caller no longer divides."""
    accumulate_completions(of_tokens)  # here: tokens


def transformers_42489():
    """Adapters in blocks whose input needs no gradient, under reentrant checkpoints."""
    model = Language().requires_grad_(False)
    adapters = nn.ModuleList(nn.Linear(16, 16) for _ in model.layers)
    nn.init.zeros_(adapters[1].weight)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW([*adapters.parameters(), *model.head.parameters()])

    def adapted(layer, adapter):
        return lambda given: given + layer(given) + adapter(given)

    blocks = [*map(adapted, model.layers, adapters)]
    fit_language(lambda tokens: recompute(model, tokens, blocks), optimizer)  # here: checkpoint


def unsloth_3006():
    """A microbatch without a label that counts: its mean is not a number."""
    accumulate_language(completions((9, 0) * 4), loss=half_of_tokens)  # here: half of tokens


FAULTY = {
    "accumulation": [trl_2617, trl_6024, accelerate_3877, accelerate_1970, transformers_37766],
    "moves": [trl_6700, transformers_42489],
    "sign": [unsloth_3006],
}
