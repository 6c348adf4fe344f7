"""The events of a training loop, in their order, and what is known once all are there.

Proof: `python -m pytest tests/gates/test_loop.py`.
"""

import inspect
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from ..core.replaced_calls import Call
from ..core.wording import some_of
from ..runs.fingerprints import leaves_of
from ..workloads.from_script import NO_STEP
from ..workloads.optimizers import parameters_of
from .loop_lines import places_with, users_files, users_line, users_lines
from .loop_loss import Term

T = TypeVar("T")
E = TypeVar("E", bound="Event")
# Steps after which a loop counts as one that always does the same. Parameters in no optimizer are
# looked for then, because they may be gone at the end of the loop.
FEWEST_STEPS = 3
# Names of parameters that a message quotes.
MOST_NAMES = 2
# Of parameters: the id and the version of the gradient, which change with each gradient that is
# made or added to.
Versions = dict[Tensor, tuple[int, int] | None]


class Event:
    """A call that the loop made, at a line of the user's, with its facts as attributes."""

    # The number in the order of all events.
    at: int
    # Whether it happened inside of an optimizer's step, as in a closure.
    in_step: bool
    # An event before it, with the user's line where a Trainer makes the call itself: the loss of a
    # backward pass, the making of the optimizer that steps, or what set a model to eval mode.
    cause: "Event | None" = None

    def __init__(self, lines: tuple[str, ...], **facts: Any) -> None:
        # Files and lines of the user's that led to it, from the innermost on.
        self.lines = lines
        vars(self).update(facts)

    @property
    def origin(self) -> str:
        """The line of what was before it, if it was seen, or its own."""
        return (self.cause and self.cause.place) or self.place

    @property
    def place(self) -> str:
        lines, of_cause = self.lines, self.cause.lines if self.cause is not None else ()
        # Whether its line, as a Trainer's call, led to the cause.
        if of_cause[len(of_cause) - len(lines) :] == lines:
            lines = of_cause
        return lines[0] if lines else ""


# A fault of the loop: the event or the line, the measured figure, and advice.
Fault = tuple[Event | str, str, str]
Faults = Iterable[Fault]


class Fetch(Event):
    """A batch that a DataLoader returned, or its end (no digests)."""

    loader: DataLoader[Any]
    # A mark of the epoch, from when the loader was iterated over anew.
    epoch: object
    digests: tuple[float, ...]
    # Integers of a batch, one per sample, by where they are in memory; the first ones that a loss
    # function gets as its targets are the labels.
    integers: dict[int, list[int]]
    # Digests of the sums over its samples, which their order does not change.
    sums: tuple[float, ...]
    # Digests of values, one per sample, that are rounded towards 0; only of those with fractions.
    whole: tuple[float, ...]
    # Whether a loss function got them, or others of the batch, as its targets.
    is_used: bool = False
    labels: Sequence[int] = ()

    @property
    def dataset(self) -> int:
        """The number of its dataset, which need not be hashable itself."""
        return id(self.loader.dataset)


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
    # A digest of the state of torch's generator.
    generator: int
    # Whether gradients are exchanged between ranks, where a wrapper decides that.
    syncs: bool | None
    # Digests of the values of its first and of its last small parameter.
    weights: tuple[float, float]
    # The leaves behind inputs that have a gradient, as the parameters of another model.
    behind: frozenset[Tensor]
    # Rows of tokens, if it was given some.
    tokens: Tensor | None
    # Their dimension of time; the first one, where the targets show that.
    time_dim: int = 1
    # Where what it was given lies in memory, and digests of what it returned for the first sample.
    addresses: tuple[int, ...] = ()
    returned: tuple[float, ...] = ()
    # Digests of all that it returned, where that is a tuple.
    outputs: frozenset[float] = frozenset()
    # Whether a backward pass has reached its output.
    is_trained_on: bool = False
    # Whether dropout of a function's has a rate in it, in whatever mode.
    drops: bool = False
    # Whether it exchanges values with other ranks, which would have to run it again as well.
    exchanges: bool = False

    @property
    def acts(self) -> bool:
        """Whether it computes something else in training mode, at any rate."""
        return self.drops or depends_on_mode(self.module)


