"""Record the state of a training at each step, and give a part of it back its state at the start.

    watched = StateWatch(12, when_enough, "fresh.pt", "straight")
    with watched.watching():
        run_the_script()

A run "straight" writes what its process began with. Another one that is named by a part, such as
"scheduler", takes this part from there at its first step: as a resume that does not restore it.

Proof: `python -m pytest tests/cli/test_resume_check.py`.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..core.digest import digest
from ..core.generators import generator_digests, generator_states, set_generator_states

# The kinds of objects that are noted when they are made, by the part that their state is.
KINDS = {"scheduler": LRScheduler, "scaler": torch.amp.GradScaler}
PARTS = ("data order", "model", "optimizer", "scheduler", "scaler", "generators")


class StateWatch:
    """Notes what each step of an optimizer began with, and calls `when_enough` after the last.

    `mode` is "straight", "killed", "resumed", or the part that is withheld.
    """

    def __init__(
        self, last: int, when_enough: Callable[["StateWatch"], None], fresh: str, mode: str
    ) -> None:
        self.last = last
        self.when_enough = when_enough
        self.path = fresh
        self.mode = mode
        self.steps: list[dict[str, Any]] = []
        # What the first step began with; the inputs of all steps.
        self.fresh: dict[str, Any] = {"model": [], "data order": []}
        if mode in PARTS:
            # The parent process has let another process write it.
            self.fresh = torch.load(fresh, weights_only=False)
        self._now: dict[str, Any] = {}
        self._is_begun = False
        self._depth = 0
        self._stepping = 0
        self._roots: list[nn.Module] = []
        self._made: dict[str, list[Any]] = {"optimizer": [], "scheduler": [], "scaler": []}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for hook in (
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                stack.callback(hook.remove)
            for part, kind in {"optimizer": Optimizer, **KINDS}.items():
                for one in _with_subclasses(kind):
                    if "__init__" in vars(one):
                        noted = self._noted(self._made[part], vars(one)["__init__"])
                        stack.enter_context(mock.patch.object(one, "__init__", noted))
            call = self._call(nn.Module.__call__)
            stack.enter_context(mock.patch.object(nn.Module, "__call__", call))
            yield

    def _noted(self, made: list[Any], begin: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(begin)
        def run(new: Any, *args: Any, **options: Any) -> None:
            if all(one is not new for one in made):
                made.append(new)
            begin(new, *args, **options)

        return run

    @property
    def present(self) -> list[str]:
        """Return the parts that this training has."""
        return [part for part in PARTS if any(step[part] for step in self.steps)]

    # Before the forward pass of a model.

    def _call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(module, *args, **options)
            is_trained = module.training and torch.is_grad_enabled() and not self._depth
            if is_trained and next(module.parameters(), None) is not None:
                args, options = self._enter(module, args, options)
            self._depth += 1
            try:
                return call(module, *args, **options)
            finally:
                self._depth -= 1

        return run

    def _enter(self, root: nn.Module, args: Any, options: Any) -> tuple[Any, Any]:
        self._take_or_withhold()
        if not any(root is one for one in self._roots):
            self._add(root)
        now = self._begun()
        leaves, form = tree_flatten((args, options))
        tensors = [number for number, one in enumerate(leaves) if isinstance(one, Tensor)]
        inputs = self.fresh["data order"]
        step = len(self.steps)
        number = len(now["data order"])
        if self.mode == "straight":
            inputs += [[] for _ in range(step + 1 - len(inputs))]
            inputs[step].append([leaves[one].detach().clone() for one in tensors])
        elif self.mode == "data order" and step < len(inputs) and number < len(inputs[step]):
            for one, kept in zip(tensors, inputs[step][number], strict=False):
                leaves[one] = kept.to(leaves[one].device)
        now["data order"].append([digest(leaves[one]) for one in tensors])
        changed: tuple[Any, Any] = tree_unflatten(leaves, form)
        return changed

    def _add(self, root: nn.Module) -> None:
        """Take or withhold the state of a model at its first call."""
        self._roots.append(root)
        tensors = list(root.state_dict(keep_vars=True).values())
        if self.mode == "straight":
            self.fresh["model"].append([one.detach().clone() for one in tensors])
        elif self.mode == "model":
            with torch.no_grad():
                for one, kept in zip(tensors, self.fresh["model"].pop(0), strict=True):
                    one.copy_(kept)

    def _take_or_withhold(self) -> None:
        """Take or withhold all but the model, once, before anything of the first step is noted."""
        if self._is_begun:
            return
        self._is_begun = True
        if self.mode == "straight":
            for part in KINDS:
                states = [one.state_dict() for one in self._made[part]]
                self.fresh[part] = copy.deepcopy(states)
            self.fresh["generators"] = generator_states()
        elif self.mode == "optimizer":
            for optimizer in self._made["optimizer"]:
                optimizer.state.clear()
        elif self.mode in KINDS:
            for one, kept in zip(self._made[self.mode], self.fresh[self.mode], strict=True):
                one.load_state_dict(kept)
        elif self.mode == "generators":
            set_generator_states(self.fresh["generators"])

    def _begun(self) -> dict[str, Any]:
        """Return the notes of this step, which its first forward pass begins."""
        if "model" not in self._now:
            begun = {"data order": [], "model": self._model(), "generators": generator_digests()}
            self._now |= begun
        return self._now

    def _model(self) -> dict[str, str]:
        return {
            f"model-{number}.{name}" if number else name: digest(one)
            for number, root in enumerate(self._roots)
            for name, one in root.state_dict().items()
            if isinstance(one, Tensor)
        }

    # The optimizer.

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping += 1
        if self._stepping > 1:
            return
        self._take_or_withhold()
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        state = {
            f"{key} of parameter {number}": digest(value)
            for number, parameter in enumerate(parameters)
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        # The forward pass may follow, in a closure of the optimizer.
        self._now |= {"optimizer": state}
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self._now["rates"] = rates
        for part in KINDS:
            states = [_numbers(one.state_dict()) for one in self._made[part]]
            self._now[part] = {key: value for one in states for key, value in one.items()}

    def _after_step(self, *_: Any) -> None:
        self._stepping -= 1
        if self._stepping:
            return
        without_model: dict[str, Any] = {"data order": [], "model": {}, "generators": {}}
        self.steps.append(without_model | self._now | {"after": self._model()})
        self._now = {}
        if len(self.steps) == self.last:
            if self.mode == "straight":
                torch.save(self.fresh, self.path)
            self.when_enough(self)


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    one: type
    for one in kind.__subclasses__():
        yield from _with_subclasses(one)


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are numbers, or lists of numbers."""
    found = {}
    for name, value in values.items():
        listed = value if isinstance(value, list) else [value]
        if all(isinstance(one, int | float) for one in listed):
            found[name] = copy.copy(value)
    return found
