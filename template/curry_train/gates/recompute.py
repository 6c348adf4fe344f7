"""Gates of recompute: the same training from fewer bytes, each block computed once more.

    curry-train validate --gate recompute --impl my_package.memory:checkpoint_layers

The gates of offload and of the compiler's memory budget are in `offload`.

Proof: `python -m pytest tests/gates/test_gates.py tests/gates/test_recompute.py`.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ..core.blocks import find_blocks
from ..core.generators import seeded
from ..core.measure import Memory, count_flops, forward_flops, measure_memory, recompute_flops
from ..core.parity import Parity, StepRecord, check_comparable, compare, record
from ..plan.profiler import MemoryProfiler
from ..primitives.recompute import recompute_blocks
from ..primitives.routing import MOST_EXPERTS, keep_routing
from ..primitives.sac import PolicyError
from ..primitives.segments import recompute_segments
from ..primitives.strategies import STRATEGIES, Sample, choose_segments
from ..workloads.models import import_callable
from ..workloads.workload import Case
from .implementation import spec_of
from .offload import OFFLOAD_GATES, why_nothing_moves
from .same_training import (
    calls_counted,
    on_blocks,
    same_training,
    why_torch_reruns_nothing,
)
from .two_ranks import (
    Found,
    GradientSyncs,
    Wrapped,
    on_two_ranks,
    printed_bits,
    under_both,
    verdict_of_ranks,
)
from .verdict import Gate, Verdict, not_applicable

# Changes the blocks with these names, in place.
Change = Callable[..., Any]

MOST_RECOMPUTE_SHARE = 0.7  # of the held bytes, and of the peak, without recompute
NOISE_OF_PEAKS = 1.02  # two implementations of recompute differ by a few small tensors
ENOUGH_BYTES = 256 * 2**20  # a batch with this many held bytes is large enough for any model


def compare_memory(case: Case, *, recompute_blocks: Change = recompute_blocks) -> Verdict:
    """Compare held bytes and peak with plain, at a batch where activations dominate."""
    gate = "recompute/memory"
    required = f"held and peak at most {MOST_RECOMPUTE_SHARE:.0%}"
    case, plain = _large_enough(case)
    loss = case.workload.mean_loss
    names = list(find_blocks(case.build(), case.blocks))

    report = MemoryProfiler(case.build()).profile(case.batch(), 1, loss=loss, blocks=case.blocks)
    savings = [max(0, layer.saving_bytes) for layer in report.layers if layer.name in names]
    best_held = 1 - sum(savings) / plain.held_bytes
    # One block's activations are held again while it is recomputed.
    best_peak = 1 - (sum(savings) - max(savings)) / plain.peak_bytes
    if max(best_held, best_peak) > MOST_RECOMPUTE_SHARE:
        why = (
            f"at best held {best_held:.0%}, peak {best_peak:.0%} here: the blocks are few, or "
            "other things own the memory"
        )
        return not_applicable(gate, required=required, why=why)

    found = _memory_with(case, names, recompute_blocks)
    held = found.held_bytes / plain.held_bytes
    peak = found.peak_bytes / plain.peak_bytes
    hint = ""
    if held > MOST_RECOMPUTE_SHARE:
        hint = (
            "too little is recomputed: check that these are the right blocks (--blocks) and in "
            "training mode"
        )
    elif peak > MOST_RECOMPUTE_SHARE:
        least = _memory_with(case, names, _checkpoint_by_torch).peak_bytes / plain.peak_bytes
        if least > MOST_RECOMPUTE_SHARE and peak <= least * NOISE_OF_PEAKS:
            why = (
                f"the peak is {peak:.0%}, and {least:.0%} under torch's own checkpoint: what one "
                "block needs while it runs owns the peak"
            )
            return not_applicable(gate, required=required, why=why)
        hint = (
            f"the peak is {least:.0%} under torch's own checkpoint; `curry-train memory` shows "
            "what owns it"
        )
    measured = f"held {held:.0%}, peak {peak:.0%} of plain, batch {case.batch_size}"
    return Verdict(gate, not hint, measured, required, hint)


def _large_enough(case: Case) -> tuple[Case, Memory]:
    """Double the batch until it holds four times the parameters' bytes, or `ENOUGH_BYTES`."""
    while True:
        module = case.build()
        parameters = sum(parameter.nbytes for parameter in module.parameters())
        plain = measure_memory(module, case.batch(), case.workload.mean_loss)
        if plain.held_bytes >= min(4 * parameters, ENOUGH_BYTES):
            return case, plain
        case = replace(case, batch_size=2 * case.batch_size)


