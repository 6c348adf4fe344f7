"""Save and restore an optimizer's state by parameter name, in any order and sharding.

Names leave out the prefixes of wrappers such as DDP and `torch.compile`, so that a checkpoint loads
into a model that is wrapped differently, or not at all.

Proof: `python -m pytest tests/runs/test_state.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .format import TensorFacts
from .random_state import (
    decode,
    encode,
)
from .ranks import PARTIAL_LOAD_ADVICE, StateMismatch

# Tensor names without the prefixes of wrappers such as DDP and `torch.compile`.

_WRAPPED_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_PARALLEL_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def bare_name(model: nn.Module, name: str) -> str:
    """Return a name of `model.state_dict()` or `named_parameters()` without wrapper prefixes."""
    module: Any = model
    bare_path = []
    for step in name.split("."):
        # Some wrappers remove their attribute from the name with hooks of their own.
        while (
            module is not None
            and step not in module._modules
            and (wrapped := _wrapped(module)) is not None
        ):
            module = wrapped[1]

        wrapped = _wrapped(module) if module is not None else None
        if wrapped is None or step != wrapped[0]:
            bare_path.append(step)
        module = module._modules.get(step) if module is not None else None
    return ".".join(bare_path)


def _wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the attribute in which a wrapper holds a module, and the module."""
    names = ("module",) if isinstance(module, _PARALLEL_WRAPPERS) else _WRAPPED_ATTRIBUTES
    for name in names:
        if isinstance(inner := module._modules.get(name), nn.Module):
            return name, inner
    return None


def bare_names(model: nn.Module, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same mapping with bare names as keys."""
    renamed = {bare_name(model, name): value for name, value in names.items()}
    if len(renamed) != len(names):
        raise ValueError(
            "two of the model's tensors have the same name without the prefixes of wrappers: "
            "rename one of them"
        )
    return renamed


def split_ties(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor under its first name, and each further name with the first one."""
    first: dict[Any, str] = {}
    own: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors.items():
        identity = _identity(tensor)
        if identity in first:
            ties[name] = first[identity]
        else:
            own[name] = tensor
            first[identity] = name
    return own, ties


def same_memory(first: Tensor, second: Tensor) -> bool:
    """Return whether changing one tensor changes the other."""
    return first is second or _identity(first) == _identity(second) or not first.numel()


def _identity(tensor: Tensor) -> Any:
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    data = local() if local else tensor
    if not data.numel() or data.is_meta:
        return object()
    return (
        data.device,
        data.untyped_storage().data_ptr(),
        data.storage_offset(),
        data.shape,
        data.stride(),
        data.dtype,
    )


# Optimizer state keyed by parameter name, so that it loads in another order or sharding.


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
                f"{saved['class']}, or {PARTIAL_LOAD_ADVICE}"
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
