"""The model: a small decoder that predicts the next byte of text. Change it as you like.

`build` makes it, `summed_loss` and `num_tokens` are its loss, and `example` gives the commands of
curry-train a model and a batch: `curry-train plan --model model.py:example --budget 16MiB`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # every byte is a token
LENGTH = 64  # tokens of a sample
IGNORED = -100  # the target of padding, which does not count in the loss


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(out.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One layer: attention, then two matrices, each added to its normalized input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = nn.RMSNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Decoder(nn.Module):
    """A decoder-only transformer with learned positions."""

    def __init__(self, *, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits, or the mean loss where targets are given."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build() -> nn.Module:
    """Build the model with random weights."""
    return Decoder(width=128, layers=4, heads=4, dropout=0.1)


def summed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss summed over the tokens of a batch; the loop divides by their number."""
    logits = model(batch["tokens"])
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        batch["targets"].flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


def num_tokens(batch: dict[str, Tensor]) -> int:
    """Return how many tokens of a batch count in the loss."""
    return int((batch["targets"] != IGNORED).sum())


def example() -> tuple[nn.Module, dict[str, Any]]:
    """Return a model and a batch of 16 samples, for the commands of curry-train."""
    tokens = torch.randint(VOCABULARY, (16, LENGTH + 1))
    return build(), {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
