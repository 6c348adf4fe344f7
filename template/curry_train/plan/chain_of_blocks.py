"""A model as a chain of blocks, for any microbatch: from figures of two, because bytes and FLOPs grow in proportion.

Proof: `python -m pytest tests/test_plan.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import nn

from .. import primitives
from .device_profile import DeviceProfile
from .estimate import Sketch, StepEstimate
from .menu import SIZES, Measured, Menu, measure_menus
from .optimizers import make_optimizer
from .options import NONE, OFFLOAD, Option
from .solve import Choice, Stage, least_peak, solve

HEAD = ""  # beside the names of blocks


@dataclass(frozen=True)
class Solved:
    """The choices for one microbatch; where nothing fits, those of the least peak, which is above the budget then."""

    options: Mapping[str, Option]
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class Chain:
    """`steps` are whole steps as they are, one for each of `SIZES`; `kinds` has the names of blocks and what each way
    to run them costs; `left_out` says which ways could not be run, and why."""

    sketch: Sketch
    profile: DeviceProfile
    steps: tuple[StepEstimate, ...]
    kinds: tuple[tuple[tuple[str, ...], Menu], ...]
    left_out: tuple[str, ...] = ()
    chunk_tokens: int | None = None

    def solve(
        self,
        microbatch: int,
        budget_bytes: int,
        *,
        accumulated: bool,
        less: Mapping[str, float] = MappingProxyType({}),
    ) -> Solved:
        """`accumulated`: all gradients are there from the microsteps before. `less` is known to be there less than the
        chain says, for each sample: by block, and `HEAD`."""
        menus = {name: self._menu(name) for name in self.names}
        plain, least = (
            self.plain_seconds(microbatch),
            self._line(microbatch, lambda step: step.step),
        )
        if not menus:
            peak = self._line(microbatch, lambda step: step.peak_bytes)
            return Solved({}, peak, plain)
        stages, head = self._stages(menus, microbatch, accumulated=accumulated, less=less)
        solved = (
            solve(stages, budget_bytes, head_bytes=head) if budget_bytes >= max(1, least) else None
        )
        found = solved or least_peak(stages, head_bytes=head)
        options = {
            name: menu[index][0]
            for (name, menu), index in zip(menus.items(), found.chosen, strict=True)
        }
        return Solved(options, max(found.peak_bytes, least), plain + found.cost)

    def least(self, microbatch: int, *, accumulated: bool) -> tuple[dict[str, Option], int]:
        """The choices of the least peak, and of those what holds least, with the peak: by bytes alone, so that they are
        the same however fast the device is."""
        menus = {name: self._menu(name) for name in self.names}
        stages, head = self._stages(menus, microbatch, accumulated=accumulated, less={})
        held = [
            replace(each, choices=tuple(replace(c, cost=c.held_bytes) for c in each.choices))
            for each in stages
        ]
        if not held:
            return {}, self._line(microbatch, lambda step: step.peak_bytes)
        found = least_peak(held, head_bytes=head)
        options = {
            name: menu[index][0]
            for (name, menu), index in zip(menus.items(), found.chosen, strict=True)
        }
        return options, max(found.peak_bytes, self._line(microbatch, lambda step: step.step))

    def moments(
        self,
        microbatch: int,
        options: Mapping[str, Option],
        *,
        accumulated: bool,
        less: Mapping[str, float],
    ) -> dict[str, int]:
        """What the chain says of these options while each block is in backward, and before that."""
        menus = {name: self._menu(name) for name in self.names}
        stages, head = self._stages(menus, microbatch, accumulated=accumulated, less=less)
        held, found = 0, {}
        for (name, menu), stage in zip(menus.items(), stages, strict=True):
            choice = next(
                c
                for c, (option, _) in zip(stage.choices, menu, strict=True)
                if option == options[name]
            )
            held += choice.held_bytes
            found[name] = held + choice.transient_bytes + stage.standing_bytes
        return found | {HEAD: held + head}

    @property
    def names(self) -> list[str]:
        """Of the blocks that have a menu, in the model's order."""
        known = {name for names, _ in self.kinds for name in names}
        return [name for name in self.steps[0].blocks if name in known]

    def seconds(self, microbatch: int, options: Mapping[str, Option]) -> float:
        """Forward and backward with these options, as `solve` prices them."""
        total = self.plain_seconds(microbatch)
        for name in self.names:
            menu = self._menu(name)
            choices = self._choices(menu, microbatch, self.steps[0].blocks[name].calls)
            total += next(
                c.cost
                for c, (option, _) in zip(choices, menu, strict=True)
                if option == options[name]
            )
        return total

    def offers(self, option: Option) -> bool:
        """Whether every block may be run so."""
        return all(any(option == offered for offered, _ in menu) for _, menu in self.kinds)

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
        """The blocks as the solver takes them, and the bytes of the head."""
        first = self.steps[0]
        standing = self._line(microbatch, lambda step: step.fixed + step.rest)
        later, gradients = first.head_gradients, {}
        for name in reversed(list(first.blocks)):  # in the order of backward
            gradients[name] = later
            later += first.blocks[name].gradients
        stages, known = [], {}
        for name, menu in menus.items():
            block = first.blocks[name]
            there = first.gradients - block.gradients if accumulated else gradients[name]
            if (key := (id(menu[0]), block.calls)) not in known:
                known[key] = self._choices(menu, microbatch, block.calls)
            stages.append(
                Stage(known[key], max(0, standing + there - round(microbatch * less.get(name, 0))))
            )
        head = self._line(microbatch, lambda step: step.fixed + step.head) + (
            first.gradients if accumulated else 0
        )
        return stages, max(0, head - round(microbatch * less.get(HEAD, 0)))

    def plain_seconds(self, microbatch: int) -> float:
        """Forward and backward as they are."""
        flops, moved = (
            self._lines(microbatch, [getattr(step, name) for step in self.steps])
            for name in ("flops", "moved")
        )
        times = self.profile.operation_seconds(flops, moved, dtype=self._dtype)
        return float(times[moved > 0].sum())

    def plain_flops(self, microbatch: int) -> float:
        return float(self._lines(microbatch, [step.flops for step in self.steps]).sum())

    @property
    def optimizer_seconds(self) -> float:
        """Gradients and parameters are read, state and parameters written: bytes alone."""
        step = self.steps[0]
        return (2 * step.fixed + step.gradients) / self.profile.bytes_per_second

    def fixed_with(self, optimizer: str) -> int:
        """Parameters, buffers, batch and state with another optimizer."""
        module = self.sketch.build()
        other, trained = (
            make_optimizer(optimizer, module),
            [p for p in module.parameters() if p.requires_grad],
        )
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        other.step()
        state = sum(
            t.nbytes
            for kept in other.state.values()
            for t in kept.values()
            if isinstance(t, torch.Tensor)
        )
        step = self.steps[0]
        return (
            state
            + step.timeline.owners["parameters"][0]
            + step.timeline.owners["buffers and batch"][0]
        )

    def _choices(self, menu: Menu, microbatch: int, calls: int) -> tuple[Choice, ...]:
        plain = next(
            self._seconds(option, measured, microbatch)
            for option, measured in menu
            if option.kind == NONE
        )
        return tuple(
            Choice(
                str(option),
                calls * self._line_of(microbatch, [m.held for m in measured]),
                self._line_of(microbatch, [m.transient for m in measured]),
                max(0.0, calls * (self._seconds(option, measured, microbatch) - plain))
                if option.kind != NONE
                else 0.0,
            )
            for option, measured in menu
        )

    def _seconds(self, option: Option, measured: tuple[Measured, ...], microbatch: int) -> float:
        flops, moved, again = (
            self._lines(microbatch, [getattr(m, name) for m in measured])
            for name in ("flops", "moved", "again")
        )
        seconds = Measured(0, 0, flops, moved, again).seconds(option, self.profile, self._dtype)
        link = self.profile.host_bytes_per_second
        if option.kind == OFFLOAD and link is not None:
            away = self._line_of(microbatch, [m.moved_away for m in measured])
            return max(seconds, 2 * away / link)
        return seconds

    @property
    def _dtype(self) -> str:
        return str(self.sketch.case.dtype).removeprefix("torch.")

    def _line(self, microbatch: int, figure: Callable[[StepEstimate], int]) -> int:
        return self._line_of(microbatch, [figure(step) for step in self.steps])

    def _line_of(self, microbatch: int, figures: list[int]) -> int:
        first, second = figures
        slope = (second - first) / (SIZES[1] - SIZES[0])
        return max(0, round(first + slope * (microbatch - SIZES[0])))

    def _lines(self, microbatch: int, figures: list[Any]) -> Any:
        first, second = figures
        if len(first) != len(second):  # another number of operations: in proportion
            return second * (microbatch / SIZES[1])
        return numpy.maximum(
            0.0, first + (second - first) * ((microbatch - SIZES[0]) / (SIZES[1] - SIZES[0]))
        )


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
    """Measure whole steps and, unless `like` has them, the blocks; options of kinds in `without` are left out, and
    regions may run the modules that `also` takes once more.

    A ValueError says that the loss does not run in chunks.
    """
    changed: list[nn.Module] = []

    def chunk(module: nn.Module) -> None:
        primitives.apply_chunked_loss(module, chunk_tokens=chunk_tokens)
        changed.append(module)

    steps = []
    for size in SIZES:
        tell(f"estimating a step of {size} samples{' with chunked loss' if chunk_tokens else ''}")
        steps.append(sketch.step(size, change=None if chunk_tokens is None else chunk))
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
