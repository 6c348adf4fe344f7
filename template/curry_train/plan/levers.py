"""Levers: named changes to a training step, such as a strategy, accumulation or precision.

    lever = find_lever("sac:save_matmuls+accumulate=4")

A plus joins several levers, which are applied in that order.

Proof: `python -m pytest tests/test_bench_levers.py`.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.nearest import did_you_mean
from .strategies import STRATEGIES
from .strategy import Apply, Sample

HELP = {
    "accumulate=K": "the same batch in K microbatches",
    "bf16": "weights and batch in bfloat16",
    "autocast": "weights in float32, autocast to bfloat16",
    "compile[:BACKEND]": "the whole model by torch.compile",
    "sac:POLICY": "selective recompute by one policy",
    "chunked_loss": "the loss of the output layer in chunks",
    "plan=FILE": "a plan that `plan_memory.py --out` wrote",
}
PACKAGE = __package__.rpartition(".")[0]


@dataclass(frozen=True)
class Lever:
    """One change to a training step, or several joined ones."""

    name: str
    changes: tuple[Apply, ...] = ()  # applied to the model one after the other
    accumulate: int = 1  # microbatches that the batch is cut into
    dtype: torch.dtype | None = None  # of weights and batch; None keeps the case's
    autocast: torch.dtype | None = None

    @property
    def is_plain(self) -> bool:
        return not self.changes and self.accumulate == 1 and not self.changes_precision

    @property
    def changes_precision(self) -> bool:
        return self.dtype is not None or self.autocast is not None


PLAIN = Lever("plain")


def find_lever(text: str) -> Lever:
    """Return the lever of a name; raise a `ValueError` that suggests the nearest known name."""
    found = Lever(text)
    for single in text.split("+"):
        name, sign, value = _cut(single.strip())
        if name in STRATEGIES and not sign:
            found = _with(found, STRATEGIES[name].apply)
        elif name in _OPTIONS:
            found = _OPTIONS[name](found, value if sign else None)
        elif name in STRATEGIES:
            raise ValueError(f"the lever {name!r} takes no value, got {value!r}: leave it out")
        else:
            known = list_levers()
            names = [_cut(lever)[0] for lever in known]
            advice = did_you_mean(name, names, otherwise=f"there are {', '.join(known)}")
            raise ValueError(f"no lever is called {single!r}; {advice}")
    return found


def list_levers() -> list[str]:
    """List the levers of this project, as `find_lever` takes them."""
    return [*STRATEGIES, *(name for name in HELP if _is_here(_cut(name.replace("[", ""))[0]))]


def _cut(text: str) -> tuple[str, str, str]:
    """Split `sac:save_matmuls` or `accumulate=4` into name, sign and value."""
    signs = [place for place, letter in enumerate(text) if letter in "=:"]
    if not signs:
        return text, "", ""
    first = signs[0]
    return text[:first], text[first], text[first + 1 :]


def _with(lever: Lever, change: Apply) -> Lever:
    return replace(lever, changes=(*lever.changes, change))


def _accumulate(lever: Lever, value: str | None) -> Lever:
    if value is None or not value.isdecimal() or int(value) < 1:
        raise ValueError(
            f"accumulate takes a number of microbatches, such as accumulate=4; got {value!r}"
        )
    return replace(lever, accumulate=int(value))


def _bf16(lever: Lever, value: str | None) -> Lever:
    _none_wanted("bf16", value)
    return replace(lever, dtype=torch.bfloat16)


def _autocast(lever: Lever, value: str | None) -> Lever:
    _none_wanted("autocast", value)
    return replace(lever, autocast=torch.bfloat16)


def _compile(lever: Lever, value: str | None) -> Lever:
    def change(model: nn.Module, sample: Sample) -> list[str]:
        model.compile(backend=value or "inductor")
        return [""]

    return _with(lever, change)


def _sac(lever: Lever, value: str | None) -> Lever:
    sac = _load("primitives.sac", "sac")
    policies: Sequence[str] = list(sac.POLICIES)
    if value is None:
        return _with(lever, STRATEGIES["sac"].apply)
    if value not in policies:
        raise ValueError(f"sac has no policy {value!r}; {did_you_mean(value, policies)}")
    return _with(
        lever, lambda model, sample: list(sac.apply_sac(model, value, blocks=sample.blocks))
    )


def _chunked_loss(lever: Lever, value: str | None) -> Lever:
    _none_wanted("chunked_loss", value)
    chunked = _load("primitives.chunked_loss", "memory-plan")
    return _with(lever, lambda model, sample: list(chunked.apply_chunked_loss(model)))


def _plan(lever: Lever, value: str | None) -> Lever:
    saved = _load("plan.saved_plan", "memory-plan")
    if value is None or not Path(value).is_file():
        raise ValueError(
            f"plan={value or ''} is not a file: give one that plan_memory.py --out wrote"
        )
    plan = saved.Plan.load(value)
    return _with(lever, lambda model, sample: list(plan.apply(model)))


_OPTIONS: dict[str, Callable[[Lever, str | None], Lever]] = {
    "accumulate": _accumulate,
    "bf16": _bf16,
    "autocast": _autocast,
    "compile": _compile,
    "sac": _sac,
    "chunked_loss": _chunked_loss,
    "plan": _plan,
}
_MODULE_OF = {
    "sac": "primitives.sac",
    "chunked_loss": "primitives.chunked_loss",
    "plan": "plan.saved_plan",
}


def _none_wanted(name: str, value: str | None) -> None:
    if value is not None:
        raise ValueError(f"the lever {name!r} takes no value, got {value!r}: leave it out")


def _is_here(name: str) -> bool:
    return (
        name not in _MODULE_OF
        or importlib.util.find_spec(f"{PACKAGE}.{_MODULE_OF[name]}") is not None
    )


def _load(module: str, technique: str) -> Any:
    """Import a module of another technique; raise an error if the project does not have it."""
    if importlib.util.find_spec(f"{PACKAGE}.{module}") is None:
        raise ValueError(
            f"this project does not have {technique}; "
            f"add it with scripts/scaffold.py add {technique}"
        )
    return importlib.import_module(f"{PACKAGE}.{module}")
