"""Options: the ways to run one block that a plan chooses from.

Proof: `python -m pytest tests/test_menu.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import primitives

NONE = "none"
REGIONS = "regions"
SAC = "sac"
OFFLOAD = "offload"
FULL = "full"
KINDS = (NONE, REGIONS, SAC, OFFLOAD, FULL)


@dataclass(frozen=True)
class Option:
    """One way to run a block."""

    kind: str  # one of KINDS

    # For `sac`: the calls whose outputs are kept, by family and index among the block's calls of
    # that family.
    keep: frozenset[tuple[str, int]] = frozenset()

    # For `regions`: the modules to recompute, by their names in the block.
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a block is run as one of {', '.join(KINDS)}, got {self.kind!r}")
        if (self.kind == SAC) != bool(self.keep):
            raise ValueError(
                f"{self.kind!r} with keep={sorted(self.keep)}: 'sac' needs keep, and other kinds "
                "take none"
            )
        if self.also and self.kind != REGIONS:
            raise ValueError(
                f"{self.kind!r} with also={list(self.also)}: only 'regions' takes modules to "
                "recompute"
            )

    def __str__(self) -> str:
        if self.kind != SAC:
            return f"{self.kind}+{','.join(self.also)}" if self.also else self.kind
        families: dict[str, list[int]] = {}
        for family, index in sorted(self.keep):
            families.setdefault(family, []).append(index)
        calls = [f"{family} {_places(indices)}" for family, indices in families.items()]
        return f"sac({'; '.join(calls)})"

    def to_json(self) -> dict[str, Any]:
        if self.kind == SAC:
            keep = [[family, index] for family, index in sorted(self.keep)]
            return {"kind": self.kind, "keep": keep}
        if self.also:
            return {"kind": self.kind, "also": list(self.also)}
        return {"kind": self.kind}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Option":
        if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str):
            raise ValueError(
                f"a block's option must be a mapping with a kind, got {data!r}: make the plan again"
            )

        pairs = data.get("keep", [])
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 for pair in pairs
        ):
            raise ValueError(
                "keep of a block's option must be a list of pairs of family and index, "
                f"got {pairs!r}: make the plan again"
            )

        also = data.get("also", [])
        if not isinstance(also, list) or not all(isinstance(path, str) for path in also):
            raise ValueError(
                f"also of a block's option must be a list of module names, got {also!r}: "
                "make the plan again"
            )
        return cls(
            data["kind"],
            frozenset((str(family), int(index)) for family, index in pairs),
            tuple(also),
        )


def _places(indices: list[int]) -> str:
    return ",".join(map(str, indices))


def apply_options(
    model: nn.Module, options: Mapping[str, Option], *, offload: Callable[..., Any] | None = None
) -> list[str]:
    """Apply an option to each named block, in place; return the names of the changed blocks.

    Call it before DDP, `fully_shard` and `torch.compile`. `offload` replaces `offload_blocks` where
    tensors have no values.
    """
    names_of: dict[Option, list[str]] = {}
    for name, option in options.items():
        if option.kind != NONE:
            names_of.setdefault(option, []).append(name)
    for option, names in names_of.items():
        if option.kind == OFFLOAD and offload is not None:
            offload(model, names)
        else:
            _APPLY[option.kind](model, names, option)
    return _in_order(options, names_of.values())


def remove_options(model: nn.Module) -> list[str]:
    """Undo `apply_options`; return the names of the modules that were changed."""
    return [
        *primitives.remove_regions(model),
        *primitives.remove_sac(model),
        *primitives.remove_recompute(model),
        *primitives.remove_offload(model),
    ]


def _in_order(options: Mapping[str, Option], groups: Iterable[list[str]]) -> list[str]:
    changed = {name for group in groups for name in group}
    return [name for name in options if name in changed]


def _sac(model: nn.Module, names: list[str], option: Option) -> None:
    primitives.apply_sac(model, primitives.sac.Policy(str(option), calls=option.keep), blocks=names)


def _regions(model: nn.Module, names: list[str], option: Option) -> None:
    also = [f"{name}.{path}" for name in names for path in option.also]
    primitives.apply_regions(model, blocks=names, also=also)


_APPLY: dict[str, Callable[[nn.Module, list[str], Option], Any]] = {
    REGIONS: _regions,
    SAC: _sac,
    OFFLOAD: lambda model, names, option: primitives.offload_blocks(
        model, blocks=names, keep_last=0
    ),
    FULL: lambda model, names, option: primitives.recompute_blocks(model, blocks=names),
}
