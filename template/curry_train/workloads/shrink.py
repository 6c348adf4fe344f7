"""Make the same model with fewer layers, to check a large one in less time.

    factory = Shrink(2).factory(build)  # what build returns, with two layers

A model that has a configuration is built with fewer layers in it, and its large weights are never
made. Of others, or if its factory raises, the first and last blocks of each run of equal ones stay.

Proof: `python -m pytest tests/workloads/test_shrink.py`.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from .workload import Workload, WorkloadError, made_by

# Begins the text of a workload whose model has fewer layers: `shrink=2:SPEC`.
SHRINK_PREFIX = "shrink="
# Parts of the names under which configurations have their number of layers.
NAMES_OF_DEPTHS = ("layer", "depth", "block")


class Shrink:
    """Makes what a factory makes, with so many layers; the large model is made at most once."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.note = ""

    def factory(self, factory: Callable[[], Any]) -> Callable[[], Any]:
        """Return a factory of a module, a module with a batch, or a workload."""
        once = functools.cache(lambda: self._make(factory))

        def small() -> Any:
            made = once()
            if isinstance(made, Workload):
                build = self.factory(made.build)
                build()
                return replace(made, build=build, notes=(*made.notes, self.note))
            # Anything else is returned as it is: the caller names what is wrong with it.
            return tree_map_only(nn.Module, copy.deepcopy, made)

        return small

    def _make(self, make: Callable[[], Any]) -> Any:
        """Call the user's function, and return what it made with so many layers."""
        made, notes = None, list[str]()
        with contextlib.suppress(Exception), shrunk_configurations(self.num_layers, notes):
            made = make()
        if made is None:
            # It may need all layers, as the weights of a checkpoint do.
            notes.clear()
            made = make()
        module = made[0] if isinstance(made, tuple) and made else made
        if isinstance(module, nn.Module):
            notes = notes or self._cut(module)
            self.note = "; ".join([*notes, "what the other layers need is not checked"])
        return made

    def _cut(self, module: nn.Module) -> list[str]:
        """Leave the first and last blocks of each run of equal ones, and note how many."""
        notes: list[str] = []
        number = self.num_layers
        # The last run first, so that the places of the others stay. A container may stand twice.
        for container, run in reversed(dict.fromkeys(_find_runs(module))):
            if left_out := run[-(-number // 2) : len(run) - number // 2]:
                notes.insert(0, f"{number} of {len(run)} {type(container[run[0]]).__name__}")
                del container[left_out.start : left_out.stop]
                # It may have no configuration that can be changed.
                with contextlib.suppress(Exception):
                    _reduce_layers(module.config, len(run), number)
        if not notes:
            raise WorkloadError(
                f"--shrink {number}: {type(module).__name__} has no ModuleList or "
                f"Sequential with more than {number} equal blocks, and no config with "
                "its number of layers: leave --shrink out, or give a smaller model"
            )
        return [f"{', '.join(notes)}: the first and last of equal blocks"]


def _reduce_layers(config: Any, depth: int, num_layers: int) -> list[str]:
    """Change a configuration of so many layers, and return the names of what was changed."""
    changed = []
    for name, value in list(vars(config).items()):
        is_depth = any(part in name.lower() for part in NAMES_OF_DEPTHS)
        if is_depth and value == depth and not isinstance(value, bool):
            setattr(config, name, num_layers)
            changed.append(name)
        elif isinstance(value, list) and len(value) == depth:
            setattr(config, name, value[:num_layers])
    return changed


@contextlib.contextmanager
def shrunk_configurations(num_layers: int, notes: list[str]) -> Iterator[None]:
    """Give modules that are built inside so many layers, where a configuration has their number.

    Each configuration that was changed adds a note; an error takes the change back. The large
    model is built on the meta device alone, to see how many blocks it has.
    """
    known: dict[int, Any] = {}

    def make(kind: type[nn.Module], *args: Any, **options: Any) -> Any:
        for config in (*args, *options.values()):
            is_object = hasattr(config, "__dict__") and not isinstance(config, nn.Module | type)
            if not is_object or id(config) in known:
                continue
            known[id(config)] = config, dict(vars(config))
            depth = 0
            with contextlib.suppress(Exception), torch.device("meta"), torch.random.fork_rng():
                depth = max((len(run) for _, run in _find_runs(kind(*args, **options))), default=0)
            if depth > num_layers and (changed := _reduce_layers(config, depth, num_layers)):
                notes.append(
                    f"{kind.__name__} with {num_layers} of {depth} layers, by "
                    f"{', '.join(changed)} of its {type(config).__name__}"
                )
        return object.__new__(kind)

    try:
        with made_by(nn.Module, make):
            yield
    except Exception:  # whatever a user's factory raises: its configurations are as they were
        for config, before in known.values():
            vars(config).update(before)
        raise


def split_shrink(spec: str) -> tuple[str, Shrink | None]:
    """Split the text of a workload into that of the whole model and how it is shrunk."""
    if not spec.startswith(SHRINK_PREFIX):
        return spec, None
    number, _, whole = spec.removeprefix(SHRINK_PREFIX).partition(":")
    return whole, Shrink(int(number))


def _find_runs(module: nn.Module) -> Iterator[tuple[Any, range]]:
    """Yield containers with the places of consecutive children of equal class and shapes.

    Blocks inside of such a run, as experts are, are not looked at.
    """
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    # Unlike `children`, these have a module that stands twice twice.
    children = [child for child in module._modules.values() if child is not None]
    start = 0
    for _, group in itertools.groupby(children, key=_describe_form):
        blocks = [*group]
        if is_container and len(blocks) > 1:
            yield module, range(start, start + len(blocks))
        else:
            for block in blocks:
                yield from _find_runs(block)
        start += len(blocks)


def _describe_form(module: nn.Module) -> Any:
    shapes = tuple((name, tuple(one.shape)) for name, one in module.named_parameters())
    return type(module), shapes
