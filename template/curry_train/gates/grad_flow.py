"""Gates of grad-flow: exact figures, on two ranks too, and no side effects.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..core.generators import seeded
from ..core.measure import tensors_in
from ..core.parity import GRADIENT_TOLERANCES, StepRecord, compare, record
from ..primitives.grad_flow import GradFlow, LayerFlow, Update, ValueSpread
from ..primitives.grad_flow_probe import choose_layers
from ..workloads.workload import Case
from .two_ranks import (
    Found,
    Wrapped,
    compare_on_ranks,
    differing,
    load_function,
    under_both,
)
from .verdict import Gate, NotApplicable, Outcome
from .windows_by_hand import check_repeats

FlowProbe = Callable[..., Any]
NORM_TOLERANCE = 1e-9  # both sums are float64, in different orders


def _train(
    case: Case,
    probe: FlowProbe | None = None,
    *,
    num_steps: int = 1,
) -> tuple[Any, StepRecord]:
    """Train steps of two microbatches with clipping; return the probe, and the last step.

    The buffers of the step have the weights after it too.

    The gradients to report are then those of the last backward, before clipping.
    """
    module = _build(case)
    batch = case.batch()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    with seeded(case.seed):
        with probe(module, optimizer, every=1) if probe else nullcontext() as flow:
            for _ in range(num_steps):
                optimizer.zero_grad()
                for _ in range(2):
                    loss = case.workload.mean_loss(module, batch)
                    loss.backward()
                nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
                optimizer.step()
        step = record(module, loss.detach())
        weights = {name: one.detach().clone() for name, one in module.named_parameters()}
        return flow, replace(step, buffers={**step.buffers, **weights})


def _build(case: Case) -> nn.Module:
    """Build the model; raise `NotApplicable` if it can't be probed, such as `DataParallel`."""
    module = case.build()
    try:
        GradFlow(module)
    except ValueError as error:
        raise NotApplicable(str(error)) from error
    return module


def expected_figures(layers: Mapping[str, LayerFlow]) -> dict[str, dict[str, float]]:
    """Return the figures of a step by kind and layer."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for name, layer in layers.items():
        for kind, spread in (("outputs", layer.activation), ("gradients", layer.gradient)):
            if spread is not None:
                found[kind][name] = spread.elements
                found[f"zero {kind}"][name] = spread.zeros
                found[f"nonfinite {kind}"][name] = spread.nonfinite
                found[f"norm of {kind}"][name] = spread.norm
        if layer.update is not None:
            found["norm of weights"][name] = layer.update.weight_norm
            found["norm of updates"][name] = layer.update.distance
    return found


def wrong_figures(
    found: Mapping[str, Mapping[str, float]],
    expected: Mapping[str, Mapping[str, float]],
    *,
    tolerance: float,
    of_largest: bool,
) -> list[str]:
    """Name the figures that differ: counts at all, norms by more than the tolerance.

    It is relative to the norm itself, or with `of_largest` to the largest one of its kind: the
    gradient of a bias before a norm, for one, is rounding alone.
    """
    wrong = []
    for kind, figures in expected.items():
        largest = max(filter(math.isfinite, figures.values()), default=0.0)
        theirs = found.get(kind, {})
        for name in {**figures, **theirs}:
            value, wanted = (float(one.get(name, -1)) for one in (theirs, figures))
            size = largest if of_largest else wanted
            bound = tolerance * size if "norm" in kind else 0.0
            if str(value) != str(wanted) and not abs(value - wanted) <= bound:
                wrong.append(f"{kind} of {name}")
    return wrong


def _joined(weights: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([weights[name] for name in names] or [torch.zeros(0)])


def exact(case: Case) -> Outcome:
    """Compare every figure of one step with autograd's tensors, counted by hand."""
    by_hand, _ = _train(case, _ByHand)
    expected = expected_figures(by_hand.layer_flows())
    flow, _ = _train(case, GradFlow)
    found = expected_figures(flow.records[0].layers) if flow.records else {}
    wrong = wrong_figures(found, expected, tolerance=NORM_TOLERANCE, of_largest=False)
    num_figures = sum(map(len, expected.values()))
    measured = f"{len(wrong)} of {num_figures} figures wrong in {len(flow.records)} steps"
    if wrong:
        measured += f", the first {wrong[0]}"
    required = f"0: counts equal, norms within {NORM_TOLERANCE:.0e}"
    hint = ""
    if wrong or len(flow.records) != 1:
        hint = (
            "a call is left out or counted twice, or the gradients are not those of the last "
            "backward"
        )
    return measured, required, hint


