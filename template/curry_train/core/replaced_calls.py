"""Replace calls of torch for a while, by functions that get the original first.

    with replaced_calls([(nn.Module, "__call__", self.note)], self.before, self.after):
        train()

`note(call, module, *args, **options)` runs in place of each call of a module, and `before` and
`after` around each step of an optimizer, as torch's hooks for that. Both may be left out.

Proof: `python -m pytest tests/runs/test_fingerprints.py tests/gates/test_loop.py`.
"""

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Call = Callable[..., Any]
# Packages whose own calls are not replaced but at their owners.
SKIPPED = ("torch", __name__.partition(".")[0])


@contextlib.contextmanager
def replaced_calls(
    replacements: Iterable[tuple[Any, str, Call]], *around_step: Call
) -> Iterator[None]:
    """Replace attributes of classes and modules, given with their owners, and watch steps.

    Other modules than torch's, which may have imported a function, get what replaces it too.
    """
    # By the replaced calls, which they keep alive.
    functions: dict[int, Any] = {}
    with contextlib.ExitStack() as stack:
        registers = (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
        for register, watch in zip(registers, around_step, strict=False):
            stack.callback(register(_skip_state_step(watch)).remove)
        for owner, name, watch in replacements:
            call = getattr(owner, name)
            function = watched(watch, call)
            functions[id(call)] = function
            stack.enter_context(mock.patch.object(owner, name, function))
        for module in [*sys.modules.values()]:
            if getattr(module, "__name__", "torch").partition(".")[0] not in SKIPPED:
                for name, value in [*vars(module).items()]:
                    if id(value) in functions:
                        stack.enter_context(mock.patch.object(module, name, functions[id(value)]))
        yield


def _skip_state_step(watch: Call) -> Call:
    """Leave out the step by which torch makes an optimizer's state, before it saves or loads it."""

    def run(*args: Any) -> Any:
        names = [frame.f_code.co_name for frame, _ in traceback.walk_stack(None)]
        return None if "_init_optim_state" in names else watch(*args)

    return run


def defining(base: type, name: str) -> Iterator[type]:
    """Yield the class and its subclasses that have an attribute of this name as their own."""
    if name in vars(base):
        yield base
    subclass: type
    for subclass in base.__subclasses__():
        yield from defining(subclass, name)


def watched(watch: Call, call: Call) -> Any:
    """Return a function that calls `watch(call, ...)`; as a class attribute it is a method."""

    # Libraries read the signatures of what they make.
    @functools.wraps(call)
    def run(*args: Any, **options: Any) -> Any:
        return watch(call, *args, **options)

    return run
