"""Replace calls of torch for a while, by functions that get the original first.

    with replaced_calls([(nn.Module, "__call__", self.note)], self.before, self.after):
        train()

`note(call, module, *args, **options)` runs in place of each call of a module, and `before` and
`after` around each step of an optimizer, as torch's hooks for that.

Proof: `python -m pytest tests/runs/test_fingerprints.py tests/gates/test_loop.py`.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Call = Callable[..., Any]


@contextlib.contextmanager
def replaced_calls(
    replacements: Iterable[tuple[Any, str, Call]], before_step: Call, after_step: Call
) -> Iterator[None]:
    """Replace attributes of classes and modules, given with their owners, and watch steps."""
    with contextlib.ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(before_step).remove)
        stack.callback(register_optimizer_step_post_hook(after_step).remove)
        for owner, name, watch in replacements:
            function = watched(watch, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def watched(watch: Call, call: Call) -> Any:
    """Return a function that calls `watch(call, ...)`; as a class attribute it is a method."""

    def run(*args: Any, **options: Any) -> Any:
        return watch(call, *args, **options)

    return run
