"""Statistics of each layer's outputs, from hooks attached during probed steps only.

Recomputed forwards are skipped, so each call counts once under every kind of recompute.

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
    """A hook for one module, inactive in copies of the module and absent from its pickles."""

    def __init__(self, module: nn.Module, call: Callable[..., None]) -> None:
        self.module = module
        self.call = call

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
    """Replace a hook in a pickled module."""


class Activations:
    """Hooks on a model and its layers, which add up statistics of activations.

    Memory for the sums is allocated at the start, so that held bytes do not grow in a step.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *,
        before_forward: Callable[[], None],
        after_backward: Callable[[], None],
    ) -> None:
        self._model = model
        self._layers = layers
        self._before_forward = before_forward
        self._after_backward = after_backward
        self._handles: list[Any] = []
        self._sums: dict[torch.device, Tensor] = {}
        for device in {parameter.device for parameter in model.parameters()}:
            self._sums[device] = empty_sums(len(layers), device)
        self.start()

    def start(self) -> None:
        """Reset all counts and sums."""
        self.calls = [0] * len(self._layers)
        self.order: dict[int, None] = {}
        self.num_forwards = 0
        # For each running forward of the model, innermost last: whether it is a training forward.
        self._training: list[bool] = []
        self._waiting = False
        for sums in self._sums.values():
            sums.zero_()

    def attach(self) -> None:
        add = self._handles.append
        add(self._model.register_forward_pre_hook(Hook(self._model, self._enter)))
        # Also if forward raises, so that later calls are not attributed to it.
        add(self._model.register_forward_hook(Hook(self._model, self._leave), always_call=True))
        compiled = compiled_modules(self._model)
        for index, layer in enumerate(self._layers):
            if layer.module not in compiled:
                hook = Hook(layer.module, functools.partial(self._add, index))
                add(layer.module.register_forward_hook(hook))

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def tables(self) -> list[Tensor]:
        """Return one table of sums per device, with one row per layer."""
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
        """Hook these tensors to detect the start of their backward.

        Hooks on parameters would not work, since FSDP2 replaces them during forward.
        """
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
        """Return whether a layer's call counts as part of a training forward.

        Inside the model's forward, the grad mode at its start decides, because reentrant
        checkpointing turns grad mode off for its first forward.
        """
        if in_backward() or torch.compiler.is_compiling() or in_transform():
            return False
        return self._training[-1] if self._training else torch.is_grad_enabled()

    def _add(self, index: int, arguments: Any, output: Any) -> None:
        if not self._counts():
            return
        if not self._training:
            # The training loop calls parts of the model directly, so `_leave` does not run.
            self._listen(output)
        outputs = {id(tensor): tensor for tensor in tensors_in(output) if countable(tensor)}
        if not outputs:
            return

        self.calls[index] += 1
        self.order.setdefault(index)
        with torch.no_grad(), outside_selective_checkpoints():
            for tensor in outputs.values():
                if tensor.device not in self._sums:
                    self._sums[tensor.device] = empty_sums(len(self._layers), tensor.device)
                self._sums[tensor.device][index].add_(sums_of(tensor))


def countable(tensor: Tensor) -> bool:
    """Return whether a tensor is floating-point or complex, and has values."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta


def compiled_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules whose hooks may never run, because they are inside compiled code."""
    roots = [module for module in model.modules() if module._compiled_call_impl is not None]
    originals = [getattr(module, "_orig_mod", None) for module in model.modules()]
    roots += [module for module in originals if isinstance(module, nn.Module)]
    return {module for root in roots for module in root.modules()}
