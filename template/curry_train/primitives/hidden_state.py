"""Find state that a timestep keeps to itself, and refuse it before it trains wrongly.

A step is recomputed correctly only if its result follows from its input and state. The step runs
several times, and every attribute or variable that changes in between is tested: it is set to other
values, to higher counts, and to tensors that autograd tracks. If the step's result, the parameters
that its graph reaches or the random numbers that it draws are then different, the value is hidden
state, and the step is refused. Values that change without any effect, such as a stored copy of the
last output, are returned to the caller, which must restore them after a recomputation.

Why so long: search, snapshots and trials work on one notion of a place, and an owned copy of the
technique is to stay within four modules.

Proof: `python -m pytest tests/primitives/test_snn_timesteps_refusals.py`.
"""

import copy
import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

from ..core.rerun import Generators, generators_kept, is_batch_norm

TimestepFunction = Callable[[Any, Any], tuple[Any, Any]]


def take_step(step: TimestepFunction, x: Any, state: Any) -> tuple[Any, Any]:
    """Run one step and check that it returns a pair."""
    result: Any = step(x, state)
    if not (isinstance(result, tuple | list) and len(result) == 2):
        is_sequence = isinstance(result, tuple | list)
        returned = f"{len(result)} values" if is_sequence else type(result).__name__
        raise ValueError(f"step must return a pair, (output, state), and returned {returned}")
    return result[0], result[1]


# Places where a function can keep state between calls: modules, objects and variables.

# Attributes that every module has, such as hooks and submodules.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# Maximum number of functions and objects between the given function and what it reaches.
DEEPEST_SEARCH = 3
# What a function's closure holds that is no variable of its own.
NO_VARIABLES = (nn.Module, type, FunctionType, ModuleType)

# The name of a place, which of its values (`Place.where`), and the name of one value.
ValueKey = tuple[str, str, str]


@dataclass(frozen=True)
class Place:
    """Named values of a module, an object or a function that may change between calls."""

    name: str  # path of the module, object or function
    kind: str  # name of its class, or "function"
    where: str  # "attribute", "buffer" or "variable"
    values: MutableMapping[str, Any]  # the live mapping; for variables, of the closure's cells
    # A module's tensors are small enough to be copied; a variable may be a whole data set.
    is_module: bool = False
    # Names of BatchNorm's running statistics, which no forward in training mode reads.
    statistics: frozenset[str] = frozenset()

    def current(self) -> dict[str, Any]:
        """Return the values by name."""
        if self.where == "variable":
            return {name: cell.cell_contents for name, cell in self.values.items()}
        hidden = MODULE_ATTRIBUTES if self.where == "attribute" else frozenset[str]()
        return {name: value for name, value in self.values.items() if name not in hidden}

    def write(self, name: str, value: Any) -> None:
        if self.where == "variable":
            self.values[name].cell_contents = value
        else:
            self.values[name] = value


def code_of(function: Any) -> Any:
    """Return a function's code, or an object's class.

    It stays the same where a method, lambda or partial is created anew for each use.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def roots_of(function: Any) -> dict[str, nn.Module]:
    """Return the modules that a function reaches, by name; "" is the module of a method."""
    reached = _reached(function)
    return {name: value for name, value in reached.items() if isinstance(value, nn.Module)}


def places_of(function: Any) -> list[Place]:
    """List every place where a function can keep state."""
    places: list[Place] = []
    for name, value in _reached(function).items():
        if isinstance(value, dict):
            places.append(Place(name, "function", "variable", value))
        elif not isinstance(value, nn.Module):
            places.append(Place(name, type(value).__name__, "attribute", vars(value)))

    for name, module in _modules_of(roots_of(function)).items():
        kind = type(module).__name__
        statistics = frozenset(module._buffers if is_batch_norm(module) else ())
        places.append(Place(name, kind, "attribute", vars(module), is_module=True))
        places.append(Place(name, kind, "buffer", module._buffers, True, statistics))
    return places


def _modules_of(roots: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return all modules by name, also those in lists and dicts, as spiking neurons often are."""
    waiting = list(roots.items())
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    while waiting:
        root, module = waiting.pop(0)
        for path, submodule in module.named_modules():
            if id(submodule) in seen:
                continue
            seen.add(id(submodule))
            name = _join(root, path)
            found[name] = submodule
            for key, value in vars(submodule).items():
                if key not in MODULE_ATTRIBUTES:
                    inner = _modules_in(key, value)
                    waiting += [(_join(name, inner_name), member) for inner_name, member in inner]
    return found


