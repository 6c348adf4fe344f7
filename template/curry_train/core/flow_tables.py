"""From the sums on devices to the record of one step: one transfer for each device, and none before.

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
    """Wait for the device, once, and say what was counted."""
    tables = [table.clone() for table in activations.tables()]
    if ranks is not None:
        for table in tables:
            dist.all_reduce(table, group=ranks)
    seen = _add_up(tables, len(layers))
    rows = _add_up(parameters.tables(), len(parameters.names))
    by_name = dict(zip(parameters.names, rows, strict=True))
    has = dict(zip(parameters.names, parameters.has_gradient or [], strict=True))
    moved = dict(zip(parameters.names, parameters.moved, strict=True))
    # A fused optimizer is asked to step in any case, and does nothing where the scaler has found an overflow.
    stepped = stepped and not any(bool(value.item()) for value in overflowed)
    flows = {}
    for layer, sums, calls in zip(layers, seen, activations.calls, strict=True):
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
    total = _spread([row for name, row in by_name.items() if has[name]])
    met = [
        has[name] and by_optimizer
        for name, by_optimizer in zip(by_name, parameters.met, strict=True)
    ]
    pairs = [(row[NUM - 1], row[NUM + 2]) for row, counts in zip(rows, met, strict=True) if counts]
    read, got = (sum(squares) for squares in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    return StepFlow(
        step=step,
        stepped=stepped,
        layers=flows,
        order=tuple(layers[index].name for index in activations.order),
        forwards=activations.num_forwards,
        gradient=total,
        gradients_read=read_at,
        scaled=(got / read) ** 0.5 if read else None,
        ranks=1 if ranks is None else dist.get_world_size(ranks),
        notes=notes,
    )


def _add_up(tables: Sequence[Tensor], num_rows: int) -> list[list[float]]:
    """The rows of all devices together."""
    if not tables:
        return [[0.0] * (NUM + 3)] * num_rows
    first, *others = [table.cpu() for table in tables]
    found: list[list[float]] = sum(others, first).tolist()
    return found


def _spread(rows: Sequence[Sequence[float]]) -> Spread | None:
    if not rows:
        return None
    elements, zeros, nonfinite, squares = (
        sum(column) for column in list(zip(*rows, strict=True))[:NUM]
    )
    return Spread(int(elements), int(zeros), int(nonfinite), squares)


def _update(rows: Sequence[Sequence[float]]) -> Update | None:
    if not rows:
        return None
    weights, distances = (sum(row[column] for row in rows) for column in (NUM, NUM + 1))
    return Update(weights**0.5, distances**0.5)
