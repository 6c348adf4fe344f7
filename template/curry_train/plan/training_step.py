"""Training step: the optimizer step that a benchmark times, with a lever applied.

    step = TrainingStep(Case(load_workload("transformer")), find_lever("full"))
    step()

A step drops the gradients, runs forward and backward of every microbatch, and steps the optimizer.
The learning rate is 0, so that every step computes the same, and steps that share weights do not
disturb each other.

Proof: `python -m pytest tests/test_bench_steps.py`.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..core.allocated import count_executed_flops, measure_allocated
from ..core.batches import batch_size
from ..core.compiled import holds_compiled_code
from ..core.measure import FlopCount
from ..core.step_peak import bytes_of, peak_of_step
from ..core.workload import Case
from ..primitives.grad_accum import GradientAccumulation, WindowResult, train_window
from .levers import PLAIN, Lever
from .optimizers import make_optimizer
from .strategy import Sample


class TrainingStep:
    """A repeatable optimizer step of a case with a lever applied.

    `batch` defaults to the batch of the case. `like` is another step of the same model: its weights
    and, once it has run, its optimizer state are shared, so that many steps fit in memory at once.
    """

    def __init__(
        self,
        case: Case,
        lever: Lever = PLAIN,
        *,
        batch: Any = None,
        optimizer: str = "adamw",
        learning_rate: float = 0.0,
        like: "TrainingStep | None" = None,
    ) -> None:
        if lever.dtype is not None and lever.dtype == case.dtype:
            raise ValueError(f"the plain step is in {case.dtype} already")
        if lever.autocast is not None and (lever.dtype or case.dtype) == lever.autocast:
            raise ValueError(
                f"autocast to {lever.autocast} has nothing to do: the weights have that dtype "
                "already"
            )
        self.case = replace(case, dtype=lever.dtype or case.dtype)
        self.lever = lever
        self.device = case.device
        self.model = self.case.build()
        whole = self.case.batch() if batch is None else self.case.place(batch)
        self.window = self._window(whole)

        shares = like is not None and self.case.dtype == like.case.dtype
        if like is not None and shares:
            for parameter, shared in zip(
                self.model.parameters(), like.model.parameters(), strict=True
            ):
                parameter.data = shared.data

        microbatch = self.window.microbatches[0]
        sample = Sample(microbatch, self.mean_loss, self.case.blocks)
        self.changed = [name for change in lever.changes for name in change(self.model, sample)]
        self.optimizer = make_optimizer(optimizer, self.model, foreach=self.device.type == "cuda")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if like is not None and shares:
            self._share_state(like)

    def __call__(self) -> WindowResult:
        return train_window(self.model, self.window, self.loss, self.optimizer)

    def loss(self, module: nn.Module, microbatch: Any) -> Tensor:
        """Return the loss of a microbatch, summed over its terms."""
        with self._precision():
            return self.case.workload.loss(module, microbatch)

    def mean_loss(self, module: nn.Module, microbatch: Any) -> Tensor:
        return self.loss(module, microbatch) / self.case.workload.count(microbatch)

    def drop_gradients(self) -> None:
        """Drop the gradients, which would stay in memory while other steps run."""
        self.optimizer.zero_grad(set_to_none=True)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def num_terms(self) -> int:
        return self.window.num_terms

    @property
    def unit(self) -> str:
        """The unit of the loss terms, derived from the batch: samples, tokens or terms."""
        microbatches = self.window.microbatches
        if self.num_terms == sum(map(batch_size, microbatches)):
            return "samples"
        matrices = [
            leaf
            for leaf in tree_iter(microbatches[0])
            if isinstance(leaf, Tensor) and leaf.dim() == 2
        ]
        return "tokens" if any(not leaf.is_floating_point() for leaf in matrices) else "terms"

    @property
    def dtype_of_products(self) -> torch.dtype:
        return self.lever.autocast or self.case.dtype

    def count_flops(self) -> int:
        """Count the FLOPs of the whole step, recompute included."""
        self.drop_gradients()
        # FlopCount is a dispatch mode, under which compiled code runs as eager code.
        if holds_compiled_code(self.model):
            counts = (
                count_executed_flops(self.model, microbatch, self.mean_loss)
                for microbatch in self.window
            )
            return sum(count.total for count in counts)
        with FlopCount() as count:
            self()
        self.drop_gradients()
        return count.flops

    def peak_bytes(self) -> int | None:
        """Measure the peak of the step, with parameters, optimizer state and batch.

        Compiled code on the CPU is followed through forward and backward only, and not at all if it
        accumulates gradients: then the peak is None.
        """
        self.drop_gradients()
        existing = self._there()
        if self.device.type != "cuda" and holds_compiled_code(self.model):
            if len(self.window) > 1:
                return None
            within = measure_allocated(self.model, self.window.microbatches[0], self.mean_loss)
            return bytes_of(existing, self.device) + within.peak_bytes
        peak = peak_of_step(self, existing, self.device)
        self.drop_gradients()
        return peak

    def _window(self, batch: Any) -> Any:
        """Cut the batch into microbatches; the first ones are larger if the sizes differ."""
        size = batch_size(batch)
        number = self.lever.accumulate
        if size < number:
            raise ValueError(
                f"a batch of {size} samples can't be cut into {number} microbatches: "
                f"use --batch-size {number} or more"
            )
        sizes = [size // number + (place < size % number) for place in range(number)]
        count = self.case.workload.count
        return next(
            GradientAccumulation(number).windows(self.case.split(batch, sizes), count=count)
        )

    def _there(self) -> list[Tensor]:
        """List the tensors that exist before the step."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        others = [*self.optimizer.state.values(), *self.window.microbatches]
        return tensors + [leaf for leaf in tree_iter(others) if isinstance(leaf, Tensor)]

    def _share_state(self, like: "TrainingStep") -> None:
        """Share the optimizer state, which does not depend on the lever."""
        known = dict(zip(like.model.parameters(), self.model.parameters(), strict=True))
        for parameter, state in like.optimizer.state.items():
            self.optimizer.state[known[parameter]] = state  # type: ignore[index]

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if self.lever.autocast is None:
            yield
        else:
            with torch.autocast(self.device.type, dtype=self.lever.autocast):
                yield
