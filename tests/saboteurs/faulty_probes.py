"""Faults of the probe of gradients: what it counts, changes, and holds.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import torch
from saboteurs import planted

from curry_train.primitives import grad_flow_probe
from curry_train.primitives.grad_flow import GradFlow

COUNTS_ALL = [(grad_flow_probe, "in_backward", lambda: False)]


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


class KeepsOutputs(AtEachOutput):
    """A probe that collects activations."""

    def after(self, name, output):
        self.outputs = [*getattr(self, "outputs", []), output]


def norms_in_half(tensor):
    norm = tensor.detach().to(torch.bfloat16).norm().double()
    return torch.tensor([tensor.numel(), 0.0, 0.0, norm.square()], dtype=torch.float64)


IN_HALF = [(grad_flow_probe, "sums_of", norms_in_half)]

FAULTS = [
    planted("grad-flow.exact", "no-op", probe=NoOp, hint="left out or counted twice"),
    planted("grad-flow.exact", "after-clipping", probe=AfterClipping, hint="the gradients are not"),
    planted("grad-flow.exact", "averaged", probe=Averaged, hint="left out or counted twice"),
    planted("grad-flow.exact", "in-half", patches=IN_HALF, hint="left out or counted twice"),
    planted("grad-flow.counted-once", "no-op", probe=NoOp, hint="skip forwards"),
    planted("grad-flow.counted-once", "counts-all", patches=COUNTS_ALL, hint="skip forwards"),
    planted("grad-flow.same-training", "no-op", probe=NoOp, hint="nothing was probed"),
    planted("grad-flow.same-training", "draws", probe=Draws, hint="draw no random numbers"),
    planted("grad-flow.same-training", "writes", probe=WritesOutputs, hint="write to no tensor"),
    planted("grad-flow.held-bytes", "no-op", probe=NoOp, hint="no call was counted"),
    planted(
        "grad-flow.held-bytes", "keeps", probe=KeepsOutputs, hint="keep sums and no activation"
    ),
]
