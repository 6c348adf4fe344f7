"""The sums of gradients and of what an optimizer's step does to the weights, each parameter once.

Proof: `python -m pytest tests/test_grad_flow.py`.
"""

import torch
from torch import Tensor, nn

from .flow_ranks import add_over_ranks, dense, groups_of
from .flow_sums import SUMS, empty_sums, squares_of, sums_of

SQUARES = SUMS.index("squares")


class ParameterSums:
    """Of the trainable parameters by name. `read` may be called after each backward: the last call counts."""

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        self.names, self._parameters = list(named), list(named.values())
        self._index = {parameter: index for index, parameter in enumerate(self._parameters)}
        self._gradients = self._rows(len(SUMS))
        self._moves = self._rows(2)  # the squares of weights, and of how far they moved
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
        """Nothing was read, and nothing has moved."""
        self.has_gradient: list[bool] | None = None
        self.moved = [False] * len(self._parameters)
        self.met = [False] * len(self._parameters)  # by an optimizer
        self._kept.clear()
        for table in (self._gradients, self._moves, self._at_step):
            for rows in table.values():
                rows.zero_()

    def that_have(self) -> list[bool]:
        """Whether each parameter has a gradient now."""
        return [parameter.grad is not None for parameter in self._parameters]

    def were_read(self) -> bool:
        """Whether the gradients that were read are those that are there."""
        return self.has_gradient == self.that_have()

    def are_gone(self) -> bool:
        """Whether there were gradients when they were read, and there are none now."""
        return any(self.has_gradient or ()) and not any(self.that_have())

    @torch.no_grad()
    def read(self, scale: Tensor | None = None) -> None:
        """Count the gradients as they stand; `scale` is what the loss was multiplied by."""
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
        """Sum up the gradients that an optimizer gets, and keep its weights while it steps."""
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
        """How far the weights moved; what was kept of them is let go."""
        for index in self._of(optimizer):
            before = self._kept.pop(index, None)
            if before is not None:
                parameter = self._parameters[index]
                row, after = self._moves[parameter.device][index], dense(parameter.detach())
                row[0].copy_(squares_of(before))
                row[1].copy_(squares_of(after, less=before))
                self.moved[index] = True

    def _of(self, optimizer: torch.optim.Optimizer) -> list[int]:
        members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [self._index[member] for member in dict.fromkeys(members) if member in self._index]

    def tables(self) -> list[Tensor]:
        """For each device one row for each parameter: the sums, the moves, the squares that the optimizer got. Where
        parameters are divided among ranks the rows are added up, so every rank has to come by."""
        found = []
        for device, gradients in self._gradients.items():
            table = torch.cat([gradients, self._moves[device], self._at_step[device]], 1)
            here = [parameter.device == device for parameter in self._parameters]
            groups = [group if at else [] for group, at in zip(self._groups, here, strict=True)]
            add_over_ranks(table, groups)
            found.append(table)
        return found


def _squared(scale: Tensor | None, row: Tensor) -> Tensor:
    return torch.ones_like(row[0]) if scale is None else scale.detach().to(row).square().reshape(())
