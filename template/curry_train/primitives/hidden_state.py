"""Find state that a timestep keeps to itself, and refuse it before it trains wrongly.

A step is recomputed correctly only if its result follows from its input and state. The step runs
several times, and every attribute or variable that changes in between is tested: it is set to other
values, to higher counts, and to tensors that autograd tracks. If the step's result, the parameters
that its graph reaches or the random numbers that it draws are then different, the value is hidden
state, and the step is refused. Values that change without any effect, such as a stored copy of the
last output, are restored after a recomputation.

Proof: `python -m pytest tests/primitives/test_snn_timesteps_refusals.py`.
"""

import copy
import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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


# Holders of state between calls: modules, objects, and functions with their closure's variables.

# Attributes that every module has, such as hooks and submodules.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# Maximum number of functions and objects between the given function and what it reaches.
DEEPEST_SEARCH = 3
# What a function's closure holds that is no variable of its own.
NO_VARIABLES = (nn.Module, type, FunctionType, ModuleType)

# Modules, objects and functions by name.
Holders = Mapping[str, Any]


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
    reached = holders_of(function, submodules=False)
    return {name: value for name, value in reached.items() if isinstance(value, nn.Module)}


def holders_of(function: Any, *, submodules: bool = True) -> dict[str, Any]:
    """Return everything in which a function can keep state, by name, nearest first.

    With `submodules` also the modules inside of modules.
    """
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any, int]] = [("", function, 0)]
    seen: set[int] = set()
    while waiting:
        name, value, depth = waiting.pop(0)
        if id(value) in seen or depth > DEEPEST_SEARCH:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            found[_join(name, value.__name__)] = value
            name = ""  # what a function reaches has a name of its own
        elif isinstance(value, nn.Module):
            found[name] = value
            if not submodules:
                continue
            depth -= 1
        elif is_object(value):
            found[name or type(value).__name__] = value
        waiting += [(_join(name, key), inner, depth + 1) for key, inner in _inside(value)]
    return found


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what a function, module, object or container may call, by name."""
    if isinstance(value, functools.partial):
        yield from [("", value.func), *enumerate(value.args), *value.keywords.items()]
    elif inspect.ismethod(value):
        yield from [("", value.__self__), ("", value.__func__)]
    elif isinstance(value, FunctionType):
        yield from _variables(value).items()
        for name in value.__code__.co_names:
            used = value.__globals__.get(name)
            of_this_file = getattr(used, "__globals__", None) is value.__globals__
            if isinstance(used, nn.Module) or of_this_file:
                yield name, used
    elif isinstance(value, nn.Module):
        yield from value.named_children()
        # Spiking neurons often stand in a plain list.
        for key, container in vars(value).items():
            if key not in MODULE_ATTRIBUTES and isinstance(container, list | tuple | dict):
                yield from ((_join(key, inner), module) for inner, module in _inside(container))
    else:
        contents = contents_of(value) or {}
        yield from ((key, held) for key, held in contents.items() if isinstance(held, nn.Module))


def _variables(function: FunctionType) -> dict[str, Any]:
    """Return the variables of a function's closure, without those that are not set yet."""
    found = {}
    for name, cell in _cells(function).items():
        with suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _cells(function: FunctionType) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _join(name: str, key: Any) -> str:
    return ".".join(segment for segment in (name, str(key)) if segment)


def is_object(value: Any) -> bool:
    """Return whether a value is an object of a class outside torch and the standard library."""
    libraries = {"torch", *sys.stdlib_module_names} - {"__main__"}
    is_foreign = type(value).__module__.split(".")[0] not in libraries
    has_attributes = hasattr(value, "__dict__")
    return is_foreign and has_attributes and not isinstance(value, type | Tensor | nn.Module)


# What a holder, a container or an object holds, by key.