def depends_on_mode(model: nn.Module) -> bool:
    """Return whether a model computes something else in training mode, by its layers.

    A frozen part of a model that is trained may stay in either mode on purpose.
    """
    return any(
        isinstance(model, nn.modules.batchnorm._BatchNorm)
        or (
            isinstance(value, float)
            and value
            and "drop" in f"{type(model).__name__} {name}".lower()
        )
        for name, value in vars(model).items()
    ) or any(
        depends_on_mode(part)
        for part in model.children()
        if _trains(part) != {False} or _trains(model) == {False}
    )


def _trains(part: nn.Module) -> set[bool]:
    return {one.requires_grad for one in part.parameters()}


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


class Targets(Event):
    """Targets that stand for tokens, compared with the tokens that a model was given."""

    model: nn.Module
    # The share that equals the model's input at this place, by the places that it lies ahead.
    same_as_input: defaultdict[int, float]
    # The index at the end of some rows and nowhere else, as of padding, if it counts in the loss.
    filler: int | None
    # Whether the model may shift these tokens itself, as it was given others before.
    may_be_shifted: bool = False
    # Whether a target counts where the attention mask of the forward pass is 0.
    counts_padding: bool = False


class Cut(Event):
    """A call that takes values out of the graph."""

    # The parameters that they were computed from.
    behind: set[Tensor]


class Backward(Event):
    """A call of backward on a loss."""

    value: float
    scale: float
    # Parameters whose gradients were neither None nor 0 when it began.
    dirty: set[Tensor]
    terms: list[Term]
    # Whether a part of the loss has had a backward call before.
    is_second: bool
    # Whether it made gradients of what the model was given, as an attack does.
    of_inputs: bool = False
    # Parameters whose gradients it changed.
    reached: frozenset[Tensor] = frozenset()
    # Whether gradients were when it began what an earlier call had left.
    is_next: bool = False


class Clip(Event):
    """A clipping of gradients."""

    parameters: frozenset[Tensor]


class Zero(Event):
    """A call that sets gradients to zero or None, after gradients were there."""

    parameters: frozenset[Tensor]


class Events:
    """Events in their order."""

    events: list[Event]

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


class Stepping(Event):
    """The end of a window, with a step, or where a scaler left it out: values were not finite."""

    optimizer: Optimizer

    @cached_property
    def own(self) -> frozenset[Tensor]:
        """The optimizer's parameters."""
        return frozenset(parameters_of(self.optimizer))


