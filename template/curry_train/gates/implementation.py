"""The user's own implementation of a technique, which the gates check in place of ours.

    curry-train validate --gate sac --impl my_package.sac:apply_sac
    curry-train validate --impl recompute_blocks=my_package.memory:checkpoint_layers

`CONTRACTS` has the eight functions that people write themselves, with the arguments that the gates
pass. Nothing else is asked of an implementation: no return values and no particular errors.

Proof: `python -m pytest tests/gates/test_implementation.py`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.wording import did_you_mean
from ..workloads.models import import_callable


@dataclass(frozen=True)
class Contract:
    """A function that a user may bring, and how the gates call it."""

    # A function with the parameters that the gates pass; only its signature is used.
    call: Callable[..., Any]

    # What it has to do, in a sentence.
    promise: str


CONTRACTS: Mapping[str, Contract] = {
    "recompute_blocks": Contract(
        lambda model, *, blocks: None,
        "Make the modules with these names recompute their activations, in place.",
    ),
    "offload_blocks": Contract(
        lambda model, *, blocks: None,
        "Move what the modules with these names save for backward to the host, in place. A "
        "keyword keep_last gets 0.",
    ),
    "apply_sac": Contract(
        lambda model, *, blocks: None,
        "Save some outputs of the modules with these names and recompute the rest, in place.",
    ),
    "train_window": Contract(
        lambda model, window, loss, optimizer: None,
        "Take one optimizer step on window.microbatches; loss(model, microbatch) is a sum, to "
        "be divided by window.loss_divisor, as DDP and FSDP2 average. With keywords clip_norm, "
        "scheduler or scaler, the gates of clipping, schedules and gradient scaling apply too.",
    ),
    "checkpoint_timesteps": Contract(
        lambda step, inputs, state: None,
        "Run output, state = step(input, state) over time, and return the outputs and the last "
        "state. Gets the keywords that the model passes to its unroll.",
    ),
    "apply_chunked_loss": Contract(
        lambda model, *, head: None,
        "Make the loss over the output of the module with this name run in chunks, in place.",
    ),
    "plan": Contract(
        lambda workload, budget_bytes, *, global_batch, microbatch: None,
        "Return an object whose apply(model) makes a step of this batch fit the budget.",
    ),
    "SpikeWatchdog": Contract(
        lambda config: None,
        "Return an object whose observe(step, loss) is true once a spike is found.",
    ),
}


class Counted:
    """A function of the user's, and how often it was called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self.function(*args, **kwargs)


class Implementation(Counted):
    """A callable to check in place of ours."""

    def __init__(self, name: str, spec: str, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.name = name  # of its contract
        self.spec = spec  # package.module:function

    def __reduce__(self) -> tuple[Callable[[str], "Implementation"], tuple[str]]:
        """Let another process load it by its name, where it is called."""
        self.num_calls += 1
        return load_implementation, (f"{self.name}={self.spec}",)


def load_implementation(text: str) -> Implementation:
    """Load `[NAME=]package.module:function`, where NAME is that of a contract.

    Without it the function's own name counts.
    """
    name, _, spec = text.rpartition("=")
    try:
        function = import_callable(spec)
    except ValueError as error:
        raise ValueError(f"--impl {text}: {error}") from error
    name = name or spec.rpartition(":")[2]
    if name not in CONTRACTS:
        raise ValueError(
            f"--impl {text}: write NAME={spec}, where NAME tells what it implements: "
            f"{did_you_mean(name, CONTRACTS)}"
        )
    _check_call(name, spec, function)
    return Implementation(name, spec, function)


def _check_call(name: str, spec: str, function: Callable[..., Any]) -> None:
    """Refuse a callable that does not take the arguments that the gates pass."""
    try:
        theirs = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    ours = CONTRACTS[name].call
    wanted = inspect.getfullargspec(ours)
    try:
        theirs.bind(*wanted.args, **dict.fromkeys(wanted.kwonlyargs))
    except TypeError as error:
        call = f"{name}{inspect.signature(ours)}"
        raise ValueError(
            f"--impl {spec} takes {theirs}, and the gates call {call}: {error}"
        ) from error


def takes(function: Callable[..., Any], keyword: str) -> bool:
    """Return whether a function can be called with this keyword."""
    try:
        inspect.signature(function).bind_partial(**{keyword: None})
    except TypeError:
        return False
    return True
