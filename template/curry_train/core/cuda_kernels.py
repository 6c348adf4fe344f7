"""Stand-ins on fake CPU tensors for CUDA's attention, RMS norm and autocast.

They save for backward what CUDA saves, and compute nothing. On the CPU, attention and RMS norm save
more than on CUDA, and autocast leaves in half precision what CUDA runs in float32. Not yet measured
on CUDA.

Proof: `python -m pytest tests/test_fake.py`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HALF = (torch.float16, torch.bfloat16)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Choose the attention kernel as CUDA does.

    Half precision without a mask runs flash attention; all else runs the memory-efficient kernel.
    """
    if torch.is_autocast_enabled("cpu"):
        # Autocast does not apply to the operations called below.
        dtype = torch.get_autocast_dtype("cpu")
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)

    if query.dim() != 4:
        return _PLAIN_ATTENTION(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    if query.dtype in HALF and attn_mask is None and query.shape[-1] <= 256:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        output: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return output

    if key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                attn_mask.logical_not(), -torch.inf
            )
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])

    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    outputs = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)
    result: Tensor = outputs[0]
    return result


class _RmsNorm(torch.autograd.Function):
    """RMS norm that saves its input and one number per row, as CUDA's fused kernel does.

    The CPU's RMS norm saves the result of every operation that it consists of.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:
        rows = (*x.shape[: x.dim() - num_dims], *[1] * num_dims)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        statistic = x.new_empty(rows, dtype=dtype)
        ctx.save_for_backward(x, weight, statistic)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    output: Tensor = _RmsNorm.apply(input, weight, len(normalized_shape))
    return output


_PLAIN_ATTENTION = F.scaled_dot_product_attention
STAND_INS: Mapping[Any, Callable[..., Any]] = {
    _PLAIN_ATTENTION: _attention,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}
_NAMES = (
    "layer_norm",
    "group_norm",
    "softmax",
    "log_softmax",
    "softplus",
    "cosine_similarity",
    "normalize",
)
_MORE = (
    "exp",
    "log",
    "log1p",
    "pow",
    "rsqrt",
    "reciprocal",
    "sum",
    "prod",
    "cumsum",
    "cumprod",
    "norm",
    "logsumexp",
)
# Functions that autocast runs in float32 on CUDA, and in half precision on the CPU.
IN_FLOAT32 = frozenset(
    getattr(space, name)
    for space in (torch, Tensor, F)
    for name in (*_NAMES, *_MORE)
    if hasattr(space, name)
) | {Tensor.__pow__}


def in_float32(value: Any) -> Any:
    """Convert tensors of half precision to float32."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Patch torch's attention with the stand-in, and apply autocast for CUDA to CPU tensors."""
    original = torch.autocast.__init__

    def autocast(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type = "cpu"
            dtype = dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, enabled, **kwargs)

    F.scaled_dot_product_attention = _attention
    torch.autocast.__init__ = autocast  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _PLAIN_ATTENTION
        torch.autocast.__init__ = original  # type: ignore[method-assign]
