"""Record what each part of a training computes, as digests that two runs can be compared by.

    with record_run("A", steps=3):
        train()

`A/rank-0.jsonl` gets a line for each observation, in the order of execution: batches, calls of
modules (inputs and outputs), losses, gradients, and what the optimizer got and left. A kill leaves
all lines but the last one. `curry-train runs locate A B` compares two such folders.

Proof: `python -m pytest tests/runs/test_fingerprints.py`.
"""

import contextlib
import functools
import importlib
import json
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, TextIO
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..core.blocks import in_transform, inside_wrappers
from ..core.digest import digest, digest_rows, generator_digests, hash_of, is_plain
from ..core.generators import generator_states, unwatched
from ..core.measure import backward_node, next_node
from ..core.replaced_calls import replaced_calls
from .files import StrPath
from .history import run_facts
from .parameters import bare_name
from .ranks import RunError
from .rounding import Exchange
from .values import Facts, Values, floats_of

# Iterators of a DataLoader have this class, which has no public name.
LoaderIterator = _BaseDataLoaderIter
# Of what a record holds: one of another version can't be compared.
FORMAT_VERSION = 8
LEVELS = ("all", "modules")
# Values that are recorded as they are: arguments of calls, attributes of modules, settings.
PLAIN_TYPES = (bool, int, float, str, type(None))
LONGEST_VALUE = 200
# Types of NumPy that torch has too.
TORCH_CHARACTERS = "?efdFD" + numpy.typecodes["AllInteger"]
# Samples of a batch that get a digest each.
MOST_ROWS = 1024
# Set on autograd nodes: where the gradient of a result comes from.
FLOW_KEY = "curry_train_flow"
# The function of torch that runs backward.
ENGINE = "_engine_run_backward"
# Variables of the environment that may change what torch computes.
VARIABLES = ("CUBLAS", "CUDA", "CUDNN", "KMP", "MKL", "NCCL", "NVIDIA", "OMP", "PYTORCH_", "TORCH_")


class Observation(SimpleNamespace):
    """A line of a record, with the fields of its kind; some kinds lack those that are named here.

    Matching observations of two runs have equal step, phase, path and number of the call.
    """

    step = 0
    phase: Any = None
    path = ""
    # Path and number of the call of a module inside of which it is.
    within: Any = None
    rows: Sequence[str] = ()
    # Values by their names: tensors, modules, generators.
    digests: Values = MappingProxyType({})
    shards = distances = ranges = generators = settings = digests


# The observations of one rank, or some of them, in the order of execution.
Record = Sequence[Observation]


def record_run(
    folder: StrPath,
    *,
    steps: int = 3,
    level: str = "all",
    program: Sequence[str] | None = None,
    **options: Any,
) -> contextlib.AbstractContextManager[None]:
    """Return a context that records the first steps of the training that runs inside of it.

    Level "modules" leaves out parameters, gradients and the optimizer. `program` is what `runs
    locate --op` starts again, and `options` are those of `Recorder`, for that command.
    """
    if steps < 1:
        raise ValueError(f"record at least 1 step, got {steps}")
    if level not in LEVELS:
        raise ValueError(f"there is no level {level!r}: give one of {', '.join(LEVELS)}")
    recorder = Recorder(Path(folder), steps, level == "all", **options)
    facts = {"program": program and list(program), "folder": str(Path.cwd()), "level": level}
    return recorder.running(facts)


