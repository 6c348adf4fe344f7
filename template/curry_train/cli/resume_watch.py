"""Record the state of a training at each step, and give a part of it back its state at the start.

    watched = StateWatch(12, when_enough, Path("fresh.pt"), "straight")
    with watched.watching():
        run_the_script()

A run "straight" writes what its process began with. Another one that is named by a part, such as
"scheduler", takes this part from there at its first step: as a resume that does not restore it.

Proof: `python -m pytest tests/cli/test_resume_check.py`.
"""

import contextlib
import copy
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

from ..core.digest import digest, generator_digests
from ..core.generators import generator_states, set_generator_states
from ..core.replaced_calls import defining, replaced_calls
from ..gates.loop_events import tensors_of
from ..gates.loop_trace import rates_of
from ..gates.loop_weights import instances_of
from ..runs.fingerprints import leaves_of
from ..runs.values import Facts

# What is noted when it is made, by the part that its state_dict is; a model is at its first call.
KINDS = {"optimizer": Optimizer, "scheduler": LRScheduler, "scaler": torch.amp.GradScaler}
PARTS = ("data order", "model", *KINDS, "generators")


@dataclass
class StateWatch:
    """Notes what each step of an optimizer began with, and calls `when_enough` after the last."""

    last: int
    when_enough: Callable[[], None]
    # The file of the states at first.
    path: Path
    # "straight", "killed", "resumed", or the part that is withheld.
    mode: str

    def __post_init__(self) -> None:
        self.steps: list[Facts] = []
        generators = SimpleNamespace(
            state_dict=generator_states, load_state_dict=set_generator_states
        )
        # Objects that were made or called first, in this order, each with its part.
        self._found: list[tuple[str, Any]] = [("generators", generators)]
        # The number of them whose first state was taken or withheld.
        self._num_settled = 0
        # The states that they had at first, by part and number; the inputs of the model, by step
        # and call.
        self.fresh: dict[Any, Any] = {}
        if self.mode in PARTS:
            # The parent process has let another process write it.
            self.fresh = torch.load(self.path, weights_only=False)
        self._now = _make_empty()
        self._depth = 0
        self._stepping = 0

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the steps of the training are noted."""
        made = (
            (one, "__init__", functools.partial(self._make, part))
            for part, kind in KINDS.items()
            for one in defining(kind, "__init__")
        )
        call = (nn.Module, "__call__", self._call)
        return replaced_calls([call, *made], self._on_step_begin, self._on_step_end)

    def _make(self, part: str, begin: Any, made: Any, /, *args: Any, **options: Any) -> None:
        self._add(part, made)
        begin(made, *args, **options)

    def _add(self, part: str, found: Any) -> None:
        if all(one is not found for _, one in self._found):
            self._found.append((part, found))

    def _settle(self) -> None:
        """Take or withhold the state of what was made since, before anything of it is noted."""
        for part, one in self._found[self._num_settled :]:
            if self.mode == "straight":
                self.fresh.setdefault(part, []).append(copy.deepcopy(one.state_dict()))
            elif self.mode == part:
                one.load_state_dict(self.fresh[part].pop(0))
        self._num_settled = len(self._found)

    def _read_state(self, part: str) -> Facts:
        """Return the state of a part: digests of tensors, and numbers."""
        found: Facts = {}
        several = [one for kind, one in self._found if kind == part]
        for number, one in enumerate(several):
            state = one.state_dict()
            # Rates are noted apart. The groups may be the optimizer's own.
            state["param_groups"] = [one | {"lr": 0} for one in state.get("param_groups", ())]
            for name, value in leaves_of(state, str(number) if number else "").items():
                found[name] = digest(value) if isinstance(value, Tensor) else value
        return found

    def _digest_copies(self) -> list[list[str]]:
        """Return digests of other modules with the parameters of a model, such as averages."""
        # Modules that wait to be freed would count in one run and not in the other.
        gc.collect()
        models = [list(one.parameters()) for part, one in self._found if part == "model"]
        models.append([parameter for model in models for parameter in model])
        shapes = [[parameter.shape for parameter in model] for model in models]
        own = {*models[-1]}
        found = []
        for one in instances_of(nn.Module):
            if "_parameters" not in vars(one):
                continue
            parameters = list(one.parameters())
            is_copy = [parameter.shape for parameter in parameters] in shapes
            # Where no model is called, the shapes are those of a module without parameters.
            if parameters and is_copy and own.isdisjoint(parameters):
                found.append([digest(value) for value in (*parameters, *one.buffers())])
        return sorted(found)

    # Before the forward pass of a model.

    def _call(self, call: Any, module: nn.Module, /, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(module, *args, **options)
        # A call while modules are still made, as by parametrizations, is of no step.
        is_outer = not self._depth and any(part == "optimizer" for part, _ in self._found)
        is_trained = is_outer and module.training and torch.is_grad_enabled()
        if is_trained and next(module.parameters(), None) is not None:
            args, options = self._enter(module, args, options)
        self._depth += 1
        try:
            return call(module, *args, **options)
        finally:
            self._depth -= 1

    def _enter(self, root: nn.Module, args: Any, options: Any) -> Any:
        self._add("model", root)
        now = self._now
        is_first = not now["generators"]
        has_more = self._num_settled < len(self._found) or is_first
        self._settle()
        if is_first:
            now["generators"] = generator_digests()
        if has_more:
            # A model that was called before may have changed its buffers.
            now["model"] = self._read_state("model") | now["model"]
        first = self.fresh.setdefault((len(self.steps), len(now["data order"])), [])

        def meet(tensor: Tensor) -> Tensor:
            # The output of another module is no data.
            if tensor.grad_fn is not None:
                return tensor
            if self.mode == "straight":
                first.append(tensor.detach().clone())
            elif self.mode == "data order" and first:
                tensor = first.pop(0).to(tensor.device)
            return tensor

        given = tree_map_only(Tensor, meet, (args, options))
        # A batch may be an object of the user's, or hold arrays.
        digests = [digest(one) for one in tensors_of(given) if one.grad_fn is None]
        now["data order"].append(digests)
        return given

    # The optimizer.

    def _on_step_begin(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping += 1
        if self._stepping > 1:
            return
        self._settle()
        # The forward pass may follow, in a closure of the optimizer.
        self._now |= {part: self._read_state(part) for part in KINDS}
        self._now["rates"] = rates_of(optimizer)

    def _on_step_end(self, *_: Any) -> None:
        self._stepping -= 1
        if self._stepping:
            return
        after = self._read_state("model") | {"copies": self._digest_copies()}
        self.steps.append(self._now | {"after": after})
        self._now = _make_empty()
        if len(self.steps) == self.last:
            if self.mode == "straight":
                torch.save(self.fresh, self.path)
            self.when_enough()


def _make_empty() -> Facts:
    """Return what is noted of a step without a call of a model."""
    return {"data order": [], "model": {}, "generators": {}}
