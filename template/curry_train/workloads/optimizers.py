"""Make the user's optimizer again over a copy of the model, as it is or as it would be on a GPU.

    make = optimizer_like(optimizers, module)
    optimizer = make(copy_of_module)

What other libraries need is here alone: torchao's optimizer on the host, which can be made only
where there is a GPU, and the settings that bitsandbytes keeps besides its parameter groups.

Proof: `python -m pytest tests/workloads/test_from_trainer.py tests/workloads/test_from_script.py`.
"""

import collections
import contextlib
import copy
import functools
import gc
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .workload import WorkloadError


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
