"""Make a small model of modules and a function."""

from collections.abc import Callable

from torch import Tensor, nn


class Wrapped(nn.Module):
    """Modules under a forward that is a function of this module and its input."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs) -> Tensor:
        return self.function(self, *inputs)
