"""Make a workload from the user's script, which runs until its first optimizer step.

    curry-train memory --script train.py -- --batch-size 8

The script runs for real, with its arguments. Torch's calls are recorded meanwhile: modules,
functions between a module's output and the loss, `backward`, and the optimizer. At the first step
the thread of the script waits for ever: it is not unwound, so none of its `except`, `finally` or
`with` blocks runs on, nothing is trained, and what it would write or log after that step is not.
What was recorded is written as the source of a loss, which is what the workload then computes.

Proof: `python -m pytest tests/workloads/test_from_script.py`.
"""

import atexit
import contextlib
import functools
import gc
import inspect
import multiprocessing
import runpy
import shlex
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_iter, tree_leaves

from ..core.blocks import inside_wrappers
from ..core.measure import Loss
from ..core.replaced_calls import replaced_calls
from ..primitives.autocast import autocast_now
from .from_trainer import precision_around, take_training, workload_of
from .optimizers import optimizers_together, parameters_of, stepped_on_host
from .workload import Workload, WorkloadError, batch_size, has_tensors, map_tensors, tensors_at

# Calls of a script between its modules and the optimizer step.


@dataclass(frozen=True)
class MadeTensor:
    """A tensor that an operation has made, at a place such as `[0].logits` of what it returned."""

    operation: "Operation"
    place: str


@dataclass(eq=False)
class Operation:
    """A call of a module or of a function, whose output needs gradients."""

    function: Any
    args: Any
    options: dict[str, Any]
    autocast: torch.dtype | None
    # The modules that were called to compute its output.
    modules: set[nn.Module]


# Run a script in a thread of its own, which stops for ever at its first optimizer step.


def launcher_variables(rank: int = 0, num_ranks: int = 1, port: int = 29500) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    return {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "WORLD_SIZE": f"{num_ranks}",
        "LOCAL_WORLD_SIZE": f"{num_ranks}",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": f"{port}",
    }


def run_as_main(file: str, arguments: Sequence[str]) -> None:
    """Run a file as Python does; a module of a package as `-m` does, for its relative imports."""
    path = Path(file).resolve()
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(path.parent))
    root, name = module_of(path)
    if root == path.parent or not all(part.isidentifier() for part in name.split(".")):
        runpy.run_path(str(path), run_name="__main__")
        return
    sys.path.insert(1, str(root))
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def module_of(file: Path) -> tuple[Path, str]:
    """Return the folder from which a file can be imported, and its module name there.

    Folders with an `__init__.py` are packages, and part of the module name.
    """
    folder = file.parent
    names = [] if file.stem == "__init__" else [file.stem]
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)


NO_STEP = (
    "it made no optimizer step: weights that it changes itself need torch.optim.SGD; if it starts "
    "another process that trains, give the script of that process; if it resumes a finished run, "
    "give it another folder"
)
NO_CUDA_ADVICE = (
    "; this machine has no CUDA device: let the script take 'cuda' if torch.cuda.is_available() "
    "else 'cpu'. For a GPU that is not here, plan with --target h100"
)
LAUNCHER_ADVICE = (
    "; it is for a launcher: put RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 "
    "MASTER_ADDR=localhost MASTER_PORT=29500 before curry-train"
)


def advice_on(error: BaseException) -> str:
    """Return what to do about an error of a script, which begins with a semicolon, or nothing."""
    if ("CUDA" in str(error) or "NVIDIA" in str(error)) and not torch.cuda.is_available():
        return NO_CUDA_ADVICE
    return LAUNCHER_ADVICE * any(name in str(error) for name in launcher_variables())


