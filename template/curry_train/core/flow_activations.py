"""The sums of what each layer's forward returns, from hooks that are there during a probed step alone.

A forward that backward runs once more is passed over, so each call is counted once under every kind of recompute.
Proof: `python -m pytest tests/test_grad_flow_recompute.py`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .backward_pass import (
    at_end_of_backward,
    in_backward,
    in_transform,
    outside_selective_checkpoints,
)
from .flow_layers import Layer
from .flow_sums import empty_sums, sums_of
from .layers import tensors_in


class Hook:
    """A hook of one module, which does nothing in a copy of that module, and does not travel with a pickle of it."""

    def __init__(self, module: nn.Module, call: Callable[..., None]) -> None:
        self.module, self.call = module, call

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        if module is self.module:
            self.call(*arguments)

    def __deepcopy__(self, memo: Any) -> "Hook":
        return self

    def __reduce__(self) -> Any:
        return _nothing_to_do, ()


def _nothing_to_do() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """In place of a hook."""


class Activations:
    """Hooks on a model and its layers. The sums are made room for at once, so that a step holds nothing more."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *,
        before_forward: Callable[[], None],
        after_backward: Callable[[], None],
    ) -> None:
        self._model, self._layers = model, layers
        self._before_forward, self._after_backward = before_forward, after_backward
        self._handles: list[Any] = []
        self._sums: dict[torch.device, Tensor] = {}
        for device in {parameter.device for parameter in model.parameters()}:
            self._sums[device] = empty_sums(len(layers), device)
        self.start()

    def start(self) -> None:
        """Count from nothing."""
        self.calls = [0] * len(self._layers)
        self.order: dict[int, None] = {}
        self.num_forwards = 0
        self._training: list[
            bool
        ] = []  # for each running forward of the model, whether it is one of training
        self._waiting = False
        for sums in self._sums.values():
            sums.zero_()

    def attach(self) -> None:
        add = self._handles.append
        add(self._model.register_forward_pre_hook(Hook(self._model, self._enter)))
        # Where forward raises, too, so that what comes next is not taken for a part of it.
        add(self._model.register_forward_hook(Hook(self._model, self._leave), always_call=True))
        compiled = compiled_modules(self._model)
        for index, layer in enumerate(self._layers):
            if layer.module not in compiled:
                add(
                    layer.module.register_forward_hook(
                        Hook(layer.module, functools.partial(self._add, index))
                    )
                )

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def tables(self) -> list[Tensor]:
        """The sums of each device, a row for each layer."""
        return list(self._sums.values())

    def _enter(self, arguments: Any) -> None:
        training = torch.is_grad_enabled() and not in_backward()
        if training:
            self._before_forward()
        self._training.append(training)
        self.num_forwards += training

    def _leave(self, arguments: Any, output: Any) -> None:
        if self._training and self._training.pop():
            self._listen(output)

    def _listen(self, output: Any) -> None:
        """Hear of the backward that comes by these tensors. Parameters won't tell: FSDP2 puts others into forward."""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_came)

    def _gradient_came(self, gradient: Tensor) -> None:
        if not self._waiting:
            self._waiting = True
            at_end_of_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        self._waiting = False
        self._after_backward()

    def _counts(self) -> bool:
        """Inside of the model's forward its grad mode counts: reentrant checkpointing switches it off in between."""
        if in_backward() or torch.compiler.is_compiling() or in_transform():
            return False
        return self._training[-1] if self._training else torch.is_grad_enabled()

    def _add(self, index: int, arguments: Any, output: Any) -> None:
        if not self._counts():
            return
        if not self._training:  # the loop calls parts of the model by themselves
            self._listen(output)
        found = {id(tensor): tensor for tensor in tensors_in(output) if countable(tensor)}
        if not found:
            return
        self.calls[index] += 1
        self.order.setdefault(index)
        with torch.no_grad(), outside_selective_checkpoints():
            for tensor in found.values():
                if tensor.device not in self._sums:
                    self._sums[tensor.device] = empty_sums(len(self._layers), tensor.device)
                self._sums[tensor.device][index].add_(sums_of(tensor))


def countable(tensor: Tensor) -> bool:
    """A tensor with values that are no whole numbers."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta


def compiled_modules(model: nn.Module) -> set[nn.Module]:
    """Modules whose hooks may never run, since they are part of compiled code."""
    tops = [module for module in model.modules() if module._compiled_call_impl is not None]
    originals = [getattr(module, "_orig_mod", None) for module in model.modules()]
    tops += [module for module in originals if isinstance(module, nn.Module)]
    return {module for top in tops for module in top.modules()}
