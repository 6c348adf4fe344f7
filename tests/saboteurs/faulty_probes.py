"""Faults of the probe of gradients: what it changes of a training.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import torch

from curry_train.gates import grad_flow
from curry_train.primitives import GradFlow

from .saboteurs import planted


class NoOp(GradFlow):
    """A probe that reads nothing."""

    def __enter__(self):
        super().__enter__()
        self._probed.close()
        self._probing = False
        return self


class Draws(GradFlow):
    """A probe that draws random numbers, as one that samples elements would."""

    def _read_at_the_step(self, scale=None):
        torch.rand(3)
        super()._read_at_the_step(scale)


class WritesOutputs(GradFlow):
    """A probe that changes the last activation, which it has read."""

    def _add(self, name, arguments, output):
        super()._add(name, arguments, output)
        if name == self._layers[-1].name:
            output.data.mul_(2)


def fault(name, hint, probe):
    patches = [(grad_flow, "GradFlow", probe)]
    return planted("grad-flow.same-training", name, patches=patches, hint=hint)


FAULTS = [
    fault("no-op", "nothing was probed", NoOp),
    fault("draws", "draw no random numbers", Draws),
    fault("writes", "write to no tensor", WritesOutputs),
]