class RunningScript(TorchFunctionMode, contextlib.ContextDecorator):
    """A script with torch's calls replaced by those that record them, until its first step.

    As a mode it records the calls of torch's functions outside of modules.
    """

    def __init__(self, path: Path, arguments: Sequence[str]) -> None:
        super().__init__()
        self.path = path
        self.arguments = arguments
        self.made: dict[Tensor, MadeTensor] = {}
        # The losses of each call of backward, by the line that makes it.
        self.backward: dict[int, list[list[Any]]] = {}
        self.notes: dict[str, None] = {}
        # The optimizer steps in a hook of a gradient.
        self.is_in_backward = False
        self.place = ""
        # Calls of modules that are running, one inside of the other.
        self.depth = 0
        # Ends at the step, or with the error of a script that came to none.
        self._reading: Future[Any] = Future()
        self._has_made_group = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if self.depth == 0:
            self.record(function, args, kwargs or {}, output)
        return output

    def record(self, function: Any, args: Any, options: Any, output: Any) -> None:
        """Add a call, unless its output needs no gradients."""
        # A parameter that a function returns, as those of torch.nn.init do, is not made by it.
        found = [
            (place, one)
            for place, one in tensors_at(output)
            if one.requires_grad and not isinstance(one, nn.Parameter)
        ]
        if not found or not torch.is_grad_enabled():
            return
        autocast = next(iter(autocast_now().values()), None)
        args, options = self.linked(args), self.linked(options)
        modules = _find_modules_behind((args, options))
        if isinstance(function, nn.Module):
            modules.add(function)
        operation = Operation(function, args, options, autocast, modules)
        for place, tensor in found:
            self.made[tensor] = MadeTensor(operation, place)

    def linked(self, value: Any) -> Any:
        """Replace tensors that operations have made by their `MadeTensor`."""
        return map_tensors(value, lambda tensor: self.made.get(tensor, tensor))

    def called(self) -> list[nn.Module]:
        """Return the modules among the operations."""
        functions = [made.operation.function for made in self.made.values()]
        return [one for one in functions if isinstance(one, nn.Module)]

    def line(self) -> int:
        """Return the line of the script that runs in this thread, or 0."""
        for frame, line in traceback.walk_stack(None):
            if Path(frame.f_code.co_filename) == self.path:
                return line
        return 0

    def run(self) -> Any:
        """Run it until its first step, and return the optimizer; raise WorkloadError without one.

        If a Trainer calls the model, return a tuple: the Trainer, and its module and data if these
        are separate objects.
        """
        thread = threading.Thread(target=self._run, name=f"script {self.path.name}", daemon=True)
        before = sys.modules["__main__"], sys.argv
        try:
            with stepped_on_host(), self._replace_calls():
                thread.start()
                return self._reading.result()
        finally:
            sys.modules["__main__"], sys.argv = before
            self._leave()

    def _run(self) -> None:
        """Run the script; only an error or its end come back from it."""
        try:
            run_as_main(str(self.path), self.arguments)
            found: BaseException = WorkloadError(NO_STEP)
        except SystemExit as ended:
            found = WorkloadError(f"it ended with {ended.code!r} before an optimizer step")
        except BaseException as error:  # noqa: BLE001 - the user's script may raise anything
            found = error
        self._reading.set_exception(found)

    def _leave(self) -> None:
        """End what the waiting script has left running in this process."""
        for one in gc.get_objects():
            if type(one).__name__ == "_MultiProcessingDataLoaderIter":
                one._shutdown_workers()
        # Python waits at its exit for processes that are no daemons, and for threads of executors.
        for process in multiprocessing.active_children():
            if not process.daemon:
                process.kill()
        for thread in threading.enumerate():
            if thread.daemon:
                vars(thread)["join"] = lambda *_, **__: None
        if self._has_made_group:
            torch.distributed.destroy_process_group()

    def stop(self, found: Any) -> None:
        """Hand the recording over with what was found, and wait for ever."""
        if line := self.line():
            self.place = f"{self.path.name}:{line}"
        # Another thread of the script may have stepped.
        if not self._reading.done():
            self._reading.set_result(found)
        threading.Event().wait()

    def _replace_calls(self) -> contextlib.AbstractContextManager[None]:
        """Replace torch's calls, and those that a thread must not make."""
        replaced: list[tuple[Any, str, Any]] = [
            (nn.Module, "__call__", self._on_module),
            (nn.Module, "compile", self._leave_uncompiled),
            (torch, "compile", self._leave_uncompiled),
            (torch.autograd, "backward", self._on_backward),
            (torch.multiprocessing, "spawn", self._spawn),
            (torch.amp.GradScaler, "__init__", self._make_scaler),
            (atexit, "register", self._register),
            (threading.Thread, "start", self._start),
            # A handler can be set in the main thread only.
            (signal, "signal", lambda _, number, handler: signal.getsignal(number)),
        ]
        # Without its handler an alarm would end this process.
        for name in {"set_wakeup_fd", "alarm", "setitimer"} & vars(signal).keys():
            replaced.append((signal, name, lambda *_: (0.0, 0.0)))
        if torch.distributed.is_available():
            replaced.append((torch.distributed, "init_process_group", self._group))
        return replaced_calls(replaced, self._on_step)

    def _on_module(self, call: Any, module: nn.Module, /, *args: Any, **options: Any) -> Any:
        # Lightning Fabric's wrapper sets the precision of the module that it calls.
        if type(module).__name__ == "_FabricModule":
            return call(module, *args, **options)
        if self.depth == 0:
            self._find_trainer()
            if any(one.grad_fn is not None for one in module.parameters()):
                raise WorkloadError(
                    f"it calls a {type(module).__name__} on parameters that it computes, as "
                    "functional_call does: write a factory whose module does so in forward"
                )
        self.depth += 1
        try:
            output = call(module, *args, **options)
        finally:
            self.depth -= 1
        if self.depth == 0:
            self.record(inside_wrappers(module), args, options, output)
        return output

    def _find_trainer(self) -> None:
        """Stop where a Trainer calls the model: it has everything, and has done nothing yet."""
        for frame, _ in traceback.walk_stack(None):
            one: Any = frame.f_locals.get("self")
            names = {base.__module__.partition(".")[0] for base in type(one).__mro__}
            if "transformers" in names and hasattr(one, "get_train_dataloader"):
                self.stop((one,))
            elif names & {"lightning", "pytorch_lightning"} and hasattr(one, "fit_loop"):
                source = one.fit_loop._data_source.instance
                module = one.lightning_module
                self.stop((one, module, None if source is module else source))

    def _on_backward(self, backward: Any, tensors: Any, *args: Any, **options: Any) -> None:
        self.backward.setdefault(self.line(), []).append(self.linked(tree_leaves(tensors)))
        self.is_in_backward = True
        try:
            backward(tensors, *args, **options)
        finally:
            self.is_in_backward = False

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        closures = [one for one in (*args[1:], *options.values()) if callable(one)]
        if closures and not self.backward:
            closures[0]()
        if self.backward:
            self.stop(optimizer)

    def _make_scaler(self, make: Any, scaler: Any, *args: Any, **options: Any) -> None:
        """Make a scaler that leaves losses, gradients and steps as they are."""
        if options.get("enabled", True):
            self.notes["it uses GradScaler, whose scale is left out"] = None
        make(scaler, *args, **options | {"enabled": False})

    def _leave_uncompiled(self, compiled: Any, model: Any = None, **options: Any) -> Any:
        """Return a model as it is; without one, the decorator that does so."""
        self.notes["it uses compile, which is left out"] = None
        return functools.partial(self._leave_uncompiled, compiled) if model is None else model

    def _spawn(self, _: Any, function: Any, args: Any = (), nprocs: int = 1, **options: Any) -> Any:
        if nprocs != 1:
            raise WorkloadError(
                f"it starts {nprocs} processes with spawn: let it start one, as a rank of its own"
            )
        return function(0, *args)

    def _register(self, register: Any, function: Any, *args: Any, **options: Any) -> Any:
        """Leave out what the script would do at its exit, which does not come."""
        owner = str(getattr(function, "__module__", "")).partition(".")[0]
        if owner in {*sys.stdlib_module_names, "torch"}:
            register(function, *args, **options)
        return function

    def _start(self, start: Any, thread: threading.Thread) -> None:
        """Record in a thread of the script too: a mode is of one thread."""
        vars(thread)["run"] = self(thread.run)
        start(thread)

    def _group(self, start: Any, backend: Any = None, *args: Any, **options: Any) -> None:
        if not torch.cuda.is_available():
            backend = "gloo"
        self.notes["it trains on ranks: this is one, without its wrapper"] = None
        # The group of a gate that runs on several ranks stays.
        if not torch.distributed.is_initialized():
            start(backend, *args, **options)
            self._has_made_group = True


