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
import linecache
import math
import os
import re
import sys
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from ..core.digest import is_plain
from ..core.measure import as_trained, heap_kept
from ..core.replaced_calls import Call, replaced_calls, watched
from ..core.wording import some_of
from ..primitives.grad_flow_probe import in_backward, in_transform
from ..runs.fingerprints import LoaderIterator, leaves_of
from ..workloads.models import LIBRARIES
from ..workloads.optimizers import parameter_ids, parameters_of
from .loop_growth import MADE_AT, Growth, users_files, users_frames
from .loop_loss import (
    ADDED,
    ON_CLASSES,
    ON_VALUES,
    SCALE,
    TERM,
    Term,
    digest,
    leaves,
    notes_on,
    term_of_call,
    terms_of,
    values_of,
)

# A fault of the loop: the line, the measured figure, and advice.
Fault = tuple[str, ...]
T = TypeVar("T")
E = TypeVar("E", bound="Event")
# Parameters are compared before and after a step up to this number of elements.
MOST_COMPARED = 2 * 10**8
MOST_SMALL = 10**6
# Names of parameters that a message quotes.
MOST_NAMES = 2
# A quick loop goes on to the second epoch, up to so many steps for each that was asked for.
MORE_STEPS = 5
# Steps after which a loop counts as one that always does the same. Parameters in no optimizer are
# looked for then, because they may be gone at the end of the loop.
FEWEST_STEPS = 3
# A larger share of an average that the newest weights have is one by mistake.
MOST_OF_AVERAGE = 0.9
# Names of models that shift the labels themselves, as those of Hugging Face.
SHIFTS = ("ForCausalLM", "LMHeadModel")
MORE_SECONDS = 10.0
# Attributes that people set to freeze a module or parameter, without effect.
FLAGS = {"require_grad", "requires_grad"}
LOOK = "look for the first value that is not finite: curry-train grad-flow"


def users_lines(*inside: str) -> tuple[str, ...]:
    """Return files and lines of the user's, see `users_frames`."""
    return tuple(
        f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"
        for frame in users_frames(*inside)
    )


def users_line(*inside: str) -> str:
    """Return the innermost one of them."""
    return "".join(users_lines(*inside)[:1])


@dataclass(eq=False)
class Event:
    """A call that the loop made, at a line of the user's."""

    # Files and lines of the user's that led to it, from the innermost on.
    lines: tuple[str, ...]
    # Whether it happened inside of an optimizer's step, as in a closure.
    in_step: bool
    # An event before it, with the user's line where a Trainer makes the call itself: the loss of a
    # backward pass, the making of the optimizer that steps, or what set a model to eval mode.
    cause: "Event | None" = field(default=None, kw_only=True)

    @property
    def origin(self) -> str:
        """The line of what was before it, if it was seen, or its own."""
        return (self.cause and self.cause.place) or self.place

    @property
    def place(self) -> str:
        lines, of_cause = self.lines, self.cause.lines if self.cause is not None else ()
        # Whether its line, as a Trainer's call, led to the cause.
        if len(of_cause) > len(lines) and of_cause[len(of_cause) - len(lines) :] == lines:
            lines = of_cause
        return lines[0] if lines else ""


@dataclass(eq=False)
class Fetch(Event):
    """A batch that a DataLoader returned, or its end (no digests)."""

    loader: DataLoader[Any]
    # The number of the epoch, from when the loader was iterated over anew.
    epoch: int
    digests: tuple[float, ...]
    # Integers of a batch, one per sample, by where they are in memory; the first ones that a loss
    # function gets as its targets are the labels.
    integers: dict[int, tuple[int, ...]]
    # Digests of values, one per sample, that are rounded towards 0; only of those with fractions.
    whole: tuple[float, ...]
    # Whether a loss function got them, or others of the batch, as its targets.
    is_used: bool = False
    labels: tuple[int, ...] = ()


@dataclass(eq=False)
class Forward(Event):
    """A call of a module that is inside of no other one."""

    module: nn.Module
    training: bool
    digests: tuple[float, ...]
    # Whether all samples are the same.
    is_one_sample: bool
    num_samples: int
    # Autocast's type, if it is on.
    autocast: torch.dtype | None
    # What identifies the state of torch's generator.
    generator: int
    # Whether gradients are exchanged between ranks, where a wrapper decides that.
    syncs: bool | None
    # What identifies the values of its first and of its last small parameter.
    weights: tuple[float, float]
    # Whether an input has a gradient, as what another model gives.
    passes_on: bool
    # Rows of tokens, if it was given some.
    tokens: Tensor | None
    # Their dimension of time; the first one, where the targets show that.
    time_dim: int = 1
    # Whether a backward pass has reached its output.
    is_trained_on: bool = False
    # Whether dropout of a function's has a rate in it, in whatever mode.
    drops: bool = False


@dataclass(eq=False)
class LossCall(Event):
    """A call of one of torch's loss functions."""

    # The whole loss, as a part of itself.
    term: Term
    # A digest of the targets.
    targets: float
    # Columns of the model's input that equal the labels; None if samples have not a target each.
    columns: frozenset[int] | None
    # Whether the labels of the batch that the model was given are in another order.
    is_shuffled: bool = False
    # Whether a backward pass has reached it.
    is_used: bool = False


@dataclass(eq=False)
class Targets(Event):
    """Targets that stand for tokens, compared with the tokens that a model was given."""

    model: nn.Module
    # The share that equals the model's input at this place, by the places that it lies ahead.
    same_as_input: dict[int, float] = field(default_factory=dict)
    # What all targets at the end of some rows are, and no other one, if that counts.
    filler: int | None = None
    # Whether a target counts where the attention mask of the forward pass is 0.
    counts_padding: bool = False


@dataclass(eq=False)
class Dropout(Event):
    """A call of dropout that acts, in a model."""

    # Whether it runs in a backward pass, which recomputes a forward pass.
    is_recomputed: bool
    # A hash of the state of the CPU's generator.
    generator: int
    # The shape and the rate, which are the same where it is recomputed.
    kind: tuple[torch.Size, float]


@dataclass(eq=False)
class Backward(Event):
    """A call of backward on a loss."""

    value: float
    scale: float
    # Parameters whose gradients were neither None nor 0 when it began, by id.
    dirty: set[int]
    terms: list[Term]
    # Whether a part of the loss has had a backward call before.
    is_second: bool
    # Whether it made gradients of what the model was given, as an attack does.
    of_inputs: bool = False
    # Parameters whose gradients it changed, by id.
    reached: frozenset[int] = frozenset()
    # Whether gradients were when it began what an earlier call had left.
    is_next: bool = False


@dataclass(eq=False)
class Clip(Event):
    """A clipping of gradients."""

    parameters: frozenset[int]


@dataclass(eq=False)
class Zero(Event):
    """A call that sets gradients to zero or None, after gradients were there."""

    parameters: frozenset[int]


class Events:
    """Events in their order."""

    events: list[Event]

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


