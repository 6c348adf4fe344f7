"""Built-in workloads: MLP, Llama-like transformer, bottleneck ResNet and spiking network.

They fit a laptop, and are built like the models that people train.

Proof: `python -m pytest tests/test_workload.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .adapt import IGNORED, mask_tails, token_loss
from .llama_like import Transformer
from .timesteps import run_timesteps
from .workload import Workload


def mlp(*, depth: int = 6, width: int = 256) -> Workload:
    """Build a classifier of Linear and GELU blocks on one vector per sample."""

    def build() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        return nn.Sequential(*blocks, nn.Linear(width, 10))

    return _classifier("mlp", build, (width,))


def transformer(
    *,
    depth: int = 4,
    dim: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 512,
    length: int = 64,
    dropout: float = 0.0,
    hidden: int | None = None,
) -> Workload:
    """Build a Llama-like transformer for next-token prediction on random tokens."""

    def batch(size: int) -> dict[str, Tensor]:
        tokens = torch.randint(vocabulary, (size, length + 1))
        return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    return Workload(
        name="transformer",
        build=lambda: Transformer(
            vocabulary=vocabulary,
            length=length,
            dim=dim,
            depth=depth,
            heads=heads,
            kv_heads=kv_heads,
            dropout=dropout,
            hidden=hidden,
        ),
        batch=batch,
        loss=lambda module, batch: token_loss(module(batch["tokens"]), batch["targets"]),
        count=lambda batch: int((batch["targets"] != IGNORED).sum()),
        mask=lambda batch: {**batch, "targets": mask_tails(batch["targets"])},
    )


def llama_8b(*, depth: int = 32, length: int = 4096) -> Workload:
    """Build a workload with the shapes of Llama 3 8B, for planning; it fits no laptop."""
    return transformer(
        depth=depth, dim=4096, heads=32, kv_heads=8, vocabulary=128256, length=length, hidden=14336
    )


class Bottleneck(nn.Module):
    """Residual block of 1x1, 3x3 and 1x1 convolutions with BatchNorm."""

    def __init__(self, width: int):
        super().__init__()
        inner = width // 4
        self.residual = nn.Sequential(
            *[nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()],
            *[nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()],
            *[nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)],
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.residual(x))


def resnet(*, depth: int = 6, width: int = 64, size: int = 16) -> Workload:
    """Build a classifier of bottleneck blocks with BatchNorm on small images."""

    def build() -> nn.Module:
        stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        blocks = nn.Sequential(*[Bottleneck(width) for _ in range(depth)])
        return nn.Sequential(
            stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
        )

    return _classifier("resnet", build, (3, size, size))


class Spike(torch.autograd.Function):
    """Step function with the derivative of an arctangent as surrogate gradient."""

    @staticmethod
    def forward(ctx: Any, potential: Tensor) -> Tensor:
        ctx.save_for_backward(potential)
        return (potential > 0).to(potential.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (potential,) = ctx.saved_tensors
        return gradients[0] / (1 + (torch.pi * potential) ** 2)


class SpikingLayer(nn.Module):
    """Linear layer and leaky integrate-and-fire neurons; takes and returns the state."""

    def __init__(self, width: int, decay: float = 0.9, threshold: float = 1.0):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.decay = decay
        self.threshold = threshold

    def forward(self, x: Tensor, potential: Tensor) -> tuple[Tensor, Tensor]:
        potential = self.decay * potential + self.linear(x)
        spikes = Spike.apply(potential - self.threshold)
        return spikes, potential - spikes * self.threshold


class SpikingNetwork(nn.Module):
    """Layers of spiking neurons unrolled over (batch, timesteps, features)."""

    # The loop over timesteps is one method, so that a derived class can replace it.
    unroll = staticmethod(run_timesteps)

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(SpikingLayer(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def initial_state(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.new_zeros(x.shape[0], x.shape[2]) for _ in self.layers)

    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        potentials = []
        for layer, potential in zip(self.layers, state, strict=True):
            x, potential = layer(x, potential)
            potentials.append(potential)
        return x, tuple(potentials)

    def forward(self, x: Tensor) -> Tensor:
        rate, _ = self.unroll(self.step, x, self.initial_state(x), time_dim=1, outputs="mean")
        return self.head(rate)


def snn(*, depth: int = 3, width: int = 64, timesteps: int = 16) -> Workload:
    """Build a classifier with a spiking network over a short sequence."""
    return _classifier("snn", lambda: SpikingNetwork(width, depth), (timesteps, width))


def snn_long() -> Workload:
    """Build the spiking network over 1,000 timesteps, where activations dominate memory."""
    return replace(snn(timesteps=1000), name="snn_long")


def _classifier(name: str, build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Workload:
    return Workload(
        name=name,
        build=build,
        batch=lambda size: (torch.randn(size, *shape), torch.randint(10, (size,))),
        loss=lambda module, batch: F.cross_entropy(
            module(batch[0]).float(), batch[1], reduction="sum"
        ),
    )


BUILTIN: dict[str, Callable[[], Workload]] = {
    "mlp": mlp,
    "transformer": transformer,
    "resnet": resnet,
    "snn": snn,
}
