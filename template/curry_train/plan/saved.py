"""A plan as a file: options of each block, fingerprint of the model, and applying it.

Proof: `python -m pytest tests/plan/test_plan.py tests/plan/test_plan_refusals.py`.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any

from torch import nn

from .. import primitives
from ..core.blocks import Derived
from ..core.wording import format_bytes
from ..primitives.sac import FAMILIES, Policy

Facts = dict[str, Any]

# Options: the ways to run one block that a plan chooses from.

NONE_KIND = "none"
REGIONS_KIND = "regions"
SAC_KIND = "sac"
OFFLOAD_KIND = "offload"
FULL_KIND = "full"
OPTION_KINDS = (NONE_KIND, FULL_KIND, OFFLOAD_KIND, SAC_KIND, REGIONS_KIND)


@dataclass(frozen=True)
class Option:
    """One way to run a block."""

    kind: str  # one of OPTION_KINDS

    # For `sac`: the calls whose outputs are kept, by family and index among the block's calls of
    # that family.
    keep: frozenset[tuple[str, int]] = frozenset()

    def __post_init__(self) -> None:
        if self.kind not in OPTION_KINDS:
            raise ValueError(
                f"a block is run as one of {', '.join(OPTION_KINDS)}, got {self.kind!r}"
            )
        if (self.kind == SAC_KIND) != bool(self.keep):
            raise ValueError(
                f"{self.kind!r} with keep={sorted(self.keep)}: 'sac' needs keep, and other kinds "
                "take none"
            )

    def __str__(self) -> str:
        if self.kind != SAC_KIND:
            return self.kind
        families = groupby(sorted(self.keep), key=lambda call: call[0])
        calls = [f"{family} {','.join(str(place) for _, place in own)}" for family, own in families]
        return f"sac({'; '.join(calls)})"

    def to_json(self) -> Facts:
        data: Facts = {"kind": self.kind}
        if self.keep:
            data["keep"] = [[family, index] for family, index in sorted(self.keep)]
        return data

    @classmethod
    def from_json(cls, data: Any) -> "Option":
        """Read an option of a plan file, which is checked."""
        keep = frozenset(map(tuple, data.get("keep") or ()))
        families = {*FAMILIES.values()}
        if unknown := {family for family, _ in keep} - families:
            raise ValueError(
                f"'sac' keeps calls of {', '.join(sorted(families))}; got {min(unknown)!r}"
            )
        return cls(data["kind"], keep)


def apply_options(
    model: nn.Module, options: Mapping[str, Option], *, offload: Callable[..., Any] | None = None
) -> list[str]:
    """Apply an option to each named block, in place; return the names of the changed blocks.

    Call it before DDP, `fully_shard` and `torch.compile`. `offload` replaces `offload_blocks` where
    tensors have no values.
    """
    changed = {name: option for name, option in options.items() if option.kind != NONE_KIND}
    for option in dict.fromkeys(changed.values()):
        names = [name for name, own in changed.items() if own == option]
        if option.kind == FULL_KIND:
            primitives.recompute_blocks(model, blocks=names)
        elif option.kind == REGIONS_KIND:
            primitives.apply_regions(model, blocks=names)
        elif option.kind == SAC_KIND:
            primitives.apply_sac(model, Policy(str(option), calls=option.keep), blocks=names)
        elif offload is None:
            primitives.offload_blocks(model, blocks=names, keep_last=0)
        else:
            offload(model, names)
    if changed:
        primitives.keep_routing(model)
    return [*changed]


# Plan files: the option of each block, the microbatches, and the predicted peak and time.

PLAN_VERSION = 1


# Figures of a plan for a GPU, by the names of `plan --json`.
CUDA_FIGURES = (
    "allocated_bytes",
    "reserved_bytes",
    "first_step_reserved_bytes",
    "expandable_reserved_bytes",
    "context_bytes",
    "convolution_workspace_bytes",
    "limit_bytes",
)
SHOWN_SECONDS = ("compute", "communication", "exposed", "optimizer")
# What the parts of a plan file are like. A number stands for the least whole number, a list has any
# number of its element, a tuple has its elements, and a mapping with the key ANY any names.
ANY = ""
PLAN_PARTS: Facts = {
    **dict.fromkeys(("workload", "why"), str),
    **dict.fromkeys(("budget_bytes", "microbatch", "steps", "ranks", "chunk_tokens"), 1),
    "peak_bytes": 1,
    **dict.fromkeys(("step_seconds", "plain_seconds"), float),
    "options": {ANY: {"kind": str, "keep": [(str, 0)]}},
    "settings": {"left_out": [str], "limit_notes": [str]},
    "fingerprint": {ANY: str},
    "cuda": dict.fromkeys(CUDA_FIGURES, 0),
    "communication": {"text": str} | {f"{name}_seconds": float for name in SHOWN_SECONDS},
}
# Parts that may be missing or null.
OPTIONAL_NAMES = ("chunk_tokens", "cuda", "communication", "left_out", "limit_notes", "keep")


def _check(value: Any, like: Any, where: str) -> None:
    """Raise an error for the first part of a plan file, which anybody may have written."""
    if isinstance(like, dict) and isinstance(value, Mapping):
        named = dict.fromkeys(value, like[ANY]) if ANY in like else like
        for name, part in named.items():
            # A block may have any name.
            if name not in OPTIONAL_NAMES or ANY in like or value.get(name) is not None:
                _check(value.get(name), part, f"{name} of {where}")
        return
    if isinstance(like, list | tuple) and isinstance(value, list):
        parts = like if isinstance(like, tuple) else like * len(value)
        is_like = len(value) == len(parts)
        for one, part in zip(value, parts, strict=False):
            _check(one, part, where)
    elif like is float:
        is_like = type(value) in (int, float) and math.isfinite(value) and value >= 0
    elif isinstance(like, int):
        is_like = type(value) is int and value >= like
    else:
        is_like = like is str and isinstance(value, str)
    if not is_like:
        raise ValueError(f"{where} is {value!r}, which no plan has: make the plan again")


class PlanMismatch(ValueError):
    """A plan that was made for another model."""


@dataclass(frozen=True)
class Candidate:
    """One microbatch size that was considered, with the best options found for it."""

    microbatch: int
    steps: int  # microbatches in a window
    chunked_loss: bool
    peak_bytes: int = 0
    step_seconds: float | None = None  # of the optimizer step; None if it does not fit
    options: Mapping[str, Option] = field(default_factory=dict)
    checked: bool = False  # the peak is that of the whole step, not of the chain

    @property
    def is_plain(self) -> bool:
        """Whether the model trains as it is."""
        return not self.chunked_loss and all(
            option.kind == NONE_KIND for option in self.options.values()
        )

    def within(self, budget_bytes: int) -> "Candidate":
        """Drop the time if the peak is above the budget."""
        return self if self.peak_bytes <= budget_bytes else replace(self, step_seconds=None)

    def summary(self) -> str:
        """Count equal options, such as `30 regions, 2 plain`."""
        counts = Counter(map(str, self.options.values()))
        items = ["chunked loss"] if self.chunked_loss else []
        for name, number in counts.items():
            items.append(f"{number} {'plain' if name == NONE_KIND else name}")
        return ", ".join(items) or "as it is"


class AppliedPlan(list[str]):
    """The names of the modules that a plan changed, with the windows that the loop has to train."""

    def __init__(self, names: Iterable[str], *, microbatch: int, steps: int) -> None:
        super().__init__(names)
        # Samples of a microbatch on each rank, and microbatches of an optimizer step.
        self.microbatch = microbatch
        self.steps = steps


@dataclass(frozen=True)
class Plan:
    """A plan for one model, budget and global batch."""

    workload: str
    budget_bytes: int  # per rank
    microbatch: int
    steps: int  # microbatches in a window
    ranks: int
    chunk_tokens: int | None  # of the chunked loss, if it is used
    options: Mapping[str, Option]  # by block
    peak_bytes: int
    step_seconds: float  # predicted time of the optimizer step
    plain_seconds: float  # the same with all activations held
    # Class and parameter shapes of each block, and under "" of the model outside its blocks.
    fingerprint: Mapping[str, str]
    settings: Mapping[str, Any]
    why: str  # why this candidate won
    cuda: Mapping[str, int] | None = None  # memory on a CUDA device, by name of the figure
    candidates: tuple[Candidate, ...] = ()  # best first
    own: Candidate | None = None  # the model as it is, with the caller's own microbatch
    # Of several ranks: seconds, collectives and links of the predicted step.
    communication: Mapping[str, Any] | None = None

    def apply(self, model: nn.Module) -> AppliedPlan:
        """Apply the plan to a model in place, and return the names of the changed modules.

        The loop is left to you: it has to train windows of `steps` microbatches of `microbatch`
        samples, which are attributes of the returned list too. `equip` refuses a trainer with
        larger microbatches. The names, state dict and source of the model stay the same. Raises
        `PlanMismatch` for a model with other blocks.
        """
        self.check(model)
        changed = apply_options(model, self.options)
        if self.chunk_tokens is not None:
            changed += primitives.apply_chunked_loss(model, chunk_tokens=self.chunk_tokens)
        return AppliedPlan(changed, microbatch=self.microbatch, steps=self.steps)

    def check(self, model: nn.Module) -> None:
        """Raise `PlanMismatch` if the blocks differ from the plan's, or are changed already.

        The error names the first difference.
        """
        modules = dict(model.named_modules())
        class_name = type(model).__name__
        advice = "make a plan for this model, or apply it before a wrapper takes the model"
        for name, module in modules.items():
            if isinstance(module, Derived):
                raise PlanMismatch(
                    f"{name or 'the model'} is changed already, it is a {type(module).__name__}: "
                    "apply the plan to a model as it was built, before other techniques, DDP, "
                    "fully_shard and torch.compile"
                )

        for name, planned in self.fingerprint.items():
            if name not in modules:
                raise PlanMismatch(
                    f"the plan is for a model with a block {name}, which {class_name} does not "
                    f"have: {advice}"
                )
            found = fingerprint(modules[name], () if name else self.fingerprint)
            if found != planned:
                parts = zip_longest(found.split("; "), planned.split("; "), fillvalue="no more")
                ours, theirs = next(pair for pair in parts if pair[0] != pair[1])
                raise PlanMismatch(
                    f"{name and 'block '}{name or 'the model'} has {ours}, and the plan is for "
                    f"{theirs}: {advice}"
                )

    def explain(self, *, most: int | None = None, assumptions: bool = True) -> str:
        """Format the candidates, the options by block and the reason, in 80 columns.

        The caller's own setting is the first row, and at most `most` candidates follow, or all.
        `assumptions`: begin with them.
        """
        first = (
            f"{self.workload}: {self.steps} x {self.microbatch} sample{'s' * (self.microbatch > 1)}"
        )
        if self.ranks > 1:
            first += f" on each of {self.ranks} ranks"
        if self.chunk_tokens is not None:
            first += ", chunked loss"
        first += (
            f", peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}, "
            f"{_step_time(self.step_seconds)}"
        )
        lines = wrap(first, 80) + self._time_lines()
        if assumptions:
            lines = wrap(self.assumptions(), 80) + lines

        shown = [*self.candidates[:most]]
        if own := self.own:
            shown = [one for one in shown if not one.is_plain or one.microbatch != own.microbatch]
            shown.insert(0, own)
        if shown:
            lines += ["", f"{'microbatch':>10} {'steps':>6} {'peak':>11} {'step time':>12}  blocks"]
        for candidate in shown:
            time = candidate.step_seconds
            seconds = "too large" if time is None else _step_time(time)
            blocks = "your own setting" if candidate is self.own else candidate.summary()
            lines.append(
                _cut(
                    f"{candidate.microbatch:>10} {candidate.steps:>6} "
                    f"{format_bytes(candidate.peak_bytes):>11} {seconds:>12}  {blocks}"
                )
            )

        lines += self._cuda_lines()
        nothing = "no block to plan for: name some that run with --blocks"
        lines += ["", *(_blocks(self.options) or [nothing]), "", *wrap(self.why, 80)]
        for reason in self.settings.get("left_out") or ():
            lines += wrap(f"left out: {reason}", 80)
        return "\n".join(lines)

    def assumptions(self) -> str:
        """Name what the plan is for, what of the card it leaves free, and where times are from."""
        setting = self.settings.get
        found = [setting(name) for name in ("device", "dtype", "optimizer")]
        found += setting("limit_notes") or []
        if self.cuda is not None:
            found.append(f"{format_bytes(self.cuda['context_bytes'])} of context")
        source = setting("rates_from", "measured")
        return f"for {', '.join(map(str, found))}; times are predicted from {source} rates"

    def _time_lines(self) -> list[str]:
        """Describe the time of a rank in 80 columns; empty for one rank."""
        if self.communication is None:
            return []
        shown = {name: _step_time(self.communication[f"{name}_seconds"]) for name in SHOWN_SECONDS}
        text = (
            f"estimated, not measured: {shown['compute']} of compute, {shown['exposed']} of "
            f"waiting for {shown['communication']} of communication, and {shown['optimizer']} of "
            f"the optimizer. {self.communication['text']}"
        )
        return wrap(text, 80)

    def _cuda_lines(self) -> list[str]:
        """Describe the memory on a CUDA device in 80 columns; empty for the CPU."""
        if self.cuda is None:
            return []
        shown = {name: format_bytes(value) for name, value in self.cuda.items()}
        left = self.cuda["limit_bytes"] - self.peak_bytes
        workspace = ""
        if self.cuda["convolution_workspace_bytes"]:
            size = shown["convolution_workspace_bytes"]
            workspace = f"; convolution workspace, estimated: {size}"
        text = (
            f"on the device: {shown['allocated_bytes']} allocated, {shown['reserved_bytes']} "
            f"reserved ({shown['first_step_reserved_bytes']} in the first step{workspace}), and "
            f"{shown['context_bytes']} of context; {format_bytes(left)} of {shown['limit_bytes']} "
            "are left. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reserves "
            f"{shown['expandable_reserved_bytes']}."
        )
        return ["", *wrap(text, 80)]

    def to_json(self) -> Facts:
        data = asdict(self)
        del data["options"], data["candidates"], data["own"]

        def row(candidate: Candidate) -> Facts:
            figures = asdict(candidate)
            del figures["options"]
            return {**figures, "summary": candidate.summary()}

        return {
            **data,
            "version": PLAN_VERSION,
            "options": {name: option.to_json() for name, option in self.options.items()},
            "own": self.own and row(self.own),
            "candidates": [*map(row, self.candidates)],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        found = data.get("version") if isinstance(data, Mapping) else type(data).__name__
        if found != PLAN_VERSION:
            raise ValueError(
                f"this is not a plan of version {PLAN_VERSION}, its version is {found!r}: "
                "make the plan again"
            )

        _check(data, PLAN_PARTS, "the plan")
        fields: Facts = {name: data.get(name) for name in PLAN_PARTS}
        options = {name: Option.from_json(option) for name, option in fields["options"].items()}
        if unknown := sorted(options.keys() - (fields["fingerprint"].keys() - {""})):
            raise ValueError(
                f"the plan has an option for {unknown[0]!r}, which is no block of the plan: "
                "make the plan again"
            )
        return cls(**fields | {"options": options})

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except OSError as error:
            raise ValueError(
                f"can't read the plan {path}: {error.strerror}; write one with "
                "curry-train plan --out"
            ) from error
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a complete plan, its JSON can't be read: {error}"
            ) from error


def fingerprint(module: nn.Module, blocks: Iterable[str] = ()) -> str:
    """Return the class and the parameter shapes of a module outside `blocks`, as text."""
    shapes = [
        f"{name}{list(parameter.shape)}"
        for name, parameter in module.named_parameters()
        if not any(name.startswith(f"{block}.") for block in blocks)
    ]
    return f"{type(module).__name__}: {'; '.join(shapes)}"


def _blocks(options: Mapping[str, Option]) -> list[str]:
    """Format runs of blocks with the same option, one per line."""
    lines = []
    for option, run in groupby(options.items(), key=lambda item: item[1]):
        names = [name for name, _ in run]
        shown = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
        what = "as it is" if option.kind == NONE_KIND else str(option)
        lines.append(_cut(f"{shown}: {what}"))
    return lines


def _step_time(seconds: float) -> str:
    """Format a time such that plans of nearly the same time differ."""
    return f"{seconds:,.3f} s" if seconds >= 1 else f"{1e3 * seconds:,.1f} ms"


def _cut(line: str) -> str:
    return line if len(line) <= 80 else f"{line[:78]}.."