def _modules_in(name: str, container: Any) -> list[tuple[str, nn.Module]]:
    if not isinstance(container, list | tuple | dict):
        return []
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    return [(_join(name, key), value) for key, value in pairs if isinstance(value, nn.Module)]


def _reached(function: Any) -> dict[str, Any]:
    """Return modules, objects and the cells of closure variables by name, nearest first."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any, int]] = [("", function, 0)]
    seen: set[int] = set()
    while waiting:
        name, value, depth = waiting.pop(0)
        if id(value) in seen or depth > DEEPEST_SEARCH:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found[name] = value
        elif isinstance(value, functools.partial):
            bound = [("", value.func), *enumerate(value.args), *value.keywords.items()]
            waiting += [(_join(name, key), member, depth) for key, member in bound]
        elif inspect.ismethod(value):
            waiting += [(name, value.__self__, depth), (name, value.__func__, depth)]
        elif isinstance(value, FunctionType):
            cells = _filled_cells(value)
            found[_join(name, value.__name__)] = {
                key: cell
                for key, cell in cells.items()
                if not isinstance(cell.cell_contents, NO_VARIABLES)
            }
            waiting += [(key, cell.cell_contents, depth + 1) for key, cell in cells.items()]
            waiting += [(key, member, depth + 1) for key, member in _globals_of(value).items()]
        elif is_object(value):
            found[name or type(value).__name__] = value
            held = [pair for pair in vars(value).items() if isinstance(pair[1], nn.Module)]
            waiting += [(_join(name, key), member, depth + 1) for key, member in held]
        else:
            waiting += [(key, member, depth + 1) for key, member in _modules_in(name, value)]
    return found


def _filled_cells(function: FunctionType) -> dict[str, Any]:
    """Return a function's closure cells by name, without variables that are not set yet."""
    names = function.__code__.co_freevars
    filled = inspect.getclosurevars(function).nonlocals if names else {}
    cells = zip(names, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if name in filled}


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """Return the global modules that a function uses, and functions of the same file."""
    space = function.__globals__
    used = {name: space.get(name) for name in function.__code__.co_names}
    return {
        name: value
        for name, value in used.items()
        if isinstance(value, nn.Module)
        or (isinstance(value, FunctionType) and value.__globals__ is space)
    }


def _join(name: str, key: Any) -> str:
    return ".".join(segment for segment in (name, str(key)) if segment)


def is_object(value: Any) -> bool:
    """Return whether a value is an object of a class outside torch and the standard library."""
    libraries = {"torch", *sys.stdlib_module_names} - {"__main__"}
    is_foreign = type(value).__module__.split(".")[0] not in libraries
    has_attributes = hasattr(value, "__dict__")
    return is_foreign and has_attributes and not isinstance(value, type | Tensor | nn.Module)


# Snapshots of attributes, containers and tensor contents, to compare and to restore.

# A longer container is data: its entries are not recorded, only its length.
LONGEST_RECORDED_CONTAINER = 1000
PLAIN_VALUE_TYPES = (bool, int, float, complex, str, bytes, type(None))

# Copies by identity and version of the tensor, so that each tensor is copied once.
TensorCopies = dict[tuple[int, int], tuple[Tensor, Tensor]]


