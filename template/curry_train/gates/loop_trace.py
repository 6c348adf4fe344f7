"""Record what a training loop does, in order, while it runs as it is.

    with observing(num_steps=3) as trace:
        train()
    trace.windows(trace.optimizers[0])

Torch's calls are replaced meanwhile by ones that record and then call the original. A window is
what an optimizer's step is made of: all events since its step before.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import contextlib
import gc
import inspect
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from .verdict import LIBRARIES

LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "kl_div")
CLIPS = ("clip_grad_norm_", "clip_grad_value_")
# Parameters are compared before and after a step up to this number of elements.
MOST_COMPARED = 2 * 10**8


def users_place() -> str:
    """Return file and line of the innermost frame that is in no library, or an empty text."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@dataclass(eq=False)
class Event:
    """A call that the loop made, at a line of the user's."""

    place: str
    # Whether it happened inside of an optimizer's step, as in a closure.
    in_step: bool


@dataclass(eq=False)
class Forward(Event):
    """A call of a module that is inside of no other one, with gradients."""

    module: nn.Module
    training: bool
    # A sum over its inputs; None if they hold no tensor.
    digest: float | None
    # Autocast's type, if it is on.
    autocast: torch.dtype | None


@dataclass(eq=False)
class LossCall(Event):
    """A call of one of torch's loss functions, with what was found in its arguments."""

    name: str
    value: float
    # The number of targets that count; None if the result is no mean or sum over them.
    num_terms: int | None
    reduction: str
    # The operation that made the input, such as `SoftmaxBackward0`.
    made_by: str
    row_sums: tuple[float, float]
    # Of targets that stand for tokens: the share that equals the model's input at this place,
    # by the places that it lies ahead.
    same_as_input: Mapping[int, float]
    # Whether a target counts where the attention mask of the forward pass is 0.
    counts_padding: bool | None
    node: Any


@dataclass(eq=False)
class Backward(Event):
    """A call of backward on a loss."""

    value: float
    scale: float
    in_autocast: bool
    # Optimizers whose gradients were all None or 0 when it began.
    clean: frozenset[int]
    # The one loss function that the loss is a multiple of, if so.
    loss: LossCall | None
    # Optimizers whose gradients it changed.
    reached: frozenset[int] = frozenset()


@dataclass(eq=False)
class Clip(Event):
    """A clipping of gradients."""

    parameters: frozenset[int]
    # Whether these gradients are still multiplied by a scaler's scale.
    is_scaled: bool


@dataclass(eq=False)
class Zero(Event):
    """A call that sets gradients to zero or None, after gradients were there."""

    parameters: frozenset[int]


@dataclass(eq=False)
class Step(Event):
    """A step of an optimizer, with what it did to parameters."""

    optimizer: Optimizer
    rates: list[float]
    # Parameters by id: those with a gradient, those that changed, and frozen ones that changed.
    with_gradient: frozenset[int]
    moved: frozenset[int] | None
    frozen_moved: frozenset[int]
    by_scaler: bool


@dataclass(eq=False)
class Schedule(Event):
    """A step of a learning rate's schedule."""

    scheduler: LRScheduler


@dataclass(eq=False)
class Scaling(Event):
    """A call of a gradient scaler."""

    call: str
    is_enabled: bool


class EnoughSteps(BaseException):
    """The loop has made the steps that were asked for."""


@dataclass
class Trace:
    """The events of a loop, in order, and the objects that it has."""

    events: list[Event] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    # Trained modules that were called with gradients, inside of no other one.
    roots: list[nn.Module] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    # Modules that ran, by whether torch recorded gradients, by their ids.
    ran: dict[bool, dict[int, nn.Module]] = field(default_factory=lambda: {True: {}, False: {}})
    # Outputs and losses with their graphs: a reference, the number of steps before, the place.
    graphs: list[tuple[weakref.ref[Tensor], int, str]] = field(default_factory=list)
    # Places at which an output or loss of two steps ago or more is still held, with its graph.
    held_graphs: list[str] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def windows(self, optimizer: Optimizer) -> list[list[Event]]:
        """Return the events of each step of an optimizer, which come last in it."""
        found: list[list[Event]] = [[]]
        for event in self.events:
            found[-1].append(event)
            if isinstance(event, Step) and event.optimizer is optimizer:
                found.append([])
        return found[:-1]