def contents_of(value: Any) -> dict[Any, Any] | None:
    """Return the contents as a new dictionary; None for values that hold nothing."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if isinstance(value, FunctionType):
        variables = _variables(value).items()
        return {name: held for name, held in variables if not isinstance(held, NO_VARIABLES)}
    if isinstance(value, nn.Module):
        own = {name: held for name, held in vars(value).items() if name not in MODULE_ATTRIBUTES}
        return own | value._buffers
    return dict(vars(value)) if is_object(value) else None


def fill(value: Any, contents: dict[Any, Any]) -> None:
    """Replace everything that a value holds with `contents`, if it differs."""
    now = contents_of(value) or {}
    if list(now) == list(contents) and all(now[key] is contents[key] for key in now):
        return
    if isinstance(value, list | deque):
        value.clear()
        value.extend(contents.values())
    elif isinstance(value, FunctionType):
        for key, held in contents.items():
            _cells(value)[key].cell_contents = held
    elif isinstance(value, nn.Module):
        for key in now.keys() - contents.keys():
            del _mapping_with(key, value)[key]
        for key, held in contents.items():
            _mapping_with(key, value)[key] = held
    elif not isinstance(value, tuple):
        mapping = value if isinstance(value, dict) else vars(value)
        mapping.clear()
        mapping.update(contents)


def _mapping_with(name: str, module: nn.Module) -> dict[str, Any]:
    return module._buffers if name in module._buffers else vars(module)


# Snapshots of holders, and of the containers, objects and tensors in them.

# A longer container is data: its entries are not recorded, only its length.
LONGEST_RECORDED_CONTAINER = 1000
# Levels of containers that are recorded below a value of a holder. An object counts twice and must
# leave two levels, so that objects inside of objects are not recorded.
DEEPEST_RECORD = 4
PLAIN_VALUE_TYPES = (bool, int, float, complex, str, bytes, type(None))

# The name of a holder, and the name of one of its values.
ValueKey = tuple[str, str]
# A `ValueKey` and the keys inside of that value; the name of a holder alone for itself.
ValuePath = tuple[Any, ...]
# Copies by identity and version of the tensor, so that each tensor is copied once.
TensorCopies = dict[tuple[int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RecordedValue:
    """A value at one moment; what it holds is recorded beside it, under longer paths."""

    value: Any
    length: int
    version: int
    copy: Tensor | None  # with it, writes into a tensor can be undone
    contents: dict[Any, Any] | None  # if they are recorded

    def put_back(self) -> None:
        """Restore the contents of the value."""
        # Values are compared, because BatchNorm writes without counting up the version.
        if self.copy is not None and not _is_equal(self.value.detach(), self.copy):
            with torch.no_grad():
                if self.value.shape == self.copy.shape:
                    self.value.copy_(self.copy)
                else:
                    self.value.set_(self.copy.clone())
        if self.contents is not None:
            fill(self.value, self.contents)

    def is_as(self, later: "RecordedValue") -> bool:
        """Return whether the later value is the same.

        A tensor that was replaced or written into is another one, whatever it holds.
        """
        if isinstance(self.value, PLAIN_VALUE_TYPES) and isinstance(later.value, PLAIN_VALUE_TYPES):
            return type(self.value) is type(later.value) and bool(self.value == later.value)
        same = self.value is later.value and self.length == later.length
        return same and self.version == later.version


def version_of(value: Any) -> int:
    """Return how often a tensor was written into; 0 for values that have no version."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors, with NaN equal to NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


