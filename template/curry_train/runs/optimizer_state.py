"""An optimizer's state by the names of its parameters, so that it finds them again in another order or sharding.

Torch's own `get_optimizer_state_dict` takes a step to create state where none is, which leaves Adam's count at 1 before
training; `load_state_dict` casts state to the parameter's dtype, which rounds float32 moments of bfloat16 weights.
Here state is taken and put back as it is; a test fails when torch no longer does either.
Proof: `python -m pytest tests/test_state.py`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .errors import PARTLY, StateMismatch
from .plain_values import decode, encode
from .safe_reader import TensorFacts
from .tensor_names import bare_name


def parameter_names(model: nn.Module) -> dict[Any, str]:
    """The bare name of each parameter."""
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "FSDP1 keeps parameters in flat pieces without names: use fully_shard (FSDP2)"
            )
    return {parameter: bare_name(model, name) for name, parameter in model.named_parameters()}


class OptimizerState:
    """One optimizer; `prefix` begins its names on the disk."""

    def __init__(self, optimizer: Optimizer, names: Mapping[Any, str], prefix: str) -> None:
        self.optimizer, self.prefix = optimizer, prefix
        self._parameters = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in names:
                    raise ValueError(
                        f"group {index} of {type(optimizer).__name__} has a parameter of shape {list(parameter.shape)} "
                        f"that the model does not have: save the module that holds it"
                    )
                self._parameters[names[parameter]] = parameter
        self._names = names
        self._by_owner: dict[str, list[str]] = {}

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Put the state's tensors into `tensors`; returns what is JSON."""
        content = set(self.optimizer.state_dict()) - {"state", "param_groups"}
        if content:
            raise ValueError(
                f"{type(self.optimizer).__name__} keeps {', '.join(sorted(content))} beside its state and groups, "
                f"which would be lost: save it under TrainingState(extra=...)"
            )
        state: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                path = f"{self.prefix}{name}.{key}"
                if isinstance(value, Tensor):
                    tensors[path] = value.detach()
                else:
                    state[f"{name}.{key}"] = encode(value, path)
        groups = []
        for index, group in enumerate(self.optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            held = encode(options, f"{self.prefix}group-{index}", tensors=tensors)
            groups.append(
                {
                    "params": [self._names[parameter] for parameter in group["params"]],
                    "options": held,
                }
            )
        return {"class": type(self.optimizer).__name__, "groups": groups, "state": state}

    def targets(
        self, saved: Mapping[str, Any], facts: Mapping[str, TensorFacts]
    ) -> dict[str, Tensor]:
        """Tensors to fill, of the saved shapes and dtypes, placed and sharded as the parameters are."""
        self._same_groups(saved)
        found, self._by_owner = {}, {}
        for name in facts:
            if name.startswith(self.prefix):
                owner, _, key = name.rpartition(".")
                self._by_owner.setdefault(f"{owner}.", []).append(key)
        for name, parameter in self._parameters.items():
            begin = f"{self.prefix}{name}."
            for key in self._by_owner.get(begin, []):
                held = self.optimizer.state.get(parameter, {}).get(key)
                found[begin + key] = self._target(parameter, key, held, facts[begin + key])
        for index, group in enumerate(self.optimizer.param_groups):
            begin = f"{self.prefix}group-{index}."
            for key in self._by_owner.get(begin, []):
                held = group.get(key)
                found[begin + key] = self._target(torch.empty(()), key, held, facts[begin + key])
        return found

    def _same_groups(self, saved: Mapping[str, Any]) -> None:
        own = [
            {self._names[parameter] for parameter in group["params"]}
            for group in self.optimizer.param_groups
        ]
        groups = [set(group["params"]) for group in saved["groups"]]
        if saved["class"] != type(self.optimizer).__name__:
            raise StateMismatch(
                f"the state is of {saved['class']}, and the optimizer is {type(self.optimizer).__name__}: make the one "
                f"that was saved, or {PARTLY}"
            )
        if own != groups:
            sizes = [len(group) for group in groups], [len(group) for group in own]
            odd = sorted(set().union(*groups) ^ set().union(*own))[:3]
            raise StateMismatch(
                f"{saved['class']} was saved with groups of {sizes[0]} parameters and has {sizes[1]}"
                f"{', such as ' + ', '.join(odd) if odd else ', divided otherwise'}: build its groups as at the save"
            )

    def _target(self, parameter: Tensor, key: str, held: Any, facts: TensorFacts) -> Tensor:
        if (
            isinstance(held, Tensor)
            and tuple(held.shape) == facts.shape
            and held.dtype == facts.dtype
        ):
            return held
        if tuple(parameter.shape) == facts.shape and key != "step":
            return torch.zeros_like(parameter, dtype=facts.dtype, requires_grad=False)
        group = next(
            (g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"])), {}
        )
        on_host = key == "step" and not (
            group.get("capturable") or group.get("fused")
        )  # as torch places it
        return torch.zeros(
            facts.shape, dtype=facts.dtype, device="cpu" if on_host else parameter.device
        )

    def restore(self, saved: Mapping[str, Any], filled: Mapping[str, Tensor]) -> None:
        """Make the filled tensors and the saved values the optimizer's state, and nothing else."""
        plain: dict[str, dict[str, Any]] = {}
        for full, value in saved["state"].items():
            name, _, key = full.rpartition(".")
            plain.setdefault(name, {})[key] = decode(value, tensors=filled)
        for name, parameter in self._parameters.items():
            begin = f"{self.prefix}{name}."
            state = {
                key: filled[begin + key]
                for key in self._by_owner.get(begin, [])
                if begin + key in filled
            }
            state |= plain.get(name, {})
            self.optimizer.state.pop(parameter, None)
            if state:
                self.optimizer.state[parameter] = state
        for group, entry in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            group.update(decode(entry["options"], tensors=filled))


def no_schedule_forgotten(optimizer: Any, scheduler: Any, extra: Mapping[str, Any]) -> None:
    """Raise where an optimizer is scheduled, which its groups show by `initial_lr`, and no scheduler would be saved."""
    held = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    scheduled = any("initial_lr" in group for one in held for group in one.param_groups)
    if (
        scheduled
        and scheduler is None
        and not any(isinstance(one, LRScheduler) for one in extra.values())
    ):
        raise ValueError(
            "the optimizer has a learning rate scheduler that saving() was not given, and that would begin anew at "
            "each resume: saving(model, optimizer, scheduler, ...), or a list of schedulers"
        )