class _ByHand(nullcontext[Any]):
    """Reference figures: hold every output and gradient, and count at the end."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, every: int) -> None:
        super().__init__(self)
        self.layers = choose_layers(module)
        self.outputs: dict[str, list[Tensor]] = defaultdict(list)
        self.gradients: dict[str, Tensor] = {}
        self.weights: list[dict[str, Tensor]] = []
        # They hold this object in C++, where no garbage collector looks.
        self._hooks: list[RemovableHandle] = []
        for layer in self.layers:
            layer.module.register_forward_hook(partial(self._keep_output, layer.name))
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                keep = partial(self._keep_gradient, name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(keep))
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda *_: self._keep_weights(module))

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep_output(self, name: str, layer: nn.Module, arguments: Any, output: Any) -> None:
        self.outputs[name] += [
            _values(one)
            for one in tensors_in(output)
            if one.is_floating_point() or one.is_complex()
        ]

    def _keep_gradient(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.gradients[name] = _values(parameter.grad)

    def _keep_weights(self, module: nn.Module) -> None:
        self.weights.append({name: _values(one) for name, one in module.named_parameters()})

    def layer_flows(self) -> dict[str, LayerFlow]:
        before, after = self.weights
        found = {}
        for layer in self.layers:
            outputs = self.outputs[layer.name]
            gradients = [
                self.gradients[name] for name in layer.parameters if name in self.gradients
            ]
            old, new = (_joined(weights, layer.parameters) for weights in (before, after))
            update = Update(old.norm().item(), (new - old).norm().item())
            found[layer.name] = LayerFlow(
                _spread(outputs), len(outputs), _spread(gradients), update if len(old) else None
            )
        return found


def _values(tensor: Tensor) -> Tensor:
    """Copy a tensor in float64; a complex number is its real and its imaginary part."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().double().flatten().clone()


def _spread(tensors: Sequence[Tensor]) -> ValueSpread | None:
    if not tensors:
        return None
    values = torch.cat([*tensors])
    num_zeros, num_nonfinite = int((values == 0).sum()), int((~values.isfinite()).sum())
    return ValueSpread(values.numel(), num_zeros, num_nonfinite, values.square().sum().item())


def flow_same_training(case: Case) -> Outcome:
    """Compare loss, gradients, buffers, generators and weights with and without the probe."""
    required = "bit-equal, 2 steps probed"
    (_, plain), (_, again), (flow, probed) = (
        _train(case, one, num_steps=2) for one in (None, None, GradFlow)
    )
    if not compare(plain, again).bit_equal:
        raise NotApplicable("the plain step does not repeat bit for bit")

    found = compare(plain, probed)
    num_records = len(flow.records)
    held = found.holds and num_records == 2
    measured = f"{found.describe()}; {num_records} steps probed"
    hint = (
        "use no_grad, draw no random numbers, and write to no tensor of a step; or nothing was "
        "probed"
    )
    return measured, required, "" if held else hint


# Two ranks.


def flow_of_both(case: Case, *, probe: str = f"{GradFlow.__module__}:GradFlow") -> Outcome:
    """Probe a step of two ranks; its figures are those of both batches on one process."""
    # These raise here, and not in the other processes.
    _halves(case)
    check_repeats(case, _build(case).eval(), seed=case.seed)
    return compare_on_ranks(
        f"{__name__}:_compare_on_rank",
        case,
        required=f"all within {GRADIENT_TOLERANCES[case.dtype]:.0e} of the figures of one process",
        hint="add up activations over the ranks of the batch, and sharded tensors over the shards",
        probe=probe,
    )


def _compare_on_rank(case: Case, probe: str) -> Found:
    """Compare the figures of one step on this rank with those of both batches on one process."""
    # A loss may take derivatives of the model, also where only its forward is looked at.
    loss = torch.enable_grad()(case.workload.loss)
    case = replace(case, workload=replace(case.workload, loss=loss))
    batches = _halves(case)
    expected = _step_figures(case, case.build().eval(), batches, GradFlow)
    # Rounding decides which gradients are exactly 0.
    del expected["zero gradients"]
    tolerance = GRADIENT_TOLERANCES[case.dtype]

    def measure(wrapped: Wrapped, kind: str) -> dict[str, Any]:
        found = _step_figures(case, wrapped(), [batches[dist.get_rank()]], load_function(probe))
        wrong = wrong_figures(found, expected, tolerance=tolerance, of_largest=True)
        return differing(sum(map(len, expected.values())), "figures", wrong)

    # An expert may be used by the batch of one rank alone.
    return under_both(case, batches[0], measure, unused=True)


def _halves(case: Case) -> list[Any]:
    return case.split(case.batch(2 * case.batch_size), [case.batch_size] * 2)


def _step_figures(
    case: Case, model: nn.Module, batches: Sequence[Any], probe: FlowProbe
) -> dict[str, dict[str, float]]:
    """Return each figure of a step by layer; the gradients are the mean of those of the batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probe(model, optimizer, every=1) as flow:
        for batch in batches:
            with seeded(case.seed):  # some models drop blocks in eval mode too
                (case.workload.mean_loss(model, batch) / len(batches)).backward()
        optimizer.step()
    return expected_figures(flow.records[0].layers)


GATES = (
    Gate("grad-flow/exact", exact),
    Gate("grad-flow/same-training", flow_same_training),
    Gate("grad-flow/two-ranks", flow_of_both, on_ranks=True),
)
