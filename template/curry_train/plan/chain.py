"""A model as a chain of blocks, with the bytes and seconds of any microbatch size.

Blocks and whole steps are measured at two sizes; figures of other sizes lie on the line through
them, because bytes and FLOPs are linear in the microbatch.

Proof: `python -m pytest tests/plan/test_plan.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import nn

from .. import primitives
from .costs import MEASURED_MICROBATCH_SIZES, Measured, Menu, measure_menus
from .device import DeviceProfile
from .estimate import Sketch, StepEstimate
from .optimizers import make_optimizer
from .profiler import BATCH_GROUP, PARAMETERS_GROUP
from .saved import NONE_KIND, OFFLOAD_KIND, Option
from .solve import Choice, Stage, least_peak, solve

HEAD_KEY = ""  # the key of the head, where figures are stored by block name


@dataclass(frozen=True)
class Solved:
    """The options for one microbatch size.

    Where nothing fits, they are those of the least peak, and `peak_bytes` is above the budget.
    """

    options: Mapping[str, Option]
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class Chain:
    """Measured costs of a model's blocks and whole steps."""

    sketch: Sketch
    profile: DeviceProfile
    steps: tuple[StepEstimate, ...]  # plain whole steps, one for each of `SIZES`
    kinds: tuple[tuple[tuple[str, ...], Menu], ...]  # names of blocks, and what each option costs
    left_out: tuple[str, ...] = ()  # options that could not run, with the reason
    chunk_tokens: int | None = None

    def solve(
        self,
        microbatch: int,
        budget_bytes: int,
        *,
        accumulated: bool,
        less: Mapping[str, float] = MappingProxyType({}),
    ) -> Solved:
        """Choose the fastest options that fit the budget.

        `accumulated`: all gradients of earlier microbatches are in memory. `less`: bytes per
        sample by which the chain is known to overestimate, by block name and `HEAD_KEY`.
        """
        menus = {name: self._menu(name) for name in self.names}
        plain = self.plain_seconds(microbatch)
        least = self._line(microbatch, lambda step: step.step)
        if not menus:
            peak = self._line(microbatch, lambda step: step.peak_bytes)
            return Solved({}, peak, plain)

        stages, head = self._stages(menus, microbatch, accumulated=accumulated, less=less)
        solved = None
        if budget_bytes >= max(1, least):
            solved = solve(stages, budget_bytes, head_bytes=head)
        found = solved or least_peak(stages, head_bytes=head)
        options = _chosen_options(menus, found.chosen)
        return Solved(options, max(found.peak_bytes, least), plain + found.cost)

    def least(self, microbatch: int, *, accumulated: bool) -> tuple[dict[str, Option], int]:
        """Choose the options with the least peak, and return them with that peak.

        Of options with equal peaks, those that hold least win. Time plays no part, so the choice
        is the same for every device.
        """
        menus = {name: self._menu(name) for name in self.names}
        stages, head = self._stages(menus, microbatch, accumulated=accumulated, less={})
        if not stages:
            return {}, self._line(microbatch, lambda step: step.peak_bytes)

        priced_by_bytes = []
        for stage in stages:
            choices = tuple(replace(choice, cost=choice.held_bytes) for choice in stage.choices)
            priced_by_bytes.append(replace(stage, choices=choices))
        found = least_peak(priced_by_bytes, head_bytes=head)
        options = _chosen_options(menus, found.chosen)
        return options, max(found.peak_bytes, self._line(microbatch, lambda step: step.step))

    def moments(
        self,
        microbatch: int,
        options: Mapping[str, Option],
        *,
        accumulated: bool,
        less: Mapping[str, float],
    ) -> dict[str, int]:
        """Predict the bytes in the backward of each block, and before it (`HEAD_KEY`)."""
        menus = {name: self._menu(name) for name in self.names}
        stages, head = self._stages(menus, microbatch, accumulated=accumulated, less=less)
        held = 0
        predicted = {}
        for (name, menu), stage in zip(menus.items(), stages, strict=True):
            choice = _choice_of(options[name], menu, stage.choices)
            held += choice.held_bytes
            predicted[name] = held + choice.transient_bytes + stage.standing_bytes
        return predicted | {HEAD_KEY: held + head}

    @property
    def names(self) -> list[str]:
        """The blocks that have a menu, in the model's order."""
        known = {name for names, _ in self.kinds for name in names}
        return [name for name in self.steps[0].blocks if name in known]

    def seconds(self, microbatch: int, options: Mapping[str, Option]) -> float:
        """Predict the time of forward and backward under these options, as `solve` does."""
        total = self.plain_seconds(microbatch)
        for name in self.names:
            menu = self._menu(name)
            choices = self._choices(menu, microbatch, self.steps[0].blocks[name].calls)
            total += _choice_of(options[name], menu, choices).cost
        return total

    def offers(self, option: Option) -> bool:
        """Check whether the option is on the menu of every block."""
        return all(_is_on_menu(option, menu) for _, menu in self.kinds)

    def _menu(self, name: str) -> Menu:
        return next(menu for names, menu in self.kinds if name in names)

    def _stages(
        self,
        menus: Mapping[str, Menu],
        microbatch: int,
        *,
        accumulated: bool,
        less: Mapping[str, float],
    ) -> tuple[list[Stage], int]:
        """Build the solver's stages, one per block, and the bytes of the head."""
        first = self.steps[0]
        standing = self._line(microbatch, lambda step: step.fixed + step.rest)

        # Backward runs from the last block to the first: gradients of later blocks exist already.
        gradients = {}
        later = first.head_gradients
        for name in reversed(list(first.blocks)):
            gradients[name] = later
            later += first.blocks[name].gradients

        stages = []
        known: dict[tuple[int, int], tuple[Choice, ...]] = {}
        for name, menu in menus.items():
            block = first.blocks[name]
            others = first.gradients - block.gradients if accumulated else gradients[name]
            key = (id(menu[0]), block.calls)
            if key not in known:
                known[key] = self._choices(menu, microbatch, block.calls)
            correction = round(microbatch * less.get(name, 0))
            stages.append(Stage(known[key], max(0, standing + others - correction)))

        head = self._line(microbatch, lambda step: step.fixed + step.head)
        if accumulated:
            head += first.gradients
        return stages, max(0, head - round(microbatch * less.get(HEAD_KEY, 0)))

    def plain_seconds(self, microbatch: int) -> float:
        """Predict the time of forward and backward without recompute."""
        flops = self._lines(microbatch, [step.flops for step in self.steps])
        moved = self._lines(microbatch, [step.moved for step in self.steps])
        times = self.profile.operation_seconds(flops, moved, dtype=self._dtype)
        return float(times[moved > 0].sum())

    def plain_flops(self, microbatch: int) -> float:
        return float(self._lines(microbatch, [step.flops for step in self.steps]).sum())

    @property
    def optimizer_seconds(self) -> float:
        step = self.steps[0]
        return self.profile.optimizer_seconds(step.fixed, step.gradients)

    def fixed_with(self, optimizer: str) -> int:
        """Return the bytes of parameters, buffers, batch and state with another optimizer."""
        module = self.sketch.build()
        other = make_optimizer(optimizer, module)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        other.step()

        state = 0
        for entries in other.state.values():
            state += sum(
                entry.nbytes for entry in entries.values() if isinstance(entry, torch.Tensor)
            )
        owners = self.steps[0].timeline.owners
        return state + owners[PARAMETERS_GROUP][0] + owners[BATCH_GROUP][0]

    def _choices(self, menu: Menu, microbatch: int, calls: int) -> tuple[Choice, ...]:
        """Price a menu for a microbatch size; costs are seconds above the plain block."""
        plain = next(
            self._seconds(option, measured, microbatch)
            for option, measured in menu
            if option.kind == NONE_KIND
        )
        choices = []
        for option, measured in menu:
            cost = 0.0
            if option.kind != NONE_KIND:
                cost = max(0.0, calls * (self._seconds(option, measured, microbatch) - plain))
            held = self._line_of(microbatch, [size.held for size in measured])
            transient = self._line_of(microbatch, [size.transient for size in measured])
            choices.append(Choice(str(option), calls * held, transient, cost))
        return tuple(choices)

    def _seconds(self, option: Option, measured: tuple[Measured, ...], microbatch: int) -> float:
        """Predict the time of forward and backward of one block under an option."""
        flops = self._lines(microbatch, [size.flops for size in measured])
        moved = self._lines(microbatch, [size.moved for size in measured])
        again = self._lines(microbatch, [size.again for size in measured])
        seconds = Measured(0, 0, flops, moved, again).seconds(option, self.profile, self._dtype)

        # Offload copies to the host and back; the copies overlap with the computation.
        link = self.profile.host_bytes_per_second
        if option.kind == OFFLOAD_KIND and link is not None:
            away = self._line_of(microbatch, [size.moved_away for size in measured])
            return max(seconds, 2 * away / link)
        return seconds

    @property
    def _dtype(self) -> str:
        return str(self.sketch.case.dtype).removeprefix("torch.")

    def _line(self, microbatch: int, figure: Callable[[StepEstimate], int]) -> int:
        """Extrapolate a figure of the whole step to a microbatch size."""
        return self._line_of(microbatch, [figure(step) for step in self.steps])

    def _line_of(self, microbatch: int, figures: list[int]) -> int:
        """Extrapolate a figure from its values at `SIZES`."""
        first, second = figures
        slope = (second - first) / (MEASURED_MICROBATCH_SIZES[1] - MEASURED_MICROBATCH_SIZES[0])
        return max(0, round(first + slope * (microbatch - MEASURED_MICROBATCH_SIZES[0])))

    def _lines(self, microbatch: int, figures: list[Any]) -> Any:
        """Extrapolate a figure of each operation from its values at `SIZES`.

        If the two sizes run different numbers of operations, scale the larger one in proportion.
        """
        first, second = figures
        if len(first) != len(second):
            return second * (microbatch / MEASURED_MICROBATCH_SIZES[1])
        return numpy.maximum(
            0.0,
            first
            + (second - first)
            * (
                (microbatch - MEASURED_MICROBATCH_SIZES[0])
                / (MEASURED_MICROBATCH_SIZES[1] - MEASURED_MICROBATCH_SIZES[0])
            ),
        )


