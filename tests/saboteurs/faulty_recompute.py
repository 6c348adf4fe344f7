"""Faults of recompute: wrong from a later step, on a second microbatch, for some blocks.

Proof: `python -m pytest tests/gates/test_recompute.py`.
"""

import functools
from dataclasses import replace

import torch
from saboteurs import planted
from torch import nn
from torch.utils.checkpoint import checkpoint

from curry_train.core.blocks import find_blocks, num_recomputed
from curry_train.gates import planted_blocks
from curry_train.gates import recompute as gates
from curry_train.plan.profiler import MemoryProfiler
from curry_train.primitives import checkpointed, host_memory, offload
from curry_train.primitives import recompute as technique
from curry_train.primitives.offload import offload_blocks
from curry_train.primitives.recompute import Recompute, recompute_blocks, recompute_segments
from curry_train.primitives.strategies import STRATEGIES
from curry_train.workloads.workload import Workload


def patched(around):
    """Build a technique that replaces each block's forward with `around(forward, *args)`."""

    def apply(module, sample):
        names = list(find_blocks(module, sample.blocks))
        for name in names:
            block = module.get_submodule(name)
            block.forward = lambda *args, run=block.forward, **kwargs: around(run, *args, **kwargs)
        return names

    return apply


def rerun(run, *args, **kwargs):
    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def drifting(run, *args, **kwargs):
    passes = []

    def changed(*args, **kwargs):
        passes.append(None)
        return run(*args, **kwargs) * (1.0 + 0.01 * (len(passes) - 1))

    return checkpoint(changed, *args, use_reentrant=False, **kwargs)


def no_op(module, sample):
    return list(find_blocks(module, sample.blocks))


def torchs_own(module, sample):
    names = list(find_blocks(module, sample.blocks))
    for name in names:
        block = module.get_submodule(name)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return names


def first_block_only(module, sample):
    return recompute_blocks(module, blocks=next(iter(find_blocks(module))))


def no_generator_kept(module, sample):
    return recompute_blocks(module, preserve_rng_state=False)


def wrapped_twice(module, sample):
    names = recompute_blocks(module)
    patched(rerun)(module, sample)
    return names


def too_many_names(module, sample):
    return [*first_block_only(module, sample), *list(find_blocks(module))[1:]]


detached = patched(lambda run, x, *args: run(x.detach().requires_grad_(), *args))


statistics_twice = patched(rerun)


always = patched(rerun)


value_drift = patched(drifting)


reentrant = patched(lambda run, *args: checkpoint(run, *args, use_reentrant=True))


class DoubleCounting(MemoryProfiler):
    def profile(self, *args, **kwargs):
        report = super().profile(*args, **kwargs)
        for layer in report.layers:
            object.__setattr__(layer, "bytes", 2 * layer.bytes)
        return report


class WithoutBoundaries(MemoryProfiler):
    def profile(self, *args, **kwargs):
        report = super().profile(*args, **kwargs)
        for layer in report.layers:
            object.__setattr__(layer, "boundary_bytes", -layer.bytes)
        return report


