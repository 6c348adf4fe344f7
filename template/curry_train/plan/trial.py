"""Trial step: check whether a training step can be estimated from shapes alone.

If it can't, the error names the operation.

Proof: `python -m pytest tests/test_estimate.py`.
"""

import gc
import random
import traceback
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..core.fake import NeedsValues
from ..core.layers import tensors_in
from ..core.untouched import seeded, unwatched
from ..core.workload import Case
from .step_lives import ASKS_FOR_DEVICE

LARGER = "the sizes of the tensors that its kernel makes do not follow from shapes"
SPARSE = "the number of values in a sparse tensor does not follow from shapes"
BATCH_SIZE = 2  # batch norm needs two


def needs_rehearsal(case: Case) -> bool:
    """Check whether the second step may differ from the first one, so that both must run.

    It may differ if forward and backward leave tensors behind (a cache, or a buffer that is
    assigned), if a trainable parameter gets no gradient, or if Python's random numbers are drawn.
    Raises one of `NEEDS_VALUES` if shapes are not enough.
    """
    module = case.build()
    batch = case.batch(BATCH_SIZE)
    existing = {
        _key(tensor) for tensor in (*module.parameters(), *module.buffers(), *tensors_in(batch))
    }
    with seeded(0), torch.enable_grad(), Trial() as trial:
        before = random.getstate()
        loss = case.workload.mean_loss(module, batch)
        if loss.requires_grad:
            loss.sum().backward()
        del loss
        drawn = random.getstate() != before

    unused = any(
        parameter.requires_grad and parameter.grad is None for parameter in module.parameters()
    )
    module.zero_grad(set_to_none=True)
    gc.collect()
    if drawn or unused:
        return True
    left = (storage() for storage in trial.made)
    return any(storage is not None and storage._cdata not in existing for storage in left)


class Trial(TorchDispatchMode):
    """Raise an error at operations whose real storages differ from those that shapes give.

    `made` has the storages of all other operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_FOR_DEVICE:
            return args[0].device
        with unwatched():
            packet = getattr(func, "_overloadpacket", None)
            if packet in _LARGER:
                raise NeedsValues(func, LARGER)
            sparse = packet is torch.ops.aten.embedding and len(args) > 4 and args[4]
            if sparse or any(
                isinstance(value, Tensor) and value.layout is not torch.strided for value in args
            ):
                raise NeedsValues(func, SPARSE)
            out = func(*args, **(kwargs or {}))
            for value in tree_iter(out):
                if isinstance(value, Tensor) and value.layout is torch.strided:
                    self.made.append(weakref.ref(value.untyped_storage()))
            return out


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


_LARGER = {torch.ops.aten.col2im, torch.ops.aten._embedding_bag}


def who_needs_values(error: BaseException) -> str:
    """Name the operation that needs values, and the module whose forward calls it."""
    owner = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code.co_name == "forward" and isinstance(module, nn.Module):
            owner = f" in the forward of {type(module).__name__}, {code.co_filename}:{line}"
    func = getattr(error, "func", None) or "an operation"
    if isinstance(error, NeedsValues):
        return f"{func}{owner}: {error.why}"
    return f"{func}{owner} needs values, which an estimate from shapes does not have"