def _memory_with(case: Case, names: Sequence[str], change: Change) -> Memory:
    module = case.build()
    change(module, blocks=names)
    return measure_memory(module, case.batch(), case.workload.mean_loss)


def _checkpoint_by_torch(model: nn.Module, *, blocks: Sequence[str]) -> None:
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def compare_training(case: Case, *, recompute_blocks: Change = recompute_blocks) -> Verdict:
    """Compare a short training with every block recomputed to the plain one."""
    return same_training(
        "recompute/parity-full",
        case,
        on_blocks(recompute_blocks),
        by_torch=why_torch_reruns_nothing,
        every_block=True,
    )


def compare_segments(case: Case) -> Verdict:
    """Compare a short training in segments, as many as have the lowest peak, to the plain one."""

    def apply(module: nn.Module, sample: Sample) -> list[str]:
        # Measured on another model, because some count their calls.
        count = choose_segments(case.build(), sample.batch, sample.loss, blocks=sample.blocks)
        return recompute_segments(module, count, blocks=sample.blocks)

    full = STRATEGIES["full"].apply
    return same_training("recompute/parity-sequential", case, apply, alone=full, every_block=True)


def compare_selection(case: Case) -> Verdict:
    """Compare a short training with the blocks recomputed that hold most to the plain one."""

    def apply(module: nn.Module, sample: Sample) -> list[str]:
        names = STRATEGIES["selective"].apply(case.build(), sample)
        return recompute_blocks(module, blocks=names) if names else []

    return same_training(
        "recompute/parity-selective",
        case,
        apply,
        alone=STRATEGIES["full"].apply,
        by_torch=why_torch_reruns_nothing,
        every_block=True,
    )


# A training long enough for what shows only after some steps.
LONG_RUN_STEPS = 12
LONG_RUN_STRATEGIES = ("full", "sequential", "selective", "sac", "regions", "offload")


def compare_long_run(case: Case) -> Verdict:
    """Compare trainings of a dozen steps with and without each strategy."""
    gate = "recompute/long-run"
    held = []
    for strategy in LONG_RUN_STRATEGIES:
        try:
            apply = STRATEGIES[strategy].apply
            why = why_nothing_moves if strategy == "offload" else None
            verdict = same_training(gate, case, apply, by_torch=why, num_steps=LONG_RUN_STEPS)
        except PolicyError:
            continue
        if verdict.passed is False:
            return replace(verdict, measured=f"{strategy}: {verdict.measured}")
        if verdict.passed:
            held.append(strategy)
    required = f"bit-equal over {LONG_RUN_STEPS} steps"
    if not held:
        return not_applicable(gate, required=required, why="no strategy changes this model")
    return Verdict(gate, True, f"{', '.join(held)}: {LONG_RUN_STEPS} steps", required)


