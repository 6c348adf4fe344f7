"""Measure gradients, activations and updates of each layer in any training loop.

    with GradFlow(model, optimizer, every=10) as flow:
        train(model, optimizer)         # your loop, unchanged
    flow.records[-1].layers["layers.0"].gradient.norm

The statistics are norms, counts of zeros and of non-finite values, and how far the weights move.
Under recompute each layer is counted once: the forward that runs again in backward is skipped.
Training is unchanged to the bit. In curry-train, `flow_table(flow.records)` renders the records as
text, problems first, and `flow_findings(flow.records)` lists the problems.

Proof: `python -m pytest tests/primitives/test_grad_flow_layers.py`.
"""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._python_dispatch import _disable_current_modes

from ..core.blocks import SCRIPTED, Globs, in_transform, inside_wrappers, tensors_in
from .grad_flow_probe import (
    AT_STEP,
    CHANGE,
    GRADIENT,
    OUTPUTS,
    WEIGHTS,
    Layer,
    ProbeHook,
    Sums,
    ValueSpread,
    choose_layers,
    compiled_modules,
    dense,
    group_of_batch,
    in_backward,
    is_divided,
    sums_of,
)

# Records of one probed step: counts, norms and weight updates of each layer.

AFTER_BACKWARD = "after backward"
AT_THE_STEP = "at the optimizer's step"


@dataclass(frozen=True, slots=True)
class Update:
    """Change of a layer's weights in one optimizer step."""

    weight_norm: float  # norm of the weights before the step
    distance: float  # norm of the change

    @property
    def nonfinite(self) -> bool:
        """Return whether this step made weights inf or nan."""
        return math.isfinite(self.weight_norm) and not math.isfinite(self.distance)

    @property
    def ratio(self) -> float | None:
        """Return the relative change, or None if all weights were 0, as in a new bias."""
        return self.distance / self.weight_norm if self.weight_norm else None


@dataclass(frozen=True, slots=True)
class LayerFlow:
    """One layer in one step; values that were not observed are None, which differs from 0."""

    activation: ValueSpread | None  # None if forward got no elements from the layer
    calls: int  # in all microbatches together
    gradient: ValueSpread | None  # None if no parameter got a gradient
    update: Update | None  # None if the optimizer did not step
    without_gradient: tuple[str, ...] = ()  # trainable parameters that have no gradient
    tied: tuple[str, ...] = ()  # parameters that count for an earlier layer
    frozen: tuple[str, ...] = ()  # parameters that require no gradient
    is_block: bool = False  # one of the model's repeated blocks


@dataclass(frozen=True)
class StepFlow:
    """One probed step."""

    step: int  # counted from 0, where the context was opened
    stepped: bool  # False if the step was skipped
    layers: Mapping[str, LayerFlow]  # all probed layers by name
    order: tuple[str, ...]  # in which the layers' forwards ended, inner layers before outer ones
    forwards: int  # of the whole model
    gradient: ValueSpread | None  # of the whole model, with each parameter once
    gradients_read: str  # `AFTER_BACKWARD`, which is before clipping, or `AT_THE_STEP`
    scaled: float | None  # by which clipping or a scaler multiplied it afterwards, if known
    ranks: int = 1  # whose batches are included
    notes: tuple[str, ...] = ()  # limits of this record, for the user

    @property
    def nonfinite(self) -> bool:
        """Return whether any activation, gradient or update was inf or nan."""
        spreads: list[ValueSpread | Update | None] = [self.gradient]
        for layer in self.layers.values():
            spreads += [layer.activation, layer.gradient, layer.update]
        return any(spread is not None and spread.nonfinite for spread in spreads)


# Checks of grad-flow's arguments, and a hook on a function.

# Wrappers that flatten parameters, or that run replicas of the model.
REFUSED_WRAPPERS = ("FullyShardedDataParallel", "DataParallel")


