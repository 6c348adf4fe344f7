"""Save and restore an optimizer's state by parameter name, in any order and sharding.

Names leave out the prefixes of wrappers such as DDP and `torch.compile`, so that a checkpoint loads
into a model that is wrapped differently, or not at all.

Proof: `python -m pytest tests/runs/test_state.py`.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from .format import TensorFacts
from .ranks import PARTIAL_LOAD_ADVICE, DamagedCheckpoint, StateMismatch
from .values import (
    CollectedTensors,
    Place,
    Stored,
    decode,
    elements_of,
    encode,
    memory_of,
    name_component,
)

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
        # A scripted module has no dict of its parts.
        module = module._modules[step] if module is not None and step in module._modules else None
    return ".".join(bare_path)


def _wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the attribute in which a wrapper holds a module, and the module."""
    names = ("module",) if isinstance(module, _PARALLEL_WRAPPERS) else _WRAPPED_ATTRIBUTES
    for name in names:
        if isinstance(inner := getattr(module, name, None), nn.Module):
            return name, inner
    return None


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Return the module that wrappers such as DDP and `torch.compile` hold."""
    while (wrapped := _wrapped(module)) is not None:
        module = wrapped[1]
    return module


def bare_names(model: nn.Module, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same mapping with bare names as keys."""
    renamed = {bare_name(model, name): value for name, value in names.items()}
    if len(renamed) != len(names):
        raise ValueError(
            "two of the model's tensors have the same name without the prefixes of wrappers: "
            "rename one of them"
        )
    return renamed


def same_memory(first: Tensor, second: Tensor) -> bool:
    """Return whether changing one tensor changes the other."""
    return first is second or memory_of(first) == memory_of(second) or not first.numel()


# The frozen base of a model, of which a checkpoint of adapters has a hash alone.


class FrozenBase:
    """The parameters that do not train, which `trained_only` leaves out of a checkpoint.

    The hash is computed again if a parameter is another one or was written to. A write through
    `.data` is not seen, so merge adapters after the last save.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._hashes: dict[Any, str] = {}

    def tensors(self) -> dict[str, Tensor]:
        named = self.model.named_parameters(remove_duplicate=False)
        frozen = {name: one.detach() for name, one in named if not one.requires_grad}
        return bare_names(self.model, frozen)

    def leave_out(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries that are not of the base, nor of a quantised parameter in it."""
        names = self.tensors().keys()
        return {name: value for name, value in state.items() if names.isdisjoint(_starts(name))}

    def content(self) -> dict[str, str]:
        """Return what a checkpoint has in place of the base."""
        parameters = [one for one in self.model.parameters() if not one.requires_grad]
        key = tuple((id(one), one._version) for one in parameters)
        if key not in self._hashes:
            self._hashes = {key: self._hash()}
        return {"hash": self._hashes[key]}

    def _hash(self) -> str:
        hasher = xxhash.xxh3_128()
        for name, tensor in sorted(self.tensors().items()):
            for piece in _pieces(tensor, name):
                elements: Any = piece.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                hasher.update(f"{name} {piece.dtype} {list(piece.shape)} ".encode())
                hasher.update(memoryview(elements))
        return hasher.hexdigest()


def require_base(saved: Any, base: FrozenBase | None) -> None:
    """Raise StateMismatch unless the model has the base that a checkpoint was saved on."""
    if type(saved) is not dict or type(saved.get("hash")) is not str:
        raise DamagedCheckpoint("the saved state has no hash of its base")
    if base is None:
        raise StateMismatch(
            "the checkpoint holds the parameters that train alone: load the base that they were "
            "trained on, and pass trained_only=True"
        )
    found = base.content()["hash"]
    if found != saved["hash"]:
        raise StateMismatch(
            f"the checkpoint was trained on another base: the hash of the frozen parameters was "
            f"{saved['hash']:.32} and is {found}; load the base that it was trained on"
        )


def _starts(name: str) -> Iterator[str]:
    """Yield the name and what begins it: an entry of a quantised weight is `weight.absmax`."""
    steps = name.split(".")
    for number in range(1, len(steps) + 1):
        yield ".".join(steps[:number])


def _pieces(tensor: Tensor, name: str) -> Iterator[Tensor]:
    """Yield the plain tensors of a frozen parameter; a quantised one has several."""
    if hasattr(tensor, "to_local") or tensor.is_meta:
        what = "without values (device meta)" if tensor.is_meta else "in shards"
        raise ValueError(
            f"trained_only hashes each frozen parameter, and {name} is {what}: leave it out"
        )
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield elements_of(tensor)
        return
    for attribute in flatten()[0]:
        yield from _pieces(getattr(tensor, attribute), f"{name}.{attribute}")


# Optimizer state keyed by parameter name, so that it loads in another order or sharding.

