"""Cross-entropy in chunks, so that only one chunk of the logits is allocated at a time.

    # Called from your own training code:
    loss = chunked_cross_entropy(hidden, head.weight, targets)
    # Or without editing the model; the head then returns a stand-in for the logits:
    apply_chunked_loss(model)

`F.cross_entropy` on the stand-in runs in chunks, and so does the loss of Hugging Face models. Any
other operation that reads the logits computes all of them, and `chunked_loss_report` lists those
operations. Gradients are computed in the forward, so no matrix product runs twice.

Proof: `python -m pytest tests/test_chunked_loss.py`.
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

CHUNK_TOKENS = "_chunked_loss"
USE = "_chunked_loss_use"


class ChunkedHead(Derived):
    """A Linear whose training output is computed only when it is read.

    It behaves as the plain Linear in eval mode, without grad mode and while `torch.compile` traces
    it.
    """

    weight: Tensor
    bias: Tensor | None

    def forward(self, hidden: Tensor) -> Any:
        trains = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        inputs = [tensor for tensor in (hidden, self.weight, self.bias) if tensor is not None]
        if not trains or not any(tensor.requires_grad for tensor in inputs):
            return super().forward(hidden)

        use = LossUse()
        self.__dict__[USE] = use
        if any(hasattr(tensor, "full_tensor") for tensor in inputs):
            use.whole.append("a head in shards")
            return super().forward(hidden)
        return stand_in(Product(hidden, self.weight, self.bias, self.__dict__[CHUNK_TOKENS], use))


def apply_chunked_loss(
    model: nn.Module, *, head: str | None = None, chunk_tokens: int | None = None
) -> list[str]:
    """Make the loss of a model's head run in chunks, in place, and return the head's name.

    `head` is a glob over module names and may match several heads. Without it the head is the
    Linear that a Hugging Face model returns as its output embeddings, or else the single widest
    Linear, if it is wider than its input. Without `chunk_tokens` the float32 logits of a chunk take
    about 64 MiB. Call this before DDP, `fully_shard` and `torch.compile`.
    """
    check_chunk_tokens(chunk_tokens)
    found = _find_heads(model, head)
    for module in found.values():
        become(ChunkedHead, module, **{CHUNK_TOKENS: chunk_tokens, USE: LossUse()})
    return list(found)


def remove_chunked_loss(model: nn.Module) -> list[str]:
    """Undo `apply_chunked_loss` and return the names of the heads that were changed."""
    names = list(chunked_loss_report(model))
    for name in names:
        restore(model.get_submodule(name), CHUNK_TOKENS, USE)
    return names


def chunked_loss_report(model: nn.Module) -> dict[str, LossUse]:
    """Report, per changed head, the chunked losses and the operations that read all logits.

    The counts start anew at each forward of the head in training.
    """
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
            f"{type(model).__name__} has no output layer: no Linear is wider than all others "
            "and than its own input; name it with head="
        )
    for name, module in found.items():
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            kind = f"{name or 'the model'} is a {type(module).__name__}"
            if isinstance(module, Derived):
                raise ValueError(
                    f"{kind}, which is changed already; undo that first (remove_chunked_loss)"
                )
            raise ValueError(
                f"{kind}, not a plain nn.Linear, so its loss can't run in chunks; leave it out"
            )
    return found


def _output_embeddings(model: nn.Module) -> dict[str, nn.Module]:
    """Find the head that a Hugging Face model returns from `get_output_embeddings`."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    return {
        name: module
        for name, module in model.named_modules()
        if head is not None and module is head
    }


def _widest(linears: dict[str, nn.Linear]) -> dict[str, nn.Module]:
    """Find the Linear that is wider than all others and than its own input.

    Layers inside blocks repeat with the same width, so none of them is the single widest.
    """
    most = max((linear.out_features for linear in linears.values()), default=0)
    widest = [name for name, linear in linears.items() if linear.out_features == most]
    return {
        name: linears[name]
        for name in widest
        if len(widest) == 1 and most > linears[name].in_features
    }
