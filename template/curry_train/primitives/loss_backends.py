"""Other implementations of the chunked loss, and the choice among them by measured bytes.

    apply_chunked_loss(model, backend="auto")

`auto` runs each usable backend once for a shape and takes the one with the least measured bytes
among those whose loss and gradients agree with the reference, which is our own. `liger` and `cce`
need their packages and CUDA, where none of this was measured yet.

Proof: `python -m pytest tests/primitives/test_chunked_loss_backends.py`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

# Private in torch; a second profiler in a process is an error.
profiler_runs: Callable[[], bool] = torch._C._autograd._profiler_enabled
# Takes hidden, weight, bias and targets, and the options of `chunked_cross_entropy`.
Loss = Callable[..., Tensor]
REFERENCE_BACKEND = "reference"
AUTO_BACKEND = "auto"
# The largest relative difference from the reference: sums in another order, and in half precision
# a rounding of each gradient's logits and products.
EXACT_ENOUGH = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
}
# Bytes that each backend took, by device, shape, dtypes and options.
MEASURED_BACKENDS: dict[tuple[Any, ...], dict[str, int]] = {}


def _torchs(hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, **options: Any) -> Tensor:
    functions: Any = F  # torch 2.11 does not have this one
    modules: Any = nn
    chunks = modules.LinearCrossEntropyOptions()
    class_weights = options.pop("class_weights", None)
    if class_weights is not None:
        class_weights = class_weights.to(hidden.dtype)
    result: Tensor = functions.linear_cross_entropy(
        hidden, weight, targets, linear_bias=bias, weight=class_weights, options=chunks, **options
    )
    return result


def _ligers(hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, **options: Any) -> Tensor:
    loss: Any = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    names = {"class_weights": "ce_weight", "z_loss": "lse_square_scale"}
    renamed = {names.get(name, name): value for name, value in options.items()}
    result: Tensor = loss(**renamed)(weight, hidden, targets, bias)
    return result


def _cuts(hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, **options: Any) -> Tensor:
    loss: Any = import_module("cut_cross_entropy").linear_cross_entropy
    result: Tensor = loss(hidden, weight, targets, bias=bias, **options)
    return result


@dataclass(frozen=True)
class BackendEntry:
    """One implementation, and where it works."""

    loss: Loss
    # The package that has it; its parent must have the attribute, if there is one.
    package: str
    device_types: tuple[str, ...]
    # Options that it takes; all others must be off.
    options: frozenset[str]

    def unusable(self, hidden: Any, options: Mapping[str, Any]) -> str:
        """Return why it can't be used here, or an empty string."""
        if self.package == "torch":
            if not hasattr(F, "linear_cross_entropy"):
                return f"torch {torch.__version__} has no linear_cross_entropy: 2.13 has"
        elif find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if hidden.device.type not in self.device_types:
            return f"it runs on {', '.join(self.device_types)}, not on {hidden.device.type}"
        others = sorted(options.keys() - self.options)
        return f"it does not take {', '.join(others)}" if others else ""


_COMMON_OPTIONS = frozenset({"ignore_index", "reduction"})
_LIGER_OPTIONS = {"label_smoothing", "z_loss", "softcap", "class_weights"}
BACKENDS = {
    "torch": BackendEntry(_torchs, "torch", ("cpu", "cuda"), _COMMON_OPTIONS | {"class_weights"}),
    "liger": BackendEntry(_ligers, "liger_kernel", ("cuda",), _COMMON_OPTIONS | _LIGER_OPTIONS),
    "cce": BackendEntry(_cuts, "cut_cross_entropy", ("cuda",), _COMMON_OPTIONS | {"softcap"}),
}


def loss_backend(name: str) -> Callable[..., Tensor]:
    """Return the backend of a name: "torch", "liger", "cce", or "auto" for the leanest.

    An error says why a named backend can't compute a loss; "auto" then takes another.
    """
    known = (AUTO_BACKEND, *BACKENDS)
    if name not in known:
        raise ValueError(f"the loss backend must be one of {', '.join(known)}, got {name!r}")
    return partial(_compute, name)


def _compute(
    name: str,
    reference: Loss,
    sources: Sequence[Any],
    targets: Tensor,
    options: Mapping[str, Any],
) -> Tensor:
    why_not = {other: entry.unusable(sources[0], options) for other, entry in BACKENDS.items()}
    if name == AUTO_BACKEND:
        usable = {other: BACKENDS[other].loss for other, why in why_not.items() if not why}
        loss = _leanest({REFERENCE_BACKEND: reference} | usable, sources, targets, options)
    elif why_not[name]:
        raise ValueError(f"the loss backend {name!r} can't compute this loss: {why_not[name]}")
    else:
        loss = BACKENDS[name].loss
    return loss(*sources, targets, **options)


def _leanest(
    usable: Mapping[str, Loss],
    sources: Sequence[Any],
    targets: Tensor,
    options: Mapping[str, Any],
) -> Loss:
    """Return the loss with the least measured bytes.

    It is the reference without values, as in fake tensors, and while a profiler runs.
    """
    if len(usable) == 1 or type(targets) is not Tensor or profiler_runs():
        return usable[REFERENCE_BACKEND]
    described = [
        None if source is None else (source.dtype, source.requires_grad, source.shape[1:])
        for source in sources
    ]
    numbers = [(flag, value) for flag, value in options.items() if not isinstance(value, Tensor)]
    # Sizes up to twice as large are taken as the same.
    tokens = len(targets).bit_length()
    key = (targets.device, tokens, sources[1].shape[0], *described, *options, *numbers)
    measured = MEASURED_BACKENDS.get(key) or _measure(usable, sources, targets, options)
    if not measured:
        return usable[REFERENCE_BACKEND]
    MEASURED_BACKENDS[key] = measured
    return usable[min(measured, key=measured.__getitem__)]


def _measure(
    usable: Mapping[str, Loss],
    sources: Sequence[Any],
    targets: Tensor,
    options: Mapping[str, Any],
) -> dict[str, int]:
    """Return the peak bytes of the reference and of each backend that is exact enough.

    A loss that is not finite, as of a batch without targets, compares nothing: there are none then.
    """
    measured: dict[str, int] = {}
    expected: list[Tensor] = []
    most = EXACT_ENOUGH[sources[0].dtype]
    for name, loss in usable.items():
        leaves = [
            None if source is None else source.detach().requires_grad_(source.requires_grad)
            for source in sources
        ]
        try:
            found, peak = _run_profiled(loss, leaves, targets, options)
        except (RuntimeError, ImportError):
            # Out of memory, or a kernel that does not compile here.
            if not measured:
                raise
            continue
        expected = expected or found
        if all(map(partial(_agree, most=most), found, expected)):
            measured[name] = peak
    return measured


def _run_profiled(
    loss: Loss, leaves: Sequence[Any], targets: Tensor, options: Mapping[str, Any]
) -> tuple[list[Tensor], int]:
    """Return the loss with its gradients, and the peak of what was allocated for them."""
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    # Without this torch writes lines to standard error for each profile.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with (
        profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiled,
        torch.enable_grad(),
    ):
        value = loss(*leaves, targets, **options)
        found = [value.detach(), *torch.autograd.grad(value.sum(), wanted)]
    results: Any = profiled.profiler
    events = sorted(results.kineto_results.events(), key=lambda event: event.start_ns())
    alive = accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    return found, max(alive, default=0)


def _agree(found: Tensor, expected: Tensor, *, most: float) -> bool:
    difference = (found.to(expected.dtype) - expected).norm()
    return bool(difference <= most * expected.norm())
