"""Make the optimizers of a plan, and run their steps on tensors without values.

    optimizer = make_optimizer("my_project.train:make_optimizer", model)

The optimizer's own step runs, so its state and its temporary copies are those of the real one. What
a step reads off a tensor without values, such as a norm, is answered with a number. The bytes of a
step rarely depend on it; where a condition changes them, the larger ones count.

Proof: `python -m pytest tests/plan/test_optimizers.py`.
"""

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..core.wording import did_you_mean
from ..primitives.grad_accum import StepInBackward
from ..primitives.rerun import function_modes, function_modes_as
from ..workloads.models import call_factory, import_callable
from ..workloads.optimizers import SteppedOnHost, stepped_on_host
from .profiler import trained_parameters


@contextlib.contextmanager
def copy_steps(original: torch.optim.Optimizer, copied: torch.optim.Optimizer) -> Iterator[None]:
    """Let the copy of an optimizer that steps in backward do so, and not the original."""
    if not isinstance(original, StepInBackward) or not isinstance(copied, StepInBackward):
        yield
        return
    modes = function_modes()
    for part in copied.parts.values():
        vars(part)["step"] = in_modes(part.step, modes)
    copied.attach()
    try:
        with original.paused():
            yield
    finally:
        copied.detach()


def in_modes(function: Callable[..., Any], modes: list[Any]) -> Callable[..., Any]:
    """Return a function in these function modes, which torch leaves while it runs backward."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with function_modes_as(modes):
            return function(*args, **kwargs)

    return run


def take_eagerly(optimizer: torch.optim.Optimizer) -> None:
    """Take a step without compiling what the step would compile.

    Under an instrument torch compiles nothing. Run eagerly, a compiled step holds a few copies of
    one parameter more.
    """
    kind = optimizer.make.func if isinstance(optimizer, SteppedOnHost) else type(optimizer)
    if kind.__module__.partition(".")[0] in ("torch", __package__.partition(".")[0]):
        optimizer.step()
        return
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()


# Steps on tensors without values.


class ValuesInSteps:
    """Answers for what an optimizer's step reads off tensors without values.

    A number is 1, and a condition is `condition`. Outside of a step `num_running` is 0.
    """

    def __init__(self) -> None:
        self.condition = True
        self.num_conditions = 0
        # Steps that run, one of which may call another.
        self.num_running = 0

    def answer(self, dtype: torch.dtype) -> bool | int | float:
        """Return the value of a tensor with one element of this dtype."""
        if dtype is torch.bool:
            self.num_conditions += 1
            return self.condition
        return 1.0 if dtype.is_floating_point else 1

    @contextlib.contextmanager
    def during_steps(self) -> Iterator[None]:
        """Be active while any optimizer steps, inside of the context."""

        def enter(*_: Any) -> None:
            self.num_running += 1

        def leave(*_: Any) -> None:
            self.num_running -= 1

        with register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave):
            try:
                yield
            finally:
                # A step that raised an error never left.
                self.num_running = 0


def capturable_anywhere() -> contextlib.AbstractContextManager[None]:
    """Let `capturable=True` be used with CPU tensors, which stand for those of a CUDA device."""
    name = "_get_capturable_supported_devices"
    return patched_in_all("torch.optim.", name, lambda supports_xla=True: ["cuda", "cpu"])


@contextlib.contextmanager
def patched_in_all(prefix: str, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function in all imported modules of this prefix that have it."""
    with contextlib.ExitStack() as stack:
        for path, module in [*sys.modules.items()]:
            if path.startswith(prefix) and name in vars(module):
                stack.enter_context(mock.patch.object(module, name, replacement))
        yield


# Optimizers for memory plans: torch's own, or any other by its state bytes per parameter.


class BytesForEach(torch.optim.Optimizer):
    """Stand-in for an optimizer, with a given number of state bytes per parameter.

    While it steps it also allocates one gradient at a time in float32.
    """

    def __init__(self, parameters: Iterable[Tensor], *, num_bytes: float) -> None:
        super().__init__(parameters, {"num_bytes": num_bytes})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    size = round(parameter.numel() * group["num_bytes"])
                    self.state[parameter]["state"] = torch.empty(
                        size, dtype=torch.uint8, device=parameter.device
                    )
                parameter.grad.float()  # allocate and free


OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS = (
    # AdamW with two moments in the parameters' dtype.
    "adamw",
    # With moments and master weights in float32: 12 bytes per parameter.
    "adamw-master",
    # In one kernel, which needs no copies in its step.
    "adamw-fused",
    # It steps in backward: no gradients, and no clip by their norm.
    "adamw-in-backward",
    # With moments of one byte: 2 bytes per parameter.
    "adamw-8bit",
    # SGD without state, and with momentum in the parameters' dtype.
    "sgd",
    "sgd-momentum",
)


# Names of the Trainer's `optim` that mean one of these.
TRAINER_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw-fused",
    "adamw_8bit": "adamw-8bit",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_torch_8bit": "adamw-8bit",
    "paged_adamw_8bit": "adamw-8bit",
}
OPTIMIZER_BYTES_PER_PARAMETER = {"adamw-master": 12.0, "adamw-8bit": 2.0}


class NeedsClosure(ValueError):
    """The optimizer's step runs the model several times, so it is no part of a usual step."""


def make_optimizer(
    name: "str | float | OptimizerFactory", module: nn.Module, *, foreach: bool | None = None
) -> torch.optim.Optimizer:
    """Make an optimizer by name, by bytes per parameter such as 6 or "6", or with a factory.

    A factory is the user's own, as a function of the module or as `package.module:function`.
    `foreach` selects the multi-tensor implementation; None leaves it to torch, which has it on
    CUDA.
    """
    if callable(name) or (isinstance(name, str) and ":" in name):
        return _of_factory(name, module, foreach=foreach)
    trained = trained_parameters(module)
    name = TRAINER_OPTIMIZERS.get(str(name), name)
    adamw = torch.optim.AdamW
    if name == "adamw":
        return adamw(trained, foreach=foreach)
    if name == "adamw-fused":
        return adamw(trained, fused=True)
    if name == "adamw-in-backward":
        return StepInBackward(trained, functools.partial(adamw, foreach=foreach))
    if name in ("sgd", "sgd-momentum"):
        return torch.optim.SGD(
            trained, lr=1e-3, momentum=0.9 if name == "sgd-momentum" else 0.0, foreach=foreach
        )
    if name in OPTIMIZER_BYTES_PER_PARAMETER:
        return BytesForEach(trained, num_bytes=OPTIMIZER_BYTES_PER_PARAMETER[str(name)])
    if isinstance(name, int | float) or re.fullmatch(r"\d+(\.\d+)?", name):
        return BytesForEach(trained, num_bytes=float(name))
    others = (
        f"use one of {', '.join(OPTIMIZERS)}, package.module:function, bytes per parameter, or "
        "--trainer package.module:make_trainer, which reads the optim of its arguments"
    )
    raise ValueError(
        f"no optimizer is called {name!r}; {did_you_mean(name, OPTIMIZERS, otherwise=others)}"
    )


def _of_factory(
    factory: "str | OptimizerFactory", module: nn.Module, *, foreach: bool | None
) -> torch.optim.Optimizer:
    """Make the user's optimizer; where it leaves `foreach` open, take CUDA's default for it."""
    make = import_callable(factory)
    with stepped_on_host():
        optimizer = call_factory(make, factory, module)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"the optimizer's factory returned {type(optimizer).__name__}: return a "
            "torch.optim.Optimizer made from the module that it gets"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise NeedsClosure(
            f"{type(optimizer).__name__} needs a closure, with which its step runs the model "
            "several times: measure the forward and backward with another one, such as SGD, or "
            "AdamW by --learning-rate of grad-flow"
        )
    for group in optimizer.param_groups:
        if foreach and "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not group.get("differentiable", False)
    return optimizer


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Check whether an optimizer keeps its step counts on the device."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
