"""Restore for a second call, in the backward, the function modes and the state of the first one.

Proof: `python -m pytest tests/primitives/test_recompute_options.py
tests/primitives/test_regions.py tests/peers/test_peer_behaviours.py`.
"""

import contextlib
import functools
import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def function_modes() -> list[TorchFunctionMode]:
    """Return the active function modes, as of `with torch.device(...)`, that outlast a block."""
    modes = _get_current_function_mode_stack()
    return [mode for mode in modes if not hasattr(mode, "ends_with_run")]


@contextlib.contextmanager
def function_modes_as(modes: list[TorchFunctionMode]) -> Iterator[None]:
    """Enter recorded function modes that are not active now.

    Torch runs backward without the modes in which `backward` is called. For a default device a new
    context is entered, because a context can restore only one previous state.
    """
    now = function_modes()
    with contextlib.ExitStack() as stack:
        for mode in modes:
            if mode not in now:
                stack.enter_context(mode.device if isinstance(mode, DeviceContext) else mode)
        yield


# Set on autograd nodes whose saved tensors a checkpointed call returns only once.
RETURNED_ONCE_KEY = "curry_train_again"


def mark_returned_once(output: Any) -> None:
    """Mark the nodes of a checkpointed call's output: their saved tensors come back only once."""
    for leaf in tree_leaves(output):
        for tensor in (leaf, leaf._base) if isinstance(leaf, Tensor) else ():
            if tensor is not None and tensor.grad_fn is not None:
                node: Any = tensor.grad_fn
                node.metadata[RETURNED_ONCE_KEY] = True


# Modules that a plain function uses.


def modules_of(function: Any, *, depth: int = 0) -> list[nn.Module]:
    """Return the modules that a function is bound to, or finds outside of its arguments.

    With a depth also those that are found so by the functions of its closure and of its own file,
    by objects, and in plain lists of modules.
    """
    found: dict[nn.Module, None] = {}
    for value in tree_leaves(list(_find_used(function))):
        inside: list[Any] = []
        if isinstance(value, nn.Module):
            found[value] = None
            if depth:
                inside = [
                    one
                    for module in value.modules()
                    for key, one in vars(module).items()
                    if key not in TORCH_ATTRIBUTES
                ]
        elif depth and isinstance(value, functools.partial | MethodType | FunctionType):
            inside = modules_of(value, depth=depth - 1)
        elif depth and hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
            inside = list(vars(value).values())
        found |= dict.fromkeys(one for one in tree_leaves(inside) if isinstance(one, nn.Module))
    return list(found)


def _find_used(function: Any) -> Iterator[Any]:
    """Yield the objects that a function is bound to, or finds outside of its arguments."""
    while isinstance(function, functools.partial | MethodType):
        if isinstance(function, MethodType):
            yield function.__self__
            function = function.__func__
        else:
            yield from (*function.args, *function.keywords.values())
            function = function.func
    if not isinstance(function, FunctionType):
        yield function
        return
    outside = inspect.getclosurevars(function)
    yield from outside.nonlocals.values()
    for value in outside.globals.values():
        # Functions of other files, such as those of torch, use no module of the model.
        if getattr(value, "__globals__", function.__globals__) is function.__globals__:
            yield value


# Attributes that torch keeps on every module. Only `training` is part of a call.
TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}
COPIED_CONTAINERS = {list, dict, set, deque, OrderedDict, defaultdict}
# A longer container is data, and copying it at each call would cost more than the call.
LONGEST_COPIED = 1000

# The buffers and tensor attributes that each module is known to write in place.
written_names: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()

# Contexts that each second call runs in; a technique that changes blocks adds its own.
second_call_contexts: set[Callable[[], contextlib.AbstractContextManager[None]]] = set()


