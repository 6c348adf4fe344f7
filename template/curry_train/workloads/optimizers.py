"""Copy the user's optimizer over a copy of the model, as it is or as it would be on a GPU.

    make = OptimizerLike(optimizers, module)
    optimizer = make(copy_of_module)

What other libraries need is here alone, as torchao's optimizer on the host, which can be made only
where there is a GPU.

Proof: `python -m pytest tests/workloads/test_from_trainer.py tests/workloads/test_from_script.py`.
"""

import copy
import functools
import gc
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .workload import WorkloadError, made_by

# A copy of these is part of a copied optimizer; other objects are shared.
OWNED_TYPES = (Tensor, dict, list, set, Optimizer)


def copy_optimizer(optimizer: Optimizer, parameters: Mapping[Tensor, Tensor]) -> Optimizer:
    """Copy an optimizer and its state over these parameters, by the original's.

    torch copies groups and state alone, so the attributes of a subclass are added to the copy.
    Methods that were replaced on the original, as by a scheduler, are left out: they step that one.
    """
    memo: dict[int, Any] = {id(one): other for one, other in parameters.items()}
    copied = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        is_replaced_method = callable(value) and hasattr(type(optimizer), name)
        if name in vars(copied) or is_replaced_method:
            continue
        is_owned = isinstance(value, OWNED_TYPES)
        vars(copied)[name] = copy.deepcopy(value, memo) if is_owned else value
    return copied


class OptimizerLike:
    """Copy the user's optimizers over another copy of their module; several step as one.

    Parameters are matched by their names. Those of other modules are left out.
    """

    def __init__(self, optimizers: Sequence[Optimizer], module: nn.Module) -> None:
        self._optimizers = optimizers
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        # A plan names an optimizer by these.
        self.__module__ = type(optimizers[0]).__module__
        names = dict.fromkeys(type(one).__qualname__ for one in optimizers)
        self.__qualname__ = " and ".join(names)
        held = parameters_of(*optimizers)
        # The number of parameters that are not of this module.
        self.num_others = sum(one not in self._names for one in held)
        if self.num_others == len(held):
            raise WorkloadError(
                f"the {self.__qualname__} holds no parameter of {type(module).__name__}"
            )
        for one in optimizers:
            # bitsandbytes finds here what it steps in another way, such as embeddings in 32 bits.
            getattr(one, "check_overrides", bool)()

    def __call__(self, module: nn.Module) -> Optimizer:
        found = dict(module.named_parameters(remove_duplicate=False))
        parameters = {known: found[name] for known, name in self._names.items()}
        made = [_copy_over(one, parameters) for one in self._optimizers]
        return made[0] if len(made) == 1 else SteppedTogether(made)


def _copy_over(optimizer: Optimizer, parameters: Mapping[Any, Tensor]) -> Optimizer:
    """Copy an optimizer over parameters that may be on another device, or have no values."""
    copied = copy_optimizer(optimizer, parameters)
    if isinstance(copied, SteppedOnHost):
        copied.attach()
    copied.param_groups[:] = _select_groups(
        copied.param_groups, {*parameters.values()}.__contains__
    )
    with torch.no_grad():
        for parameter, state in copied.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return copied


class SteppedTogether(Optimizer):
    """Several optimizers of different parameters as one, which has their groups and their state."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        for one in optimizers:
            self.state.update(one.state)

    def step(self, closure: Any = None) -> Any:
        """Step each optimizer, on groups and state of this one, which may have been replaced."""
        groups = iter(self.param_groups)
        for one in self.optimizers:
            one.state = self.state
            one.param_groups = [*itertools.islice(groups, len(one.param_groups))]
            one.step()


class SteppedOnHost(Optimizer):
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
        self.make = functools.partial(optimizer_class, **options)
        self._part = self.make(params)
        self.offload_gradients = offload_gradients
        self.minimal_size = minimal_size
        super().__init__(_select_groups(self._part.param_groups, lambda one: one.requires_grad), {})
        self.attach()

    def attach(self) -> None:
        """Let backward drop the gradients that the host has."""
        for one in self.on_host() if self.offload_gradients else ():
            one.register_post_accumulate_grad_hook(_drop_gradient)

    def on_host(self) -> list[Tensor]:
        """Return the parameters that are stepped on the host."""
        return [one for one in parameters_of(self) if one.numel() >= self.minimal_size]

    def step(self, closure: Any = None) -> Any:
        """Step the parameters that stay on the device; a script waits at its first step."""
        groups = _select_groups(self.param_groups, lambda one: one.numel() < self.minimal_size)
        self._part.param_groups = groups
        self._part.state = self.state
        if groups:
            self._part.step()


def _select_groups(
    groups: Iterable[Mapping[str, Any]], is_wanted: Callable[[Tensor], bool]
) -> list[dict[str, Any]]:
    """Leave out other parameters, and groups that have no wanted ones."""
    found = []
    for group in groups:
        wanted = [*filter(is_wanted, group["params"])]
        found += [{**group, "params": wanted}] if wanted else []
    return found


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _make(kind: type, *args: Any, **options: Any) -> Any:
    """Make an optimizer, and a `SteppedOnHost` in place of torchao's, which needs a GPU."""
    if kind.__name__ == "CPUOffloadOptimizer" and kind.__module__.startswith("torchao."):
        return SteppedOnHost(*args, **options)
    return object.__new__(kind)


stepped_on_host = functools.partial(made_by, Optimizer, _make)


def optimizers_together(
    first: Optimizer, called: Collection[Tensor], *, is_in_backward: bool
) -> tuple[list[Optimizer], list[str]]:
    """Return the first optimizer and those that step after, or inside of, the same backward.

    `called` are the parameters of the modules that were called. Notes are on the others.
    """
    found = [first]
    trained = {*parameters_of(first)}
    others = []
    for one in gc.get_objects():
        if not issubclass(type(one), Optimizer):
            continue
        own = {*parameters_of(one)}
        if not own.issubset(called) or not trained.isdisjoint(own):
            continue
        if is_in_backward or any(held.grad is not None for held in own):
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
            f"others ({', '.join(others)}) train other parameters, which are left out"
        )
    return found, notes


def parameters_of(*optimizers: Optimizer) -> list[Tensor]:
    groups = [group for one in optimizers for group in one.param_groups]
    return [parameter for group in groups for parameter in group["params"]]
