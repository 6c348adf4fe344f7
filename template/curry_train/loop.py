"""Training loop: steps, learning rate schedule, evaluation, saving and stopping.

    with saving(model, optimizer, runs="runs/mine", stream=stream, journal=True) as run:
        report = run_training_steps(
            model, optimizer, stream, loss, steps=1000, run=run,
            accumulation=GradientAccumulation(4), count=count,
            schedule=factor, clip_norm=1.0, evaluate=dev_loss, evaluate_every=100,
        )

Without `run` nothing is saved. `train_window` runs a single step; this module does what happens
between steps, the same on every rank. `equip` adds to the loop of another
trainer what this one has:

    equip(trainer, apply=recompute_blocks, journal="runs/mine", watch=SpikeConfig(), commit=True)

Proof: `python -m pytest tests/trainer/test_loop.py tests/trainer/test_equip.py`.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from .core.blocks import Derived, find_modules
from .core.generators import generators_kept
from .core.measure import as_trained
from .core.memory_recorder import memory_record
from .data import Dataset
from .primitives.grad_accum import GradientAccumulation, NonFiniteWindow, WindowResult, train_window
from .runs.attach import AttachedRun
from .runs.layout import SavedCheckpoint
from .runs.policy import SavingPolicy
from .runs.policy_config import SpikeConfig
from .runs.state import TrainingState
from .runs.trainers import (
    add_to,
    commit_checkpoints,
    library_of,
    record_training,
    replace_calls,
)

MOST_SKIPPED = 25  # after this many halvings the loss scale is not the cause of the overflow


@dataclass(frozen=True, kw_only=True)
class StepReport(WindowResult):
    """Figures of one step, passed to the hooks; `step` counts from 1.

    All figures except `seconds` are the same on every rank.
    """

    step: int
    steps: int
    learning_rate: float
    seconds: float
    dev_loss: float | None = None


@dataclass(frozen=True)
class RunReport:
    """The end of a run.

    `ended_by` is "steps", "data", or the name of a signal; `last` is None if no step was run.
    """

    step: int
    ended_by: str
    last: StepReport | None

    @property
    def finished(self) -> bool:
        return self.ended_by == "steps"


def run_training_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    steps: int,
    accumulation: GradientAccumulation | None = None,
    count: Callable[[Any], Any] | None = None,
    clip_norm: float | None = None,
    schedule: Callable[[int], float] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    evaluate: Callable[[], float] | None = None,
    evaluate_every: int | None = None,
    after_step: Sequence[Callable[[StepReport], Any]] = (),
    run: AttachedRun | None = None,
) -> RunReport:
    """Train until `steps` steps are done.

    `microbatches` begin with those of the next step. `loss` returns a sum over the terms that
    `count` counts (without `count`, a mean). `schedule` returns the factor on each group's learning
    rate for a step, counted from 0. `evaluate` returns the dev loss. `NonFiniteWindow` leaves the
    weights as they were before the step, on every rank.

    `run` is what `saving(..., stream=microbatches)` returned: training continues from its step, it
    saves, writes the journal, rolls back from loss spikes, and ends the loop on a signal.
    """
    if evaluate_every is not None and evaluate is None:
        raise ValueError("evaluate_every needs a function evaluate=")

    accumulation = accumulation or GradientAccumulation()
    windows = accumulation.windows(microbatches, count=count)
    attached = run or _RunAlone()
    report = None
    # The steps in a row that a scaler has skipped.
    num_skipped = 0
    # After a rollback steps are done again.
    while attached.continues(until=steps):
        began = time.perf_counter()
        window = next(windows, None)
        if window is None:
            attached.ended_by = "data"
            break
        step = attached.steps + 1
        factor = 1.0 if schedule is None else schedule(step - 1)
        for group in optimizer.param_groups:
            # Not torch's `initial_lr`, by which a forgotten scheduler is found.
            base = group.setdefault("base_lr", group.get("initial_lr", group["lr"]))
            group["lr"] = base * factor
        try:
            result = train_window(
                model, window, loss, optimizer, clip_norm=clip_norm, scaler=scaler
            )
            num_skipped = 0 if result.stepped else num_skipped + 1
            if scaler is not None and num_skipped == MOST_SKIPPED:
                raise NonFiniteWindow(
                    f"{num_skipped} steps in a row were skipped because a gradient was not finite; "
                    f"the loss scale is now {scaler.get_scale():g} and no longer the cause. Lower "
                    "the learning rate, or use bfloat16"
                )
        except NonFiniteWindow as error:
            attached.not_finite(NonFiniteWindow(f"step {step}: {error}"))
            continue

        report = StepReport(
            **vars(result),
            step=step,
            steps=steps,
            learning_rate=optimizer.param_groups[0]["lr"],
            seconds=time.perf_counter() - began,
        )
        metrics = {}
        is_due = evaluate_every and (step % evaluate_every == 0 or step == steps)
        if evaluate is not None and is_due:
            report = replace(report, dev_loss=evaluate())
            metrics["dev_loss"] = report.dev_loss
        figures = {
            "grad_norm": report.grad_norm,
            "terms": report.num_terms,
            "learning_rate": report.learning_rate,
            "seconds": report.seconds,
        }
        attached.step(loss=report.loss, stepped=report.stepped, figures=figures, **metrics)
        for hook in after_step:
            hook(report)
    return RunReport(attached.steps, attached.ended_by or "stopped", report)


class _RunAlone:
    """The run of a loop without `saving`, which only counts its steps."""

    steps = 0
    ended_by: str | None = None

    def continues(self, *, until: int) -> bool:
        self.ended_by = "steps" if self.steps >= until else None
        return self.ended_by is None

    def not_finite(self, error: NonFiniteWindow) -> None:
        raise error

    def step(self, **_: Any) -> None:
        self.steps += 1


def save_checkpoint(policy: SavingPolicy, state: TrainingState) -> list[SavedCheckpoint]:
    """Save the whole state at its step on all ranks, whatever the cadence, unless it is saved."""
    return policy.save_now(state.step, state)


# Mean loss over dev samples, the same samples for any number of ranks.


def mean_loss(
    model: nn.Module,
    dataset: Dataset,
    loss: Callable[[nn.Module, Any], Tensor],
    count: Callable[[Any], int],
    *,
    samples: int,
    microbatch: int,
    rank: int = 0,
    ranks: int = 1,
) -> float:
    """Return the mean loss over the first `samples` samples, in eval mode.

    The model and every random generator are left unchanged. A rank without samples left evaluates
    the last sample with no weight, because FSDP2 needs every rank in each forward.
    """
    samples = min(samples, len(dataset))
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad(), generators_kept(), as_trained(model):
        model.eval()
        for start in range(0, samples, microbatch * ranks):
            first = start + rank * microbatch
            own = range(first, min(samples, first + microbatch))
            batch = dataset.batch(own or [samples - 1])
            value = loss(model, batch)
            if own:
                sums += torch.tensor([value.item(), count(batch)], dtype=torch.float64)
    if ranks > 1:
        sums = sums.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(sums)
    total, terms = sums.tolist()
    return total / terms if terms else float("nan")


# Add the same to the loop of another trainer.


class LoadedPlan(Protocol):
    """A plan of strategies for the blocks of a model, read from a file."""

    @property
    def microbatch(self) -> int: ...

    def apply(self, model: nn.Module) -> list[str]: ...


def equip(
    trainer: Any,
    *,
    apply: Callable[[nn.Module], Any] | LoadedPlan | None = None,
    journal: str | Path | None = None,
    watch: SpikeConfig | None = None,
    commit: bool = False,
    memory: str | Path | None = None,
) -> Any:
    """Add techniques to a Trainer of Hugging Face or Lightning, or to an Accelerator; return it.

    `apply` is a function such as `recompute_blocks`, or a plan. It changes the bare model: that of
    Hugging Face's Trainer at once, Lightning's after `configure_model`, Accelerate's in `prepare`.
    A trainer with larger microbatches than the plan's is refused.
    `journal` is the folder of the journal and `watch` its detection of spikes, as in
    `record_training`; `commit` is `commit_checkpoints`. `memory` is the path, without its suffix,
    of the snapshot that `memory_record` writes when a GPU is full.
    """
    library, _ = library_of(trainer, otherwise="for a loop of your own call saving(...) in it")
    if watch is not None and journal is None:
        raise ValueError("watch reads the losses of the journal: give journal=FOLDER too")
    if memory is not None and library == "accelerate":
        raise ValueError(
            "an Accelerator does not run the loop: put `with memory_record(...)` around it"
        )
    change = getattr(apply, "apply", apply)
    if change is not None:
        if not callable(change):
            raise TypeError("apply takes a function of the model or a plan: give Plan.load(path)")
        add_to(trainer, CHANGE_BY_LIBRARY, change, functools.partial(_check_microbatch, apply))
    if commit:
        commit_checkpoints(trainer)
    if journal is not None:
        record_training(trainer, journal, watch=watch)
    if memory is not None:
        add_to(trainer, RECORDING_BY_LIBRARY, Path(memory))
    return trainer


def _check_microbatch(planned: Any, size: Any) -> None:
    """Raise if a trainer's microbatch, if it is known, takes more memory than was planned."""
    most = getattr(planned, "microbatch", None)
    if most is not None and isinstance(size, int) and size > most:
        raise ValueError(
            f"the plan is for {planned.steps} microbatches of {most}, and the trainer's "
            f"microbatches of {size} samples take more memory than was planned: set its batch size "
            f"to {most} and its gradient accumulation to {planned.steps}, or plan again with "
            f"--microbatch {size}"
        )


