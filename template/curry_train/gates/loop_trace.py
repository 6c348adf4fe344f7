"""Record what a training loop does, in order, while it runs as it is.

    trace = observe(train, num_steps=8)
    trace.windows[0].calls  # the backward calls of the first step

Torch's calls are replaced meanwhile by ones that record and then call the original.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import contextlib
import gc
import inspect
import itertools
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from ..core.digest import is_plain
from ..primitives.grad_flow_probe import in_transform
from ..runs.fingerprints import LoaderIterator
from .loop_growth import Growth, lines_that_keep
from .loop_loss import (
    ON_CLASSES,
    ON_VALUES,
    Added,
    LossFacts,
    Term,
    digest,
    leaves,
    loss_facts,
    terms_of,
    values_of,
)
from .verdict import LIBRARIES

CLIPS = ("clip_grad_norm_", "clip_grad_value_")
# Parameters are compared before and after a step up to this number of elements.
MOST_COMPARED = 2 * 10**8
MOST_SMALL = 10**6
# A quick loop goes on to the second epoch, up to so many steps for each that was asked for.
MORE_STEPS = 5
# After so many steps of an optimizer a parameter that is in none is looked for.
STEPS_OF_A_STRAY = 3
MORE_SECONDS = 5.0


def users_lines() -> tuple[str, ...]:
    """Return file and line of the frames that are in no library, from the innermost on."""
    found = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES):
            found.append(f"{file.rpartition(os.sep)[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(found)


@dataclass(eq=False)
class Event:
    """A call that the loop made, at a line of the user's."""

    # Files and lines of the user's that led to it, from the innermost on.
    lines: tuple[str, ...]
    # Whether it happened inside of an optimizer's step, as in a closure.
    in_step: bool

    @property
    def place(self) -> str:
        return self.lines[0] if self.lines else ""

    def is_under(self, other: "Event") -> bool:
        """Return whether the line of another event, as a Trainer's call, led to this one."""
        outer = self.lines[len(self.lines) - len(other.lines) :]
        return len(self.lines) > len(other.lines) and outer == other.lines


@dataclass(eq=False)
class Fetch(Event):
    """A batch that a DataLoader returned, or its end (no digests)."""

    loader: DataLoader[Any]
    # The number of the epoch, from when the loader was iterated over anew.
    epoch: int
    digests: tuple[float, ...]
    # Integers of a batch, one per sample.
    labels: tuple[int, ...]
    # Whether all samples are the same.
    is_one_sample: bool


@dataclass(eq=False)
class Forward(Event):
    """A call of a module that is inside of no other one."""

    module: nn.Module
    training: bool
    has_gradients: bool
    digests: tuple[float, ...]
    is_finite: bool
    num_samples: int
    # Autocast's type, if it is on.
    autocast: torch.dtype | None
    # What identifies the state of torch's generator.
    generator: int
    # Whether gradients are exchanged between ranks, where a wrapper decides that.
    syncs: bool | None
    # What identifies the values of its first small parameter.
    weights: float
    # Whether a backward pass has reached its output.
    is_trained_on: bool = False
    # Whether dropout of a function's has a rate in it, in whatever mode.
    drops: bool = False


@dataclass(eq=False)
class LossCall(Event):
    """A call of one of torch's loss functions."""

    facts: LossFacts
    # Of targets that stand for tokens: the share that equals the model's input at this place,
    # by the places that it lies ahead.
    same_as_input: dict[int, float]
    # The module that was given that input.
    model: nn.Module | None
    # What all targets at the end of some rows are, and no other one, if that counts.
    filler: int | None
    # Whether a target counts where the attention mask of the forward pass is 0.
    counts_padding: bool
    # Whether a backward pass has reached it.
    is_used: bool = False


@dataclass(eq=False)
class Dropout(Event):
    """A wrong call of dropout: in evaluation mode, or recomputed with other random numbers."""

    is_recomputed: bool
    # The line of the forward pass.
    at: str

    @property
    def place(self) -> str:
        return self.at


@dataclass(eq=False)
class Backward(Event):
    """A call of backward on a loss."""

    value: float
    scale: float
    in_autocast: bool
    # Optimizers whose gradients were all None or 0 when it began.
    clean: frozenset[int]
    terms: list[Term]
    # Numbers that were added to it, with the line.
    numbers: list[Added]
    # Whether a part of the loss has had a backward call before.
    is_second: bool
    # Whether it made gradients of what the model was given, as an attack does.
    of_inputs: bool
    # The last call of a loss function before it.
    loss_call: LossCall | None
    # Optimizers whose gradients it changed.
    reached: frozenset[int] = frozenset()

    @property
    def place(self) -> str:
        """The line of the loss where a Trainer calls backward, else that of the call."""
        loss = self.loss_call
        return loss.place if loss is not None and loss.is_under(self) else super().place


