"""A plan as a file: what to do with each block, for which batch, and what was predicted of it.

    plan = Plan.load("plan.json")
    plan.apply(model)                  # before DDP, fully_shard and torch.compile

Proof: `python -m pytest tests/test_plan.py`.
"""

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from torch import nn

from .. import primitives
from ..core.blocks import NoBlocks, find_blocks
from ..core.derive import Derived
from ..core.sizes import format_bytes
from .options import NONE, Option, apply_options

VERSION = 1


class PlanMismatch(ValueError):
    """A plan that was made for another model."""


@dataclass(frozen=True)
class Candidate:
    """One microbatch that was considered, with its best choice of blocks, if any fits."""

    microbatch: int
    steps: int
    chunked_loss: bool
    peak_bytes: int
    step_seconds: float | None
    options: Mapping[str, Option] = field(default_factory=dict)
    checked: bool = False  # the peak is that of the whole step, not of the chain
    flops: float | None = None  # of all microsteps, if it was checked

    def within(self, budget_bytes: int) -> "Candidate":
        """Without a time, if it is above the budget."""
        return self if self.peak_bytes <= budget_bytes else replace(self, step_seconds=None)

    def summary(self) -> str:
        """Runs of equal options, such as `30 regions, 2 none`."""
        counted: dict[str, int] = {}
        for option in self.options.values():
            counted[str(option)] = counted.get(str(option), 0) + 1
        parts = [f"{number} {name}" for name, number in counted.items()]
        return ", ".join([*(["chunked loss"] if self.chunked_loss else []), *parts]) or "as it is"


