"""Records of one probed step: counts, norms and weight updates of each layer.

Proof: `python -m pytest tests/test_grad_flow.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AFTER_BACKWARD = "after backward"
AT_THE_STEP = "at the optimizer's step"


@dataclass(frozen=True, slots=True)
class Spread:
    """Counts of a tensor's elements and the sum of their squares."""

    elements: int
    # Elements that are exactly 0.
    zeros: int
    # Elements that are inf or nan.
    nonfinite: int
    # The sum of squares.
    squares: float

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    @property
    def rms(self) -> float:
        """Return the root mean square, which is comparable between layers of different size."""
        return math.sqrt(self.squares / self.elements) if self.elements else 0.0

    @property
    def zero(self) -> float:
        """Return the fraction of elements that are exactly 0."""
        return self.zeros / self.elements if self.elements else 0.0

    @property
    def bad(self) -> float:
        """Return the fraction of elements that are inf or nan."""
        return self.nonfinite / self.elements if self.elements else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "elements": plain(self.elements),
            "zeros": plain(self.zeros),
            "nonfinite": plain(self.nonfinite),
            "norm": plain(self.norm),
            "rms": plain(self.rms),
            "zero": self.zero,
            "bad": self.bad,
        }


@dataclass(frozen=True, slots=True)
class Update:
    """Change of a layer's weights in one optimizer step."""

    # Norm of the weights before the step.
    weight_norm: float
    # Norm of the change.
    distance: float

    @property
    def ratio(self) -> float | None:
        """Return the relative change, or None if all weights were 0, as in a new bias."""
        return self.distance / self.weight_norm if self.weight_norm else None

    def to_json(self) -> dict[str, Any]:
        ratio = self.ratio
        return {
            "weight_norm": plain(self.weight_norm),
            "distance": plain(self.distance),
            "ratio": None if ratio is None else plain(ratio),
        }


@dataclass(frozen=True, slots=True)
class LayerFlow:
    """One layer in one step; values that were not observed are None, which differs from 0."""

    # None if forward did not call the layer.
    activation: Spread | None
    # Calls in all microbatches together.
    calls: int
    # None if no parameter got a gradient.
    gradient: Spread | None
    # None if the optimizer did not step.
    update: Update | None
    # Trainable parameters that have no gradient.
    without_gradient: tuple[str, ...] = ()
    # Parameters that count for an earlier layer.
    tied: tuple[str, ...] = ()
    # Parameters that require no gradient.
    frozen: tuple[str, ...] = ()
    # Whether it is one of the model's repeated blocks.
    is_block: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "activation": None if self.activation is None else self.activation.to_json(),
            "gradient": None if self.gradient is None else self.gradient.to_json(),
            "update": None if self.update is None else self.update.to_json(),
            "calls": self.calls,
            "without_gradient": list(self.without_gradient),
            "tied": list(self.tied),
            "frozen": list(self.frozen),
        }


@dataclass(frozen=True)
class StepFlow:
    """One probed step."""

    # The step's number, counted from the `first_step` that GradFlow was given.
    step: int
    # Whether the optimizer stepped; False if the step was skipped.
    stepped: bool
    # All probed layers by name.
    layers: Mapping[str, LayerFlow]
    # Layers in the order in which their forwards ended, inner layers before outer ones.
    order: tuple[str, ...]
    # Forwards of the whole model.
    forwards: int
    # Gradient of the whole model, with each parameter once.
    gradient: Spread | None
    # When it was read: `AFTER_BACKWARD`, which is before clipping, or `AT_THE_STEP`.
    gradients_read: str
    # Factor by which clipping or a scaler multiplied it afterwards, None if unknown.
    scaled: float | None
    # Ranks whose batches are included.
    ranks: int = 1
    # Limits of this record, for the user.
    notes: tuple[str, ...] = field(default=())

    @property
    def nonfinite(self) -> bool:
        """Return whether any activation or gradient was inf or nan."""
        spreads = [
            spread
            for layer in self.layers.values()
            for spread in (layer.activation, layer.gradient)
        ]
        return any(spread is not None and spread.nonfinite for spread in [*spreads, self.gradient])

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "stepped": self.stepped,
            "forwards": self.forwards,
            "gradient": None if self.gradient is None else self.gradient.to_json(),
            "gradients_read": self.gradients_read,
            "scaled": None if self.scaled is None else plain(self.scaled),
            "ranks": self.ranks,
            "notes": list(self.notes),
            "order": list(self.order),
            "layers": {name: layer.to_json() for name, layer in self.layers.items()},
        }


def plain(value: float) -> float | str:
    """Return a number for JSON, or "inf", "-inf" or "nan", which `float` reads back."""
    return value if math.isfinite(value) else str(value)
