"""Is it still the same training? One step is recorded, two records are compared, and what differs is named.

Compared are the loss, every gradient, every buffer and the state of every random generator after the step.
Proof: `python -m pytest tests/test_parity.py`.
"""

import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StepRecord:
    """What one forward and backward left behind."""

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    generators: Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same; `error` is relative, infinite where a value is missing or of another kind."""

    kind: str
    name: str
    error: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: " + (
            "differs in kind" if math.isinf(self.error) else f"{self.error:.1e}"
        )


@dataclass(frozen=True)
class Parity:
    """The answer of `compare`: the worst relative error, and what lies above the tolerance."""

    worst: float
    differences: tuple[Difference, ...]
    without_gradient: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.differences

    @property
    def bit_equal(self) -> bool:
        return self.holds and self.worst == 0

    def describe(self, *, most: int = 3) -> str:
        """The differences, worst first, and parameters that get no gradient at all."""
        ranked = sorted(self.differences, key=lambda difference: -difference.error)
        lines = [str(difference) for difference in ranked[:most]]
        if len(ranked) > most:
            lines.append(f"{len(ranked) - most} more")
        if self.without_gradient:
            lines.append(f"no gradient: {', '.join(self.without_gradient[:most])}")
        return "; ".join(lines) or ("bit-equal" if self.worst == 0 else f"worst {self.worst:.1e}")


def record_step(
    module: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]
) -> StepRecord:
    """Run one forward and backward and keep copies of all that it left behind; gradients start at None."""
    for parameter in module.parameters():
        parameter.grad = None
    value = loss(module, batch)
    if value.requires_grad:  # a technique may have cut every gradient off, and then they are None
        value.backward()
    return record(module, value.detach())


def record(module: nn.Module, loss: Tensor) -> StepRecord:
    """Copies of the gradients, buffers and generator states as they stand."""
    return StepRecord(
        loss=loss.clone(),
        gradients={
            name: None if parameter.grad is None else _whole(parameter.grad.detach()).clone()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        },
        buffers={name: buffer.detach().clone() for name, buffer in module.named_buffers()},
        generators=_generator_states(),
    )


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor that FSDP2 keeps in shards."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(reference: StepRecord, candidate: StepRecord, *, tolerance: float = 0.0) -> Parity:
    """Hold `candidate` against `reference`; a tolerance of 0 asks for equal bits.

    A gradient's error is relative to its own norm or to a hundredth of the whole gradient's, whichever is larger, so
    that the rounding of a gradient that is zero in exact arithmetic does not count as a difference.
    """
    norms = [
        gradient.norm().item() for gradient in reference.gradients.values() if gradient is not None
    ]
    floor = 0.01 * math.hypot(*norms)
    found = [Difference("loss", "value", _error(reference.loss, candidate.loss, floor=0.0))]
    found += _compare_all("gradient", reference.gradients, candidate.gradients, floor=floor)
    found += _compare_all("buffer", reference.buffers, candidate.buffers, floor=0.0)
    found += [
        Difference(
            "generator",
            name,
            0.0 if _same_state(state, candidate.generators.get(name)) else math.inf,
        )
        for name, state in reference.generators.items()
    ]
    return Parity(
        worst=max(difference.error for difference in found),
        differences=tuple(difference for difference in found if not difference.error <= tolerance),
        without_gradient=tuple(
            name for name, gradient in candidate.gradients.items() if gradient is None
        ),
    )


def _compare_all(
    kind: str,
    reference: Mapping[str, Tensor | None],
    candidate: Mapping[str, Tensor | None],
    *,
    floor: float,
) -> list[Difference]:
    names = [*reference, *(name for name in candidate if name not in reference)]
    return [
        Difference(kind, name, _error(reference.get(name), candidate.get(name), floor=floor))
        for name in names
    ]


def _error(reference: Tensor | None, candidate: Tensor | None, *, floor: float) -> float:
    if reference is None and candidate is None:
        return 0.0
    if reference is None or candidate is None or reference.shape != candidate.shape:
        return math.inf
    if reference.dtype != candidate.dtype:
        return math.inf
    if torch.equal(reference, candidate) or (reference.isnan() & candidate.isnan()).all():
        return 0.0
    distance = (candidate.double() - reference.double()).norm().item()
    scale = max(reference.double().norm().item(), floor)
    error = distance / scale if scale else math.inf
    return math.inf if math.isnan(error) else error


def _generator_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        states |= {
            f"cuda:{index}": torch.cuda.get_rng_state(index)
            for index in range(torch.cuda.device_count())
        }
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def _same_state(reference: Any, candidate: Any) -> bool:
    if isinstance(reference, Tensor):
        return isinstance(candidate, Tensor) and torch.equal(reference, candidate)
    if isinstance(reference, tuple):
        return isinstance(candidate, tuple) and all(map(_same_state, reference, candidate))
    return (
        bool((reference == candidate).all())
        if hasattr(reference, "all")
        else bool(reference == candidate)
    )