# Changes a model, and checks the number of samples in a microbatch.
Change = Callable[[nn.Module], Any]
CheckSize = Callable[[Any], None]


def _apply_to_hugging_face(trainer: Any, change: Change, check_size: CheckSize) -> None:
    if trainer.model_wrapped is not trainer.model:
        raise ValueError("the model is wrapped already: equip the Trainer before train()")
    args = trainer.args
    check_size(args.per_device_train_batch_size)
    change(trainer.model)
    options = (args.gradient_checkpointing and args.gradient_checkpointing_kwargs) or {}
    changed = find_modules(trainer.model, Derived).values()
    if options.get("use_reentrant") and any(
        hasattr(one, "gradient_checkpointing") for one in changed
    ):
        raise ValueError(
            "the Trainer recomputes these blocks itself, and with use_reentrant=True they would "
            "run three times: make the Trainer with activation_checkpointing=False"
        )
    make = trainer.model_init
    if make is not None:
        # The Trainer counts the parameters of this function, and builds the model again in train.
        @functools.wraps(make)
        def make_changed(*args: Any) -> nn.Module:
            model: nn.Module = make(*args)
            change(model)
            return model

        trainer.model_init = make_changed


@dataclass(eq=False)
class _LightningChange:
    """Changes a LightningModule between its `configure_model` and the wrapper of its strategy."""

    _trainer: Any
    _change: Change
    _check_size: CheckSize
    _changed: Any = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit" and module is not self._changed:
            self._changed = module
            module.configure_model = functools.partial(self._configure, module)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._check_size(getattr(trainer.train_dataloader, "batch_size", None))

    def _configure(self, module: Any) -> None:
        del module.configure_model
        module.configure_model()
        if any(isinstance(one, FSDPModule) for one in module.modules()):
            raise ValueError(
                "configure_model has shared the model with fully_shard: apply the technique there, "
                "before fully_shard"
            )
        self._change(module)