def compare_flops(case: Case, *, recompute_blocks: Change = recompute_blocks) -> Verdict:
    """Compare the recomputed FLOPs with the forward FLOPs of the blocks.

    With early stop they may be fewer.
    """
    gate = "recompute/flops"
    required = "as predicted; with early stop at most that"
    loss = case.workload.mean_loss
    batch = case.batch()
    plain = case.build()
    blocks = find_blocks(plain, case.blocks)
    # Seeded as `count_flops` is: a model may drop layers at random.
    with seeded(0):
        expected = sum(forward_flops(blocks, lambda: case.workload.loss(plain, batch)).values())
    if not expected:
        why = "the blocks have no matrix product, convolution or attention to count FLOPs of"
        return not_applicable(gate, required=required, why=why)

    found = []
    for early_stop in (False, True):
        module = case.build()
        recompute_blocks(module, blocks=list(blocks))
        with set_checkpoint_early_stop(early_stop):
            before = count_flops(case.build(), batch, loss)
            found.append(recompute_flops(before, count_flops(module, batch, loss)))
    whole, stopped = found
    hint = ""
    if whole != expected or not 0 <= stopped <= whole:
        hint = (
            "a block is not recomputed exactly once: check that it is wrapped once, and that the "
            "forward runs it"
        )
    measured = f"{whole:,} of {expected:,} predicted, {stopped:,} with early stop"
    return Verdict(gate, not hint, measured, required, hint)


def compare_inactive(case: Case, *, recompute_blocks: Change = recompute_blocks) -> Verdict:
    """Check that recompute leaves eval mode and forwards without gradients as they are."""
    plain, changed = case.build(), case.build()
    recompute_blocks(changed, blocks=list(find_blocks(changed, case.blocks)))
    wrong = []
    for has_gradients in (True, False):
        value, num_calls, modes = _run_inactive(case, changed, has_gradients=has_gradients)
        expected, num_expected, own_modes = _run_inactive(case, plain, has_gradients=has_gradients)
        is_same = torch.equal(value, expected) and (has_gradients or modes == own_modes)
        if not is_same or num_calls != num_expected:
            mode = "eval mode" if has_gradients else "no gradients"
            wrong.append(f"{mode}: {num_calls} calls, {'equal' if is_same else 'not equal'}")
    measured = "; ".join(wrong) or f"{num_expected} calls, as without recompute"
    hint = "run the block as it is where there is no backward" if wrong else ""
    required = "outputs and calls of the plain model"
    return Verdict("recompute/off", not wrong, measured, required, hint)


def _run_inactive(
    case: Case, module: nn.Module, *, has_gradients: bool
) -> tuple[Tensor, int, set[bool]]:
    """Run eval mode with gradients, or training without; note which layers have gradients.

    Some models draw random numbers in eval mode too.
    """
    module.train(not has_gradients)
    modes = set[bool]()
    with (
        seeded(case.seed),
        torch.set_grad_enabled(has_gradients),
        register_module_forward_pre_hook(lambda *_: modes.add(torch.is_grad_enabled())),
        calls_counted(module) as calls,
    ):
        value = case.workload.mean_loss(module, case.batch())
    return value, calls[0], modes


def compare_profile(case: Case, *, profiler: Callable[..., Any] = MemoryProfiler) -> Verdict:
    """Check that the layers' bytes sum to the held bytes and predict those under full recompute.

    Every model is measured in its second step: the first one fills caches, as of masks.
    """
    loss = case.workload.mean_loss
    report = profiler(case.build()).profile(case.batch(), 1, loss=loss, blocks=case.blocks)
    blocks = list(find_blocks(case.build(), case.blocks))
    held, left = (
        _second_held(case, change)
        for change in (
            lambda module: None,
            partial(recompute_blocks, blocks=blocks, preserve_rng_state=False),
        )
    )
    layers = [layer for layer in report.layers if layer.name in blocks]
    predicted = held - sum(layer.bytes - layer.boundary_bytes for layer in layers)
    total = sum(layer.bytes for layer in report.layers)

    # A block's output may be held only for the block's own backward, so the prediction may be too
    # high by that much.
    slack = max((layer.boundary_bytes for layer in layers), default=0)
    rounding = 0.0 if case.device.type == "cpu" else 0.02
    passed = abs(total - held) <= rounding * held
    passed = passed and -0.02 * held <= predicted - left <= slack + 0.02 * held

    measured = f"layers sum to {total:,} of {held:,}; full leaves {left:,}, predicted {predicted:,}"
    required = f"sum within {rounding:.0%}; predicted at most {slack:,} above, 2% below"
    if not passed and not all(layer.calls for layer in layers):
        why = "forward of a block is called directly, past the hooks that count its bytes"
        return not_applicable("recompute/profiler", required=required, why=why)
    hint = "" if passed else "a storage is counted twice, not at all, or for the wrong layer"
    return Verdict("recompute/profiler", passed, measured, required, hint)


