"""Find state that a timestep keeps to itself, and refuse it before it trains wrongly.

A step is recomputed correctly only if its result follows from its input and state. So the first
timesteps run twice, one run after the other, and the second run has to give the same to the bit:
outputs, states, the tensors that autograd saves, and the random numbers that are drawn. Otherwise a
value that the step has changed in a module, an object or a variable is hidden state, and the step
is refused. Values that change without any effect, such as a stored copy of the last output, are
restored after a recomputation.

Proof: `python -m pytest tests/primitives/test_snn_timesteps_refusals.py`.
"""

import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

from ..core.generators import Generators, generators_kept
from ..core.rerun import is_batch_norm

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
# A `ValueKey` and the keys inside of that value.
ValuePath = tuple[Any, ...]


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

    def __init__(self, holders: Holders) -> None:
        self.values: dict[ValuePath, RecordedValue] = {}
        self._holders = {name: (one, contents_of(one) or {}) for name, one in holders.items()}
        for name, (holder, contents) in self._holders.items():
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
        saved = value.detach().clone() if copied and isinstance(value, Tensor) else None
        self.values[path] = RecordedValue(value, length, version_of(value), saved, contents)
        for key, inner in (contents or {}).items():
            self._record((*path, key), inner, copied=copied, depth=depth - levels)

    def put_back(self, *, without: ValueKey | None = None) -> None:
        """Restore the recorded values, and delete values that were added since.

        The value of the key `without` stays as it is now.
        """
        for name, (holder, contents) in self._holders.items():
            if without is not None and without[0] == name:
                now = contents_of(holder) or {}
                stays = {key: value for key, value in now.items() if key == without[1]}
                fill(holder, contents | stays)
            else:
                fill(holder, contents)
        for path, recorded in self.values.items():
            if path[:2] != without:
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


@contextmanager
def put_back_later(holders: Holders) -> Iterator[None]:
    """Restore the values of holders on exit."""
    before = ValueSnapshot(holders)
    try:
        yield
    finally:
        before.put_back()


# Run the first timesteps repeatedly, from the same random numbers.

# An odd number, so that a flag that each step turns over is another one in the second run.
NUM_CHECKED_STEPS = 3
# Noise that carries a value across a threshold which it has not reached yet.
NOISE_SCALE = 10.0
BROKEN_STEP_ERRORS = (
    *(ArithmeticError, AssertionError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
OUTSIDE_STATE_MESSAGE = (
    "step computes something else the second time, from the same input, state and attributes: it "
    "keeps state outside of its modules (a global, or a random generator of its own). Pass that in "
    "with the state"
)


class HiddenState(ValueError):
    """A step keeps state of its own, so running it again gives another result."""

    def __init__(self, said: str, module: str = "", attribute: str = "") -> None:
        super().__init__(said)
        self.module = module
        self.attribute = attribute


@dataclass(frozen=True)
class Outcome:
    """Results of the first timesteps, without what they leave behind in holders."""

    values: list[Any]  # the leaves of outputs and states, and the tensors saved for backward
    shape: TreeSpec
    generators: Generators  # after the last step
    last_state: Any

    def is_as(self, other: "Outcome", *, exact: bool) -> bool:
        """Return whether two outcomes are the same; without `exact`, values are not compared."""
        if self.shape != other.shape or not self.generators.are_as(other.generators):
            return False
        return not exact or all(map(_same_value, self.values, other.values))


class StepProbe:
    """Runs the first timesteps repeatedly, each time from the same random numbers."""

    def __init__(self, step: TimestepFunction, timesteps: Sequence[Any], state: Any) -> None:
        self.step = step
        self.timesteps = [
            timesteps[min(index, len(timesteps) - 1)] for index in range(NUM_CHECKED_STEPS)
        ]
        self.state = state
        self.holders = holders_of(step)
        self.parameters: dict[str, nn.Parameter] = {}
        for root, module in roots_of(step).items():
            if any(map(is_lazy, module.parameters())):
                name = root or type(module).__name__
                raise ValueError(f"{name} has no parameters yet: run one batch through it first")
            for name, parameter in module.named_parameters():
                self.parameters[_join(root, name)] = parameter
        self.versions = {name: version_of(value) for name, value in self.parameters.items()}
        # Weights stay the same, and BatchNorm does not read its statistics in training mode.
        norms = [holder for holder in self.holders.values() if is_batch_norm(holder)]
        statistics = [tensor for norm in norms for tensor in norm.buffers()]
        self.unread = {_address(tensor) for tensor in (*self.parameters.values(), *statistics)}
        self.before = ValueSnapshot(self.holders)

    def run(self) -> Outcome:
        """Run the timesteps on copies of inputs and state, from what is in the holders now."""
        saved: list[Any] = []

        def note(tensor: Tensor) -> Tensor:
            address = _address(tensor)
            saved.append(address if address in self.unread else tensor.detach().clone())
            return tensor

        state = _copies(self.state)
        results = []
        with generators_kept(), torch.enable_grad():
            with saved_tensors_hooks(note, lambda tensor: tensor):
                for x in map(_copies, self.timesteps):
                    output, state = self._take(x, state)
                    results.append((_copies(output), _copies(state)))
            generators = Generators([*tree_leaves(self.timesteps), *tree_leaves(state)])
        self._refuse_writes()
        if tree_flatten(results[0][1])[1] != tree_flatten(results[1][1])[1]:
            raise ValueError(
                "the state that step returns has another structure after the second timestep than "
                "after the first: return a state of the same structure every time, and collect "
                "values over time with `outputs`"
            )
        leaves, shape = tree_flatten((results, saved))
        return Outcome(leaves, shape, generators, results[-1][1])

    def _take(self, x: Any, state: Any) -> tuple[Any, Any]:
        given = [(leaf, version_of(leaf)) for leaf in tree_leaves(state)]
        output, new_state = take_step(self.step, x, state)
        if any(map(version_of, tree_leaves(x))):
            raise _writes_into("input")
        if any(version_of(leaf) != version for leaf, version in given):
            raise _writes_into("state")
        leaves = tree_leaves(new_state)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *PLAIN_VALUE_TYPES)):
                raise ValueError(
                    f"the state that step returns holds {type(leaf).__name__}: keep tensors in "
                    "tuples, lists or dicts, because only those are freed and recomputed"
                )
        made = [leaf for leaf in leaves if not any(leaf is one for one, _ in given)]
        _check_attached(output, made)
        return output, new_state

    def _refuse_writes(self) -> None:
        """Raise if the step writes into a parameter, or into a tensor that was not copied."""
        written = [
            tuple(name.rpartition(".")[::2])
            for name, parameter in self.parameters.items()
            if version_of(parameter) != self.versions[name]
        ]
        written += [
            path[:2]
            for path, recorded in self.before.values.items()
            if recorded.copy is None and version_of(recorded.value) != recorded.version
        ]
        for module, attribute in written:
            raise HiddenState(
                f"step writes into {attribute!r} of {module}, which can't be put back: make it "
                "part of the state",
                module,
                attribute,
            )

    def differs(self, reference: Outcome, *, exact: bool) -> bool:
        """Return whether a run from what is in the holders now differs, or fails."""
        try:
            found = self.run()
        except HiddenState:
            raise
        except BROKEN_STEP_ERRORS:
            return True
        return not found.is_as(reference, exact=exact)

    def changed(self) -> list[ValueKey]:
        """List what runs have changed, but BatchNorm's statistics, which it does not read."""
        keys = self.before.changed(ValueSnapshot(self.holders))
        return [
            (name, key)
            for name, key in keys
            if not (is_batch_norm(self.holders[name]) and key in self.holders[name]._buffers)
        ]


