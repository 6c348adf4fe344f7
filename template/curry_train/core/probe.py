"""Run one step repeatedly, from the same random numbers and from chosen attribute values.

Proof: `python -m pytest tests/test_snn_timesteps_refusals.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

from .attributes import places_of, roots_of
from .generators import Generators
from .kept import PLAIN, Copies, KeptPlaces, Key, keep, version_of
from .timesteps import Step, take_step
from .untouched import generators_kept

BROKEN = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Outcome:
    """Result of one step, without what it leaves behind in places."""

    # The leaves of the output and the state, and their structure.
    values: list[Any]
    shape: TreeSpec

    # Identities of the parameters and traced values that a backward from here would reach.
    reached: set[int]

    # The random generators after the step.
    generators: Generators
    state: Any

    # The leaves of the state that the step made, without those that it only passed through.
    made: list[Any]

    def is_as(self, other: "Outcome", *, exact: bool) -> bool:
        """Return whether two outcomes are the same; without `exact`, values are not compared."""
        same = self.shape == other.shape and self.reached == other.reached
        same = same and self.generators.are_as(other.generators)
        return same and (not exact or all(map(_equal, self.values, other.values)))


@dataclass
class Probe:
    """Runs one step repeatedly, each time from the same random numbers."""

    step: Step
    timesteps: Sequence[Any]
    state: Any
    exact: bool = True
    traced: dict[int, Any] = field(default_factory=dict)
    copies: Copies = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, module in roots_of(self.step).items():
            if any(map(is_lazy, module.parameters())):
                name = name or type(module).__name__
                raise ValueError(f"{name} has no parameters yet: run one batch through it first")
        self.places = places_of(self.step)
        self.parameters = {
            f"{root}.{name}" if root else name: parameter
            for root, module in roots_of(self.step).items()
            for name, parameter in module.named_parameters()
        }

    def keep(self) -> KeptPlaces:
        """Record the current values of all places."""
        return keep(self.places, copies=self.copies)

    def run(self, index: int, state: Any) -> Outcome:
        """Run one timestep on copies of its input and state."""
        x = _copies(self.timesteps[min(index, len(self.timesteps) - 1)])
        state = _copies(state)
        with generators_kept(), torch.enable_grad():
            output, new_state = take_step(self.step, x, state)
            generators = Generators([*tree_leaves(x), *tree_leaves(new_state)])

        for role, argument in (("input", x), ("state", state)):
            if any(version_of(leaf) for leaf in tree_leaves(argument)):
                raise ValueError(
                    f"step writes into the {role} that it is given, which is needed again in "
                    "backward: make a new tensor (v = v * decay, not v *= decay)"
                )

        leaves, shape = tree_flatten((output, new_state))
        candidates = {id(parameter) for parameter in self.parameters.values()}
        candidates |= self.traced.keys()
        reached = _leaves_of_graph(leaves) & candidates
        given_leaves = {id(leaf) for leaf in tree_leaves(state)}
        made = [leaf for leaf in tree_leaves(new_state) if id(leaf) not in given_leaves]
        return Outcome(_copies(leaves), shape, reached, generators, new_state, made)

    def run_from(self, base: KeptPlaces, values: dict[Key, Any]) -> Outcome:
        """Run the first timestep with places restored to `base`, except for `values`."""
        base.put_back()
        for place in self.places:
            for name in place.names():
                key = place.name, place.where, name
                if key in values:
                    place.values[name] = values[key]
        return self.run(0, self.state)

    def matters(self, base: KeptPlaces, values: dict[Key, Any], plain: Outcome) -> bool:
        """Return whether a step with other values gives another outcome, or fails."""
        try:
            return not self.run_from(base, values).is_as(plain, exact=self.exact)
        except BROKEN:
            return True
        finally:
            base.put_back()

    def is_traced(self, base: KeptPlaces, keys: list[Key]) -> bool:
        """Return whether the graph of the step's result reaches the values of these keys."""
        values = base.rebuilt(keys, self._trace)
        try:
            return not self.traced.keys().isdisjoint(self.run_from(base, values).reached)
        except RuntimeError:
            # Some operations refuse a value only because it requires grad.
            return False
        finally:
            self.traced = {}
            base.put_back()

    def _trace(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        leaf = value.detach().clone().requires_grad_()
        self.traced[id(leaf)] = leaf

        # The step may write into a clone, but not into a leaf that requires grad.
        return leaf.clone()


def _copies(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.dtype == other.dtype and torch.equal(value.nan_to_num(), other.nan_to_num())
    return type(value) is type(other) and (not isinstance(value, PLAIN) or value == other)


def _leaves_of_graph(leaves: list[Any]) -> set[int]:
    """Return the identities of the tensors that a backward from these leaves would reach."""
    found = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_leaf}
    waiting = [
        leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None
    ]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            found.add(id(variable))
        new_nodes = {following for following, _ in node.next_functions if following is not None}
        new_nodes -= seen
        seen |= new_nodes
        waiting += new_nodes
    return found
