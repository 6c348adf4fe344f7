"""A call of a module of which only the input is kept: what backward needs of it comes from one more call.

This is checkpointing for one cheap module, whose output may be made again as well. Proof:
`python -m pytest tests/test_recipes.py`.
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
AGAIN = "curry_train_again"  # on the nodes that lead into a call that is checkpointed, which gives what it saved once


class Replay:
    """One call of a module of which nothing but the input is kept: what it saved, and its output, are made again by
    one more call when backward asks for the first of them.

    What autograd has saved of the call holds it, and whoever uses its output: they let go of it in backward. Nodes live
    as long as the loss, so they must not.
    """

    def __init__(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.run, self.inputs = run, (args, kwargs)
        self.versions: list[tuple[Tensor, int]] = []
        self.autocast, self.modes = autocast_now(), function_modes()
        self.num_saved, self.num_uses = 0, 0
        self.saved: dict[int, Tensor] = {}
        self.output: Tensor | None = None

    def first(self) -> Any:
        """The first call; its output knows how it is made again."""
        args, kwargs = self.inputs
        tree_map(self._watch, self.inputs)
        with saved_tensors_hooks(self._pack, self._unpack):
            output = self.run(*args, **kwargs)
        fresh = isinstance(output, Tensor) and output.grad_fn is not None and output._base is None
        if fresh and not any(output is tensor for tensor, _ in self.versions):
            setattr(output, REPLAY, self)
            output.grad_fn.metadata[REPLAY] = weakref.ref(self)  # casts of the output find it here
        return output

    def use(self) -> Callable[[], Tensor]:
        """How somebody gets the output in backward; it is let go of with the last that asked for it."""
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
                f"saved {self.num_saved} tensors the first time and {len(saved)} the second: not pure"
            )
        self.saved, self.output = (
            dict(enumerate(saved)),
            output.detach() if isinstance(output, Tensor) else None,
        )


def _cut(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def check_unchanged(tensor: Tensor, version: int) -> None:
    """What autograd says of saved tensors, where hooks have taken them out of its hands."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace operation: it is "
            f"at version {tensor._version}, and {version} was kept; write the result to another tensor"
        )


Autocast = list[tuple[str, torch.dtype]]


def autocast_now() -> Autocast:
    """The kinds of device for which autocast is on, and to which dtype."""
    return [
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cuda", "cpu")
        if torch.is_autocast_enabled(kind)
    ]


@contextlib.contextmanager
def autocast_as(state: Autocast) -> Iterator[None]:
    """Autocast as it was then, whatever it is now."""
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
    """The function modes that are on, such as `with torch.device(...)`."""
    return list(_get_current_function_mode_stack())


@contextlib.contextmanager
def function_modes_as(modes: list[TorchFunctionMode]) -> Iterator[None]:
    """Those modes on that were on then: torch runs backward without the ones that `backward` itself is called in.

    A default device is entered anew, since its context remembers one place that it came from.
    """
    now = function_modes()
    with contextlib.ExitStack() as stack:
        for mode in modes:
            if not any(mode is other for other in now):
                stack.enter_context(mode.device if isinstance(mode, DeviceContext) else mode)
        yield