class Observer:
    """The replaced calls, which write to a trace."""

    def __init__(self, num_steps: int, when_enough: Callable[[Trace], None]) -> None:
        self.trace = Trace()
        self.num_steps = num_steps
        self.when_enough = when_enough
        # Steps that each optimizer has made, by its id.
        self.num_made = Counter[int]()
        self.depth = 0
        self.schedule_depth = 0
        self.stepping: list[Optimizer] = []
        self.before: dict[int, Tensor] = {}
        self.scaler: Any = None
        self.scaler_steps = False
        self.losses: list[LossCall] = []
        # The tokens and the mask of the last forward pass.
        self.tokens: Tensor | None = None
        self.mask: Tensor | None = None

    def _at(self) -> dict[str, Any]:
        return {"place": users_place(), "in_step": bool(self.stepping)}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        scaler = torch.amp.GradScaler
        with contextlib.ExitStack() as stack:
            for hook in hooks:
                stack.callback(hook.remove)

            def replace(owner: Any, name: str, make: Callable[..., Any]) -> None:
                function = make(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, function))

            replace(nn.Module, "__call__", self._module)
            replace(Optimizer, "__init__", self._made)
            replace(torch.autograd, "backward", self._backward)
            # Compiled code can't be observed; the same code runs uncompiled.
            replace(torch, "compile", lambda _: _uncompiled)
            replace(nn.Module, "compile", lambda _: lambda *args, **options: None)
            for name in LOSSES:
                replace(F, name, self._loss)
            for name in CLIPS:
                make = self._clip
                for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
                    replace(owner, name, make)
            replace(Optimizer, "zero_grad", self._zero)
            replace(nn.Module, "zero_grad", self._zero)
            for one in _with_own_step(LRScheduler):
                replace(one, "step", self._schedule)
            for name in ("scale", "unscale_", "step", "update"):
                replace(scaler, name, self._scaling)
            yield

    def _module(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any, **options: Any) -> Any:
            has_gradients = torch.is_grad_enabled()
            self.trace.ran[has_gradients][id(module)] = module
            is_root = not self.depth and has_gradients
            if is_root:
                self._note_inputs(module, args, options)
            self.depth += 1
            try:
                output = call(module, *args, **options)
            finally:
                self.depth -= 1
            if is_root:
                self._note_graphs(output)
            return output

        return run

    def _note_inputs(self, module: nn.Module, args: Any, options: Mapping[str, Any]) -> None:
        trace = self.trace
        if not any(one is module for one in trace.roots) and any(
            parameter.requires_grad for parameter in module.parameters()
        ):
            trace.roots.append(module)
            for name, parameter in module.named_parameters():
                trace.names.setdefault(id(parameter), name)
        tensors = [one for one in tree_leaves((args, options)) if isinstance(one, Tensor)]
        sums = [float(one.detach().double().sum()) for one in tensors if one.numel()]
        tokens = options.get("input_ids", args[0] if args else None)
        is_tokens = isinstance(tokens, Tensor) and not tokens.is_floating_point()
        self.tokens = tokens if is_tokens and tokens.dim() == 2 else None
        mask = options.get("attention_mask")
        self.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        device = tensors[0].device.type if tensors else "cpu"
        is_on = torch.is_autocast_enabled(device)
        autocast = torch.get_autocast_dtype(device) if is_on else None
        trace.events.append(
            Forward(
                **self._at(),
                module=module,
                training=module.training,
                digest=sum(sums) if sums else None,
                autocast=autocast,
            )
        )

    def _note_graphs(self, value: Any) -> None:
        number = max(self.num_made.values(), default=0)
        for one in tree_leaves(value):
            if isinstance(one, Tensor) and one.grad_fn is not None:
                self.trace.graphs.append((weakref.ref(one), number, users_place()))

    def _loss(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def run(*args: Any, **options: Any) -> Any:
            value = function(*args, **options)
            if torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad:
                bound = signature.bind(*args, **options)
                bound.apply_defaults()
                facts = loss_facts(function.__name__, value, bound.arguments)
                call = LossCall(**self._at(), **facts, **self._token_facts(bound.arguments))
                self.losses.append(call)
                self.trace.events.append(call)
            return value

        return run

    def _token_facts(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Compare targets that are indices with the integers that the model was given."""
        facts: dict[str, Any] = {"same_as_input": {}, "counts_padding": None}
        target = options["target"]
        if target.is_floating_point():
            return facts
        tokens = self.tokens
        if tokens is None or target.numel() % len(tokens):
            return facts
        targets = target.reshape(len(tokens), -1)
        counted = targets != options.get("ignore_index", -100)
        # Targets of a part of the tokens, whose first or last ones are left out.
        if not 0 <= tokens.shape[1] - targets.shape[1] <= 2:
            return facts
        for ahead in (0, 1, 2):
            width = min(targets.shape[1], tokens.shape[1] - ahead)
            valid = counted[:, :width]
            if valid.any():
                equal = targets[:, :width] == tokens[:, ahead : ahead + width]
                facts["same_as_input"][ahead] = float(equal[valid].float().mean())
        same = facts["same_as_input"]
        if self.mask is not None and self.mask.shape == tokens.shape:
            ahead = int(same.get(1, 0) > same.get(0, 0))
            padding = self.mask[:, ahead:] == 0
            width = min(padding.shape[1], targets.shape[1])
            facts["counts_padding"] = bool((padding[:, :width] & counted[:, :width]).any())
        return facts

    def _backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensors: Any, *args: Any, **options: Any) -> None:
            loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
            if self.depth or loss.numel() != 1:
                backward(tensors, *args, **options)
                return
            event = self._backward_event(loss)
            optimizers = list(self.trace.optimizers)
            before = [_gradient_versions(one) for one in optimizers]
            backward(tensors, *args, **options)
            after = [_gradient_versions(one) for one in optimizers]
            event.reached = frozenset(
                id(one)
                for one, old, new in zip(optimizers, before, after, strict=True)
                if old != new
            )
            self.losses.clear()

        return run

    def _backward_event(self, loss: Tensor) -> Backward:
        self._note_graphs(loss)
        # One of which the loss is a multiple, among those since the last backward.
        of_loss = [one for one in self.losses if is_multiple(loss, one.node)]
        event = Backward(
            **self._at(),
            value=float(loss.detach()),
            scale=self._scale(),
            in_autocast=torch.is_autocast_enabled(loss.device.type),
            clean=frozenset(id(one) for one in self.trace.optimizers if _is_clean(one)),
            loss=of_loss[0] if len(of_loss) == 1 else None,
        )
        self.trace.events.append(event)
        return event

    def _scale(self) -> float:
        is_on = self.scaler is not None and self.scaler.is_enabled()
        return float(self.scaler.get_scale()) if is_on else 1.0

    def _made(self, init: Callable[..., Any]) -> Callable[..., Any]:
        def run(optimizer: Optimizer, *args: Any, **options: Any) -> None:
            init(optimizer, *args, **options)
            self.trace.optimizers.append(optimizer)

        return run

    def _clip(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        def run(parameters: Any, *args: Any, **options: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            states = {} if self.scaler is None else self.scaler._per_optimizer_states
            stages = [one["stage"].name for one in states.values()]
            is_scaled = self._scale() != 1 and "UNSCALED" not in stages
            ids = frozenset(map(id, given))
            self.trace.events.append(Clip(**self._at(), parameters=ids, is_scaled=is_scaled))
            return clip(given, *args, **options)

        return run

    def _zero(self, zero: Callable[..., Any]) -> Callable[..., Any]:
        def run(owner: Any, *args: Any, **options: Any) -> Any:
            parameters = list(_parameters(owner))
            if any(parameter.grad is not None for parameter in parameters):
                ids = frozenset(map(id, parameters))
                self.trace.events.append(Zero(**self._at(), parameters=ids))
            return zero(owner, *args, **options)

        return run

    def _schedule(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(scheduler: LRScheduler, *args: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_code.co_name
            if not self.schedule_depth and caller != "_initial_step":
                self.trace.events.append(Schedule(**self._at(), scheduler=scheduler))
            self.schedule_depth += 1
            try:
                return step(scheduler, *args, **options)
            finally:
                self.schedule_depth -= 1

        return run

    def _scaling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        name = call.__name__

        def run(scaler: Any, *args: Any, **options: Any) -> Any:
            self.scaler = scaler
            enabled = scaler.is_enabled()
            self.trace.events.append(Scaling(**self._at(), call=name, is_enabled=enabled))
            self.scaler_steps = name == "step"
            try:
                return call(scaler, *args, **options)
            finally:
                self.scaler_steps = False

        return run

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.stepping:
            compared = [*_parameters(optimizer), *self._frozen()]
            if sum(one.numel() for one in compared) <= MOST_COMPARED:
                self.before = {id(one): one.detach().clone() for one in compared}
        self.stepping.append(optimizer)

    def _frozen(self) -> list[Tensor]:
        return [
            parameter
            for root in self.trace.roots
            for parameter in root.parameters()
            if not parameter.requires_grad
        ]

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.stepping.pop()
        if self.stepping:  # an optimizer that steps another one
            return
        parameters = list(_parameters(optimizer))
        moved = frozenset(id(one) for one in parameters if self._has_moved(one))
        trace = self.trace
        trace.events.append(
            Step(
                **self._at(),
                optimizer=optimizer,
                rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
                with_gradient=frozenset(id(one) for one in parameters if one.grad is not None),
                moved=moved if self.before else None,
                frozen_moved=frozenset(id(one) for one in self._frozen() if self._has_moved(one)),
                by_scaler=self.scaler_steps,
            )
        )
        self.before = {}
        self.num_made[id(optimizer)] += 1
        if self.num_made[id(optimizer)] >= self.num_steps:
            self.finish()
            self.when_enough(trace)

    def _has_moved(self, parameter: Tensor) -> bool:
        before = self.before.get(id(parameter))
        return before is not None and not torch.equal(before, parameter.detach())

    def finish(self) -> None:
        gc.collect()
        num_steps = max(self.num_made.values(), default=0)
        held = [
            place
            for reference, number, place in self.trace.graphs
            if number <= num_steps - 3 and (one := reference()) is not None and one.grad_fn
        ]
        self.trace.held_graphs = list(dict.fromkeys(held))
        self.trace.loaders = _living(torch.utils.data.DataLoader)


def loss_facts(name: str, value: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a call of a loss function shows of its input and number of terms."""
    given, target = options["input"].detach(), options["target"]
    num_terms: int | None = target.numel()
    if not target.is_floating_point():
        num_terms = int((target != options.get("ignore_index", -100)).sum())
    if options.get("weight") is not None or value.numel() != 1:
        num_terms = None
    sums = given.exp() if name in ("nll_loss", "kl_div") else given
    sums = sums.float().sum(1 if sums.dim() > 1 else 0)
    return {
        "name": name,
        "value": float(value.detach()) if value.numel() == 1 else float("nan"),
        "num_terms": num_terms,
        "reduction": options["reduction"],
        "made_by": made_by(options["input"]),
        "row_sums": (float(sums.min()), float(sums.max())) if sums.numel() else (1.0, 1.0),
        "node": value.grad_fn,
    }


# Operations that change the shape or type of values alone.
SHAPE_ONLY = (
    "View",
    "Reshape",
    "Transpose",
    "Permute",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Alias",
    "Slice",
    "Select",
    "Clone",
    "T",
    "UnsafeView",
)


def made_by(tensor: Tensor) -> str:
    """Return the operation that computed the values of a tensor."""
    node: Any = tensor.grad_fn
    while node is not None and re.sub(r"Backward\d+$", "", node.name()) in SHAPE_ONLY:
        node = node.next_functions[0][0]
    return "" if node is None else node.name()


def is_multiple(loss: Tensor, node: Any) -> bool:
    """Return whether a loss is a product of a node's value and of constants."""
    at: Any = loss.grad_fn
    while at is not None and at is not node:
        following = [one for one, _ in at.next_functions if one is not None]
        if (
            at.name() not in ("MulBackward0", "DivBackward0", "ToCopyBackward0")
            or len(following) != 1
        ):
            return False
        at = following[0]
    return at is not None


def _living(kind: type) -> list[Any]:
    """Return all instances of a class; asking for `__class__` would wake proxies that warn."""
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _uncompiled(model: Any = None, **_: Any) -> Any:
    return (lambda function: function) if model is None else model


def _with_own_step(base: type) -> list[type]:
    """Return a class and its subclasses that define `step`."""
    own = [base] if "step" in vars(base) else []
    subclass: type
    for subclass in base.__subclasses__():
        own += _with_own_step(subclass)
    return own


def _parameters(owner: Any) -> Iterator[Tensor]:
    if isinstance(owner, nn.Module):
        yield from owner.parameters()
    else:
        for group in owner.param_groups:
            yield from group["params"]


def _gradient_versions(optimizer: Optimizer) -> list[tuple[int, int] | None]:
    """Return what changes with each gradient that is made or added to."""
    versions: list[tuple[int, int] | None] = []
    for parameter in _parameters(optimizer):
        grad = parameter.grad
        # A sharded gradient has its values in a tensor of its own.
        local = getattr(grad, "_local_tensor", grad)
        versions.append(None if local is None else (id(local), local._version))
    return versions


def _is_clean(optimizer: Optimizer) -> bool:
    grads = [one.grad for one in _parameters(optimizer) if one.grad is not None]
    return not any(bool(grad.to_dense().any() if grad.is_sparse else grad.any()) for grad in grads)


def _stop(trace: Trace) -> None:
    raise EnoughSteps


def observe(
    train: Callable[[], Any], *, num_steps: int, when_enough: Callable[[Trace], None] = _stop
) -> Trace:
    """Run a training loop until one of its optimizers has made a number of steps."""
    observer = Observer(num_steps, when_enough)
    # Those that the loop was given; it may make more.
    observer.trace.optimizers += _living(Optimizer)
    with observer.installed(), contextlib.suppress(EnoughSteps):
        train()
        observer.finish()
    return observer.trace