@dataclass(eq=False)
class Recorder:
    """The replaced calls of torch, which write observations to a file."""

    folder: Path
    num_steps: int = 1
    records_all: bool = True
    # In this step each operation is recorded too; 0 for none.
    operations_in_step: int = 0
    # Called after the last step.
    when_enough: Callable[[], None] = lambda: None
    # Keeps values, or puts those of another run in their place.
    exchange: Exchange | None = None
    # Whether `begin` begins each step, with all operations and the ranges of values.
    in_replay: bool = False
    is_on: bool = False
    # The step that is made now, from 1 on, and the last one of each optimizer.
    step: int = 1
    last_steps: Counter[str] = field(default_factory=Counter)
    # Numbers of what happened in this step, by kind and place.
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    watched: dict[str, Tensor] = field(default_factory=dict)
    # Names of modules, parameters and loaders, which are equal to themselves alone, and of
    # optimizers by class and parameters.
    names: dict[Any, str] = field(default_factory=dict)
    # Path and number of the innermost call of a module that runs now.
    within: tuple[str, int] | None = None
    in_backward: bool = False
    stepping: int = 0
    # Whether an optimizer has changed parameters since it was given gradients.
    is_updated: bool = False

    @property
    def path(self) -> Path:
        return self.folder / f"rank-{os.environ.get('RANK', '0')}.jsonl"

    @contextlib.contextmanager
    def running(self, facts: Facts) -> Iterator[None]:
        if self.path.exists():
            raise RunError(f"{self.path} is there already: give another folder, or remove this one")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            self.file: TextIO = stack.enter_context(self.path.open("w", encoding="utf-8"))
            self._write(kind="start", version=FORMAT_VERSION, **facts, **_read_environment())
            # Workers of a loader would write what they call in between, in any order.
            os.register_at_fork(after_in_child=self._end)
            # A generator that has another digest later was drawn from.
            self.undrawn = generator_digests().items()
            calls: list[tuple[Any, str, Any]] = [
                (nn.Module, "__call__", self._on_module),
                (torch.autograd, "backward", self._on_backward),
                (LoaderIterator, "__next__", self._on_batch),
                (torch, "compile", functools.partial(_compile_with_equal_draws, stack)),
            ]
            stack.enter_context(replaced_calls(calls, self._on_step_begin, self._on_step_end))
            is_noisy = self.exchange is not None and self.exchange.noise is not None
            if self.in_replay or self.operations_in_step or is_noisy:
                stack.enter_context(Operations(self))
            self.is_on = not self.in_replay
            stack.callback(self._end)
            yield

    def begin(self, step: int, model: nn.Module) -> None:
        """Record a step of a replay, in which modules have their names in this model."""
        self.step = step
        self.counts.clear()
        self.is_on = True
        self._note_root(inside_wrappers(model))

    def _end(self) -> None:
        self.is_on = False
        self.names.clear()
        self.watched.clear()

    def _write(self, **fields: Any) -> None:
        # A line is with the kernel when this returns, so a kill of this process can't lose it.
        self.file.write(json.dumps(fields, default=digest) + "\n")
        self.file.flush()

    def _note(
        self,
        kind: str,
        path: str,
        values: Values,
        *,
        call: int | None = None,
        **facts: Any,
    ) -> dict[str, Tensor]:
        """Write digests of tensors, and plain values as they are; return what takes their place.

        Without the number of a call the observations of this kind and path are counted.
        """
        call = self._count(kind, path) if call is None else call
        facts = {"within": self.within} | facts
        one = Observation(kind=kind, step=self.step, path=path, call=call, **facts)
        tensors = {name: it for name, it in values.items() if isinstance(it, Tensor)}
        replaced: dict[str, Tensor] = {}
        # What is computed for a record is no part of the training.
        was_on = self.is_on
        self.is_on = False
        try:
            digests = {name: digest(it) for name, it in tensors.items()}
            one.digests = digests
            # All ranks see what differs in a whole tensor, and one of them in its own part.
            one.shards = {
                name: digest(it.to_local())
                for name, it in tensors.items()
                if isinstance(it, DTensor)
            }
            if kind in ("enter", "exit"):
                states = generator_states().values()
                bits = [state.numpy().tobytes() for state in states if isinstance(state, Tensor)]
                one.generators = {"torch": hash_of(b"".join(bits))}
            elif kind == "state" and not self.stepping:
                one.generators = dict(generator_digests().items() - self.undrawn)
            if self.in_replay:
                one.ranges = ranges_of(tensors)
            if kind == "batch" or (kind == "enter" and self.within is None):
                one.rows = _digest_rows(values)
            if self.exchange is not None and kind != "operation":
                one.distances, replaced = self.exchange.meet(place_of(one), tensors, digests)
                for name in replaced if kind != "gradient" else ():
                    # Memory that several elements share can't be written to.
                    if 0 not in tensors[name].stride():
                        tensors[name].data.copy_(replaced[name])
        finally:
            self.is_on = was_on
        others = {name: it for name, it in values.items() if name not in digests}
        self._write(**vars(one), values=others)
        return replaced

    def _count(self, kind: str, path: str) -> int:
        self.counts[kind, path] += 1
        return self.counts[kind, path] - 1

    # The data.

    def _on_batch(self, fetch: Any, batches: Any) -> Any:
        batch = fetch(batches)
        if self.is_on:
            self.note_batch(batch, self._name_of(batches, "loader"))
        return batch

    def note_batch(self, batch: Any, path: str = "box") -> None:
        self._note("batch", path, leaves_of(batch))

    def _name_of(self, owner: Any, kind: str) -> str:
        """Return a name for an object by the order in which objects of its kind appear."""
        number = sum(name.split("-")[0] == kind for name in self.names.values())
        return self.names.setdefault(owner, f"{kind}-{number}" if number else kind)

    # The forward pass.

    def _on_module(self, call: Any, module: nn.Module, /, *args: Any, **options: Any) -> Any:
        # Compiled code has no calls of modules; its own call is recorded from outside. Tensors of a
        # transform must not escape from it.
        # Some backends call what they have compiled as a module without parameters.
        is_compiled = isinstance(module, GraphModule) and not [*module.parameters()]
        if torch.compiler.is_compiling() or is_compiled or in_transform() or not self.is_on:
            return call(module, *args, **options)
        # The first call of lazy modules makes their parameters.
        if self.within is None and any(map(nn.parameter.is_lazy, module.parameters())):
            with mock.patch.object(self, "is_on", False):
                return call(module, *args, **options)
        inner = inside_wrappers(module)
        if inner is not module and not hasattr(module, "_orig_mod"):
            return call(module, *args, **options)
        outer = self.within
        if outer is None:
            self._note_root(inner)
        parent = outer[0] if outer else ""
        path = self.names.setdefault(inner, f"{parent}.({type(inner).__name__})")
        kind = "forward" if torch.is_grad_enabled() else "evaluation"
        phase = "recompute" if self.in_backward else kind
        number = self._count(phase, path)
        inputs = leaves_of({"training": module.training, **dict(enumerate(args)), **options})
        made = [name for name, one in inputs.items() if getattr(one, "requires_grad", False)]
        self._note("enter", path, inputs, call=number, phase=phase, made=made)
        if phase == "forward":
            self._watch(inputs, path, number, is_output=False)
        self.within = path, number
        try:
            output = call(module, *args, **options)
        finally:
            self.within = outer
        found = leaves_of(output)
        if self.records_all:
            # Masks and counters are noted before the next step.
            found |= {
                f"buffer {name}": one
                for name, one in inner._buffers.items()
                if one is not None and one.is_floating_point()
            }
        self._note("exit", path, found, call=number, phase=phase)
        if phase == "forward":
            self._watch(found, path, number, is_output=True)
        return output

    def _note_root(self, root: nn.Module) -> None:
        """Name the modules and parameters of a module that is called first, and note its state."""
        if root not in self.names:
            has_parameters = next(root.parameters(), None) is not None
            name = self._name_of(root, "model" if has_parameters else type(root).__name__)
            settings = {}
            for inner, module in root.named_modules():
                path = f"{name}.{bare_name(root, inner)}".removesuffix(".")
                if self.names.setdefault(module, path) == path:
                    settings[path] = _read_settings(module)
            for inner, parameter in root.named_parameters():
                bare = f"{name}.{bare_name(root, inner)}"
                is_new = self.names.setdefault(parameter, bare) == bare
                if is_new and parameter.requires_grad and self.records_all:
                    self.watched[bare] = parameter
                    self._watch_gradient(parameter, bare, None, "parameter", {})
            self._write(
                kind="settings", step=self.step, settings=settings, switches=_read_switches()
            )
        path = self.names[root]
        if self.in_backward or self.counts["state", path]:
            return
        # A tied weight has each of its names.
        state = dict(root.named_parameters(remove_duplicate=False)) | dict(root.named_buffers())
        named = {f"{path}.{bare_name(root, inner)}": one for inner, one in state.items()}
        self._note("state", path, named if self.records_all else {})

    # The backward pass.

    def _watch(self, values: Values, path: str, number: int, *, is_output: bool) -> None:
        """Note the gradient of tensors, and which calls they are given to."""
        if not self.records_all:
            return
        outputs = []
        for name, one in values.items():
            if getattr(one, "grad_fn", None) is None:
                continue
            metadata = one.grad_fn.metadata
            key = FLOW_KEY, one.output_nr
            if key not in metadata:
                metadata[key] = {"consumers": [], "made_in": None}
                what = f"{'output' if is_output else 'input'} {name}"
                self._watch_gradient(one, path, number, what, metadata[key])
            if is_output:
                # The call that goes on with the tensor, if it is not the result of that one too.
                metadata[key]["made_in"] = self.within
                outputs.append((one.grad_fn._sequence_nr(), metadata[key]))
            else:
                metadata[key]["consumers"].append((path, number))
        # The last of several outputs may be computed from the others, within this very call.
        latest = max((time for time, _ in outputs), default=0)
        for time, flow in outputs:
            if time < latest:
                flow["made_in"] = path, number

    def _watch_gradient(
        self, tensor: Tensor, path: str, number: int | None, what: str, flow: Values
    ) -> None:
        """Note each gradient of a tensor; without a number of the call they are counted."""

        def note(gradient: Tensor) -> Tensor | None:
            if not self.is_on or gradient is None:
                return None
            # Each backward call on the same graph makes one.
            time = self._count("gradient", f"{what} of {path}, call {number}")
            replaced = self._note(
                "gradient", path, {what: gradient}, call=number, time=time, **flow
            )
            return replaced.get(what)

        tensor.register_hook(note)

    def _on_backward(self, backward: Any, tensors: Any, *args: Any, **options: Any) -> None:
        if not self.is_on or self.in_backward:
            backward(tensors, *args, **options)
            return
        losses = leaves_of({"loss": tensors})
        values = {
            f"value of {name}": float(one.detach())
            for name, one in losses.items()
            if isinstance(one, Tensor) and one.numel() == 1
        }
        self._note("loss", "loss", losses | values)
        self.in_backward = True
        try:
            backward(tensors, *args, **options)
        finally:
            self.in_backward = False
        gradients = {name: one.grad for name, one in self.watched.items() if one.grad is not None}
        norms = {
            name: float(one.double().norm()) for name, one in gradients.items() if self.in_replay
        }
        self._note("gradients", "loss", gradients, norms=norms)

    # The optimizer.

    def _on_step_begin(self, optimizer: Optimizer, args: Any, options: Any) -> Any:
        self.stepping += 1
        if not self.is_on or self.stepping > 1:
            return None
        _, *others = args
        closure = options.get("closure", next(iter(others), None))
        if closure is None:
            self._note_update(optimizer)
            return None

        def run() -> Any:
            # The optimizer has changed the parameters since it called the last closure.
            if self.is_updated:
                self._note_step(optimizer)
            # The closure's own calls are no part of the optimizer's step.
            self.stepping -= 1
            loss = closure()
            self.stepping += 1
            if self.is_on:
                self._note_update(optimizer)
            return loss

        return (optimizer,), options | {"closure": run}

    def _note_update(self, optimizer: Optimizer) -> None:
        self.is_updated = True
        path, parameters, state = self._read_optimizer(optimizer)
        # Another optimizer has just ended a step on the same gradients: it is the step of both.
        if self.last_steps[path] < self.step - 1 and {kind for kind, _ in self.counts} <= {
            "operation"
        }:
            self.step -= 1
            self.last_steps[path] = self.step - 1
        found: Facts = {}
        for number, group in enumerate(optimizer.param_groups):
            settings = {name: value for name, value in group.items() if name != "params"}
            found |= {f"{name} of group {number}": one for name, one in leaves_of(settings).items()}
        if self.records_all:
            # A model notes its parameters when it is first called; these belong to no model.
            own = {name: one for name, one in parameters.items() if name.startswith(f"{path}.")}
            if own and self.step == 1:
                self._note("state", path, own)
            found |= {
                f"gradient of {name}": one.grad
                for name, one in parameters.items()
                if one.grad is not None
            }
            found |= parameters | state
        self._note("update", path, found)

    def _on_step_end(self, optimizer: Optimizer, *_: Any) -> None:
        self.stepping -= 1
        if not self.is_on or self.stepping:
            return
        path = self._note_step(optimizer)
        if self.in_replay:
            return
        self.last_steps[path] += 1
        if self.last_steps[path] >= self.step:
            self.step += 1
            self.counts.clear()
        # An optimizer that seldom steps must not keep the recording open.
        if min(self.last_steps.values()) >= self.num_steps or self.step > 2 * self.num_steps:
            self._write(kind="end", step=self.step - 1)
            self._end()
            self.when_enough()

    def _note_step(self, optimizer: Optimizer) -> str:
        """Note what an optimizer has changed, and return its name."""
        self.is_updated = False
        path, parameters, state = self._read_optimizer(optimizer)
        if self.records_all:
            self._note("step", path, parameters | state)
        return path

    def _read_optimizer(
        self, optimizer: Optimizer
    ) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
        """Return an optimizer's name, its parameters, and the tensors of its state, by name.

        The name is that of an earlier optimizer that had the same parameters.
        """
        kind = type(optimizer).__name__
        several = [one for group in optimizer.param_groups for one in group["params"]]
        path = self._name_of((kind, *several), kind)
        parameters = {
            self.names.setdefault(one, f"{path}.{number}"): one
            for number, one in enumerate(several)
        }
        state = {
            f"{key} of {name}": value
            for name, one in parameters.items()
            for key, value in optimizer.state.get(one, {}).items()
            if isinstance(value, Tensor)
        }
        return path, parameters, state


