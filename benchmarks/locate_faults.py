"""Small trainings for the benchmark of `runs locate`, and faults that are planted at random places.

A fault is drawn over the modules, parameters and calls that a record of the training has, so it
says where the first difference must be: step, phase, path and call, and words of the operation.
The trainings on two ranks are a job of `run_ranks`, without a program of a user's.
"""

import contextlib
import functools
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import MethodType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from curry_train.gates.loop_run import End
from curry_train.runs import record_run
from curry_train.runs.fingerprints import Observation, read_fingerprints
from locate_models import BATCH_SIZE, LOOPS, MICROBATCHES, MODELS, STEPS, plain, quietly

HERE = "locate_faults.py"
OF_DROPOUT = ("bernoulli_", "empty_like", "new_empty")


def flip(tensor: Tensor, place: float, bit: int) -> None:
    """Flip a bit of the element at a place between 0 and 1 of a tensor of float32."""
    index = numpy.unravel_index(int(place * tensor.numel()), tensor.shape)
    tensor.view(torch.uint32)[index] ^= 1 << bit


def flipped(tensor: Tensor, *where) -> Tensor:
    # With its strides, by whose order dropout draws.
    copied = tensor.clone()
    flip(copied.data, *where)
    return copied


def flipped_in_backward(tensor: Tensor, *where) -> Tensor:
    # Neither of the tensors is one whose gradient is recorded.
    inner = tensor.clone()
    inner.register_hook(lambda gradient: flipped(gradient, *where))
    return inner.clone()


class FlipResult(TorchDispatchMode):
    """Flips a bit of the result of one operation, as faulty hardware does: no operation more."""

    # So many operations of this name come before it; below 0 it is over, or not planted yet.
    remaining = -1

    def __init__(self, name: str, *where) -> None:
        super().__init__()
        self.name = name
        self.where = where

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if str(func) == self.name:
            if self.remaining == 0:
                flip(next(filter(is_float, tree_leaves(result))), *self.where)
            self.remaining -= 1
        return result


@dataclass
class Fault:
    # Where the first difference must be. An empty path is any; so is None as a call.
    step: int = 1
    phase: str = ""
    path: str = ""
    call: int | None = None
    plant: Callable[["Training"], None] = lambda training: None
    # One of these words is in the operation; none where no operation does it.
    operations: tuple[str, ...] = (HERE,)
    # The step before which it is planted.
    before: int = 1
    mode: AbstractContextManager[Any] = field(default_factory=nullcontext)
    # Text that the notes of the result must contain.
    note: str = ""


SOUND = Fault()


@dataclass
class Training:
    """A model that is about to be trained, and the fault that is planted on the way."""

    model: nn.Module
    samples: list[Any]
    fault: Fault
    step: int = 0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        made = self.optimizer.step

        def step(optimizer, *args, **options):
            result = made(*args, **options)
            self.begin_step()
            return result

        self.optimizer.step = MethodType(step, self.optimizer)
        self.begin_step()

    def begin_step(self) -> None:
        self.step += 1
        if self.step == self.fault.before:
            self.fault.plant(self)

    def module(self, path: str) -> nn.Module:
        return self.model.get_submodule(path.removeprefix("model").removeprefix("."))

    def tensor(self, path: str) -> Tensor:
        return self.model.state_dict(keep_vars=True)[path.removeprefix("model.")]

    def around(
        self, change: Callable[..., Any], path: str, call: int = 0, step: int | None = None
    ) -> None:
        """Let `change(forward, *args)` take the place of a call of a module, or of all calls."""
        module = self.module(path)
        forward = module.forward
        calls = Counter[int]()

        @functools.wraps(forward)
        def changed(*args, **options):
            number = calls[self.step]
            calls[self.step] += torch.is_grad_enabled()
            is_here = step is None or (self.step, number) == (step, call)
            return change(forward, *args, **options) if is_here else forward(*args, **options)

        module.forward = changed


def record(
    name: str,
    fault: Fault = SOUND,
    *,
    seed: int = 0,
    **options,
) -> list[Observation]:
    """Record a training of a model, and return its observations."""
    folder = tempfile.mkdtemp()
    with fault.mode, record_run(folder, steps=STEPS, **options):
        torch.manual_seed(seed)
        model, samples = MODELS[name]()
        training = Training(model, samples, fault)
        LOOPS.get(name, plain)(model, training.optimizer, samples)
    return read_fingerprints(folder)


