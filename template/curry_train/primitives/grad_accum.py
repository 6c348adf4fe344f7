"""Gradient accumulation that gives the gradients of the large batch.

    accumulation = GradientAccumulation(steps=4)
    for window in accumulation.windows(loader, count=num_valid_tokens):
        result = train_window(
            model, window, summed_loss, optimizer, clip_norm=1.0, scheduler=scheduler
        )

This holds for uneven token counts, for a short last window, and under DDP and FSDP2: losses are
sums, each divided once by the number of terms in the window on all ranks.

Proof: `python -m pytest tests/primitives/test_grad_accum.py
tests/primitives/test_step_in_backward.py`.
"""

import contextlib
import copy
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

Microbatch = TypeVar("Microbatch")


class NonFiniteWindow(ArithmeticError):
    """Raised for a loss or gradient that is not finite; weights and optimizer are unchanged."""


@dataclass(frozen=True)
class GradientAccumulation:
    """Number of microbatches per optimizer step.

    Microbatch indices count from 0, within a window or over the whole run.
    """

    steps: int = 1
    # Sync gradients after every microbatch instead of the last one of a window. The gradients are
    # the same; FSDP2 then holds no unsharded gradients between microbatches, for more traffic.
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _whole_number("steps", self.steps, least=1))

    @classmethod
    def from_config(
        cls, config: Any, key: str = "gradient_accumulation_steps"
    ) -> "GradientAccumulation":
        """Read the number of steps from a mapping or from an object's attribute; 1 if absent.

        Dataclasses, namespaces and OmegaConf nodes work. `sync_each_batch` is read too.
        """
        read = config.get if isinstance(config, Mapping) else partial(getattr, config)
        steps = read(key, None)
        return cls(
            steps=1 if steps is None else steps,
            sync_each_batch=read("sync_each_batch", None) or False,
        )

    @property
    def enabled(self) -> bool:
        return self.steps > 1

    def is_first(self, index: int) -> bool:
        return bool(self.train_step_kwargs(index)["zero_grad"])

    def is_last(self, index: int) -> bool:
        return bool(self.train_step_kwargs(index)["step_optimizer"])

    def train_step_kwargs(self, index: int) -> dict[str, Any]:
        """Return what to do at microbatch `index` if all windows are full and equally weighted.

        For uneven microbatches and for the end of the data use `windows`, which computes the real
        divisor.
        """
        place = _whole_number("index", index, least=0) % self.steps
        full = (None,) * self.steps
        window = Window(full, float(self.steps), self.steps, sync_each_batch=self.sync_each_batch)
        return window.train_step_kwargs(place)

    def windows(
        self,
        microbatches: Iterable[Microbatch],
        *,
        count: Callable[[Microbatch], Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Iterator["Window[Microbatch]"]:
        """Group the data into windows of `steps` microbatches; the last window may be shorter.

        `count` returns the number of terms (valid tokens) of a microbatch whose loss is a sum;
        without it each microbatch counts as one term. With several ranks one small all-reduce per
        window sums the divisor, and ranks whose data end at different places raise an error
        instead of hanging.
        """
        source = iter(microbatches)
        for index in itertools.count():
            window = tuple(itertools.islice(source, self.steps))
            terms = [
                1 if count is None else _whole_number("count(microbatch)", count(mb), least=0)
                for mb in window
            ]
            total = sum(terms)
            num_ranks = _num_ranks(group)
            if num_ranks > 1:
                device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
                size = len(window)
                sums = torch.tensor([total, size, size**2], device=device)
                dist.all_reduce(sums, group=group)
                total, sizes, squares = sums.tolist()
                # Only equal sizes have this sum of squares.
                if squares * num_ranks != sizes * sizes:
                    raise ValueError(
                        f"window {index} has {size} microbatches on rank {dist.get_rank(group)} "
                        f"and {sizes} on all {num_ranks} ranks together: give every rank the same "
                        "number of microbatches (a DistributedSampler pads or drops)"
                    )

            if not window and index == 0:
                raise ValueError("there is no microbatch to train on: the data are empty")
            if not window:
                return
            if total == 0:
                raise ValueError(
                    f"window {index}: none of its {len(window)} microbatches has a valid term "
                    "(count returned 0 for each), so there is nothing to divide by; drop such "
                    "samples before batching, or use larger windows"
                )
            yield Window(
                window,
                loss_divisor=total / num_ranks,
                num_terms=total,
                index=index,
                sync_each_batch=self.sync_each_batch,
            )


@dataclass(frozen=True)
class Window(Generic[Microbatch]):
    """The microbatches of one optimizer step and the divisor of their losses."""

    microbatches: tuple[Microbatch, ...]
    # Turns each summed loss into its share of the mean over `num_terms`. It accounts for the
    # average over ranks that DDP and FSDP2 take.
    loss_divisor: float
    # On all ranks.
    num_terms: int
    index: int = 0
    # Whether gradients are synced after every microbatch.
    sync_each_batch: bool = False

    def __len__(self) -> int:
        return len(self.microbatches)

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(self.microbatches)

    def train_step_kwargs(self, index: int) -> dict[str, Any]:
        """Return what to do at microbatch `index`, with this window's length and divisor."""
        place = _whole_number("index", index, least=0)
        if place >= len(self):
            raise ValueError(f"index {index} is outside a window of {len(self)} microbatches")
        is_last = place == len(self) - 1
        return {
            "zero_grad": place == 0,
            "sync_gradients": is_last or self.sync_each_batch,
            "step_optimizer": is_last,
            "loss_divisor": self.loss_divisor,
            "collect_metrics": is_last,
        }


@dataclass(frozen=True)
class WindowResult:
    """Metrics of one optimizer step, identical on every rank."""

    loss: float
    grad_norm: float
    num_terms: int
    # False if a gradient scaler skipped the step.
    stepped: bool


class StepInBackward(Optimizer):
    """An optimizer of which each parameter steps in backward, and frees its gradient at once.

        optimizer = StepInBackward(model.parameters(), lambda one: torch.optim.AdamW(one, lr=1e-3))

    `make` returns an optimizer of the parameters that it gets, which is one here. So no more than
    a few gradients exist at a time. The training is the same where a step depends on the gradient
    of its own parameter alone: a clip by the norm of all gradients, and a scaler, need all of them
    before the first step, so `train_window` refuses both. What has no gradient is not stepped, and
    a gradient that is not finite is applied.
    """

    def __init__(
        self, parameters: Iterable[Tensor], make: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        self.make = make
        self.parts = {one: make([one]) for one in parameters if one.requires_grad}
        self._hooks: list[Any] = []
        super().__init__([*self.parts], {})
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]
        self._places = {one: place for place, one in enumerate(self.parts)}
        self.attach()

    def attach(self) -> None:
        """Step in backward; an optimizer that is copied does not until this is called."""
        self.detach()
        self._hooks = [one.register_post_accumulate_grad_hook(self._step_one) for one in self.parts]

    def detach(self) -> None:
        """Step in `step` alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients add up inside, as in every microbatch of a window but the last."""
        hooks = self._hooks
        self.detach()
        try:
            yield
        finally:
            # A copy that does not step in backward does not begin to.
            if hooks:
                self.attach()

    def _step_one(self, parameter: Tensor) -> None:
        part = self.parts[parameter]
        # The group and the state are those of this optimizer, which may have been replaced.
        part.param_groups = [self.param_groups[self._places[parameter]]]
        part.state = self.state
        part.step()
        parameter.grad = None

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the parameters that still have a gradient, as after a backward in `paused`."""
        loss = None if closure is None else closure()
        for parameter in self.parts:
            if parameter.grad is not None:
                self._step_one(parameter)
        return loss

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepInBackward":
        groups = copy.deepcopy(self.param_groups, memo)
        copied = type(self)([one for group in groups for one in group["params"]], self.make)
        copied.detach()
        copied.param_groups = groups
        copied.state.update(copy.deepcopy(dict(self.state), memo))
        return copied


def train_window(
    model: nn.Module,
    window: Window[Microbatch],
    loss: Callable[[nn.Module, Microbatch], Any],
    optimizer: Optimizer,
    *,
    clip_norm: float | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    joint_loss: Callable[[list[Any]], Tensor] | None = None,
) -> WindowResult:
    """Take one optimizer step: zero, accumulate, sync, unscale, clip, step, schedule, metrics.

    Everything but the accumulation happens once per window, and so does the wait for the device. A
    non-finite loss or gradient raises `NonFiniteWindow` on every rank before the weights change.
    With a scaler a non-finite gradient raises nothing: the scaler skips the step.

    With `joint_loss` all forwards run before one backward: `loss` returns the outputs of a
    microbatch, and `joint_loss` the summed loss of the list of them, as contrastive losses need.
    The activations of the whole window are then held at once.

    A `StepInBackward` steps in the last backward, if its loss is finite; the norm is then NaN.
    """
    if not (clip_norm is None or clip_norm > 0):
        raise ValueError(f"clip_norm must be above 0, got {clip_norm!r}; None is no clipping")
    if not hasattr(window, "microbatches"):
        raise TypeError(
            "train_window takes a window, which knows how many terms its losses have: "
            "next(accumulation.windows(loader, count=...)); got " + type(window).__name__
        )
    in_backward = _steps_in_backward(optimizer, clip_norm, scaler, joint_loss)

    optimizer.zero_grad(set_to_none=True)
    losses = _accumulate(
        model, window, loss, joint_loss=joint_loss, scaler=scaler, in_backward=in_backward
    )
    if scaler is not None:
        scaler.unscale_(optimizer)

    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients and in_backward is None:
        raise ValueError(
            "no parameter of the optimizer got a gradient: make the optimizer from the parameters "
            "of the model that trains, after whatever replaces them (adapters, fully_shard)"
        )
    norm = get_total_norm(gradients)
    total, grad_norm = _reduce_metrics(losses, norm)
    if in_backward is not None:
        grad_norm = math.nan
    elif not (math.isfinite(total) and (scaler is not None or math.isfinite(grad_norm))):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteWindow(_describe(window, losses, total, grad_norm))

    if clip_norm is not None:
        clip_grads_with_norm_(parameters, clip_norm, norm)
    if scaler is None:
        optimizer.step()
        stepped = True
    else:
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        stepped = scaler.get_scale() >= scale
    if scheduler is not None and stepped:
        scheduler.step()
    return WindowResult(total, grad_norm, window.num_terms, stepped)


def _accumulate(
    model: nn.Module,
    window: Window[Any],
    loss: Callable[..., Any],
    *,
    joint_loss: Any,
    scaler: Any,
    in_backward: StepInBackward | None,
) -> list[Tensor]:
    """Run forward and backward of every microbatch and return the divided, detached losses.

    With `joint_loss` one backward follows all forwards.
    """
    if joint_loss is not None and window.sync_each_batch:
        raise ValueError(
            "sync_each_batch has no effect with joint_loss, which has one backward in a window: "
            "leave one of them out"
        )
    sync = _sync_context(model)
    values: list[Any] = []
    for index, microbatch in enumerate(window.microbatches):
        is_last = index == len(window) - 1
        with (
            sync(window.sync_each_batch or is_last),
            in_backward.paused() if in_backward and not is_last else contextlib.nullcontext(),
        ):
            value = loss(model, microbatch)
            if joint_loss is None:
                if in_backward and is_last:
                    # Check the sum before the last backward, in which the weights change.
                    losses = [*values, value.detach()]
                    total = float(torch.stack(losses).sum())
                    if not math.isfinite(total):
                        raise NonFiniteWindow(_describe(window, losses, total, math.nan))
                value = _backward(value, window, scaler)
        values.append(value)
    return values if joint_loss is None else [_backward(joint_loss(values), window, scaler)]


def _steps_in_backward(
    optimizer: Optimizer, clip_norm: Any, scaler: Any, joint_loss: Any
) -> StepInBackward | None:
    """Return the optimizer if it steps in backward; refuse what needs all gradients before."""
    if not isinstance(optimizer, StepInBackward):
        return None
    given = {"clip_norm": clip_norm, "scaler": scaler, "joint_loss": joint_loss}
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ValueError(
            f"{named[0]} needs all gradients before the first step, and StepInBackward has stepped "
            "by then: leave it out, or give the optimizer itself"
        )
    if _num_ranks(None) > 1:
        raise ValueError(
            "StepInBackward steps before the ranks have agreed on a gradient: give the optimizer "
            "itself"
        )
    return optimizer


def _backward(value: Tensor, window: Window[Any], scaler: Any) -> Tensor:
    """Run backward of a summed loss's share of the mean, and return that share, detached."""
    if not isinstance(value, Tensor) or value.dim():
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"the loss must be a tensor of one number, the sum over its terms; got {got}"
        )
    value = value / window.loss_divisor
    scaled = value if scaler is None else scaler.scale(value)
    scaled.backward()
    return value.detach()


def _sync_context(model: nn.Module) -> Callable[[bool], contextlib.AbstractContextManager[Any]]:
    """Return a context per microbatch that syncs its gradients if it is called with True.

    It uses FSDP2's switch or DDP's `no_sync`, and does nothing for a model with neither.
    """
    local = contextlib.nullcontext()
    if switch := getattr(model, "set_requires_gradient_sync", None):
        return lambda syncs: contextlib.nullcontext(switch(syncs))
    if no_sync := getattr(model, "no_sync", None):
        return lambda syncs: local if syncs else no_sync()
    if _num_ranks(None) > 1:
        raise RuntimeError(
            f"{dist.get_world_size()} ranks are running, but {type(model).__name__} is wrapped in "
            "neither DistributedDataParallel nor fully_shard: the weights of the ranks would "
            "diverge silently. Wrap the whole model"
        )
    return lambda syncs: local


def _num_ranks(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _reduce_metrics(losses: list[Tensor], norm: Tensor) -> tuple[float, float]:
    """Return the mean loss over all terms and the gradient norm, equal on every rank."""
    if hasattr(norm, "full_tensor"):  # FSDP2 holds the norm as a sharded tensor
        norm = norm.full_tensor()
    values = torch.stack([*losses, norm])
    ranks = _num_ranks(None)
    if ranks > 1:
        values = torch.stack([values[:-1].sum(), values[-1]])
        dist.all_reduce(values)
    *loss_values, grad_norm = values.tolist()
    return sum(loss_values) / ranks, grad_norm / ranks


def _describe(window: Window[Any], losses: list[Tensor], total: float, grad_norm: float) -> str:
    bad = ", ".join(str(index) for index, value in enumerate(losses) if not value.isfinite())
    where = f"microbatch {bad} of {len(losses)}" if bad else "no loss of this rank"
    if bad and len(losses) < len(window):
        where = "the joint loss"
    return (
        f"window {window.index}: loss {total}, gradient norm {grad_norm}; not finite: {where}. "
        "The weights were not changed. Check that data; curry-train grad-flow names the layer that "
        "it begins in. Pass count= if a microbatch has no valid term"
    )


def _whole_number(name: str, value: Any, *, least: int) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number
