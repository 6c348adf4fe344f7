"""Cross-entropy in chunks where logits own the peak: of a language model's head and loss, one chunk exists at a time.

    loss = chunked_cross_entropy(hidden, head.weight, targets)    # in code of one's own
    apply_chunked_loss(model)                                     # without an edit: the head's output stands for logits

`F.cross_entropy` of a changed head's output runs in chunks, as the loss of Hugging Face models does; whatever else
reads the logits gets them whole, and `chunked_loss_report` says what did. Gradients are computed in forward, so no
product runs again. Proof: `python -m pytest tests/test_chunked_loss.py`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..core.blocks import match_names
from ..core.chunked_cross_entropy import check_chunk_tokens, chunked_cross_entropy
from ..core.derive import Derived, become, restore
from ..core.lazy_logits import stand_in
from ..core.logits import LossUse, Product

__all__ = [
    "ChunkedHead",
    "LossUse",
    "apply_chunked_loss",
    "chunked_cross_entropy",
    "chunked_loss_report",
    "remove_chunked_loss",
]

CHUNK_TOKENS, USE = "_chunked_loss", "_chunked_loss_use"


class ChunkedHead(Derived):
    """A Linear whose output, in training, is made when somebody reads it. In eval mode, without grad mode and while
    `torch.compile` traces it, it is the plain Linear."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, hidden: Tensor) -> Any:
        trains = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        inputs = [given for given in (hidden, self.weight, self.bias) if given is not None]
        if not trains or not any(given.requires_grad for given in inputs):
            return super().forward(hidden)
        use = self.__dict__[USE] = LossUse()
        if any(hasattr(given, "full_tensor") for given in inputs):
            use.whole.append("a head in shards")
            return super().forward(hidden)
        return stand_in(Product(hidden, self.weight, self.bias, self.__dict__[CHUNK_TOKENS], use))


def apply_chunked_loss(
    model: nn.Module, *, head: str | None = None, chunk_tokens: int | None = None
) -> list[str]:
    """Let the loss of a model's head run in chunks, in place, and return the head's name.

    The head is the Linear that a Hugging Face model calls its output embeddings, or else the one widest Linear that is
    wider than its input; `head` is a glob over module names that names it, or several. Without `chunk_tokens` the
    float32 logits of a chunk are about 64 MiB. Do this before DDP, `fully_shard` and `torch.compile`.
    """
    check_chunk_tokens(chunk_tokens)
    found = _find_heads(model, head)
    for module in found.values():
        become(ChunkedHead, module, **{CHUNK_TOKENS: chunk_tokens, USE: LossUse()})
    return list(found)


def remove_chunked_loss(model: nn.Module) -> list[str]:
    """Undo `apply_chunked_loss`, and return the names of the heads that were changed."""
    names = list(chunked_loss_report(model))
    for name in names:
        restore(model.get_submodule(name), CHUNK_TOKENS, USE)
    return names


def chunked_loss_report(model: nn.Module) -> dict[str, LossUse]:
    """Of each changed head: the losses since its last forward that ran in chunks, and what asked for all logits."""
    return {
        name: module.__dict__[USE]
        for name, module in model.named_modules()
        if isinstance(module, ChunkedHead)
    }


def _find_heads(model: nn.Module, pattern: str | None) -> dict[str, nn.Module]:
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    found: dict[str, nn.Module]
    if pattern is not None:
        found = {name: linears[name] for name in match_names(list(linears), pattern, option="head")}
    else:
        found = _output_embeddings(model) or _widest(linears)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no output layer: no Linear is wider than all others and than its own input; "
            "name it with head="
        )
    for name, module in found.items():
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            kind = f"{name or 'the model'} is a {type(module).__name__}"
            if isinstance(module, Derived):
                raise ValueError(f"{kind}, changed already; undo that first (remove_chunked_loss)")
            raise ValueError(
                f"{kind} and no plain nn.Linear, so its loss can't run in chunks; leave it whole"
            )
    return found


def _output_embeddings(model: nn.Module) -> dict[str, nn.Module]:
    """What a Hugging Face model names."""
    named = getattr(model, "get_output_embeddings", None)
    head = named() if callable(named) else None
    return {
        name: module
        for name, module in model.named_modules()
        if head is not None and module is head
    }


def _widest(linears: dict[str, nn.Linear]) -> dict[str, nn.Module]:
    """Layers inside blocks are as wide as each other, so that they are never the one widest."""
    most = max((linear.out_features for linear in linears.values()), default=0)
    widest = [name for name, linear in linears.items() if linear.out_features == most]
    return {
        name: linears[name]
        for name in widest
        if len(widest) == 1 and most > linears[name].in_features
    }
