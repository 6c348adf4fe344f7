"""One step, run as often as it takes: from the same random numbers, with places holding what they are told to hold.

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
    """What one step came to, beside what it left behind in places."""

    values: list[Any]
    shape: TreeSpec
    reached: set[int]
    generators: Generators
    state: Any
    made: list[Any]  # of the state, less what was only handed on

    def is_as(self, other: "Outcome", *, exact: bool) -> bool:
        """Whether it is the same; values count only where a step repeats them at all."""
        same = self.shape == other.shape and self.reached == other.reached
        same = same and self.generators.are_as(other.generators)
        return same and (not exact or all(map(_equal, self.values, other.values)))


@dataclass
class Probe:
    """Runs one step as often as it takes, each time from the same random numbers."""

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
            (".".join(part for part in (root, name) if part)): parameter
            for root, module in roots_of(self.step).items()
            for name, parameter in module.named_parameters()
        }

    def keep(self) -> KeptPlaces:
        """What places hold now."""
        return keep(self.places, copies=self.copies)

    def run(self, index: int, state: Any) -> Outcome:
        x, state = _copies(self.timesteps[min(index, len(self.timesteps) - 1)]), _copies(state)
        with generators_kept(), torch.enable_grad():
            output, after = take_step(self.step, x, state)
            generators = Generators([*tree_leaves(x), *tree_leaves(after)])
        for what, given in (("input", x), ("state", state)):
            if any(version_of(leaf) for leaf in tree_leaves(given)):
                raise ValueError(
                    f"step writes into the {what} that it is given, which is needed again in backward: make a new "
                    "tensor (v = v * decay, not v *= decay)"
                )
        leaves, shape = tree_flatten((output, after))
        wanted = {id(parameter) for parameter in self.parameters.values()} | self.traced.keys()
        reached = _leaves_of_graph(leaves) & wanted
        values = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        made = [
            leaf
            for leaf in tree_leaves(after)
            if not any(leaf is given for given in tree_leaves(state))
        ]
        return Outcome(values, shape, reached, generators, after, made)

    def run_from(self, base: KeptPlaces, values: dict[Key, Any]) -> Outcome:
        """One step where places hold what `base` has, less some other values."""
        base.put_back()
        for place in self.places:
            for name in place.names():
                key = place.name, place.where, name
                if key in values:
                    place.values[name] = values[key]
        return self.run(0, self.state)

    def matters(self, base: KeptPlaces, values: dict[Key, Any], plain: Outcome) -> bool:
        """Whether a step with other values comes to something else, or can't be run."""
        try:
            return not self.run_from(base, values).is_as(plain, exact=self.exact)
        except BROKEN:
            return True
        finally:
            base.put_back()

    def is_traced(self, base: KeptPlaces, keys: list[Key]) -> bool:
        """Whether autograd finds a way from the step's result to the values of these keys."""
        values = base.rebuilt(keys, self._trace)
        try:
            return not self.traced.keys().isdisjoint(self.run_from(base, values).reached)
        except (
            RuntimeError
        ):  # a value that requires grad is refused in places that a plain one is not
            return False
        finally:
            self.traced = {}
            base.put_back()

    def _trace(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        leaf = value.detach().clone().requires_grad_()
        self.traced[id(leaf)] = leaf
        return leaf.clone()  # which may be written into, where a leaf may not


def _copies(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.dtype == other.dtype and torch.equal(value.nan_to_num(), other.nan_to_num())
    return type(value) is type(other) and (not isinstance(value, PLAIN) or value == other)


def _leaves_of_graph(leaves: list[Any]) -> set[int]:
    """The tensors that require grad, by identity, that a backward from these would reach."""
    found = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_leaf}
    waiting = [
        leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None
    ]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            found.add(id(variable))
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        waiting += new
    return found
