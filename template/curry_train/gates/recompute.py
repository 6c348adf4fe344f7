"""Recompute saves memory, costs the FLOPs that were predicted, and trains the same model.

Each gate takes the technique as `apply`, so that its tests can plant a wrong one; wrong models are planted as cases.
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
AT_MOST = 0.7  # of the bytes that the model holds, and has at its peak, without recompute
ENOUGH_BYTES = 256 * 2**20  # a batch that holds so much is large enough for any model


def memory(case: Case, *, apply: Apply = FULL) -> Verdict:
    """Held and peak bytes, at a batch where activations are what matters."""
    gate, required = "recompute/memory", f"held and peak at most {AT_MOST:.0%}"
    case, plain = _large_enough(case)
    loss, module = case.workload.mean_loss, case.build()
    profile = MemoryProfiler(module).profile(case.batch(), 1, loss=loss, blocks=case.blocks)
    blocks = find_blocks(module, case.blocks)
    savings = [max(0, layer.saving_bytes) for layer in profile.layers if layer.name in blocks]
    best = 1 - sum(savings) / plain.held_bytes, 1 - (sum(savings) - max(savings)) / plain.peak_bytes
    if max(best) > AT_MOST:  # one block is back while it is computed again
        why = f"at best held {best[0]:.0%}, peak {best[1]:.0%} here: the blocks are few, or other things own the memory"
        return not_applicable(gate, required=required, why=why)
    apply(module, sample_of(case))
    found = measure_memory(module, case.batch(), loss)
    held, peak = found.held_bytes / plain.held_bytes, found.peak_bytes / plain.peak_bytes
    hint = ""
    if held > AT_MOST:
        hint = "nothing that matters is recomputed: are the blocks the right ones (--blocks), in training mode?"
    elif peak > AT_MOST:
        hint = "the peak is not the blocks': logits, gradients or one large layer own it; `memory` shows who"
    measured = f"held {held:.0%}, peak {peak:.0%} of plain, batch {case.batch_size}"
    return Verdict(gate, not hint, measured, required, hint)


def parity(case: Case, *, strategy: str, apply: Apply | None = None) -> Verdict:
    """One step with and without: loss, gradients, buffers and generators."""
    gate, by_block = (
        f"recompute/parity-{strategy}",
        strategy != "sequential",
    )  # whose runs also free what is between
    return same_training(
        gate, case, apply or STRATEGIES[strategy].apply, alone=FULL, by_block=by_block
    )


def flops(case: Case, *, apply: Apply = FULL) -> Verdict:
    """What backward does again is the forward of the recomputed blocks, no more; early stop may save some of it."""
    loss, batch = case.workload.mean_loss, case.batch()
    plain, module = case.build(), case.build()
    with seeded(0):  # as in what is counted: the layers that a step drops are drawn
        per_block = forward_flops(
            find_blocks(plain, case.blocks), lambda: case.workload.loss(plain, batch)
        )
    if not sum(per_block.values()):
        why = "the blocks have no matrix product, convolution or attention whose FLOPs could be counted"
        return not_applicable("recompute/flops", required="as predicted", why=why)
    before = count_flops(plain, batch, loss)
    names = apply(module, sample_of(case))
    with seeded(case.seed), set_checkpoint_early_stop(False):
        whole = recompute_flops(before, count_flops(module, batch, loss))
    stopped = recompute_flops(before, count_flops(module, batch, loss))
    expected = sum(per_block.get(name, 0) for name in names)
    held = names != [] and whole == expected and 0 <= stopped <= whole
    measured = f"{whole:,} of {expected:,} predicted, {stopped:,} with early stop"
    hint = (
        ""
        if held
        else "a block runs less or more than once again: is it wrapped twice, or not in the forward?"
    )
    return Verdict(
        "recompute/flops", held, measured, "as predicted; with early stop at most that", hint
    )


def off(case: Case, *, apply: Apply = FULL) -> Verdict:
    """In eval mode and without grad mode nothing runs twice, and the output is the bare model's."""
    plain, module, batch = case.build().eval(), case.build(), case.batch()
    apply(module, sample_of(case))
    module.eval()
    with calls_counted(plain) as expected:
        _ = case.workload.mean_loss(plain, batch).backward()
    with calls_counted(module) as counted:
        value = case.workload.mean_loss(module, batch)
        value.backward()
    equal = torch.equal(value, case.workload.mean_loss(plain, batch))
    bare, without_grad = (_calls_without_grad(case, model) for model in (plain, module))
    held = equal and counted[0] == expected[0] and without_grad == bare
    return Verdict(
        "recompute/off",
        held,
        f"{counted[0]} calls in eval, {without_grad} without grad; output {'' if equal else 'not '}equal",
        f"{expected[0]} and {bare} calls, output equal",
        "" if held else "recompute only while module.training and torch.is_grad_enabled()",
    )


def _calls_without_grad(case: Case, module: nn.Module) -> int:
    """In training mode, where a model may drop layers: the same ones each time."""
    with seeded(case.seed), torch.no_grad(), calls_counted(module.train()) as counted:
        _ = case.workload.mean_loss(module, case.batch())
    return counted[0]


def profiler(case: Case, *, profiled: Callable[..., Any] = MemoryProfiler) -> Verdict:
    """The layers' bytes add up to what is held, and say what full recompute will leave."""
    loss, module = case.workload.mean_loss, case.build()
    report = profiled(module).profile(case.batch(), 3, loss=loss, blocks=case.blocks)
    held = measure_memory(module, case.batch(), loss).held_bytes
    blocks = recompute_blocks(module, blocks=case.blocks, preserve_rng_state=False)
    predicted = held - sum(
        layer.bytes - layer.boundary_bytes for layer in report.layers if layer.name in blocks
    )
    left = measure_memory(module, case.batch(), loss).held_bytes
    total, exact = sum(layer.bytes for layer in report.layers), case.device.type == "cpu"
    # A block's output may be alive only for the block's own backward: the prediction is on the safe side by that much.
    slack = max(
        (layer.boundary_bytes for layer in report.layers if layer.name in blocks), default=0
    )
    rounding, most_spread = (0.0, 0.0) if exact else (0.02, 0.1)
    good = report.spread <= most_spread and abs(total - held) <= rounding * held
    good = good and -0.02 * held <= predicted - left <= slack + 0.02 * held
    return Verdict(
        "recompute/profiler",
        good,
        f"layers sum to {total:,} of {held:,}; full leaves {left:,}, predicted {predicted:,}",
        f"sum within {rounding:.0%}; predicted at most {slack:,} above, 2% below; spread {most_spread:.0%} at most",
        "" if good else "a storage is counted twice, not at all, or for the wrong layer",
    )


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
    """Double the batch until its activations are four times the parameters, or many bytes."""
    module = case.build()
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    while True:
        plain = measure_memory(module, case.batch(), case.workload.mean_loss)
        if plain.held_bytes >= min(4 * parameters, ENOUGH_BYTES):
            return case, plain
        case = replace(case, batch_size=2 * case.batch_size)