class Step(Stepping, Events):
    """A step of an optimizer, with what it did to parameters, and the window that it ends."""

    rates: list[float]
    # Digests of its state, and of the values of its parameters, before and after it.
    state: tuple[float, float]
    weights: tuple[float, float]
    # The versions of the gradients of its parameters.
    versions: Versions
    # Numbers that are linear in a gradient: after the last backward call, and before clipping,
    # unscaling and the step. The factor between them; None if the loop has not only multiplied it.
    made_gradient: float
    used_gradient: float
    factor: float | None
    # Parameters that changed; None where there are too many.
    moved: frozenset[Tensor] | None
    # The largest value of each gradient, by its parameter.
    slopes: dict[Tensor, float]
    # Of elements in half precision with a gradient, the share that changed.
    half_moved: float | None
    in_backward: bool
    generator: int

    @property
    def graded(self) -> frozenset[Tensor]:
        """Parameters with a gradient that is more than what rounding leaves of 0."""
        # As of a bias before a normalization.
        noise = 1e-6 * max(self.slopes.values(), default=0.0)
        return frozenset(key for key, slope in self.slopes.items() if slope > noise)

    @property
    def has_gradients(self) -> bool:
        """Whether it had gradients that are not 0."""
        return any(self.slopes.values())

    def end_window(self, trace: "Trace", previous: "Step | None") -> None:
        """Note the events that it is made of, and the step of the same optimizer before it."""
        before = trace.events[: self.at]
        # Another optimizer may have trained the same parameters before.
        steps = (one for one in reversed(before) if isinstance(one, Stepping))
        begin = next((one.at for one in steps if one.own & self.own), -1)
        self.events = before[begin + 1 :]
        self.previous = previous
        # Backward calls that made gradients of the optimizer. A sharded model keeps those of a
        # microbatch without sync to itself, and makes them of whole tensors for a while.
        calls = self.of(Backward)
        lines = {one.lines for one in calls if one.reached & self.own}
        self.all_calls = [
            one
            for one in calls
            if one.reached & self.own
            or (one.lines in lines and one.reached.isdisjoint(trace.held_parameters))
        ]
        self.forwards = [one for one in self.of(Forward) if one.is_trained_on]
        self.zeros = [one for one in self.of(Zero) if one.parameters & self.own and not one.in_step]

    def choose_calls(self, *, has_one: bool) -> None:
        """Leave out calls whose gradients were set to zero before those of another loss.

        That of another optimizer reaches these parameters too, as a generator's does, with others.
        Where steps may have one call, the loop drops the gradients of a batch now and then.
        """
        self.calls = self.all_calls
        for number, call in enumerate(self.all_calls):
            is_other = has_one or not any(
                one.lines == call.lines
                and (one.reached == call.reached or one.reached.isdisjoint(self.own))
                for one in self.all_calls[:number]
            )
            if is_other and self.is_clean(call):
                self.calls = self.all_calls[number:]

    @property
    def first(self) -> Forward:
        """The first forward pass that is trained on, if there is one."""
        return self.forwards[0]

    @property
    def num_samples(self) -> int:
        return sum(one.num_samples for one in self.forwards)

    @property
    def is_by_hand(self) -> bool:
        """Whether the user made the gradients, as from those of several losses."""
        return self.factor is None and self.has_gradients

    def is_clean(self, call: Backward) -> bool:
        """Return whether all gradients of the optimizer were None or 0 before a call."""
        return self.own.isdisjoint(call.dirty)


class Schedule(Event):
    """A step of a learning rate's schedule."""

    scheduler: LRScheduler
    # The learning rates after it.
    rates: list[float]
    # Steps of it per step of the optimizer; Accelerate makes one for each process.
    num_expected: int


class Scaling(Event):
    """A call of a gradient scaler."""

    call: str
    scaler: Any
    # The optimizer whose gradients are unscaled, if they are not yet.
    optimizer: Optimizer | None


class Scoring(Event):
    """A call that takes a probability: a policy learns by that of its sample."""


class Seeding(Event):
    """A call of torch.manual_seed."""


class Shuffle(Event):
    """A call that draws an order, or makes a generator that does."""


class Joining(Event):
    """The begin of a block in which ranks may have different numbers of batches."""