@dataclass(eq=False)
class Step(Event, Events):
    """A step of an optimizer, with what it did to parameters, and the window that it ends."""

    optimizer: Optimizer
    rates: list[float]
    # What identifies its state before and after it.
    state_before: float
    state_after: float
    # What changes with the gradients of its parameters.
    versions: "Versions"
    # Numbers that are linear in a gradient: after the last backward call, and before clipping,
    # unscaling and the step. The factor between them; None if the loop has not only multiplied it.
    made: float
    used: float
    factor: float | None
    # Parameters that changed, by id; None where there are too many.
    moved: frozenset[int] | None
    # Parameters with a gradient that is more than noise, by id, and those whose gradient is 0.
    graded: frozenset[int]
    without_slope: frozenset[int]
    # Of elements in half precision with a gradient, the share that changed.
    half_moved: float | None
    # What identifies the values of its parameters before and after it.
    before: float
    after: float
    in_backward: bool
    generator: int

    @property
    def has_gradients(self) -> bool:
        """Whether it had gradients that are not 0."""
        return bool(self.graded - self.without_slope)

    def end_window(self, events: list[Event], previous: "Step | None") -> None:
        """Note the events that it is made of, and the step of the same optimizer before it."""
        self.events = events
        self.previous = previous
        self.own = parameter_ids(self.optimizer)
        # Backward calls that made gradients of the optimizer. A sharded model keeps those of a
        # microbatch without sync to itself.
        calls = self.of(Backward)
        lines = {one.lines for one in calls if one.reached & self.own}
        self.all_calls = [
            one
            for one in calls
            if one.reached & self.own or (not one.reached and one.lines in lines)
        ]
        # Without those whose gradients were set to zero before those of another loss. That of
        # another optimizer reaches these parameters too, as a generator's does. Where each step has
        # one call, a loop may drop the gradients of a batch.
        self.calls = self.all_calls
        has_one = previous and len(previous.all_calls) == 1
        for number, call in enumerate(self.all_calls):
            is_other = has_one or call.lines not in {one.lines for one in self.all_calls[:number]}
            if is_other and self.is_clean(call):
                self.calls = self.all_calls[number:]
        self.forwards = [one for one in self.of(Forward) if one.is_trained_on]
        self.zeros = [one for one in self.of(Zero) if one.parameters & self.own]

    @property
    def body(self) -> list[Event]:
        """The events after the last step of another optimizer before the first backward call."""
        first = self.events.index(self.calls[0]) if self.calls else 0
        others = [at for at in range(first) if isinstance(self.events[at], STEPS)]
        return self.events[others[-1] + 1 if others else 0 :]

    @property
    def is_by_hand(self) -> bool:
        """Whether the user made the gradients, as from those of several losses."""
        return self.factor is None and self.has_gradients

    def is_clean(self, call: Backward) -> bool:
        """Return whether all gradients of the optimizer were None or 0 before a call."""
        return self.own.isdisjoint(call.dirty)


@dataclass(eq=False)
class Skipped(Event):
    """A step that a scaler left out, as gradients were not finite."""

    optimizer: Optimizer


STEPS = (Step, Skipped)


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
    scaler: Any


@dataclass(eq=False)
class Seeding(Event):
    """A call of torch.manual_seed."""


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def grouped(values: Iterable[T], key: Callable[[T], Any]) -> list[list[T]]:
    """Return values that have the same key, in order, for each key."""
    groups = defaultdict[Any, list[T]](list)
    for value in values:
        groups[key(value)].append(value)
    return list(groups.values())


class EnoughSteps(BaseException):
    """The loop has made the steps that were asked for."""


@dataclass
class Trace(Events):
    """The events of a loop, in order, and the objects that it has."""

    events: list[Event] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    # By id: the call that made an optimizer, and the one that last set a module to eval mode.
    made: dict[int, Event] = field(default_factory=dict)
    # Trained modules that were called with gradients, inside of no other one.
    roots: list[nn.Module] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    # Modules that ran, and where, by whether torch recorded gradients, by their ids.
    ran: dict[bool, dict[int, tuple[nn.Module, str]]] = field(
        default_factory=lambda: {True: {}, False: {}}
    )
    # Parameters behind tensors that the user's code detaches, by id, by the place.
    cut: dict[str, set[int]] = field(default_factory=dict)
    # Numbers that are parts of losses, by the line that added them.
    numbers: dict[str, set[float]] = field(default_factory=lambda: defaultdict(set))
    # Parameters that have had a gradient, by id.
    with_gradient: set[int] = field(default_factory=set)
    # Faults that are seen at once, by the check.
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    # Parameters, and tensors that are taken for such, outside of modules with a gradient, by id.
    bare: list[int] = field(default_factory=list)
    # Where schedules were made, and their optimizers.
    schedules: list[tuple[str, Optimizer]] = field(default_factory=list)
    # Files whose functions led to a step.
    files: set[str] = field(default_factory=set)

    def named(self, parameters: Iterable[int]) -> str:
        """Return the names of some parameters, by their ids, in a few words."""
        return some_of(sorted({self.names.get(one, "?") for one in parameters}), MOST_NAMES)

    # All that follows is known once all events are there.

    def places(self, pattern: str) -> list[str]:
        """Return the places of the user's lines in which a pattern occurs."""
        return [
            f"{file.rpartition(os.sep)[2]}:{number}"
            for file in self.files.union(users_files())
            for number, line in enumerate(linecache.getlines(file), 1)
            if re.search(pattern, line)
        ]

    @cached_property
    def held(self) -> set[int]:
        """The ids of the parameters that optimizers hold."""
        return set[int]().union(*map(parameter_ids, self.optimizers))

    @cached_property
    def trained_forwards(self) -> list[Forward]:
        """The forward passes whose output a backward pass has reached."""
        return [one for one in self.of(Forward) if one.is_trained_on]

    @cached_property
    def trained_on(self) -> set[float]:
        """The digests of what models were trained on."""
        return {number for one in self.trained_forwards for number in one.digests}

    @cached_property
    def by_optimizer(self) -> list[list[Step]]:
        """The steps of each optimizer, with their windows."""
        found = grouped(self.of(Step), lambda step: id(step.optimizer))
        for steps in found:
            events: list[Event] = []
            previous = None
            own = parameter_ids(steps[0].optimizer)
            for event in self.events:
                if isinstance(event, Step) and event in steps:
                    event.end_window(events, previous)
                    previous = event
                # Another optimizer may have trained the same parameters before.
                if isinstance(event, STEPS) and own & parameter_ids(event.optimizer):
                    events = []
                else:
                    events.append(event)
        return found

    @cached_property
    def windows(self) -> list[Step]:
        return [step for steps in self.by_optimizer for step in steps]