class ValueSnapshot:
    """Recorded values of holders, with copies of the tensors of modules.

    The tensors of functions and objects are not copied: one may be a whole data set.
    """

    def __init__(self, holders: Holders, *, copies: TensorCopies | None = None) -> None:
        self.values: dict[ValuePath, RecordedValue] = {}
        self._holders = [(holder, contents_of(holder) or {}) for holder in holders.values()]
        self._copies = {} if copies is None else copies
        for (name, holder), (_, contents) in zip(holders.items(), self._holders, strict=True):
            for key, value in contents.items():
                self._record((name, key), value, copied=isinstance(holder, nn.Module))

    def _record(
        self, path: ValuePath, value: Any, *, copied: bool, depth: int = DEEPEST_RECORD
    ) -> None:
        is_open = not isinstance(value, nn.Module | FunctionType)  # these are holders themselves
        contents = contents_of(value) if is_open else None
        length = len(contents or ())
        levels = 2 if is_object(value) else 1
        if length > LONGEST_RECORDED_CONTAINER or depth <= 2 * (levels - 1):
            contents = None
        saved = None
        if copied and isinstance(value, Tensor):
            same = id(value), version_of(value)
            if same not in self._copies:
                self._copies[same] = (value, value.detach().clone())
            saved = self._copies[same][1]
        self.values[path] = RecordedValue(value, length, version_of(value), saved, contents)
        for key, inner in (contents or {}).items():
            self._record((*path, key), inner, copied=copied, depth=depth - levels)

    def put_back(self) -> None:
        """Restore the recorded values, and delete values that were added since."""
        for holder, contents in self._holders:
            fill(holder, contents)
        for recorded in self.values.values():
            recorded.put_back()

    def changed(self, later: "ValueSnapshot") -> list[ValueKey]:
        """List the keys whose values differ later, or that only one of the two recorded."""
        common = self.values.keys() & later.values.keys()
        differing = [
            path[:2]
            for path in [*self.values, *later.values]
            if path not in common or not self.values[path].is_as(later.values[path])
        ]
        return list(dict.fromkeys(differing))

    def rebuilt(
        self, keys: Sequence[ValueKey], change: Callable[[Any], Any] = lambda value: value
    ) -> dict[ValueKey, Any]:
        """Build separate values for some keys, with `change` applied to each in them."""
        return {key: self._rebuilt(key, change) for key in keys if key in self.values}

    def _rebuilt(self, path: ValuePath, change: Callable[[Any], Any]) -> Any:
        recorded = self.values[path]
        value = recorded.value
        if isinstance(value, Tensor):
            return change((value.detach() if recorded.copy is None else recorded.copy).clone())
        if recorded.contents is None:
            return change(value)
        contents = {key: self._rebuilt((*path, key), change) for key in recorded.contents}
        if isinstance(value, tuple):
            kind = type(value)
            return kind(*contents.values()) if hasattr(kind, "_fields") else kind(contents.values())
        new = copy.copy(value)
        fill(new, contents)
        return new


@contextmanager
def put_back_later(holders: Holders) -> Iterator[None]:
    """Restore the values of holders on exit."""
    before = ValueSnapshot(holders)
    try:
        yield
    finally:
        before.put_back()


# Run one step repeatedly, from the same random numbers and from chosen values.