def is_float(value) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _is_new(operation: str) -> bool:
    """Return whether the results of an operation have memory of their own."""
    name, overload = operation.split(".")[1:]
    returns = getattr(getattr(torch.ops.aten, name), overload)._schema.returns
    return all(one.alias_info is None for one in returns)


def _first_changed(function: Callable[..., Any], output, *options):
    """Apply a function to the first tensor of an output."""
    first = next(filter(is_float, tree_leaves(output)))
    return tree_map(lambda one: function(one, *options) if one is first else one, output)


class NoPlace(Exception):
    """The training has nothing for a fault of this kind."""


class Planter:
    """Draws faults over what the record of a training has."""

    def __init__(self, reference: Sequence[Any], operations: Sequence[Any], seed: str) -> None:
        self.reference = reference
        self.operations = operations
        self.random = Random(seed)
        self.step = self.random.randint(1, STEPS)
        self.model = next(one.settings for one in reference if one.kind == "settings")

    def draw(self, kind: str) -> Fault | None:
        """Return a fault, or None where the training has nothing for one."""
        with contextlib.suppress(NoPlace):
            return getattr(self, kind)()
        return None

    def _where(self) -> tuple[float, int]:
        return self.random.random(), self.random.randrange(32)

    def _one(self, choices: Sequence[Any]):
        if not choices:
            raise NoPlace
        return self.random.choice(choices)

    def _observed(self, kind: str, **asked) -> list[Any]:
        facts = {"kind": kind, **asked}
        return [
            one
            for one in self.reference
            if all(getattr(one, k, None) == v for k, v in facts.items())
        ]

    def _calls(self, **asked) -> list[Any]:
        exits = self._observed("exit", phase="forward", **asked)
        return [one for one in exits if one.digests.get("0", "float").startswith("float")]

    def _parameter(self, prefix: str) -> str:
        return self._one(self._parameters("update", prefix))

    def _parameters(self, kind: str, prefix: str) -> list[str]:
        found = self._observed(kind, step=2)[0].digests
        return [one.removeprefix(prefix) for one in found if one.startswith(prefix)]

    def _of_class(self, *words: str) -> list[str]:
        return [
            path
            for path, one in self.model.items()
            if any(word in one["class"] for word in words)
            and self._observed("exit", step=1, path=path)
        ]

    # State.

    def weight(self) -> Fault:
        path = self._parameter("gradient of ")
        where = self._where()
        return Fault(
            1, "state", path, plant=lambda training: flip(training.tensor(path).data, *where)
        )

    def weight_between_steps(self) -> Fault:
        fault = self.weight()
        step = self.random.randint(2, STEPS)
        return replace(fault, step=step, before=step)

    def optimizer_state(self) -> Fault:
        path = self._parameter("exp_avg of ")
        where = self._where()
        step = self.random.randint(2, STEPS)
        return Fault(
            step,
            "optimizer",
            path,
            plant=lambda training: flip(
                training.optimizer.state[training.tensor(path)]["exp_avg"], *where
            ),
            before=step,
        )

    def stale_buffer(self) -> Fault:
        parameters = self._observed("step", step=1)[0].digests
        before, after = (self._observed("state", step=step)[0].digests for step in (1, 2))
        path = self._one(
            [
                one
                for one, it in after.items()
                if "float" in it and one not in parameters and it != before[one]
            ]
        )
        owner, _, name = path.rpartition(".")
        call = self._one(self._calls(path=owner, step=self.step))

        def stale(forward, *args, **options):
            buffer = getattr(forward.__self__, name)
            before = buffer.clone()
            output = forward(*args, **options)
            buffer.data.copy_(before)
            return output

        return self._at_call(call, "forward", stale)

    def _at_call(self, call, phase: str, change: Callable[..., Any]) -> Fault:
        place = call.path, call.call
        return Fault(
            self.step,
            phase,
            *place,
            lambda training: training.around(change, *place, self.step),
        )

    # Forward and backward.

    def activation(self) -> Fault:
        """A flip in the output of a module."""
        return self._flipped(self._calls(step=self.step), "forward")

    def _flipped(self, calls: list[Any], phase: str) -> Fault:
        call = self._one(calls)
        where = self._where()
        function = flipped if phase == "forward" else flipped_in_backward

        def change(forward, *args, **options):
            return _first_changed(function, forward(*args, **options), *where)

        return self._at_call(call, phase, change)

    def result(self) -> Fault:
        """A flip in the result of an operation of the second step."""
        containers = {path for path in self.model for it in self.model if it.startswith(f"{path}.")}
        inside = [
            one
            for one in self.operations
            if one.kind == "operation" and one.phase == "forward"
            if one.within and one.within[0] not in containers
        ]
        operation = self._one(
            [
                one
                for one in inside
                if any("float" in it for it in one.digests.values()) and _is_new(one.name)
            ]
        )
        path, call = operation.within
        same = [one for one in inside if (one.within, one.name) == ([path, call], operation.name)]
        number = same.index(operation)
        mode = FlipResult(operation.name, *self._where())

        def change(forward, *args, **options):
            mode.remaining = number
            return forward(*args, **options)

        return Fault(
            2,
            "forward",
            path,
            call,
            lambda training: training.around(change, path, call, 2),
            (mode.name,),
            mode=mode,
        )

    def update(self) -> Fault:
        """A flip in the result of an operation of the optimizer, in the second step."""
        updated = self._parameters("step", "exp_avg of ")
        number = self.random.randrange(len(updated))
        mode = FlipResult("aten.addcdiv_.default", *self._where())

        def plant(training: Training) -> None:
            mode.remaining = number

        return Fault(2, "optimizer", updated[number], None, plant, (mode.name,), 2, mode)

    def gradient_of_activation(self) -> Fault:
        calls = [
            one
            for one in self._observed("exit", phase="forward", step=self.step)
            if self._observed("gradient", step=self.step, path=one.path, call=one.call)
        ]
        return self._flipped(calls, "backward")

    def gradient(self) -> Fault:
        """A flip in an accumulated gradient, before the step."""
        path = self._parameter("gradient of ")
        where = self._where()

        def plant(training: Training) -> None:
            calls = itertools.count(1)

            def change(parameter: Tensor) -> None:
                if next(calls) == MICROBATCHES:
                    flip(parameter.grad, *where)

            training.tensor(path).register_post_accumulate_grad_hook(change)

        return Fault(self.step, "gradients", path, None, plant, before=self.step)

    def frozen(self) -> Fault:
        path = self._parameter("gradient of ")
        return Fault(
            1,
            "gradients",
            path,
            plant=lambda training: training.tensor(path).requires_grad_(False),
            operations=(),
        )

    def hooked(self) -> Fault:
        """A gradient that a hook makes longer."""
        path = self._parameter("gradient of ")

        def longer(parameter: Tensor) -> None:
            parameter.grad.mul_(1.01)

        return Fault(
            1,
            "gradients",
            path,
            plant=lambda training: training.tensor(path).register_post_accumulate_grad_hook(longer),
        )

    def kernel(self) -> Fault:
        """A matrix product or convolution of inputs with a mantissa of 10 bits, as in TF32."""
        path = self._one(self._of_class("Linear", "Conv"))

        def change(forward, inputs: Tensor, *args, **options):
            short = (inputs.detach().view(torch.int32) & -(1 << 13)).view(torch.float32)
            return forward(inputs + (short - inputs).detach(), *args, **options)

        return Fault(1, "forward", path, 0, lambda training: training.around(change, path))

    def drawn(self) -> Fault:
        """One more number from the generator, between two steps."""
        step = self.random.randint(2, STEPS)
        enters = {
            (one.path, one.call): one.generators
            for one in self._observed("enter", step=step, phase="forward")
        }
        exits = self._observed("exit", step=step, phase="forward")
        drawing = [it for it in exits if enters[it.path, it.call] != it.generators]
        one = self._one(drawing[:1])
        return Fault(
            step,
            "forward",
            one.path,
            one.call,
            lambda training: torch.rand(1),
            operations=(),
            before=step,
            note="the random generator of torch differs",
        )

    # Settings.

    def _changed(self, path: str, name: str, value, operations: tuple[str, ...]) -> Fault:
        return Fault(
            1,
            "forward",
            path,
            0,
            lambda training: setattr(training.module(path), name, value),
            operations,
            note=f"{name} of {path} is {self.model[path].get(name)} in A and {value} in B",
        )

    def epsilon(self) -> Fault:
        path = self._one(self._of_class("Norm"))
        name = "variance_epsilon" if "variance_epsilon" in self.model[path] else "eps"
        operations = ("norm", f"argument other is {self.model[path][name]} in A")
        return self._changed(path, name, self.model[path][name] * 2, operations)

    def flag(self) -> Fault:
        path = self._one(self._of_class("Dropout"))

        def plant(training: Training) -> None:
            module = training.module(path)
            module.eval()
            # A Trainer's model.train() does not reach it.
            module.train = lambda mode=True: module

        return Fault(1, "forward", path, 0, plant, OF_DROPOUT)

    def dropout(self) -> Fault:
        path = self._one(self._of_class("Dropout"))
        rate = self.model[path]["p"] + 0.1
        return self._changed(path, "p", rate, OF_DROPOUT)

    def dropout_moved(self) -> Fault:
        path = self._one(self._of_class("Dropout"))
        floats = [one.path for one in self._calls(step=1, call=0)]
        other = self._one([one for one in floats if one != path])
        first = next(one for one in floats if one in (path, other))

        def plant(training: Training) -> None:
            drop = functools.partial(nn.functional.dropout, p=training.module(path).p)
            training.around(lambda forward, inputs: inputs, path)
            training.around(
                lambda forward, *args, **options: _first_changed(drop, forward(*args, **options)),
                other,
            )

        return Fault(1, "forward", first, 0, plant, (HERE, *OF_DROPOUT))

    def optimizer_flag(self) -> Fault:
        name, value = self._one(
            [("eps", 1e-6), ("weight_decay", 0.1), ("lr", 2e-3), ("amsgrad", True)]
        )
        return Fault(
            # The first step has no other largest moment than the others.
            2 if name == "amsgrad" else 1,
            "optimizer",
            plant=lambda training: training.optimizer.param_groups[0].update({name: value}),
            operations=("aten.",),
            note=f"{name} of group 0 of AdamW is",
        )

    # Data.

    def _data(self, first: int, change: Callable[[list[Any]], None]) -> Fault:
        """A fault from the sample of this number on."""
        batch = self._observed("batch")[first // BATCH_SIZE]
        place = batch.step, "data", batch.path, batch.call
        return Fault(*place, lambda training: change(training.samples), ())

    def data(self) -> Fault:
        """Two samples, of any batches, in each other's place."""
        one, two = sorted(self.random.sample(range(BATCH_SIZE * STEPS * MICROBATCHES), 2))

        def change(samples: list[Any]) -> None:
            samples[one], samples[two] = samples[two], samples[one]

        return self._data(one, change)

    def microbatches(self) -> Fault:
        """The microbatches of a step in the other order."""
        window = MICROBATCHES * BATCH_SIZE
        first = (self.step - 1) * window

        def change(samples: list[Any]) -> None:
            rows = samples[first : first + window]
            samples[first : first + window] = rows[BATCH_SIZE:] + rows[:BATCH_SIZE]

        return self._data(first, change)


# Each kind is a method, in the order in which kinds take turns.
KINDS = [name for name in vars(Planter) if name[0] != "_" and name != "draw"]


# Trainings on two ranks, each recorded into a folder.

# Faults of one rank: of its data, its forward, its copy of the state.
KINDS_OF_A_RANK = ("data", "activation", "weight_between_steps", "optimizer_state", "kernel")
MODELS_OF_RANKS = ("encoder", "sampled")


def record_rank(name: str, folder: Path, wrap, fault: Fault = SOUND, *, own: bool = True):
    rank = torch.distributed.get_rank()
    with record_run(folder, steps=STEPS):
        torch.manual_seed(0)
        model, samples = MODELS[name]()
        begin = rank * STEPS * MICROBATCHES * BATCH_SIZE if own else 0
        wrapped = wrap(model)
        training = Training(model, samples[begin:], fault if rank == 1 else SOUND)
        plain(wrapped, training.optimizer, training.samples)
    return read_fingerprints(folder, rank)


def cases_of_ranks(count: int) -> Iterator[tuple[str, str]]:
    """Yield the kind of each fault, and the model in which it is planted."""
    every = zip(itertools.cycle(KINDS_OF_A_RANK), itertools.cycle(MODELS_OF_RANKS))
    return itertools.islice(every, count)


def fault_of_rank(number: int, kind: str, reference) -> Fault:
    return Planter(reference, [], f"{number} 0").draw(kind)


def record_ranks(folder: Path, count: int, run: Callable[[], None], end: End) -> None:
    """Record trainings into a folder, so many of them with a fault on the second rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    with quietly():
        reference = {
            name: record_rank(name, folder / f"right-{name}", DistributedDataParallel)
            for name in MODELS_OF_RANKS
        }
        for number, (kind, name) in enumerate(cases_of_ranks(count)):
            fault = fault_of_rank(number, kind, reference[name])
            record_rank(name, folder / f"fault-{number}", DistributedDataParallel, fault)
        record_rank("encoder", folder / "one process", lambda model: model, own=False)
        record_rank("encoder", folder / "FSDP2", fully_shard, own=False)
    torch.distributed.destroy_process_group()
    end({"count": count})