def _writes_into(role: str) -> ValueError:
    return ValueError(
        f"step writes into the {role} that it is given, which is needed again in backward: make a "
        "new tensor (v = v * decay, not v *= decay)"
    )


def _check_attached(output: Any, made: Sequence[Any]) -> None:
    """Raise if the step detaches the state that it has made."""
    tensors = [leaf for leaf in made if isinstance(leaf, Tensor)]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    trains = any(tensor.requires_grad for tensor in outputs)
    if floating and trains and not any(tensor.requires_grad for tensor in floating):
        raise ValueError(
            "the state that step returns is detached, so that no gradient reaches an earlier "
            "timestep: return it as it was computed; to truncate on purpose, call this once for "
            "each stretch of timesteps and detach the state between the calls"
        )


def _copies(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same_value(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return _is_equal(value, other)
    is_plain = isinstance(value, PLAIN_VALUE_TYPES)
    return type(value) is type(other) and (not is_plain or value == other)


# Check that a step function keeps no state of its own between timesteps.


def check_step(step: TimestepFunction, timesteps: Sequence[Any], state: Any) -> set[str]:
    """Raise `HiddenState` if a step depends on more than its input and state.

    Return the names of the holders in which the step changes values without depending on them:
    these have to be put back after a recomputation.
    """
    probe = StepProbe(step, timesteps, state)
    try:
        return _check(probe)
    finally:
        probe.before.put_back()


def _check(probe: StepProbe) -> set[str]:
    try:
        reference = probe.run()
    except RuntimeError as error:
        leaves = tree_leaves(probe.timesteps[0])
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        error.add_note(f"step was given an input of shape {shapes}: is time_dim right?")
        raise

    # On a CPU, another result from the same values means hidden state. On other devices a kernel
    # may add in another order each time.
    probe.before.put_back()
    exact = not probe.differs(reference, exact=True)
    tensors = [value for value in reference.values if isinstance(value, Tensor)]
    if not exact and all(tensor.device.type == "cpu" for tensor in tensors):
        raise HiddenState(OUTSIDE_STATE_MESSAGE)

    # The next run starts from what this one has left in the holders.
    changed = dict.fromkeys(probe.changed())
    if probe.differs(reference, exact=exact):
        raise _refusal(probe, reference, list(changed), exact=exact)
    changed |= dict.fromkeys(probe.changed())
    if changed:
        # Try again from a state that is far off, in which every neuron spikes.
        probe.state = tree_map(_far_off, reference.last_state)
        probe.before.put_back()
        try:
            reference = probe.run()
        except BROKEN_STEP_ERRORS:
            # A step may refuse such a state.
            return {holder for holder, _ in changed}
        if probe.differs(reference, exact=exact):
            raise _refusal(probe, reference, list(changed), exact=exact)
    return {holder for holder, _ in changed}


def _far_off(value: Any) -> Any:
    """Add noise to a tensor, so that a potential crosses its threshold somewhere."""
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.numel()):
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    return value + noise.to(value) * NOISE_SCALE * (1 + value.abs().max())


def _refusal(
    probe: StepProbe, reference: Outcome, keys: list[ValueKey], *, exact: bool
) -> HiddenState:
    """Return the error; it names the first value that makes the difference by itself."""
    if not keys:
        return HiddenState(OUTSIDE_STATE_MESSAGE)

    def matters(key: ValueKey) -> bool:
        probe.before.put_back()
        probe.run()
        probe.before.put_back(without=key)
        return probe.differs(reference, exact=exact)

    name, attribute = next(filter(matters, keys), keys[0])
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
