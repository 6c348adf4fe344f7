"""A small Llama-like causal language model.

It has grouped-query attention with rotary positions, SwiGLU and RMS norms.

Proof: `python -m pytest tests/test_workload.py`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, dim: int, heads: int, kv_heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = dim // heads
        self.dropout = dropout
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q = rotate(q, cosine, sine)
        k = rotate(k, cosine, sine)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=True
        )
        projected: Tensor = self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary position embeddings to the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, dropout: float):
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads, dropout)
        self.feed_forward_norm = nn.RMSNorm(dim)
        self.feed_forward = FeedForward(dim, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cosine, sine))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Transformer(nn.Module):
    """Llama-like causal language model."""

    cosine: Tensor
    sine: Tensor

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        dim: int,
        depth: int,
        heads: int,
        kv_heads: int,
        dropout: float,
        hidden: int | None = None,
    ):
        super().__init__()
        hidden = hidden or 32 * round(dim * 8 / 3 / 32)
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(
            Block(dim, heads, kv_heads, hidden, dropout) for _ in range(depth)
        )
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        half = dim // heads // 2
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine[:length], self.sine[:length])
        return self.head(self.norm(x))
