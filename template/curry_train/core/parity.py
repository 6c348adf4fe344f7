"""Record training steps, compare two records, and name what differs.

Compared are the loss, every gradient, every buffer and the state of every random generator after
the step.

Proof: `python -m pytest tests/core/test_parity.py`.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .generators import generator_states, same_state

# If every weight changed by its own size, the gradient has to change the loss by this share at
# least, and by so many units of rounding. The gradients of constant losses are below that.
LEAST_GRADIENT_EFFECT = 1e-5
GRADIENT_ROUNDING_UNITS = 16

# Relative error that a step with a technique may have where the plain step does not repeat itself.
OUTER_BOUND = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# Relative error of a gradient's norm where only the order of summation differs: a few units of
# rounding. Losses are often computed in float32 in a model of float64.
GRADIENT_TOLERANCES = {
    torch.float32: 1e-6,
    torch.float64: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}


@dataclass(frozen=True)
class StepRecord:
    """Results of one forward and backward: loss, gradients, buffers and generator states."""

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    generators: Mapping[str, Any]

    # The norm of all parameters that are trained, from which the rounding of gradients follows.
    parameter_norm: float = 1.0

    @property
    def gradient_norm(self) -> float:
        present = (one for one in self.gradients.values() if one is not None)
        return math.hypot(*(gradient.norm().item() for gradient in present))


class NothingToCompare(ValueError):
    """Raised for a plain step whose gradients hold nothing that a technique could change."""


@dataclass(frozen=True)
class Difference:
    """One value that differs between two records."""

    # "loss", "gradient", "buffer" or "generator".
    kind: str
    name: str

    # Relative error; infinite if a value is missing, or of another shape or dtype.
    error: float

    def __str__(self) -> str:
        size = "differs in kind" if math.isinf(self.error) else f"{self.error:.1e}"
        return f"{self.kind} {self.name}: {size}"


@dataclass(frozen=True)
class Parity:
    """Result of `compare`."""

    # The largest relative error.
    worst: float

    # Everything above the tolerance.
    differences: tuple[Difference, ...]

    # Parameters that get no gradient in the candidate.
    without_gradient: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.differences

    @property
    def bit_equal(self) -> bool:
        return self.holds and self.worst == 0

    def describe(self, *, most: int = 3) -> str:
        """List the differences, worst first, and the parameters that get no gradient at all."""
        ranked = sorted(self.differences, key=lambda difference: -difference.error)
        lines = [str(difference) for difference in ranked[:most]]
        if len(ranked) > most:
            lines.append(f"{len(ranked) - most} more")
        if self.without_gradient:
            lines.append(f"no gradient: {', '.join(self.without_gradient[:most])}")
        if not lines:
            return "bit-equal" if self.worst == 0 else f"worst {self.worst:.1e}"
        return "; ".join(lines)


def record_step(
    module: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    around_backward: AbstractContextManager[None] | None = None,
) -> StepRecord:
    """Run one forward and backward, starting without gradients, and record the results."""
    for parameter in module.parameters():
        parameter.grad = None
    value = loss(module, batch)

    # A faulty technique may cut off every gradient; they are recorded as None then.
    if value.requires_grad:
        with around_backward or nullcontext():
            value.backward()
    return record(module, value.detach())


def record(module: nn.Module, loss: Tensor) -> StepRecord:
    """Record copies of the current gradients, buffers and generator states."""
    trained = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    return StepRecord(
        loss=loss.clone(),
        gradients={
            name: None if parameter.grad is None else _gather(parameter.grad.detach()).clone()
            for name, parameter in trained.items()
        },
        buffers={name: buffer.detach().clone() for name, buffer in module.named_buffers()},
        generators=generator_states(),
        parameter_norm=math.hypot(
            *(_gather(parameter.detach().norm()).item() for parameter in trained.values())
        ),
    )


def _gather(tensor: Tensor) -> Tensor:
    """Gather the full tensor of one that FSDP2 shards."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_comparable(plain: StepRecord) -> None:
    """Raise `NothingToCompare` if the gradients of a plain step are not finite, or are rounding."""
    loss = plain.loss.item()
    norm = plain.gradient_norm
    if not math.isfinite(norm):
        raise NothingToCompare(
            f"the plain step's gradients are not finite (its loss is {loss:.3g}), so "
            "nothing can be compared: return a Workload with another loss or batch"
        )
    gradients = filter(torch.is_tensor, plain.gradients.values())
    precision = max((torch.finfo(one.dtype).eps for one in gradients), default=1.0)
    effect = norm * (plain.parameter_norm or 1.0)
    least = max(LEAST_GRADIENT_EFFECT, GRADIENT_ROUNDING_UNITS * precision)
    if effect <= least * abs(loss):
        raise NothingToCompare(
            f"the plain step's gradients have a norm of {norm:.1e}, below the rounding of its loss "
            f"({loss:.3g}), so nothing can be compared: return a Workload whose loss "
            "depends on the weights"
        )


def compare(reference: StepRecord, candidate: StepRecord, *, tolerance: float = 0.0) -> Parity:
    """Compare two records; a tolerance of 0 requires equal bits.

    A gradient's error is relative to its own norm or to a hundredth of the norm of all gradients,
    whichever is larger. So rounding in a gradient that is zero in exact arithmetic does not count
    as a difference.

    Where both have as many values, they are compared in order, under the names of the reference:
    wrappers around modules add to the names.
    """
    gradients = _match_wrapped_names(reference.gradients, candidate.gradients)
    floor = 0.01 * reference.gradient_norm
    found = [
        Difference("loss", "value", _relative_error(reference.loss, candidate.loss, floor=0.0))
    ]
    for kind, least, was, now in (
        ("gradient", floor, reference.gradients, gradients),
        (
            "buffer",
            0.0,
            reference.buffers,
            _match_wrapped_names(reference.buffers, candidate.buffers),
        ),
    ):
        found += [
            Difference(kind, name, _relative_error(was.get(name), now.get(name), floor=least))
            for name in {**was, **now}
        ]
    for name, state in reference.generators.items():
        same = same_state(state, candidate.generators.get(name))
        found.append(Difference("generator", name, 0.0 if same else math.inf))

    return Parity(
        worst=max(difference.error for difference in found),
        differences=tuple(difference for difference in found if not difference.error <= tolerance),
        without_gradient=tuple(name for name, gradient in gradients.items() if gradient is None),
    )


def _match_wrapped_names(
    reference: Mapping[str, Any], candidate: Mapping[str, Any]
) -> Mapping[str, Any]:
    if len(reference) != len(candidate) or reference.keys() == candidate.keys():
        return candidate
    return dict(zip(reference, candidate.values(), strict=True))


def _relative_error(reference: Tensor | None, candidate: Tensor | None, *, floor: float) -> float:
    if reference is None or candidate is None:
        return 0.0 if reference is candidate else math.inf
    if reference.shape != candidate.shape or reference.dtype != candidate.dtype:
        return math.inf
    if torch.equal(reference, candidate) or (reference.isnan() & candidate.isnan()).all():
        return 0.0
    # `double()` would drop imaginary parts.
    wide = torch.complex128 if reference.is_complex() else torch.float64
    distance = (candidate.to(wide) - reference.to(wide)).norm().item()
    scale = max(reference.to(wide).norm().item(), floor)
    error = distance / scale if scale else math.inf
    return math.inf if math.isnan(error) else error
