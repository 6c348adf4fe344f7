"""Small trainings of unusual forms, each of which has to resume to the bit."""

import random

import torch
from torch import nn

from curry_train.workloads.workload import Workload


def layers():
    return [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]


class DrawnLayers(nn.Sequential):
    """Runs each layer or leaves it out, at random."""

    def forward(self, x):
        for layer in self:
            if not self.training or random.random() < 0.5 or layer is self[0]:
                x = layer(x)
        return x


class Rows:
    """A batch of the user's own class."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def to(self, device):
        return Rows(self.x.to(device))


class StatefulLayer(nn.Module):
    """Counts its calls, outside of its state."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls


def squared(module, batch):
    return module(batch).square().sum()


def of_rows(module, batch):
    return squared(module, batch.x)


def with_derivative(module, batch):
    """Penalize the derivative by the input, as physics-informed losses do."""
    x = batch.detach().requires_grad_()
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return squared(module, batch) + slope.square().sum()


def plain():
    return nn.Sequential(*layers())


def with_momentum(module):
    return torch.optim.SGD(module.parameters(), 0.01, momentum=0.9, nesterov=True)


def rows(size):
    return torch.randn(size, 8)


ODD = {
    "drawn layers": lambda: Workload("drawn", lambda: DrawnLayers(*layers()), rows, squared),
    "own batch": lambda: Workload("own", plain, lambda size: Rows(rows(size)), of_rows, len),
    "derivative": lambda: Workload("derivative", plain, rows, with_derivative),
    "own optimizer": lambda: Workload("own", plain, rows, squared, optimizer=with_momentum),
}