def _second_held(case: Case, change: Callable[[nn.Module], Any]) -> int:
    module = case.build()
    change(module)
    with seeded(case.seed):
        case.workload.mean_loss(module, case.batch()).backward()
    return measure_memory(module, case.batch(), case.workload.mean_loss).held_bytes


# A router that is disturbed between forward and backward.

# How far a bias that balances the load moves; scores of a softmax are at most 1.
BUFFER_SHIFT = 1.0


def compare_routing(case: Case, *, keep: Callable[[nn.Module], Any] = keep_routing) -> Verdict:
    """Compare a step whose routers are disturbed before backward with the plain one.

    Buffers with a number for each expert move, as a bias that balances the load does, and `topk`
    takes the smallest scores, as another kernel does at a tie. Counters must count forward alone.
    """
    gate = "recompute/routing"
    required = "bit-equal though each router is disturbed before backward"
    model = case.build()
    recompute_blocks(model, blocks=case.blocks)
    routed = keep_routing(model)
    if not routed:
        why = "no block that recomputes has a router or experts"
        return not_applicable(gate, required=required, why=why)

    num_experts = set[int]()
    with _before_topk(lambda scores: num_experts.add(scores.shape[-1])):
        plain = _step(case, case.build())
    check_comparable(plain)
    if not compare(plain, _step(case, case.build())).bit_equal:
        why = "the plain step does not repeat itself bit for bit"
        return not_applicable(gate, required=required, why=why)

    def disturb(keep: Callable[[nn.Module], Any]) -> Parity | str:
        module = case.build()
        recompute_blocks(module, blocks=case.blocks)
        keep(module)
        blocks = map(module.get_submodule, routed)
        try:
            return compare(plain, _step(case, module, _disturbed(blocks, num_experts)))
        except RuntimeError as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"

    without = disturb(lambda module: None)
    if isinstance(without, Parity) and without.holds:
        why = "the gradients do not depend on what was disturbed: topk, and a bias of its experts"
        return not_applicable(gate, required=required, why=why)
    found = disturb(keep)
    hint = ""
    if isinstance(found, str):
        hint = "the recomputed run takes another way: repeat each choice of the first run"
    elif any(one.kind == "buffer" for one in found.differences):
        hint = "a counter of the load moves in the recomputed run too: restore it, or count once"
    elif not found.holds:
        hint = "the recomputed run chooses others: keep what was chosen, and the scores of it"
    described = found if isinstance(found, str) else found.describe()
    measured = f"{described}; {len(routed)} blocks with a router"
    return Verdict(gate, not hint, measured, required, hint)


def _step(case: Case, module: nn.Module, around_backward: Any = None) -> StepRecord:
    with seeded(case.seed):
        loss = case.workload.mean_loss(module, case.batch())
        with around_backward or contextlib.nullcontext():
            loss.backward()
        return record(module, loss.detach())


@contextlib.contextmanager
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