def _chosen_options(menus: Mapping[str, Menu], chosen: Sequence[int]) -> dict[str, Option]:
    """Return the option of each block from the indices that the solver chose."""
    return {name: menu[index][0] for (name, menu), index in zip(menus.items(), chosen, strict=True)}


def _choice_of(option: Option, menu: Menu, choices: Sequence[Choice]) -> Choice:
    """Return the choice that belongs to an option of the menu."""
    return next(
        choice for choice, (offered, _) in zip(choices, menu, strict=True) if offered == option
    )


def _is_on_menu(option: Option, menu: Menu) -> bool:
    return any(option == offered for offered, _ in menu)


def measure_chain(
    sketch: Sketch,
    profile: DeviceProfile,
    *,
    chunk_tokens: int | None = None,
    like: Chain | None = None,
    without: Sequence[str] = (),
    also: Sequence[str] = (),
    tell: Callable[[str], None] = lambda message: None,
) -> Chain:
    """Measure whole steps and the costs of each block.

    With `like` the blocks' costs are taken from that chain. Options of the kinds in `without` are
    left out; regions may recompute the modules in `also`. Raises a ValueError if `chunk_tokens` is
    given and the loss does not run in chunks.
    """
    changed: list[nn.Module] = []

    def chunk(module: nn.Module) -> None:
        primitives.apply_chunked_loss(module, chunk_tokens=chunk_tokens)
        changed.append(module)

    steps = []
    for size in MEASURED_MICROBATCH_SIZES:
        tell(f"estimating a step of {size} samples{' with chunked loss' if chunk_tokens else ''}")
        steps.append(sketch.step(size, change=None if chunk_tokens is None else chunk, alone=True))
        for name, use in primitives.chunked_loss_report(changed[-1]).items() if changed else ():
            if not use.num_chunked:
                raise ValueError(
                    f"the loss of {name} does not run in chunks ({use}): leave the loss whole"
                )
    if like is not None:
        return Chain(sketch, profile, tuple(steps), like.kinds, like.left_out, chunk_tokens)

    offload = profile.host_bytes_per_second is not None and sketch.why_real is None
    kinds, left_out = measure_menus(
        sketch, steps, offload=offload, without=without, also=also, tell=tell
    )
    return Chain(sketch, profile, tuple(steps), kinds, left_out, chunk_tokens)
