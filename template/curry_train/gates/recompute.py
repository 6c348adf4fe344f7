"""Gates of recompute: less memory, the predicted FLOPs, and the same training.

Each gate takes the technique as `apply`, so that its tests can plant a wrong one; wrong models are
planted as cases.

Proof: `python -m pytest tests/test_recompute.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from ..core.blocks import find_blocks
from ..core.layers import forward_flops
from ..core.measure import Memory, count_flops, measure_memory, recompute_flops
from ..core.untouched import seeded
from ..core.verdict import Gate, Verdict, not_applicable
from ..core.workload import Case
from ..plan.profiler import MemoryProfiler
from ..plan.same_training import calls_counted, same_training, sample_of
from ..plan.strategies import STRATEGIES
from ..plan.strategy import Apply
from ..primitives.recompute import recompute_blocks

FULL = STRATEGIES["full"].apply
AT_MOST = 0.7  # of the held bytes, and of the peak, without recompute
ENOUGH_BYTES = 256 * 2**20  # a batch with this many held bytes is large enough for any model


def memory(case: Case, *, apply: Apply = FULL) -> Verdict:
    """Compare held bytes and peak with plain, at a batch where activations dominate."""
    gate = "recompute/memory"
    required = f"held and peak at most {AT_MOST:.0%}"
    case, plain = _large_enough(case)
    loss = case.workload.mean_loss
    module = case.build()

    profile = MemoryProfiler(module).profile(case.batch(), 1, loss=loss, blocks=case.blocks)
    blocks = find_blocks(module, case.blocks)
    savings = [max(0, layer.saving_bytes) for layer in profile.layers if layer.name in blocks]
    best_held = 1 - sum(savings) / plain.held_bytes
    # One block's activations are held again while it is recomputed.
    best_peak = 1 - (sum(savings) - max(savings)) / plain.peak_bytes
    if max(best_held, best_peak) > AT_MOST:
        why = (
            f"at best held {best_held:.0%}, peak {best_peak:.0%} here: the blocks are few, or "
            "other things own the memory"
        )
        return not_applicable(gate, required=required, why=why)

    apply(module, sample_of(case))
    found = measure_memory(module, case.batch(), loss)
    held = found.held_bytes / plain.held_bytes
    peak = found.peak_bytes / plain.peak_bytes
    hint = ""
    if held > AT_MOST:
        hint = (
            "too little is recomputed: check that these are the right blocks (--blocks) and in "
            "training mode"
        )
    elif peak > AT_MOST:
        hint = (
            "the blocks do not own the peak: logits, gradients or one large layer do; `memory` "
            "shows which"
        )
    measured = f"held {held:.0%}, peak {peak:.0%} of plain, batch {case.batch_size}"
    return Verdict(gate, not hint, measured, required, hint)


def parity(case: Case, *, strategy: str, apply: Apply | None = None) -> Verdict:
    """Compare loss, gradients, buffers and generators of one step with and without recompute."""
    gate = f"recompute/parity-{strategy}"
    # The segments of `sequential` also free the tensors between blocks.
    by_block = strategy != "sequential"
    return same_training(
        gate, case, apply or STRATEGIES[strategy].apply, alone=FULL, by_block=by_block
    )


def flops(case: Case, *, apply: Apply = FULL) -> Verdict:
    """Compare the recomputed FLOPs with the forward FLOPs of the recomputed blocks.

    With early stop they may be fewer.
    """
    loss = case.workload.mean_loss
    batch = case.batch()
    plain = case.build()
    module = case.build()
    # Seeded as `count_flops` is: a model may drop layers at random.
    with seeded(0):
        per_block = forward_flops(
            find_blocks(plain, case.blocks), lambda: case.workload.loss(plain, batch)
        )
    if not sum(per_block.values()):
        why = "the blocks have no matrix product, convolution or attention to count FLOPs of"
        return not_applicable("recompute/flops", required="as predicted", why=why)

    before = count_flops(plain, batch, loss)
    names = apply(module, sample_of(case))
    with seeded(case.seed), set_checkpoint_early_stop(False):
        whole = recompute_flops(before, count_flops(module, batch, loss))
    stopped = recompute_flops(before, count_flops(module, batch, loss))
    expected = sum(per_block.get(name, 0) for name in names)
    held = names != [] and whole == expected and 0 <= stopped <= whole
    measured = f"{whole:,} of {expected:,} predicted, {stopped:,} with early stop"
    required = "as predicted; with early stop at most that"
    hint = ""
    if not held:
        hint = (
            "a block is not recomputed exactly once: check that it is wrapped once, and that the "
            "forward runs it"
        )
    return Verdict("recompute/flops", held, measured, required, hint)


def off(case: Case, *, apply: Apply = FULL) -> Verdict:
    """Check that nothing is recomputed in eval mode and without grad mode."""
    plain = case.build().eval()
    module = case.build()
    batch = case.batch()
    apply(module, sample_of(case))
    module.eval()
    with calls_counted(plain) as expected:
        _ = case.workload.mean_loss(plain, batch).backward()
    with calls_counted(module) as counted:
        value = case.workload.mean_loss(module, batch)
        value.backward()
    equal = torch.equal(value, case.workload.mean_loss(plain, batch))

    expected_without_grad = _calls_without_grad(case, plain)
    without_grad = _calls_without_grad(case, module)
    held = equal and counted[0] == expected[0] and without_grad == expected_without_grad
    measured = (
        f"{counted[0]} calls in eval, {without_grad} without grad; "
        f"output {'equal' if equal else 'not equal'}"
    )
    required = f"{expected[0]} and {expected_without_grad} calls, output equal"
    hint = ""
    if not held:
        hint = "recompute only while module.training and torch.is_grad_enabled()"
    return Verdict("recompute/off", held, measured, required, hint)


def _calls_without_grad(case: Case, module: nn.Module) -> int:
    """Count the calls in training mode; the seed makes a model drop the same layers each time."""
    with seeded(case.seed), torch.no_grad(), calls_counted(module.train()) as counted:
        _ = case.workload.mean_loss(module, case.batch())
    return counted[0]


def profiler(case: Case, *, profiled: Callable[..., Any] = MemoryProfiler) -> Verdict:
    """Check that the layers' bytes sum to the held bytes and predict those under full recompute."""
    loss = case.workload.mean_loss
    module = case.build()
    report = profiled(module).profile(case.batch(), 3, loss=loss, blocks=case.blocks)
    held = measure_memory(module, case.batch(), loss).held_bytes
    blocks = recompute_blocks(module, blocks=case.blocks, preserve_rng_state=False)
    predicted = held - sum(
        layer.bytes - layer.boundary_bytes for layer in report.layers if layer.name in blocks
    )
    left = measure_memory(module, case.batch(), loss).held_bytes
    total = sum(layer.bytes for layer in report.layers)

    # A block's output may be held only for the block's own backward, so the prediction may be too
    # high by that much.
    slack = max(
        (layer.boundary_bytes for layer in report.layers if layer.name in blocks), default=0
    )
    is_exact = case.device.type == "cpu"
    rounding = 0.0 if is_exact else 0.02
    most_spread = 0.0 if is_exact else 0.1
    passed = report.spread <= most_spread and abs(total - held) <= rounding * held
    passed = passed and -0.02 * held <= predicted - left <= slack + 0.02 * held

    measured = f"layers sum to {total:,} of {held:,}; full leaves {left:,}, predicted {predicted:,}"
    required = (
        f"sum within {rounding:.0%}; predicted at most {slack:,} above, 2% below; "
        f"spread at most {most_spread:.0%}"
    )
    hint = ""
    if not passed:
        hint = "a storage is counted twice, not at all, or for the wrong layer"
    return Verdict("recompute/profiler", passed, measured, required, hint)


GATES = (
    Gate("recompute/memory", memory),
    Gate("recompute/parity-full", partial(parity, strategy="full")),
    Gate("recompute/parity-sequential", partial(parity, strategy="sequential")),
    Gate("recompute/parity-selective", partial(parity, strategy="selective")),
    Gate("recompute/flops", flops),
    Gate("recompute/off", off),
    Gate("recompute/profiler", profiler),
)


def _large_enough(case: Case) -> tuple[Case, Memory]:
    """Double the batch until it holds four times the parameters' bytes, or `ENOUGH_BYTES`."""
    module = case.build()
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    while True:
        plain = measure_memory(module, case.batch(), case.workload.mean_loss)
        if plain.held_bytes >= min(4 * parameters, ENOUGH_BYTES):
            return case, plain
        case = replace(case, batch_size=2 * case.batch_size)
