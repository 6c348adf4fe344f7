"""Make a workload from the user's own trainer, so that nobody writes a factory.

    curry-train memory --trainer package.module:make_trainer

`make_trainer` takes no arguments and returns what the user trains with: a Trainer of Hugging Face
or of TRL; Lightning's Trainer with its module, and with its data where the module has none, as a
tuple; or an Accelerator that has prepared model, optimizer and loader, with a function
`loss(model, batch)` where the model returns no loss. Model, first batch, loss, optimizer, precision
and accumulation are read off these objects. Nothing is trained, logged or saved.

Proof: `python -m pytest tests/workloads/test_from_trainer.py`.
"""

import collections
import contextlib
import copy
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.rerun import seeded
from ..primitives.cross_entropy import IGNORED_TARGET
from .workload import (
    Workload,
    WorkloadError,
    batch_size,
    batches_like,
    call,
    map_tensors,
    mask_tails,
    take,
    without_cache,
)

# What is read off a trainer or a script, and the workload of it.


@dataclass(frozen=True)
class TakenTraining:
    """The objects with which the user trains, as they are before the first step."""

    name: str
    module: nn.Module
    batch: Any

    # The loss that the user's code computes, as a mean over the terms of a batch.
    mean_loss: Callable[[nn.Module, Any], Tensor]
    count: Callable[[Any], int] = batch_size
    mask: Callable[[Any], Any] | None = None
    optimizer: "OptimizerLike | OptimizersLike | None" = None

    # Microbatches that one optimizer step accumulates.
    accumulation: int = 1

    # What was read, and what can't be taken over, a sentence each.
    notes: tuple[str, ...] = ()


def workload_of(taken: TakenTraining, spec: str, *, factory: str = "") -> Workload:
    """Return the workload of a training; each module that it builds is a copy of the user's."""

    def build() -> nn.Module:
        return without_cache(copy.deepcopy(taken.module))

    def loss(module: nn.Module, batch: Any) -> Tensor:
        return taken.mean_loss(module, batch) * taken.count(batch)

    size = batch_size(taken.batch)
    batch, is_divisible = batches_like(taken.batch)
    return Workload(
        taken.name,
        build,
        batch,
        loss,
        count=taken.count,
        mask=taken.mask,
        optimizer=taken.optimizer,
        spec=spec,
        own_batch=size,
        is_divisible=is_divisible,
        dtype=dtype_of(taken.module),
        accumulation=taken.accumulation,
        notes=taken.notes,
        factory=factory,
    )


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the floating dtype in which most of a module's parameters are."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


class OptimizerLike:
    """Make an optimizer over another copy of a module, with a given one's groups and settings.

    Parameters are matched by their names. The state is not copied: it begins empty.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        self._class = type(optimizer)
        # A plan names an optimizer by these.
        self.__module__ = self._class.__module__
        self.__qualname__ = self._class.__qualname__
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.groups: list[tuple[list[str], dict[str, Any]]] = []
        # The number of parameters that are not of this module.
        self.num_others = 0
        for group in optimizer.param_groups:
            found = [names.get(id(parameter)) for parameter in group["params"]]
            self.num_others += found.count(None)
            own = [name for name in found if name is not None]
            settings = {key: value for key, value in group.items() if key not in NOT_SETTINGS}
            if own:
                self.groups.append((own, settings))
        if not self.groups:
            raise WorkloadError(
                f"the {self._class.__name__} holds no parameter of {type(module).__name__}"
            )
        self._overrides = _overrides(optimizer, [names for names, _ in self.groups], module)
        self._options = _accepted_options(optimizer)
        # Such as `args` of bitsandbytes, which has the bits of the state.
        self._attributes = {
            key: copy.copy(value) for key, value in vars(optimizer).items() if _is_setting(value)
        }

    def __call__(self, module: nn.Module) -> torch.optim.Optimizer:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        groups = []
        for names, settings in self.groups:
            groups.append({**settings, "params": [parameters[name] for name in names]})
        make: Any = self._class
        optimizer: torch.optim.Optimizer = make(groups, **self._options)
        for key in self._attributes.keys() & vars(optimizer).keys():
            vars(optimizer)[key] = self._attributes[key]
        if self._overrides:
            vars(optimizer)["mng"].index2config.update(self._overrides)
        return optimizer

    def summary(self) -> str:
        """Name the optimizer, its number of groups and its learning rate."""
        groups = f" in {len(self.groups)} groups" if len(self.groups) > 1 else ""
        rate = self.groups[0][1].get("lr")
        return f"{self.__qualname__}{groups}" + ("" if rate is None else f", lr {float(rate):g}")


class SteppedTogether(torch.optim.Optimizer):
    """Several optimizers of different parameters as one, which has their groups and their state."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self._share()

    def _share(self) -> None:
        start = 0
        for one in self.optimizers:
            one.state = self.state
            end = start + len(one.param_groups)
            one.param_groups = self.param_groups[start:end]
            start = end

    def __getstate__(self) -> dict[str, Any]:
        # A copy of an optimizer has no attributes but these.
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def step(self, closure: Any = None) -> Any:
        """Step each optimizer."""
        for one in self.optimizers:
            one.step()


