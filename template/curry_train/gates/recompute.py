"""Gates of recompute and offload: the same training from fewer bytes.

    curry-train validate --impl recompute_blocks=my_package.memory:checkpoint_layers
    curry-train validate --gate 'recompute/offload-*' --impl my_package.memory:offload_blocks

Each block is computed once more, or what it saves moves to the host and back; the compiler's memory
budget recomputes inside of compiled blocks.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_recompute.py
tests/gates/test_offload.py`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

# Loads the compiler, which takes seconds, when a budget is set.
from .. import primitives
from ..core.blocks import find_blocks
from ..core.generators import seeded
from ..core.measure_compiled import (
    CompileFailed,
    holds_compiled_code,
    measure_allocated,
    warnings_of_the_compiler_ignored,
    with_own_code,
)
from ..core.parity import Parity, StepRecord, compare, record
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
from ..primitives.recompute import recompute_blocks
from ..primitives.routing import MOST_EXPERTS, keep_routing
from ..primitives.segments import recompute_segments
from ..primitives.strategies import STRATEGIES, Apply, Sample, choose_segments
from ..workloads.workload import Case
from .implementation import takes
from .same_training import (
    REFUSALS,
    Change,
    activity_of,
    build_changed,
    checkpoint_by_torch,
    flops_again,
    flops_of_blocks,
    grow_batch,
    memory_of,
    microbatch,
    on_blocks,
    plain_training,
    same_training,
    same_without_training,
    sample_of,
    step_of,
)
from .two_ranks import (
    Found,
    GradientSyncs,
    Measured,
    Wrapped,
    compare_on_ranks,
    measure_under_both,
)
from .verdict import Gate, NotApplicable, Outcome, error_in_a_line

MOST_RECOMPUTE_SHARE = 0.7  # of the held bytes, and of the peak, without recompute
NOISE_OF_PEAKS = 1.02  # two implementations of recompute differ by a few small tensors


def compare_memory(case: Case, *, recompute_blocks: Change = recompute_blocks) -> Outcome:
    """Compare held bytes and peak with plain, at a batch where activations dominate."""
    required = f"held and peak at most {MOST_RECOMPUTE_SHARE:.0%}"
    case, plain = grow_batch(case, times=4)

    def shares(apply: Apply) -> tuple[float, float]:
        found = memory_of(case, apply)
        return found.held_bytes / plain.held_bytes, found.peak_bytes / plain.peak_bytes

    held, peak = shares(on_blocks(recompute_blocks))
    hint = ""
    if max(held, peak) > MOST_RECOMPUTE_SHARE:
        least_held, least_peak = _measure_by_torch(shares)
        if least_held > MOST_RECOMPUTE_SHARE:
            raise NotApplicable(
                f"held {least_held:.0%}, peak {least_peak:.0%} under torch's own checkpoint: the "
                "blocks are few, or other things own the memory"
            )
        hint = (
            f"the peak is {least_peak:.0%} under torch's own checkpoint; `curry-train memory` "
            "shows what owns it"
        )
        if held > MOST_RECOMPUTE_SHARE:
            hint = (
                "too little is recomputed: check that these are the right blocks (--blocks) and in "
                "training mode"
            )
        elif least_peak > MOST_RECOMPUTE_SHARE and peak <= least_peak * NOISE_OF_PEAKS:
            raise NotApplicable(
                f"the peak is {peak:.0%}, and {least_peak:.0%} under torch's own checkpoint: what "
                "one block needs while it runs owns the peak"
            )
    return f"held {held:.0%}, peak {peak:.0%} of plain, batch {case.batch_size}", required, hint


def _measure_by_torch(shares: Callable[[Apply], tuple[float, float]]) -> tuple[float, float]:
    """Measure torch's own checkpoint of the blocks, or our recompute where torch's fails."""
    try:
        return shares(checkpoint_by_torch)
    except REFUSALS:  # such as a cache of keys that would be filled twice
        return shares(STRATEGIES["full"].apply)


def compare_training(case: Case, *, recompute_blocks: Change = recompute_blocks) -> Outcome:
    """Compare a short training with every block recomputed to the plain one."""
    return same_training(case, on_blocks(recompute_blocks), every_block=True)


def compare_segments(case: Case) -> Outcome:
    """Compare a short training in segments, as many as have the lowest peak, to the plain one."""
    # Measured on another model, because some count their calls.
    count = choose_segments(case.build(), *case.batch_and_loss, blocks=case.blocks)

    def apply(module: nn.Module, sample: Sample) -> list[str]:
        return recompute_segments(module, count, blocks=sample.blocks)

    return same_training(case, apply, alone=STRATEGIES["full"].apply, every_block=True)


def compare_selection(case: Case) -> Outcome:
    """Compare a short training with the blocks recomputed that hold most to the plain one."""
    names = STRATEGIES["selective"].apply(case.build(), sample_of(case))
    return compare_training(replace(case, blocks=names), recompute_blocks=recompute_blocks)


def compare_flops(case: Case, *, recompute_blocks: Change = recompute_blocks) -> Outcome:
    """Compare the recomputed FLOPs with those of torch's own checkpoint of each block.

    With early stop they may be fewer.
    """
    required = "as under torch's own checkpoint; with early stop at most that"
    expected = flops_of_blocks(case)
    whole, stopped = flops_again(case, build_changed(case, on_blocks(recompute_blocks)))
    hint = ""
    if whole != expected or not 0 <= stopped <= whole:
        hint = (
            "a block is not recomputed exactly once: check that it is wrapped once, and that the "
            "forward runs it"
        )
    return f"{whole:,} of {expected:,} FLOPs again, {stopped:,} with early stop", required, hint


def compare_inactive(case: Case, *, recompute_blocks: Change = recompute_blocks) -> Outcome:
    """Check that recompute leaves eval mode and forwards without gradients as they are."""
    return same_without_training(case, {"recompute": recompute_blocks})


# A router that is disturbed between forward and backward.

# How far a bias that balances the load moves; scores of a softmax are at most 1.
BUFFER_SHIFT = 1.0


def compare_routing(case: Case, *, keep: Change = keep_routing) -> Outcome:
    """Compare a step with the plain one, where routers are disturbed before either's backward.

    Buffers with a number for each expert move, as a bias that balances the load does, and `topk`
    takes the smallest scores, as another kernel does at a tie. Counters must count forward alone.
    """
    required = "bit-equal though each router is disturbed before backward"
    recompute = STRATEGIES["full"].apply
    routed = keep_routing(build_changed(case, recompute))
    if not routed:
        raise NotApplicable("no block that recomputes has a router or experts")
    num_experts = set[int]()

    def disturbed_step(module: nn.Module) -> StepRecord:
        disturbed = _disturb_routers(map(module.get_submodule, routed), num_experts)
        return step_of(case, module, around_backward=disturbed)

    with _replace_topk(lambda scores: num_experts.add(scores.shape[-1])):
        plain = disturbed_step(case.build())
    if plain_training(case)[0].tolerance:
        raise NotApplicable("the plain step does not repeat itself bit for bit")

    def disturb(keep: Change) -> Parity | str:
        module = build_changed(case, recompute)
        keep(module)
        try:
            return compare(plain, disturbed_step(module))
        except RuntimeError as error:
            return error_in_a_line(error)

    without = disturb(lambda module: None)
    if isinstance(without, Parity) and without.holds:
        raise NotApplicable(
            "the gradients do not depend on what was disturbed: topk, and a bias of its experts"
        )
    found = disturb(keep)
    hint = ""
    if isinstance(found, str):
        hint = "the recomputed run takes another way: repeat each choice of the first run"
    elif any(one.kind == "buffer" for one in found.differences):
        hint = "a counter of the load moves in the recomputed run too: restore it, or count once"
    elif not found.holds:
        hint = "the recomputed run chooses others: keep what was chosen, and the scores of it"
    described = found if isinstance(found, str) else found.describe()
    return f"{described}; {len(routed)} blocks with a router", required, hint


@contextmanager
def _disturb_routers(blocks: Iterable[nn.Module], num_experts: Collection[int]) -> Iterator[None]:
    """Move buffers with a number for each expert, and let `topk` take the smallest scores."""
    generator = torch.Generator().manual_seed(0)
    # In the order in which each model has them.
    for buffer in dict.fromkeys(buffer for block in blocks for buffer in block.buffers()):
        if buffer.is_floating_point() and buffer.numel() in num_experts:
            shift = torch.rand(buffer.shape, generator=generator) * BUFFER_SHIFT
            buffer.data.add_(shift.to(buffer))
    with _replace_topk(_reverse):
        yield


def _replace_topk(look: Callable[[Tensor], Any]) -> AbstractContextManager[None]:
    """Call a function with the scores before each `topk`; it may return others."""

    def chosen(choose: Call, scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        others = look(scores)
        return choose(scores if others is None else others, *args, **kwargs)

    return replaced_calls([(torch, "topk", chosen), (Tensor, "topk", chosen)])


def _reverse(scores: Tensor) -> Tensor | None:
    if not scores.is_floating_point() or scores.shape[-1] > MOST_EXPERTS:
        return None
    if scores.grad_fn is None:
        return -scores
    # In place and unseen by autograd, as a kernel computes.
    scores.data.neg_()
    return None


# Offload: the same training, and the bytes leave the device.

# Ours leaves smaller storages on the device.
LEAST_BYTES = 4096


our_offload = offload_blocks


def _offload_named_blocks(offload: Change) -> Apply:
    """Return a strategy that offloads each block but the last.

    Backward needs the tensors of the last one at once. Ours and its copies would leave another one
    out.
    """
    if takes(offload, "keep_last"):
        offload = partial(offload, keep_last=0)
    return on_blocks(offload, keep_last=1)


def compare_offload(case: Case, *, offload_blocks: Change = our_offload) -> Outcome:
    """Compare a short training with offload to the plain one."""
    apply, best = map(_offload_named_blocks, (offload_blocks, move_all))
    with _separate_host_memory(case, offload_blocks):
        return same_training(case, apply, known=(best, NOTHING_TO_FREE), same_as=best)


NOTHING_TO_FREE = (
    "moving all that autograd saves in these blocks frees nothing: it is small, or saved outside "
    "of them too"
)


def compare_freed_bytes(case: Case, *, offload_blocks: Change = our_offload) -> Outcome:
    """Compare the bytes that leave the device with those that the plain blocks save."""
    plain = activity_of(case, case.build())
    module = build_changed(case, _offload_named_blocks(offload_blocks))
    with _separate_host_memory(case, offload_blocks):
        found = activity_of(case, module)

    best = activity_of(case, build_changed(case, _offload_named_blocks(move_all)))
    least = plain.held_bytes - best.held_bytes
    if offload_blocks is our_offload:
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
        moved = tensor.contiguous() if is_small else _copy_to_host(Tensor.detach, tensor)
        return moved, tensor.device

    for name in blocks:
        block = model.get_submodule(name)

        def forward(*args: Any, own: Any = block.forward, **kwargs: Any) -> Any:
            with saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1])):
                return own(*args, **kwargs)

        block.forward = forward


# A host next to the device, also where the device is a CPU.


def _separate_host_memory(case: Case, offload: Change) -> AbstractContextManager[None]:
    """Give copies to the host memory that does not count as the device's, on a CPU too.

    There `tensor.cpu()` is the tensor itself. Hooks of saved tensors run without gradients. Ours
    has such memory by itself.
    """
    calls = ((Tensor, "cpu"), (Tensor, "to"), (torch, "empty"))
    is_needed = case.device.type == "cpu" and offload is not our_offload
    return replaced_calls((*call, _copy_to_host) for call in calls if is_needed)


def _copy_to_host(function: Call, *args: Any, **kwargs: Any) -> Tensor:
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
    return step, measure_allocated(module, *case.batch_and_loss).held_bytes


# Recompute under DDP and FSDP2.

NUM_MICROBATCHES = 2


def compare_ranks(case: Case, *, recompute_blocks: Change = recompute_blocks) -> Outcome:
    """Recompute the blocks before they are wrapped, and compare gradients and collectives."""
    return compare_on_ranks(
        _compare_on_rank,
        case,
        required="gradients of each rank equal to the bit, and as many collectives in backward",
        hint="use the parameters that FSDP2 gathers for the recompute, and mark each gradient once",
        change=recompute_blocks,
        names=list(find_blocks(case.build(), case.blocks)),
    )


def _compare_on_rank(case: Case, change: Change, names: Sequence[str]) -> Found:
    """Compare steps of this rank with recompute and without, on batches of its own."""
    recompute = partial(change, blocks=names)
    first = dist.get_rank() * NUM_MICROBATCHES
    batches = [microbatch(case, first + index) for index in range(NUM_MICROBATCHES)]

    def measure(wrapped: Wrapped, kind: str) -> Measured:
        def take_step(model: nn.Module) -> tuple[StepRecord, int]:
            """Return losses, gradients and the number of collectives of the batches."""
            losses = []
            with seeded(case.seed), GradientSyncs() as syncs:
                for batch in batches:
                    loss = case.workload.mean_loss(model.train(), batch)
                    loss.backward()
                    losses.append(loss.detach())
                return record(model, torch.stack(losses)), syncs.num_calls

        (plain, num_plain), (again, _) = take_step(wrapped()), take_step(wrapped())
        if not compare(plain, again).bit_equal:
            return "the step without recompute does not repeat bit for bit", None
        found, num_found = take_step(wrapped(change=recompute))
        parity = compare(plain, found)
        measured = f"{parity.describe(most=1)}, {num_found} of {num_plain} collectives"
        return measured, parity.bit_equal and num_found == num_plain

    return measure_under_both(case, batches, measure, training=True)


GATES = (
    Gate("recompute/memory", compare_memory),
    Gate("recompute/parity-full", compare_training),
    Gate("recompute/parity-sequential", compare_segments),
    Gate("recompute/parity-selective", compare_selection),
    Gate("recompute/flops", compare_flops),
    Gate("recompute/off", compare_inactive),
    Gate("recompute/routing", compare_routing),
    Gate("recompute/budget", compare_budget),
    Gate("recompute/offload-parity", compare_offload),
    Gate("recompute/offload-bytes", compare_freed_bytes),
    Gate("recompute/two-ranks", compare_ranks, on_ranks=True),
)
