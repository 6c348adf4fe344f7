"""Classify dispatcher operations: cost, random numbers, writes in place.

Proof: `python -m pytest tests/test_operations.py`.
"""

import difflib
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

Operation = OpOverload | HigherOrderOperator


def _overloads(namespace: str, *names: str) -> frozenset[Operation]:
    """Return the overloads of those named operations that this version of torch has."""
    space = getattr(torch.ops, namespace)
    packets = [getattr(space, name) for name in names if hasattr(space, name)]
    return frozenset(operation for packet in packets for operation in _functional(packet))


def _functional(packet: OpOverloadPacket) -> list[OpOverload]:
    """Return the overloads that do not write in place, or all if every overload does."""
    overloads: list[OpOverload] = [getattr(packet, name) for name in packet.overloads()]
    return [overload for overload in overloads if not overload._schema.is_mutable] or overloads


def _higher_order(*names: str) -> frozenset[Operation]:
    return frozenset(
        getattr(torch.ops.higher_order, name)
        for name in names
        if hasattr(torch.ops.higher_order, name)
    )


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_OTHERS = "_scaled_dot_product_fused_attention_overrideable"
MATMULS = _overloads(
    "aten", "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"
)
ATTENTION = _overloads(
    "aten",
    *(f"_scaled_dot_product_{kernel}" for kernel in _KERNELS),
    "_scaled_dot_product_fused_attention_overrideable",
) | _higher_order("flex_attention")
CONVOLUTIONS = _overloads(
    "aten", "convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"
)
COLLECTIVES = _overloads(
    "_c10d_functional",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
)

# Autograd treats the outputs of these as new tensors, although they are views.
SPLITS = _overloads("aten", "unsafe_split", "unsafe_split_with_sizes")

EXPENSIVE = MATMULS | ATTENTION | CONVOLUTIONS | COLLECTIVES
FAMILIES = {
    "matmul": MATMULS,
    "attention": ATTENTION,
    "convolution": CONVOLUTIONS,
    "collective": COLLECTIVES,
}


@functools.cache
def family_of(operation: Operation) -> str | None:
    """Return the family of an expensive operation, or None for any other.

    For the same call, different devices run different operations of one family.
    """
    return next((family for family, members in FAMILIES.items() if operation in members), None)


def find_operations(named: Iterable[Any]) -> frozenset[Operation]:
    """Find operations given as overloads, packets, or text (`aten.mm`, `aten.mm.default`)."""
    found: set[Operation] = set()
    for item in named:
        operation = _by_name(item) if isinstance(item, str) else item
        if isinstance(operation, OpOverloadPacket):
            found.update(_functional(operation))
        elif isinstance(operation, Operation):
            found.add(operation)
        else:
            raise ValueError(
                f"an operation is named as torch.ops.aten.mm or 'aten.mm', got {item!r}"
            )
    return frozenset(found)


def _by_name(text: str) -> Any:
    namespace, *names = text.removeprefix("torch.ops.").split(".")
    if len(names) not in (1, 2):
        raise ValueError(f"an operation is named as 'aten.mm' or 'aten.mm.default', got {text!r}")

    space = getattr(torch.ops, namespace)
    if not hasattr(space, names[0]):
        near = difflib.get_close_matches(names[0], dir(space), n=3)
        suggestion = f"; did you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"torch has no operation {text!r}{suggestion}")

    packet = getattr(space, names[0])
    if len(names) == 1:
        return packet
    if names[1] not in packet.overloads():
        raise ValueError(
            f"{namespace}.{names[0]} has no overload {names[1]!r}; it has "
            f"{', '.join(packet.overloads())}"
        )
    return getattr(packet, names[1])


def draws(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call draws random numbers; attention does so only with dropout."""
    may_draw, index, default = _drawing(operation)
    if index is None:
        return may_draw
    positional = args[index] if index < len(args) else default
    return bool(kwargs.get("dropout_p", positional))


@functools.cache
def _drawing(operation: Operation) -> tuple[bool, int | None, Any]:
    """Return whether an operation may draw random numbers.

    If that depends on `dropout_p`, the index and the default of that argument follow; else None.
    """
    if (
        not isinstance(operation, OpOverload)
        or torch.Tag.nondeterministic_seeded not in operation.tags
    ):
        return False, None, None
    for index, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            return True, index, argument.default_value
    return True, None, None


def writes_in_place(operation: Operation) -> bool:
    """Return whether the operation writes into one of its arguments."""
    return isinstance(operation, OpOverload) and operation._schema.is_mutable


def is_cheap(operation: Operation) -> bool:
    """Return whether an operation is elementwise, a reduction or a normalization.

    These do little arithmetic for each value that they write.
    """
    if not isinstance(operation, OpOverload):
        return False
    kinds = {"pointwise", "reduction"}
    return any(tag.name in kinds for tag in operation.tags) or operation in _NORMALIZATIONS


_NORMALIZATIONS = _overloads(
    "aten",
    "native_layer_norm",
    "native_group_norm",
    "_fused_rms_norm",
    "_softmax",
    "_log_softmax",
    "native_batch_norm",
)