class RecordedValue:
    """One recorded value and, if it `is_open`, everything in it.

    With `copies`, writes into a tensor can be undone. Containers that are long or deeply nested,
    and the objects that an object holds, are not recorded.
    """

    def __init__(self, value: Any, *, copies: TensorCopies | None, depth: int = 4) -> None:
        is_container = isinstance(value, list | tuple | dict | deque)
        self.value = value
        self.length = len(value) if is_container else 0
        self.version = version_of(value)
        self.is_copied = copies is not None
        self.copy: Tensor | None = None
        if copies is not None and isinstance(value, Tensor):
            key = id(value), self.version
            copies.setdefault(key, (value, value.detach().clone()))
            self.copy = copies[key][1]

        # Objects count twice, so that those inside of objects stay closed.
        levels = 1 if is_container else 2
        self.is_open = (
            (is_container or is_object(value))
            and depth > 2 * (levels - 1)
            and self.length <= LONGEST_RECORDED_CONTAINER
        )
        self.inside = {
            key: RecordedValue(entry, copies=copies, depth=depth - levels)
            for key, entry in (_contents_of(value) if self.is_open else {}).items()
        }

    def put_back(self) -> Any:
        """Restore the contents of the value and return it."""
        for entry in self.inside.values():
            entry.put_back()
        # Values are compared, because BatchNorm writes without counting up the version.
        if self.copy is not None and not _is_equal(self.value.detach(), self.copy):
            with torch.no_grad():
                if self.value.shape == self.copy.shape:
                    self.value.copy_(self.copy)
                else:
                    self.value.set_(self.copy.clone())
        if self.is_open:
            now = _contents_of(self.value)
            before = {key: entry.value for key, entry in self.inside.items()}
            if list(now) != list(before) or any(now[key] is not before[key] for key in now):
                _fill(self.value, before)
        return self.value

    def rebuilt(self, change: Callable[[Any], Any]) -> Any:
        """Build a separate value in which `change` is applied to every tensor and plain value."""
        if isinstance(self.value, Tensor):
            return change((self.value.detach() if self.copy is None else self.copy).clone())
        if not self.is_open:
            return change(self.value)
        contents = {key: entry.rebuilt(change) for key, entry in self.inside.items()}
        if isinstance(self.value, tuple):
            kind = type(self.value)
            return kind(*contents.values()) if hasattr(kind, "_fields") else kind(contents.values())
        new = copy.copy(self.value)
        _fill(new, contents)
        return new

    def changed(self, later: "RecordedValue") -> bool:
        """Return whether the later value is another one.

        A tensor that was replaced or written into counts as changed, whatever it holds.
        """
        if isinstance(self.value, PLAIN_VALUE_TYPES) and isinstance(later.value, PLAIN_VALUE_TYPES):
            return type(self.value) is not type(later.value) or bool(self.value != later.value)
        if self.value is not later.value or self.is_written(later) or self.length != later.length:
            return True
        if list(self.inside) != list(later.inside):
            return True
        return any(entry.changed(later.inside[key]) for key, entry in self.inside.items())

    def is_written(self, later: "RecordedValue") -> bool:
        """Return whether a tensor in the value was written into."""
        if self.value is later.value and self.version != later.version:
            return True
        common = self.inside.keys() & later.inside.keys()
        return any(self.inside[key].is_written(later.inside[key]) for key in common)


