"""Run a model's loss over chunks of the logits, without an edit of the model.

    apply_chunked_loss(model)    # the head then returns a stand-in for the logits

`F.cross_entropy` on the stand-in runs in chunks, and so does the loss of Hugging Face models. Any
other operation that reads the logits computes all of them, and `chunked_loss_report` lists those
operations. Forward computes the gradients; only a loss per token repeats a matrix product.

Proof: `python -m pytest tests/primitives/test_chunked_loss.py`.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from ..core.blocks import (
    DerivedForward,
    Unsuitable,
    become,
    find_modules,
    match_names,
    restore,
    tensors_in,
)
from .autocast import Autocast, autocast_as, autocast_now
from .cross_entropy import (
    REDUCTIONS,
    TARGET_DTYPES,
    check_chunk_size,
    chunked_cross_entropy,
    product_dtype,
    refuse_second_derivative,
)

# Logits that are not computed yet: the head's product, and the steps between it and a loss.

HALF_PRECISION_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(eq=False)
class LossUse:
    """Uses of a head's logits since its last forward in training."""

    # Tokens in a chunk; None to choose their number.
    chunk_tokens: int | None

    # Losses that ran in chunks.
    num_chunked: int = 0

    # Operations that needed all of the logits.
    whole: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        whole = f"; all logits made for {', '.join(self.whole)}" if self.whole else ""
        return f"losses in chunks: {self.num_chunked}{whole}"


@dataclass(eq=False)
class Product:
    """Matrix product that gives the logits, with its arguments and autocast's state."""

    weight: Tensor
    bias: Tensor | None

    # The head's input, the weight and, if there is one, the bias, and their versions.
    inputs: list[Tensor]
    versions: list[int]
    autocast: Autocast
    use: LossUse
    derived: "weakref.WeakSet[Logits]" = field(default_factory=weakref.WeakSet)

    def compute(self, *inputs: Tensor) -> Tensor:
        self.check()
        with autocast_as(self.autocast):
            return F.linear(*inputs)

    def check(self) -> None:
        """Raise if an input has changed since forward, so that the logits would differ."""
        changed = [tensor._version for tensor in self.inputs] != self.versions
        if changed or not self.weight.untyped_storage().nbytes():
            raise RuntimeError(
                f"the logits of a head in chunks, weight {tuple(self.weight.shape)}, were read "
                "after its input, weight or bias had changed or was freed; compute the loss, and "
                "read logits, before that (before optimizer.step()), shard the head with the model "
                "and not by itself, or use remove_chunked_loss"
            )


