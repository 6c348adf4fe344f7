"""Gates of offload and of the compiler's memory budget: the same training from fewer bytes.

    curry-train validate --gate 'recompute/offload-*' --impl my_package.memory:offload_blocks

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_offload.py`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

# Loads the compiler, which takes seconds, when a budget is set.
from .. import primitives
from ..core.blocks import find_blocks
from ..core.measure_compiled import (
    CompileFailed,
    holds_compiled_code,
    measure_allocated,
    warnings_of_the_compiler_ignored,
    with_own_code,
)
from ..core.parity import StepRecord, compare
from ..core.replaced_calls import Call, replaced_calls
from ..core.wording import format_bytes
from ..primitives.offload import (
    DUPLICATE_REASON,
    PARAMETER_REASON,
    SMALL_REASON,
    host_buffer,
    offload_blocks,
    offload_report,
)
from ..workloads.workload import Case
from .same_training import (
    Change,
    activity_of,
    changed,
    on_blocks,
    plain_training,
    same_training,
    step_of,
)
from .verdict import Gate, NotApplicable, Outcome, error_in_a_line

# Ours leaves smaller storages on the device.
LEAST_BYTES = 4096


def offload_all(model: nn.Module, *, blocks: Sequence[str]) -> None:
    """Offload these blocks, the last one too."""
    offload_blocks(model, blocks=blocks, keep_last=0)


def compare_offload(case: Case, *, offload_blocks: Change = offload_all) -> Outcome:
    """Compare a short training with offload to the plain one."""
    # Backward needs the tensors of the last block at once.
    apply, best = (on_blocks(change, keep_last=1) for change in (offload_blocks, move_all))
    with _host_apart(case, offload_blocks):
        return same_training(case, apply, known=(best, NOTHING_TO_FREE), same_as=best)


NOTHING_TO_FREE = (
    "moving all that autograd saves in these blocks frees nothing: it is small, or saved outside "
    "of them too"
)


def compare_freed_bytes(case: Case, *, offload_blocks: Change = offload_all) -> Outcome:
    """Compare the bytes that leave the device with those that the plain blocks save."""
    plain = activity_of(case, case.build())
    module = changed(case, on_blocks(offload_blocks, keep_last=1))
    with _host_apart(case, offload_blocks):
        found = activity_of(case, module)

    best = activity_of(case, changed(case, on_blocks(move_all, keep_last=1)))
    least = plain.held_bytes - best.held_bytes
    if offload_blocks is offload_all:
        # Ours reports what it leaves on the device. These would be there anyway, or are small.
        kept_anyway = (PARAMETER_REASON, DUPLICATE_REASON, SMALL_REASON)
        for reason, (_, num_bytes) in offload_report(module).skipped.items():
            least -= 0 if reason in kept_anyway else num_bytes
    if least <= 0:
        raise NotApplicable(NOTHING_TO_FREE)
    freed = plain.held_bytes - found.held_bytes
    hint = ""
    if found.num_calls > plain.num_calls:
        hint = "the blocks run again in backward: this is recompute, and not offload"
    elif freed < least:
        hint = (
            "activations of the blocks stay on the device: check that the hooks are active during "
            "the blocks' forward, and that nothing else holds the tensors"
        )
    measured = f"{format_bytes(freed)} freed, {found.num_calls} calls of layers"
    return measured, f"at least {format_bytes(least)}, at most {plain.num_calls} calls", hint


def move_all(model: nn.Module, *, blocks: Sequence[str]) -> None:
    """Move all that autograd saves in these blocks, and lose its strides.

    So does `save_on_cpu` with pinned memory.
    """

    def pack(tensor: Tensor) -> tuple[Tensor, torch.device]:
        is_small = tensor.untyped_storage().nbytes() < LEAST_BYTES
        moved = tensor.contiguous() if is_small else _into_host_memory(Tensor.detach, tensor)
        return moved, tensor.device

    for name in blocks:
        block = model.get_submodule(name)

        def forward(*args: Any, own: Any = block.forward, **kwargs: Any) -> Any:
            with saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1])):
                return own(*args, **kwargs)

        block.forward = forward


# A host next to the device, also where the device is a CPU.


def _host_apart(case: Case, offload: Change) -> AbstractContextManager[None]:
    """Give copies to the host memory that does not count as the device's, on a CPU too.

    There `tensor.cpu()` is the tensor itself. Hooks of saved tensors run without gradients. Ours
    has such memory by itself.
    """
    calls = ((Tensor, "cpu"), (Tensor, "to"), (torch, "empty"))
    is_needed = case.device.type == "cpu" and offload is not offload_all
    return replaced_calls((*call, _into_host_memory) for call in calls if is_needed)


def _into_host_memory(function: Call, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = function(*args, **kwargs)
    if torch.is_grad_enabled() or out.layout is not torch.strided or not out.numel():
        return out
    return host_buffer(out.nbytes, pinned=False).view(out.dtype).view(out.shape).copy_(out)


# The compiler's memory budget: the same step from fewer saved bytes.

BUDGET = 0.5  # of the strategy
MOST_CLASSES = 2


@warnings_of_the_compiler_ignored()
def compare_budget(case: Case) -> Outcome:
    """Compare a step and its saved bytes at a budget with those of the blocks compiled without."""
    tolerance = plain_training(case)[0].tolerance
    equality = f"within {tolerance:.0e} of" if tolerance else "bit-equal to"
    required = f"{equality} the blocks compiled without a budget, fewer bytes"

    module = case.build()
    # The last block of each class: gradients flow into it, as into most blocks.
    last = {type(block): name for name, block in find_blocks(module, case.blocks).items()}
    names = list(last.values())[-MOST_CLASSES:]
    for block in map(module.get_submodule, names):
        # Its own code, because torch compiles one function a few times and then runs it as it is.
        own = with_own_code(block.forward, name="torch_alone")
        block.forward = torch.compile(own, backend="aot_eager")
    try:
        plain, plain_bytes = _step_and_bytes(case, module)
    except RuntimeError as error:
        raise NotApplicable(
            f"torch.compile itself can't run {', '.join(names)}, without a budget either: "
            f"{error_in_a_line(error)}"
        ) from error

    module = case.build()
    try:
        primitives.memory_budget(module, BUDGET, blocks=names, backend="aot_eager")
        step, num_bytes = _step_and_bytes(case, module)
    except CompileFailed as error:
        raise NotApplicable(str(error)) from error
    if not holds_compiled_code(module):
        return "nothing compiled", required, "uncompiled blocks have no budget: compile them"
    parity = compare(plain, step, tolerance=tolerance)
    hint = ""
    if not parity.holds:
        hint = (
            "the recomputed values differ: the recompute draws other random numbers, which "
            "memory_budget prevents"
        )
    elif num_bytes > plain_bytes:
        hint = "the budget raises the saved bytes here: choose other blocks, or recompute_blocks"
    elif num_bytes == plain_bytes:
        raise NotApplicable(
            f"{num_bytes:,} bytes with and without a budget: the blocks save nothing that could be "
            "recomputed, or nothing of them is compiled"
        )
    measured = f"{parity.describe(most=1)}; {num_bytes:,} of {plain_bytes:,} bytes"
    return f"{measured}; {', '.join(names)}", required, hint


def _step_and_bytes(case: Case, module: nn.Module) -> tuple[StepRecord, int]:
    step = step_of(case, module)
    loss = case.workload.mean_loss
    return step, measure_allocated(module, case.batch(), loss).held_bytes


OFFLOAD_GATES = (
    Gate("recompute/budget", compare_budget),
    Gate("recompute/offload-parity", compare_offload),
    Gate("recompute/offload-bytes", compare_freed_bytes),
)
