"""Faults of the probe of gradients: what it counts, changes, and holds.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import torch
from saboteurs import planted

from curry_train.gates import grad_flow
from curry_train.primitives import grad_flow_probe
from curry_train.primitives.grad_flow import GradFlow


class NoOp(GradFlow):
    """A probe that reads nothing."""

    def __enter__(self):
        super().__enter__()
        self._probed.close()
        self._probing = False
        return self


class AfterClipping(GradFlow):
    """A probe that reads gradients at the optimizer step, after clipping."""

    def _backward_ended(self):
        pass


class Draws(GradFlow):
    """A probe that draws random numbers, as one that samples elements would."""

    def _read(self, where, scale):
        torch.rand(3)
        super()._read(where, scale)


class AtEachOutput(GradFlow):
    """A probe that does more at each output of a layer."""

    def __enter__(self):
        super().__enter__()
        add = self._activations._add

        def add_more(name, arguments, output):
            self.before(name)
            add(name, arguments, output)
            self.after(name, output)

        self._probed.close()
        self._activations._add = add_more
        self._begin()
        return self

    def before(self, name):
        pass

    def after(self, name, output):
        pass


class Averaged(AtEachOutput):
    """A probe that counts only the last call of a layer."""

    def before(self, name):
        self._activations.sums.row(name).zero_()


class WritesOutputs(AtEachOutput):
    """A probe that changes the last activation, which it has read."""

    def after(self, name, output):
        if name == self._layers[-1].name:
            output.data.mul_(2)


def norms_in_half(tensor):
    norm = tensor.detach().to(torch.bfloat16).norm().double()
    return torch.tensor([tensor.numel(), 0.0, 0.0, norm.square()], dtype=torch.float64)


def fault(claim, name, hint, probe=None, patches=()):
    patches = [(grad_flow, "GradFlow", probe)] if probe else patches
    return planted(f"grad-flow.{claim}", name, patches=patches, hint=hint)


IN_HALF = [(grad_flow_probe, "sums_of", norms_in_half)]
TWICE = "left out or counted twice"

FAULTS = [
    fault("exact", "no-op", TWICE, NoOp),
    fault("exact", "after-clipping", "the gradients are not", AfterClipping),
    fault("exact", "averaged", TWICE, Averaged),
    fault("exact", "in-half", TWICE, patches=IN_HALF),
    fault("same-training", "no-op", "nothing was probed", NoOp),
    fault("same-training", "draws", "draw no random numbers", Draws),
    fault("same-training", "writes", "write to no tensor", WritesOutputs),
]
