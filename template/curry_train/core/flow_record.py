"""What one probed step says of each layer: counted elements, norms, and how far the weights moved.

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
    """Of all elements together: how many there are, are zero, are infinite or no number, and their norm."""

    elements: int
    zeros: int
    nonfinite: int
    squares: float

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    @property
    def rms(self) -> float:
        """The norm of one element, which layers of different size can be compared by."""
        return math.sqrt(self.squares / self.elements) if self.elements else 0.0

    @property
    def zero(self) -> float:
        return self.zeros / self.elements if self.elements else 0.0

    @property
    def bad(self) -> float:
        """The part of the elements that is infinite or no number."""
        return self.nonfinite / self.elements if self.elements else 0.0

    def to_json(self) -> dict[str, Any]:
        found = {
            name: getattr(self, name) for name in ("elements", "zeros", "nonfinite", "norm", "rms")
        }
        return {name: plain(value) for name, value in found.items()} | {
            "zero": self.zero,
            "bad": self.bad,
        }


@dataclass(frozen=True, slots=True)
class Update:
    """How long the weights were before the optimizer's step, and how far it moved them."""

    weight_norm: float
    distance: float

    @property
    def ratio(self) -> float | None:
        """None where the weights were all 0, as a new bias is."""
        return self.distance / self.weight_norm if self.weight_norm else None

    def to_json(self) -> dict[str, Any]:
        ratio = self.ratio
        found = {"weight_norm": self.weight_norm, "distance": self.distance}
        return {name: plain(value) for name, value in found.items()} | {
            "ratio": None if ratio is None else plain(ratio)
        }


@dataclass(frozen=True, slots=True)
class LayerFlow:
    """One layer in one step. What was not seen is None, which is not 0: an activation where no forward came by, a
    gradient where no parameter got one, an update where the optimizer did not step.

    `calls` of all microbatches together; `without_gradient` names trainable parameters that have none.
    """

    activation: Spread | None
    calls: int
    gradient: Spread | None
    update: Update | None
    without_gradient: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    is_block: bool = False

    def to_json(self) -> dict[str, Any]:
        parts = {"activation": self.activation, "gradient": self.gradient, "update": self.update}
        return {name: None if part is None else part.to_json() for name, part in parts.items()} | {
            "calls": self.calls,
            "without_gradient": list(self.without_gradient),
            "tied": list(self.tied),
            "frozen": list(self.frozen),
        }


@dataclass(frozen=True)
class StepFlow:
    """One probed step. `order` has the layers as their forwards ended, the inner before the outer.

    `gradient` is that of the whole model, each parameter once, read where `gradients_read` says, before clipping if
    that is after backward; `scaled` is what clipping or a scaler then multiplied it by, None where that is not known.
    """

    step: int
    stepped: bool
    layers: Mapping[str, LayerFlow]
    order: tuple[str, ...]
    forwards: int
    gradient: Spread | None
    gradients_read: str
    scaled: float | None
    ranks: int = 1
    notes: tuple[str, ...] = field(default=())

    @property
    def nonfinite(self) -> bool:
        """Whether anything at all was infinite or no number."""
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
    """A number that JSON has, or the word that Python reads back as the one that it has not."""
    return value if math.isfinite(value) else str(value)
