"""Calls flattened to functions of their tensors, for `torch.utils.checkpoint`.

`torch.utils.checkpoint` passes only positional tensors to saved-tensor hooks, and raises an error
if one of them is changed in place before backward. It keeps tensors from keywords, containers and
dataclasses without that check, and backward is then silently wrong.

Proof: `python -m pytest tests/test_checkpoint_inputs.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

# Placeholder for a tensor that was taken out.
TENSOR = object()
NO_CONTAINERS = {Tensor, Parameter, type(None), bool, int, float, str}


class FlatCall:
    """`run(*args, **kwargs)` as a function of `*self.take_tensors()` that can be called again.

    The first call gets the caller's own containers, and later calls get new ones with the original
    contents. So a block that appends to a list appends once, and one that pops from a dictionary
    finds the value again.
    """

    def __init__(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.run = run
        self.names = tuple(kwargs)
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.leaves: list[Any] = [*args, *kwargs.values()]
        self.shape: TreeSpec | None = None
        if not NO_CONTAINERS.issuperset(map(type, self.leaves)):
            self.leaves, self.shape = tree_flatten(self.leaves)

    def take_tensors(self) -> list[Tensor]:
        """Return all tensors and release those that are not in dataclasses.

        The tensors of dataclasses come last. They stay in their dataclass, and are returned so that
        changes in place are detected.
        """
        tensors = []
        for index, leaf in enumerate(self.leaves):
            # Inference tensors have no version counter, and can't be saved for backward.
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                tensors.append(leaf)
                self.leaves[index] = TENSOR
        if self.shape is None:
            return tensors
        return [*tensors, *_in_dataclasses(self.leaves, set())]

    def __call__(self, *tensors: Tensor) -> Any:
        if self.inputs is not None:
            args, kwargs = self.inputs
            self.inputs = None
            return self.run(*args, **kwargs)

        remaining = iter(tensors)
        values = [next(remaining) if leaf is TENSOR else leaf for leaf in self.leaves]
        if self.shape is not None:
            values = tree_unflatten(values, self.shape)
        num_args = len(values) - len(self.names)
        return self.run(*values[:num_args], **dict(zip(self.names, values[num_args:], strict=True)))


def _in_dataclasses(leaves: Iterable[Any], seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in dataclasses, which pytree opens only if their class is registered."""
    for leaf in leaves:
        if not is_dataclass(leaf) or isinstance(leaf, type) or id(leaf) in seen:
            continue
        seen.add(id(leaf))
        values = tree_leaves([getattr(leaf, field.name, None) for field in fields(leaf)])
        for value in values:
            if isinstance(value, Tensor) and not value.is_inference():
                yield value
        yield from _in_dataclasses(values, seen)
