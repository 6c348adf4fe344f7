"""A stand-in tensor for logits, on which cross-entropy runs in chunks.

The operations that may lie between a head and its loss (a view, selected rows, an upcast, classes
moved to dimension 1) return another stand-in. Any other operation computes all of the logits and
continues with plain tensors: the result is right, but takes more memory.

Proof: `python -m pytest tests/test_chunked_loss.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from .chunked_cross_entropy import product_dtype, refuse_second_derivative
from .logits import Logits, Product, cast, copy_together, index, loss_options, move_classes, regroup

STEPS: dict[Any, Callable[..., Logits | None]] = {
    **dict.fromkeys(
        (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten), regroup
    ),
    **dict.fromkeys(
        (Tensor.transpose, torch.transpose, Tensor.permute, torch.permute), move_classes
    ),
    **dict.fromkeys((Tensor.float, Tensor.to), cast),
    Tensor.contiguous: copy_together,
    Tensor.__getitem__: index,
}
_GETTERS = (
    "shape dtype device ndim layout requires_grad is_cuda is_cpu is_meta is_sparse is_nested "
    "is_quantized is_leaf"
)
_METHODS = (
    "size dim ndimension numel nelement is_floating_point is_complex get_device element_size "
    "__len__"
)
METADATA = {
    *(getattr(Tensor, name).__get__ for name in _GETTERS.split()),
    *(getattr(Tensor, name) for name in _METHODS.split()),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}


class LazyLogits(Tensor):
    """Stand-in for `logits`, with a node of its own in the graph.

    The node serves callers that take tensors past `__torch_function__`, such as
    `torch.autograd.Function.apply`.
    """

    logits: Logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        name = _name(func)
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and first.logits.whole is None:
            if func is F.cross_entropy:
                options, reason = loss_options(first.logits, *args[1:], **kwargs)
                if not reason:
                    return first.logits.loss(args[1], options)
                name = f"cross_entropy with {reason}"
            elif func in STEPS and torch.is_grad_enabled():
                derived = STEPS[func](func, first.logits, *args[1:], **kwargs)
                if derived is first.logits:
                    return first
                if derived is not None:
                    derived.parent = first.logits
                    derived.step = partial(_again, func, args[1:], kwargs)
                    return _Stand.apply(derived, *derived.product.inputs)
        args, kwargs = tree_map(partial(_plain, operation=name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(partial(_plain, operation=_name(func)), (args, kwargs or {}))
        with torch.no_grad():
            return func(*args, **kwargs)


def stand_in(product: Product) -> Tensor:
    """Return a tensor that stands in for the logits of a product."""
    logits = Logits(product, product.hidden, product_dtype(product.hidden))
    tensor: Tensor = _Stand.apply(logits, *product.inputs)
    return tensor


class _Stand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Logits, *inputs: Tensor) -> Any:
        ctx.logits = logits
        make: Any = Tensor._make_wrapper_subclass
        tensor = make(LazyLogits, logits.shape, dtype=logits.dtype, device=logits.rows.device)
        tensor.logits = logits
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Compute the product again: the graph of logits computed before may be freed by now."""
        refuse_second_derivative()
        logits = ctx.logits
        needed = ctx.needs_input_grad[1:]
        inputs = [
            original.detach().requires_grad_(need)
            for original, need in zip(logits.product.inputs, needed, strict=True)
        ]
        whole = logits.follow(logits.product.compute, *inputs)
        trainable = [leaf for leaf in inputs if leaf.requires_grad]
        gradients = iter(torch.autograd.grad(whole, trainable, gradient))
        return None, *(next(gradients) if need else None for need in needed)


def _again(function: Any, args: Any, kwargs: Any, whole: Tensor) -> Any:
    return function(whole, *args, **kwargs)


def _plain(leaf: Any, *, operation: str) -> Any:
    return leaf.logits.read(operation) if isinstance(leaf, LazyLogits) else leaf


def _name(function: Any) -> str:
    """Return the name of a function, or for the getter of a property the name of the property."""
    name = str(getattr(function, "__name__", function))
    if name in ("__get__", "__set__"):
        return str(getattr(function.__self__, "__name__", name))
    return name