class Dividing(Event):
    """A call that sets what a sharded model divides gradients by."""


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def grouped(values: Iterable[T], *names: str) -> list[list[T]]:
    """Return values that have the same attributes, in order, for each of these."""
    groups = defaultdict[Any, list[T]](list)
    of = attrgetter(*names)
    for value in values:
        groups[of(value)].append(value)
    return list(groups.values())


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of nested containers."""
    return [one for one in leaves_of(value).values() if isinstance(one, Tensor)]


class TorchCall:
    """A call of torch's that the loop makes, with its arguments, and its result once it is made."""

    def __init__(self, function: Call, /, *args: Any, **options: Any) -> None:
        self.function = function
        self.args = args
        self.options = options

    @property
    def owner(self) -> Any:
        """The object whose method it is, or the input of a function."""
        return self.args[0] if self.args else self.options.get("input")

    @property
    def caller(self) -> Any:
        """The frame that made the call, for the method that handles it."""
        return sys._getframe(4)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the other arguments."""
        return tensors_of((self.args[1:], self.options))

    def bound(self) -> inspect.BoundArguments:
        return inspect.signature(self.function).bind(*self.args, **self.options)

    def argument(self, name: str) -> Any:
        """Return an argument, or None where it is left out."""
        return self.bound().arguments.get(name)

    def listed(self, name: str) -> list[Tensor]:
        """Return an argument as a list of tensors, also where it is one, or an iterator."""
        bound = self.bound()
        value = bound.arguments[name]
        tensors = bound.arguments[name] = [value] if isinstance(value, Tensor) else list(value)
        self.args = bound.args
        self.options = bound.kwargs
        return tensors

    def run(self) -> Any:
        """Make the call, unless it is made already, and return its result."""
        if not hasattr(self, "result"):
            self.result = self.function(*self.args, **self.options)
        return self.result


class Blank:
    """Begins with what the types of its attributes make: empty containers, 0, False and ""."""

    def __init__(self) -> None:
        for kind in type(self).__mro__:
            for name, make in inspect.get_annotations(kind).items():
                setattr(self, name, make())


class Trace(Events, Blank):
    """The events of a loop, in order, and the objects that it has; calls of torch write to it."""

    # The last event of each kind.
    last: dict[type[Event], Any]
    optimizers: list[Optimizer]
    # The call that made an optimizer, and the one that last set the mode of a module.
    causes: WeakKeyDictionary[Any, Event]
    # The settings that the groups of an optimizer were made with, by their names.
    groups: WeakKeyDictionary[Optimizer, dict[str, list[Any]]]
    # Trained modules that were called with gradients, inside of no other one.
    roots: nn.ModuleList
    names: dict[Tensor, str]
    # Parts of models that ran in training mode without gradients: the outermost one that has it,
    # and a digest of its parameters then.
    frozen_parts: dict[nn.Module, tuple[nn.Module, float]]
    # Models whose outputs change with later tokens.
    sees_all: list[nn.Module]
    # Models whose last output changes with the last token.
    sees_last: list[nn.Module]
    # Parameters that have had a gradient.
    with_gradient: set[Tensor]
    # Leaves with a gradient that may be in no module, described.
    lone_leaves: dict[Tensor, str]
    # Where schedules were made, their optimizers, and the lines of the call.
    schedules: list[tuple[str, Optimizer, str]]
    # Files whose functions led to a step.
    files: set[str]
    # A line that may train more, and did not run.
    unreached_line: str

    # The following attributes are used while the loop runs.

    # Steps that each optimizer has made.
    num_made: Counter[Optimizer]
    # Modules that run, one inside of the other, and optimizers that step.
    depth: int
    step_depth: int
    # The last batch of each loader.
    last_fetches: dict[DataLoader[Any], Fetch]
    # Parameters by the address of their values, each with the line that made its optimizer.
    optimizer_by_address: dict[int, tuple[Tensor, str]]
    # Parameters behind tensors that the user's code detaches, by the place.
    behind_detach: dict[str, set[Tensor]]
    # Samples of distributions: the place, where they pass no gradient on to these.
    samples: WeakIdKeyDictionary
    # Models that were run again.
    probed_models: list[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        # Modules that ran, and where, by whether torch recorded gradients.
        self.modules_run = defaultdict[bool, dict[nn.Module, str]](dict)
        # Faults that are seen at once, by the check.
        self.faults = defaultdict[str, list[Fault]](list)
        # By the place and the text of a fault: the values with which it was seen.
        self.values = defaultdict[Any, set[float | None]](set)
        # The error that ended the loop, if one did.
        self.error: Exception | None = None
        # The call of the last forward pass, while it is recorded.
        self.model_call = TorchCall(list)

    @property
    def num_steps_made(self) -> int:
        return max(self.num_made.values(), default=0)

    def fault(
        self,
        check: str,
        measured: str,
        hint: str,
        place: Event | str | None = None,
        value: float | None = None,
    ) -> None:
        """Note a fault; where a value is given, once that was another one in several steps."""
        place = users_line() if place is None else place
        values = self.values[place, measured]
        values.add(value)
        if value is None or len(values) == FEWEST_STEPS:
            self.faults[check].append((place, measured, hint))

    def note(self, kind: type[E], /, **facts: Any) -> E:
        facts.setdefault("lines", users_lines())
        event = kind(in_step=self.step_depth > 0, at=len(self.events), **facts)
        self.events.append(event)
        self.last[kind] = event
        return event

    def optimizer_of(self, one: Tensor) -> str:
        """Return where the optimizer was made that has stepped a tensor, or nothing."""
        own, place = self.optimizer_by_address.get(one.data_ptr(), (one, ""))
        # The memory may be another one's now.
        return place if own.is_set_to(one) else ""

    def of_roots(self, *, trained: bool) -> list[Tensor]:
        """Return the parameters of the models that are trained, or are frozen."""
        return [one for one in self.roots.parameters() if one.requires_grad is trained]

    @property
    def next_tokens(self) -> "list[Targets]":
        """The targets that are the next tokens of the model's input."""
        return [one for one in self.of(Targets) if one.same_as_input[1] > 0.99]

    def named(self, parameters: Iterable[Tensor]) -> str:
        """Return the names of some parameters, in a few words."""
        names = self.lone_leaves | self.names
        return some_of(sorted({names.get(one, "?") for one in parameters}), MOST_NAMES)

    # All that follows is known once all events are there.

    def places(self, pattern: str) -> list[str]:
        """Return the user's lines with a pattern, first those of files that made steps."""
        return places_with(pattern, [*self.files, *users_files()])

    @cached_property
    def held_parameters(self) -> set[Tensor]:
        """The parameters that optimizers hold."""
        return set[Tensor]().union(*map(parameters_of, self.optimizers))

    @cached_property
    def idle_parameters(self) -> set[Tensor]:
        """The parameters in optimizers that have never had a gradient."""
        return self.held_parameters - self.with_gradient

    @cached_property
    def trained_forwards(self) -> list[Forward]:
        """The forward passes whose output a backward pass has reached."""
        return [one for one in self.of(Forward) if one.is_trained_on]

    @cached_property
    def fetches(self) -> dict[float, set[Fetch]]:
        """The batches that have a tensor with a digest, by the digest."""
        found = defaultdict[float, set[Fetch]](set)
        for fetch in self.of(Fetch):
            for digest in fetch.digests:
                found[digest].add(fetch)
        return found

    @cached_property
    def trained_fetches(self) -> list[Fetch]:
        """The batches that models were trained on."""
        given = {number for one in self.trained_forwards for number in one.digests}
        return [one for one in self.of(Fetch) if not given.isdisjoint(one.digests)]

    @cached_property
    def by_optimizer(self) -> list[list[Step]]:
        """The steps of each optimizer, with their windows."""
        found = grouped(self.of(Step), "optimizer")
        for steps in found:
            for previous, step in zip([None, *steps], steps, strict=False):
                step.end_window(self, previous)
            has_one = [len(step.all_calls) for step in steps].count(1) > 1
            for step in steps:
                step.choose_calls(has_one=has_one)
        return found

    @cached_property
    def windows(self) -> list[Step]:
        return [step for steps in self.by_optimizer for step in steps]


NO_LOSS = "no loss function of torch was called"


@dataclass(frozen=True)
class Check:
    """A requirement of a loop, and the functions that find where it is not met."""

    required: str
    # In this order; what is wrong with a single call is seen at once.
    finders: tuple[Callable[[Trace], Faults], ...] = ()
    # Where a loop has no such event, nothing is found, and it does not apply, for this reason.
    needs: Any = Step
    reason: str = NO_STEP
