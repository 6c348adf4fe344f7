"""What small training steps share: blocks in a row, numbers that stay the same, and a loss."""

import torch
from torch import nn


def stacked(block, number):
    return nn.Sequential(*(block() for _ in range(number)))


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def square_sum(model, batch):
    return model(batch).square().sum()