class Gradient:
    """A small gradient after a backward call, and what the loop makes of it before it is used."""

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        # The first one of a usual size.
        self.parameter = next((one for one in parameters if 1 < one.numel() < MOST_SMALL), None)
        self.grad = getattr(self.parameter, "grad", None)
        # A number that is linear in its values, and their norm.
        self.made = self._measured()
        self.used: tuple[float, float] | None = None

    def _measured(self) -> tuple[float, float]:
        grad = getattr(self.parameter, "grad", None)
        return (0.0, 0.0) if grad is None else (digest(grad), float(values_of(grad).norm()))

    def use(self) -> None:
        """Measure it again, at the first call after a backward call."""
        self.used = self.used or self._measured()

    def facts(self, own: Container[int]) -> dict[str, Any]:
        """Return what is noted of it for a step, if it is of one of these parameters."""
        (made, norm), (used, norm_used) = self.made, self.used or self.made
        if id(self.parameter) not in own or not made:
            return {"made": 0.0, "used": 0.0, "factor": 1.0}
        factor = used / made
        is_same = getattr(self.parameter, "grad", None) is self.grad
        is_multiplied = is_same and math.isclose(norm_used, abs(factor) * norm, rel_tol=1e-3)
        return {"made": made, "used": used, "factor": factor if is_multiplied else None}


