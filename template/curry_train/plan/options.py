"""The ways to run one block that a plan chooses from, and how a model is made to run so.

Proof: `python -m pytest tests/test_menu.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import primitives

NONE, REGIONS, SAC, OFFLOAD, FULL = "none", "regions", "sac", "offload", "full"
KINDS = (NONE, REGIONS, SAC, OFFLOAD, FULL)


@dataclass(frozen=True)
class Option:
    """`keep`: for `sac`, the calls whose outputs are kept, by family and place among those of the block. `also`: for
    `regions`, the modules of the block that are run once more, by their names in it."""

    kind: str
    keep: frozenset[tuple[str, int]] = frozenset()
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a block is run as one of {', '.join(KINDS)}, got {self.kind!r}")
        if (self.kind == SAC) != bool(self.keep):
            raise ValueError(
                f"{self.kind!r} with keep={sorted(self.keep)}: 'sac' names what it keeps, others do not"
            )
        if self.also and self.kind != REGIONS:
            raise ValueError(
                f"{self.kind!r} with also={list(self.also)}: only 'regions' runs modules once more"
            )

    def __str__(self) -> str:
        if self.kind != SAC:
            return f"{self.kind}+{','.join(self.also)}" if self.also else self.kind
        families: dict[str, list[int]] = {}
        for family, index in sorted(self.keep):
            families.setdefault(family, []).append(index)
        return f"sac({'; '.join(f'{family} {_places(indices)}' for family, indices in families.items())})"

    def to_json(self) -> dict[str, Any]:
        if self.kind != SAC:
            return (
                {"kind": self.kind, "also": list(self.also)} if self.also else {"kind": self.kind}
            )
        return {"kind": self.kind, "keep": [[family, index] for family, index in sorted(self.keep)]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Option":
        if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str):
            raise ValueError(
                f"a block's option is a mapping with a kind, got {data!r}: make the plan again"
            )
        pairs = data.get("keep", [])
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 for pair in pairs
        ):
            raise ValueError(
                f"keep of a block's option is a list of families and places, got {pairs!r}"
            )
        also = data.get("also", [])
        if not isinstance(also, list) or not all(isinstance(path, str) for path in also):
            raise ValueError(
                f"also of a block's option is a list of the names of modules, got {also!r}"
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
    """Make each named block run as its option says, in place; the names of those that changed. Before DDP,
    `fully_shard` and `torch.compile`. `offload` stands for `offload_blocks` where tensors have no values."""
    together: dict[Option, list[str]] = {}
    for name, option in options.items():
        if option.kind != NONE:
            together.setdefault(option, []).append(name)
    for option, names in together.items():
        if option.kind == OFFLOAD and offload is not None:
            offload(model, names)
        else:
            _APPLY[option.kind](model, names, option)
    return _in_order(options, together.values())


def remove_options(model: nn.Module) -> list[str]:
    """Undo `apply_options`; the names of the modules that had been changed."""
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
