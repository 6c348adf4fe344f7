"""Conversion of the sums on devices to a step's record, with one transfer per device.

Proof: `python -m pytest tests/test_grad_flow.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .flow_activations import Activations
from .flow_layers import Layer
from .flow_parameters import ParameterSums
from .flow_record import LayerFlow, Spread, StepFlow, Update
from .flow_sums import SUMS

NUM = len(SUMS)


def make_record(
    layers: Sequence[Layer],
    activations: Activations,
    parameters: ParameterSums,
    *,
    step: int,
    stepped: bool,
    read_at: str,
    overflowed: Sequence[Tensor],
    ranks: Any,
    notes: tuple[str, ...],
) -> StepFlow:
    """Make the record of a step; this waits for the device once."""
    tables = [table.clone() for table in activations.tables()]
    if ranks is not None:
        for table in tables:
            dist.all_reduce(table, group=ranks)
    activation_rows = _add_up(tables, len(layers))
    rows = _add_up(parameters.tables(), len(parameters.names))

    by_name = dict(zip(parameters.names, rows, strict=True))
    has = dict(zip(parameters.names, parameters.has_gradient or [], strict=True))
    moved = dict(zip(parameters.names, parameters.moved, strict=True))
    # A fused optimizer's step is always called, and does nothing if the scaler found an overflow.
    stepped = stepped and not any(bool(value.item()) for value in overflowed)

    flows = {}
    for layer, sums, calls in zip(layers, activation_rows, activations.calls, strict=True):
        names = layer.parameters
        flows[layer.name] = LayerFlow(
            activation=_spread([sums]) if calls else None,
            calls=calls,
            gradient=_spread([by_name[name] for name in names if has[name]]),
            update=_update([by_name[name] for name in names if moved[name]]) if stepped else None,
            without_gradient=tuple(name for name in names if not has[name]),
            tied=layer.tied,
            frozen=layer.frozen,
            is_block=layer.is_block,
        )

    counted_rows = [
        row
        for name, row, met in zip(parameters.names, rows, parameters.met, strict=True)
        if has[name] and met
    ]
    return StepFlow(
        step=step,
        stepped=stepped,
        layers=flows,
        order=tuple(layers[index].name for index in activations.order),
        forwards=activations.num_forwards,
        gradient=_spread([row for name, row in by_name.items() if has[name]]),
        gradients_read=read_at,
        scaled=_gradient_scaling(counted_rows),
        ranks=1 if ranks is None else dist.get_world_size(ranks),
        notes=notes,
    )


def _gradient_scaling(rows: Sequence[Sequence[float]]) -> float | None:
    """Return the ratio of the gradient norm at the optimizer's step to that after backward."""
    read = sum(row[NUM - 1] for row in rows)
    at_step = sum(row[NUM + 2] for row in rows)
    return (at_step / read) ** 0.5 if read else None


def _add_up(tables: Sequence[Tensor], num_rows: int) -> list[list[float]]:
    """Sum the tables of all devices, and return their rows."""
    if not tables:
        return [[0.0] * (NUM + 3)] * num_rows
    first, *others = [table.cpu() for table in tables]
    rows: list[list[float]] = sum(others, first).tolist()
    return rows


def _spread(rows: Sequence[Sequence[float]]) -> Spread | None:
    if not rows:
        return None
    elements, zeros, nonfinite, squares, *_ = map(sum, zip(*rows, strict=True))
    return Spread(int(elements), int(zeros), int(nonfinite), squares)


def _update(rows: Sequence[Sequence[float]]) -> Update | None:
    if not rows:
        return None
    weights = sum(row[NUM] for row in rows)
    distances = sum(row[NUM + 1] for row in rows)
    return Update(weights**0.5, distances**0.5)