@dataclass(frozen=True)
class Plan:
    """`fingerprint` has for each block its class and the shapes of its parameters; `candidates` are best first."""

    workload: str
    budget_bytes: int
    microbatch: int
    steps: int
    ranks: int
    chunk_tokens: int | None  # of the chunked loss, if it is used
    options: Mapping[str, Option]
    peak_bytes: int
    step_seconds: float
    plain_seconds: float
    flops: float
    plain_flops: float
    fingerprint: Mapping[str, str]
    settings: Mapping[str, Any]
    why: str
    candidates: tuple[Candidate, ...] = ()

    def apply(self, model: nn.Module) -> list[str]:
        """Make the blocks run as planned, in place; the names of the modules that changed. The model's names, state
        dict and source stay. A model with other blocks is refused."""
        self.check(model)
        changed = apply_options(model, self.options)
        if self.chunk_tokens is None:
            return changed
        return changed + primitives.apply_chunked_loss(model, chunk_tokens=self.chunk_tokens)

    def check(self, model: nn.Module) -> None:
        """Raise for a model whose blocks are not those of the plan, with the first difference, and for one whose blocks
        are changed already."""
        modules, advice = dict(model.named_modules()), "make a plan for this model"
        for name in self.fingerprint:
            if name not in modules:
                what = f"which {type(model).__name__} does not have"
                raise PlanMismatch(f"the plan is for a model with a block {name}, {what}: {advice}")
        for name, module in modules.items():
            if isinstance(module, Derived):
                raise PlanMismatch(
                    f"{name or 'the model'} is changed already, it is a {type(module).__name__}: apply the plan to a "
                    "model as it was built, before other techniques, DDP, fully_shard and torch.compile"
                )
        for name, planned in self.fingerprint.items():
            if (found := fingerprint(modules[name])) != planned:
                ours, theirs = _first_difference(found, planned)
                raise PlanMismatch(
                    f"block {name} is {ours}, and the plan is for {theirs}: {advice}"
                )
        for name in _names(model, self.settings.get("blocks")):
            if name not in self.fingerprint:
                raise PlanMismatch(
                    f"{type(model).__name__} has a block {name}, which the plan does not have: {advice}"
                )

    def explain(self, *, most: int | None = None) -> str:
        """Text of at most 80 columns: the candidates, at most `most` of them, the choice by block, and why."""
        first = (
            f"{self.workload}: {self.steps} x {self.microbatch} samples"
            + (f" on each of {self.ranks} ranks" if self.ranks > 1 else "")
            + f", peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}, "
            + f"{1e3 * self.step_seconds:,.1f} ms"
        )
        lines = textwrap.wrap(first, 80)
        shown = self.candidates[:most]
        if shown:
            lines += ["", f"{'microbatch':>10} {'steps':>6} {'peak':>11} {'step time':>12}  blocks"]
        for candidate in shown:
            seconds = (
                f"{1e3 * candidate.step_seconds:,.1f} ms"
                if candidate.step_seconds is not None
                else "too large"
            )
            lines.append(
                _cut(
                    f"{candidate.microbatch:>10} {candidate.steps:>6} {format_bytes(candidate.peak_bytes):>11} "
                    f"{seconds:>12}  {candidate.summary()}"
                )
            )
        nothing = "no block is repeated: name some with --blocks, to choose for them too"
        lines += ["", *(_blocks(self.options) or [nothing]), "", *textwrap.wrap(self.why, 80)]
        for reason in self.settings.get("left_out", ()):
            lines += textwrap.wrap(f"left out: {reason}", 80)
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            **{
                name: value
                for name, value in asdict(self).items()
                if name not in ("options", "candidates")
            },
            "version": VERSION,
            "options": {name: option.to_json() for name, option in self.options.items()},
            "candidates": [
                {
                    **{
                        name: value
                        for name, value in asdict(candidate).items()
                        if name != "options"
                    },
                    "summary": candidate.summary(),
                }
                for candidate in self.candidates
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        if not isinstance(data, Mapping) or data.get("version") != VERSION:
            found = data.get("version") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(
                f"this is no plan of version {VERSION}, its version is {found!r}: make the plan again"
            )
        wanted = set(cls.__dataclass_fields__) - {"candidates"}
        if missing := sorted(wanted - data.keys()):
            raise ValueError(f"the plan lacks {', '.join(missing)}: make the plan again")
        fields = {name: data[name] for name in wanted}
        for name in ("options", "fingerprint", "settings"):
            if not isinstance(fields[name], Mapping):
                raise ValueError(
                    f"{name} of the plan is {fields[name]!r} and no mapping: make the plan again"
                )
        fields["options"] = {
            name: Option.from_json(option) for name, option in data["options"].items()
        }
        return cls(**fields)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except OSError as error:
            raise ValueError(
                f"can't read the plan {path}: {error.strerror}; write one with plan_memory.py"
            ) from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no whole plan, its JSON can't be read: {error}") from error


def fingerprint(block: nn.Module) -> str:
    """The class and the shapes of the parameters of a block."""
    shapes = [f"{name}{list(parameter.shape)}" for name, parameter in block.named_parameters()]
    return f"{type(block).__name__}: {'; '.join(shapes)}"


def _first_difference(found: str, planned: str) -> tuple[str, str]:
    """The classes, or what of the parameters differs first."""
    classes = found.split(": ")[0], planned.split(": ")[0]
    if classes[0] != classes[1]:
        return f"a {classes[0]}", f"a {classes[1]}"
    parts = zip_longest(*(text.partition(": ")[2].split("; ") for text in (found, planned)))
    ours, theirs = next((ours, theirs) for ours, theirs in parts if ours != theirs)
    return f"a {classes[0]} with {ours or 'no more parameters'}", f"one with {theirs or 'no more'}"


def _names(model: nn.Module, pattern: str | None) -> list[str]:
    try:
        return list(find_blocks(model, pattern))
    except NoBlocks:
        return []


def _blocks(options: Mapping[str, Option]) -> list[str]:
    """Runs of blocks with one option."""
    lines = []
    for option, run in groupby(options.items(), key=lambda item: item[1]):
        names = [name for name, _ in run]
        what = "as it is" if option.kind == NONE else str(option)
        lines.append(_cut(f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''}: {what}"))
    return lines


def _cut(line: str) -> str:
    return line if len(line) <= 80 else f"{line[:78]}.."