@dataclass(eq=False)
class Clip(Event):
    """A clipping of gradients."""

    parameters: frozenset[int]
    # The largest norm or value that it leaves.
    limit: float
    # Whether these gradients are still multiplied by a scaler's scale.
    is_scaled: bool


@dataclass(eq=False)
class Zero(Event):
    """A call that sets gradients to zero or None, after gradients were there."""

    parameters: frozenset[int]


@dataclass(eq=False)
class Made(Event):
    """A new optimizer."""

    optimizer: Optimizer


@dataclass(eq=False)
class Step(Event):
    """A step of an optimizer, with what it did to parameters."""

    optimizer: Optimizer
    rates: list[float]
    # Whether it had moments of earlier steps, and has some now.
    had_state: bool
    has_state: bool
    # Whether it had gradients that are not 0, and whether these are the ones of its step before.
    has_gradients: bool
    is_finite: bool
    is_repeated: bool
    # Whether gradients are other tensors than those of the last backward.
    by_hand: bool
    # Parameters that changed, by id, and frozen ones that did; None where there are too many.
    moved: frozenset[int] | None
    frozen_moved: frozenset[int]
    # Parameters with a gradient that is more than noise, by id, and those whose gradient is 0.
    graded: frozenset[int]
    without_slope: frozenset[int]
    # Of elements in half precision with a gradient, the share that changed.
    half_moved: float | None
    # What identifies the values of its parameters before and after it.
    before: float
    after: float
    by_scaler: bool
    in_backward: bool
    generator: int
    made: Made | None

    @property
    def place(self) -> str:
        """The line that made the optimizer where a Trainer steps, else that of the call."""
        made = self.made
        return made.place if made is not None and made.is_under(self) else super().place


@dataclass(eq=False)
class Skipped(Event):
    """A step that a scaler left out, as gradients were not finite."""

    optimizer: Optimizer


@dataclass(eq=False)
class Schedule(Event):
    """A step of a learning rate's schedule."""

    scheduler: LRScheduler
    # The learning rates after it.
    rates: list[float]
    # Steps of it per step of the optimizer; Accelerate makes one for each process.
    num_expected: int


@dataclass(eq=False)
class Scaling(Event):
    """A call of a gradient scaler."""

    call: str
    is_enabled: bool


@dataclass(eq=False)
class Seeding(Event):
    """A call of torch.manual_seed."""


class Window:
    """The events that a step of an optimizer is made of; the step is the last one."""

    def __init__(self, optimizer: Optimizer, events: list[Event]) -> None:
        self.optimizer = optimizer
        self.events = events
        # Backward calls that made gradients of the optimizer. A sharded model keeps those of a
        # microbatch without sync to itself.
        calls = self.of(Backward)
        lines = {one.lines for one in calls if id(optimizer) in one.reached}
        self.calls: list[Backward] = [
            one
            for one in calls
            if id(optimizer) in one.reached or (not one.reached and one.lines in lines)
        ]
        self.forwards = [one for one in self.of(Forward) if one.is_trained_on]

    @property
    def step(self) -> Step:
        step = self.events[-1]
        assert isinstance(step, Step)
        return step

    @property
    def is_by_hand(self) -> bool:
        """Whether the user made the gradients, as from those of several losses."""
        return self.step.by_hand and self.step.has_gradients

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Life:
    """An object that a node of a graph holds, and that goes with it."""


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
    # Parameters behind tensors that the user's code detaches, by id, by the place.
    cut: dict[str, set[int]] = field(default_factory=dict)
    # Parameters that have had a gradient, by id.
    with_gradient: set[int] = field(default_factory=set)
    # Places at which an output or loss of two steps ago or more is still held, with its graph.
    held_graphs: dict[str, None] = field(default_factory=dict)
    # What grows from step to step: the place, and a description.
    growth: list[tuple[str, str]] = field(default_factory=list)
    # Models whose outputs change where a later token does, by id.
    sees_the_future: set[int] = field(default_factory=set)
    # Places at which a model was called whose outputs change with the padding.
    reads_padding: list[str] = field(default_factory=list)
    # Parameters outside of modules that have a gradient, by their shape.
    bare: list[str] = field(default_factory=list)
    # Names of weights whose rows are all alike.
    symmetric: list[str] = field(default_factory=list)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @cached_property
    def optimizers_that_step(self) -> list[Optimizer]:
        return list({id(step.optimizer): step.optimizer for step in self.of(Step)}.values())

    @cached_property
    def windows(self) -> list[Window]:
        """The windows of each optimizer, once all events are there."""
        return [
            Window(optimizer, events)
            for optimizer in self.optimizers_that_step
            for events in self._events_of_steps(optimizer)
        ]

    def windows_of(self, optimizer: Any) -> list[Window]:
        """Return the windows of an optimizer, or of one that wraps it and shares its groups."""
        groups = optimizer.param_groups
        return [one for one in self.windows if one.optimizer.param_groups is groups]

    def _events_of_steps(self, optimizer: Optimizer) -> list[list[Event]]:
        found: list[list[Event]] = [[]]
        for event in self.events:
            found[-1].append(event)
            if isinstance(event, Step | Skipped) and event.optimizer is optimizer:
                if isinstance(event, Skipped):
                    found[-1] = []
                else:
                    found.append([])
        return found[:-1]