class Observer(Trace):
    """A trace with the replaced calls that write to it."""

    def __init__(self, num_steps: int, when_enough: Callable[[Trace], None]) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.when_enough = when_enough
        self.began = time.monotonic()
        # Steps that each optimizer has made, by its id.
        self.num_made = Counter[int]()
        # Of parameters: what changes with their gradients, after a backward call.
        self.at_backward: Versions = {}
        # By where the values of a parameter were: it, and where its optimizer was made. By a line
        # that averages some with others: after which steps.
        self.stepped: dict[int, tuple[Tensor, str]] = {}
        self.averaged = defaultdict[str, set[int]](set)
        # Of differences of columns and rows: digests of those without a gradient, by the line.
        self.crossed = defaultdict[str, set[float]](set)
        # Modules, schedules and optimizers that run.
        self.depth = 0
        self.schedule_depth = 0
        self.stepping: list[Optimizer] = []
        # Of the step that runs: parameters before it, and whether they are all there.
        self.before: dict[int, Tensor] = {}
        self.before_digest = 0.0
        # Leaves that models were given and that get a gradient, in this window.
        self.inputs: list[weakref.ref[Tensor]] = []
        # Leaves from which an input of a model was computed, by id.
        self.leaves = set[int]()
        # The last call of torch.autograd.grad whose result has no graph.
        self.grad_place = ""
        self.is_attack = False
        self.loss_call: LossCall | None = None
        # The arguments of the last forward pass, and modules that were run again with others.
        self.given: tuple[Any, Any] = (), {}
        self.probed: list[nn.Module] = []
        # Parameters with gradients, of which some may be in no module, by id.
        self.living: dict[int, str] = {}
        # Of each iterator: its loader, and the number of this pass over it.
        self.loaders: dict[int, tuple[DataLoader[Any], int]] = {}
        self.epochs = itertools.count()
        # The last batch of each loader, by its id.
        self.fetched: dict[int, Fetch] = {}
        self.growth = Growth()
        self.gradient = Gradient()

    @property
    def num_steps_made(self) -> int:
        return max(self.num_made.values(), default=0)

    def last(self, kind: type[E]) -> E | None:
        return next((one for one in reversed(self.events) if isinstance(one, kind)), None)

    def fault(self, check: str, *fault: str) -> None:
        self.faults[check].append(fault)

    def note(self, kind: type[E], /, **facts: Any) -> E:
        facts.setdefault("lines", users_lines())
        event = kind(in_step=bool(self.stepping), **facts)
        self.events.append(event)
        return event

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            steps = self._before_step, self._after_step
            stack.enter_context(replaced_calls(self._replacements(), *steps))
            data: Any = Tensor.data
            function = property(watched(self._detach, data.__get__), data.__set__)
            stack.enter_context(mock.patch.object(Tensor, "data", function))
            yield

    def _replacements(self) -> Iterator[tuple[Any, str, Call]]:
        """Yield calls, and what is called with each and its arguments in place of it."""
        yield nn.Module, "__call__", self._module
        yield Optimizer, "__init__", self._made
        yield Optimizer, "__setattr__", self._set
        yield nn.Module, "train", self._set_mode
        yield nn.Module, "load_state_dict", self._load
        yield torch.autograd, "backward", self._backward
        yield torch.autograd, "grad", self._grad
        for owner, name in (Tensor, "detach"), (Tensor, "argmax"), (torch, "argmax"):
            yield owner, name, self._detach
        for name in ("__add__", "__radd__", "__iadd__", "__sub__"):
            yield Tensor, name, self._add
        for name in ("add_", "copy_", "lerp_"):
            yield Tensor, name, self._into
        # Compiled code can't be observed; the same code runs uncompiled.
        yield torch, "compile", _uncompiled
        yield nn.Module, "compile", lambda *args, **options: None
        for name in (*ON_CLASSES, *ON_VALUES):
            yield F, name, self._loss
        yield F, "dropout", self._dropout
        for name in ("clip_grad_norm_", "clip_grad_value_"):
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

    def _loader(self, iterate: Call, loader: DataLoader[Any]) -> Any:
        batches = iterate(loader)
        self.loaders[id(batches)] = loader, next(self.epochs)
        return batches

    def _fetch(self, fetch: Call, batches: Any) -> Any:
        loader, epoch = self.loaders.get(id(batches), (None, 0))
        batch = None
        try:
            batch = fetch(batches)
            return batch
        finally:
            if loader is not None:
                tensors = _tensors(batch)
                several = [one for one in tensors if one.dim() and len(one) > 1 and is_plain(one)]
                integers = [
                    one for one in several if one.dim() == 1 and not one.is_floating_point()
                ]
                values = [
                    one
                    for one in several
                    if one.dtype.is_floating_point and one.numel() == len(one)
                ]
                self.fetched[id(loader)] = self.note(
                    Fetch,
                    loader=loader,
                    epoch=epoch,
                    digests=() if batch is None else tuple(map(digest, several)) or (0.0,),
                    integers={one.data_ptr(): tuple(one.tolist()) for one in integers},
                    whole=tuple(digest(one.trunc()) for one in values if one.frac().any()),
                )

    def _seed(self, seed: Call, /, *args: Any, **options: Any) -> Any:
        self.note(Seeding)
        return seed(*args, **options)

    def _hook(self, init: Call, handle: RemovableHandle, *args: Any, **options: Any) -> None:
        init(handle, *args, **options)
        # A hook that a library adds in each step, as Trainers do, is not for the user to remove.
        caller: Any = sys._getframe(2)
        while caller.f_globals.get("__name__", "").startswith("torch."):
            caller = caller.f_back
        is_users = not caller.f_code.co_filename.startswith(LIBRARIES)
        if is_users and not in_backward() and not self.stepping:
            one = handle.hooks_dict_ref, handle.id, users_line(), self.num_steps_made
            self.growth.hooks.append(one)

    # The forward pass and the loss.

    def _module(self, call: Call, module: nn.Module, /, *args: Any, **options: Any) -> Any:
        if in_transform():
            return call(module, *args, **options)
        has_gradients = torch.is_grad_enabled()
        ran = self.ran[has_gradients]
        if id(module) not in ran or (module.training and not ran[id(module)][1]):
            ran[id(module)] = module, users_line("checkpoint") if module.training else ""
        event = None
        # A loss is a module too, without parameters.
        is_model = next(module.parameters(), None) is not None
        if is_model and not self.depth and not in_backward():
            with torch.no_grad():
                event = self._note_forward(module, args, options, has_gradients)
        self.depth += 1
        try:
            output = call(module, *args, **options)
        finally:
            self.depth -= 1
        if has_gradients and event is not None:
            given, made = event.digests, map(digest, _tensors(output))
            # A digest is a sum. A mask may well hold infinity.
            if not (all(map(math.isfinite, given)) or all(map(math.isfinite, made))):
                hint = "look at how the data is read and normalized"
                measured = "the model is given values that are not finite"
                self.fault("data", event.place, measured, hint)
            for one in _tensors(output):
                notes_on(one)[MADE_AT] = self.num_steps_made, users_line()
                self._mark(one, event, "is_trained_on")
            labels = _rows(options.get("labels"))
            if labels is not None and any(
                type(one).__name__.endswith(SHIFTS) for one in module.modules()
            ):
                self._note_targets(event, labels[:, 1:])
        return output

    def _note_forward(
        self, module: nn.Module, args: Any, options: Any, has_gradients: bool
    ) -> Forward:
        self.given = args, options
        inputs = list(_tensors(self.given))
        given = [it for one in inputs if one.requires_grad for it in leaves(one)]
        self.inputs += [weakref.ref(one) for one in given if not isinstance(one, nn.Parameter)]
        self.leaves.update(map(id, given))
        is_trained = has_gradients and any(one.requires_grad for one in module.parameters())
        if is_trained and module not in self.roots:
            self.roots.append(module)
            for name, parameter in module.named_parameters():
                self.names.setdefault(id(parameter), name)
        tokens = _rows(options.get("input_ids", args[0] if args else None))
        if tokens is not None and tokens.is_floating_point():
            tokens = None
        # A function of the module may have put others in their place.
        small = [one for one in module.parameters() if one.is_leaf and one.numel() < MOST_SMALL]
        small = [one for one in small if one.requires_grad] or small
        device = inputs[0].device.type if inputs else "cpu"
        return self.note(
            Forward,
            module=module,
            training=module.training,
            digests=tuple(map(digest, inputs)),
            # A dimension more is that of several models.
            is_one_sample=bool(inputs)
            and all(one.dim() in (2, 4) and _has_equal_rows(one) for one in inputs),
            num_samples=len(inputs[0]) if inputs and inputs[0].dim() else 0,
            autocast=(
                torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            ),
            generator=_generator(),
            weights=(digest(small[0]), digest(small[-1])) if small else (0.0, 0.0),
            syncs=getattr(module, "require_backward_grad_sync", None),
            passes_on=any(one.requires_grad for one in inputs),
            tokens=tokens,
            cause=None if module.training else self.made.get(id(module)),
        )

    def _mark(self, one: Tensor, event: Event, name: str) -> None:
        """Set an attribute of an event when a backward pass reaches a tensor."""
        if one.grad_fn is not None and is_plain(one):
            one.register_hook(lambda _: None if self.is_attack else setattr(event, name, True))

    def _loss(self, function: Call, *args: Any, **options: Any) -> Any:
        value = function(*args, **options)
        if not in_transform() and isinstance(value, Tensor) and value.requires_grad:
            bound = inspect.signature(function).bind(*args, **options)
            bound.apply_defaults()
            if "log_probs" in bound.arguments:  # of ctc_loss
                values = bound.arguments["log_probs"].flatten(0, -2)
                lengths = torch.as_tensor(bound.arguments["target_lengths"])
                bound.arguments |= {"input": values, "target": lengths}
            term, doubts = term_of_call(function.__name__, bound.arguments)
            if value.numel() == 1 and term.reduction != "none":
                notes_on(value)[TERM] = term
            target = bound.arguments["target"]
            self.loss_call = self.note(
                LossCall, term=term, targets=digest(target), columns=self._columns(target)
            )
            for check, of_check in doubts.items():
                for measured, hint in of_check:
                    self.fault(check, self.loss_call.place, measured, hint)
            if term.name != "ctc_loss":  # whose target is the number of labels of each sample
                self._note_use(target, self.loss_call)
            self._mark(value, self.loss_call, "is_used")
            forward = self.last(Forward)
            if forward is not None and term.name in ("cross_entropy", "nll_loss"):
                self._note_targets(forward, target, bound.arguments["ignore_index"])
        return value

    def _note_use(self, target: Tensor, call: LossCall) -> None:
        """Note the batches whose labels, or a part of them, are the targets of a loss."""
        is_float = target.is_floating_point()
        is_index = target.device.type == "cpu" and not is_float
        at = target.data_ptr() if is_index and is_plain(target) else -1
        given = self.last(Forward)
        for fetch in self.fetched.values():
            # Other targets may be 0 as well.
            is_same = call.targets in fetch.digests and (call.targets != 0 or not is_index)
            labels = [
                values
                for first, values in fetch.integers.items()
                if first <= at < first + target.itemsize * len(values)
                or (target.dim() == 2 and target.argmax(1).tolist() == [*values])
                or (is_same and not is_float and target.flatten().tolist() == [*values])
            ]
            fetch.labels = fetch.labels or next(iter(labels), ())
            fetch.is_used |= is_same or bool(labels)
            if given is not None and is_index and not {*given.digests}.isdisjoint(fetch.digests):
                own = target.flatten().tolist()
                call.is_shuffled |= any(
                    own != [*one] and sorted(own) == sorted(one) for one in fetch.integers.values()
                )
            if call.targets in fetch.whole and call.term.name in ON_VALUES:
                hint = "leave out the long() or int() of the targets"
                self.fault("targets", call.place, "the targets have lost their fractions", hint)

    def _columns(self, target: Tensor) -> frozenset[int] | None:
        """Compare a target for each sample with what the model was given."""
        given = next(_tensors(self.given), None)
        if given is None or given.dim() < 2 or not len(given) == target.numel() > 1:
            return None
        # A token may well be what a model has to repeat, and a value what it has to follow.
        is_table = given.dim() == 2 and given.is_floating_point()
        if not is_table or target.is_floating_point() or given.device != target.device:
            return frozenset()
        # Equal by chance, where there is one label.
        equal = (given.detach() == target.reshape(-1, 1)).all(0) & (target != target[0]).any()
        return frozenset(equal.nonzero().flatten().tolist())

    def _find_tokens(self, forward: Forward, target: Tensor, ignored: int) -> None:
        """Find the input whose rows, or columns, the targets continue, as that of a decoder."""
        labels = self.given[1].get("labels")
        for one in _tensors(self.given):
            is_like = one.dim() == 2 and one.numel() == target.numel()
            if is_like and one is not labels and one.device == target.device:
                targets = target.reshape(one.shape)
                for dim, rows, others in ((1, one, targets), (0, one.T, targets.T)):
                    if _same_as_input(others, others != ignored, rows).get(1, 0) > 0.99:
                        forward.tokens, forward.time_dim = one, dim

    def _note_targets(self, forward: Forward, target: Tensor, ignored: int = -100) -> None:
        """Compare targets that are indices with the tokens that the model was given."""
        self._find_tokens(forward, target, ignored)
        tokens, mask = forward.tokens, self.given[1].get("attention_mask")
        if tokens is None or target.is_floating_point() or target.numel() % len(tokens):
            return
        targets = target.reshape(len(tokens), -1)
        if not forward.time_dim:
            tokens, targets = tokens.T, targets.T
        counted = targets != ignored
        if not counted.any():
            return
        event = self.note(Targets, model=forward.module)
        # One of a few classes may well end rows.
        if targets.max() > 4:
            event.filler = _filler(targets, counted)
        # Targets of a part of the tokens, whose first or last ones are left out.
        if not 0 <= tokens.shape[1] - targets.shape[1] <= 2:
            return
        same = event.same_as_input = _same_as_input(targets, counted, tokens)
        if isinstance(mask, Tensor) and mask.shape == tokens.shape:
            ahead = int(same.get(1, 0) > same.get(0, 0))
            padding = mask[:, ahead:] == 0
            width = min(padding.shape[1], targets.shape[1])
            event.counts_padding = bool((padding[:, :width] & counted[:, :width]).any())

    def _into(self, call: Call, one: Tensor, *args: Any, **options: Any) -> Tensor:
        # Before training, entries that a checkpoint lacks stay; a negative factor is a decay.
        numbers = (by for by in (*args, *options.values()) if isinstance(by, int | float))
        newest = min(numbers, default=1)
        is_average = self.num_made and not (self.stepping or self.depth) and newest > 0
        # In the first steps an average may follow the weights.
        is_most = self.num_steps_made >= FEWEST_STEPS and MOST_OF_AVERAGE < newest < 1
        for other in filter(is_plain, _tensors(args)) if is_average and is_plain(one) else ():
            stepped = [self.stepped.get(it.data_ptr(), (None, "")) for it in (one, other)]
            # A whole copy begins anew from other weights, on purpose. Memory may be another's now.
            if newest < 1 and all(
                own is not None and own.is_set_to(it)
                for it, (own, _) in zip((one, other), stepped, strict=True)
            ):
                steps = self.averaged[users_line()]
                steps.add(self.num_steps_made)
                if len(steps) == FEWEST_STEPS and not one.is_set_to(other):
                    measured = "this optimizer steps weights that are averages of others, too"
                    hint = f"leave a teacher's parameters out of it; averaged at {users_line()}"
                    self.fault("moves", stepped[0][1], measured, hint)
            # Another model may share what is frozen.
            if (is_most or one.is_set_to(other)) and any(
                map(other.is_set_to, filter(is_plain, self._of_roots(trained=True)))
            ):
                measured = "weights are averaged with, or copied from, themselves"
                hint = "copy.deepcopy(model), or clone() each tensor of a state_dict()"
                if not one.is_set_to(other):
                    measured = f"an average of weights takes {newest:.4g} of the newest ones"
                    hint = "give the newest weights 1 - decay: average.lerp_(weight, 1 - decay)"
                self.fault("moves", users_line(), measured, hint)
        return call(one, *args, **options)

    def _add(self, add: Call, one: Tensor, other: Any) -> Any:
        value = add(one, other)
        if not isinstance(value, Tensor) or in_transform():
            return value
        if add.__name__ == "__sub__" and isinstance(other, Tensor):
            self._note_crossed(one, other)
        if value.numel() == 1 and value.grad_fn is not None and value.is_floating_point():
            number = one if isinstance(other, Tensor) and other.requires_grad else other
            is_tensor = isinstance(number, Tensor)
            if not (is_tensor and (number.requires_grad or not self.grad_place)):
                place = self.grad_place if is_tensor else users_line()
                notes_on(value)[ADDED] = place, float(number)
        return value

    def _note_crossed(self, one: Tensor, other: Tensor) -> None:
        """Note a difference of each output with each target, where one of them has a column."""
        column, row = (one, other) if one.dim() == 2 else (other, one)
        number = 0 if self.depth else row.numel()
        is_outer = number > 1 and [*column.shape, *row.shape] == [number, 1, number]
        # A view, as by unsqueeze, is a comparison of each with each on purpose.
        if not is_outer or column._base is not None or one.requires_grad == other.requires_grad:
            return
        rows = self.crossed[users_line()]
        rows.add(digest(other if one.requires_grad else one))
        # A row that is the same in each step, such as one of centers, is no target.
        if len(rows) == FEWEST_STEPS:
            measured = f"shapes [{number}, 1] and [{number}] are compared, each value with each"
            hint = "give both the same shape, as by squeeze(1) or unsqueeze(1)"
            self.fault("logits", users_line(), measured, hint)

    def _detach(self, detach: Call, one: Tensor, *args: Any, **options: Any) -> Tensor:
        is_ours = sys._getframe(2).f_globals.get("__package__") == __package__
        is_made = self.depth or one.grad_fn is not None
        if one.requires_grad and is_made and not is_ours and not in_transform():
            place = users_line()
            if place not in self.cut:
                self.cut[place] = {*map(id, leaves(one))}
        return detach(one, *args, **options)

    def _grad(self, grad: Call, outputs: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        wanted = inputs if isinstance(inputs, Tensor) else tuple(inputs)
        if options.get("create_graph") or any(args[2:3]):
            return grad(outputs, wanted, *args, **options)
        self.grad_place = users_line()
        # Gradients of inputs alone, as of an attack, train nothing.
        self.is_attack = not any(isinstance(one, nn.Parameter) for one in _tensors(wanted))
        try:
            return grad(outputs, wanted, *args, **options)
        finally:
            self.is_attack = False

    def _dropout(
        self,
        drop: Call,
        input: Tensor,
        p: float = 0.5,
        training: bool | None = None,
        *more: Any,
        **options: Any,
    ) -> Tensor:
        forward = self.last(Forward)
        acts = training is None or training
        if forward and p and self.depth and not in_transform():
            caller = sys._getframe(2).f_locals.get("self")
            forward.drops |= not isinstance(caller, nn.Dropout)
            if acts:
                # A layer or a call may be in training mode on purpose, to draw several predictions.
                if training is None and not (forward.training or in_backward()):
                    hint = "pass training=self.training to F.dropout, or use nn.Dropout"
                    self.fault("mode", users_line(), "dropout acts in evaluation mode", hint)
                self.note(
                    Dropout,
                    lines=users_lines("checkpoint"),
                    is_recomputed=in_backward(),
                    generator=_generator(),
                    kind=(input.shape, p),
                )
        return drop(input, p, acts, *more, **options)

    # The backward pass.

    def _backward(self, backward: Call, tensors: Any, *args: Any, **options: Any) -> None:
        loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
        if in_backward() or loss.numel() != 1:
            backward(tensors, *args, **options)
            return
        notes_on(loss)[MADE_AT] = self.num_steps_made, users_line()
        parameters = [
            one for owner in (*self.roots, *self.optimizers) for one in _parameters(owner)
        ]
        # Also of modules that no other one has.
        for module, _ in self.ran[True].values():
            parameters += module.parameters(recurse=False)
        terms, numbers, scale, is_second = terms_of(loss)
        for place, number in numbers:
            self.numbers[place].add(number)
        event = self.note(
            Backward,
            value=float(loss.detach()),
            scale=scale,
            dirty={id(one) for one in parameters if one.grad is not None and _largest(one.grad)},
            terms=terms,
            is_second=is_second,
            cause=self.loss_call,
        )
        if not math.isfinite(event.value):
            self.fault("sign", event.place, f"the loss is {event.value}", LOOK)
        if torch.is_autocast_enabled(loss.device.type):
            hint = "end the autocast block before loss.backward()"
            self.fault("autocast", event.place, "backward runs under autocast", hint)
        before = _versions(parameters)
        event.is_next = all(before[key] == self.at_backward.get(key) for key in before)
        backward(tensors, *args, **options)
        self.at_backward = after = _versions(parameters)
        event.reached = frozenset(key for key in after if after[key] != before[key])
        self.gradient = Gradient(one for one in parameters if id(one) in event.reached)
        self.with_gradient |= {key for key in after if after[key] is not None}
        event.of_inputs = any(getattr(ref(), "grad", None) is not None for ref in self.inputs)
        self.inputs.clear()
        self.loss_call = None
        self.grad_place = ""
        if not self.num_made and len(self.of(Backward)) > 50 * self.num_steps:
            self.when_enough(self)

    def _scaling(self, call: Call, scaler: Any, *args: Any, **options: Any) -> Any:
        if not scaler.is_enabled():
            return call(scaler, *args, **options)
        name = call.__name__
        if name in ("unscale_", "step"):
            self.gradient.use()
        calls = [
            one.call
            for one in self.of(Scaling)
            if one.scaler is scaler and one.call in ("scale", "update")
        ]
        event = self.note(Scaling, call=name, scaler=scaler)
        # The call before it was one too.
        if [name] == calls[-1:] == ["update"]:
            measured = "the scale is updated again, without a loss in between"
            hint = "call scaler.update() once, after the steps of all optimizers"
            self.fault("scaler", event.place, measured, hint)
        value = call(scaler, *args, **options)
        if name == "scale" and isinstance(value, Tensor):
            notes_on(value)[SCALE] = float(scaler.get_scale())
        elif name == "step" and not isinstance(self.events[-1], Step):
            self.note(Skipped, optimizer=args[0])
        return value

    def _clip(self, clip: Call, parameters: Any, *args: Any, **options: Any) -> Any:
        bound = inspect.signature(clip).bind(parameters, *args, **options)
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self.gradient.use()
        place = self.note(Clip, parameters=frozenset(map(id, given))).place
        if not given:
            hint = "pass model.parameters() anew; a generator is empty after one use"
            self.fault("clipping", place, "it clips no parameter", hint)
        if not float(bound.args[1]):
            hint = "a norm of 1.0 is usual; leave the clipping out for none"
            self.fault("clipping", place, "gradients are clipped to 0", hint)
        is_scaled = getattr(self.last(Backward), "scale", 1.0) != 1.0
        if is_scaled and getattr(self.last(Scaling), "call", "") == "scale":
            hint = "call scaler.unscale_(optimizer) before it"
            self.fault("clipping", place, "gradients are clipped while they are scaled", hint)
        return clip(given, *args, **options)

    def _zero(self, zero: Call, owner: Any, *args: Any, **options: Any) -> Any:
        parameters = _parameters(owner)
        if any(parameter.grad is not None for parameter in parameters):
            self.note(Zero, parameters=frozenset(map(id, parameters)))
        return zero(owner, *args, **options)

    # Models and steps.

    def _load(self, load: Call, module: nn.Module, *args: Any, **options: Any) -> Any:
        found = load(module, *args, **options)
        num_keys = len(module.state_dict())
        if found.unexpected_keys and len(found.missing_keys) == num_keys > 0:
            measured = f"none of {num_keys} weights is loaded: no name is in the file"
            hint = "compare the names, such as a prefix; strict=True (the default) would refuse it"
            self.fault("moves", users_line(), measured, hint)
        return found

    def _made(self, init: Call, one: Optimizer, *args: Any, **options: Any) -> None:
        init(one, *args, **options)
        self.optimizers.append(one)
        # Not a line of the object's own class, where that is the user's.
        lines = users_lines(*(f"{kind.__qualname__}.__init__" for kind in type(one).__mro__))
        self.made[id(one)] = Event(lines, False)

    def _set(self, call: Call, one: Optimizer, name: str, value: Any) -> None:
        if name == "lr" and type(one).__module__.startswith("torch.") and value not in _rates(one):
            hint = 'set group["lr"] of each group in optimizer.param_groups'
            self.fault("schedule", users_line(), "a rate that the optimizer does not read", hint)
        call(one, name, value)

    def _set_mode(self, call: Call, module: nn.Module, mode: bool = True) -> nn.Module:
        # Each part is set by a call, and `eval` calls this, also where a model has its own.
        if not mode:
            self.made[id(module)] = Event(users_lines(), False)
        return call(module, mode)

    def _schedule(self, step: Call, scheduler: LRScheduler, *args: Any, **options: Any) -> Any:
        caller = sys._getframe(2)
        self.schedule_depth += 1
        try:
            value = step(scheduler, *args, **options)
        finally:
            self.schedule_depth -= 1
        if caller.f_code.co_name == "_initial_step":
            self.schedules.append((users_line(), scheduler.optimizer))
        elif not self.schedule_depth:
            is_per_process = caller.f_globals.get("__name__") == "accelerate.scheduler"
            number = world_size() if is_per_process else 1
            rates = _rates(scheduler.optimizer)
            self.note(Schedule, scheduler=scheduler, rates=rates, num_expected=number)
        return value

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.stepping:
            self.gradient.use()
            self.state_before = _state(optimizer)
            compared = [*parameters_of(optimizer), *self._of_roots(trained=False)]
            self.is_compared = sum(one.numel() for one in compared) <= MOST_COMPARED
            if self.is_compared:
                self.before = {id(one): one.detach().clone() for one in compared}
                self.before_digest = sum(map(digest, parameters_of(optimizer)))
        self.stepping.append(optimizer)

    def _of_roots(self, *, trained: bool) -> list[Tensor]:
        parameters = (one for root in self.roots for one in root.parameters())
        return [one for one in parameters if one.requires_grad is trained]

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.stepping.pop()
        if self.stepping:  # an optimizer that steps another one
            return
        self.files |= {frame.f_code.co_filename for frame in users_frames()}
        key = id(optimizer)
        parameters = parameters_of(optimizer)
        gradients = {id(one): one.grad for one in parameters if one.grad is not None}
        slopes = {key: _largest(grad) for key, grad in gradients.items()}
        # Less is what rounding leaves of 0, as of a bias before a normalization.
        least = 1e-6 * max(slopes.values(), default=0.0)
        moved = frozenset(id(one) for one in parameters if self._has_moved(one))
        event = self.note(
            Step,
            optimizer=optimizer,
            rates=_rates(optimizer),
            state_before=self.state_before,
            state_after=_state(optimizer),
            versions=_versions(parameters),
            **self.gradient.facts(gradients),
            moved=moved if self.is_compared else None,
            graded=frozenset(key for key, slope in slopes.items() if not 0 < slope < least),
            without_slope=frozenset(key for key, slope in slopes.items() if not slope),
            half_moved=self._half_moved(parameters),
            before=self.before_digest,
            after=sum(map(digest, parameters)) if self.is_compared else 0.0,
            in_backward=in_backward(),
            generator=_generator(),
            cause=self.made.get(key),
        )
        plain = (one for one in parameters if id(one) in gradients and is_plain(one))
        self.stepped |= {one.data_ptr(): (one, event.origin) for one in plain}
        if not all(map(math.isfinite, slopes.values())):
            self.fault("sign", event.place, "a step on gradients that are not finite", LOOK)
        if frozen := [id(one) for one in self._of_roots(trained=False) if self._has_moved(one)]:
            measured = f"frozen parameters move: {self.named(frozen)}"
            hint = "leave frozen parameters out of the optimizer"
            self.fault("moves", event.place, measured, hint)
        self.before = {}
        self._probe()
        self.num_made[key] += 1
        self.growth.count(self.num_steps_made)
        if self.num_made[key] == FEWEST_STEPS:
            # To the gradient of a tensor that no optimizer has each backward call adds, and nothing
            # sets it to 0, as where the user changes it by hand.
            self.living |= {
                id(one): f"a {type(one).__name__.lower()} of shape {list(one.shape)}"
                for one in _living(Tensor)
                if one.is_leaf
                and one.grad is not None
                and (
                    isinstance(one, nn.Parameter)
                    or (
                        one._version == 0
                        and 1 < one.grad._version < len(self.of(Backward))
                        and id(one) not in self.leaves
                    )
                )
            }
        if self._is_enough(self.num_made[key]):
            self.finish()
            self.when_enough(self)

    def _probe(self) -> None:
        """Run a model again with a part of its input changed, and compare outputs."""
        forward = self.last(Forward)
        # Targets may stand behind a call of another model, as of one that judges.
        if forward is None or forward.module not in self.roots or forward.module in self.probed:
            return
        self.probed.append(forward.module)
        # A model may refuse to run in eval mode, or have other outputs in each call.
        with contextlib.suppress(Exception):
            if forward.tokens is not None:
                self._probe_tokens(forward, forward.tokens)
            self._probe_samples(forward)

    def _probe_tokens(self, forward: Forward, tokens: Tensor) -> None:
        """Look for outputs that change with a later token or with padding."""
        module, first = forward.module, tokens[:, :1]
        last = tokens.shape[forward.time_dim] - 1
        if last < 2:
            return
        # The first token in place of the last one.
        at = torch.arange(last + 1, device=tokens.device) % last
        both = self._outputs(module, tokens, tokens.index_select(forward.time_dim, at))
        # Cross-entropy takes outputs whose last dimension is time, too.
        shape = both[0].shape
        dims = [dim for dim in (forward.time_dim, 2) if len(shape) == 3 and shape[dim] == last + 1]
        if len(dims) == 1 and _differ(*(one.narrow(dims[0], 0, last) for one in both)):
            for one in self.of(Targets):
                if one.model is module and one.same_as_input.get(1, 0) > 0.99:
                    measured = "the model sees the tokens that it has to predict"
                    hint = "mask attention to later tokens, is_causal=True; no bidirectional layer"
                    self.fault("targets", one.place, measured, hint)
        # The later tokens of another sample.
        mixed = torch.cat([first, tokens.flip(0)[:, 1:]], 1)
        is_known = both[0].dim() == 2 and not torch.equal(both[0], both[0].flip(0))
        if (
            is_known
            and not torch.equal(tokens, mixed)
            and torch.equal(*self._outputs(module, tokens, mixed))
        ):
            measured = "the outputs of the model depend on the first token alone"
            hint = "use the output at the last token, or attention without a causal mask"
            self.fault("targets", forward.place, measured, hint)
        is_users = not inspect.getfile(type(module).forward).startswith(LIBRARIES)
        padded = _padded(tokens, _tensors(self.given))
        layers = (nn.RNNBase, nn.modules.conv._ConvNd)
        if padded is None or any(isinstance(one, layers) for one in module.modules()):
            return
        outputs, others = self._outputs(module, tokens, torch.where(padded, first, tokens))
        if outputs.dim() == 3 and outputs.shape[:2] == tokens.shape:
            outputs, others = outputs[~padded], others[~padded]
        elif outputs.dim() != 2 or not is_users:
            return
        if _differ(outputs, others):
            hint = "look at the mask of the attention: which value of it stands for padding?"
            measured = "the outputs of the model change with the padding"
            self.fault("targets", forward.place, measured, hint)

    def _probe_samples(self, forward: Forward) -> None:
        """Look for layers that take the samples of a batch for the steps of a sequence."""
        tensors = [*_tensors(self.given)]
        call = self.last(LossCall)
        if not tensors or call is None or call.columns is None:
            return
        given = tensors[0]
        # Of equal sizes, and of a batch of one, it is not known which one is the batch.
        if not (given is forward.tokens or given.dim() > 2) or given.shape[1] in (1, len(given)):
            return
        # A recurrent layer sees no later steps.
        outputs, others = self._outputs(forward.module, given, torch.cat([given[-1:], given[1:]]))
        if outputs.shape[:1] != given.shape[:1]:
            return
        if _differ(outputs[1:], others[1:]):
            if any(
                isinstance(one, nn.RNNBase | nn.MultiheadAttention) and not one.batch_first
                for one in forward.module.modules()
            ):
                measured = "the outputs of a sample change with the other samples of the batch"
                hint = "give the layer batch_first=True, or a tensor with time first"
                self.fault("targets", forward.place, measured, hint)
        # With an input more the first sample is another one than the last, and sums in half
        # precision may depend on the place.
        elif len(tensors) == 1 and outputs.itemsize > 2 and _differ(outputs[-1], others[0]):
            measured = "the outputs of a sample change with its place in the batch"
            hint = "add codes of positions along the sequence: codes[:x.size(1)] with batch first"
            self.fault("targets", forward.place, measured, hint)

    def _outputs(self, module: nn.Module, given: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of a model for a tensor that it was given, and for another one.

        It raises where the same input gives another output.
        """
        args, options = self.given
        outputs = []
        self.depth += 1
        try:
            with torch.no_grad(), torch.random.fork_rng(), as_trained(module):
                module.eval()
                for value in (given, given, other):
                    words = {k: value if v is given else v for k, v in options.items()}
                    output = module(*(value if one is given else one for one in args), **words)
                    logits = (
                        one
                        for one in _tensors(output)
                        if one.dim() in (2, 3) and one.is_floating_point()
                    )
                    outputs.append(next(logits, torch.zeros(())))
        finally:
            self.depth -= 1
        first, again, changed = outputs
        if _differ(first, again):
            raise RuntimeError("it draws random numbers that are not torch's")
        return again, changed

    def _has_moved(self, parameter: Tensor) -> bool:
        before = self.before.get(id(parameter))
        return before is not None and not torch.equal(before, parameter.detach())

    def _half_moved(self, parameters: Sequence[Tensor]) -> float | None:
        changed = [
            (values_of(one.detach()) != values_of(before))[values_of(one.grad) != 0]
            for one in parameters
            if one.dtype in (torch.float16, torch.bfloat16) and one.grad is not None
            if (before := self.before.get(id(one))) is not None
        ]
        return float(torch.cat(changed).float().mean()) if changed else None

    def _is_enough(self, num_steps: int) -> bool:
        """Return whether to end; a quick loop goes on until its second epoch has begun."""
        if num_steps < self.num_steps:
            return sum(self.num_made.values()) >= 50 * self.num_steps
        # Ranks must end at the same step, whatever time each has taken.
        is_late = world_size() > 1 or time.monotonic() - self.began > MORE_SECONDS
        if is_late or num_steps >= self.num_steps * MORE_STEPS:
            return True
        fetches = self.of(Fetch)
        batches = [one.digests for one in fetches]
        # Past the first four batches of another pass. Without a DataLoader no pass is known.
        return not all(batches) and all(batches[-4:]) and fetches[-1].loader is fetches[0].loader

    def finish(self) -> None:
        hint = "keep a number, a bounded number of tensors, or remove the hook's handle"
        for place, measured in self.growth.growing():
            self.fault("growth", place, measured, hint)
        hint = "keep loss.item() or tensor.detach() in place of the tensor"
        for place in self.growth.graphs:
            measured = "a tensor of two steps ago is still held, with its graph"
            self.fault("graph", place, measured, hint)
        for module, _ in (self.ran[False] | self.ran[True]).values():
            for name, parameter in module.named_parameters(recurse=False):
                self.names.setdefault(id(parameter), f"{type(module).__name__}.{name}")
        self.bare = list(self.living.keys() - self.names.keys() - self.held)
        self.names = self.living | self.names
        for one in (it for root in self.roots for it in (*root.modules(), *root.parameters())):
            own = one.parameters() if isinstance(one, nn.Module) else [one]
            flags = {name for name, value in vars(one).items() if value is False}
            for flag in flags & FLAGS if self.with_gradient.intersection(map(id, own)) else ():
                places = [*self.places(rf"\.{flag} *= *False"), ""]
                hint = "module.requires_grad_(False), or parameter.requires_grad = False for each"
                measured = f"{flag} of a {type(one).__name__} freezes nothing"
                self.fault("moves", places[0], measured, hint)
        trained = [one for several in map(parameters_of, self.optimizers) for one in several]
        living = (one for one in trained if id(one) in self.with_gradient)
        if equal := [id(one) for one in living if _has_equal_rows(one) and one.any()]:
            measured = f"all rows of {self.named(equal)} are alike, and learn the same"
            place = "".join(one.place for one in self.of(Step)[-1:])
            self.fault("moves", place, measured, "initialize weights by random numbers")


def _rows(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) and value.dim() == 2 else None


def _same_as_input(targets: Tensor, counted: Tensor, tokens: Tensor) -> dict[int, float]:
    """Return the share of targets that are the tokens so many places ahead, by these places."""
    same = {}
    for ahead in (0, 1, 2):
        width = min(targets.shape[1], tokens.shape[1] - ahead)
        valid = counted[:, :width]
        if valid.any():
            equal = targets[:, :width] == tokens[:, ahead : ahead + width]
            same[ahead] = float(equal[valid].float().mean())
    return same


def _differ(first: Tensor, second: Tensor) -> bool:
    is_other = first.shape != second.shape
    return is_other or not torch.allclose(first, second, rtol=1e-3, atol=1e-4, equal_nan=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested containers."""
    return (one for one in leaves_of(value).values() if isinstance(one, Tensor))


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


def _padded(tokens: Tensor, given: Iterable[Tensor]) -> Tensor | None:
    """Return where tokens are padding at the end, by a mask among what a model was given."""
    for mask in given:
        if mask.shape != tokens.shape or mask.max() > 1:
            continue
        differs = mask != mask[:, :1]
        is_at_end = (differs[:, 1:] >= differs[:, :-1]).all()
        if is_at_end and len(tokens[differs].unique()) == 1 == len(mask[:, 0].unique()):
            return differs
    return None


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _state(optimizer: Optimizer) -> float:
    """Return what identifies the state of an optimizer, by that of its first parameter."""
    first = next(iter(optimizer.state.values()), None)
    return sum(map(digest, _tensors(first)))


def _has_equal_rows(one: Tensor) -> bool:
    """Return whether there are several rows, of memory of their own, and all are alike."""
    return (
        is_plain(one)
        and one.stride()[:1] != (0,)
        and one.dim() > 1
        and len(one) > 1
        and bool((one == one[:1]).all())
    )


def _generator() -> int:
    return hash(torch.get_rng_state().numpy().tobytes())


def _living(kind: type) -> list[Any]:
    """Return all instances of a class; asking for `__class__` would wake proxies that warn."""
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _uncompiled(compile: Call, model: Any = None, **_: Any) -> Any:
    return (lambda function: function) if model is None else model


def _with_own_step(base: type) -> list[type]:
    """Return a class and its subclasses that define `step`."""
    own = [base] if "step" in vars(base) else []
    subclass: type
    for subclass in base.__subclasses__():
        own += _with_own_step(subclass)
    return own


def _parameters(owner: Any) -> list[Tensor]:
    is_module = isinstance(owner, nn.Module)
    return list(owner.parameters()) if is_module else parameters_of(owner)


# Of parameters, by id: the id and the version of the gradient, which change with each gradient that
# is made or added to.
Versions = dict[int, tuple[int, int] | None]


def _versions(parameters: Iterable[Tensor]) -> Versions:
    versions: Versions = {}
    for parameter in parameters:
        # A sharded gradient has its values in a tensor of its own.
        local = getattr(parameter.grad, "_local_tensor", parameter.grad)
        versions[id(parameter)] = None if local is None else (id(local), local._version)
    return versions


def _stop(trace: Trace) -> None:
    raise EnoughSteps


def observe(
    train: Callable[[], Any], *, num_steps: int, when_enough: Callable[[Trace], None] = _stop
) -> Trace:
    """Run a training loop until one of its optimizers has made a number of steps."""
    observer = Observer(num_steps, when_enough)
    # Those that the loop was given; it may make more.
    observer.optimizers += _living(Optimizer)
    # What is there already is not looked through after each step.
    with heap_kept(), observer.installed(), contextlib.suppress(EnoughSteps):
        train()
        observer.finish()
    return observer
