"""Measure what happens to weights and gradients between a backward call and the end of a step.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import gc
import math
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.digest import is_plain
from .loop_events import Backward, Trace, Versions, tensors_of
from .loop_lines import users_line
from .loop_loss import digest, values_of

# Parameters are compared before and after a step up to this number of elements.
MOST_COMPARED = 2 * 10**8
MOST_SMALL = 10**6
# A larger share of an average that the newest weights have is one by mistake.
MOST_OF_AVERAGE = 0.9
# Weights of a model and of its copy have a larger cosine, also after many steps.
LEAST_ALIKE = 0.2


class Gradient:
    """A small gradient after a backward call, and what the loop makes of it before it is used."""

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        # The first one of a usual size.
        self.parameter = next((one for one in parameters if 1 < one.numel() < MOST_SMALL), None)
        self.grad = getattr(self.parameter, "grad", None)
        self.made_gradient = self._measured()
        self.used_gradient: tuple[float, float] | None = None

    def _measured(self) -> tuple[float, float]:
        """Return a number that is linear in its values, and their norm."""
        grad = getattr(self.parameter, "grad", None)
        return (0.0, 0.0) if grad is None else (digest(grad), float(values_of(grad).norm()))

    def use(self) -> None:
        """Measure it again, at the first call after a backward call."""
        self.used_gradient = self.used_gradient or self._measured()

    def facts(self, own: Container[Tensor]) -> dict[str, Any]:
        """Return what is noted of it for a step, if it is of one of these parameters."""
        (made, norm), (used, norm_used) = (
            self.made_gradient,
            self.used_gradient or self.made_gradient,
        )
        if self.parameter not in own or not made:
            return {"made_gradient": 0.0, "used_gradient": 0.0, "factor": 1.0}
        factor = used / made
        is_same = getattr(self.parameter, "grad", None) is self.grad
        is_multiplied = is_same and math.isclose(norm_used, abs(factor) * norm, rel_tol=1e-3)
        return {
            "made_gradient": made,
            "used_gradient": used,
            "factor": factor if is_multiplied else None,
        }


def copies_of(parameters: Sequence[Tensor]) -> dict[Tensor, Tensor] | None:
    """Copy the values of parameters; None where there are too many."""
    is_small = sum(one.numel() for one in parameters) <= MOST_COMPARED
    return {one: one.detach().clone() for one in parameters} if is_small else None


def half_moved(values: dict[Tensor, Tensor]) -> float | None:
    """Return the share of elements in half precision that changed, of those with a gradient."""
    changed = [
        (values_of(one.detach()) != values_of(value))[values_of(one.grad) != 0]
        for one, value in values.items()
        if one.itemsize == 2 and one.grad is not None
    ]
    return float(torch.cat(changed).float().mean()) if changed else None


def note_average(trace: Trace, one: Tensor, others: Iterable[Tensor], newest: float) -> None:
    """Find weights that the loop averages with others or copies, and that are not for that."""
    place, number = users_line(), trace.num_steps_made
    for other in filter(is_plain, others):
        is_itself = one.is_set_to(other)
        # A whole copy begins anew from other weights, on purpose.
        is_average = newest < 1 and not is_itself
        places = [trace.optimizer_of(it) for it in (one, other)]
        if is_average and all(places):
            trace.fault(
                "moves",
                "this optimizer steps weights that are averages of others, too",
                f"leave a teacher's parameters out of it; averaged at {place}",
                places[0],
                value=number,
            )
        if is_itself:
            measured = "weights are averaged with, or copied from, themselves"
            hint = "copy.deepcopy(model), or clone() each tensor of a state_dict()"
        elif is_average and _are_unlike(one, other):
            measured = "an average of weights has begun from other weights"
            hint = "begin with a copy: average.load_state_dict(model.state_dict())"
        # In the first steps an average may follow the weights, by a share that falls.
        elif is_average and newest > MOST_OF_AVERAGE:
            measured = f"an average of weights takes {newest:.4g} of the newest ones"
            hint = "give the newest weights 1 - decay: average.lerp_(weight, 1 - decay)"
        else:
            continue
        # Another model may share what is frozen.
        if any(map(other.is_set_to, filter(is_plain, trace.of_roots(trained=True)))):
            trace.fault(
                "moves",
                measured,
                hint,
                place,
                value=None if is_itself else number,
            )


def _are_unlike(one: Tensor, other: Tensor) -> bool:
    """Return whether two matrices have next to nothing in common."""
    if one.dim() < 2 or one.shape != other.shape:
        return False
    # Zeros are like all others.
    return bool((one * other).sum().abs() < LEAST_ALIKE * one.norm() * other.norm())


def state_of(optimizer: Optimizer) -> float:
    """Return a digest of the state of an optimizer's first parameter."""
    return sum(map(digest, tensors_of(next(iter(optimizer.state.values()), None))))


def sum_of_small(parameters: Iterable[Tensor]) -> float:
    """Return a digest of the parameters that are not too large for it."""
    return sum(digest(one) for one in parameters if one.numel() < MOST_SMALL)


def versions_of(parameters: Iterable[Tensor]) -> Versions:
    versions: Versions = {}
    for parameter in parameters:
        # A sharded gradient has its values in a tensor of its own.
        local = getattr(parameter.grad, "_local_tensor", parameter.grad)
        versions[parameter] = None if local is None else (id(local), local._version)
    return versions


def largest(grad: Tensor) -> float:
    values = values_of(grad).detach()
    return float(values.abs().max()) if values.numel() else 0.0


def has_equal_rows(one: Tensor) -> bool:
    """Return whether there are several rows, of memory of their own, and all are alike."""
    return (
        is_plain(one)
        and one.stride()[:1] != (0,)
        and one.dim() > 1
        and len(one) > 1
        and bool((one == one[:1]).all())
    )


def instances_of(kind: type) -> list[Any]:
    """Return all instances of a class; asking for `__class__` would wake proxies that warn."""
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def leaves_alone(trace: Trace, leaves: Container[int]) -> dict[Tensor, str]:
    """Describe the leaves with a gradient that no module may have, nor these leaves.

    To the gradient of a tensor that no optimizer has each backward call adds, and nothing sets it
    to 0, as where the user changes it by hand.
    """
    return {
        one: f"a {type(one).__name__.lower()} of shape {list(one.shape)}"
        for one in instances_of(Tensor)
        if one.is_leaf
        and one.grad is not None
        and (
            isinstance(one, nn.Parameter)
            or (
                one._version == 0
                and 1 < one.grad._version < len(trace.of(Backward))
                and id(one) not in leaves
            )
        )
    }
