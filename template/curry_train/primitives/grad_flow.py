"""Measure gradients, activations and updates of each layer in any training loop.

with GradFlow(model, optimizer, every=10) as flow:
        train(model, optimizer)         # your loop, unchanged
    print(flow.table())                 # problems come first
    flow.records[-1].layers["layers.0"].gradient.norm

The statistics are norms, counts of zeros and of non-finite values, and how far the weights move.
Under recompute each layer is counted once: the forward that runs again in backward is skipped.
Training is unchanged to the bit.

Proof: `python -m pytest tests/primitives/test_grad_flow_layers.py tests/gates/test_grad_flow.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from .grad_flow_probe import (
    Activations,
    ParameterSums,
    choose_layers,
    compiled_modules,
    group_of_batch,
    inner_of,
    is_divided,
)
from .grad_flow_report import (
    AFTER_BACKWARD,
    AT_THE_STEP,
    Finding,
    StepFlow,
    as_json,
    find,
    flow_table,
    make_record,
)

# Checks of grad-flow's arguments, and a hook on an optimizer's `zero_grad`.

RECOMPUTE_MODES = ("filter", "off")
# Wrappers that can't be probed, with the reason and the alternative.
REFUSED_WRAPPERS = {
    "FullyShardedDataParallel": (
        "flattens parameters, which then can't be assigned to layers: use fully_shard"
    ),
    "DataParallel": "runs replicas of the model, which are not probed: use DistributedDataParallel",
}


@contextlib.contextmanager
def told_of_zero_grad(optimizer: torch.optim.Optimizer, call: Callable[[], None]) -> Iterator[None]:
    """Run `call` before each `zero_grad` of an optimizer; torch has hooks only for its steps."""
    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def call_first(*arguments: Any, **keywords: Any) -> None:
        call()
        zero_grad(*arguments, **keywords)

    previous = optimizer.__dict__.get("zero_grad")
    optimizer.__dict__["zero_grad"] = call_first
    try:
        yield
    finally:
        # If other code has wrapped it in between, that wrapper stays.
        if optimizer.__dict__.get("zero_grad") is call_first:
            del optimizer.__dict__["zero_grad"]
            if previous is not None:
                optimizer.__dict__["zero_grad"] = previous


def check_arguments(model: Any, every: Any, recompute: Any, first_step: Any, scaler: Any) -> None:
    """Raise an error for arguments that are invalid, and models that can't be probed."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"GradFlow probes a module, got {type(model).__name__}")
    for name, value, least in (("every", every, 1), ("first_step", first_step, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number from {least} up, got {value!r}")
    if recompute not in RECOMPUTE_MODES:
        raise ValueError(
            f"recompute must be one of {', '.join(RECOMPUTE_MODES)}, got {recompute!r}"
        )
    if not (scaler is None or isinstance(scaler, torch.amp.GradScaler)):
        raise ValueError(f"scaler must be a GradScaler, got {type(scaler).__name__}")
    for module in model.modules():
        advice = REFUSED_WRAPPERS.get(type(module).__name__)
        if advice is not None:
            raise ValueError(f"{type(module).__name__} {advice}")


def optimizers_of(model: nn.Module, given: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list; each must hold parameters of the model."""
    if given is None:
        return []
    optimizers = list(given) if isinstance(given, list | tuple) else [given]
    parameters = set(model.parameters())
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"an optimizer is needed, got {type(optimizer).__name__}; pass the one it wraps"
            )
        members = [member for group in optimizer.param_groups for member in group["params"]]
        if not any(member in parameters for member in members):
            raise ValueError(
                f"{type(optimizer).__name__} holds no parameter of this model: create it after the "
                "model is moved, sharded or adapted, and pass that optimizer"
            )
    return optimizers


# Temporarily switch off recompute, whether this project, a library or the model applied it.

NON_REENTRANT_GENERATOR = "_checkpoint_without_reentrant_generator"
REENTRANT_CLASS = "CheckpointFunction"
# The class is named and not imported, so that recompute of any origin is found.
OWN_OPTIONS_CLASS = "RecomputeOptions"


class _ReentrantReplacement:
    """Replacement for the autograd function of reentrant checkpointing."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _nothing_around(*_: Any, **__: Any) -> Iterator[None]:
    """Replacement for the generator that torch runs around a non-reentrant checkpoint."""
    yield


@contextlib.contextmanager
def recompute_off(model: nn.Module) -> Iterator[None]:
    """Save all activations of forwards inside the context.

    Random numbers, statistics and results are the same as with recompute.
    """
    before = {
        name: getattr(torch_checkpoint, name) for name in (NON_REENTRANT_GENERATOR, REENTRANT_CLASS)
    }
    options = [
        (module, name, value)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if type(value).__name__ == OWN_OPTIONS_CLASS and value.enabled
    ]
    try:
        # Our own options are disabled too: a reentrant block takes a forward in grad mode for its
        # second one.
        for module, name, value in options:
            module.__dict__[name] = replace(value, enabled=False)
        setattr(torch_checkpoint, NON_REENTRANT_GENERATOR, _nothing_around)
        setattr(torch_checkpoint, REENTRANT_CLASS, _ReentrantReplacement)
        yield
    finally:
        for name, value in before.items():
            setattr(torch_checkpoint, name, value)
        for module, name, value in options:
            module.__dict__[name] = value


# Per-layer statistics of gradients, activations and weight updates, in any training loop.

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class GradFlow:
    """Probe every `every`-th optimizer step, starting with the first, while the context is open.

    `layers` are globs over module names; without them these are the blocks, the modules that own
    parameters, and the activation modules. A step ends when the last of its optimizers has stepped
    or, without an optimizer, when `flow.step()` is called. Gradients are read when a backward has
    ended, so before clipping, and the last backward of a window counts. With a `scaler` they are
    divided by its scale. With several ranks every rank must open the context.

    `recompute="filter"` skips the forward that runs again in backward; `"off"` turns recompute off
    in probed steps, which then hold all activations. `updates` compares the weights before and
    after the step, and needs a copy of them during the optimizer step. `group` is the group of
    ranks that share a batch; for DDP and for one-dimensional FSDP2 it is found automatically.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        *,
        every: int = 10,
        layers: str | Sequence[str] | None = None,
        blocks: str | Sequence[str] | None = None,
        recompute: str = "filter",
        updates: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        group: Any = None,
        first_step: int = 0,
    ) -> None:
        check_arguments(model, every, recompute, first_step, scaler)
        self.model = model
        self.every = every
        self.recompute = recompute
        self.updates = updates
        self.optimizers = optimizers_of(model, optimizer)
        self.records: list[StepFlow] = []
        self.next_step = first_step
        self._inner = inner_of(model)
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

        named = {
            name: value for name, value in self._inner.named_parameters() if value.requires_grad
        }
        self._parameters = ParameterSums(named)
        self._activations = Activations(
            self.model,
            self._layers,
            before_forward=self._before_forward,
            after_backward=self._backward_ended,
        )
        self._ranks = self._group or group_of_batch(self.model)

        is_sharded = any(map(is_divided, named.values()))
        notes = []
        if compiled_modules(self.model):
            notes.append(COMPILED_NOTE)
        if is_sharded and self._ranks is None:
            notes.append(ONE_RANK)
        self._notes = tuple(notes)

        self._is_open = True
        for optimizer in self.optimizers:
            for handle in (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ):
                self._whole.callback(handle.remove)
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
            if not self._parameters.were_read():
                self._read(AT_THE_STEP, None)
            self._close(stepped=True)
        self._next()

    @property
    def findings(self) -> list[Finding]:
        """Problems found in the records, worst first."""
        return find(self.records)

    def table(self, *, most: int = 24) -> str:
        """Render the findings and the layers of the last step in at most 80 columns."""
        return flow_table(self.records, most=most)

    def to_json(self) -> dict[str, Any]:
        """Return all records and findings; non-finite figures become the words `inf` and `nan`."""
        return {
            "every": self.every,
            "recompute": self.recompute,
            "findings": as_json(self.findings),
            "steps": as_json(self.records),
        }

    def _begin(self) -> None:
        """Install the hooks if the next step is probed; other steps run without hooks."""
        self._probing = self._is_open and self.next_step % self.every == 0
        if not self._probing:
            return

        self._restart()
        with contextlib.ExitStack() as stack:
            if self.recompute == "off":
                stack.enter_context(recompute_off(self.model))
            stack.callback(self._activations.detach)
            self._activations.attach()
            for optimizer in self.optimizers:
                stack.enter_context(told_of_zero_grad(optimizer, self._gradients_go))
            self._probed = stack.pop_all()

    def _restart(self) -> None:
        self._activations.start()
        self._parameters.start()
        self._read_at = ""
        self._began: set[int] = set()
        self._ended: set[int] = set()
        self._overflowed: list[Tensor] = []

    def _next(self) -> None:
        self._probed.close()
        self.next_step += 1
        self._begin()

    def _before_forward(self) -> None:
        if self._parameters.are_gone():
            self._gradients_go()

    def _gradients_go(self) -> None:
        """Record a skipped step when gradients are dropped before an optimizer has used them.

        The step number does not advance, so the same step is probed again.
        """
        if self._read_at == AFTER_BACKWARD and not self._began:
            self._close(stepped=False)
            self._restart()

    def _backward_ended(self) -> None:
        if self._probing and not self._began:
            self._read(AFTER_BACKWARD, self._scale())

    def _read(self, where: str, scale: Tensor | None) -> None:
        self._parameters.read(scale)
        self._read_at = where

    def _scale(self) -> Tensor | None:
        """Return the scale as a device tensor; `get_scale()` would wait for the device."""
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        return self._scaler.scale(torch.ones((), device=next(self.model.parameters()).device))

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        if not self._probing:
            return
        self._began.add(id(optimizer))
        # A scaler leaves the division by the scale to a fused optimizer.
        scale = getattr(optimizer, "grad_scale", None)
        evaluates = any(callable(value) for value in (*arguments[1:], *keywords.values()))
        if not evaluates and not self._parameters.were_read():
            self._read(AT_THE_STEP, scale)
        self._parameters.before_step(optimizer, updates=self.updates, scale=scale)

    def _after_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        if not self._probing:
            if optimizer is self.optimizers[-1]:
                self._next()
            return
        # True after an optimizer that evaluates the model inside its step.
        if not self._parameters.were_read():
            self._read(AT_THE_STEP, None)
        self._parameters.after_step(optimizer)

        overflowed = getattr(optimizer, "found_inf", None)
        if overflowed is not None:
            self._overflowed.append(overflowed)

        self._ended.add(id(optimizer))
        if len(self._ended) == len(self.optimizers):
            self._close(stepped=True)
            self._next()

    def _close(self, *, stepped: bool) -> None:
        record = make_record(
            self._layers,
            self._activations,
            self._parameters,
            step=self.next_step,
            stepped=stepped,
            read_at=self._read_at,
            overflowed=self._overflowed,
            ranks=self._ranks,
            notes=self._notes,
        )
        self.records.append(record)


COMPILED_NOTE = "compiled code runs no hooks: activations inside of it were not measured"
ONE_RANK = (
    "activations are those of this rank only: pass group= to add up the ranks that share a batch"
)
