"""Profile the bytes that each layer holds for backward, and choose layers to recompute.

    report = MemoryProfiler(model).profile(batch, loss=loss)
    print(report.table())
    report.recommend_layers(512.0)    # names of layers, for `Recompute`

A megabyte is 2**20 bytes (MiB).

Proof: `python -m pytest tests/test_profiler.py`.
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
    """Profile a model on its own device.

    `device` is the device that you expect it on; another one raises an error.
    """

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
        """Report what each layer holds after forward, in the median of `num_runs` runs.

        `sample_input` is a tensor, positional arguments in a tuple or list, or keywords in a
        mapping. Without `loss` the sum of the output is used. `blocks` is a glob over module names;
        by default the layers are the repeated blocks and the modules around them. The model runs in
        training mode after a warm-up. Its mode, its buffers and every generator are restored, and
        gradients are not touched.
        """
        if isinstance(num_runs, bool) or not isinstance(num_runs, int) or num_runs < 1:
            raise ValueError(f"num_runs must be a whole number of at least 1, got {num_runs!r}")
        sample = map_tensors(sample_input, lambda tensor: tensor.to(self.device))
        layers = divide(self.model, blocks=blocks)
        loss = loss or sum_of_output
        with as_trained(self.model):
            self._run(sample, loss, layers)  # fills caches and allocates workspaces, which stay
            runs = [self._run(sample, loss, layers) for _ in range(num_runs)]

        totals = [_bytes_of_layers(run) for run in runs]
        median = runs[totals.index(statistics.median_low(totals))]
        ranges = []
        for same_layer in zip(*runs, strict=True):
            held = [layer.bytes for layer in same_layer]
            ranges.append(max(held) - min(held))
        total = _bytes_of_layers(median)
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
        """Call `ProfileReport.recommend_layers` of the latest report."""
        if self.report is None:
            raise ValueError("there is no report yet: call profile(sample_input) first")
        return self.report.recommend_layers(memory_budget_mb)

    def _run(self, sample: Any, loss: Loss, layers: Mapping[str, nn.Module]) -> list[LayerMemory]:
        """Run one forward; each storage belongs to the layer that ran when it was made."""
        cuda = self.device.type == "cuda"
        before = 0
        if cuda:
            gc.collect()  # garbage that is freed during the run would be subtracted
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
            if cuda:
                # The allocator's rounding and the libraries' workspaces belong to no layer.
                held[REST] += torch.cuda.memory_allocated(self.device) - before - sum(held.values())
            stays = {
                name: running.stays(name) if running.calls[name] else held[name] for name in layers
            }
        del value

        report = [
            LayerMemory(name, type(layer).__name__, held[name], stays[name], running.calls[name])
            for name, layer in layers.items()
        ]
        rest = LayerMemory(REST, type(self.model).__name__, held[REST], held[REST], 0)
        return [*report, rest]


def _bytes_of_layers(layers: Sequence[LayerMemory]) -> int:
    return sum(layer.bytes for layer in layers)


@contextlib.contextmanager
def as_trained(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode into training mode; restore modes and buffers at the end.

    A model in training mode is not changed, so that norms frozen by `eval()` stay frozen.
    """
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
    except Exception as error:  # the user's model may raise anything
        raise ValueError(
            f"a forward of {type(model).__name__} on the sample raised {type(error).__name__}: "
            f"{error}. The sample is {_shapes(sample)}; give a tensor, positional arguments as a "
            "tuple, or keywords as a mapping"
        ) from error
    if not isinstance(value, Tensor) or not value.requires_grad:
        raise ValueError(
            f"the loss of {type(model).__name__} depends on no parameter that requires grad: "
            f"{value!r}"
        )
    return value


def sum_of_output(model: nn.Module, sample: Any) -> Tensor:
    """Stand in for a loss: the sum of all outputs of the model that require grad."""
    sums = [
        tensor.sum().float() for tensor in tensors_in(call(model, sample)) if tensor.requires_grad
    ]
    return torch.stack(sums).sum() if len(sums) != 1 else sums[0]


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
            f"{type(model).__name__} has no parameter that requires grad: there is nothing to train"
        )
    device = parameter.device
    if expected is not None and torch.device(expected).type != device.type:
        raise ValueError(
            f"the model is on {device}, not on {expected}: move it first with "
            f"model.to({str(expected)!r})"
        )
    return device
