"""Name a model's tensors the same under any wrapper.

Names leave out the prefixes of wrappers such as DDP and `torch.compile`, so that a checkpoint loads
into a model that is wrapped differently, or not at all.

Proof: `python -m pytest tests/runs/test_state.py`.
"""

from typing import Any

from torch import nn

from ..core.blocks import PARALLEL_WRAPPERS, WRAPPED_ATTRIBUTES
from .values import Facts, Values

# Tensor names without the prefixes of wrappers such as DDP and `torch.compile`.


def bare_name(model: nn.Module, name: str) -> str:
    """Return a name of `model.state_dict()` or `named_parameters()` without wrapper prefixes."""
    kept = []
    module: Any = model
    for step in name.split("."):
        is_wrapped = step == "module" and isinstance(module, PARALLEL_WRAPPERS)
        if step not in WRAPPED_ATTRIBUTES and not is_wrapped:
            kept.append(step)
        # Some modules make up names for their state, and some wrappers remove their own from them.
        module = getattr(module, step, None)
    return ".".join(kept)


def bare_names(model: nn.Module, names: Values) -> Facts:
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