class BlockState:
    """Parameters, buffers, attributes, generators and mode of modules at their first call.

    Make it before that call and call `end` after it; inside `with state:` the modules have that
    state again, and what a second call writes is dropped: statistics, counters and histories
    advance once.
    Objects that were replaced since are put back (`functional_call`, swapped weights). A tensor
    that was changed in place can't be: an error, as in autograd. Function modes, such as `with
    torch.device(...)`, are entered again, because torch runs backward without them.
    Long loops and few calls, because every call of a block runs this.
    """

    def __init__(self, roots: Sequence[nn.Module], arguments: Iterable[Any] = ()) -> None:
        self.states: dict[nn.Module, SimpleNamespace] = {}
        # The block's own generators, and those it is called with, with their states.
        self.generators = [(one, one.get_state()) for one in arguments if type(one) is Generator]
        # Of each second call that runs now: a stack that restores the state at its end.
        self.ends: list[contextlib.ExitStack] = []
        self.modes = function_modes()
        modules: list[Any] = list(roots)
        while modules:
            module = modules.pop()
            # A scripted module gives no access to what it holds.
            if module in self.states or isinstance(module, torch.jit.ScriptModule | None):
                continue
            modules += module._modules.values()
            parameters, buffers, attributes = _read_held(module)
            # A second call of a norm leaves its statistics alone.
            buffers = {} if isinstance(module, _NormBase) else buffers
            self.states[module] = state = SimpleNamespace(
                held=(parameters, buffers, attributes),
                versions={},
                # Containers and tensors that the call may change, as they were before it.
                originals={},
            )
            may_be_written = buffers.copy()
            for name in attributes.keys() - TORCH_ATTRIBUTES:
                value = attributes[name]
                if isinstance(value, Tensor):
                    may_be_written[name] = value
                elif type(value) is Generator:
                    self.generators.append((value, value.get_state()))
                elif type(value) in COPIED_CONTAINERS and len(value) <= LONGEST_COPIED:
                    state.originals[name] = value.copy()
            # What a module writes is not known before its first call.
            written = written_names.get(module, may_be_written)
            for name, value in (*parameters.items(), *may_be_written.items()):
                if value is None or is_lazy(value) or value.is_inference():
                    continue
                state.versions[name] = value, value._version
                if name in written and name in may_be_written:
                    original = value.detach().clone().requires_grad_(value.requires_grad)
                    state.originals[name] = original

    def end(self) -> None:
        """Note after the first call what it wrote in place."""
        for module, state in self.states.items():
            written = written_names.setdefault(module, set())
            for name, (tensor, version) in list(state.versions.items()):
                if tensor._version != version:
                    written.add(name)
                if name in written and name in state.originals:
                    del state.versions[name]
                else:
                    state.originals.pop(name, None)
                    state.versions[name] = tensor, tensor._version

    def __enter__(self) -> None:
        states = self.states.items()
        for module, state in states:
            for name, (tensor, version) in state.versions.items():
                if tensor._version != version and not _is_released(tensor):
                    raise RuntimeError(
                        f"{name} of {type(module).__name__} was changed in place between the "
                        "forward and its backward, so the block can't be recomputed as it ran: run "
                        "backward before the change, or assign a new tensor"
                    )
        with contextlib.ExitStack() as stack:
            stack.callback(_put_back, [(module, _read_held(module)) for module in self.states])
            _put_back([(module, state.held) for module, state in states])
            for module, state in states:
                buffers = module._buffers
                for name, value in state.originals.items():
                    place = buffers if name in state.held[1] else module.__dict__
                    place[name] = value.clone() if isinstance(value, Tensor) else value.copy()
                if isinstance(module, _NormBase) and module.track_running_stats:
                    # Torch writes running statistics without a new version. `track_running_stats`
                    # stays on, because autograd has to save as many tensors as in the first call.
                    module.momentum = 0.0
                    batches = buffers.get("num_batches_tracked")
                    buffers["num_batches_tracked"] = None if batches is None else batches.clone()
            for generator, drawn in self.generators:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(drawn)
            stack.enter_context(function_modes_as(self.modes))
            for context in second_call_contexts:
                stack.enter_context(context())
            self.ends.append(stack.pop_all())

    def __exit__(self, *_: object) -> None:
        self.ends.pop().close()


Held = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def _read_held(module: nn.Module) -> Held:
    """Return parameters, buffers and attributes of a module."""
    return module._parameters.copy(), module._buffers.copy(), module.__dict__.copy()


def _put_back(states: list[tuple[nn.Module, Held]]) -> None:
    for module, (parameters, buffers, attributes) in states:
        for name, value in parameters.items():
            present = module._parameters.get(name)
            # A shard and the whole parameter, which `fully_shard` exchanges, are left as they are.
            is_exchanged = hasattr(value, "placements") != hasattr(present, "placements")
            if not is_exchanged and not _is_released(value):
                module._parameters[name] = value
        module._buffers.update(buffers)
        own = module.__dict__
        for name in own.keys() - attributes.keys() - TORCH_ATTRIBUTES:
            del own[name]
        for name, value in attributes.items():
            if name not in TORCH_ATTRIBUTES:
                own[name] = value


def _is_released(tensor: Any) -> bool:
    """Return whether the memory of a tensor was freed, as sharded training does between calls."""
    has_storage = tensor is not None and tensor.layout == torch.strided
    return has_storage and 0 == tensor.untyped_storage().nbytes() < tensor.nbytes


# A call that can be made again.

# Arguments and keywords.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Pair = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
NO_CONTEXTS: Pair = (contextlib.nullcontext(), contextlib.nullcontext())

# Placeholder for a tensor that was taken out.
TENSOR_PLACEHOLDER = object()


class FlatCall:
    """`run(*args, **kwargs)` as a function of `*self.take_tensors()` that can be called again.

    The first call gets the caller's own containers, and later calls get new ones with the original
    contents. So a block that appends to a list appends once, and one that pops from a dictionary
    finds the value again. `modules` are those that `run` calls, and `contexts` are those of the
    first and of the later calls. Torch does not get them: it takes none together with `debug`.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        inputs: Inputs,
        *,
        modules: Sequence[nn.Module] = (),
        contexts: Pair = NO_CONTEXTS,
    ) -> None:
        self.run = run
        # This is None after the first call.
        self.inputs: Inputs | None = inputs
        self.first, self.second = contexts
        self.leaves, self.shape = tree_flatten(inputs)
        self.state = BlockState(modules, self.leaves)

    def take_tensors(self) -> list[Tensor]:
        """Return the tensors, and hold them no longer."""
        tensors = []
        for index, leaf in enumerate(self.leaves):
            # Inference tensors have no version counter, and can't be saved for backward.
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                tensors.append(leaf)
                self.leaves[index] = TENSOR_PLACEHOLDER
        return tensors

    def __call__(self, *tensors: Tensor) -> Any:
        if self.inputs is not None:
            args, kwargs = self.inputs
            self.inputs = None
            with self.first:
                output = self.run(*args, **kwargs)
            self.state.end()
            return output

        remaining = iter(tensors)
        values = [next(remaining) if leaf is TENSOR_PLACEHOLDER else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(values, self.shape)
        try:
            with self.state, self.second:
                return self.run(*args, **kwargs)
        except RuntimeError as error:
            # Torch ends the second call by an error without text, which TorchScript adds to.
            if not str(error).endswith("RuntimeError: \n"):
                raise
