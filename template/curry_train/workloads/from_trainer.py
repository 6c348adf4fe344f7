"""Make a workload from the user's own trainer, so that nobody writes a factory.

    curry-train memory --trainer package.module:make_trainer

`make_trainer` takes no arguments and returns what the user trains with: a Trainer of Hugging Face
or of TRL; Lightning's Trainer with its module, and with its data where the module has none, as a
tuple; or an Accelerator that has prepared model, optimizer and loader, with a function
`loss(model, batch)` where the model returns no loss. Model, first batch, loss, optimizer, precision
and accumulation are read off these objects. Nothing is trained, logged or saved.

Proof: `python -m pytest tests/workloads/test_from_trainer.py`.
"""

import contextlib
import copy
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..core.blocks import inside_wrappers
from ..core.generators import seeded
from ..core.measure import Loss, as_trained
from .optimizers import OptimizerLike, stepped_on_host
from .workload import (
    LabelCount,
    Workload,
    WorkloadError,
    batch_size,
    batches_like,
    call,
    dtype_of,
    map_tensors,
    own_loss,
    take,
)

# The workload of a training that was read off a trainer or a script.


@dataclass(frozen=True)
class Autocast:
    """Compute a loss under autocast, as a trainer does."""

    # None where the module runs in its own precision.
    dtype: torch.dtype | None = None

    # Converts what the module's forward returns, where a wrapper of that alone casts.
    convert: Any = None

    def __call__(self, module: nn.Module) -> Any:
        """Return a context in which the loss is computed so."""
        if self.dtype is None:
            return contextlib.nullcontext()
        device = next(module.parameters()).device.type
        if self.convert is None:
            return torch.autocast(device, dtype=self.dtype)
        # A partial function in each context: torch does not compile its code again. Trainers
        # replace the forward of a module too, as TRL's do for a chunked loss.
        forward = functools.partial(self._run, device, module.forward)
        return mock.patch.object(module, "forward", forward)

    def _run(self, device: str, forward: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        with torch.autocast(device, dtype=self.dtype):
            return self.convert(forward(*args, **options))


def workload_of(
    source: str,
    module: nn.Module,
    batch: Any,
    mean_loss: Loss,
    *,
    count: Callable[[Any], int] = batch_size,
    optimizers: Sequence[torch.optim.Optimizer],
    accumulation: int,
    precision: Autocast,
    may_be_sum: bool = False,
    notes: Sequence[str] = (),
    output_until: str = "loss",
) -> Workload:
    """Return the workload of a training; each module that it builds is a copy of the user's.

    `source` names what it was read off, for the first note, on each part of it. `mean_loss` is what
    the user's code computes: a mean over the terms that `count` counts or, if it `may_be_sum`, a
    sum over samples. The methods of trainers return the loss alone, so that what the module
    returned is freed there.
    """
    if any(hasattr(one, "unshard") for one in module.modules()):
        raise WorkloadError(
            "its model is sharded by fully_shard, which can't be copied: shard it only on several "
            "ranks, and give --parallel and --ranks to plan"
        )
    optimizer = OptimizerLike(optimizers, module)
    read = [
        f"{source}: {type(module).__name__}, batches of {batch_size(batch)}",
        # Equal optimizers are named once.
        *dict.fromkeys(
            f"{type(one).__qualname__}, lr {one.param_groups[0].get('lr')}" for one in optimizers
        ),
    ]
    if precision.dtype is not None:
        read.append(f"autocast to {str(precision.dtype).removeprefix('torch.')}")
    if accumulation > 1:
        read.append(f"{accumulation} batches a step")
    if optimizer.num_others:
        notes = [*notes, f"{optimizer.num_others} parameters of its optimizer are not of the model"]
    is_sum = may_be_sum and is_sum_over_samples(copy.deepcopy(module), batch, mean_loss)
    if is_sum:
        notes = [*notes, "its loss is a sum over samples, which is divided by their number here"]

    def loss(module: nn.Module, batch: Any) -> Tensor:
        with precision(module):
            found = mean_loss(module, batch)
        return found if is_sum else found * count(batch)

    make_batch, is_divisible = batches_like(batch)
    return Workload(
        type(module).__name__,
        functools.partial(copy.deepcopy, module),
        make_batch,
        loss,
        count=count,
        mask=getattr(count, "mask", None),
        optimizer=optimizer,
        own_batch=batch_size(batch),
        is_divisible=is_divisible,
        dtype=dtype_of(module),
        accumulation=accumulation,
        notes=("; ".join(read), *notes),
        output_until=output_until,
    )


SUM_TOLERANCE = 1e-3


def is_sum_over_samples(module: nn.Module, batch: Any, loss: Callable[..., Tensor]) -> bool:
    """Return whether a loss is a sum over samples, so that each row three times is three times it.

    A mean of them stays as it is.
    """
    rows = [*range(max(2, batch_size(batch) // 2))]
    try:
        with torch.no_grad(), seeded(0), as_trained(module):
            module.eval()
            once, thrice = (float(loss(module, take(batch, rows * times))) for times in (1, 3))
    except (RuntimeError, ValueError, IndexError, TypeError):
        # Its rows belong together.
        return False
    return abs(thrice - 3 * once) < SUM_TOLERANCE * abs(once)


MIXED_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}


# Read the objects of each library.


@stepped_on_host()
def take_training(made: Any) -> Workload:
    """Read model, batch, loss and optimizer off what the user's `make_trainer` returned."""
    given = made if isinstance(made, tuple | list) else (made,)
    kind = type(given[0]) if given else tuple
    known = {(one.__module__.partition(".")[0], one.__name__) for one in kind.__mro__}
    if ("transformers", "Trainer") in known:
        return _read_hugging_face(*given)
    if known & {("lightning", "Trainer"), ("pytorch_lightning", "Trainer")}:
        return _read_lightning(*given)
    if ("accelerate", "Accelerator") in known:
        return _read_accelerator(*given)
    raise WorkloadError(
        f"it returned {kind.__name__}: return a Trainer of transformers, TRL or Lightning, or "
        "an Accelerator; for a loop of your own use --script train.py"
    )


def _read_hugging_face(trainer: Any) -> Workload:
    """Read a Trainer of Hugging Face before `train`; those of TRL are derived from it."""
    module = bare_module(trainer.accelerator, trainer.model)
    arguments = trainer.args
    batch = trainer._prepare_inputs(_take_first(trainer.get_train_dataloader()))
    counts = "labels" in batch and (
        trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    )
    # Older versions count all labels.
    shifts = getattr(trainer, "_loss_shifts_labels", False)
    count = LabelCount(shifts) if counts else batch_size

    def mean_loss(model: nn.Module, inputs: Any) -> Tensor:
        # The Trainer removes entries from what it is given.
        options = {"num_items_in_batch": count(inputs)} if counts else {}
        loss: Tensor = trainer.compute_loss(model, {**inputs}, **options)
        return loss

    notes: list[str] = []
    switches = ("gradient_checkpointing", "activation_checkpointing")
    if any(getattr(arguments, switch, False) is True for switch in switches):
        notes.append("its own recompute is left off here; choose it as a lever")
    if arguments.world_size > 1 or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        notes.append("this is one rank without its wrapper: give --parallel and --ranks to plan")
    return workload_of(
        type(trainer).__name__,
        module,
        batch,
        mean_loss,
        count=count,
        optimizers=[_unwrap(trainer.create_optimizer() or trainer.optimizer)],
        accumulation=arguments.gradient_accumulation_steps,
        precision=autocast_of(trainer.accelerator),
        notes=notes,
    )


def _read_lightning(trainer: Any, module: Any = None, data: Any = None) -> Workload:
    """Read Lightning's Trainer and module before `fit`."""
    if not hasattr(module, "training_step"):
        raise WorkloadError(
            "Lightning's Trainer gets its module in fit: return (trainer, module), or "
            "(trainer, module, data) with a datamodule or a loader"
        )
    if not module.automatic_optimization:
        raise WorkloadError(
            f"{type(module).__name__} steps its optimizers itself (automatic_optimization is "
            "False): use --script train.py"
        )
    for one in (data, module):
        # Neither a loader nor None has them.
        if hasattr(one, "prepare_data"):
            one.trainer = trainer
            one.prepare_data()
            one.setup("fit")
    source = module if data is None else data
    loader = source.train_dataloader() if hasattr(source, "train_dataloader") else source
    module.configure_model()
    trainer.precision_plugin.convert_module(module)
    batch = trainer.precision_plugin.convert_input(_take_first(loader))
    for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
        hook = getattr(data, name, None)
        # Lightning calls the module's hook if the datamodule only inherits its own.
        if hook is None or hook.__qualname__.startswith("DataHooks."):
            hook = getattr(module, name)
        batch = hook(batch, 0)
    trainer.strategy.connect(module)
    trainer.strategy.setup_optimizers(trainer)
    # As Lightning decides: by a second parameter of any name.
    with_index = len(inspect.signature(module.training_step).parameters) > 1

    def mean_loss(model: nn.Module, inputs: Any) -> Tensor:
        with _give_trainer(model, trainer) as step:
            output = step(inputs, 0) if with_index else step(inputs)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise WorkloadError(f"training_step returned {loss!r:.40} for the first batch")
        return loss

    # The optimizer holds the parameters of the user's module, which is copied without its trainer.
    return workload_of(
        type(trainer).__name__,
        module,
        batch,
        mean_loss,
        optimizers=[*map(_unwrap, trainer.optimizers)],
        accumulation=trainer.accumulate_grad_batches,
        precision=Autocast(MIXED_DTYPES.get(trainer.precision)),
    )


@contextlib.contextmanager
def _give_trainer(model: nn.Module, trainer: Any) -> Iterator[Any]:
    """Give a copy of a LightningModule its trainer, and let it log nothing; yield its step.

    Where it is wrapped, the step is called through the wrapper's forward, as Lightning does.
    """
    inner: Any = next(one for one in model.modules() if hasattr(one, "training_step"))
    forward = inner.forward

    def step(*batch: Any) -> Any:
        # The step may call the module itself.
        with mock.patch.object(inner, "forward", forward):
            return inner.training_step(*batch)

    inner.trainer = trainer
    silent: Any = dict.fromkeys(("log", "log_dict"), lambda *_, **__: None)
    try:
        with mock.patch.multiple(inner, **silent):
            if inner is model:
                yield inner.training_step
                return
            with mock.patch.object(inner, "forward", step):
                yield model
    finally:
        inner.trainer = None


def _read_accelerator(accelerator: Any, loss: Callable[..., Any] | None = None) -> Workload:
    """Read an Accelerator after `prepare`."""
    given = {
        "model": accelerator._models,
        "optimizer": accelerator._optimizers,
        "loader": accelerator._dataloaders,
    }
    missing = [name for name, found in given.items() if not found]
    if missing:
        raise WorkloadError(
            f"the Accelerator has prepared no {' and no '.join(missing)}: return it after "
            "accelerator.prepare(model, optimizer, loader)"
        )
    module = bare_module(accelerator, given["model"][0])
    batch = _take_first(given["loader"][0])

    def mean_loss(model: nn.Module, inputs: Any) -> Tensor:
        found = own_loss(call(model, inputs)) if loss is None else loss(model, inputs)
        if not isinstance(found, Tensor):
            raise WorkloadError(
                f"{type(model).__name__} returns no loss: return (accelerator, loss) with a "
                "function loss(model, batch)"
            )
        return found

    return workload_of(
        type(accelerator).__name__,
        module,
        batch,
        mean_loss,
        optimizers=[_unwrap(given["optimizer"][0])],
        accumulation=accelerator.gradient_accumulation_steps,
        precision=autocast_of(accelerator),
        notes=[
            f"it has prepared {len(found)} {name}s, of which the first is taken"
            for name, found in given.items()
            if len(found) > 1
        ],
        # The loop is the user's own, where a variable often holds it.
        output_until="next step",
    )


def bare_module(accelerator: Any, module: nn.Module) -> nn.Module:
    """Take off what an Accelerator has wrapped a module in."""
    inner = accelerator.unwrap_model(module)
    is_wrapped = "_original_forward" in vars(inner)
    accelerator.unwrap_model(module, keep_fp32_wrapper=False)
    if is_wrapped:
        # The wrapper leaves a bound method of the class behind.
        vars(inner).pop("forward", None)
    bare: nn.Module = inner
    return bare


def autocast_of(accelerator: Any) -> Autocast:
    """Return the precision of an Accelerator, which returns a model's outputs in float32."""
    # The library is there, because the Accelerator is.
    convert: Callable[[Any], Any] = sys.modules["accelerate.utils"].convert_to_fp32
    return Autocast(MIXED_DTYPES.get(str(accelerator.mixed_precision)), convert)


def precision_around(module: nn.Module) -> Autocast:
    """Return the precision of the Accelerator that has wrapped a module, and take the wrapper off.

    A module without such a wrapper runs in its own precision.
    """
    if "_original_forward" not in vars(module):
        return Autocast()
    for one in gc.get_objects():
        if type(one).__name__ == "Accelerator" and module in map(inside_wrappers, one._models):
            bare_module(one, module)
            return autocast_of(one)
    raise WorkloadError("the model is wrapped by an Accelerator that is no longer there")


def _take_first(loaders: Any) -> Any:
    """Return the first batch of a loader, or of each of several loaders."""

    def first(loader: Any) -> Any:
        for batch in loader:
            return map_tensors(batch, lambda tensor: tensor.detach())
        raise WorkloadError("the loader of the training data is empty")

    return tree_map(first, loaders)


def _unwrap(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)