@contextlib.contextmanager
def _before_topk(look: Callable[[Tensor], Any]) -> Iterator[None]:
    """Call a function with the scores before each `topk`; it may return others."""

    def patched(choose: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
            others = look(scores)
            return choose(scores if others is None else others, *args, **kwargs)

        return chosen

    with (
        mock.patch.object(torch, "topk", patched(torch.topk)),
        mock.patch.object(Tensor, "topk", patched(Tensor.topk)),
    ):
        yield


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


def compare_ranks(case: Case, *, recompute_blocks: Change = recompute_blocks) -> Verdict:
    """Recompute the blocks before they are wrapped, and compare gradients and collectives."""
    required = "gradients of each rank equal to the bit, and as many collectives in backward"
    results = on_two_ranks(
        f"{__name__}:_compare_on_rank",
        case,
        required=required,
        change=spec_of(recompute_blocks),
        names=list(find_blocks(case.build(), case.blocks)),
    )

    def figure(of_ranks: Sequence[dict[str, Any]]) -> tuple[bool, str]:
        wrong = [name for found in of_ranks for name in found["wrong"]]
        words = f"{of_ranks[0]['facts']:,} facts, {len(set(wrong))} differ"
        return not wrong, words + (f" ({wrong[0]})" if wrong else "")

    return verdict_of_ranks(
        "recompute/two-ranks",
        results,
        required=required,
        figure=figure,
        hint="use the parameters that FSDP2 gathers for the recompute, and mark each gradient once",
    )


def _compare_on_rank(case: Case, change: str, names: Sequence[str]) -> Found:
    """Compare steps of this rank with recompute and without, on batches of its own."""
    recompute = partial(import_callable(change), blocks=names)
    with seeded(case.seed + dist.get_rank()):
        batches = [
            case.place(case.workload.batch(case.batch_size)) for _ in range(NUM_MICROBATCHES)
        ]

    def measure(wrapped: Wrapped, kind: str) -> dict[str, Any]:
        models = wrapped(), wrapped(), wrapped(change=recompute)
        # Wrappers of blocks may add to the names of parameters, and keep their order.
        parameters = [name for name, _ in models[0].named_parameters()]
        plain, again, found = (_step_facts(case, one, batches, parameters) for one in models)
        if plain != again:
            return {"refused": "the step without recompute does not repeat bit for bit"}
        wrong = [name for name, value in plain.items() if found[name] != value]
        return {"facts": len(plain), "wrong": wrong}

    # DDP takes no reentrant checkpoint where it has to look for unused parameters.
    unused = _has_unused(case, batches)
    return under_both(case, case.batch(), measure, unused=unused, training=True)


def _has_unused(case: Case, batches: Sequence[Any]) -> bool:
    """Return whether a microbatch of any rank uses only a part of the parameters."""
    model = case.build()
    num_unused = torch.zeros(1)
    with seeded(case.seed):
        for batch in batches:
            model.zero_grad(set_to_none=True)
            case.workload.mean_loss(model, batch).backward()
            num_unused += sum(one.requires_grad and one.grad is None for one in model.parameters())
    dist.all_reduce(num_unused)
    return bool(num_unused)


def _step_facts(
    case: Case, model: nn.Module, batches: Sequence[Any], names: Sequence[str]
) -> dict[str, str]:
    """Return losses, gradients and the number of collectives of two microbatches by name."""
    facts = {}
    model.train()
    with seeded(case.seed), GradientSyncs() as syncs:
        for number, batch in enumerate(batches):
            loss = case.workload.mean_loss(model, batch)
            loss.backward()
            facts[f"loss {number}"] = printed_bits(loss)
    facts["collectives"] = str(syncs.num_calls)
    gradients = [printed_bits(one.grad) for one in model.parameters()]
    return facts | dict(zip(names, gradients, strict=True))


GATES = (
    Gate("recompute/memory", compare_memory),
    Gate("recompute/parity-full", compare_training),
    Gate("recompute/parity-sequential", compare_segments),
    Gate("recompute/parity-selective", compare_selection),
    Gate("recompute/flops", compare_flops),
    Gate("recompute/off", compare_inactive),
    Gate("recompute/profiler", compare_profile),
    Gate("recompute/routing", compare_routing),
    *OFFLOAD_GATES,
    Gate("recompute/two-ranks", compare_ranks, on_ranks=True),
    Gate("recompute/long-run", compare_long_run, thorough=True),
)