FROZEN_START = Workload(
    "frozen start",
    lambda: nn.Sequential(
        *[nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    ),
    lambda size: torch.randn(size, 8),
    lambda module, batch: module(batch).square().sum(),
)


class Later:
    """A technique whose second run of a block is wrong from some call of the block on."""

    def __init__(self, first_wrong, wrong):
        self.first_wrong = first_wrong
        self.wrong = wrong
        self.num_calls = {}

    def __call__(self, run, *args, **kwargs):
        block = run.__self__
        number = self.num_calls[block] = self.num_calls.get(block, 0) + 1
        passes = []

        def again(*args, **kwargs):
            passes.append(None)
            if len(passes) == 1 or number < self.first_wrong:
                return run(*args, **kwargs)
            return self.wrong(run, *args, **kwargs)

        return checkpoint(again, *args, use_reentrant=False, **kwargs)


def scaled(run, x, *args, **kwargs):
    return run(1.01 * x, *args, **kwargs)


def later(first_wrong, wrong=scaled):
    """Return a new technique, as each check has to begin with the first call."""
    return lambda model, sample: patched(Later(first_wrong, wrong))(model, sample)


def without_autocast(run, *args, **kwargs):
    with torch.autocast("cpu", enabled=False):
        return run(*args, **kwargs)


def where_gradients_are(run, *args, **kwargs):
    """Recompute wrongly while a gradient is there already: in the second microbatch of a step."""
    parameters = list(run.__self__.parameters())
    accumulates = any(parameter.grad is not None for parameter in parameters)
    return Later(1 if accumulates else 2, scaled)(run, *args, **kwargs)


def with_the_last_input(model, sample):
    """Recompute each block from the input of its last forward, whichever backward runs."""
    last = {}

    def around(run, x, *args, **kwargs):
        last[run] = x
        passes = []

        def again(given, *args, **kwargs):
            passes.append(None)
            return run(given if len(passes) == 1 else last[run], *args, **kwargs)

        return checkpoint(again, x, *args, use_reentrant=False, **kwargs)

    return patched(around)(model, sample)


def keeps_inputs(model, sample):
    kept = []

    def around(run, x, *args, **kwargs):
        kept.append(x)
        return rerun(run, x, *args, **kwargs)

    return patched(around)(model, sample)


def last_block_left_out(model, sample):
    names = list(find_blocks(model, sample.blocks))
    recompute_blocks(model, blocks=names[:-1])
    return names


def reseeded(run, *args, **kwargs):
    """Draw the same dropout mask in each call."""
    torch.manual_seed(0)
    return rerun(run, *args, **kwargs)


LATE = STRATEGIES | {"full": replace(STRATEGIES["full"], apply=later(20))}


def rounds_keep_last(model, *, keep_last, **options):
    return offload_blocks(model, keep_last=int(keep_last), **options)


def leaves_blocks_offloaded(model, *, batch, loss, **options):
    names = offload_blocks(model, batch=None, loss=None, **options)
    if batch is not None and len(batch) < 10:
        raise ValueError("use a larger batch, and a loss")
    return names


def keeps_one_more(model, *, keep_last, **options):
    return offload_blocks(model, keep_last=keep_last, **options)[:1]


def one_segment_more(model, number, **options):
    return recompute_segments(model, min(number + 1, 5), **options)


def wraps_by_torch(model, **options):
    for block in model.layers:

        def forward(*args, own=block.forward, **kwargs):
            return checkpoint(lambda *given: own(*given, **kwargs), *args, use_reentrant=False)

        block.forward = forward


def always_on(module, enabled=True, **options):
    return Recompute(module, **options)


def without_options(module, **options):
    return Recompute(module, **{name: options[name] for name in ("use_reentrant",) if options})


def begins_nothing(state):
    state.outside.append(([], []))


def enters_unchecked(state):
    num_recomputed[0] += 1
    state.outside.append(([], []))


def also_inside(module, pattern=None):
    found = find_blocks(module, pattern)
    inside = {
        f"{name}.{path}": block for name in found for path, block in found[name].named_children()
    }
    return found | inside


def of_the_kernel_alone(system):
    return min(host_memory._kernel_bytes(system / "proc/meminfo"), default=None)


class WithoutLimit(host_memory.HostPool):
    """A pool that reserves more than the host has."""

    def reserve(self, sizes):
        for capacity in map(self.capacity, sizes):
            self._idle.setdefault(capacity, []).append(self._allocate(capacity))


FAULTS = [
    planted(
        "recompute.host-report", "no-op", offload=lambda model, **_: [], hint="no block of this"
    ),
    planted(
        "recompute.host-report",
        "each-view",
        patches=[(offload.Moved, "is_same", lambda self, tensor, base: False)],
        hint="views",
    ),
    planted(
        "recompute.fetched-ahead",
        "where-needed",
        patches=[(offload.OffloadedForward, "fetch_ahead", lambda self, index: None)],
        hint="have come back",
    ),
    planted(
        "recompute.written-on-host",
        "unchecked",
        patches=[(offload, "check_unchanged", lambda tensor, version: None)],
        hint="moved, and is written",
    ),
    planted(
        "recompute.host-memory",
        "of-the-kernel-alone",
        available=lambda system: min(
            host_memory._kernel_bytes(system / "proc/meminfo"), default=None
        ),
        hint="a group: ",
    ),
    planted(
        "recompute.host-memory",
        "unlimited",
        patches=[(gates, "HostPool", WithoutLimit)],
        hint="more than the host has",
    ),
    planted("recompute.chains", "no-op", segments=lambda model, number, **_: [], hint="named"),
    planted(
        "recompute.chains", "one-segment-more", segments=one_segment_more, hint="run again|named"
    ),
    planted(
        "recompute.broken-chains",
        "unchecked",
        patches=[(technique.Segment, "_check", lambda *_: None)],
        hint="a block left out",
    ),
    planted(
        "recompute.broken-chains",
        "hides-errors",
        patches=[(technique, "_lacks_memory", lambda error: False)],
        hint="OutOfMemoryError",
    ),
    planted("recompute.wraps", "no-op", wrap=lambda model: [], hint="blocks run"),
    planted(
        "recompute.wraps",
        "always-on",
        patches=[(planted_blocks, "Recompute", always_on)],
        hint="a block that is off",
    ),
    planted("recompute.state", "torchs-own", wrap=wraps_by_torch, hint="blocks with a number"),
    planted(
        "recompute.refused",
        "without-options",
        patches=[(planted_blocks, "Recompute", without_options)],
        hint="determinism_check|an unknown check",
    ),
    planted(
        "recompute.refused",
        "changed-in-place",
        patches=[(checkpointed.BlockState, "__enter__", enters_unchecked)],
        hint="changed before backward",
    ),
    planted(
        "recompute.found",
        "inside-of-blocks",
        patches=[(planted_blocks, "find_blocks", also_inside)],
        hint="finds",
    ),
    planted(
        "recompute.caches",
        "given",
        patches=[(checkpointed, "leave_out_caches", lambda block, args, kwargs: (args, kwargs))],
        hint="is given to the block",
    ),
    planted(
        "recompute.caches",
        "read-and-left-out",
        patches=[(checkpointed, "_require_unread", lambda block, cache: None)],
        hint="no ValueError",
    ),
    planted("recompute.offload-refused", "rounded", offload=rounds_keep_last, hint="0.5"),
    planted(
        "recompute.offload-refused",
        "half-done",
        offload=leaves_blocks_offloaded,
        hint="in spite of",
    ),
    planted("recompute.offload-refused", "one-block", offload=keeps_one_more, hint="in place of"),
    planted(
        "recompute.long-run",
        "from-the-eleventh-step",
        patches=[
            (gates, "LONG_RUN_STRATEGIES", ("full",)),
            (gates, "STRATEGIES", LATE),
        ],
        hint="step 11 of 12",
    ),
    planted(
        "recompute.memory",
        "no-op",
        apply=no_op,
        hint="too little is recomputed",
        model="transformer",
    ),
    planted(
        "recompute.memory",
        "first-block-only",
        apply=first_block_only,
        hint="too little is recomputed",
        model="transformer",
    ),
    planted("recompute.same-steps", "no-op", apply=no_op, hint="nothing ran twice or was freed"),
    planted(
        "recompute.same-steps",
        "no-generator-kept",
        apply=no_generator_kept,
        model="dropout",
        hint="computes another value|preserve_rng_state",
    ),
    planted(
        "recompute.same-steps", "detached", apply=detached, hint="gets no gradient|another value"
    ),
    planted(
        "recompute.same-steps",
        "value-drift",
        apply=value_drift,
        model="resnet",
        hint="buffer|computes another value",
    ),
    planted(
        "recompute.same-steps",
        "statistics-twice",
        apply=statistics_twice,
        model="resnet",
        hint="updates buffer",
    ),
    planted(
        "recompute.same-steps",
        "reentrant",
        apply=reentrant,
        model=FROZEN_START,
        hint="gets no gradient",
    ),
    planted(
        "recompute.same-steps", "reseeded", apply=patched(reseeded), model="dropout", hint="another"
    ),
    planted("recompute.later-steps", "from-the-third-step", apply=later(4), hint="step 3 of 3"),
    planted("recompute.later-steps", "from-the-second-call", apply=later(2), hint="step 2 of 3"),
    planted(
        "recompute.later-steps",
        "second-microbatch",
        apply=patched(where_gradients_are),
        hint="step 3 of 3",
    ),
    planted("recompute.later-steps", "two-forwards", apply=with_the_last_input, hint="step 2 of 3"),
    planted(
        "recompute.autocast",
        "forgotten",
        apply=later(1, without_autocast),
        hint="step 3 of 3|metadata",
    ),
    planted(
        "recompute.every-block",
        "last-block-left-out",
        apply=last_block_left_out,
        hint="did not run again",
    ),
    planted(
        "recompute.every-block", "first-block-alone", apply=too_many_names, hint="did not run again"
    ),
    planted("recompute.no-leak", "keeps-inputs", apply=keeps_inputs, hint="stay alive"),
    planted("recompute.flops", "no-op", apply=no_op, hint="not recomputed exactly once"),
    planted(
        "recompute.flops", "wrapped-twice", apply=wrapped_twice, hint="not recomputed exactly once"
    ),
    planted(
        "recompute.flops",
        "too-many-names",
        apply=too_many_names,
        hint="not recomputed exactly once",
    ),
    planted("recompute.off", "always", apply=always, hint="only while module.training"),
    planted("recompute.off", "value-drift", apply=value_drift, hint="only while module.training"),
    planted("recompute.profiler", "double-counting", profiled=DoubleCounting, hint="counted twice"),
    planted(
        "recompute.profiler",
        "without-boundaries",
        profiled=WithoutBoundaries,
        hint="wrong layer",
        model="transformer",
    ),
    planted("recompute.segments", "no-op", apply=no_op, hint="nothing ran twice or was freed"),
    planted("recompute.segments", "later", apply=later(3), hint="another value"),
    planted("recompute.selective", "no-op", apply=no_op, hint="nothing ran twice or was freed"),
    planted("recompute.selective", "two-forwards", apply=with_the_last_input, hint="another value"),
    planted("recompute.forms", "torchs-own", apply=torchs_own, hint="layers|raised"),
    planted("recompute.forms", "no-generator", apply=no_generator_kept, hint="generator"),
    planted("recompute.offload-forms", "no-op", apply=no_op, hint="nothing ran twice or was freed"),
    planted("recompute.offload-forms", "torchs-own", apply=torchs_own, hint="the second time"),
    planted(
        "recompute.offload-parity", "no-op", apply=no_op, hint="nothing ran twice or was freed"
    ),
    planted("recompute.offload-parity", "detached", apply=detached, hint="gradient|another value"),
    planted("recompute.offload-parity", "later", apply=later(3), hint="another value"),
    planted("recompute.offload-parity", "keeps-inputs", apply=keeps_inputs, hint="stay alive"),
    planted(
        "recompute.offload-bytes",
        "no-op",
        apply=no_op,
        hint="stay on the device",
        model="transformer",
    ),
    planted(
        "recompute.offload-bytes",
        "recomputes",
        apply=always,
        hint="stay on the device",
        model="transformer",
    ),
]
