"""Run the plain loop over timesteps, and find the modules that have one.

A step is `step(x_t, state) -> (output_t, state)`.

Proof: `python -m pytest tests/test_snn_timesteps_contract.py`.
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
    """Run the plain loop over all timesteps; return the collected outputs and the final state.

    `inputs` is a tensor with time in `time_dim`, or a sequence with one entry for each timestep.
    `outputs` selects what is collected: "stack" for all outputs, stacked along `time_dim`; "sum" or
    "mean" over time; or only the "last".
    """
    timesteps = slice_time(inputs, time_dim)
    collected = Collected(outputs, time_dim)
    for x in timesteps:
        output, state = take_step(step, x, state)
        collected.add(output)
    return collected.finish(), state


def take_step(step: Step, x: Any, state: Any) -> tuple[Any, Any]:
    """Run one step and check that it returns a pair."""
    result: Any = step(x, state)
    if not (isinstance(result, tuple | list) and len(result) == 2):
        is_sequence = isinstance(result, tuple | list)
        returned = f"{len(result)} values" if is_sequence else type(result).__name__
        raise ValueError(f"step must return a pair, (output, state), and returned {returned}")
    return result[0], result[1]


def slice_time(inputs: Any, time_dim: Any) -> Sequence[Any]:
    """Divide inputs into one entry for each timestep; raise if there is none."""
    if type(time_dim) is not int:
        raise ValueError(f"time_dim must be a whole number, got {time_dim!r}")
    if isinstance(inputs, Tensor):
        shape = tuple(inputs.shape)
        if not -inputs.dim() <= time_dim < inputs.dim():
            raise ValueError(
                f"inputs of shape {shape} have no dimension {time_dim}: set time_dim to the "
                "dimension of time"
            )
        if not shape[time_dim]:
            raise ValueError(
                f"inputs of shape {shape} have no timestep in dimension {time_dim}: is time_dim "
                "right?"
            )

        # The backward of `unbind` makes one gradient for all slices. Every `select` would make one
        # that is as large as the input.
        return inputs.unbind(time_dim)

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
    """Outputs collected over time; sums are taken in the order of time, as in a plain loop."""

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
                    f"the {self.outputs} of truth values is not defined: return the output as "
                    "floating point"
                )
            self._total = output
        elif isinstance(output, Tensor):
            self._total = self._total + output
        else:
            self._total = tree_map(operator.add, self._total, output)
        self._count += 1

    def finish(self) -> Any:
        """Return the collected outputs and release them: recomputation keeps this object alive."""
        collected = self._all
        total = self._total
        self._all = []
        self._total = None
        if self.outputs == "stack":
            return tree_map(lambda *leaves: self._stack(leaves), *collected)
        if self.outputs == "mean":
            return tree_map(lambda leaf: leaf / self._count, total)
        return total

    def _stack(self, leaves: tuple[Any, ...]) -> Any:
        """Stack along `time_dim`, or along the last dimension if the output has too few."""
        if not isinstance(leaves[0], Tensor):
            return leaves
        num_dims = leaves[0].dim()
        return torch.stack(leaves, dim=max(-num_dims - 1, min(self.time_dim, num_dims)))


def _is_bool(leaf: Any) -> bool:
    return isinstance(leaf, bool) or (isinstance(leaf, Tensor) and leaf.dtype == torch.bool)


def steppers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost modules that have a method `unroll(step, inputs, state, ...)`.

    The keys are qualified names.
    """
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