class SteppedOnHost(torch.optim.Optimizer):
    """Keep on a device what torchao's `CPUOffloadOptimizer` does, by its documented layout.

    Parameters of at least `minimal_size` elements are stepped on the host, from copies there: the
    device has no state of them, and with `offload_gradients` no gradient after backward. Smaller
    ones are stepped on the device. This one leaves those on the host as they are.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Any = torch.optim.AdamW,
        *,
        offload_gradients: bool = False,
        minimal_size: int = 4096,
        **options: Any,
    ) -> None:
        if optimizer_class is torch.optim.AdamW:
            options.setdefault("fused", True)
        given = [*params]
        groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
        self.make = functools.partial(optimizer_class, **options)
        self._part = self.make(_trained_groups(groups))
        self.optimizer_class = optimizer_class
        self.offload_gradients = offload_gradients
        self.minimal_size = minimal_size
        own = {"optimizer_class": optimizer_class, "offload_gradients": offload_gradients}
        super().__init__(self._part.param_groups, options | own | {"minimal_size": minimal_size})
        for one in self.on_host() if offload_gradients else ():
            one.register_post_accumulate_grad_hook(_drop_gradient)

    def on_host(self) -> list[Tensor]:
        """Return the parameters that are stepped on the host."""
        parameters = [one for group in self.param_groups for one in group["params"]]
        return [one for one in parameters if one.numel() >= self.minimal_size]

    def step(self, closure: Any = None) -> Any:
        """Step the parameters that stay on the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        away = {id(one) for one in self.on_host()}
        groups = []
        for group in self.param_groups:
            left = [one for one in group["params"] if id(one) not in away]
            groups += [{**group, "params": left}] if left else []
        self._part.param_groups = groups
        self._part.state = self.state
        if groups:
            self._part.step()
        return loss

    def __deepcopy__(self, memo: dict[int, Any]) -> "SteppedOnHost":
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied.param_groups = copy.deepcopy(self.param_groups, memo)
        copied.state = collections.defaultdict(dict, copy.deepcopy(dict(self.state), memo))
        return copied


def _trained_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Leave out frozen parameters, and groups that have no others."""
    found = []
    for group in groups:
        given = group["params"]
        parameters = [given] if isinstance(given, Tensor) else [*given]
        trained = [one for one in parameters if one.requires_grad]
        found += [{**group, "params": trained}] if trained else []
    return found


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@contextlib.contextmanager
def stepped_on_host() -> Iterator[None]:
    """Make a `SteppedOnHost` where torchao's class is called, which needs a GPU."""
    replaced: dict[Any, Any] = {}

    def initialize(optimizer: Any, *args: Any, **options: Any) -> None:
        optimizer.__class__ = SteppedOnHost
        optimizer.__init__(*args, **options)

    def replace(made: Any, /, **_: Any) -> None:
        if made.__name__ == "CPUOffloadOptimizer" and made.__module__.startswith("torchao."):
            replaced[made] = made.__init__
            made.__init__ = initialize

    # It may be imported later.
    base: Any = torch.optim.Optimizer
    before = vars(base).get("__init_subclass__")
    for one in base.__subclasses__():
        replace(one)
    base.__init_subclass__ = classmethod(replace)
    try:
        yield
    finally:
        if before is None:
            del base.__init_subclass__
        else:
            base.__init_subclass__ = before
        for made, first in replaced.items():
            made.__init__ = first


