"""Stepping through time: the plain loop, what it takes and what it keeps, and the modules that have one.

A step is `step(x_t, state) -> (output_t, state)`. Proof: `python -m pytest tests/test_snn_timesteps_contract.py`.
"""

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

Step = Callable[[Any, Any], tuple[Any, Any]]
OUTPUTS = ("stack", "sum", "mean", "last")


def run_timesteps(
    step: Step, inputs: Any, state: Any, *, time_dim: int = 0, outputs: str = "stack"
) -> tuple[Any, Any]:
    """The plain loop: `state` goes in and comes out, beside the outputs of all timesteps.

    `inputs` is a tensor with time in `time_dim`, or a sequence with one entry for each timestep. `outputs` is what is
    kept of the steps' outputs: all of them, stacked along `time_dim`; their sum or mean; or the last.
    """
    timesteps, collected = slice_time(inputs, time_dim), Collected(outputs, time_dim)
    for x in timesteps:
        output, state = take_step(step, x, state)
        collected.add(output)
    return collected.finish(), state


def take_step(step: Step, x: Any, state: Any) -> tuple[Any, Any]:
    made: Any = step(x, state)
    if not (isinstance(made, tuple | list) and len(made) == 2):
        kind = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
        raise ValueError(f"step must return a pair, (output, state), and returned {kind}")
    return made[0], made[1]


def slice_time(inputs: Any, time_dim: Any) -> Sequence[Any]:
    """One entry for each timestep; at least one."""
    if type(time_dim) is not int:
        raise ValueError(f"time_dim must be a whole number, got {time_dim!r}")
    if isinstance(inputs, Tensor):
        shape = tuple(inputs.shape)
        if not -inputs.dim() <= time_dim < inputs.dim():
            raise ValueError(
                f"inputs of shape {shape} have no dimension {time_dim}: time_dim says which one is time"
            )
        if not shape[time_dim]:
            raise ValueError(
                f"inputs of shape {shape} have no timestep in dimension {time_dim}: is time_dim right?"
            )
        return inputs.unbind(
            time_dim
        )  # one gradient of all slices, where each select makes one as large as the input
    if (
        not isinstance(inputs, Sequence)
        or isinstance(inputs, str | bytes)
        or hasattr(inputs, "_fields")
    ):
        kind = type(inputs).__name__
        raise ValueError(
            f"inputs must be a tensor, or a sequence with one entry for each timestep; got {kind}"
        )
    if not inputs:
        raise ValueError("inputs are an empty sequence: there is no timestep to run")
    return inputs


@dataclass
class Collected:
    """What is kept of the outputs, summed in the order of time, as a plain loop sums them."""

    outputs: str
    time_dim: int
    _all: list[Any] = field(default_factory=list)
    _total: Any = None
    _count: int = 0

    def __post_init__(self) -> None:
        if self.outputs not in OUTPUTS:
            raise ValueError(f"outputs must be one of {', '.join(OUTPUTS)}; got {self.outputs!r}")

    def add(self, output: Any) -> None:
        if self.outputs == "stack":
            self._all.append(output)
        elif self.outputs == "last" or self._count == 0:
            if self.outputs != "last" and any(_is_bool(leaf) for leaf in tree_leaves(output)):
                raise ValueError(
                    f"the {self.outputs} of truth values is none: return the output as floating point"
                )
            self._total = output
        elif isinstance(output, Tensor):
            self._total = self._total + output
        else:
            self._total = tree_map(operator.add, self._total, output)
        self._count += 1

    def finish(self) -> Any:
        """The outputs; nothing is held afterwards, because recomputation holds this object."""
        every, total, self._all, self._total = self._all, self._total, [], None
        if self.outputs == "stack":
            return tree_map(lambda *leaves: self._stack(leaves), *every)
        return tree_map(lambda leaf: leaf / self._count, total) if self.outputs == "mean" else total

    def _stack(self, leaves: tuple[Any, ...]) -> Any:
        """An output may have fewer dimensions than the input: time comes last then."""
        if not isinstance(leaves[0], Tensor):
            return leaves
        most = leaves[0].dim()
        return torch.stack(leaves, dim=max(-most - 1, min(self.time_dim, most)))


def _is_bool(leaf: Any) -> bool:
    return isinstance(leaf, bool) or (isinstance(leaf, Tensor) and leaf.dtype == torch.bool)


def steppers(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules whose loop is a method `unroll(step, inputs, state, ...)`, by qualified name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(not other or name.startswith(f"{other}.") for other in found)
        if not inside and _is_unroll(getattr(module, "unroll", None)):
            found[name] = module
    return found


def _is_unroll(method: Any) -> bool:
    if not callable(method):
        return False
    names = list(inspect.signature(method).parameters)
    return names[:3] == ["step", "inputs", "state"]
