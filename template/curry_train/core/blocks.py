"""Repeated blocks of a model, found in its containers or selected by name patterns.

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
    """The model repeats single torch layers, each of which saves its input as recompute would."""

    in_short = (
        "the model repeats lone layers, which have nothing to recompute: "
        "name larger blocks with --blocks"
    )


CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(
    module: nn.Module, pattern: str | Sequence[str] | None = None
) -> dict[str, nn.Module]:
    """Return the outermost blocks by qualified name, in the model's order.

    Without a pattern, blocks are the children of a container that have the same class as at least
    one other child (Hugging Face's `model.layers`, a `Sequential` of stages). A pattern is one glob
    over qualified names, such as `encoder.layers.*`, or several. A shared block is returned once.
    """
    if pattern is None:
        names = _repeated(module)
    else:
        names = _matching(module, [pattern] if isinstance(pattern, str) else pattern)

    blocks: dict[str, nn.Module] = {}
    for name in names:
        block = module.get_submodule(name)
        is_inside = any(name.startswith(f"{other}.") for other in names)
        is_shared = any(block is other for other in blocks.values())
        if not is_inside and not is_shared:
            blocks[name] = block
    return blocks


def match_names(names: list[str], pattern: str, *, option: str) -> list[str]:
    """Return the names that match a glob; raise an error if none does."""
    found = fnmatch.filter(names, pattern)
    if not found:
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ValueError(f"{option} {pattern!r} matches no module; there are {shown or 'none'}")
    return found


def match_inside(
    blocks: Mapping[str, nn.Module], patterns: Sequence[str], *, option: str
) -> set[str]:
    """Return the names of the modules inside blocks that match any of the globs."""
    names = [
        f"{name}.{path}"
        for name, block in blocks.items()
        for path, _ in block.named_modules()
        if path
    ]
    return {name for pattern in patterns for name in match_names(names, pattern, option=option)}


def _matching(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    names = [name for name, _ in module.named_modules() if name]
    matched = {
        name for pattern in patterns for name in match_names(names, pattern, option="the pattern")
    }
    return [name for name in names if name in matched]


def _repeated(module: nn.Module) -> list[str]:
    found: list[str] = []
    lone: list[str] = []
    for prefix, container in module.named_modules():
        if not isinstance(container, CONTAINERS):
            continue
        children = dict(container.named_children())
        trained = {name: child for name, child in children.items() if _has_parameters_inside(child)}
        kinds = Counter(map(_kind, trained.values()))
        names = [name for name, child in trained.items() if kinds[_kind(child)] > 1]
        blocks = [name for name in names if not _is_own_layer(children[name])]
        found += [f"{prefix}.{name}".lstrip(".") for name in blocks]
        # A child without parameters between them, such as an activation, makes them more than
        # single layers.
        if not blocks and len(names) == len(children):
            lone += [f"{prefix}.{name}".lstrip(".") for name in names]
    if not found:
        raise _no_blocks(module, lone)
    return found


def _has_parameters_inside(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _no_blocks(module: nn.Module, lone: Sequence[str]) -> NoBlocks:
    model = type(module).__name__
    if lone:
        kinds = ", ".join(sorted({type(module.get_submodule(name)).__name__ for name in lone}))
        return LoneLayers(
            f"{model} repeats lone layers ({kinds}; {lone[0]} to {lone[-1]}): each saves its "
            "input, as recompute would, so there is nothing to gain; name larger blocks with a "
            "pattern (--blocks)"
        )
    tops = ", ".join(f"{name} ({type(child).__name__})" for name, child in module.named_children())
    return NoBlocks(
        f"{model} repeats no block in a ModuleList or Sequential; name the blocks with a "
        "pattern (--blocks), which may also name one block that runs several times. "
        f"Its children are {tops or 'none'}"
    )


def _kind(module: nn.Module) -> tuple[object, ...]:
    """Return a key of the original class; containers also compare the kinds of their children."""
    children = module.children() if isinstance(module, CONTAINERS) else ()
    return (class_as_written(module), *(_kind(child) for child in children))


def _is_own_layer(module: nn.Module) -> bool:
    """Return whether a module is a torch layer without children, which saves its input only.

    Recurrent layers do not count, because they save every step.
    """
    if isinstance(module, nn.RNNBase):
        return False
    has_children = next(module.children(), None) is not None
    return type(module).__module__.startswith("torch.nn.") and not has_children
