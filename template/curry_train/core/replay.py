"""Checkpoint one cheap module, and recompute its output too if backward needs it.

Only the input of the call is saved. Everything else comes from a second call in backward.

Proof: `python -m pytest tests/test_recipes.py`.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_map

REPLAY = "curry_train_replay"

# Set on nodes that lead into a checkpointed call, which returns each saved tensor only once.
AGAIN = "curry_train_again"


class Replay:
    """One call of a module that saves only its input.

    When backward needs a tensor that the call saved, or its output, a second call recomputes all of
    them. The object is kept alive by the tensors that autograd saved from the call and by the users
    of its output, which release it in backward. Nodes must not hold it, because they live as long
    as the loss.
    """

    def __init__(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.run = run
        self.inputs = (args, kwargs)
        self.versions: list[tuple[Tensor, int]] = []
        self.autocast = autocast_now()
        self.modes = function_modes()
        self.num_saved = 0
        self.num_uses = 0
        self.saved: dict[int, Tensor] = {}
        self.output: Tensor | None = None

    def first(self) -> Any:
        """Make the first call, and mark its output so that it can be recomputed."""
        args, kwargs = self.inputs
        tree_map(self._watch, self.inputs)
        with saved_tensors_hooks(self._pack, self._unpack):
            output = self.run(*args, **kwargs)
        fresh = isinstance(output, Tensor) and output.grad_fn is not None and output._base is None
        if fresh and not any(output is tensor for tensor, _ in self.versions):
            setattr(output, REPLAY, self)
            # Recipes for casts of the output look it up here.
            output.grad_fn.metadata[REPLAY] = weakref.ref(self)
        return output

    def use(self) -> Callable[[], Tensor]:
        """Return a function that gives the output in backward; the last use releases the output."""
        self.num_uses += 1
        return self._take

    def _take(self) -> Tensor:
        if self.output is None:
            self._again()
        output = self.output
        assert output is not None
        self.num_uses -= 1
        if self.num_uses <= 0:
            self.output = None
        return output

    def _watch(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            self.versions.append((leaf, leaf._version))

    def _pack(self, _: Tensor) -> int:
        self.num_saved += 1
        return self.num_saved - 1

    def _unpack(self, index: int) -> Tensor:
        if index not in self.saved:
            self._again()
        return self.saved.pop(index)

    def _again(self) -> None:
        for tensor, version in self.versions:
            check_unchanged(tensor, version)
        saved: list[Tensor] = []

        def capture(tensor: Tensor) -> int:
            saved.append(tensor.detach())
            return len(saved) - 1

        args, kwargs = tree_map(_cut, self.inputs)
        modes = function_modes_as(self.modes)
        with (
            torch.enable_grad(),
            autocast_as(self.autocast),
            modes,
            saved_tensors_hooks(capture, saved.__getitem__),
        ):
            output = self.run(*args, **kwargs)
        if len(saved) != self.num_saved:
            raise RuntimeError(
                f"a module saved {self.num_saved} tensors the first time and {len(saved)} the "
                "second: it computes something else when it is recomputed; take it out of the "
                "regions"
            )
        self.saved = dict(enumerate(saved))
        self.output = output.detach() if isinstance(output, Tensor) else None


def _cut(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def check_unchanged(tensor: Tensor, version: int) -> None:
    """Raise if a saved tensor was changed in place, as autograd does for tensors without hooks."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an "
            f"inplace operation: it is at version {tensor._version}, and {version} was saved; "
            "write the result to another tensor"
        )


Autocast = list[tuple[str, torch.dtype]]


def autocast_now() -> Autocast:
    """Return the device types for which autocast is on, with their dtypes."""
    return [
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cuda", "cpu")
        if torch.is_autocast_enabled(kind)
    ]


@contextlib.contextmanager
def autocast_as(state: Autocast) -> Iterator[None]:
    """Set autocast to a recorded state inside the context."""
    now = autocast_now()
    if now == state:
        yield
        return
    with contextlib.ExitStack() as stack:
        for kind, _ in now:
            stack.enter_context(torch.autocast(kind, enabled=False))
        for kind, dtype in state:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


def function_modes() -> list[TorchFunctionMode]:
    """Return the active function modes, such as `with torch.device(...)`."""
    return list(_get_current_function_mode_stack())


@contextlib.contextmanager
def function_modes_as(modes: list[TorchFunctionMode]) -> Iterator[None]:
    """Enter recorded function modes that are not active now.

    Torch runs backward without the modes in which `backward` is called. For a default device a new
    context is entered, because a context can restore only one previous state.
    """
    now = function_modes()
    with contextlib.ExitStack() as stack:
        for mode in modes:
            if not any(mode is other for other in now):
                stack.enter_context(mode.device if isinstance(mode, DeviceContext) else mode)
        yield
