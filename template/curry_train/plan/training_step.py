"""One optimizer step of a case with a lever applied, as often as it is called: what a benchmark times and measures.

    step = TrainingStep(Case(load_workload("transformer")), find_lever("full"))
    step()

A step is whole: gradients dropped, forward and backward of every microbatch, the optimizer. It is taken with a learning
rate of 0, so that each one computes the same as the one before, and steps that share weights do not disturb each other.
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
    """`like` is another step of the same model: its weights and, once it has run, its optimizer's state are shared, so
    that many steps fit beside each other. `batch` is that of the case where it is left out."""

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
                f"autocast to {lever.autocast} has nothing to do: the weights are of that type already"
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
        """The sum over the terms of a microbatch."""
        with self._precision():
            return self.case.workload.loss(module, microbatch)

    def mean_loss(self, module: nn.Module, microbatch: Any) -> Tensor:
        return self.loss(module, microbatch) / self.case.workload.count(microbatch)

    def drop_gradients(self) -> None:
        """They would stay until this step's next turn, beside those of the others."""
        self.optimizer.zero_grad(set_to_none=True)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def num_terms(self) -> int:
        return self.window.num_terms

    @property
    def unit(self) -> str:
        """What the terms are, as far as the batch tells."""
        microbatches = self.window.microbatches
        if self.num_terms == sum(map(batch_size, microbatches)):
            return "samples"
        whole = [
            leaf
            for leaf in tree_iter(microbatches[0])
            if isinstance(leaf, Tensor) and leaf.dim() == 2
        ]
        return "tokens" if any(not leaf.is_floating_point() for leaf in whole) else "terms"

    @property
    def dtype_of_products(self) -> torch.dtype:
        return self.lever.autocast or self.case.dtype

    def count_flops(self) -> int:
        """All that runs, what is computed again included."""
        self.drop_gradients()
        if holds_compiled_code(
            self.model
        ):  # which runs as eager code while a dispatch mode watches
            counts = (
                count_executed_flops(self.model, each, self.mean_loss) for each in self.window
            )
            return sum(count.total for count in counts)
        with FlopCount() as count:
            self()
        self.drop_gradients()
        return count.flops

    def peak_bytes(self) -> int | None:
        """Parameters, optimizer state and the batch, and what the step adds at its fullest moment. Compiled code on the
        CPU is followed through forward and backward alone, and not at all where it accumulates: None."""
        self.drop_gradients()
        there = self._there()
        if self.device.type != "cuda" and holds_compiled_code(self.model):
            if len(self.window) > 1:
                return None
            within = measure_allocated(self.model, self.window.microbatches[0], self.mean_loss)
            return bytes_of(there, self.device) + within.peak_bytes
        peak = peak_of_step(self, there, self.device)
        self.drop_gradients()
        return peak

    def _window(self, batch: Any) -> Any:
        size, number = batch_size(batch), self.lever.accumulate
        if size < number:
            raise ValueError(
                f"a batch of {size} samples can't be cut into {number} microbatches: --batch-size {number} or more"
            )
        sizes = [size // number + (place < size % number) for place in range(number)]
        count = self.case.workload.count
        return next(
            GradientAccumulation(number).windows(self.case.split(batch, sizes), count=count)
        )

    def _there(self) -> list[Tensor]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        others = [*self.optimizer.state.values(), *self.window.microbatches]
        return tensors + [leaf for leaf in tree_iter(others) if isinstance(leaf, Tensor)]

    def _share_state(self, like: "TrainingStep") -> None:
        """The moments of the same weights, which are the same whatever the step is."""
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