def version_of(value: Any) -> int:
    """Return how often a tensor was written into; 0 for values that have no version."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _contents_of(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    return dict(vars(value)) if is_object(value) else {}


def _fill(value: Any, contents: dict[Any, Any]) -> None:
    """Replace everything in a container or an object with `contents`."""
    if isinstance(value, list | deque):
        value.clear()
        value.extend(contents.values())
    elif isinstance(value, dict) or is_object(value):
        mapping = value if isinstance(value, dict) else vars(value)
        mapping.clear()
        mapping.update(contents)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors, with NaN equal to NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


class ValueSnapshot:
    """Recorded values of places.

    `only` restricts this to some values, each with whether its tensors are copied. Without it, all
    values are recorded, and the tensors of modules are copied.
    """

    def __init__(
        self,
        places: Sequence[Place],
        *,
        only: Mapping[ValueKey, bool] | None = None,
        copies: TensorCopies | None = None,
    ) -> None:
        self.places = places
        self.only = only
        copies = {} if copies is None else copies
        self.values: dict[ValueKey, RecordedValue] = {}
        for place in places:
            for name, value in place.current().items():
                key = place.name, place.where, name
                if only is None or key in only:
                    copied = place.is_module if only is None else only[key]
                    self.values[key] = RecordedValue(value, copies=copies if copied else None)

    def put_back(self) -> None:
        """Restore the recorded values, and delete values that were added since."""
        for place in self.places:
            now = place.current()
            for name in now:
                key = place.name, place.where, name
                if key not in self.values and (self.only is None or key in self.only):
                    del place.values[name]
            for key, recorded in self.values.items():
                if key[:2] == (place.name, place.where):
                    value = recorded.put_back()
                    if key[2] not in now or now[key[2]] is not value:
                        place.write(key[2], value)

    def changed(self, later: "ValueSnapshot") -> list[ValueKey]:
        """List the keys whose values differ later, or that only one of the two recorded."""
        common = self.values.keys() & later.values.keys()
        return [
            key
            for key in dict.fromkeys([*self.values, *later.values])
            if key not in common or self.values[key].changed(later.values[key])
        ]

    def writes(self, key: ValueKey, later: "ValueSnapshot") -> bool:
        """Return whether a tensor in the value of a key was written into since."""
        in_both = key in self.values and key in later.values
        return in_both and self.values[key].is_written(later.values[key])

    def rebuilt(
        self, keys: Sequence[ValueKey], change: Callable[[Any], Any] = lambda value: value
    ) -> dict[ValueKey, Any]:
        """Build separate values for some keys, with `change` applied to each."""
        return {key: self.values[key].rebuilt(change) for key in keys if key in self.values}


@contextmanager
def put_back_later(
    places: Sequence[Place], *, only: Mapping[ValueKey, bool] | None = None
) -> Iterator[None]:
    """Restore the values of places, or only some of them, on exit."""
    before = ValueSnapshot(places, only=only)
    try:
        yield
    finally:
        before.put_back()


# Run one step repeatedly, from the same random numbers and from chosen attribute values.

BROKEN_STEP_ERRORS = (
    *(ArithmeticError, AssertionError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)


@dataclass(frozen=True)
class Outcome:
    """Result of one step, without what it leaves behind in places."""

    values: list[Any]  # the leaves of the output and the state
    shape: TreeSpec  # their structure
    reached: set[int]  # identities of the parameters and traced values in its graph
    generators: Generators  # after the step
    state: Any
    made: list[Any]  # leaves of the state that the step did not only pass through

    def is_as(self, other: "Outcome", *, exact: bool) -> bool:
        """Return whether two outcomes are the same; without `exact`, values are not compared."""
        same = self.shape == other.shape and self.reached == other.reached
        same = same and self.generators.are_as(other.generators)
        return same and (not exact or all(map(_same_value, self.values, other.values)))


@dataclass
class StepProbe:
    """Runs one step repeatedly, each time from the same random numbers."""

    step: TimestepFunction
    timesteps: Sequence[Any]
    state: Any
    exact: bool = True
    traced: dict[int, Any] = field(default_factory=dict)
    copies: TensorCopies = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = places_of(self.step)
        self.parameters: dict[str, nn.Parameter] = {}
        for root, module in roots_of(self.step).items():
            if any(map(is_lazy, module.parameters())):
                name = root or type(module).__name__
                raise ValueError(f"{name} has no parameters yet: run one batch through it first")
            for name, parameter in module.named_parameters():
                self.parameters[_join(root, name)] = parameter

    def keep(self) -> ValueSnapshot:
        """Record the current values of all places."""
        return ValueSnapshot(self.places, copies=self.copies)

    def run(self, index: int, state: Any) -> Outcome:
        """Run one timestep on copies of its input and state."""
        x = _copies(self.timesteps[min(index, len(self.timesteps) - 1)])
        state = _copies(state)
        with generators_kept(), torch.enable_grad():
            output, new_state = take_step(self.step, x, state)
            generators = Generators([*tree_leaves(x), *tree_leaves(new_state)])

        for role, argument in (("input", x), ("state", state)):
            if any(version_of(leaf) for leaf in tree_leaves(argument)):
                raise ValueError(
                    f"step writes into the {role} that it is given, which is needed again in "
                    "backward: make a new tensor (v = v * decay, not v *= decay)"
                )

        leaves, shape = tree_flatten((output, new_state))
        candidates = set(map(id, self.parameters.values())) | self.traced.keys()
        given = set(map(id, tree_leaves(state)))
        made = [leaf for leaf in tree_leaves(new_state) if id(leaf) not in given]
        reached = _leaves_of_graph(leaves) & candidates
        return Outcome(_copies(leaves), shape, reached, generators, new_state, made)

    def run_from(self, base: ValueSnapshot, values: dict[ValueKey, Any]) -> Outcome:
        """Run the first timestep with places restored to `base`, except for `values`."""
        base.put_back()
        for place in self.places:
            for name in place.current():
                key = place.name, place.where, name
                if key in values:
                    place.write(name, values[key])
        return self.run(0, self.state)

    def matters(self, base: ValueSnapshot, values: dict[ValueKey, Any], plain: Outcome) -> bool:
        """Return whether a step with other values gives another outcome, or fails."""
        try:
            return not self.run_from(base, values).is_as(plain, exact=self.exact)
        except BROKEN_STEP_ERRORS:
            return True
        finally:
            base.put_back()

    def is_traced(self, base: ValueSnapshot, keys: list[ValueKey]) -> bool:
        """Return whether the graph of the step's result reaches the values of these keys."""
        values = base.rebuilt(keys, self._trace)
        try:
            return not self.traced.keys().isdisjoint(self.run_from(base, values).reached)
        except RuntimeError:
            return False  # some operations refuse a value only because it requires grad
        finally:
            self.traced = {}
            base.put_back()

    def _trace(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        leaf = value.detach().clone().requires_grad_()
        self.traced[id(leaf)] = leaf
        # The step may write into a clone, but not into a leaf that requires grad.
        return leaf.clone()


def _copies(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _same_value(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.dtype == other.dtype and torch.equal(value.nan_to_num(), other.nan_to_num())
    is_plain = isinstance(value, PLAIN_VALUE_TYPES)
    return type(value) is type(other) and (not is_plain or value == other)


def _leaves_of_graph(leaves: list[Any]) -> set[int]:
    """Return the identities of the tensors that a backward from these leaves would reach."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    found = {id(tensor) for tensor in tensors if tensor.is_leaf}
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            found.add(id(variable))
        following = {maker for maker, _ in node.next_functions if maker is not None}
        waiting += following - seen
        seen |= following
    return found


# Check that a step function keeps no state of its own between timesteps.

OUTSIDE_STATE_MESSAGE = (
    "step computes something else the second time, from the same input, state and attributes: it "
    "keeps state outside of its modules (a global, or a random generator of its own). Pass that in "
    "with the state"
)
# Increments that find a counter which takes effect at most every tenth time.
COUNTER_INCREMENTS = range(1, 11)
# Noise levels that carry a value across a threshold which it has not reached yet.
NOISE_SCALES = (10.0, 1e6)


class HiddenState(ValueError):
    """A step keeps state of its own, so running it again gives another result."""

    def __init__(self, said: str, module: str = "", attribute: str = "") -> None:
        super().__init__(said)
        self.module = module
        self.attribute = attribute


def check_step(
    step: TimestepFunction, timesteps: Sequence[Any], state: Any
) -> dict[ValueKey, bool]:
    """Raise `HiddenState` if a step depends on more than its input and state.

    Return the values that the step changes without depending on them, each with whether the step
    writes into tensors of it.
    """
    probe = StepProbe(step, timesteps, state)
    before = probe.keep()
    try:
        return _check(probe, before)
    finally:
        before.put_back()


def _check(probe: StepProbe, before: ValueSnapshot) -> dict[ValueKey, bool]:
    reference = _first_run(probe, before)
    _check_repeatable(probe, before, reference)

    # From here on the places are not restored between runs, so each run starts from what the run
    # before has left in them.
    after_one = probe.keep()
    repeated = probe.run(0, probe.state)
    after_two = probe.keep()
    next_step = probe.run(1, reference.state)
    after_three = probe.keep()
    if tree_flatten(next_step.state)[1] != tree_flatten(reference.state)[1]:
        raise ValueError(
            "the state that step returns has another structure after the second timestep than "
            "after the first: return a state of the same structure every time, and collect values "
            "over time with `outputs`"
        )

    statistics = {
        (place.name, place.where, name) for place in probe.places for name in place.statistics
    }
    changed = dict.fromkeys([*after_one.changed(after_two), *after_two.changed(after_three)])
    changing = [key for key in changed if key not in statistics]
    if not repeated.is_as(reference, exact=probe.exact):
        raise _refusal_of_repeat(probe, before, after_one, changing, reference)
    if changing:
        _try_out(probe, changing, after_one, after_three)
        # Try again from a state that is far off, in which every neuron spikes.
        probe.state = tree_map(partial(_disturbed, scale=NOISE_SCALES[0]), reference.state)
        _try_out(probe, changing, after_one, after_three)
    _check_attached(reference)
    # A value may exist only since the second or the third run.
    return {
        key: after_one.writes(key, after_two) or after_two.writes(key, after_three)
        for key in changing
    }


def _first_run(probe: StepProbe, before: ValueSnapshot) -> Outcome:
    """Run the step; raise if its state, or what it writes into, can't be recomputed."""
    versions = {name: version_of(value) for name, value in probe.parameters.items()}
    try:
        outcome = probe.run(0, probe.state)
    except RuntimeError as error:
        leaves = tree_leaves(probe.timesteps[0])
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        error.add_note(
            f"step was given an input of shape {shapes}, one of {len(probe.timesteps)}: is "
            "time_dim right?"
        )
        raise
    for leaf in tree_leaves(outcome.state):
        if not isinstance(leaf, (Tensor, *PLAIN_VALUE_TYPES)):
            raise ValueError(
                f"the state that step returns holds {type(leaf).__name__}: keep tensors in tuples, "
                "lists or dicts, because only those are freed and recomputed"
            )
    written = [
        tuple(name.rpartition(".")[::2])
        for name, parameter in probe.parameters.items()
        if version_of(parameter) != versions[name]
    ]
    after = probe.keep()
    written += [
        (key[0], key[2])
        for key in before.changed(after)
        if before.writes(key, after) and not before.values[key].is_copied
    ]
    for module, attribute in written:
        raise HiddenState(
            f"step writes into {attribute!r} of {module}, which can't be put back: make it part of "
            "the state",
            module,
            attribute,
        )
    return outcome


def _check_repeatable(probe: StepProbe, before: ValueSnapshot, reference: Outcome) -> None:
    """Run the step again from restored places, and set `probe.exact` to whether it repeats.

    On a CPU, a different result means hidden state. On other devices a kernel may add in another
    order each time, so a different result is accepted there.
    """
    probe.exact = probe.run_from(before, {}).is_as(reference, exact=True)
    tensors = [value for value in reference.values if isinstance(value, Tensor)]
    if not probe.exact and all(tensor.device.type == "cpu" for tensor in tensors):
        raise HiddenState(OUTSIDE_STATE_MESSAGE)


def _check_attached(reference: Outcome) -> None:
    """Raise if the step detaches the state that it returns."""
    tensors = [leaf for leaf in reference.made if isinstance(leaf, Tensor)]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if floating and reference.reached and not any(tensor.requires_grad for tensor in floating):
        raise ValueError(
            "the state that step returns is detached, so that no gradient reaches an earlier "
            "timestep: return it as it was computed; to truncate on purpose, call this once for "
            "each stretch of timesteps and detach the state between the calls"
        )


def _refusal_of_repeat(
    probe: StepProbe,
    before: ValueSnapshot,
    after_one: ValueSnapshot,
    changing: list[ValueKey],
    reference: Outcome,
) -> HiddenState:
    """Return the error for a step whose second run, without restored places, differs.

    It names the first value that makes the difference when it alone is carried over.
    """
    changed = dict.fromkeys([*before.changed(after_one), *changing])
    suspects = [key for key in changed if key in after_one.values]
    if not suspects:
        return HiddenState(OUTSIDE_STATE_MESSAGE)
    for key in suspects:
        if probe.matters(before, after_one.rebuilt([key]), reference):
            return _refusal(probe, key)
    return _refusal(probe, suspects[0])


def _try_out(
    probe: StepProbe, keys: list[ValueKey], after_one: ValueSnapshot, after_three: ValueSnapshot
) -> None:
    """Raise if a step depends on one of these values; the gentlest trials come first."""
    try:
        unchanged = probe.run_from(after_one, {})
    except BROKEN_STEP_ERRORS:
        return

    def replaced(source: ValueSnapshot, change: Callable[[Any], Any] = lambda value: value) -> Any:
        return lambda keys: probe.matters(after_one, source.rebuilt(keys, change), unchanged)

    trials = [
        replaced(after_three),
        lambda keys: probe.is_traced(after_one, keys),
        *[replaced(after_one, partial(_counted_on, more=more)) for more in COUNTER_INCREMENTS],
        *[replaced(after_one, partial(_disturbed, scale=scale)) for scale in NOISE_SCALES],
    ]
    for matters in trials:
        if matters(keys):
            raise _refusal(probe, next((key for key in keys if matters([key])), keys[0]))


def _counted_on(value: Any, *, more: int) -> Any:
    if isinstance(value, bool):
        return not value
    return value + more if isinstance(value, int | float) else value


def _disturbed(value: Any, *, scale: float) -> Any:
    """Add so much noise that a potential crosses its threshold for some neurons."""
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.numel()):
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    return value + noise.to(value) * scale * (1 + value.abs().max())


def _refusal(probe: StepProbe, key: ValueKey) -> HiddenState:
    name, where, attribute = key
    kinds = {(place.name, place.where): place.kind for place in probe.places}
    label = f"{name} ({kinds[name, where]})" if name else kinds[name, where]
    return HiddenState(
        f"{label} keeps state from one timestep to the next in its {where} {attribute!r}, and a "
        "recomputed chunk would start from the last value: gradients would be wrong without any "
        "error. Set it from `state` at the start of step and return it with the state, or use a "
        "layer that takes it as an argument (snntorch: init_hidden=False)",
        name,
        attribute,
    )