# Write what was recorded as the source of a loss.

DIVISIONS = (torch.div, torch.true_divide, Tensor.div, Tensor.true_divide)
PLAIN_TYPES = (type(None), bool, int, float, str, bytes, torch.dtype, type(...))


class LossSource:
    """Lines of Python that compute the loss of a module and a batch, as the script did."""

    def __init__(self, root: nn.Module) -> None:
        # Expressions by the identity of what they are for: the modules, parameters and buffers of
        # the root, entries of the batch, and operations that are written.
        named = {
            "submodule": root.named_modules(),
            "parameter": root.named_parameters(),
            "buffer": root.named_buffers(),
        }
        self.known = {
            id(one): f'module.get_{kind}("{name}")'
            for kind, pairs in named.items()
            for name, one in pairs
        }
        self.known[id(root)] = "module"
        self.batch: dict[str, Any] = {}
        # Objects of the script that can't be written.
        self.others: list[Any] = []
        self.lines: list[str] = []
        self._autocast: torch.dtype | None = None

    def expression(self, value: Any, name: str) -> str:
        """Return the expression of a value; operations that make it are written first."""
        if isinstance(value, MadeTensor):
            return self._name_variable(value.operation) + value.place
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, PLAIN_TYPES):
            return repr(value)
        if isinstance(value, slice):
            ends = (value.start, value.stop, value.step)
            return f"slice{self.expression(ends, name)}"
        if isinstance(value, dict):
            items = (f"{key!r}: {self.expression(one, str(key))}" for key, one in value.items())
            return "{" + ", ".join(items) + "}"
        # A packed sequence is a tuple by its class alone.
        if isinstance(value, list | tuple) and not isinstance(value, PackedSequence):
            inside = "".join(f"{self.expression(one, name)}, " for one in value)
            made = self._name_other(type(value)) if hasattr(value, "_fields") else ""
            return f"{made}({inside})" if isinstance(value, tuple) else f"[{inside}]"
        if has_tensors(value) or callable(getattr(value, "to", None)):
            return self._name_given(value, name)
        return self._name_other(value)

    def _name_given(self, value: Any, name: str) -> str:
        """Return an entry of the batch."""
        if isinstance(value, Tensor) and value.requires_grad:
            raise WorkloadError(
                f"the loss needs a tensor of shape {tuple(value.shape)} that no function of torch "
                "has made, as from an autograd.Function outside of a module: write a factory"
            )
        key = name
        while key in self.batch:
            key = f"{key}_2"
        entry = f'batch["{key}"]'
        self.batch[key] = value
        # Targets are often flattened outside of the module, one row after the other.
        if name == "target" and isinstance(value, Tensor) and value.dim():
            rows = batch_size(self.batch)
            if 1 < rows < len(value) and len(value) % rows == 0:
                entry += ".flatten(0, 1)"
                self.batch[key] = value.unflatten(0, (rows, -1))
        self.known[id(value)] = entry
        return entry

    def _name_other(self, value: Any) -> str:
        self.others.append(value)
        return f"taken.others[{len(self.others) - 1}]"

    def _name_variable(self, operation: Operation) -> str:
        """Return the variable of an operation's output, whose lines are written the first time."""
        if id(operation) in self.known:
            return self.known[id(operation)]
        text = self._call(operation)
        is_module = isinstance(operation.function, nn.Module)
        name = f"{'output' if is_module else 'value'}_{len(self.lines)}"
        self.known[id(operation)] = name
        indent = ""
        if operation.autocast is not None:
            if operation.autocast != self._autocast:
                device = "next(module.parameters()).device.type"
                self.lines.append(f"with torch.autocast({device}, dtype={operation.autocast}):")
            indent = "    "
        self._autocast = operation.autocast
        self.lines.append(f"{indent}{name} = {text}")
        return name

    def _call(self, operation: Operation) -> str:
        function, args = operation.function, operation.args
        if isinstance(function, nn.Module):
            called = self.known.get(id(function)) or self._name_other(function)
        else:
            # Torch's own functions have names such as torch.Tensor.view.
            called = str(resolve_name(function))
            if not called.startswith("torch."):
                called = self._name_other(function)
        parameters: list[inspect.Parameter] = []
        # Python can't inspect all functions.
        with contextlib.suppress(TypeError, ValueError):
            signature = inspect.signature(getattr(function, "forward", function))
            parameters += signature.parameters.values()
        if function in (Tensor.view, Tensor.reshape):
            # The first size follows from the others, so that a batch may have any size.
            first, *sizes = tree_leaves(args)
            if sizes and all(isinstance(size, int) and size >= 0 for size in sizes):
                args = [first, -1, *sizes[1:]]
        names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        names += [f"input_{place}" for place in range(len(names), len(args))]
        written = list(map(self.expression, args, names))
        # Defaults need not be written.
        defaults = {one.name: one.default for one in parameters}
        for name, value in operation.options.items():
            if defaults.get(name, self) is not value:
                written.append(f"{name}={self.expression(value, name)}")
        return f"{called}({', '.join(written)})"


