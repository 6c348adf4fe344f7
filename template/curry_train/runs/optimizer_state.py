"""Optimizer state keyed by parameter name, so that it loads in another order or sharding.

Torch's own `get_optimizer_state_dict` takes a step to create missing state, which leaves Adam's
step count at 1 before training; `load_state_dict` casts state to the parameter's dtype, which
rounds the float32 moments of bfloat16 weights. Here state is saved and restored unchanged; a test
fails when torch no longer does either.
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
    """Map each parameter to its name without wrapper prefixes."""
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "FSDP1 keeps parameters in flat pieces without names: use fully_shard (FSDP2)"
            )
    return {parameter: bare_name(model, name) for name, parameter in model.named_parameters()}


class OptimizerState:
    """Saves and restores one optimizer; `prefix` starts the names of its tensors on disk."""

    def __init__(self, optimizer: Optimizer, names: Mapping[Any, str], prefix: str) -> None:
        self.optimizer = optimizer
        self.prefix = prefix
        self._parameters = {}

        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in names:
                    raise ValueError(
                        f"group {index} of {type(optimizer).__name__} has a parameter of shape "
                        f"{list(parameter.shape)} that the model does not have: save the module "
                        f"that holds it"
                    )
                self._parameters[names[parameter]] = parameter

        self._names = names
        self._by_owner: dict[str, list[str]] = {}

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Put the state's tensors into `tensors`; return the rest as JSON."""
        additional = set(self.optimizer.state_dict()) - {"state", "param_groups"}
        if additional:
            raise ValueError(
                f"{type(self.optimizer).__name__} keeps {', '.join(sorted(additional))} besides "
                f"its state and groups, which would be lost: save it under "
                f"TrainingState(extra=...)"
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
            path = f"{self.prefix}group-{index}"
            groups.append(
                {
                    "params": [self._names[parameter] for parameter in group["params"]],
                    "options": encode(options, path, tensors=tensors),
                }
            )

        return {"class": type(self.optimizer).__name__, "groups": groups, "state": state}

    def targets(
        self, saved: Mapping[str, Any], facts: Mapping[str, TensorFacts]
    ) -> dict[str, Tensor]:
        """Return tensors to fill, with the saved shapes and dtypes and the parameters' sharding."""
        self._same_groups(saved)

        self._by_owner = {}
        for name in facts:
            if name.startswith(self.prefix):
                owner, _, key = name.rpartition(".")
                self._by_owner.setdefault(f"{owner}.", []).append(key)

        targets = {}
        for name, parameter in self._parameters.items():
            begin = f"{self.prefix}{name}."
            for key in self._by_owner.get(begin, []):
                current = self.optimizer.state.get(parameter, {}).get(key)
                targets[begin + key] = self._target(parameter, key, current, facts[begin + key])

        for index, group in enumerate(self.optimizer.param_groups):
            begin = f"{self.prefix}group-{index}."
            for key in self._by_owner.get(begin, []):
                targets[begin + key] = self._target(
                    torch.empty(()), key, group.get(key), facts[begin + key]
                )
        return targets

    def _same_groups(self, saved: Mapping[str, Any]) -> None:
        """Raise StateMismatch where the saved class or parameter groups differ from these."""
        own_class = type(self.optimizer).__name__
        if saved["class"] != own_class:
            raise StateMismatch(
                f"the state is of {saved['class']}, but the optimizer is {own_class}: create a "
                f"{saved['class']}, or {PARTLY}"
            )

        own_groups = []
        for group in self.optimizer.param_groups:
            own_groups.append({self._names[parameter] for parameter in group["params"]})
        saved_groups = [set(group["params"]) for group in saved["groups"]]
        if own_groups == saved_groups:
            return

        saved_sizes = [len(group) for group in saved_groups]
        own_sizes = [len(group) for group in own_groups]
        unmatched = sorted(set().union(*saved_groups) ^ set().union(*own_groups))[:3]
        difference = ", with the parameters divided differently"
        if unmatched:
            difference = f", with other parameters, such as {', '.join(unmatched)}"
        raise StateMismatch(
            f"{saved['class']} was saved with groups of {saved_sizes} parameters and has "
            f"{own_sizes}{difference}: build its groups as at the save"
        )

    def _target(self, parameter: Tensor, key: str, current: Any, facts: TensorFacts) -> Tensor:
        if (
            isinstance(current, Tensor)
            and tuple(current.shape) == facts.shape
            and current.dtype == facts.dtype
        ):
            return current
        if tuple(parameter.shape) == facts.shape and key != "step":
            return torch.zeros_like(parameter, dtype=facts.dtype, requires_grad=False)

        options = self._options_of(parameter)
        # Torch keeps `step` on the host, except with capturable or fused.
        on_host = key == "step" and not (options.get("capturable") or options.get("fused"))
        return torch.zeros(
            facts.shape, dtype=facts.dtype, device="cpu" if on_host else parameter.device
        )

    def _options_of(self, parameter: Tensor) -> dict[str, Any]:
        for group in self.optimizer.param_groups:
            if any(member is parameter for member in group["params"]):
                return group
        return {}

    def restore(self, saved: Mapping[str, Any], filled: Mapping[str, Tensor]) -> None:
        """Replace the optimizer's state with the filled tensors and the saved values."""
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
    """Raise if the optimizer has a learning rate scheduler that would not be saved.

    A scheduler leaves `initial_lr` in the optimizer's groups.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    scheduled = any("initial_lr" in group for one in optimizers for group in one.param_groups)
    saved_as_extra = any(isinstance(value, LRScheduler) for value in extra.values())
    if scheduled and scheduler is None and not saved_as_extra:
        raise ValueError(
            "the optimizer has a learning rate scheduler that saving() was not given, and that "
            "would start over at each resume: call saving(model, optimizer, scheduler, ...), or "
            "pass a list of schedulers"
        )
