"""Statistics of gradients and of the optimizer's updates, for each parameter once.

Proof: `python -m pytest tests/test_grad_flow.py`.
"""

import torch
from torch import Tensor, nn

from .flow_ranks import add_over_ranks, dense, groups_of
from .flow_sums import SUMS, empty_sums, squares_of, sums_of

SQUARES = SUMS.index("squares")


class ParameterSums:
    """Sums for the trainable parameters, by name.

    `read` may be called after each backward; the last call counts.
    """

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        self.names = list(named)
        self._parameters = list(named.values())
        self._index = {parameter: index for index, parameter in enumerate(self._parameters)}
        self._gradients = self._rows(len(SUMS))
        # Sums of squares of the weights, and of their change in a step.
        self._moves = self._rows(2)
        # Sum of squares of the gradients that the optimizer gets.
        self._at_step = self._rows(1)
        self._groups = [groups_of(parameter) for parameter in self._parameters]
        self._kept: dict[int, Tensor] = {}
        self.start()

    def _rows(self, columns: int) -> dict[torch.device, Tensor]:
        devices = {parameter.device for parameter in self._parameters}
        return {
            device: empty_sums(len(self._parameters), device)[:, :columns].clone()
            for device in devices
        }

    def start(self) -> None:
        """Reset all sums."""
        self.has_gradient: list[bool] | None = None
        self.moved = [False] * len(self._parameters)
        # Whether an optimizer has stepped with a gradient of the parameter.
        self.met = [False] * len(self._parameters)
        self._kept.clear()
        for table in (self._gradients, self._moves, self._at_step):
            for rows in table.values():
                rows.zero_()

    def that_have(self) -> list[bool]:
        """Return for each parameter whether it has a gradient now."""
        return [parameter.grad is not None for parameter in self._parameters]

    def were_read(self) -> bool:
        """Return whether the same parameters have gradients as at the last `read`."""
        return self.has_gradient == self.that_have()

    def are_gone(self) -> bool:
        """Return whether the last `read` found gradients and there are none now."""
        return any(self.has_gradient or ()) and not any(self.that_have())

    @torch.no_grad()
    def read(self, scale: Tensor | None = None) -> None:
        """Sum up the current gradients; `scale` is the loss scale, which is divided out."""
        self.has_gradient = self.that_have()
        for index, parameter in enumerate(self._parameters):
            row = self._gradients[parameter.device][index]
            row.zero_()
            if parameter.grad is not None:
                sums = sums_of(parameter.grad)
                row.add_(sums.to(row.device))
                row[SQUARES].div_(_squared(scale, row))

    @torch.no_grad()
    def before_step(
        self, optimizer: torch.optim.Optimizer, *, updates: bool, scale: Tensor | None = None
    ) -> None:
        """Sum up the gradients that an optimizer gets; with `updates`, copy its weights."""
        for index in self._of(optimizer):
            parameter = self._parameters[index]
            if parameter.grad is not None:
                row = self._at_step[parameter.device][index]
                self.met[index] = True
                row.copy_(squares_of(parameter.grad).to(row.device) / _squared(scale, row))
            if updates:
                self._kept[index] = dense(parameter.detach()).clone()

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Sum up the change of the weights, and free their copies."""
        for index in self._of(optimizer):
            before = self._kept.pop(index, None)
            if before is not None:
                parameter = self._parameters[index]
                after = dense(parameter.detach())
                row = self._moves[parameter.device][index]
                row[0].copy_(squares_of(before))
                row[1].copy_(squares_of(after, less=before))
                self.moved[index] = True

    def _of(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Return the indices of the parameters that an optimizer holds."""
        members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [self._index[member] for member in dict.fromkeys(members) if member in self._index]

    def tables(self) -> list[Tensor]:
        """Return one table per device, with one row per parameter.

        Columns are the sums, the moves, and the squares at the optimizer's step. Rows of sharded
        parameters are summed over ranks, so every rank has to call this.
        """
        tables = []
        for device, gradients in self._gradients.items():
            table = torch.cat([gradients, self._moves[device], self._at_step[device]], 1)
            groups = [
                parameter_groups if parameter.device == device else []
                for parameter, parameter_groups in zip(self._parameters, self._groups, strict=True)
            ]
            add_over_ranks(table, groups)
            tables.append(table)
        return tables


def _squared(scale: Tensor | None, row: Tensor) -> Tensor:
    """Return the square of the loss scale as a scalar like the elements of `row`, 1 for None."""
    if scale is None:
        return torch.ones_like(row[0])
    return scale.detach().to(row).square().reshape(())
