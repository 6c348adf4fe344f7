"""A call as a function of its tensors alone, wherever they were: by position or keyword, in containers, dataclasses.

`torch.utils.checkpoint` looks after positional tensors: it lets hooks have them, and refuses one that was written over
before backward. It holds all others and never looks, and backward is silently wrong. Proof:
`python -m pytest tests/test_checkpoint_inputs.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

TENSOR = object()  # the place of one
NO_CONTAINERS = {Tensor, Parameter, type(None), bool, int, float, str}


class FlatCall:
    """`run(*args, **kwargs)`, to be called with `*self.take_tensors()`, and again with the same.

    The first call gets the caller's own containers, and the others new ones with what those held then: what a block
    appends to a list is appended once, and what it takes out of a dictionary is there again.
    """

    def __init__(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.run, self.names = run, tuple(kwargs)
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.leaves: list[Any] = [*args, *kwargs.values()]
        self.shape: TreeSpec | None = None
        if not NO_CONTAINERS.issuperset(map(type, self.leaves)):
            self.leaves, self.shape = tree_flatten(self.leaves)

    def take_tensors(self) -> list[Tensor]:
        """They are not held here any more. Last come those of dataclasses, which are held there too, and watched."""
        tensors = []
        for index, leaf in enumerate(self.leaves):
            if (
                isinstance(leaf, Tensor) and not leaf.is_inference()
            ):  # those have no version, and can't be saved
                tensors.append(leaf)
                self.leaves[index] = TENSOR
        return tensors if self.shape is None else [*tensors, *_in_dataclasses(self.leaves, set())]

    def __call__(self, *tensors: Tensor) -> Any:
        if self.inputs is not None:
            (args, kwargs), self.inputs = self.inputs, None
            return self.run(*args, **kwargs)
        taken = iter(tensors)
        values = [next(taken) if leaf is TENSOR else leaf for leaf in self.leaves]
        if self.shape is not None:
            values = tree_unflatten(values, self.shape)
        num_args = len(values) - len(self.names)
        return self.run(*values[:num_args], **dict(zip(self.names, values[num_args:], strict=True)))


def _in_dataclasses(leaves: Iterable[Any], seen: set[int]) -> Iterator[Tensor]:
    """Those that pytree does not open, for which a class has to be registered."""
    for leaf in leaves:
        if is_dataclass(leaf) and not isinstance(leaf, type) and id(leaf) not in seen:
            seen.add(id(leaf))
            values = tree_leaves([getattr(leaf, field.name, None) for field in fields(leaf)])
            yield from (
                value for value in values if isinstance(value, Tensor) and not value.is_inference()
            )
            yield from _in_dataclasses(values, seen)
