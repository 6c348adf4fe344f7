"""Optimizers for memory plans: torch's own, or any other by its state bytes per parameter.

Proof: `python -m pytest tests/test_estimate.py`.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.nearest import did_you_mean


class BytesForEach(torch.optim.Optimizer):
    """Stand-in for an optimizer, with a given number of state bytes per parameter.

    While it steps it also allocates one gradient at a time in float32.
    """

    def __init__(self, parameters: Iterable[Tensor], *, num_bytes: float) -> None:
        self.num_bytes = num_bytes
        super().__init__(parameters, {})

    def __deepcopy__(self, memo: dict[int, Any]) -> "BytesForEach":
        parameters = [memo.get(id(p), p) for group in self.param_groups for p in group["params"]]
        return BytesForEach(parameters, num_bytes=self.num_bytes)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    size = round(parameter.numel() * self.num_bytes)
                    self.state[parameter]["state"] = torch.empty(
                        size, dtype=torch.uint8, device=parameter.device
                    )
                parameter.grad.float()  # allocate and free
        return None if closure is None else closure()


OPTIMIZERS = {
    "adamw": "AdamW with two moments in the parameters' dtype",
    "adamw-master": "AdamW with moments and master weights in float32: 12 bytes per parameter",
    "adamw-8bit": "AdamW with moments of one byte: 2 bytes per parameter",
    "sgd": "SGD without state",
    "sgd-momentum": "SGD with momentum in the parameters' dtype",
}
BYTES = {"adamw-master": 12.0, "adamw-8bit": 2.0}


def make_optimizer(
    name: str | float, module: nn.Module, *, foreach: bool = False
) -> torch.optim.Optimizer:
    """Make an optimizer by name, or by bytes per parameter such as 6 or "6".

    `foreach` selects the multi-tensor implementation, which is torch's default on CUDA.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(trained, foreach=foreach)
    if name in ("sgd", "sgd-momentum"):
        return torch.optim.SGD(
            trained, lr=1e-3, momentum=0.9 if name == "sgd-momentum" else 0.0, foreach=foreach
        )
    if name in BYTES:
        return BytesForEach(trained, num_bytes=BYTES[str(name)])
    if isinstance(name, int | float) or re.fullmatch(r"\d+(\.\d+)?", name):
        return BytesForEach(trained, num_bytes=float(name))
    others = f"use one of {', '.join(OPTIMIZERS)}, or the bytes per parameter"
    raise ValueError(
        f"no optimizer is called {name!r}; {did_you_mean(name, OPTIMIZERS, otherwise=others)}"
    )