def _apply_to_accelerator(accelerator: Any, change: Change, check_size: CheckSize) -> None:
    if accelerator._models:
        raise ValueError("the model is prepared already: equip the Accelerator before prepare()")
    changed: list[nn.Module] = []

    def changing(prepare: Callable[..., Any], *args: Any, **options: Any) -> Any:
        # Of several loaders the larger ones may be for an evaluation.
        # One with a batch sampler has no size.
        sizes = [one.batch_size or 0 for one in args if isinstance(one, DataLoader)]
        check_size(min(sizes, default=0))
        for one in args:
            if isinstance(one, nn.Module) and all(one is not known for known in changed):
                changed.append(one)
                change(one)
        return prepare(*args, **options)

    replace_calls(accelerator, prepare=changing, prepare_model=changing)


CHANGE_BY_LIBRARY = {
    "transformers": _apply_to_hugging_face,
    "lightning": _LightningChange,
    "accelerate": _apply_to_accelerator,
}


def _record_hugging_face(trainer: Any, path: Path) -> None:
    trainer.train = memory_record(path)(trainer.train)


class _LightningMemory:
    """Records the memory of `fit`; an error is seen before Lightning frees what it holds."""

    def __init__(self, trainer: Any, path: Path) -> None:
        self._path = path
        self._recording = contextlib.ExitStack()

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit":
            self._recording.enter_context(memory_record(self._path))

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._recording.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self._recording.close()


RECORDING_BY_LIBRARY = {
    "transformers": _record_hugging_face,
    "lightning": _LightningMemory,
}