def _undo_division(value: Any, number: int) -> Any:
    """Return a loss without its division by the number of batches of a step."""
    if isinstance(value, MadeTensor) and value.operation.function in DIVISIONS:
        divided, *by = value.operation.args
        if by == [number]:
            return divided
    return value


# Choose the module that is trained, and make the workload.


@dataclass
class ScriptTraining:
    """A script that has run until its first optimizer step."""

    words: tuple[str, ...]
    # Makes the workload from a mean loss. The workload of a trainer has a loss already.
    make: Callable[[Loss], Workload]

    # The source of the loss, and objects of the script that it names.
    loss_source: str = ""
    others: Sequence[Any] = ()
    place: str = ""

    def workload(self, loss: Any = None) -> Workload:
        """Return the workload, with this loss of a module and a batch, or the one that was read."""
        if self.loss_source and loss is None:
            names: dict[str, Any] = {"taken": self, "torch": torch, "inf": inf, "nan": nan}
            # The source is the one that is printed, so that what is printed is what was used.
            exec(self.loss_source, names)  # noqa: S102
            loss = names["loss"]
        spec = f"script={shlex.join(self.words)}"
        return replace(self.make(loss), spec=spec, factory=self.factory())

    def factory(self) -> str:
        """Return the source of a module with the factory that was used."""
        words = ", ".join(repr(word) for word in self.words)
        text = (
            f'"""The training of {shlex.join(self.words)}, '
            f"read at {self.place or 'its trainer'}.\n\n"
            'Replace what is taken as you like; the loss is what the script computed.\n"""\n\n'
            "from math import inf, nan\n\nimport torch\n\n"
            "from curry_train.workloads.from_script import read_script\n\n"
            f"taken = read_script({words})\n\n\n"
        )
        if not self.loss_source:
            return text + "def build():\n    return taken.workload()\n"
        return text + f"{self.loss_source}\n\ndef build():\n    return taken.workload(loss)\n"