class OptimizersLike:
    """Make optimizers like several given ones over another copy of a module, which step as one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], module: nn.Module) -> None:
        self._each = [OptimizerLike(one, module) for one in optimizers]
        self.num_others = sum(one.num_others for one in self._each)
        self.__qualname__ = " and ".join(dict.fromkeys(one.__qualname__ for one in self._each))

    def __call__(self, module: nn.Module) -> torch.optim.Optimizer:
        return SteppedTogether([one(module) for one in self._each])

    def summary(self) -> str:
        """Name each optimizer, equal ones once."""
        texts = dict.fromkeys(one.summary() for one in self._each)
        return f"{len(self._each)} optimizers that step together: {'; '.join(texts)}"


def optimizer_like(
    optimizers: Sequence[torch.optim.Optimizer], module: nn.Module
) -> OptimizerLike | OptimizersLike:
    """Return what makes the same over another copy of the module."""
    if len(optimizers) == 1:
        return OptimizerLike(optimizers[0], module)
    return OptimizersLike(optimizers, module)


def optimizers_together(
    first: torch.optim.Optimizer, called: set[int], *, is_in_backward: bool
) -> tuple[list[torch.optim.Optimizer], list[str]]:
    """Return the first optimizer and those that step after, or inside of, the same backward.

    `called` are the parameters of the modules that were called, by id. Notes are on the others.
    """
    found = [first]
    trained = parameter_ids(first)
    others = []
    for one in gc.get_objects():
        if not issubclass(type(one), torch.optim.Optimizer):
            continue
        own = parameter_ids(one)
        if not own <= called or not trained.isdisjoint(own):
            continue
        parameters = [parameter for group in one.param_groups for parameter in group["params"]]
        if is_in_backward or any(one.grad is not None for one in parameters):
            found.append(one)
            trained |= own
        else:
            others.append(type(one).__name__)
    notes = []
    if is_in_backward:
        notes.append("it steps inside of backward; here all gradients are there before the step")
    if others:
        notes.append(
            f"it has {len(found) + len(others)} optimizers; this is the first that steps, and the "
            f"others ({', '.join(others)}) train other parameters"
        )
    return found, notes


def parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(one) for group in optimizer.param_groups for one in group["params"]}


# Entries of a parameter group that are no settings; schedulers add the second one.
NOT_SETTINGS = ("params", "initial_lr", "base_lr", "param_names")


def _overrides(
    optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]], module: nn.Module
) -> dict[tuple[int, int], Any]:
    """Return what bitsandbytes steps in another way, such as embeddings in 32 bits.

    Its manager has them by module, and by the places of a parameter and of its group.
    """
    manager = vars(optimizer).get("mng")
    given = getattr(manager, "module_weight_config_triple", ())
    configs = {id(getattr(owner, name, None)): config for owner, name, config in given}
    found = {}
    for at, names in enumerate(groups):
        for place, name in enumerate(names):
            parameter = module.get_parameter(name)
            if id(parameter) in configs:
                found[at, place] = configs[id(parameter)]
    return found


SETTING_TYPES = (bool, int, float, str, tuple, torch.dtype, type(None))


def _is_setting(value: Any) -> bool:
    """Return whether an attribute is a number, a text or an object that holds nothing else."""
    inside = vars(value).values() if hasattr(value, "__dict__") else [value]
    return not isinstance(value, type) and all(isinstance(one, SETTING_TYPES) for one in inside)


def _accepted_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options of an optimizer's constructor, from its defaults and its attributes."""
    made = type(optimizer)
    accepted = inspect.signature(made).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in accepted.values())
    options = {
        key: value for key, value in optimizer.defaults.items() if takes_any or key in accepted
    }
    for key, value in vars(optimizer).items():
        if key in [*accepted][1:] and key not in options and _is_setting(value):
            options[key] = value
    missing = [
        name
        for name, one in list(accepted.items())[1:]
        if one.default is one.empty
        and name not in options
        and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    if missing:
        raise WorkloadError(
            f"a {made.__name__} can't be made again, because it needs {', '.join(missing)}: "
            "give --optimizer"
        )
    return options


SUM_TOLERANCE = 1e-3


def is_sum_over_samples(module: nn.Module, batch: Any, loss: Callable[..., Tensor]) -> bool:
    """Return whether a loss is a sum over samples and no mean, by two parts of the batch."""
    size = batch_size(batch)
    if size < 2 or not batches_like(batch)[1]:
        return False
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), seeded(0):
            whole = float(loss(module, batch))
            first = float(loss(module, take(batch, slice(0, size // 2))))
            rest = float(loss(module, take(batch, slice(size // 2, size))))
    except (RuntimeError, ValueError, IndexError, TypeError):
        # Its rows belong together.
        return False
    finally:
        module.train(was_training)
    mean = (first * (size // 2) + rest * (size - size // 2)) / size
    return abs(first + rest - whole) < min(SUM_TOLERANCE * abs(whole), abs(mean - whole))


class Autocast:
    """Run a module's forward under autocast, as a trainer's wrapper around it does."""

    def __init__(self, dtype: torch.dtype | None, convert: Callable[[Any], Any]) -> None:
        self.dtype = dtype

        # One function for all modules, so that compiled code is not compiled again.
        def forward(module: nn.Module, *args: Any, **options: Any) -> Any:
            return self._run(MethodType(type(module).forward, module), module, *args, **options)

        self._convert = convert
        self._forward = forward

    def _run(
        self, forward: Callable[..., Any], module: nn.Module, /, *args: Any, **options: Any
    ) -> Any:
        with torch.autocast(next(module.parameters()).device.type, dtype=self.dtype):
            output = forward(*args, **options)
        return self._convert(output)

    @contextlib.contextmanager
    def __call__(self, module: nn.Module) -> Iterator[None]:
        if self.dtype is None:
            yield
            return
        before = vars(module).get("forward")
        if before is None:
            module.forward = MethodType(self._forward, module)
        else:
            # Trainers replace the forward of a module too, as TRL's do for a chunked loss.
            module.forward = functools.partial(self._run, before, module)
        try:
            yield
        finally:
            del module.forward
            if before is not None:
                module.forward = before


MIXED_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}


# Read the objects of each library.


@stepped_on_host()
def take_training(made: Any) -> TakenTraining:
    """Read model, batch, loss and optimizer off what the user's `make_trainer` returned."""
    given = made if isinstance(made, tuple | list) else (made,)
    kind = type(given[0]) if given else tuple
    known = {(one.__module__.partition(".")[0], one.__name__) for one in kind.__mro__}
    if ("transformers", "Trainer") in known:
        return _of_hugging_face(*given)
    if known & {("lightning", "Trainer"), ("pytorch_lightning", "Trainer")}:
        return _of_lightning(*given)
    if ("accelerate", "Accelerator") in known:
        return _of_accelerator(*given)
    raise WorkloadError(
        f"it returned a {kind.__name__}: return a Trainer of transformers, TRL or Lightning, or "
        "an Accelerator; for a loop of your own use --script train.py"
    )


def _of_hugging_face(trainer: Any) -> TakenTraining:
    """Read a Trainer of Hugging Face before `train`; those of TRL are derived from it."""
    module = bare_module(trainer.accelerator, trainer.model)
    arguments = trainer.args
    batch = trainer._prepare_inputs(_first(trainer.get_train_dataloader()))
    counts = "labels" in batch and (
        trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    )
    count = LabelCount(module) if counts else batch_size
    autocast = autocast_of(trainer.accelerator)

    def mean_loss(model: nn.Module, inputs: Any) -> Tensor:
        # The Trainer removes entries from what it is given.
        options = {"num_items_in_batch": count(inputs)} if counts else {}
        with autocast(model):
            loss: Tensor = trainer.compute_loss(model, {**inputs}, **options)
        return loss

    notes = []
    switches = ("gradient_checkpointing", "activation_checkpointing")
    if any(getattr(arguments, switch, False) is True for switch in switches):
        notes.append("its own recompute is left off here; choose it as a lever")
    if arguments.world_size > 1 or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        notes.append("this is one rank without its wrapper: give --parallel and --ranks to plan")
    return _described(
        trainer,
        module,
        batch,
        mean_loss,
        count=count,
        optimizer=trainer.create_optimizer() or trainer.optimizer,
        accumulation=arguments.gradient_accumulation_steps,
        precision=autocast.dtype,
        notes=notes,
    )


class LabelCount:
    """Count the targets of a batch as Hugging Face's Trainer does, to divide the loss by."""

    def __init__(self, module: nn.Module) -> None:
        name = str(getattr(module, "loss_type", "") or type(module).__name__)
        decodes = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
        self.shifts = not decodes and "ForCausalLM" in name

    def __call__(self, batch: Any) -> int:
        labels = batch["labels"]
        if "shift_labels" in batch:
            labels = batch["shift_labels"]
        elif self.shifts:
            labels = labels[..., 1:]
        return int((labels != IGNORED_TARGET).sum())

    def mask(self, batch: Any) -> Any:
        """Ignore a part of the targets of each row, for gates that need uneven rows."""
        return {**batch, "labels": mask_tails(batch["labels"])}


def _of_lightning(trainer: Any, module: Any = None, data: Any = None) -> TakenTraining:
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
    module.trainer = trainer
    loader = data
    hooks = module
    if hasattr(data, "train_dataloader"):
        data.trainer = trainer
        data.prepare_data()
        data.setup("fit")
        hooks = data
    if data is None or hooks is data:
        loader = hooks.train_dataloader()
    module.setup("fit")
    module.configure_model()
    trainer.precision_plugin.convert_module(module)
    batch = trainer.precision_plugin.convert_input(_first(loader))
    batch = hooks.on_after_batch_transfer(hooks.on_before_batch_transfer(batch, 0), 0)
    optimizer, notes = _lightning_optimizer(module.configure_optimizers())
    dtype = MIXED_DTYPES.get(trainer.precision)
    # As Lightning decides: by the name, or by a second parameter of any name.
    parameters = inspect.signature(module.training_step).parameters
    with_index = "batch_idx" in parameters or len(parameters) > 1

    def mean_loss(model: nn.Module, inputs: Any) -> Tensor:
        device = next(model.parameters()).device.type
        precision = torch.autocast(device, dtype=dtype) if dtype else contextlib.nullcontext()
        with _in_training(model, trainer) as step, precision:
            output = step(inputs, 0) if with_index else step(inputs)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise WorkloadError(f"training_step returned {loss!r:.40} for the first batch")
        return loss

    # The optimizer holds the parameters of the user's module, which is copied without its trainer.
    return _described(
        trainer,
        module,
        batch,
        mean_loss,
        optimizer=optimizer,
        accumulation=trainer.accumulate_grad_batches,
        precision=dtype,
        notes=notes,
    )


def _lightning_optimizer(configured: Any) -> tuple[Any, list[str]]:
    """Return the optimizer of the many forms that `configure_optimizers` may return."""
    if isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], list):
        configured = configured[0]
    several = configured if isinstance(configured, list | tuple) else [configured]
    if not several or several[0] is None:
        return None, ["configure_optimizers returned none, so AdamW is assumed"]
    first = several[0]
    notes = []
    if len(several) > 1:
        notes.append(f"it has {len(several)} optimizers, of which the first is taken")
    return first["optimizer"] if isinstance(first, Mapping) else first, notes


@contextlib.contextmanager
def _in_training(model: nn.Module, trainer: Any) -> Iterator[Any]:
    """Give a copy of a LightningModule its trainer, and let it log nothing; yield its step.

    Where it is wrapped, the step is called through the wrapper's forward, as Lightning does.
    """
    inner: Any = next(one for one in model.modules() if hasattr(one, "training_step"))
    inner.trainer = trainer
    for name in SILENT_METHODS:
        vars(inner)[name] = _log_nothing
    before = vars(inner).get("forward")
    try:
        if inner is model:
            yield inner.training_step
        else:
            inner.forward = inner.training_step
            yield model
    finally:
        if inner is not model:
            del inner.forward
            if before is not None:
                inner.forward = before
        for name in SILENT_METHODS:
            del vars(inner)[name]
        inner.trainer = None


SILENT_METHODS = ("log", "log_dict")


def _log_nothing(*arguments: Any, **options: Any) -> None:
    """Stand in for the methods of a LightningModule that log."""


def _of_accelerator(accelerator: Any, loss: Callable[..., Any] | None = None) -> TakenTraining:
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
    batch = _first(given["loader"][0])
    autocast = autocast_of(accelerator)

    def mean_loss(model: nn.Module, inputs: Any) -> Tensor:
        with autocast(model):
            found = call(model, inputs) if loss is None else loss(model, inputs)
        if loss is None:
            is_mapping = isinstance(found, Mapping)
            found = found.get("loss") if is_mapping else getattr(found, "loss", None)
        if not isinstance(found, Tensor):
            raise WorkloadError(
                f"{type(model).__name__} returns no loss: return (accelerator, loss) with a "
                "function loss(model, batch)"
            )
        return found

    notes = []
    for name, found in given.items():
        if len(found) > 1:
            notes.append(f"it has prepared {len(found)} {name}s, of which the first is taken")
    return _described(
        accelerator,
        module,
        batch,
        mean_loss,
        optimizer=given["optimizer"][0].optimizer,
        accumulation=accelerator.gradient_accumulation_steps,
        precision=autocast.dtype,
        notes=notes,
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


def precision_around(module: nn.Module, variables: Sequence[Any]) -> Autocast | None:
    """Return the precision of an Accelerator among these, whose wrapper is taken off a module."""
    if "_original_forward" not in vars(module):
        return None
    known = [one for one in variables if type(one).__name__ == "Accelerator"]
    if not known:
        raise WorkloadError("the model is wrapped by an Accelerator that is in no variable")
    bare_module(known[0], module)
    return autocast_of(known[0])


def _first(loader: Any) -> Any:
    """Return the first batch of a loader, or of each of several loaders."""
    if isinstance(loader, Mapping):
        return {name: _first(one) for name, one in loader.items()}
    if isinstance(loader, list | tuple):
        return [_first(one) for one in loader]
    for batch in loader:
        return map_tensors(batch, lambda tensor: tensor.detach())
    raise WorkloadError("the loader of the training data is empty")


def _described(
    trainer: Any,
    module: nn.Module,
    batch: Any,
    mean_loss: Callable[[nn.Module, Any], Tensor],
    *,
    optimizer: Any,
    accumulation: int,
    precision: torch.dtype | None,
    notes: Sequence[str],
    count: Callable[[Any], int] = batch_size,
) -> TakenTraining:
    """Put together what was read, with a sentence on each part of it."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    made = None if optimizer is None else OptimizerLike(optimizer, module)
    read = [
        f"{type(trainer).__name__}: {type(module).__name__}, {batch_size(batch)} samples a batch",
        "AdamW" if made is None else made.summary(),
    ]
    if precision is not None:
        read.append(f"autocast to {str(precision).removeprefix('torch.')}")
    if accumulation > 1:
        read.append(f"{accumulation} batches a step")
    if made is not None and made.num_others:
        notes = [*notes, f"{made.num_others} parameters of its optimizer are not of the model"]
    return TakenTraining(
        name=type(module).__name__,
        module=module,
        batch=batch,
        mean_loss=mean_loss,
        count=count,
        mask=count.mask if isinstance(count, LabelCount) else None,
        optimizer=made,
        accumulation=accumulation,
        notes=("; ".join(read), *notes),
    )