BROKEN_STEP_ERRORS = (
    *(ArithmeticError, AssertionError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)


@dataclass(frozen=True)
class Outcome:
    """Result of one step, without what it leaves behind in holders."""

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
        self.holders = holders_of(self.step)
        self.parameters: dict[str, nn.Parameter] = {}
        for root, module in roots_of(self.step).items():
            if any(map(is_lazy, module.parameters())):
                name = root or type(module).__name__
                raise ValueError(f"{name} has no parameters yet: run one batch through it first")
            for name, parameter in module.named_parameters():
                self.parameters[_join(root, name)] = parameter

    def keep(self) -> ValueSnapshot:
        """Record the current values of all holders."""
        return ValueSnapshot(self.holders, copies=self.copies)

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
        """Run the first timestep with holders restored to `base`, except for `values`."""
        base.put_back()
        for name, holder in self.holders.items():
            given = {key: value for (owner, key), value in values.items() if owner == name}
            fill(holder, (contents_of(holder) or {}) | given)
        return self.run(0, self.state)

    def is_statistic(self, key: ValueKey) -> bool:
        """Return whether this is of BatchNorm, which does not read it in training mode."""
        holder = self.holders[key[0]]
        return is_batch_norm(holder) and key[1] in holder._buffers

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
        return _is_equal(value, other)
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


def check_step(step: TimestepFunction, timesteps: Sequence[Any], state: Any) -> set[str]:
    """Raise `HiddenState` if a step depends on more than its input and state.

    Return the names of the holders in which the step changes values without depending on them:
    these have to be put back after a recomputation.
    """
    probe = StepProbe(step, timesteps, state)
    before = probe.keep()
    try:
        return _check(probe, before)
    finally:
        before.put_back()


def _check(probe: StepProbe, before: ValueSnapshot) -> set[str]:
    versions = {name: version_of(value) for name, value in probe.parameters.items()}
    reference = _first_run(probe)
    _refuse_writes(probe, before, versions)
    # On a CPU, another result from the same values means hidden state. On other devices a kernel
    # may add in another order each time.
    probe.exact = probe.run_from(before, {}).is_as(reference, exact=True)
    tensors = [value for value in reference.values if isinstance(value, Tensor)]
    if not probe.exact and all(tensor.device.type == "cpu" for tensor in tensors):
        raise HiddenState(OUTSIDE_STATE_MESSAGE)

    # From here on the holders are not restored between runs, so each run starts from what the run
    # before has left in them.
    after_one = probe.keep()
    repeated = probe.run(0, probe.state)
    after_two = probe.keep()
    next_step = probe.run(1, reference.state)
    after_three = probe.keep()
    _refuse_writes(probe, before, versions)
    if tree_flatten(next_step.state)[1] != tree_flatten(reference.state)[1]:
        raise ValueError(
            "the state that step returns has another structure after the second timestep than "
            "after the first: return a state of the same structure every time, and collect values "
            "over time with `outputs`"
        )

    # A value may exist only since the second or the third run.
    changing = [*after_one.changed(after_two), *after_two.changed(after_three)]
    changing = [key for key in dict.fromkeys(changing) if not probe.is_statistic(key)]
    if not repeated.is_as(reference, exact=probe.exact):
        changed = dict.fromkeys([*before.changed(after_one), *changing])
        suspects = [key for key in changed if key in after_one.values]
        if not suspects:
            raise HiddenState(OUTSIDE_STATE_MESSAGE)
        raise _refusal(
            probe,
            suspects,
            lambda keys: probe.matters(before, after_one.rebuilt(keys), reference),
        )
    if changing:
        _try_out(probe, changing, after_one, after_three)
        # Try again from a state that is far off, in which every neuron spikes.
        probe.state = tree_map(partial(_disturbed, scale=NOISE_SCALES[0]), reference.state)
        _try_out(probe, changing, after_one, after_three)
    _check_attached(reference)
    return {holder for holder, _ in changing}


def _first_run(probe: StepProbe) -> Outcome:
    """Run the step; raise if its state can't be recomputed."""
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
    return outcome


def _refuse_writes(probe: StepProbe, before: ValueSnapshot, versions: Mapping[str, int]) -> None:
    """Raise if the step writes into a parameter, or into a tensor that was not copied."""
    written = [
        tuple(name.rpartition(".")[::2])
        for name, parameter in probe.parameters.items()
        if version_of(parameter) != versions[name]
    ]
    written += [
        path[:2]
        for path, recorded in before.values.items()
        if recorded.copy is None and version_of(recorded.value) != recorded.version
    ]
    for module, attribute in written:
        raise HiddenState(
            f"step writes into {attribute!r} of {module}, which can't be put back: make it part of "
            "the state",
            module,
            attribute,
        )


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

    disturbed = [partial(_disturbed, more=more) for more in COUNTER_INCREMENTS]
    disturbed += [partial(_disturbed, scale=scale) for scale in NOISE_SCALES]
    for matters in (
        replaced(after_three),
        lambda keys: probe.is_traced(after_one, keys),
        *[replaced(after_one, change) for change in disturbed],
    ):
        if matters(keys):
            raise _refusal(probe, keys, matters)


def _disturbed(value: Any, *, more: int = 0, scale: float = 0.0) -> Any:
    """Count a number on, or add noise so that a potential crosses its threshold somewhere."""
    if isinstance(value, bool):
        return value != bool(more)
    if isinstance(value, int | float):
        return value + more
    if not (scale and isinstance(value, Tensor) and value.is_floating_point() and value.numel()):
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    return value + noise.to(value) * scale * (1 + value.abs().max())


def _refusal(
    probe: StepProbe, keys: list[ValueKey], matters: Callable[[list[ValueKey]], bool]
) -> HiddenState:
    """Return the error; it names the first value that makes the difference by itself."""
    key = next((key for key in keys if matters([key])), keys[0])
    name, attribute = key
    holder = probe.holders[name]
    kind = type(holder).__name__
    label = f"{name} ({kind})" if name else kind
    where = "variable" if isinstance(holder, FunctionType) else "attribute"
    if isinstance(holder, nn.Module) and attribute in holder._buffers:
        where = "buffer"
    return HiddenState(
        f"{label} keeps state from one timestep to the next in its {where} {attribute!r}, and a "
        "recomputed chunk would start from the last value: gradients would be wrong without any "
        "error. Set it from `state` at the start of step and return it with the state, or use a "
        "layer that takes it as an argument (snntorch: init_hidden=False)",
        name,
        attribute,
    )