@dataclass(eq=False)
class Logits:
    """Logits, or a tensor derived from them, that are computed only when they are read."""

    product: Product

    # The head's input, arranged as these logits are.
    rows: Tensor
    dtype: torch.dtype

    # The dimension of classes, which is that of features in `rows`.
    dim: int

    # The product is multiplied by `scale`; with a cap, `cap * tanh` of that follows.
    scale: float = 1.0
    cap: float | None = None

    # The logits that these come from, and the operation that derives them.
    parent: "Logits | None" = None
    step: Callable[[Tensor], Tensor] = lambda whole: whole

    # The computed tensor; None until it is read.
    whole: Tensor | None = None

    def __post_init__(self) -> None:
        self.product.derived.add(self)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.rows.shape
        return (*shape[: self.dim], self.product.weight.shape[0], *shape[self.dim + 1 :])

    @property
    def factor(self) -> float:
        """The factor of the head's input: `cap * tanh(scale * logits)` is a softcap of that."""
        factor = self.scale * (self.cap or 1.0)
        # A model that divides by its limit before tanh and multiplies after it may be off by 1 bit.
        return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-12) else factor

    def read(self, operation: str) -> Tensor:
        """Return all of the logits; they are computed once.

        All that is derived from the product and still alive is computed with them, so that a write
        into one shows in the views of it.
        """
        if self.whole is None:
            self.product.use.whole.append(operation)
            for logits in self.product.derived:
                logits.make()
        return self.make()

    def make(self) -> Tensor:
        if self.whole is None:
            with torch.enable_grad():
                if self.parent is None:
                    self.whole = self.product.compute(*self.product.inputs)
                else:
                    self.whole = self.step(self.parent.make())
        return self.whole

    def follow(self, product: Tensor) -> Tensor:
        """Return these logits of a product that was computed anew."""
        return product if self.parent is None else self.step(self.parent.follow(product))

    def loss(self, targets: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute cross-entropy in chunks, in the dtype that `F.cross_entropy` returns."""
        product = self.product
        product.check()
        rows = self.rows.movedim(self.dim, -1)
        rows = rows if self.factor == 1 else rows * self.factor
        with autocast_as(product.autocast):
            loss = chunked_cross_entropy(
                rows,
                product.weight,
                targets,
                bias=product.bias,
                softcap=self.cap,
                chunk_tokens=product.use.chunk_tokens,
                **options,
            )
        product.use.num_chunked += 1

        # Under autocast losses stay float32.
        return loss if loss.device.type in autocast_now() else loss.to(self.dtype)


def loss_options(
    logits: Logits,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[dict[str, Any], str]:
    """Translate the arguments of `F.cross_entropy` into options of the chunked one.

    The second value is the reason why the chunked one can't be used, or an empty string.
    """
    reasons = {
        "size_average or reduce": size_average is not None or reduce is not None,
        f"reduction={reduction!r}": reduction not in REDUCTIONS,
        "targets that are no indices": not isinstance(target, Tensor)
        or target.dtype not in TARGET_DTYPES,
        "classes that are not in dimension 1": logits.dim != 1,
        "scaled logits of a head with a bias": logits.factor != 1
        and logits.product.bias is not None,
    }
    if not any(reasons.values()):
        reasons["targets of another shape"] = target.shape != logits.rows[:, 0].shape
    options = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "class_weights": weight,
    }
    return options, next((reason for reason, holds in reasons.items() if holds), "")


# Steps that need no logits. Each takes the arguments of the operation that it replaces, and returns
# the changed fields of the logits, or None if it does not support them.
Changes = dict[str, Any] | None

# Functions of torch and methods of a tensor, by the names that both have.
RESHAPES = ("view", "reshape", "flatten")
MOVES = ("transpose", "permute", "__getitem__")


def rearrange(function: Any, logits: Logits, *args: Any, **named: Any) -> Changes:
    """Apply a function that chooses or arranges tokens to the rows, and leaves classes alone."""
    if list(tensors_in((args, named))):
        # Only one index tensor is known to choose rows; a second one might choose classes.
        index = args[0]
        if len(args) > 1 or not isinstance(index, Tensor):
            return None
        is_mask = index.dtype is torch.bool
        num_indexed = index.dim() if is_mask else 1
        if num_indexed > logits.dim or not (is_mask or index.dtype is torch.int64):
            return None
        rows = logits.rows[index]
        return {"rows": rows, "dim": logits.dim + rows.dim() - logits.rows.dim()}
    classes, width = logits.product.weight.shape
    whole = torch.empty((), device="meta").expand(logits.shape)
    rows = logits.rows
    sizes = args
    reshapes = function.__name__ in RESHAPES
    if reshapes:
        rows = rows.contiguous()
        # The number of features takes the place of that of classes.
        sizes = tree_map_only(int, lambda size: width if size == classes else size, args)
    try:
        shape = function(whole, *args, **named).shape
        rows = function(rows, *sizes, **named)
    except (IndexError, RuntimeError, TypeError):
        return None  # the whole logits raise the same error
    differing = [dim for dim, size in enumerate(rows.shape) if shape[dim : dim + 1] != (size,)]
    if [(shape[dim], rows.shape[dim]) for dim in differing] != [(classes, width)]:
        return None
    # Sizes tell nothing of tokens and classes that a view has mixed.
    was_last = logits.dim == whole.dim() - 1
    if reshapes and not (was_last and differing == [len(shape) - 1]):
        return None
    return {"rows": rows, "dim": differing[0]} if rows.dtype is logits.rows.dtype else None


def cast(function: Any, logits: Logits, *to: Any, **named: Any) -> Changes:
    """Apply `float` or `to`: an upcast of half precision, or the current dtype or device."""
    if named or len(to) > 1:
        return None
    wanted = to[0] if to else torch.float32
    if isinstance(wanted, str | torch.device):
        return {} if torch.device(wanted) == logits.rows.device else None
    if wanted is logits.dtype:
        return {}
    if wanted is not torch.float32 or logits.dtype not in HALF_PRECISION_DTYPES:
        return None
    return {"dtype": torch.float32}


def multiply(function: Any, logits: Logits, factor: Any = None, **named: Any) -> Changes:
    """Multiply or divide by a positive number, as models do that limit or temper their logits."""
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if named or not is_number or factor <= 0:
        return None
    by = factor if function.__name__ in MULTIPLICATIONS else 1 / factor
    if logits.cap is None:
        return {"scale": logits.scale * by}
    return {"cap": logits.cap * by}


def limit(function: Any, logits: Logits) -> Changes:
    """Apply tanh, once."""
    return {"cap": 1.0} if logits.cap is None else None


# A stand-in tensor for logits, on which cross-entropy runs in chunks.

MULTIPLICATIONS = ("mul", "__mul__", "__rmul__")
LOGITS_FUNCTIONS: dict[str, Callable[..., Changes]] = {
    **dict.fromkeys((*RESHAPES, *MOVES), rearrange),
    **dict.fromkeys(("float", "to"), cast),
    **dict.fromkeys((*MULTIPLICATIONS, "div", "__truediv__"), multiply),
    "tanh": limit,
    "contiguous": lambda *_, **__: {},
}
# Properties, methods and functions that read logits without computing them.
METADATA_NAMES = {
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    "grad_fn",
    "_base",
    "nbytes",
    "itemsize",
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "get_device",
    "element_size",
    "__len__",
    "untyped_storage",
}


class LazyLogits(Tensor):
    """Stand-in for `logits`, with a node of its own in the graph and an empty storage.

    The node serves callers that take tensors past `__torch_function__`, such as
    `torch.autograd.Function.apply`, and hooks that observe how far backward has come.
    """

    logits: Logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        # The few that read values, such as `is_nonzero`, have no gradient.
        is_metadata = name in METADATA_NAMES or name.startswith("is_")
        if is_metadata or _counts_arrivals(func, args):
            return super().__torch_function__(func, types, args, kwargs)
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and first.logits.whole is None:
            if func is F.cross_entropy:
                options, reason = loss_options(first.logits, *args[1:], **kwargs)
                if not reason:
                    return _Linked.apply(first.logits.loss(args[1], options), first)
                name = f"cross_entropy with {reason}"
            elif name in LOGITS_FUNCTIONS and torch.is_grad_enabled():
                parent = first.logits
                changes = LOGITS_FUNCTIONS[name](func, parent, *args[1:], **kwargs)
                if changes is not None:
                    changes["step"] = lambda whole: func(whole, *args[1:], **kwargs)
                    derived = replace(parent, whole=None, parent=parent, **changes)
                    return _Stand.apply(derived, first, *derived.product.inputs)
        args, kwargs = _read(name, args, kwargs)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = _read(_name(func), args, kwargs or {})
        with torch.no_grad():
            return func(*args, **kwargs)


class _Stand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Logits, parent: Tensor | None, *inputs: Tensor) -> Any:
        # Chunked losses have the node in their graph too, and must not keep the head's input.
        ctx.logits = weakref.ref(logits)
        ctx.set_materialize_grads(False)
        make: Any = Tensor._make_wrapper_subclass
        device = logits.rows.device
        tensor = make(LazyLogits, logits.shape, dtype=logits.dtype, device=device, storage_size=0)
        tensor.logits = logits
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        """Compute the product again: the graph of logits computed before may be freed by now."""
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        refuse_second_derivative()
        logits = ctx.logits()
        needed = ctx.needs_input_grad[2:]
        inputs = [
            original.detach().requires_grad_(need)
            for original, need in zip(logits.product.inputs, needed, strict=True)
        ]
        with torch.enable_grad():
            whole = logits.follow(logits.product.compute(*inputs))
        trainable = [leaf for leaf in inputs if leaf.requires_grad]
        gradients = iter(torch.autograd.grad(whole, trainable, gradient))
        return None, None, *(next(gradients) if need else None for need in needed)


class _Linked(torch.autograd.Function):
    """Pass a chunked loss on, with the node of its logits in the graph, for the node's hooks."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor) -> Any:
        return loss.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def _counts_arrivals(function: Any, args: Any) -> bool:
    """Return whether this registers a hook that may be called without a gradient.

    torch's module trackers and FSDP2 use such hooks; a chunked loss has no gradient of all logits
    to give.
    """
    if function is not Tensor.register_hook:
        return False
    module = getattr(args[1], "__globals__", {}).get("__name__", "")
    return str(module).startswith(("torch.autograd.graph", "torch.distributed.fsdp"))


def _read(operation: str, *arguments: Any) -> Any:
    """Return arguments of an operation with computed logits."""

    def read(lazy: LazyLogits) -> Tensor:
        node: Any = lazy.grad_fn
        if node is not None:
            # The operation may send its gradient to the node, which computes the product again.
            node.read = lazy.logits
        return lazy.logits.read(operation)

    return tree_map_only(LazyLogits, read, arguments)


def _name(function: Any) -> str:
    """Return the name of a function, or for the getter of a property the name of the property."""
    name = str(getattr(function, "__name__", function))
    if name in ("__get__", "__set__"):
        return str(getattr(function.__self__, "__name__", name))
    return name


# Cross-entropy in chunks, so that only one chunk of the logits is allocated at a time.


class ChunkedHead(DerivedForward):
    """A Linear whose training output is computed only when it is read.

    Its technique is the `LossUse` of the latest logits.
    """

    weight: Tensor
    bias: Tensor | None

    def _run_changed(self, run: Any, inputs: Any) -> Any:
        (hidden,) = tensors_in(inputs)
        sources = [tensor for tensor in (hidden, self.weight, self.bias) if tensor is not None]
        if not any(tensor.requires_grad for tensor in sources):
            return run(hidden)

        use = self._technique = LossUse(self._technique.chunk_tokens)
        if any(hasattr(tensor, "full_tensor") for tensor in sources):
            use.whole.append("a head in shards")
            return run(hidden)
        product = Product(
            self.weight,
            self.bias,
            sources,
            [tensor._version for tensor in sources],
            autocast_now(),
            use,
        )
        logits = Logits(product, hidden, product_dtype(hidden), hidden.dim() - 1)
        return _Stand.apply(logits, None, *sources)


def apply_chunked_loss(
    model: nn.Module, *, head: str | None = None, chunk_tokens: int | None = None
) -> list[str]:
    """Make the loss of a model's head run in chunks, in place, and return the head's name.

    `head` is a glob over module names and may match several heads. Without it the head is the
    Linear that a Hugging Face model returns as its output embeddings, or else the single widest
    Linear, if it is wider than its input. A chunk has `chunk_tokens` tokens; without it see
    `chunked_cross_entropy`.
    Call this before DDP, `fully_shard` and `torch.compile`.
    """
    check_chunk_size(chunk_tokens)
    found = _find_heads(model, head)
    for module in found.values():
        become(ChunkedHead, module, LossUse(chunk_tokens))
    return list(found)


def remove_chunked_loss(model: nn.Module) -> list[str]:
    """Undo `apply_chunked_loss` and return the names of the heads that were changed."""
    return restore(model, ChunkedHead)


def chunked_loss_report(model: nn.Module) -> dict[str, LossUse]:
    """Report, per changed head, the chunked losses and the operations that read all logits.

    The counts start anew at each forward of the head in training.
    """
    return {name: module._technique for name, module in find_modules(model, ChunkedHead).items()}


class UnsuitableHead(Unsuitable):
    """Raised for a model whose head's loss can't run in chunks."""


def _find_heads(model: nn.Module, pattern: str | None) -> dict[str, nn.Module]:
    linears = find_modules(model, nn.Linear)
    found: dict[str, nn.Module]
    if pattern is not None:
        found = {name: linears[name] for name in match_names(list(linears), pattern, option="head")}
    else:
        # Hugging Face models name their head by this method.
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        found = {name: module for name, module in model.named_modules() if module is head}
        if not found:
            # Layers inside blocks repeat with the same width, so none is the single widest.
            widths = [linear.out_features for linear in linears.values()]
            most = max(widths, default=0)
            found = {
                name: linear
                for name, linear in linears.items()
                if linear.out_features == most > linear.in_features and widths.count(most) == 1
            }
    if not found:
        raise UnsuitableHead(
            f"{type(model).__name__} has no output layer: no Linear is wider than all others "
            "and than its own input",
            "name it with head=",
        )
    for name, module in found.items():
        if type(module).forward is not nn.Linear.forward:
            raise UnsuitableHead(
                f"{name or 'the model'} is a {type(module).__name__}, not a plain nn.Linear, so "
                "its loss can't run in chunks",
                "leave it out, or undo first what changed it (remove_chunked_loss)",
            )
    return found
