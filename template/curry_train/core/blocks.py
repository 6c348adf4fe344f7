"""Find the blocks that a model repeats, and replace their classes by ones that run differently.

Proof: `python -m pytest tests/primitives/test_recompute_options.py tests/core/test_blocks.py`.
"""

import contextlib
import fnmatch
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_iter

# Modules whose class is replaced by a subclass that changes how they run.


TECHNIQUE_ATTRIBUTE = "_technique"
# The class of scripted modules, which take no hooks; traced ones do. Torch's types leave it out,
# so that mypy does not know it.
SCRIPTED: Any = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]


class Derived(nn.Module):
    """Base of mixins that `become` puts before a module's own class."""

    # The settings of the technique that changed this module; it can have only one at a time.
    _technique: Any

    # The mixin and the module's own class; `fully_shard` makes subclasses, which inherit them.
    _bases: ClassVar[tuple[type, type]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The derived class can't be imported by name, so pickle rebuilds it from its two bases.
        return _rebuild, type(self)._bases, self.__getstate__()


class DerivedForward(Derived):
    """Base of mixins that change a module's forward while the technique works.

    In eval mode and without grad mode it is that of the original module.
    """

    # Whether the technique works in compiled code too.
    _compiles = False

    # Runs the original forward, with its pair of arguments and keywords, as the technique does.
    _run_changed: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_active(self) and (self._compiles or not torch.compiler.is_compiling()):
            return self._run_changed(super().forward, (args, kwargs))
        return super().forward(*args, **kwargs)


def become(mixin: type[Derived], module: nn.Module, technique: Any = None) -> None:
    """Change the class of the module in place, which applies to all references to it."""
    refuse(module)
    module.__class__ = _derived_class((mixin, type(module)))
    module.__dict__[TECHNIQUE_ATTRIBUTE] = technique


def restore(model: nn.Module, mixin: type[Derived]) -> list[str]:
    """Undo `become` in a model, and return the names of the modules that were changed."""
    changed = find_modules(model, mixin)
    for module in changed.values():
        if "_bases" not in vars(type(module)):
            raise ValueError(
                f"{type(module).__name__} was wrapped again afterwards (by fully_shard?), "
                "so its class can't be restored"
            )
        module.__class__ = type(module)._bases[1]
        module.__dict__.pop(TECHNIQUE_ATTRIBUTE, None)
    return list(changed)


def refuse(module: nn.Module) -> None:
    """Raise an error if the class of this module can't be replaced."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"a module is needed, got {type(module).__name__}")
    name = type(module).__name__
    attributes = module.__dict__
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"{name} is scripted: change the module before torch.jit scripts it")
    if isinstance(module, Derived):
        raise ValueError(
            f"{name} is wrapped already, and a second wrapper would run its forward three times; "
            "wrap it once"
        )
    if type(module).forward is nn.Module.forward:
        raise ValueError(f"{name} never runs: name the modules inside it that do, with blocks=")
    if "forward" in attributes:
        raise ValueError(
            f"{name} has a forward of its own on the instance (compiled, or hooked): "
            "wrap the module before forward is replaced"
        )
    if attributes.get("_compiled_call_impl") is not None:
        raise ValueError(
            f"{name} is compiled already, and its compiled code would bypass the wrapper: "
            "wrap first, compile afterwards"
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ValueError("wrap the blocks before DistributedDataParallel wraps the model")
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        raise ValueError(f"{name} has no parameters yet: run one batch through it first")


@functools.cache
def _derived_class(bases: tuple[type, type]) -> Any:
    mixin, original = bases
    space = {"__module__": original.__module__, "__doc__": original.__doc__, "_bases": bases}
    return type(f"{mixin.__name__}{original.__name__}", bases, space)


def _rebuild(mixin: type, original: type) -> Any:
    return object.__new__(_derived_class((mixin, original)))


# Whether a changed block works now.

# The number of open `plain_blocks`, and of recomputed calls that run now, of all threads.
num_plain: list[int] = [0]
num_recomputed: list[int] = [0]


def plain_blocks() -> contextlib.AbstractContextManager[None]:
    """Run changed blocks as the original ones in forwards inside the context."""
    return _count_depth(num_plain)


def recomputing() -> contextlib.AbstractContextManager[None]:
    """Run changed blocks inside the context as in the first call, which is recomputed."""
    return _count_depth(num_recomputed)


@contextlib.contextmanager
def _count_depth(number: list[int]) -> Iterator[None]:
    number[0] += 1
    try:
        yield
    finally:
        number[0] -= 1


def is_active(module: nn.Module | None = None) -> bool:
    """Return whether a changed block works now: in training, with grad mode."""
    if num_plain[0] and not num_recomputed[0]:
        return False
    return (module is None or module.training) and torch.is_grad_enabled()


# Repeated blocks of a model, found in its containers or selected by name patterns.


class Unsuitable(ValueError):
    """A model or a setting that a technique can't work with; `in_short` has the reason."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(f"{reason}; {advice}" if advice else reason)
        self.in_short = reason


class NoBlocks(ValueError):
    """The model repeats no block, and none was named."""

    in_short = "the model repeats no block: name some with --blocks"


def find_modules(model: nn.Module, kinds: Any) -> dict[str, Any]:
    """Return the modules of one class, or of several, by their qualified names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


# A glob over module names, or several.
Globs = str | Sequence[str]

CONTAINER_TYPES = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(module: nn.Module, pattern: Globs | None = None) -> dict[str, nn.Module]:
    """Return the outermost blocks by qualified name, in the model's order.

    Without a pattern, blocks are the children of a container that have the same class as at least
    one other child (Hugging Face's `model.layers`, a `Sequential` of stages). A pattern is one glob
    over qualified names, such as `encoder.layers.*`, or several. A shared block is returned once.
    """
    if pattern is None:
        names = _find_repeated(module)
    else:
        all_names = [name for name, _ in module.named_modules() if name]
        names = match_names(all_names, pattern, option="the pattern")

    blocks: dict[str, nn.Module] = {}
    for name in names:
        block = module.get_submodule(name)
        is_inside = any(name.startswith(f"{other}.") for other in names)
        if not is_inside and block not in blocks.values():
            blocks[name] = block
    return blocks


def blocks_if_any(module: nn.Module, pattern: Globs | None = None) -> dict[str, nn.Module]:
    """Return the blocks, as `find_blocks` does; none if the model repeats none."""
    with contextlib.suppress(NoBlocks):
        return find_blocks(module, pattern)
    return {}


def match_names(names: list[str], globs: Globs, *, option: str) -> list[str]:
    """Return the names that match a glob, or one of several; a glob without a match is an error."""
    matched: set[str] = set()
    is_one = isinstance(globs, str | nn.Module | int)
    for glob in [globs] if is_one else globs:
        if not isinstance(glob, str):
            raise ValueError(
                f"{option} has to be given by patterns of names, such as 'layers.*'; "
                f"got {type(glob).__name__}"
            )
        found = fnmatch.filter(names, glob)
        if not found:
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(f"{option} {glob!r} matches no module; there are {shown or 'none'}")
        matched.update(found)
    return [name for name in names if name in matched]


def _find_repeated(module: nn.Module) -> list[str]:
    found: list[str] = []
    for prefix, container in module.named_modules():
        if not isinstance(container, CONTAINER_TYPES):
            continue
        children = {
            name: child
            for name, child in container.named_children()
            if next(child.parameters(), None) is not None
        }
        kinds = Counter(map(kind_of, children.values()))
        found += [
            f"{prefix}.{name}".lstrip(".")
            for name, child in children.items()
            if kinds[kind_of(child)] > 1 and not _is_own_layer(child)
        ]
    if not found:
        tops = ", ".join(f"{name} ({type(one).__name__})" for name, one in module.named_children())
        raise NoBlocks(
            f"{type(module).__name__} repeats no block in a ModuleList or Sequential that would "
            "save more than its input; name the blocks with a pattern (--blocks), which may also "
            f"name one block that runs several times. Its children are {tops or 'none'}"
        )
    return found


def kind_of(module: nn.Module) -> tuple[object, ...]:
    """Return a key of the original class; containers also compare the kinds of their children."""
    kind = type(module)
    while issubclass(kind, Derived):
        kind = kind._bases[1]
    children = module.children() if isinstance(module, CONTAINER_TYPES) else ()
    return (kind, *map(kind_of, children))


def _is_own_layer(module: nn.Module) -> bool:
    """Return whether a module is a torch layer without children, which saves its input only.

    Recurrent layers do not count, because they save every step.
    """
    is_torch = type(module).__module__.startswith("torch.nn.")
    return is_torch and not module._modules and not isinstance(module, nn.RNNBase)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors of nested containers and dataclasses, which may refer to each other."""
    seen = set() if seen is None else seen
    for leaf in tree_iter(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type) and id(leaf) not in seen:
            seen.add(id(leaf))
            yield from tensors_in([getattr(leaf, field.name, None) for field in fields(leaf)], seen)


# Tensors that saved-tensor hooks keep as they are.

# Name of the autograd node of a cast.
CAST_NODE = "ToCopyBackward0"


def check_unchanged(tensor: Tensor, version: int) -> None:
    """Raise if a saved tensor was changed in place, as autograd does for tensors without hooks."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an "
            f"inplace operation: it is at version {tensor._version}, and {version} was saved; "
            "write the result to another tensor"
        )


class CheckedTensor:
    """A tensor that is saved as it is, and checked for changes in place.

    Saved-tensor hooks switch off autograd's own check.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached where it may be the output of the node that saves it; else the object itself.
        self.tensor = tensor.detach() if tensor.requires_grad else tensor
        self.version = tensor._version

    def value(self) -> Tensor:
        check_unchanged(self.tensor, self.version)
        return self.tensor


# The model inside of wrappers such as DDP and `torch.compile`.

WRAPPED_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
PARALLEL_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def loaded_compiler() -> Any:
    """Return torch's compiler, or None: compiling anything imports it, which takes seconds."""
    return sys.modules.get("torch._dynamo")


def in_transform() -> bool:
    """Return whether a `torch.func` transform runs; its tensors must not escape from it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Return the module that wrappers such as DDP and `torch.compile` hold."""
    names = ("module",) if isinstance(module, PARALLEL_WRAPPERS) else WRAPPED_ATTRIBUTES
    for name in names:
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module):
            return inside_wrappers(inner)
    return module