def read_script(file: str, *arguments: str) -> ScriptTraining:
    """Run a script with its arguments until its first optimizer step, and read its training."""
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise WorkloadError(f"there is no file {file}")
    script = RunningScript(path, arguments)
    found = script.run()
    words = (file, *arguments)
    if isinstance(found, tuple):
        return ScriptTraining(words, lambda _: take_training(found))
    return _build_training(script, found, words)


def _build_training(
    script: RunningScript, optimizer: torch.optim.Optimizer, words: tuple[str, ...]
) -> ScriptTraining:
    called = {parameter for one in script.called() for parameter in one.parameters()}
    optimizers, notes = optimizers_together(optimizer, called, is_in_backward=script.is_in_backward)
    trained = {*parameters_of(*optimizers)}
    calls = [
        losses
        for losses in script.backward.values()
        if any(trained & {*one.parameters()} for one in _find_modules_behind(losses[0]))
    ]
    if not calls:
        raise WorkloadError(
            "no call of a module leads from the parameters of its "
            f"{type(optimizers[0]).__name__} to a loss whose backward it calls: write a factory"
        )
    root = _find_root(script, trained)
    precision = precision_around(root)
    count = max(map(len, calls))
    source = LossSource(root)
    losses = [_undo_division(loss, count) for first, *_ in calls for loss in first]
    returned = " + ".join(source.expression(loss, "loss") for loss in losses)
    root.zero_grad()
    make = functools.partial(
        workload_of,
        f"{words[0]}, at {script.place or 'its first step'}",
        root,
        source.batch,
        optimizers=optimizers,
        accumulation=count,
        precision=precision,
        may_be_sum=True,
        notes=[*notes, *script.notes],
        output_until="next step" if _is_held(script, root) else "loss",
    )
    lines = ("def loss(module, batch):", *source.lines, f"return {returned}\n")
    return ScriptTraining(words, make, "\n    ".join(lines), source.others, script.place)


def _is_held(script: RunningScript, root: nn.Module) -> bool:
    """Return whether the script still holds what the module returned, or a view of it.

    It clears the script's record, so call it last.
    """
    returned = [
        weakref.ref(one.untyped_storage() if one.layout is torch.strided else one)
        for one, by in script.made.items()
        if by.operation.function is root
    ]
    script.made.clear()
    return any(one() is not None for one in returned)


def _find_modules_behind(value: Any) -> set[nn.Module]:
    """Return the modules that were called to compute the tensors in a value."""
    made = [one for one in tree_iter(value) if isinstance(one, MadeTensor)]
    return {module for one in made for module in one.operation.modules}


def _find_root(script: RunningScript, trained: set[Tensor]) -> nn.Module:
    """Return the smallest module that has all parameters of the optimizers of a script.

    Modules that were called come first, then all others that are alive.
    """
    called = script.called()
    built = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    for modules in (called, built):
        # Among modules of equal size the outermost is taken.
        sizes = {
            one: (sum(p.numel() for p in one.parameters()), -len([*one.modules()]))
            for one in modules
            if trained.issubset(one.parameters())
        }
        if sizes:
            return inside_wrappers(min(sizes, key=sizes.__getitem__))
    several = dict.fromkeys(one for one in called if trained & {*one.parameters()})
    return nn.ModuleDict(
        {f"{type(one).__name__}_{place}": one for place, one in enumerate(several)}
    )