def called_first(call: Callable[[], None], function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that runs `call` before another function."""

    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> None:
        call()
        function(*arguments, **keywords)

    return run


# Per-layer statistics of gradients, activations and weight updates, in any training loop.

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class GradFlow:
    """Probe every `every`-th optimizer step, starting with the first, while the context is open.

    `layers` are globs over module names; without them these are the blocks, the modules that own
    parameters, and the activation modules. A step ends when the last of its optimizers has stepped
    or, without an optimizer, when `flow.step()` is called. Gradients are read when a backward has
    ended, so before clipping, and the last backward of a window counts. With a `scaler` they are
    divided by its scale. With several ranks every rank must open the context.

    The forward that runs again in backward is not counted. `updates` compares the weights before
    and after the step, and needs a copy of them during the optimizer step. `group` is the group of
    ranks that share a batch; for DDP and for one-dimensional FSDP2 it is found automatically.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        *,
        every: int = 10,
        layers: Globs | None = None,
        blocks: Globs | None = None,
        updates: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        group: Any = None,
    ) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"every must be a whole number from 1 up, got {every!r}")
        for module in model.modules():
            if type(module).__name__ in REFUSED_WRAPPERS:
                raise ValueError(
                    f"layers inside {type(module).__name__} can't be probed: use fully_shard or "
                    "DistributedDataParallel"
                )

        self.model = model
        self.every = every
        self.updates = updates
        given: Any = [] if optimizer is None else optimizer
        self.optimizers = list(given) if isinstance(given, list | tuple) else [given]
        parameters = set(model.parameters())
        for one in self.optimizers:
            if not isinstance(one, torch.optim.Optimizer):
                raise ValueError(
                    f"an optimizer is needed, got {type(one).__name__}; pass the one it wraps"
                )
            members = [member for group in one.param_groups for member in group["params"]]
            if parameters.isdisjoint(members):
                raise ValueError(
                    f"{type(one).__name__} holds no parameter of this model: create it after the "
                    "model is moved, sharded or adapted, and pass that optimizer"
                )
        self.records: list[StepFlow] = []
        self.next_step = 0
        self._inner = inside_wrappers(model)
        self._layers = choose_layers(self._inner, layers, blocks=blocks)
        self._scaler = scaler
        self._group = group
        self._is_open = False
        # Undone when the context closes, and after each probed step.
        self._whole = contextlib.ExitStack()
        self._probed = contextlib.ExitStack()

    def __enter__(self) -> "GradFlow":
        if self._is_open:
            raise RuntimeError("this GradFlow is open already: make another one")

        named = self._inner.named_parameters()
        self._named = {name: one for name, one in named if one.requires_grad}
        self._sums = Sums([*(layer.name for layer in self._layers), *self._named], self.model)
        self._ranks = self._group or group_of_batch(self.model)
        self._notes: tuple[str, ...] = ()
        if compiled_modules(self.model):
            self._notes += (COMPILED_NOTE,)
        if self._ranks is None and any(map(is_divided, self._named.values())):
            self._notes += (ONE_RANK,)

        self._is_open = True
        for one in self.optimizers:
            self._whole.enter_context(one.register_step_pre_hook(self._on_step_begin))
            self._whole.enter_context(one.register_step_post_hook(self._on_step_end))
        self._begin()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_open = False
        self._probed.close()
        self._whole.close()

    def step(self) -> None:
        """End a step, in a loop whose optimizer was not passed to `GradFlow`."""
        if self.optimizers:
            raise ValueError(
                "GradFlow was given the optimizer, whose hooks end each step: remove flow.step()"
            )
        if not self._is_open:
            raise RuntimeError(
                "flow.step() was called outside of `with GradFlow(...)`: open the context first"
            )
        if self._probing:
            self._read_at_the_step()
        self._next()

    def _begin(self) -> None:
        """Install the hooks if the next step is probed; other steps run without hooks."""
        self._ended: set[Any] = set()
        self._probing = self.next_step % self.every == 0
        if self._probing:
            self._restart()
            for handle in self._add_hooks():
                self._probed.enter_context(handle)
            for optimizer in self.optimizers:
                # Torch has hooks only for an optimizer's steps.
                zero_grad = called_first(self._on_dropped_gradients, optimizer.zero_grad)
                self._probed.enter_context(mock.patch.object(optimizer, "zero_grad", zero_grad))

    def _restart(self) -> None:
        self._sums.table.zero_()
        # By layer, in the order in which their forwards end.
        self._calls: Counter[str] = Counter()
        self._num_forwards = 0
        # For each running forward of the model, innermost last: whether it is a training forward.
        self._training: list[bool] = []
        # Whether the end of a backward is awaited.
        self._waiting = False
        # The parameters that had a gradient when gradients were last read, and when that was.
        self._read: set[str] = set()
        self._read_at = ""
        # Whether the step of an optimizer has begun, and the weights before it.
        self._began = False
        self._copies: dict[str, Tensor] = {}
        self._overflowed: list[Tensor] = []

    def _add_hooks(self) -> Iterator[Any]:
        """Add the hooks, and yield their handles."""
        model = self.model
        compiled = compiled_modules(model)
        yield model.register_forward_pre_hook(ProbeHook(model, self._enter))
        # Also if forward raises, so that later calls are not attributed to it.
        yield model.register_forward_hook(ProbeHook(model, self._leave), always_call=True)
        for layer in self._layers:
            if layer.module not in compiled and not isinstance(layer.module, SCRIPTED):
                add = functools.partial(self._add, layer.name)
                yield layer.module.register_forward_hook(ProbeHook(layer.module, add))

    def _enter(self, arguments: Any) -> None:
        training = torch.is_grad_enabled() and not (in_backward() or in_transform())
        if training and self._read and not self._find_with_gradient():
            self._on_dropped_gradients()
        self._training.append(training)
        self._num_forwards += training

    def _leave(self, arguments: Any, output: Any) -> None:
        if self._training and self._training.pop():
            self._listen(output)

    def _listen(self, output: Any) -> None:
        """Hook the nodes of these tensors to detect the start of their backward.

        Hooks on parameters would not work, since FSDP2 replaces them during forward.
        """
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                node = tensor.grad_fn
                register = tensor.register_hook if node is None else node.register_prehook
                register(self._on_gradient)

    def _on_gradient(self, gradients: Any) -> None:
        """Wait for the end of this backward, after callbacks that others queue.

        By then gradients have been summed over ranks and sharded.
        """
        if not self._waiting:
            self._waiting = True
            engine: Any = Variable._execution_engine
            # A callback queued by a callback runs after all that were queued during backward.
            engine.queue_callback(lambda: engine.queue_callback(self._on_backward_end))

    def _add(self, name: str, arguments: Any, output: Any) -> None:
        # Inside the model's forward, the grad mode at its start decides, because reentrant
        # checkpointing turns grad mode off for its first forward.
        trains = self._training[-1] if self._training else torch.is_grad_enabled()
        if not trains or in_backward() or torch.compiler.is_compiling() or in_transform():
            return
        if not self._training:
            # The training loop calls parts of the model directly, so `_leave` does not run.
            self._listen(output)
        # The stand-in for the logits of a chunked loss has no values.
        outputs = {
            tensor: None
            for tensor in tensors_in(output)
            if (tensor.is_floating_point() or tensor.is_complex())
            and not (tensor.is_meta or hasattr(tensor, "logits"))
        }
        if not outputs:
            return

        self._calls[name] += 1
        # Without modes, selective checkpointing neither caches nor replays these operations.
        with torch.no_grad(), _disable_current_modes():
            for tensor in outputs:
                sums = self._sums.of(name, OUTPUTS)
                sums.add_(sums_of(tensor).to(sums))

    def _next(self) -> None:
        if self._probing:
            self._close(stepped=True)
        self._probed.close()
        self.next_step += 1
        self._begin()

    def _find_with_gradient(self) -> set[str]:
        return {name for name, parameter in self._named.items() if parameter.grad is not None}

    def _on_dropped_gradients(self) -> None:
        """Record a skipped step when gradients are dropped before an optimizer has used them.

        The step number does not advance, so the same step is probed again.
        """
        if self._read_at == AFTER_BACKWARD and not self._began:
            self._close(stepped=False)
            self._restart()

    def _on_backward_end(self) -> None:
        self._waiting = False
        if not self._probing or self._began:
            return
        scale = None
        if self._scaler is not None and self._scaler.is_enabled():
            # As a tensor on the device; `get_scale()` would wait for the device.
            scale = self._scaler.scale(self._sums.table.new_ones(()))
        self._read_gradients(AFTER_BACKWARD, scale)

    def _read_at_the_step(self, scale: Tensor | None = None) -> None:
        """Read the gradients unless each that is there now was there at the last backward."""
        if not (self._read_at and self._find_with_gradient() <= self._read):
            self._read_gradients(AT_THE_STEP, scale)

    @torch.no_grad()
    def _read_gradients(self, where: str, scale: Tensor | None) -> None:
        """Sum up the current gradients; `scale` is the loss scale, which is divided out."""
        self._read = self._find_with_gradient()
        self._read_at = where
        for name, parameter in self._named.items():
            sums = self._sums.of(name, GRADIENT).zero_()
            if parameter.grad is not None:
                sums.copy_(_sum_unscaled(parameter.grad, scale))

    def _find_parameters(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
        members = {one for group in optimizer.param_groups for one in group["params"]}
        return [(name, one) for name, one in self._named.items() if one in members]

    @torch.no_grad()
    def _on_step_begin(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        if not self._probing:
            return
        self._began = True
        # A scaler leaves the division by the scale to a fused optimizer.
        scale = getattr(optimizer, "grad_scale", None)
        # With a closure, the optimizer runs the model inside of its step.
        if not any(callable(value) for value in (*arguments[1:], *keywords.values())):
            self._read_at_the_step(scale)
        for name, parameter in self._find_parameters(optimizer):
            if parameter.grad is not None:
                self._sums.of(name, AT_STEP).copy_(_sum_unscaled(parameter.grad, scale))
            if self.updates:
                self._copies[name] = dense(parameter.detach()).clone()

    @torch.no_grad()
    def _on_step_end(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        self._ended.add(optimizer)
        if self._probing:
            self._read_at_the_step()
            for name, parameter in self._find_parameters(optimizer):
                before = self._copies.pop(name, None)
                if before is not None:
                    self._sums.of(name, WEIGHTS).copy_(sums_of(before))
                    # The difference of two near numbers is exact in their own precision.
                    change = dense(parameter.detach()) - before
                    self._sums.of(name, CHANGE).copy_(sums_of(change))
            overflowed = getattr(optimizer, "found_inf", None)
            if overflowed is not None:
                self._overflowed.append(overflowed)
        if len(self._ended) == len(self.optimizers):
            self._next()

    def _close(self, *, stepped: bool) -> None:
        """Make the record of the step; this waits for the device."""
        layer_names = [layer.name for layer in self._layers]
        total = self._sums.over_ranks(layer_names, self._ranks, self._named)
        calls = self._calls
        # A fused optimizer's step is always called, and does nothing if the scaler found overflow.
        stepped = stepped and not any(found.item() for found in self._overflowed)

        def flow_of(layer: Layer) -> LayerFlow:
            activation, gradient, _, weights, change = total([layer.name, *layer.parameters])
            return LayerFlow(
                activation=activation,
                calls=calls[layer.name],
                gradient=gradient,
                update=(
                    Update(weights.norm, change.norm) if stepped and weights and change else None
                ),
                without_gradient=tuple(name for name in layer.parameters if name not in self._read),
                tied=tuple(layer.tied),
                frozen=tuple(layer.frozen),
                is_block=layer.is_block,
            )

        _, gradient, at_step, *_ = total(self._named)
        scaled = None
        if gradient and at_step and gradient.norm:
            scaled = at_step.norm / gradient.norm
        self.records.append(
            StepFlow(
                step=self.next_step,
                stepped=stepped,
                order=tuple(calls),
                layers={layer.name: flow_of(layer) for layer in self._layers},
                forwards=self._num_forwards,
                gradient=gradient,
                gradients_read=self._read_at,
                scaled=scaled,
                ranks=1 if self._ranks is None else dist.get_world_size(self._ranks),
                notes=self._notes,
            )
        )


def _sum_unscaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    sums = sums_of(gradient)
    if scale is not None:
        *_, squares = sums
        squares /= scale.detach().to(sums).square().reshape(())
    return sums


COMPILED_NOTE = "compiled code runs no hooks: activations inside of it were not measured"
ONE_RANK = (
    "activations are those of this rank only: pass group= to add up the ranks that share a batch"
)