# Makes a tensor for a saved one.
MakeTensor = Callable[[Stored, TensorFacts], Tensor]


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
        self._class = type(optimizer).__name__

    def take(self, tensors: CollectedTensors) -> dict[str, Any]:
        """Put the state's tensors into `tensors`; return the rest."""
        additional = set(self.optimizer.state_dict()) - {"state", "param_groups"}
        if additional:
            raise ValueError(
                f"{self._class} keeps {', '.join(sorted(map(str, additional)))} besides "
                f"its state and groups, which would be lost: save it under "
                f"TrainingState(extra=...)"
            )

        parameters = {}
        for name, parameter in self._parameters.items():
            if entries := self.optimizer.state.get(parameter):
                parameters[name] = self._take_entries(name, entries, parameter, tensors)
        others = {key: value for key, value in self.optimizer.state.items() if not _is_tensor(key)}
        state_place = Place(f"{self._class}.state", f"{self.prefix[:-1]}/state")
        groups = []
        for index, group in enumerate(self.optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            place = Place(f"{self._class}.param_groups[{index}]", f"{self.prefix}group-{index}")
            params = [self._names[parameter] for parameter in group["params"]]
            groups.append({"params": params, "options": encode(options, place, tensors)})

        return {
            "class": self._class,
            "groups": groups,
            "parameters": parameters,
            "others": encode(others, state_place, tensors),
        }

    def _take_entries(
        self, name: str, entries: Any, parameter: Tensor, tensors: CollectedTensors
    ) -> list[Any]:
        """Return one parameter's state: keys, values and whether they are on the host.

        The last part of a tensor's name, up to a slash, has no dot, and the parameter no slash.
        """
        if not isinstance(entries, dict):
            raise ValueError(
                f"{self._class}.state[{name!r}] is a {type(entries).__name__}, not a dict: it "
                f"can't be saved"
            )
        prefix = self.prefix + name_component(name, 0)
        taken = []
        for number, (key, value) in enumerate(entries.items()):
            component = name_component(key, number).replace(".", "~3")
            place = Place(f"{self._class}.state[{name!r}][{key!r:.60}]", f"{prefix}.{component}")
            if _is_tensor(value) and value.shape == parameter.shape:
                # A load makes it of the parameter's class again.
                value = elements_of(value)
            on_host = _is_tensor(value) and value.device.type == "cpu" != parameter.device.type
            key_content = encode(key, Place(f"a key of {self._class}.state[{name!r}]", ""))
            taken.append([key_content, encode(value, place, tensors), on_host])
        return taken

    def add_to(self, add: Callable[[Any, MakeTensor], None], saved: Mapping[str, Any]) -> None:
        """Pass each saved value to `add`, with what makes a tensor that is not there yet.

        New tensors have the saved shapes and dtypes, and the parameters' sharding and device.
        """
        self._same_groups(saved)
        for name, entries in saved["parameters"].items():
            parameter = self._parameters[name]
            for key, value, on_host in entries:
                add(value, functools.partial(self._new, parameter, decode(key), on_host))
        add([saved["others"], *(entry["options"] for entry in saved["groups"])], _new_on_host)

    def _same_groups(self, saved: Mapping[str, Any]) -> None:
        """Raise StateMismatch where the saved class or parameter groups differ from these."""
        own_class = self._class
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

    def _new(
        self, parameter: Tensor, key: Any, on_host: bool, found: Stored, facts: TensorFacts
    ) -> Tensor:
        """Return a tensor for state of a parameter that the optimizer does not hold yet."""
        if on_host:
            return _new_on_host(found, facts)
        is_step = key == "step"
        is_strided = parameter.layout is torch.strided and not parameter.is_quantized
        if is_strided and tuple(parameter.shape) == facts.shape and not is_step:
            return torch.zeros_like(parameter, dtype=facts.dtype, requires_grad=False)

        options = self._options_of(parameter)
        # Torch keeps `step` on the host, except with capturable or fused.
        stays = is_step and not (options.get("capturable") or options.get("fused"))
        if stays and parameter.device.type != found.device:
            return _new_on_host(found, facts)
        return torch.zeros(facts.shape, dtype=facts.dtype, device=parameter.device)

    def _options_of(self, parameter: Tensor) -> dict[str, Any]:
        for group in self.optimizer.param_groups:
            if any(member is parameter for member in group["params"]):
                return group
        return {}

    def read(
        self, saved: Mapping[str, Any], tensors: Mapping[str, Tensor], fitting: Collection[str]
    ) -> "ReadState":
        """Return the saved state with these tensors in it; nothing is changed yet.

        `fitting` names the parameters that the checkpoint fits.
        """
        state: dict[Any, Any] = {}
        for name, entries in saved["parameters"].items():
            if name in fitting:
                pairs = [(decode(key), decode(value, tensors)) for key, value, _ in entries]
                state[self._parameters[name]] = dict(pairs)
        others = decode(saved["others"], tensors)
        options = [decode(entry["options"], tensors) for entry in saved["groups"]]
        if type(others) is not dict or any(type(group) is not dict for group in options):
            raise DamagedCheckpoint(f"the saved state of {self._class} is not made of mappings")
        return ReadState(state, others, options)

    def restore(self, read: "ReadState") -> None:
        """Replace the optimizer's state with what was read."""
        state = self.optimizer.state
        for key in [key for key in state if not _is_tensor(key)]:
            del state[key]
        for parameter in self._parameters.values():
            state.pop(parameter, None)
        state.update(read.parameters)
        state.update(read.others)
        for group, options in zip(self.optimizer.param_groups, read.options, strict=True):
            group.update(options)


@dataclass(frozen=True)
class ReadState:
    """The state of one optimizer, as it was saved."""

    parameters: Mapping[Any, dict[Any, Any]]
    # State under keys that are no parameters.
    others: Mapping[Any, Any]
    # The options of each group.
    options: Sequence[Mapping[str, Any]]


def _new_on_host(found: Stored, facts: TensorFacts) -> Tensor:
    return torch.zeros(facts.shape, dtype=facts.dtype)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
