"""Which layer holds how much of the memory between forward and backward, and which ones to recompute to fit a budget.

    report = MemoryProfiler(model).profile(batch, loss=loss)
    print(report.table())
    report.recommend_layers(512.0)    # names of layers, for `Recompute`

A megabyte is 2**20 bytes here (MiB). Proof: `python -m pytest tests/test_profiler.py`.
"""

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.adapt import call
from ..core.batches import map_tensors
from ..core.layers import REST, Boundaries, divide, tensors_in
from ..core.measure import LiveStorages
from ..core.untouched import buffers_kept, seeded
from .report import LayerMemory, ProfileReport

__all__ = ["LayerMemory", "MemoryProfiler", "ProfileReport"]

Loss = Callable[[nn.Module, Any], Tensor]


class MemoryProfiler:
    """Profiles a model where it is; `device` says where you expect that to be, and another one is an error."""

    def __init__(self, model: nn.Module, device: torch.device | str | None = None) -> None:
        self.device = _device_of(model, device)
        self.model = model
        self.report: ProfileReport | None = None

    def profile(
        self,
        sample_input: Any,
        num_runs: int = 3,
        *,
        loss: Loss | None = None,
        blocks: str | Sequence[str] | None = None,
    ) -> ProfileReport:
        """Run forward `num_runs` times, after a warm-up, and say what each layer holds in the median run.

        `sample_input` is a tensor, positional arguments in a tuple or list, or keywords in a mapping. Without `loss`
        the sum of the output stands in. `blocks` is a glob over module names; without it the layers are the blocks
        that the model repeats and what is around them. The model runs as it trains; its mode and buffers and every
        generator are put back, and gradients are not touched.
        """
        if isinstance(num_runs, bool) or not isinstance(num_runs, int) or num_runs < 1:
            raise ValueError(f"num_runs must be a whole number of at least 1, got {num_runs!r}")
        sample = map_tensors(sample_input, lambda tensor: tensor.to(self.device))
        layers, loss = divide(self.model, blocks=blocks), loss or sum_of_output
        with as_trained(self.model):
            self._run(sample, loss, layers)  # fills caches and allocates workspaces, which stay
            runs = [self._run(sample, loss, layers) for _ in range(num_runs)]
        totals = [sum(layer.bytes for layer in run) for run in runs]
        median = runs[totals.index(statistics.median_low(totals))]
        ranges = [
            max(held) - min(held)
            for held in zip(*([x.bytes for x in run] for run in runs), strict=True)
        ]
        total = sum(layer.bytes for layer in median)
        self.report = ProfileReport(
            model=type(self.model).__name__,
            device=str(self.device),
            layers=tuple(sorted(median, key=lambda layer: -layer.bytes)),
            held_bytes=total,
            spread=max(*ranges, max(totals) - min(totals)) / max(total, 1),
            num_runs=num_runs,
        )
        return self.report

    def recommend_layers(self, memory_budget_mb: float) -> list[str]:
        """`ProfileReport.recommend_layers` of the latest report."""
        if self.report is None:
            raise ValueError("there is no report yet: call profile(sample_input) first")
        return self.report.recommend_layers(memory_budget_mb)

    def _run(self, sample: Any, loss: Loss, layers: Mapping[str, nn.Module]) -> list[LayerMemory]:
        """One forward: every storage belongs to the layer that ran when it was made."""
        cuda, before = self.device.type == "cuda", 0
        if cuda:
            gc.collect()  # garbage that is freed meanwhile would be taken off
            before = torch.cuda.memory_allocated(self.device)
        running = Boundaries(self.model, layers)
        storages = LiveStorages(owner=lambda: running.current, device=self.device)
        running.lives_of = storages.lives_of
        with seeded(0), torch.enable_grad(), running, storages:
            value = _forward(self.model, sample, loss)
            gc.collect()  # what only a reference cycle holds is not held for backward
            held = dict.fromkeys([*layers, REST], 0)
            for life in storages.lives:
                held[life.owner] += life.nbytes if life.died is None else 0
            if cuda:  # the allocator's rounding and the libraries' workspaces are no layer's
                held[REST] += torch.cuda.memory_allocated(self.device) - before - sum(held.values())
            stays = {
                name: running.stays(name) if running.calls[name] else held[name] for name in layers
            }
        del value
        rest = LayerMemory(REST, type(self.model).__name__, held[REST], held[REST], 0)
        return [
            LayerMemory(name, type(layer).__name__, held[name], stays[name], running.calls[name])
            for name, layer in layers.items()
        ] + [rest]


@contextlib.contextmanager
def as_trained(model: nn.Module) -> Iterator[None]:
    """A model in eval mode is put into training mode; modes and buffers are put back. A model in training mode stays
    as it is, so that norms that were frozen by `eval()` stay frozen."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if not model.training:
            model.train()
        with buffers_kept(model):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _forward(model: nn.Module, sample: Any, loss: Loss) -> Tensor:
    try:
        value = loss(model, sample)
    except torch.OutOfMemoryError:
        raise
    except (
        Exception
    ) as error:  # the user's model may raise anything: it is told with what it was given
        raise ValueError(
            f"a forward of {type(model).__name__} on the sample raised {type(error).__name__}: {error}. The sample is "
            f"{_shapes(sample)}; give a tensor, positional arguments as a tuple, or keywords as a mapping"
        ) from error
    if not isinstance(value, Tensor) or not value.requires_grad:
        raise ValueError(
            f"the loss of {type(model).__name__} depends on no parameter that requires grad: {value!r}"
        )
    return value


def sum_of_output(model: nn.Module, sample: Any) -> Tensor:
    """A loss where there is none: the sum of all that the model returns and that has a gradient."""
    parts = [
        tensor.sum().float() for tensor in tensors_in(call(model, sample)) if tensor.requires_grad
    ]
    return torch.stack(parts).sum() if len(parts) != 1 else parts[0]


def _shapes(sample: Any) -> Any:
    return map_tensors(
        sample, lambda tensor: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    )


def _device_of(model: nn.Module, expected: torch.device | str | None) -> torch.device:
    parameter = next(
        (parameter for parameter in model.parameters() if parameter.requires_grad), None
    )
    if parameter is None:
        raise ValueError(
            f"{type(model).__name__} has no parameter that requires grad, so training it holds nothing"
        )
    device = parameter.device
    if expected is not None and torch.device(expected).type != device.type:
        raise ValueError(
            f"the model is on {device}, not on {expected}: move it first, model.to({str(expected)!r})"
        )
    return device
