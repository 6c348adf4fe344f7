"""The blocks of a model: what it repeats, found in module lists and sequentials, or named by a pattern.

Proof: `python -m pytest tests/test_blocks.py`.
"""

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from .derive import class_as_written


class NoBlocks(ValueError):
    """The model repeats no block, and none was named."""

    in_short = "the model repeats no block: name some with --blocks"


class LoneLayers(NoBlocks):
    """What the model repeats are layers of torch's own, each of which keeps its input, as recompute would."""

    in_short = "the model repeats lone layers, which have nothing to recompute: name larger blocks with --blocks"


CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(
    module: nn.Module, pattern: str | Sequence[str] | None = None
) -> dict[str, nn.Module]:
    """Blocks by qualified name, in the model's order; outermost ones only.

    Without a pattern they are the children of one class that a container holds at least twice (Hugging Face's
    `model.layers`, a `Sequential` of stages). A pattern is a glob over qualified names, such as `encoder.layers.*`, or
    several of them.
    """
    names = (
        _repeated(module)
        if pattern is None
        else _matching(module, [pattern] if isinstance(pattern, str) else pattern)
    )
    blocks: dict[str, nn.Module] = {}
    for name in names:
        block = module.get_submodule(name)
        inside = any(name.startswith(f"{other}.") for other in names)
        if not inside and not any(
            block is other for other in blocks.values()
        ):  # a shared block counts once
            blocks[name] = block
    return blocks


def match_names(names: list[str], pattern: str, *, option: str) -> list[str]:
    """The names that a glob takes; one that takes none is an error, since it would silently do nothing."""
    found = fnmatch.filter(names, pattern)
    if not found:
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ValueError(f"{option} {pattern!r} matches no module; there are {shown or 'none'}")
    return found


def match_inside(
    blocks: Mapping[str, nn.Module], patterns: Sequence[str], *, option: str
) -> set[str]:
    """The names of modules inside of blocks that globs take."""
    names = [
        f"{name}.{path}"
        for name, block in blocks.items()
        for path, _ in block.named_modules()
        if path
    ]
    return {name for pattern in patterns for name in match_names(names, pattern, option=option)}


def _matching(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    names = [name for name, _ in module.named_modules() if name]
    taken = {
        name for pattern in patterns for name in match_names(names, pattern, option="the pattern")
    }
    return [name for name in names if name in taken]


def _repeated(module: nn.Module) -> list[str]:
    found: list[str] = []
    lone: list[str] = []
    for prefix, container in module.named_modules():
        if not isinstance(container, CONTAINERS):
            continue
        children = dict(container.named_children())
        trained = {
            name: child for name, child in children.items() if any(True for _ in child.parameters())
        }
        kinds = Counter(map(_kind, trained.values()))
        names = [name for name, child in trained.items() if kinds[_kind(child)] > 1]
        blocks = [name for name in names if not _is_own_layer(children[name])]
        found += [f"{prefix}.{name}".lstrip(".") for name in blocks]
        if not blocks and len(names) == len(children):  # and no activation between them
            lone += [f"{prefix}.{name}".lstrip(".") for name in names]
    if not found:
        raise _no_blocks(module, lone)
    return found


def _no_blocks(module: nn.Module, lone: Sequence[str]) -> NoBlocks:
    model = type(module).__name__
    if lone:
        kinds = ", ".join(sorted({type(module.get_submodule(name)).__name__ for name in lone}))
        return LoneLayers(
            f"{model} repeats lone layers ({kinds}; {lone[0]} to {lone[-1]}): each keeps its input, as recompute "
            "would, so there is nothing to gain; name larger blocks to work on with a pattern (--blocks)"
        )
    tops = ", ".join(f"{name} ({type(child).__name__})" for name, child in module.named_children())
    return NoBlocks(
        f"{model} repeats no block in a ModuleList or Sequential; name the blocks to work on with a pattern "
        f"(--blocks), also one that runs several times. Its children are {tops or 'none'}"
    )


def _kind(module: nn.Module) -> tuple[object, ...]:
    """The class as written; two sequentials are of one kind when they hold the same kinds in the same order."""
    inside = module.children() if isinstance(module, CONTAINERS) else ()
    return (class_as_written(module), *(_kind(child) for child in inside))


def _is_own_layer(module: nn.Module) -> bool:
    """One of torch's own with nothing inside, which keeps its input; recurrent ones keep every step."""
    if isinstance(module, nn.RNNBase):
        return False
    return type(module).__module__.startswith("torch.nn.") and not any(
        True for _ in module.children()
    )