class Observer:
    """The replaced calls, which write to a trace."""

    def __init__(self, num_steps: int, when_enough: Callable[[Trace], None]) -> None:
        self.trace = Trace()
        self.num_steps = num_steps
        self.when_enough = when_enough
        self.began = time.monotonic()
        # Steps that each optimizer has made, by its id, and its gradients after the last one.
        self.num_made = Counter[int]()
        self.num_without_step = 0
        self.used: dict[int, Any] = {}
        self.made: dict[int, Made] = {}
        self.made_by_backward: dict[int, list[int]] = {}
        self.depth = 0
        self.schedule_depth = 0
        self.in_backward = False
        self.stepping: list[Optimizer] = []
        self.before: dict[int, Tensor] = {}
        self.before_digest = 0.0
        self.is_compared = False
        self.had_state = False
        # Leaves that models were given and that get a gradient, in this window.
        self.inputs: list[weakref.ref[Tensor]] = []
        # States of generators at which dropout acted in the forward passes of a step, and where.
        self.dropped: dict[int, None] = {}
        self.dropped_at: dict[Any, str] = {}
        self.scaler: Any = None
        self.scaler_steps = False
        self.scaled: Callable[[], Tensor | None] = lambda: None
        self.losses: dict[Any, LossFacts] = {}
        # Numbers without a gradient that were added to scalars, by the node of the sum.
        self.numbers: dict[Any, Added] = {}
        # The last call of torch.autograd.grad whose result has no graph.
        self.cut = ""
        self.loss_call: LossCall | None = None
        # The tokens and the mask of the last forward pass.
        self.tokens: Tensor | None = None
        self.mask: Tensor | None = None
        self.language: tuple[nn.Module, Any, Any] | None = None
        self.probed: set[int] = set()
        # Graphs of outputs and losses: what lives as long, the number of steps before, the place.
        self.graphs: list[tuple[weakref.ref[Any], int, str]] = []
        # Of each iterator: its loader, and how often one was made of it.
        self.loaders: dict[int, tuple[DataLoader[Any], int]] = {}
        self.epochs = Counter[int]()
        self.growth = Growth()

    @property
    def num_steps_made(self) -> int:
        return max(self.num_made.values(), default=0)

    def _at(self) -> dict[str, Any]:
        return {"lines": users_lines(), "in_step": bool(self.stepping)}

    def note(self, kind: type[Event], **facts: Any) -> Any:
        event = kind(**self._at(), **facts)
        self.trace.events.append(event)
        return event

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        with contextlib.ExitStack() as stack:
            for hook in hooks:
                stack.callback(hook.remove)
            for owner, name, make in self._replacements():
                function = make(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, function))
            yield

    def _replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        yield nn.Module, "__call__", self._module
        yield Optimizer, "__init__", self._made
        yield torch.autograd, "backward", self._backward
        yield torch.autograd, "grad", self._grad
        yield Tensor, "detach", self._detach
        yield Tensor, "data", lambda data: property(self._detach(data.__get__), data.__set__)
        for name in ("__add__", "__radd__", "__iadd__", "__sub__"):
            yield Tensor, name, self._add
        # Compiled code can't be observed; the same code runs uncompiled.
        yield torch, "compile", lambda _: _uncompiled
        yield nn.Module, "compile", lambda _: lambda *args, **options: None
        for name in (*ON_CLASSES, *ON_VALUES):
            yield F, name, self._loss
        yield F, "dropout", self._dropout
        for name in CLIPS:
            for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
                yield owner, name, self._clip
        yield Optimizer, "zero_grad", self._zero
        yield nn.Module, "zero_grad", self._zero
        for one in _with_own_step(LRScheduler):
            yield one, "step", self._schedule
        for name in ("scale", "unscale_", "step", "update"):
            yield torch.amp.GradScaler, name, self._scaling
        yield DataLoader, "__iter__", self._loader
        yield LoaderIterator, "__next__", self._fetch
        yield torch, "manual_seed", self._seed
        yield RemovableHandle, "__init__", self._hook

    # Data.

    def _loader(self, iterate: Callable[..., Any]) -> Callable[..., Any]:
        def run(loader: DataLoader[Any]) -> Any:
            batches = iterate(loader)
            self.epochs[id(loader)] += 1
            self.loaders[id(batches)] = loader, self.epochs[id(loader)]
            return batches

        return run

    def _fetch(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        def run(batches: Any) -> Any:
            loader, epoch = self.loaders.get(id(batches), (None, 0))
            batch = None
            try:
                batch = fetch(batches)
                return batch
            finally:
                if loader is not None:
                    facts = _batch_facts(_tensors(batch), is_end=batch is None)
                    self.note(Fetch, loader=loader, epoch=epoch, **facts)

        return run

    def _seed(self, seed: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.note(Seeding)
            return seed(*args)

        return run

    def _hook(self, init: Callable[..., Any]) -> Callable[..., Any]:
        def run(handle: RemovableHandle, *args: Any, **options: Any) -> None:
            init(handle, *args, **options)
            if not self.in_backward and not self.stepping:
                self.growth.add_hook(handle, "".join(users_lines()[:1]), self.num_steps_made)

        return run

    # The forward pass and the loss.

    def _module(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any, **options: Any) -> Any:
            if in_transform():
                return call(module, *args, **options)
            has_gradients = torch.is_grad_enabled()
            self.trace.ran[has_gradients][id(module)] = module
            inputs = list(_tensors((args, options)))
            event = None
            # A loss is a module too, without parameters.
            is_model = next(module.parameters(), None) is not None
            if is_model and not self.depth and not self.in_backward:
                with torch.no_grad():
                    event = self._note_forward(module, inputs, args, options, has_gradients)
            self.depth += 1
            try:
                output = call(module, *args, **options)
            finally:
                self.depth -= 1
            if has_gradients and event is not None:
                self._note_output(event, output)
            return output

        return run

    def _note_forward(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        args: Any,
        options: Any,
        has_gradients: bool,
    ) -> Forward:
        self.inputs += [weakref.ref(one) for one in inputs if one.requires_grad and one.is_leaf]
        trace = self.trace
        is_known = any(one is module for one in trace.roots)
        if has_gradients and not is_known and any(one.requires_grad for one in module.parameters()):
            trace.roots.append(module)
            for name, parameter in module.named_parameters():
                trace.names.setdefault(id(parameter), name)
        tokens = options.get("input_ids", args[0] if args else None)
        is_tokens = isinstance(tokens, Tensor) and not tokens.is_floating_point()
        self.tokens = tokens if is_tokens and tokens.dim() == 2 else None
        mask = options.get("attention_mask")
        self.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self.language = None if self.tokens is None else (module, args, options)
        small = (one for one in module.parameters() if one.numel() < MOST_SMALL)
        device = inputs[0].device.type if inputs else "cpu"
        is_on = torch.is_autocast_enabled(device)
        return self.note(
            Forward,
            module=module,
            training=module.training,
            has_gradients=has_gradients,
            digests=tuple(map(digest, inputs)),
            is_finite=all(bool(one.isfinite().all()) for one in inputs if is_plain(one)),
            num_samples=len(inputs[0]) if inputs and inputs[0].dim() else 0,
            autocast=torch.get_autocast_dtype(device) if is_on else None,
            generator=_generator(),
            weights=sum(map(digest, itertools.islice(small, 1))),
            syncs=getattr(module, "require_backward_grad_sync", None)
            if isinstance(module, DistributedDataParallel)
            else None,
        )

    def _note_output(self, event: Forward, output: Any) -> None:
        for one in _tensors(output):
            if not one.requires_grad or not is_plain(one):
                continue
            self._note_graph(one)
            self._mark(one, event, "is_trained_on")

    def _mark(self, one: Tensor, event: Event, name: str) -> None:
        """Set an attribute of an event when a backward pass reaches a tensor."""
        if one.grad_fn is not None and is_plain(one):
            with self.growth.unseen():
                one.register_hook(lambda _: setattr(event, name, True))

    def _note_graph(self, one: Tensor) -> None:
        if one.grad_fn is not None:
            life = Life()
            # torch annotates the property as a method.
            metadata: dict[str, Any] = one.grad_fn.metadata  # type: ignore[assignment]
            metadata["preflight"] = life
            self.graphs.append((weakref.ref(life), self.num_steps_made, "".join(users_lines()[:1])))

    def _loss(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def run(*args: Any, **options: Any) -> Any:
            value = function(*args, **options)
            if in_transform():
                return value
            if torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad:
                bound = signature.bind(*args, **options)
                bound.apply_defaults()
                if "log_probs" in bound.arguments:  # of ctc_loss
                    values = bound.arguments["log_probs"].flatten(0, -2)
                    lengths = torch.as_tensor(bound.arguments["target_lengths"])
                    bound.arguments |= {"input": values, "target": lengths}
                facts = loss_facts(function.__name__, bound.arguments)
                if value.numel() == 1 and facts.reduction != "none":
                    self.losses[value.grad_fn] = facts
                event = self.note(LossCall, facts=facts, **self._token_facts(bound.arguments))
                self._mark(value, event, "is_used")
                self.loss_call = event
            return value

        return run

    def _add(self, add: Callable[..., Any]) -> Callable[..., Any]:
        def run(one: Tensor, other: Any) -> Any:
            value = add(one, other)
            if not isinstance(value, Tensor) or in_transform():
                return value
            if value.numel() == 1 and value.grad_fn is not None and value.is_floating_point():
                number = one if isinstance(other, Tensor) and other.requires_grad else other
                is_tensor = isinstance(number, Tensor)
                if not (is_tensor and (number.requires_grad or not self.cut)):
                    place = self.cut if is_tensor else "".join(users_lines()[:1])
                    self.numbers[value.grad_fn] = place, float(number)
            return value

        return run

    def _detach(self, detach: Callable[..., Any]) -> Callable[..., Any]:
        def run(one: Tensor) -> Tensor:
            is_ours = sys._getframe(1).f_globals.get("__package__") == __package__
            is_made = self.depth or one.grad_fn is not None
            if one.requires_grad and is_made and not is_ours and not in_transform():
                place = "".join(users_lines()[:1])
                if place not in self.trace.cut:
                    self.trace.cut[place] = leaves(one)
            return detach(one)

        return run

    def _grad(self, grad: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, create_graph: bool = False, **options: Any) -> Any:
            if not create_graph:
                self.cut = "".join(users_lines()[:1])
            return grad(*args, create_graph=create_graph, **options)

        return run

    def _token_facts(self, options: dict[str, Any]) -> dict[str, Any]:
        """Compare targets that are indices with the integers that the model was given."""
        same: dict[int, float] = {}
        model = self.language[0] if self.language else None
        facts: dict[str, Any] = {"same_as_input": same, "model": model, "counts_padding": False}
        facts["filler"] = None
        target, tokens = options["target"], self.tokens
        if tokens is None or target.is_floating_point() or target.numel() % len(tokens):
            return facts
        targets = target.reshape(len(tokens), -1)
        counted = targets != options.get("ignore_index", -100)
        facts["filler"] = _filler(targets, counted)
        # Targets of a part of the tokens, whose first or last ones are left out.
        if not 0 <= tokens.shape[1] - targets.shape[1] <= 2:
            return facts
        for ahead in (0, 1, 2):
            width = min(targets.shape[1], tokens.shape[1] - ahead)
            valid = counted[:, :width]
            if valid.any():
                equal = targets[:, :width] == tokens[:, ahead : ahead + width]
                same[ahead] = float(equal[valid].float().mean())
        if self.mask is not None and self.mask.shape == tokens.shape:
            ahead = int(same.get(1, 0) > same.get(0, 0))
            padding = self.mask[:, ahead:] == 0
            width = min(padding.shape[1], targets.shape[1])
            facts["counts_padding"] = bool((padding[:, :width] & counted[:, :width]).any())
        return facts

    def _dropout(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(given: Tensor, p: float = 0.5, training: bool = True, *more: Any) -> Tensor:
            if p and self.depth and not in_transform():
                self._note_dropout((given.shape, p), training)
            return function(given, p, training, *more)

        return run

    def _note_dropout(self, kind: Any, training: bool) -> None:
        forward = next((e for e in reversed(self.trace.events) if isinstance(e, Forward)), None)
        if forward is not None:
            forward.drops = True
        if not training:
            return
        state = _generator()
        if self.in_backward:
            # The states are those of the CPU's generator.
            if self.dropped and state not in self.dropped and kind in self.dropped_at:
                self.note(Dropout, is_recomputed=True, at=self.dropped_at[kind])
            return
        place = "".join(users_lines()[:1])
        self.dropped[state] = None
        self.dropped_at[kind] = place
        if forward is not None and not forward.training:
            self.note(Dropout, is_recomputed=False, at=place)

    # The backward pass.

    def _backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensors: Any, *args: Any, **options: Any) -> None:
            loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
            if self.in_backward or loss.numel() != 1:
                backward(tensors, *args, **options)
                return
            event = self._note_backward(loss)
            optimizers = list(self.trace.optimizers)
            before = [_gradient_versions(one) for one in optimizers]
            self.in_backward = True
            try:
                backward(tensors, *args, **options)
            finally:
                self.in_backward = False
            after = [_gradient_versions(one) for one in optimizers]
            event.reached = frozenset(
                id(one)
                for one, old, new in zip(optimizers, before, after, strict=True)
                if old != new
            )
            self.losses.clear()
            self.numbers.clear()
            self.cut = ""
            event.of_inputs = any(
                one is not None and one.grad is not None for one in (ref() for ref in self.inputs)
            )
            self.inputs.clear()
            self.num_without_step += 1
            if not self.num_made and self.num_without_step > 50 * self.num_steps:
                self.when_enough(self.trace)
            for one in optimizers:
                self.made_by_backward[id(one)] = [id(p.grad) for p in _parameters(one)]
            self._note_gradients()

        return run

    def _note_gradients(self) -> None:
        """Note the parameters that have gradients, also of modules that no other one has."""
        trace = self.trace
        owned = [_parameters(one) for one in (*trace.roots, *trace.optimizers)]
        owned += [one.parameters(recurse=False) for one in trace.ran[True].values()]
        trace.with_gradient |= {
            id(one) for several in owned for one in several if one.grad is not None
        }

    def _note_backward(self, loss: Tensor) -> Backward:
        self._note_graph(loss)
        loss_call, self.loss_call = self.loss_call, None
        terms, numbers, is_second = terms_of(loss, self.losses, self.numbers)
        return self.note(
            Backward,
            value=float(loss.detach()),
            scale=self._scale() if self.scaled() is loss else 1.0,
            in_autocast=torch.is_autocast_enabled(loss.device.type),
            clean=frozenset(id(one) for one in self.trace.optimizers if not _has_gradients(one)),
            terms=terms,
            numbers=numbers,
            is_second=is_second,
            of_inputs=False,
            loss_call=loss_call,
        )

    def _scale(self) -> float:
        is_on = self.scaler is not None and self.scaler.is_enabled()
        return float(self.scaler.get_scale()) if is_on else 1.0

    def _scaling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        name = call.__name__

        def run(scaler: Any, *args: Any, **options: Any) -> Any:
            self.scaler = scaler
            self.note(Scaling, call=name, is_enabled=scaler.is_enabled())
            num_events = len(self.trace.events)
            self.scaler_steps = name == "step"
            try:
                value = call(scaler, *args, **options)
            finally:
                self.scaler_steps = False
            if name == "scale" and isinstance(value, Tensor):
                self.scaled = weakref.ref(value)
            elif name == "step" and not any(
                isinstance(event, Step) for event in self.trace.events[num_events:]
            ):
                self.note(Skipped, optimizer=args[0])
            return value

        return run

    def _clip(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(clip)

        def run(parameters: Any, *args: Any, **options: Any) -> Any:
            limit = list(signature.bind(parameters, *args, **options).arguments.values())[1]
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            # One that is off has no states.
            states = getattr(self.scaler, "_per_optimizer_states", {})
            stages = [one["stage"].name for one in states.values()]
            is_scaled = self._scale() != 1 and "UNSCALED" not in stages
            own = frozenset(map(id, given))
            self.note(Clip, parameters=own, limit=float(limit), is_scaled=is_scaled)
            return clip(given, *args, **options)

        return run

    def _zero(self, zero: Callable[..., Any]) -> Callable[..., Any]:
        def run(owner: Any, *args: Any, **options: Any) -> Any:
            parameters = list(_parameters(owner))
            if any(parameter.grad is not None for parameter in parameters):
                self.note(Zero, parameters=frozenset(map(id, parameters)))
            return zero(owner, *args, **options)

        return run

    # Steps.

    def _made(self, init: Callable[..., Any]) -> Callable[..., Any]:
        def run(optimizer: Optimizer, *args: Any, **options: Any) -> None:
            init(optimizer, *args, **options)
            self.trace.optimizers.append(optimizer)
            self.made[id(optimizer)] = self.note(Made, optimizer=optimizer)

        return run

    def _schedule(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(scheduler: LRScheduler, *args: Any, **options: Any) -> Any:
            event = None
            caller = sys._getframe(1)
            if not self.schedule_depth and caller.f_code.co_name != "_initial_step":
                is_per_process = caller.f_globals.get("__name__") == "accelerate.scheduler"
                number = int(os.environ.get("WORLD_SIZE", "1")) if is_per_process else 1
                event = self.note(Schedule, scheduler=scheduler, rates=[], num_expected=number)
            self.schedule_depth += 1
            try:
                return step(scheduler, *args, **options)
            finally:
                self.schedule_depth -= 1
                if event is not None:
                    event.rates = _rates(scheduler.optimizer)

        return run

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.stepping:
            self.had_state = bool(optimizer.state)
            compared = [*_parameters(optimizer), *self._frozen()]
            self.is_compared = sum(one.numel() for one in compared) <= MOST_COMPARED
            if self.is_compared:
                self.before = {id(one): one.detach().clone() for one in compared}
                self.before_digest = sum(map(digest, _parameters(optimizer)))
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
        key = id(optimizer)
        parameters = list(_parameters(optimizer))
        gradients = {id(one): one.grad for one in parameters if one.grad is not None}
        slopes = {key: _largest(grad) for key, grad in gradients.items()}
        flat = [key for key, slope in slopes.items() if not slope]
        # Less is what rounding leaves of 0, as of a bias before a normalization.
        least = 1e-6 * max(slopes.values(), default=0.0)
        versions = _gradient_versions(optimizer)
        backward = self.made_by_backward.get(key, [])
        moved = frozenset(id(one) for one in parameters if self._has_moved(one))
        self.note(
            Step,
            optimizer=optimizer,
            rates=_rates(optimizer),
            had_state=self.had_state,
            has_state=bool(optimizer.state),
            has_gradients=len(flat) < len(gradients),
            is_finite=all(bool(values_of(one).isfinite().all()) for one in gradients.values()),
            is_repeated=self.used.get(key) == versions,
            by_hand=[id(one.grad) for one in parameters] != backward,
            moved=moved if self.is_compared else None,
            frozen_moved=frozenset(id(one) for one in self._frozen() if self._has_moved(one)),
            graded=frozenset(key for key, slope in slopes.items() if not 0 < slope < least),
            without_slope=frozenset(flat),
            half_moved=self._half_moved(parameters),
            before=self.before_digest,
            after=sum(map(digest, parameters)) if self.is_compared else 0.0,
            by_scaler=self.scaler_steps,
            in_backward=self.in_backward,
            generator=_generator(),
            made=self.made.get(key),
        )
        self.before = {}
        self.dropped.clear()
        self._probe()
        self.used[key] = versions
        self.num_made[key] += 1
        self._note_held()
        if self.num_made[key] == STEPS_OF_A_STRAY:
            self._note_bare()
        if self._is_enough(self.num_made[key]):
            self.finish()
            self.when_enough(self.trace)

    def _probe(self) -> None:
        """Run a model again with other tokens at the end and as padding, and compare outputs."""
        if self.language is None or id(self.language[0]) in self.probed:
            return
        (module, args, options), tokens = self.language, self.tokens
        self.probed.add(id(module))
        if tokens is None or tokens.shape[1] < 3:
            return
        nowhere = torch.zeros_like(tokens, dtype=torch.bool)
        last = nowhere.index_fill(1, torch.tensor([-1], device=tokens.device), True)
        padded = _padded(tokens, list(_tensors((args, options))))
        layers = (nn.RNNBase, nn.modules.conv._ConvNd)
        if padded is None or any(isinstance(one, layers) for one in module.modules()):
            padded = nowhere
        changed = nowhere, nowhere, last, padded
        first, again, of_last, of_padded = self._outputs(tokens, changed)
        if _differ(first, again):  # by random numbers that are not torch's
            return
        if first.dim() == 3 and _differ(first[:, :-1], of_last[:, :-1]):
            self.trace.sees_the_future.add(id(module))
        is_of_tokens = first.shape[:2] == tokens.shape
        is_pooled = not inspect.getfile(type(module).forward).startswith(LIBRARIES)
        if is_of_tokens and first.dim() == 3:
            first, of_padded = first[~padded], of_padded[~padded]
        elif first.dim() != 2 or not is_pooled:
            return
        if _differ(first, of_padded):
            forwards = [one for one in self.trace.of(Forward) if one.module is module]
            self.trace.reads_padding.append(forwards[-1].place)

    def _outputs(self, tokens: Tensor, changed: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of the last model for other tokens at some places."""
        assert self.language is not None
        module, args, options = self.language
        modes = {one: one.training for one in module.modules()}
        self.depth += 1
        try:
            with torch.no_grad(), torch.random.fork_rng(), self.growth.unseen():
                module.eval()
                outputs = []
                for where in changed:
                    given = torch.where(where, tokens[:, :1], tokens)
                    words = {k: given if v is tokens else v for k, v in options.items()}
                    output = module(*(given if one is tokens else one for one in args), **words)
                    logits = [
                        one
                        for one in _tensors(output)
                        if one.dim() in (2, 3) and one.is_floating_point()
                    ]
                    outputs.append(logits[0] if logits else torch.zeros(()))
        finally:
            self.depth -= 1
            for one, training in modes.items():
                one.training = training
        return outputs

    def _has_moved(self, parameter: Tensor) -> bool:
        before = self.before.get(id(parameter))
        return before is not None and not torch.equal(before, parameter.detach())

    def _half_moved(self, parameters: Sequence[Tensor]) -> float | None:
        changed = counted = 0
        for one in parameters:
            before = self.before.get(id(one))
            if one.dtype not in (torch.float16, torch.bfloat16) or before is None:
                continue
            if one.grad is not None:
                has_gradient = values_of(one.grad) != 0
                changed += int(
                    ((values_of(one.detach()) != values_of(before)) & has_gradient).sum()
                )
                counted += int(has_gradient.sum())
        return changed / counted if counted else None

    def _is_enough(self, num_steps: int) -> bool:
        """Return whether to end; a quick loop goes on until its second epoch has begun."""
        if sum(self.num_made.values()) >= 50 * self.num_steps:
            return True
        if num_steps < self.num_steps:
            return False
        # Ranks must end at the same step, whatever time each has taken.
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return True
        if num_steps >= self.num_steps * MORE_STEPS or time.monotonic() - self.began > MORE_SECONDS:
            return True
        fetches = self.trace.of(Fetch)
        ends = [index for index, one in enumerate(fetches) if not one.digests]
        if not ends:
            return not fetches
        trained = {id(one.loader) for one in fetches[: ends[0]]}
        return sum(id(one.loader) in trained for one in fetches[ends[-1] :]) > 3

    def _note_held(self) -> None:
        if len(self.num_made) > 1 and self.num_made.most_common(2)[0][1] > self.num_steps_made:
            return
        number = self.num_steps_made
        old = [one for one in self.graphs if one[1] <= number - 3]
        is_known = bool(self.trace.held_graphs)
        if not is_known and any(reference() is not None for reference, _, _ in old):
            gc.collect()
            # The last one of each step; several steps, as one may wait for the next evaluation.
            held = {step: place for reference, step, place in old if reference() is not None}
            if len(held) > 1:
                places = lines_that_keep(reference() for reference, _, _ in old)
                self.trace.held_graphs |= dict.fromkeys(places or held.values())
        self.graphs = [one for one in self.graphs if one[0]() is not None]
        self.growth.count(number)

    def _note_bare(self) -> None:
        """Note parameters that have gradients, and that no module and no optimizer has."""
        ran = {**self.trace.ran[True], **self.trace.ran[False]}.values()
        known = {id(one) for several in map(_parameters, self.trace.optimizers) for one in several}
        known |= {id(one) for module in ran for one in module.parameters()}
        self.trace.bare = [
            f"a parameter of shape {list(one.shape)}"
            for one in _living(nn.Parameter)
            if one.grad is not None and id(one) not in known
        ]

    def finish(self) -> None:
        trace = self.trace
        trace.growth = self.growth.growing()
        trained = [one for several in map(_parameters, trace.optimizers) for one in several]
        trace.symmetric = [trace.names.get(id(one), "?") for one in trained if _has_equal_rows(one)]


def _differ(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return True
    return not torch.allclose(first, second, rtol=1e-3, atol=1e-4, equal_nan=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested containers and objects of a batch."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _largest(grad: Tensor) -> float:
    values = values_of(grad).detach()
    return float(values.abs().max()) if values.numel() else 0.0


def _filler(targets: Tensor, counted: Tensor) -> int | None:
    """Return the index at the end of rows of different lengths, if it counts."""
    last = targets[:, -1:]
    length = (targets == last).flip(1).cumprod(1).sum(1)
    is_long = (length > 2) & counted[:, -1]
    fillers = last[is_long].unique().tolist()
    if is_long.sum() < 2 or len(fillers) > 1 or len(length.unique()) < 2:
        return None
    is_nowhere_else = (targets == fillers[0]).sum() == length[last[:, 0] == fillers[0]].sum()
    return fillers[0] if is_nowhere_else else None


def _padded(tokens: Tensor, given: Sequence[Tensor]) -> Tensor | None:
    """Return where tokens are padding at the end, by a mask among what a model was given."""
    for mask in given:
        if mask.shape != tokens.shape or mask is tokens or bool((mask.float() > 1).any()):
            continue
        differs = mask != mask[:, :1]
        is_at_end = bool((differs[:, 1:] >= differs[:, :-1]).all())
        if is_at_end and len(tokens[differs].unique()) == 1 == len(mask[:, 0].unique()):
            return differs
    return None


def _batch_facts(tensors: Iterator[Tensor], *, is_end: bool) -> dict[str, Any]:
    several = [one for one in tensors if one.dim() and len(one) > 1 and is_plain(one)]
    labels = [one for one in several if one.dim() == 1 and not one.is_floating_point()]
    return {
        "digests": () if is_end else tuple(map(digest, several)) or (0.0,),
        "labels": tuple(labels[-1].tolist()) if labels else (),
        "is_one_sample": bool(several) and all(bool((one == one[:1]).all()) for one in several),
    }


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _has_equal_rows(one: Tensor) -> bool:
    """Return whether all rows of a weight are alike, and not 0."""
    if one.dim() < 2 or len(one) < 2 or not is_plain(one):
        return False
    return bool((one == one[:1]).all()) and bool(one.any())


def _generator() -> int:
    return hash(torch.get_rng_state().numpy().tobytes())


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


def _has_gradients(optimizer: Optimizer) -> bool:
    """Return whether a gradient is not 0."""
    grads = [one.grad for one in _parameters(optimizer) if one.grad is not None]
    return any(bool(values_of(grad).any()) for grad in grads)


def _stop(trace: Trace) -> None:
    raise EnoughSteps


def observe(
    train: Callable[[], Any], *, num_steps: int, when_enough: Callable[[Trace], None] = _stop
) -> Trace:
    """Run a training loop until one of its optimizers has made a number of steps."""
    observer = Observer(num_steps, when_enough)
    # Those that the loop was given; it may make more.
    observer.trace.optimizers += _living(Optimizer)
    # What is there already is not looked through after each step.
    gc.collect()
    gc.freeze()
    try:
        with observer.installed(), contextlib.suppress(EnoughSteps):
            train()
            observer.finish()
    finally:
        gc.unfreeze()
    return observer.trace