class Operations(TorchDispatchMode):
    """Records each operation of a step: its arguments, its results and the line that led to it.

    Those of the other steps get noise, where the exchange has some.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        # Call of a module, and line, of the forward operation that made each node of backward.
        self.made_by: dict[int, tuple[tuple[str, int] | None, str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Facts | None = None
    ) -> Any:
        recorder = self.recorder
        options = kwargs or {}
        worker = get_worker_info()
        is_asked = recorder.in_replay or recorder.step == recorder.operations_in_step
        # A worker has made its batches before their step. A name for a profile computes nothing.
        is_on = recorder.operations_in_step if worker else recorder.is_on and is_asked
        if not is_on or func.namespace == "profiler":
            output = func(*args, **options)
            if recorder.is_on and recorder.exchange is not None:
                recorder.exchange.add_noise(func, output)
            return output
        arguments = func._schema.arguments
        named = dict(zip((one.name for one in arguments), args, strict=False)) | options
        defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}
        given = leaves_of(named)
        # New memory, and so its views, has any values; what a collective receives comes later. The
        # same bytes as another type are other values.
        is_new = func.is_view and func is not torch.ops.aten.view.dtype
        is_new |= "empty" in str(func) or func.namespace in ("c10d", "_c10d_functional", "fsdp")
        facts: Facts = {"name": str(func), "computes": not is_new}
        if recorder.in_replay:
            # Before it runs, because an operation in place overwrites what it is given.
            facts["given"] = list(ranges_of(given).values())
        phase = "optimizer" if recorder.stepping else "forward"
        phase = "backward" if recorder.in_backward else phase
        output = func(*args, **options)
        plain = leaves_of(defaults | named).items()
        values = {name: one for name, one in plain if not isinstance(one, Tensor)}
        # An operation that changes lists in place returns nothing: its inputs are the results.
        found = given if output is None else leaves_of(output)
        # So have the bytes in which a kernel keeps what its backward needs, next to its results.
        is_kernel = len({getattr(it, "dtype", None) for it in found.values()}) > 1
        results = {} if is_new else found
        if is_kernel:
            results = {k: v for k, v in results.items() if getattr(v, "dtype", 0) != torch.uint8}
        within, line = self._find_origin()
        recorder._note(
            "operation",
            phase,
            values | {f"result {k}": v for k, v in results.items()},
            **facts,
            phase=phase,
            within=within,
            line=line,
            worker=worker.id if worker else -1,
        )
        return output

    def _find_origin(self) -> tuple[tuple[str, int] | None, str]:
        """Return the call of a module and the line that the operation of this moment is of."""
        if (node := backward_node()) is not None:
            module, line = self.made_by.get(node._sequence_nr(), (None, users_line()))
            # A hook or a backward of the user's own runs there.
            return module, users_line(ENGINE) or line
        origin = self.recorder.within, users_line()
        # The node of an operation is made before the operation runs.
        self.made_by.setdefault(next_node() - 1, origin)
        return origin


Range = tuple[float, float]


def ranges_of(values: Values) -> dict[str, Range]:
    return {name: ends for name, one in values.items() if (ends := value_range(one)) is not None}


def value_range(value: Any) -> Range | None:
    """Return the least and the largest value of a tensor or number of floats; NaN if it has one.

    A number that is not finite has none, so that its operation is named, and not the next one.
    """
    if isinstance(value, float):
        return (value, value) if math.isfinite(value) else None
    if not isinstance(value, Tensor):
        return None
    with unwatched():
        tensor = floats_of(value)
        if not is_plain(tensor) or not tensor.numel():
            return None
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        low, high = torch.aminmax(tensor)
        return float(low), float(high)


def place_of(one: Observation) -> Any:
    """Return what an observation is matched by: step, phase, module path, call, and the like."""
    # Each output and input of a call has a gradient of its own.
    what = [*one.digests, one.time] if one.kind == "gradient" else []
    return one.kind, one.step, one.phase, one.path, one.call, *what


def users_line(outer: str = "") -> str:
    """Return file and line of the innermost frame outside of torch and of this package.

    It has to be inside of the call of a function with this name.
    """
    folders = Path(torch.__file__).parent, Path(__file__).parents[1]
    ours = tuple(f"{folder}{os.sep}" for folder in folders)
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_name == outer:
            break
        if not frame.f_code.co_filename.startswith(ours):
            return f"{Path(frame.f_code.co_filename).name}:{line}"
    return ""


def leaves_of(value: Any, name: str = "", seen: set[int] | None = None) -> Facts:
    """Return tensors and plain values of nested containers and objects, by the way to them.

    Arrays of NumPy are copied to tensors. An object that refers to itself, or is there twice, is
    looked at once.
    """
    seen = set() if seen is None else seen
    if isinstance(value, str):
        value = value[:LONGEST_VALUE]
    if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.char in TORCH_CHARACTERS:
        # Torch takes neither another order of bytes nor negative strides.
        value = torch.from_numpy(numpy.array(value, value.dtype.newbyteorder("=")))
    if isinstance(value, (Tensor, *PLAIN_TYPES)):
        return {name or "0": value}
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    elif not isinstance(value, Mapping):
        # It may be a batch of graphs, or a dataclass, of which one with slots has fields alone.
        if isinstance(value, type | nn.Module) or id(value) in seen:
            return {}
        seen.add(id(value))
        fields = {one: getattr(value, one, None) for one in getattr(value, "__match_args__", ())}
        value = fields | getattr(value, "__dict__", {})
    found: Facts = {}
    for key, one in value.items():
        found |= leaves_of(one, f"{name}.{key}" if name else str(key), seen)
    return found


def _digest_rows(values: Values) -> list[str]:
    """Return a digest of each sample of a batch, whose tensors have a row for each."""
    tensors = [one for one in values.values() if isinstance(one, Tensor) and one.dim()]
    if not tensors or not 1 < len(tensors[0]) <= MOST_ROWS:
        return []
    digests = [digest_rows(one) for one in tensors if len(one) == len(tensors[0])]
    return [hash_of("".join(row).encode()) for row in zip(*filter(None, digests), strict=True)]


def _read_settings(module: nn.Module) -> Facts:
    """Return the class of a module and its attributes that are plain values."""
    attributes = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, (*PLAIN_TYPES, tuple))
    }
    return {"class": type(module).__name__, **leaves_of(attributes)}


def _compile_with_equal_draws(
    stack: contextlib.ExitStack, compile: Any, *args: Any, **options: Any
) -> Any:
    """Compile code that draws random numbers as other code does, for a while."""
    # Its import takes a second.
    config = importlib.import_module("torch._inductor.config")
    stack.enter_context(config.patch(fallback_random=True))
    return compile(*args, **options)


def _read_switches() -> Facts:
    """Return what a program may have set, and what it computes by."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "switch default dtype": str(torch.get_default_dtype()),
        "switch precision of float32 matmul": torch.get_float32_matmul_precision(),
        "switch deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "switch kernels of the CPU": torch.backends.cpu.get_cpu_capability(),
        "switch mkldnn": torch.backends.mkldnn.enabled,
        "switch cudnn": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32],
        "switch TF32 in matmul": cuda.matmul.allow_tf32,
        "switch attention: flash, efficient, math": [
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
        ],
    }


def _read_environment() -> Facts:
    """Return versions and variables that may change what torch computes."""
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    variables = {name: os.environ[name] for name in os.environ if name.startswith(VARIABLES)}
    facts = run_facts({}, device=device, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    return {**facts, "variables": variables}


def read_fingerprints(folder: StrPath, rank: int = 0) -> list[Observation]:
    """Return the observations of a rank, without a last line that a kill has cut off."""
    path = Path(folder, f"rank-{rank}.jsonl")
    if not path.is_file():
        raise RunError(f"there is no {path}: record a run by `curry-train runs record`")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        found = [Observation(**json.loads(line)) for line in lines[:-1]]
    except (TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged, record it again: {error}") from error
    if not found or vars(found[0]).get("version") != FORMAT_VERSION:
        raise RunError(f"{path} is empty, or was recorded by another version; record it again")
    return found
