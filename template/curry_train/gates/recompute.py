"""Gates of recompute: the same training from fewer bytes, each block computed once more.

    curry-train validate --impl recompute_blocks=my_package.memory:checkpoint_layers

The gates of offload and of the compiler's memory budget are in `offload`.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_recompute.py`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.blocks import find_blocks
from ..core.generators import seeded
from ..core.parity import Parity, StepRecord, compare, record
from ..core.replaced_calls import Call, replaced_calls
from ..primitives.recompute import recompute_blocks
from ..primitives.routing import MOST_EXPERTS, keep_routing
from ..primitives.segments import recompute_segments
from ..primitives.strategies import STRATEGIES, Apply, Sample, choose_segments
from ..workloads.workload import Case
from .offload import OFFLOAD_GATES
from .own_training import new_batch
from .same_training import (
    REFUSALS,
    Change,
    by_torch,
    changed,
    flops_again,
    flops_of_blocks,
    large_enough,
    memory_of,
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
    under_both,
)
from .verdict import Gate, NotApplicable, Outcome, error_in_a_line

MOST_RECOMPUTE_SHARE = 0.7  # of the held bytes, and of the peak, without recompute
NOISE_OF_PEAKS = 1.02  # two implementations of recompute differ by a few small tensors


def compare_memory(case: Case, *, recompute_blocks: Change = recompute_blocks) -> Outcome:
    """Compare held bytes and peak with plain, at a batch where activations dominate."""
    required = f"held and peak at most {MOST_RECOMPUTE_SHARE:.0%}"
    case, plain = large_enough(case, times=4)

    def shares(apply: Apply) -> tuple[float, float]:
        found = memory_of(case, apply)
        return found.held_bytes / plain.held_bytes, found.peak_bytes / plain.peak_bytes

    held, peak = shares(on_blocks(recompute_blocks))
    hint = ""
    if max(held, peak) > MOST_RECOMPUTE_SHARE:
        least_held, least_peak = _by_torch(shares)
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


def _by_torch(shares: Callable[[Apply], tuple[float, float]]) -> tuple[float, float]:
    """Measure torch's own checkpoint of the blocks, or our recompute where torch's fails."""
    try:
        return shares(by_torch)
    except REFUSALS:  # such as a cache of keys that would be filled twice
        return shares(STRATEGIES["full"].apply)


def compare_training(case: Case, *, recompute_blocks: Change = recompute_blocks) -> Outcome:
    """Compare a short training with every block recomputed to the plain one."""
    return same_training(case, on_blocks(recompute_blocks), every_block=True)


def compare_segments(case: Case) -> Outcome:
    """Compare a short training in segments, as many as have the lowest peak, to the plain one."""
    # Measured on another model, because some count their calls.
    loss = case.workload.mean_loss
    count = choose_segments(case.build(), case.batch(), loss, blocks=case.blocks)

    def apply(module: nn.Module, sample: Sample) -> list[str]:
        return recompute_segments(module, count, blocks=sample.blocks)

    return same_training(case, apply, alone=STRATEGIES["full"].apply, every_block=True)


def compare_selection(case: Case) -> Outcome:
    """Compare a short training with the blocks recomputed that hold most to the plain one."""
    names = STRATEGIES["selective"].apply(case.build(), sample_of(case))
    chosen = replace(case, blocks=names)
    return same_training(chosen, on_blocks(recompute_blocks), every_block=True)


def compare_flops(case: Case, *, recompute_blocks: Change = recompute_blocks) -> Outcome:
    """Compare the recomputed FLOPs with those of torch's own checkpoint of each block.

    With early stop they may be fewer.
    """
    required = "as under torch's own checkpoint; with early stop at most that"
    expected = flops_of_blocks(case)
    whole, stopped = flops_again(case, changed(case, on_blocks(recompute_blocks)))
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


def compare_routing(case: Case, *, keep: Callable[[nn.Module], Any] = keep_routing) -> Outcome:
    """Compare a step whose routers are disturbed before backward with the plain one.

    Buffers with a number for each expert move, as a bias that balances the load does, and `topk`
    takes the smallest scores, as another kernel does at a tie. Counters must count forward alone.
    """
    required = "bit-equal though each router is disturbed before backward"
    model = case.build()
    recompute_blocks(model, blocks=case.blocks)
    routed = keep_routing(model)
    if not routed:
        raise NotApplicable("no block that recomputes has a router or experts")

    num_experts = set[int]()
    with _before_topk(lambda scores: num_experts.add(scores.shape[-1])):
        plain = step_of(case, case.build())
    if plain_training(case)[0].tolerance:
        raise NotApplicable("the plain step does not repeat itself bit for bit")

    def disturb(keep: Callable[[nn.Module], Any]) -> Parity | str:
        module = case.build()
        recompute_blocks(module, blocks=case.blocks)
        keep(module)
        disturbed = _disturbed(map(module.get_submodule, routed), num_experts)
        try:
            return compare(plain, step_of(case, module, around_backward=disturbed))
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
def _disturbed(blocks: Iterable[nn.Module], num_experts: Collection[int]) -> Iterator[None]:
    """Move buffers with a number for each expert, and let `topk` take the smallest scores.

    A buffer that nothing else has written gets its value back; another one differs then.
    """
    generator = torch.Generator().manual_seed(0)
    buffers = {buffer for block in blocks for buffer in block.buffers()}
    moved = []
    for buffer in buffers:
        if buffer.is_floating_point() and buffer.numel() in num_experts:
            value = buffer.detach().clone()
            shift = torch.rand(buffer.shape, generator=generator) * BUFFER_SHIFT
            buffer.data.add_(shift.to(buffer))
            moved.append((buffer, value, buffer.detach().clone()))
    with _before_topk(_reverse):
        yield
    for buffer, value, shifted in moved:
        if torch.equal(buffer, shifted):
            buffer.data.copy_(value)


def _before_topk(look: Callable[[Tensor], Any]) -> AbstractContextManager[None]:
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
    with seeded(case.seed + dist.get_rank()):
        batches = [new_batch(case) for _ in range(NUM_MICROBATCHES)]

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

    return under_both(case, batches, measure, training=True)


GATES = (
    Gate("recompute/memory", compare_memory),
    Gate("recompute/parity-full", compare_training),
    Gate("recompute/parity-sequential", compare_segments),
    Gate("recompute/parity-selective", compare_selection),
    Gate("recompute/flops", compare_flops),
    Gate("recompute/off", compare_inactive),
    Gate("recompute/routing", compare_routing),
    *OFFLOAD_GATES,
    Gate("recompute/two-ranks", compare_ranks, on_ranks=True),
)
