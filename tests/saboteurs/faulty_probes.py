"""Faults of the probe of gradients: what it counts, changes, and holds.

Proof: `python -m pytest tests/gates/test_grad_flow.py`.
"""

import contextlib

import pytest
import torch
from saboteurs import planted

from curry_train.primitives import grad_flow_probe
from curry_train.primitives.grad_flow import GradFlow
from curry_train.primitives.grad_flow_report import flow_findings, flow_table


class NoOp(GradFlow):
    """A probe that reads nothing."""

    def __enter__(self):
        super().__enter__()
        self._probed.close()
        self._probing = False
        return self


@contextlib.contextmanager
def changed(owner, **names):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setattr(owner, name, value)
        yield


def sabotaged(owner, **names):
    """Build a probe that replaces attributes of `owner` while its context is open."""

    class Sabotaged(GradFlow):
        def __enter__(self):
            self.sabotage = contextlib.ExitStack()
            self.sabotage.enter_context(changed(owner, **names))
            return super().__enter__()

        def __exit__(self, *raised):
            self.sabotage.close()
            return super().__exit__(*raised)

    return Sabotaged


class AfterClipping(GradFlow):
    """A probe that reads gradients at the optimizer step, after clipping."""

    def _backward_ended(self):
        pass


class FirstMicrobatch(GradFlow):
    """A probe that reads the gradients of the first backward of a window."""

    def _backward_ended(self):
        if not self._read_at:
            super()._backward_ended()


class Averaged(GradFlow):
    """A probe that counts only the last call of a layer."""

    def __enter__(self):
        super().__enter__()
        add = self._activations._add

        def last_only(index, arguments, output):
            for sums in self._activations._sums.values():
                sums[index].zero_()
            add(index, arguments, output)

        self._probed.close()
        self._activations._add = last_only
        self._begin()
        return self


class OffIsFilterless(GradFlow):
    """A probe whose `off` counts recomputed forwards, because recompute is not turned off."""

    def __init__(self, *arguments, recompute="filter", **options):
        super().__init__(*arguments, **options)
        self.passes_over = recompute == "filter"

    def __enter__(self):
        self.sabotage = contextlib.ExitStack()
        if not self.passes_over:
            self.sabotage.enter_context(changed(grad_flow_probe, in_backward=lambda: False))
        return super().__enter__()

    def __exit__(self, *raised):
        self.sabotage.close()
        return super().__exit__(*raised)


class Draws(GradFlow):
    """A probe that draws random numbers, as one that samples elements would."""

    def _read(self, where, scale):
        torch.rand(3)
        super()._read(where, scale)


class CleansGradients(GradFlow):
    """A probe that changes the gradients that it reads, as one that cleans them would."""

    def _read(self, where, scale):
        super()._read(where, scale)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 - 1e-7)


class WritesOutputs(GradFlow):
    """A probe that changes the activation that it reads."""

    def __enter__(self):
        super().__enter__()
        add = self._activations._add
        last = len(self._layers) - 1

        def doubles(index, arguments, output):
            add(index, arguments, output)
            if index == last:
                output.data.mul_(2)

        self._probed.close()
        self._activations._add = doubles
        self._begin()
        return self


class KeepsOutputs(GradFlow):
    """A probe that collects activations and counts them at the end."""

    def __enter__(self):
        super().__enter__()
        self.outputs = []
        add = self._activations._add

        def keeps(index, arguments, output):
            add(index, arguments, output)
            self.outputs.append(output)

        self._probed.close()
        self._activations._add = keeps
        self._begin()
        return self


def with_ones(tensor):
    return tensor + torch.ones_like(tensor)


class KeepsCopies(KeepsOutputs):
    """A probe that collects copies of the outputs, without their graph."""

    def __enter__(self):
        super().__enter__()
        keeps = self._activations._add
        self._probed.close()
        self._activations._add = lambda index, arguments, output: keeps(
            index, arguments, with_ones(output.detach())
        )
        self._begin()
        return self


COUNTS_ALL = sabotaged(grad_flow_probe, in_backward=lambda: False)


def norms_in_half(tensor):
    sums = torch.zeros(4, dtype=torch.float64)
    norm = tensor.detach().to(torch.bfloat16).norm().double()
    sums[0] = tensor.numel()
    sums[3] = norm.square()
    return sums


IN_HALF = sabotaged(grad_flow_probe, sums_of=norms_in_half)


def last_step_alone(records):
    return flow_findings(records[-1:])


def none_dead(records):
    return [one for one in flow_findings(records) if one.kind != "dead"]


def with_rounded_shares(records, *, most=24):
    return flow_table(records, most=most).replace("under 0.1%", "0.0%")


def first_layers_alone(records, *, most=24):
    return flow_table(records, most=most).replace("layers.2.0", "layers.1.0")


class EveryLayer(GradFlow):
    """Probes all layers, whatever was chosen."""

    def __init__(self, model, optimizer=None, *, layers=None, **options):
        super().__init__(model, optimizer, **options)


class EveryStep(GradFlow):
    """Probes each step, whatever was chosen."""

    def __init__(self, model, optimizer=None, *, every=1, **options):
        super().__init__(model, optimizer, **options | {"every": 1})


FAULTS = [
    planted("grad-flow.layers", "every-layer", probe=EveryLayer, hint="the layers first"),
    planted("grad-flow.steps", "every-step", probe=EveryStep, hint="the steps with every=2"),
    planted("grad-flow.findings", "last-step", judge=last_step_alone, hint="an infinite output"),
    planted("grad-flow.findings", "none-dead", judge=none_dead, hint="an output of 0"),
    planted("grad-flow.report", "rounded-share", table=with_rounded_shares, hint="reported as"),
    planted("grad-flow.report", "first-layers", table=first_layers_alone, hint="table"),
    planted("grad-flow.exact", "no-op", probe=NoOp, hint="left out or counted twice"),
    planted(
        "grad-flow.exact", "after-clipping", probe=AfterClipping, hint="the gradients are not those"
    ),
    planted(
        "grad-flow.exact",
        "first-microbatch",
        probe=FirstMicrobatch,
        hint="the gradients are not those",
    ),
    planted("grad-flow.exact", "averaged", probe=Averaged, hint="left out or counted twice"),
    planted("grad-flow.exact", "in-half", probe=IN_HALF, hint="left out or counted twice"),
    planted("grad-flow.counted-once", "no-op", probe=NoOp, hint="skip forwards"),
    planted("grad-flow.counted-once", "counts-all", probe=COUNTS_ALL, hint="skip forwards"),
    planted(
        "grad-flow.counted-once", "off-without-filter", probe=OffIsFilterless, hint="skip forwards"
    ),
    planted("grad-flow.same-training", "no-op", probe=NoOp, hint="nothing was probed"),
    planted("grad-flow.same-training", "draws", probe=Draws, hint="draw no random numbers"),
    planted(
        "grad-flow.same-training",
        "cleans-gradients",
        probe=CleansGradients,
        hint="write to no tensor",
    ),
    planted(
        "grad-flow.same-training", "writes-outputs", probe=WritesOutputs, hint="write to no tensor"
    ),
    planted("grad-flow.held-bytes", "no-op", probe=NoOp, hint="no call was counted"),
    planted(
        "grad-flow.held-bytes",
        "keeps-outputs",
        probe=KeepsOutputs,
        hint="keep sums and no activation",
    ),
    planted(
        "grad-flow.held-bytes",
        "keeps-copies",
        probe=KeepsCopies,
        hint="keep sums and no activation",
    ),
]
