"""Divide a model into layers, and follow with hooks which layer is running.

Proof: `python -m pytest tests/test_profiler.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from .blocks import find_blocks
from .measure import FlopCount, Life

# Stands for everything outside the layers: the model's own forward between them, and the loss.
REST = "(rest)"


def divide(model: nn.Module, *, blocks: str | Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Divide a model into layers that together cover it, in the model's order.

    The layers are the blocks, and around them the largest modules that hold no block. A model that
    repeats nothing is divided into its children.
    """
    if blocks is not None:
        return dict(_around("", model, find_blocks(model, blocks)))
    try:
        found = find_blocks(model)
    except ValueError:
        found = {}
    return dict(_around("", model, found))


def _around(
    prefix: str, module: nn.Module, blocks: Mapping[str, nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = prefix + name
        never_called = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if path not in blocks and (
            never_called or any(block.startswith(f"{path}.") for block in blocks)
        ):
            yield from _around(f"{path}.", child, blocks)
        else:
            yield path, child


class RunningLayers:
    """Context that follows which layer runs: `current` is the innermost one, or `REST`.

    `calls` counts the calls of whole layers. If a module inside a layer is called while no layer
    runs, its layer is the current one. So a `Sequential` whose members are called one by one, or a
    block that is recomputed in backward, is still attributed to its layer.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        self.current = REST
        self.latest = REST
        self.calls: Counter[str] = Counter()
        self._model = model
        self._own: dict[int, str] = {}
        self._inside: dict[int, str] = {}
        for name, layer in layers.items():
            self._own.setdefault(id(layer), name)
            for module in layer.modules():
                self._inside.setdefault(id(module), name)
        self._callers: list[tuple[nn.Module, str]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> "RunningLayers":
        for module in self._model.modules():
            if id(module) in self._inside:
                self._handles += [
                    module.register_forward_pre_hook(self._enter, with_kwargs=True),
                    module.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
                ]
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def entered(self, layer: str, inputs: Any) -> None:
        """Called when a layer starts to run."""

    def left(self, layer: str, output: Any) -> None:
        """Called when a layer ends."""

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        caller = self.current
        self._callers.append((module, caller))
        own_layer = self._own.get(id(module))
        if own_layer:
            self.current = own_layer
        elif caller == REST:
            self.current = self._inside[id(module)]

        if self.current != caller:
            self.latest = self.current
            self.calls[self.current] += own_layer is not None
            self.entered(self.current, (args, kwargs))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # A hook of the user may have raised before this call was entered.
        if not self._callers or self._callers[-1][0] is not module:
            return

        layer = self.current
        _, self.current = self._callers.pop()
        if layer != self.current:
            self.left(layer, output)


class Boundaries(RunningLayers):
    """Record which storages go into and out of each layer, without keeping them alive."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        super().__init__(model, layers)
        self.lives_of: Callable[[Tensor], list[Life]] = lambda tensor: []
        self._inputs: dict[str, list[Life]] = {name: [] for name in layers}
        self._outputs: dict[str, list[Life]] = {name: [] for name in layers}

    def entered(self, layer: str, inputs: Any) -> None:
        self._inputs[layer] += [
            life for tensor in tensors_in(inputs) for life in self.lives_of(tensor)
        ]

    def left(self, layer: str, output: Any) -> None:
        self._outputs[layer] += [
            life for tensor in tensors_in(output) for life in self.lives_of(tensor)
        ]

    def stays(self, layer: str) -> int:
        """Return the bytes that stay held if the layer is recomputed.

        These are inputs that are freed without recompute, and the layer's own storages that go
        into it or out of it.
        """
        inputs = set(self._inputs[layer])
        outputs = set(self._outputs[layer])
        freed_inputs = {life for life in inputs if life.died is not None}
        alive = {life for life in inputs | outputs if life.died is None and life.owner == layer}

        # An output that no other layer uses does not stay.
        own = {life for life in alive if life in inputs or life.used_elsewhere}
        return sum(life.nbytes for life in freed_inputs | own)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested containers and dataclasses, which may refer to each other."""
    return _tensors_in(value, set())


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    for leaf in tree_iter(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type) and id(leaf) not in seen:
            seen.add(id(leaf))
            yield from _tensors_in([getattr(leaf, field.name) for field in fields(leaf)], seen)


def forward_flops(blocks: Mapping[str, nn.Module], run: Callable[[], Any]) -> dict[str, int]:
    """Count the FLOPs that each block spends during `run`, over all its calls."""
    spent = dict.fromkeys(blocks, 0)
    counter = FlopCount()
    handles = []
    for name, block in blocks.items():

        def before(*_: Any, name: str = name) -> None:
            spent[name] -= counter.flops

        def after(*_: Any, name: str = name) -> None:
            spent[name] += counter.flops

        handles += [block.register_forward_pre_hook(before), block.register_forward_hook(after)]
    try:
        with counter:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return spent
