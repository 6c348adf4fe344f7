"""Name a model's tensors the same under any wrapper, and hash the parameters that do not train.

Names leave out the prefixes of wrappers such as DDP and `torch.compile`, so that a checkpoint loads
into a model that is wrapped differently, or not at all.

Proof: `python -m pytest tests/runs/test_state.py tests/runs/test_trained_only.py`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..core.digest import digest
from .layout import hash_bytes
from .ranks import DamagedCheckpoint, StateMismatch
from .values import elements_of

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


def parameter_names(model: nn.Module) -> dict[Any, str]:
    """Map each parameter to its name without wrapper prefixes."""
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "FSDP1 keeps parameters in flat pieces without names: use fully_shard (FSDP2)"
            )
    return {parameter: bare_name(model, name) for name, parameter in model.named_parameters()}


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
        lines = [
            f"{name} {digest(piece)}"
            for name, tensor in sorted(self.tensors().items())
            for piece in _pieces(tensor, name)
        ]
        return hash_bytes("\n".join(lines).encode())


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
    if tensor.is_meta:
        raise ValueError(
            f"trained_only hashes each frozen parameter, and {name} is without values (device "
            f"meta): leave it out"
        )
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or hasattr(tensor, "full_tensor"):
        yield elements_of(tensor)
        return
    for attribute in flatten()[0]:
        yield from _pieces(getattr(tensor, attribute), f"{name}.{attribute}")
