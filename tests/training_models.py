"""Runs, and the models and data that the tests of training name, as `training_models:tiny`."""

import torch
from torch import nn

from curry_train.cli.train import open_named_run
from curry_train.config import load_config
from curry_train.workloads.models import transformer


def opened(runs, *words, resume=None):
    """Open a run on the CPU, with the configuration that the words give."""
    return open_named_run(load_config(None, [f"runs={runs}", "device=cpu", *words]), resume=resume)


def tiny(**options):
    """A language model that takes milliseconds."""
    sizes = {"depth": 2, "dim": 32, "heads": 2, "kv_heads": 2, "vocabulary": 256, "length": 16}
    return transformer(**sizes | options)


def with_dropout():
    return tiny(dropout=0.1)


def few_tokens():
    """Knows less than a byte."""
    return tiny(vocabulary=100)


class Points(torch.utils.data.Dataset):
    """A map-style dataset: points and the halves of the plane they are in."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        point = torch.tensor([(index % 20) / 10 - 1, (index // 20) / 5 - 1])
        return point, (point.sum() > 0).long()


def points():
    return Points()


class HalfLearned(Points):
    """Random tokens, of which about half are learned."""

    def __getitem__(self, index):
        tokens = torch.randint(256, (17,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens[:-1], "targets": tokens[1:].where(tokens[1:] > 127, -100)}


def half_learned():
    return HalfLearned()


def line():
    """Build a classifier of points; its loss is not its output, so it is a Workload."""
    from curry_train.workloads.workload import Workload

    return Workload(
        name="line",
        build=lambda: nn.Linear(2, 2),
        batch=lambda size: (torch.randn(size, 2), torch.randint(2, (size,))),
        loss=lambda module, batch: nn.functional.cross_entropy(
            module(batch[0]), batch[1], reduction="sum"
        ),
    )
