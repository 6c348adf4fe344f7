"""Gates of recompute: same gradients, fewer held bytes; offload and budget too.

Each gate takes the technique as `apply`, so that its tests can plant a wrong one; wrong models are
planted as cases.

Why so long: the gates of one technique, in groups that share the trial of a step.

Proof: `python -m pytest tests/gates tests/primitives`.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ..core.blocks import find_blocks
from ..core.measure import Memory, count_flops, forward_flops, measure_memory, recompute_flops
from ..core.measure_compiled import (
    CompileFailed,
    current_budget,
    holds_compiled_code,
    saved_bytes,
    warnings_of_the_compiler_ignored,
    with_own_code,
)
from ..core.parity import OUTER_BOUND, Parity, StepRecord, check_comparable, compare, record_step
from ..core.rerun import seeded, untouched
from ..core.wording import format_bytes
from ..plan.profiler import MemoryProfiler
from ..primitives import host_memory
from ..primitives.host_memory import HostCopies, HostMemoryShort, HostPool, available_host_bytes
from ..primitives.offload import NothingToMove, OffloadReport, offload_blocks
from ..primitives.recompute import recompute_blocks
from ..primitives.sac import PolicyError
from ..primitives.strategies import STRATEGIES, Apply, Sample, choose_segments, offload_one
from ..workloads.workload import Case
from .chains import CHAIN_GATES, PLANTED_SIZES, ROUTING_JUDGED, PlantedStream
from .fixtures import PLANTED_HOSTS
from .planted_blocks import PLANTED_GATES, judged_ways
from .same_training import (
    LEAST_BYTES,
    CopiedBytes,
    SavedTensors,
    calls_counted,
    in_place,
    same_in_every_form,
    same_training,
    sample_of,
    why_torch_moves_nothing,
    why_torch_reruns_nothing,
)
from .two_ranks import RECOMPUTE_GATE
from .verdict import (
    Gate,
    Implementation,
    Judged,
    Takes,
    Verdict,
    as_ours,
    not_applicable,
    unrefused,
)

# Gates of recompute: less memory, the predicted FLOPs, and the same training.

APPLY_FULL = STRATEGIES["full"].apply
MOST_RECOMPUTE_SHARE = 0.7  # of the held bytes, and of the peak, without recompute
NOISE_OF_PEAKS = 1.02  # two implementations of recompute differ by a few small tensors
ENOUGH_BYTES = 256 * 2**20  # a batch with this many held bytes is large enough for any model


def recompute_memory(case: Case, *, apply: Apply = APPLY_FULL) -> Verdict:
    """Compare held bytes and peak with plain, at a batch where activations dominate."""
    gate = "recompute/memory"
    required = f"held and peak at most {MOST_RECOMPUTE_SHARE:.0%}"
    case, plain = _large_enough(case)
    loss = case.workload.mean_loss
    module = case.build()

    profile = MemoryProfiler(module).profile(case.batch(), 1, loss=loss, blocks=case.blocks)
    blocks = find_blocks(module, case.blocks)
    savings = [max(0, layer.saving_bytes) for layer in profile.layers if layer.name in blocks]
    best_held = 1 - sum(savings) / plain.held_bytes
    # One block's activations are held again while it is recomputed.
    best_peak = 1 - (sum(savings) - max(savings)) / plain.peak_bytes
    if max(best_held, best_peak) > MOST_RECOMPUTE_SHARE:
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
    if held > MOST_RECOMPUTE_SHARE:
        hint = (
            "too little is recomputed: check that these are the right blocks (--blocks) and in "
            "training mode"
        )
    elif peak > MOST_RECOMPUTE_SHARE:
        least = _peak_under_torch(case) / plain.peak_bytes
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


def _peak_under_torch(case: Case) -> int:
    """Return the peak of a step whose blocks go through `torch.utils.checkpoint`."""
    module = case.build()
    for block in find_blocks(module, case.blocks).values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return measure_memory(module, case.batch(), case.workload.mean_loss).peak_bytes


def recompute_parity(case: Case, *, strategy: str, apply: Apply | None = None) -> Verdict:
    """Compare loss, gradients, buffers and generators of one step with and without recompute."""
    gate = f"recompute/parity-{strategy}"
    return same_training(
        gate,
        case,
        apply or STRATEGIES[strategy].apply,
        alone=APPLY_FULL,
        # The segments of `sequential` also free the tensors between blocks.
        by_torch=None if strategy == "sequential" else why_torch_reruns_nothing,
        every_block=True,
    )


def recompute_forms(case: Case, *, apply: Apply = APPLY_FULL) -> Verdict:
    """Compare a training of blocks with every form of arguments, random numbers and state."""
    return same_in_every_form("recompute/forms", case, apply, every_block=True)


# A training long enough for what shows only after some steps.
LONG_RUN_STEPS = 12
LONG_RUN_STRATEGIES = ("full", "sequential", "selective", "sac", "regions", "offload")


def long_run(case: Case) -> Verdict:
    """Compare trainings of a dozen steps with and without each strategy."""
    gate = "recompute/long-run"
    measured = []
    for strategy in LONG_RUN_STRATEGIES:
        verdict = Gate(
            gate,
            partial(_long_run_of, strategy=STRATEGIES[strategy].apply),
        ).run(case)
        if verdict.passed is False:
            return replace(verdict, measured=f"{strategy}: {verdict.measured}")
        if verdict.passed:
            measured.append(strategy)
    required = f"bit-equal over {LONG_RUN_STEPS} steps"
    if not measured:
        return not_applicable(gate, required=required, why="no strategy changes this model")
    return Verdict(gate, True, f"{', '.join(measured)}: {LONG_RUN_STEPS} steps", required)


def _long_run_of(case: Case, *, strategy: Apply) -> Verdict:
    try:
        return same_training("recompute/long-run", case, strategy, num_steps=LONG_RUN_STEPS)
    except (NothingToMove, PolicyError) as reason:
        return not_applicable("recompute/long-run", required="bit-equal", why=str(reason))


def recomputed_flops(case: Case, *, apply: Apply = APPLY_FULL) -> Verdict:
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


def off(case: Case, *, apply: Apply = APPLY_FULL) -> Verdict:
    """Check that nothing is recomputed in eval mode and without grad mode."""
    plain = case.build().eval()
    module = case.build()
    batch = case.batch()
    apply(module, sample_of(case))
    module.eval()
    # The first call of each, with the same random numbers: some models draw in eval mode too, and
    # some keep state between calls.
    with calls_counted(plain) as expected, seeded(case.seed):
        expected_value = case.workload.mean_loss(plain, batch)
        expected_value.backward()
    with calls_counted(module) as counted, seeded(case.seed):
        value = case.workload.mean_loss(module, batch)
        value.backward()
    equal = torch.equal(value, expected_value)

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
    # Caches that a model fills in its first step, as of masks, are there in all later ones.
    with seeded(case.seed):
        loss(module, case.batch()).backward()
    module.zero_grad(set_to_none=True)
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


def _in_segments(given: Implementation, present: Any) -> Apply:
    """Make a strategy of segments, as many as our own has the lowest peak with."""

    def apply(module: nn.Module, sample: Sample) -> list[str]:
        names = list(find_blocks(module, sample.blocks))
        count = choose_segments(module, sample.batch, sample.loss, blocks=names)
        if count < 2:  # the last segment is not recomputed
            return []
        changed = given.value(module, count, blocks=names)
        # Blocks of the last segment run once, so they are not among those that it returns.
        return names if changed is None else list(changed)

    return apply


RECOMPUTE_TAKES = {"recompute_blocks": Takes("apply", in_place())}
RECOMPUTE_GATES = (
    Gate("recompute/memory", recompute_memory, RECOMPUTE_TAKES),
    Gate("recompute/parity-full", partial(recompute_parity, strategy="full"), RECOMPUTE_TAKES),
    Gate(
        "recompute/parity-sequential",
        partial(recompute_parity, strategy="sequential"),
        {"recompute_segments": Takes("apply", _in_segments)},
    ),
    Gate("recompute/parity-selective", partial(recompute_parity, strategy="selective")),
    Gate("recompute/forms", recompute_forms, RECOMPUTE_TAKES),
    Gate("recompute/flops", recomputed_flops, RECOMPUTE_TAKES),
    Gate("recompute/off", off, RECOMPUTE_TAKES),
    Gate("recompute/profiler", profiler, {"MemoryProfiler": Takes("profiled")}),
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


# Gates of memory budgets for compiled blocks: same gradients, fewer saved bytes.

Bounded = Callable[[nn.Module, Sample, float], list[str]]
MODEL_BUDGETS = (1.0, 0.5)  # the default of compiled code, and the budget of the strategy
SMALL_MODEL_BUDGETS = (1.0, 0.5, 0.0)  # on the small model, which compiles quickly
MOST_CLASSES = 2


def _bounded(module: nn.Module, sample: Sample, budget: float) -> list[str]:
    # Imported here because it imports the compiler, which takes seconds.
    from ..primitives.compile_budget import memory_budget

    check = {} if sample.batch is None else {"batch": sample.batch, "loss": sample.loss}
    return memory_budget(module, budget, blocks=sample.blocks, backend="aot_eager", **check)


@warnings_of_the_compiler_ignored()
def budget_parity(case: Case, *, apply: Bounded = _bounded) -> Verdict:
    """Compare a step with a budget with the same code at 1.0, and with the eager model."""
    gate = "recompute/budget-parity"
    outer = OUTER_BOUND[case.dtype]
    eager, again = (_step(case, case.build()) for _ in range(2))
    check_comparable(eager)
    inner = 0.0 if compare(eager, again).bit_equal else outer
    equality = f"within {inner:.0e}" if inner else "bit-equal"
    required = f"{equality} to budget 1.0, within {outer:.0e} of eager"

    sample = _shortened(case)
    steps = list[StepRecord]()
    names = list[str]()
    for budget in MODEL_BUDGETS:
        module = case.build()
        try:
            with _limits_of_torch(case):
                names = apply(module, sample, budget)
                steps.append(_step(case, module))
        except CompileFailed as failure:
            return not_applicable(gate, required=required, why=str(failure))
        if not holds_compiled_code(module):
            hint = "uncompiled blocks have no budget: compile them"
            return Verdict(gate, False, "nothing compiled", required, hint)

    to_whole = compare(*steps, tolerance=inner)
    to_eager = _worst(compare(eager, step, tolerance=outer) for step in steps)
    hint = ""
    if not to_whole.holds:
        hint = (
            "the recomputed values differ: the recompute draws other random numbers, which "
            "memory_budget prevents"
        )
    elif not to_eager.holds:
        hint = (
            "compiled code differs from eager at every budget: check what torch.compile does to "
            "the model"
        )
    measured = f"{to_whole.describe(most=1)}; eager: {to_eager.describe(most=1)}"
    measured += f"; {', '.join(names)}"
    return Verdict(gate, not hint, measured, required, hint)


@warnings_of_the_compiler_ignored()
def scope(case: Case, *, apply: Bounded = _bounded) -> Verdict:
    """Check that saved bytes fall with the budget, and that other models are unaffected."""
    gate = "recompute/budget-scope"
    required = "fewer bytes with a budget, and as many as before in other models"
    setting = current_budget()
    others = [_others_bytes()]
    steps = list[int]()
    saved = list[int]()
    for budget in SMALL_MODEL_BUDGETS:
        small = _small()
        apply(small, Sample(None, _sum, blocks="0"), budget)
        if budget == SMALL_MODEL_BUDGETS[-1]:
            others.append(_others_bytes())
        steps.append(saved_bytes(small, torch.ones(64, 16), _sum))
    others.append(_others_bytes())

    try:
        for budget in MODEL_BUDGETS:
            module = case.build()
            with _limits_of_torch(case):
                apply(module, _shortened(case), budget)
                saved.append(saved_bytes(module, case.batch(), case.workload.mean_loss))
    except CompileFailed as failure:
        return not_applicable(gate, required=required, why=str(failure))

    hint = ""
    if len(set(others)) > 1 or current_budget() != setting:
        hint = (
            f"the setting was {setting:g}, is {current_budget():g}, and affects other models: set "
            "it only while compiling"
        )
    elif not steps[0] > steps[1] > steps[2]:
        hint = (
            "the budget does not reach the compiler: set "
            "torch._functorch.config.activation_memory_budget"
        )
    elif saved[1] > saved[0]:
        hint = "the budget raises the saved bytes here: choose other blocks, or recompute_blocks"
    elif saved[1] == saved[0]:
        why = (
            f"{saved[0]:,} bytes with and without a budget: the blocks save nothing that could be "
            "recomputed"
        )
        return not_applicable(gate, required=required, why=why)
    measured = (
        f"{_listed(saved)} bytes at {_listed(MODEL_BUDGETS)}; small model {_listed(steps)}; "
        f"other model {_listed(others)}"
    )
    return Verdict(gate, not hint, measured, required, hint)


def _within_budget(given: Implementation, present: Any) -> Bounded:
    call = as_ours(given.value, CompileFailed)

    def apply(module: nn.Module, sample: Sample, budget: float) -> list[str]:
        names = list(find_blocks(module, sample.blocks))
        call(module, budget, blocks=names, backend="aot_eager")
        return names

    return apply


BUDGET_TAKES = {"memory_budget": Takes("apply", _within_budget)}
MEMORY_BUDGET_GATES = (
    Gate("recompute/budget-parity", budget_parity, BUDGET_TAKES),
    Gate("recompute/budget-scope", scope, BUDGET_TAKES),
)


@contextlib.contextmanager
def _limits_of_torch(case: Case) -> Iterator[None]:
    """Turn an error into `CompileFailed` if the blocks compiled by torch alone raise it too."""
    try:
        yield
    except CompileFailed:
        raise
    except RuntimeError as error:
        module = case.build()
        names = list(find_blocks(module, _shortened(case).blocks))
        for name in names:
            module.get_submodule(name).compile(backend="aot_eager")
        try:
            _step(case, module)
        except RuntimeError as same:
            raise CompileFailed(
                f"torch.compile itself can't run {', '.join(names)}, without a budget either: "
                f"{type(same).__name__}: {str(same).splitlines()[0]}"
            ) from error
        raise


def _shortened(case: Case) -> Sample:
    """Choose the last block of each class: gradients flow into it, as into most blocks."""
    last = {type(block): name for name, block in find_blocks(case.build(), case.blocks).items()}
    return replace(sample_of(case), blocks=list(last.values())[-MOST_CLASSES:])


def _step(case: Case, module: nn.Module) -> StepRecord:
    with seeded(case.seed):
        return record_step(module, case.batch(), case.workload.mean_loss)


def _worst(found: Iterable[Parity]) -> Parity:
    return max(found, key=lambda parity: (not parity.holds, parity.worst))


def _small() -> nn.Module:
    """Build a model whose saved bytes fall in two steps."""
    return nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU()))


def _sum(module: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    return module(batch).sum()


def _others_bytes() -> int:
    """Count the bytes that the small model saves when it is compiled without a budget."""
    model = _small()
    compiled = torch.compile(with_own_code(model, name="another_model"), backend="aot_eager")
    return saved_bytes(model, torch.ones(64, 16), lambda _, batch: _sum(compiled, batch))


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:,}" for value in values)


# Gates of offload: the same training, each storage moved once, and no parameter moved.

APPLY_OFFLOAD = STRATEGIES["offload"].apply


def offload_parity(case: Case, *, apply: Apply = APPLY_OFFLOAD) -> Verdict:
    """Compare loss, gradients, buffers and generators of one step with and without offload."""
    gate = "recompute/offload-parity"
    try:
        by_torch = partial(why_torch_moves_nothing, least_bytes=LEAST_BYTES)
        return same_training(gate, case, apply, alone=offload_one, by_torch=by_torch)
    except NothingToMove as nothing:
        return not_applicable(gate, required="bit-equal", why=str(nothing))


def offload_forms(case: Case, *, apply: Apply = APPLY_OFFLOAD) -> Verdict:
    """Compare a training of blocks with every form of arguments, random numbers and state."""
    return same_in_every_form("recompute/offload-forms", case, apply, alone=offload_one)


def offload_moved_bytes(case: Case, *, apply: Apply = APPLY_OFFLOAD) -> Verdict:
    """Compare the bytes copied in forward with those that the same plain blocks save."""
    gate = "recompute/offload-bytes"
    plain = case.build()
    module = case.build()
    batch = case.batch()
    try:
        names = apply(module, sample_of(case))
    except NothingToMove as nothing:
        return not_applicable(gate, required="each storage once", why=str(nothing))

    saved = SavedTensors(plain, names)
    plain_copies = CopiedBytes(case.device)
    with untouched(plain), seeded(case.seed), saved.watch(), plain_copies:
        _ = case.workload.mean_loss(plain, batch)
    copies = CopiedBytes(case.device)
    with untouched(module), seeded(case.seed), copies:
        _ = case.workload.mean_loss(module, batch)

    moved = copies.nbytes - plain_copies.nbytes
    most = saved.num_bytes()
    least = saved.num_bytes(sure=True)
    if not most:
        return not_applicable(
            gate, required="each storage once", why="the blocks save nothing that is large enough"
        )

    hint = ""
    if moved > most:
        hint = (
            "a parameter, a buffer, or a storage that had moved already is copied: look up "
            "storages, not tensors"
        )
    elif moved < least:
        hint = (
            "activations of the blocks stay on the device, or are recomputed: check that the hooks "
            "are active during the blocks' forward"
        )
    everything = sum(tensor.nbytes for tensor in saved.tensors)
    measured = f"{format_bytes(moved)} moved, {moved / everything:.0%} of what save_on_cpu copies"
    span = format_bytes(most) if least == most else f"{format_bytes(least)} to {format_bytes(most)}"
    return Verdict(gate, not hint, measured, f"{span}: each storage once", hint)


def _offloaded(given: Implementation, present: Any) -> Apply:
    """Make a strategy of offload: all blocks but the last, and a single block itself."""
    call = as_ours(given.value, NothingToMove)

    def apply(module: nn.Module, sample: Sample) -> list[str]:
        names = list(find_blocks(module, sample.blocks))
        names = names[:-1] or names
        call(module, blocks=names, keep_last=0, batch=sample.batch, loss=sample.loss)
        return names

    return apply


def _planted_stack() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))


def _sum_of(module: nn.Module, batch: Any) -> Tensor:
    total: Tensor = module(batch).sum()
    return total


SMALL_BATCH = torch.ones(2, 4)
# Wrong ways to offload three blocks: of each a text that the error has to contain.
WRONG_OFFLOADS: dict[str, tuple[dict[str, Any], str]] = {
    "keep_last of -1": ({"keep_last": -1}, "keep_last"),
    "keep_last of 0.5": ({"keep_last": 0.5}, "keep_last"),
    "keep_last of True": ({"keep_last": True}, "keep_last"),
    "keep_last of all blocks": ({"keep_last": 3}, "keep_last=3"),
    "min_bytes of -1": ({"min_bytes": -1}, "min_bytes"),
    "min_bytes of 0.5": ({"min_bytes": 0.5}, "min_bytes"),
    "a pattern without blocks": ({"blocks": "layers.*"}, "layers.*"),
    "a batch without a loss": ({"batch": SMALL_BATCH}, "loss"),
    "a batch that saves too little": ({"batch": SMALL_BATCH, "loss": _sum_of}, "larger batch"),
}
# Sound ones, with the blocks that they offload.
SOUND_OFFLOADS: tuple[tuple[dict[str, Any], list[str]], ...] = (
    ({}, ["0", "1"]),
    ({"keep_last": 0, "loss": _sum_of}, ["0", "1", "2"]),
    ({"keep_last": 2}, ["0"]),
    ({"blocks": ["0", "2"], "keep_last": 0}, ["0", "2"]),
    ({"batch": torch.ones(512, 4), "loss": _sum_of}, ["0", "1"]),
)


def offload_wrong_uses(
    case: Case, *, offload: Callable[..., list[str]] = offload_blocks
) -> Verdict:
    """Check on planted blocks which are offloaded, and that wrong uses are errors.

    An error has to name what is wrong, and to leave the model as it was.
    """
    gate = "recompute/offload-refused"
    usual = {"blocks": "?", "keep_last": 1, "batch": None, "loss": None}
    wrong = []
    for name, (given, text) in WRONG_OFFLOADS.items():
        module = _planted_stack()
        before = [*map(type, module.modules())]
        try:
            offload(module, **{**usual, **given})
            wrong.append(f"{name} is accepted")
        except (ValueError, TypeError) as error:
            if text not in str(error):
                wrong.append(f"{name}: the error does not name {text}")
            elif before != [*map(type, module.modules())]:
                wrong.append(f"{name}: blocks are offloaded in spite of the error")
    num_refused = len(WRONG_OFFLOADS) - len(wrong)
    for given, expected in SOUND_OFFLOADS:
        module = _planted_stack()
        names = offload(module, **{**usual, **given})
        if names != expected:
            wrong.append(f"{sorted(given)}: {names} are offloaded in place of {expected}")
    try:
        offload(module, **usual)
        wrong.append("a second offload of the same blocks is accepted")
    except ValueError as error:
        if "already" not in str(error):
            wrong.append("a second offload of the same blocks is not named")
    measured = f"{num_refused} of {len(WRONG_OFFLOADS)} refused, {len(wrong)} faults"
    required = f"{len(WRONG_OFFLOADS)} refused, 0 faults"
    return Verdict(gate, not wrong, measured, required, "; ".join(wrong))


def hosts(case: Case, *, available: Callable[[Path], Any] = available_host_bytes) -> Verdict:
    """Read the memory of planted hosts, and reserve more and less than a host has."""
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        for number, (what, (files, expected)) in enumerate(PLANTED_HOSTS.items()):
            for path, text in files.items():
                place = Path(name, str(number), path)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
            if (found := available(Path(name, str(number)))) != expected:
                wrong.append(f"{what}: {found} bytes in place of {expected}")
    for nbytes, text in PLANTED_SIZES.items():
        table = OffloadReport(moved_bytes=nbytes).table()
        if not table.startswith(f"moved to the host     {text:>9} in 0 storages\n"):
            wrong.append(f"{nbytes} bytes are not printed as {text}")
    wrong += _wrong_pool() + _wrong_copies()
    num_ways = len(PLANTED_HOSTS) + len(PLANTED_SIZES) + 2
    return judged_ways("recompute/host-memory", num_ways, wrong, what="as planted")


def _wrong_pool() -> list[str]:
    """Take and give buffers of the host; return what is not as it should be."""
    pool = HostPool(pinned=False)
    sizes = [pool.capacity(nbytes) for nbytes in (1, 4096, 4097)]
    pool.reserve([100, 5000, 100])
    reserved = [pool.reserved_bytes]
    taken = [pool.take(nbytes) for nbytes in (100, 5000, 100)]
    reserved.append(pool.reserved_bytes)
    places = [buffer.data_ptr() for buffer in taken]
    pool.give(taken.pop())
    is_again = pool.take(4000).data_ptr() == places[-1]
    for buffer in taken:
        pool.give(buffer)
    # The smallest that fits; of those that are more than four times too large none.
    fitting = [pool.take(nbytes).nbytes for nbytes in (3000, 2000)]
    pool.give(torch.zeros(5 * 4096, dtype=torch.uint8))
    pool.reserved_bytes += 5 * 4096
    fitting.append(pool.take(1).nbytes)
    reserved.append(pool.reserved_bytes)
    pool.reserve([10, 10])
    pool.clear()
    reserved.append(pool.reserved_bytes)
    why = []
    if sizes != [4096, 4096, 8192] or HostPool(pinned=True).capacity(4097) != 8192:
        why.append(f"buffers have {sizes} bytes")
    if reserved != [16384, 16384, 20480, 20480] or fitting != [4096, 8192, 4096] or not is_again:
        why.append(f"the pool reserves {reserved} and gives {fitting}")
    with mock.patch.object(host_memory, "available_host_bytes", return_value=12000):
        short = partial(pool.reserve, [4096, 4096, 4096])
        if text := unrefused(HostMemoryShort, short, "needs 12.0 KiB", "11.7 KiB is available"):
            why.append(f"more than the host has: {text}")
        if pool.reserved_bytes != reserved[-1]:
            why.append("buffers are reserved in spite of the error")
    return why


def _wrong_copies() -> list[str]:
    """Copy to the host and back in a planted stream; return what is not as it should be."""
    computing = PlantedStream()
    device = torch.device("cuda", 0)
    made: list[Any] = []

    def empty(*sizes: int, **options: Any) -> Tensor:
        made.append((*sizes, options))
        return torch.zeros(*sizes, dtype=options["dtype"])

    with (
        mock.patch.object(torch.cuda, "Stream", PlantedStream),
        mock.patch.object(torch.cuda, "stream", contextlib.nullcontext),
        mock.patch.object(torch.cuda, "current_stream", {device: computing}.__getitem__),
        mock.patch.object(torch, "empty", empty),
    ):
        copies = HostCopies(device)
        stream: Any = copies.stream
        hosts = [torch.zeros(16, dtype=torch.uint8) for _ in range(4)]
        alive: list[Any] = []
        noted = []
        for number, host in enumerate(hosts):
            source = torch.full((10,), number + 1, dtype=torch.uint8)
            alive.append(ref(source))
            copies.out(source, host, most_bytes=20)
            del source
            noted.append(sum(one() is not None for one in alive))
        stream.done[2] = True
        back, event = copies.back(hosts[3], 10)
        noted.append(sum(one() is not None for one in alive))
        copies.wait(event)
        copies.wait(None)
        HostPool(pinned=True).take(5)
    awaited = [one.number for one in computing.calls]
    expected = [
        (10, {"dtype": torch.uint8, "device": device}),
        (8, {"dtype": torch.uint8, "device": "cpu", "pin_memory": True}),
    ]
    is_sound = (noted, awaited, made) == ([1, 2, 2, 2, 1], [0, 1, 4], expected)
    is_sound = is_sound and stream.calls == [computing] * 5 and back.tolist() == [4] * 10
    return [] if is_sound else [f"copies hold {noted} sources and wait for {awaited}, {made}"]


OFFLOAD_TAKES = {"offload_blocks": Takes("apply", _offloaded)}
OFFLOAD_GATES = (
    Gate("recompute/offload-parity", offload_parity, OFFLOAD_TAKES),
    Gate("recompute/offload-forms", offload_forms, OFFLOAD_TAKES),
    Gate("recompute/offload-bytes", offload_moved_bytes, OFFLOAD_TAKES),
    Gate("recompute/offload-refused", offload_wrong_uses, {"offload_blocks": Takes("offload")}),
    Gate("recompute/host-memory", hosts),
)


JUDGED_CALLABLES = (
    Judged("recompute_blocks", lambda model, *, blocks: None),
    Judged("recompute_segments", lambda model, num_segments, *, blocks: None),
    Judged("offload_blocks", lambda model, *, blocks, keep_last, batch, loss: None),
    Judged("memory_budget", lambda model, budget, *, blocks, backend: None),
    Judged("MemoryProfiler", lambda model: None),
    *ROUTING_JUDGED,
)
THOROUGH_GATES = (Gate("recompute/long-run", long_run, thorough=True),)
GATES = (
    *(*RECOMPUTE_GATES, *CHAIN_GATES, *PLANTED_GATES),
    *(*MEMORY_BUDGET_GATES, *OFFLOAD_GATES, RECOMPUTE_GATE, *THOROUGH_GATES),
)
