"""Gates of memory-plan: plans fit, estimates are exact, chunked loss is the same.

Each gate takes the technique as `apply`, so that its tests can plant a wrong one.

Why so long: the gates of the loss and of the plan are one technique, and share its head and steps.

Proof: `python -m pytest tests/gates/test_memory_plan.py tests/gates/test_memory_plan_fit.py`.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F

from ..core.blocks import NoBlocks, find_blocks
from ..core.measure import count_flops, measure_memory
from ..core.parity import (
    OUTER_BOUND,
    Parity,
    StepRecord,
    check_comparable,
    compare,
    record_step,
)
from ..core.rerun import seeded, untouched
from ..plan.estimate import Sketch
from ..plan.optimizers import OptimizerFactory, make_optimizer
from ..plan.planner import Infeasible, Planner
from ..plan.saved import (
    FULL_KIND,
    OFFLOAD_KIND,
    REGIONS_KIND,
    SAC_KIND,
    Option,
    Plan,
    apply_options,
)
from ..plan.shapes import pretended
from ..plan.timeline import record_step_storages, timeline_of
from ..primitives.chunked_loss import (
    UnsuitableHead,
    apply_chunked_loss,
    chunked_loss_report,
    remove_chunked_loss,
)
from ..primitives.cross_entropy import (
    IGNORED_TARGET,
    chunked_cross_entropy,
    chunked_log_probabilities,
)
from ..workloads.workload import Case, token_loss
from . import fixtures
from .same_training import same_training
from .verdict import Gate, Implementation, Judged, Takes, Verdict, not_applicable, unrefused

# Gates of the chunked loss: the same training step, at a lower peak.

ApplyToHead = Callable[..., list[str]]  # takes what apply_chunked_loss takes
CrossEntropy = Callable[..., Tensor]  # takes what chunked_cross_entropy takes
# Times the difference between a plain step and the same step in higher precision.
ROUNDING_FACTOR = 2.0
# Of the peak of a head and its loss, without the gradients, which every loss allocates.
MOST_CHUNKED_SHARE = 0.15
# Logits of eight times the weight's size own the peak; a sixteenth of them does not.
TOKENS_PER_WIDTH = 8
NUM_CHUNKS = 16


@dataclass(frozen=True)
class Head:
    """The output layer of a model and its number of tokens per step."""

    width: int
    classes: int
    bias: bool
    tokens: int


def chunked_loss(case: Case, *, apply: ApplyToHead = apply_chunked_loss) -> Verdict:
    """Compare loss, gradients and FLOPs of one step with unevenly masked targets.

    The options of `F.cross_entropy` are compared on the head alone.
    """
    gate = "memory-plan/chunked-loss"
    batch = _masked(case, case.batch())
    found = _find_head(case)
    if isinstance(found, str):
        return not_applicable(gate, required="the same step", why=found)

    chunk = max(1, found.tokens * 2 // 5)  # two chunks and a shorter one
    reference, plain_flops = _step(case, batch)
    check_comparable(reference)
    candidate, flops = _step(case, batch, lambda module: apply(module, chunk_tokens=chunk))
    tolerance = OUTER_BOUND[case.dtype]
    same = compare(reference, candidate, tolerance=tolerance)
    if not same.holds:
        tolerance = max(tolerance, ROUNDING_FACTOR * _rounding(case, batch, reference))
        same = compare(reference, candidate, tolerance=tolerance)
    hint = ""
    if not same.holds:
        hint = f"{same.describe()}: a term, a divisor or a gradient is missing in some chunk"
    num_added = flops.total - plain_flops.total
    num_moved = flops.forward - plain_flops.forward
    # Backward of a loss per token computes the logits again, since its incoming gradients differ.
    again = 2 * _num_losses_per_token(case) * found.width * found.classes
    logits_are_whole = num_moved <= 0 and not (again and num_added > num_moved)
    if not hint and num_added > again:
        hint = (
            "a product of the head runs again: compute the gradients while a chunk's logits are "
            "allocated"
        )
    elif not hint and logits_are_whole:
        hint = (
            "forward computes no gradient, so the logits stay whole: check that the loss takes the "
            "head's output"
        )
    measured = f"{same.describe()}; {num_added:,} FLOPs added, {num_moved:,} moved to forward"
    if not hint:
        hint = _wrong_option(case, found, apply)
    required = f"within {tolerance:.0e}, no FLOPs added, some moved"
    if again:
        required = f"within {tolerance:.0e}, at most {again:,} FLOPs added for losses per token"
    return Verdict(gate, not hint, measured, required, hint)


def _num_losses_per_token(case: Case) -> int:
    """Return how many tokens of the plain step have a loss of their own."""
    module = case.build()
    with seeded(case.seed), torch.no_grad(), fixtures.LossesPerToken() as found:
        case.workload.mean_loss(module, case.batch())
    return found.num_tokens


def _weighted(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = module(batch[0])
    weights = torch.linspace(0.1, 2, logits.shape[-1], device=logits.device, dtype=logits.dtype)
    return F.cross_entropy(logits, batch[1], weight=weights)


def _smoothed(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], label_smoothing=0.2)


def _per_token(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    losses = F.cross_entropy(module(batch[0]), batch[1], reduction="none")
    factors = torch.linspace(0, 2, len(losses), device=losses.device, dtype=losses.dtype)
    return (losses * factors).sum()


OPTION_LOSSES = {
    "class weights": _weighted,
    "label smoothing": _smoothed,
    "a loss per token": _per_token,
}
OPTION_TOKENS = 20


def _wrong_option(case: Case, head: Head, apply: ApplyToHead) -> str:
    """Compare losses of the head with options of `F.cross_entropy`; return what differs.

    Half precision runs in float32: `F.cross_entropy` itself would round its sums.
    """
    for name, loss in OPTION_LOSSES.items():
        same, _ = _compared_on_head(case, head, apply, loss, (OPTION_TOKENS,))
        if not same.holds:
            return f"with {name}: {same.describe()}"
    return ""


def _compared_on_head(
    case: Case, head: Head, apply: ApplyToHead, loss: Callable[..., Tensor], shape: tuple[int, ...]
) -> tuple[Parity, list[nn.Module]]:
    """Compare a loss over the head alone with and without chunks, for targets of this shape."""
    modules: list[nn.Module] = []
    records = []
    dtype = torch.float32 if case.dtype in fixtures.HALF_PRECISION_DTYPES else case.dtype
    for change in (None, apply):
        with seeded(case.seed):
            module = nn.Sequential(_linear_of(replace(case, dtype=dtype), head))
            hidden = torch.randn(*shape, head.width).to(case.device, dtype)
            targets = torch.randint(head.classes, shape).to(case.device)
        targets[..., ::3] = IGNORED_TARGET
        if change is not None:
            change(module, head="0", chunk_tokens=OPTION_TOKENS // 4)
        hidden.requires_grad_()
        recorded = record_step(module, (hidden, targets), loss)
        gradients = {**recorded.gradients, "the input": hidden.grad}
        records.append(replace(recorded, gradients=gradients))
        modules.append(module)
    return compare(*records, tolerance=OUTER_BOUND[dtype]), modules


def chunked_memory(case: Case, *, apply: ApplyToHead = apply_chunked_loss) -> Verdict:
    """Measure the peak of the model's head and a loss, with enough tokens that logits own it."""
    gate = "memory-plan/chunked-memory"
    required = f"at most {MOST_CHUNKED_SHARE:.0%} of plain, without the gradients"
    found = _find_head(case)
    if isinstance(found, str):
        return not_applicable(gate, required=required, why=found)

    is_cuda = case.device.type == "cuda"
    tokens = TOKENS_PER_WIDTH * max(found.width, NUM_CHUNKS)
    if is_cuda:
        free = torch.cuda.mem_get_info(case.device)[0]
        needed = 16 * tokens * found.classes
        if needed > free:
            why = (
                f"the plain loss needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are "
                "free; measure on the CPU"
            )
            return not_applicable(gate, required=required, why=why)

    with contextlib.nullcontext() if is_cuda else pretended():
        plain = _head_peak(case, found, tokens)
        peak = _head_peak(case, found, tokens, apply=apply)

    # The gradient of a half-precision weight is summed in float32 before it is rounded.
    weight_itemsize = case.dtype.itemsize
    if case.dtype in fixtures.HALF_PRECISION_DTYPES:
        weight_itemsize += 4
    gradients = tokens * found.width * case.dtype.itemsize
    gradients += found.width * found.classes * weight_itemsize

    share = (peak - gradients) / plain
    held = share <= MOST_CHUNKED_SHARE
    sizes = f"{peak / 2**20:.1f} of {plain / 2**20:.1f} MiB"
    measured = f"{share:.1%}; with the gradients {peak / plain:.0%}: {sizes} at {tokens:,} tokens"
    hint = ""
    if not held:
        hint = (
            "all logits, or all of their gradient, are allocated at once: free each chunk's before "
            "the next"
        )
    return Verdict(gate, held, measured, required, hint)


def every_loss_option(case: Case, *, loss: CrossEntropy = chunked_cross_entropy) -> Verdict:
    """Compare each option of the chunked cross-entropy with its definition, in higher precision.

    The options of `F.cross_entropy` and those that it lacks, at the widths of the model's head.
    """
    gate = "memory-plan/loss-options"
    tolerance = OUTER_BOUND[case.dtype]
    required = f"each option within {tolerance:.0e} of its definition"
    head = _find_head(case)
    if isinstance(head, str):
        return not_applicable(gate, required=required, why=head)

    with seeded(case.seed):
        linear = _linear_of(case, head).requires_grad_(requires_grad=False)
        hidden = torch.randn(OPTION_TOKENS, head.width).to(linear.weight)
        targets = torch.randint(head.classes, (OPTION_TOKENS,)).to(case.device)
        each = fixtures.options_of_losses(hidden, head.classes)
    is_ignored = torch.arange(OPTION_TOKENS).to(case.device) % 3 == 0
    wrong = {}
    for name, options in each.items():
        for size in ({"chunk_tokens": OPTION_TOKENS // 3}, {"chunk_bytes": 16 * head.classes}):
            ignored = options.get("ignore_index", IGNORED_TARGET)
            given = (hidden, linear.weight, targets.where(~is_ignored, ignored))
            found = _loss_and_gradients(partial(loss, **size), *given, **options)
            expected = _loss_and_gradients(fixtures.loss_by_definition, *given, **options)
            worst = max(map(_difference, found, expected))
            if not worst <= tolerance:
                wrong[name] = f"{name} off by {worst:.1e}"
    measured = f"{len(each) - len(wrong)} of {len(each)} right"
    hint = ""
    if wrong:
        hint = f"{'; '.join(wrong.values())}: apply it to each chunk, and in its gradient"
    return Verdict(gate, not wrong, measured, required, hint)


def _loss_and_gradients(
    function: CrossEntropy, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any
) -> list[Tensor]:
    """Return the loss, and its gradients of inputs, weight and bias; a loss per token is summed."""
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    if "bias" in options:
        leaves.append(options["bias"].clone().requires_grad_())
        options["bias"] = leaves[-1]
    value = function(*leaves[:2], targets, **options)
    factors = torch.arange(3, value.numel() + 3).to(value).reshape(value.shape)
    return [value.detach(), *torch.autograd.grad((value * factors).sum(), leaves)]


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the difference relative to what is expected; NaN where either is."""
    return float((found.to(expected.dtype) - expected).norm() / expected.norm())


def every_loss_call(case: Case, *, loss: CrossEntropy = chunked_cross_entropy) -> Verdict:
    """Call planted losses: in each dtype, chunk size and choice of gradients, and wrongly."""
    wrong = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, None):
        given = fixtures.planted_loss(dtype or torch.float32)
        with seeded(0):
            each = fixtures.options_of_losses(given["hidden"], fixtures.LOSS_CLASSES)
        for name, options in each.items():
            is_used = fixtures.planted_loss()["targets"] != IGNORED_TARGET
            ignored = options.get("ignore_index", IGNORED_TARGET)
            given["targets"] = fixtures.planted_loss()["targets"].where(is_used, ignored)
            # Under autocast the tensors are rounded before the products, and the products too.
            rounding = torch.autocast("cpu", torch.bfloat16, enabled=dtype is None)
            with rounding:
                found = _loss_and_gradients(loss, **given, **options)
            expected = _loss_and_gradients(fixtures.loss_by_definition, **given, **options)
            worst = max(map(_difference, found, expected))
            exact = torch.float64 if dtype is torch.float64 else torch.float32
            same_shape = found[0].shape == expected[0].shape and found[0].dtype is exact
            tolerance = OUTER_BOUND[dtype] if dtype else 4 * OUTER_BOUND[torch.bfloat16]
            if not (worst <= tolerance and same_shape):
                wrong.append(f"{name} in {dtype or 'autocast'} off by {worst:.1e}")
    for dtype, options, expected_rows in fixtures.CHUNK_SIZES:
        if (rows := fixtures.rows_of_chunks(loss, dtype, **options)) != expected_rows:
            wrong.append(f"chunks with {options} have {rows} tokens")
    wrong += _wrong_gradients(loss)
    for name, (changes, text) in fixtures.WRONG_LOSSES.items():
        call = partial(loss, **fixtures.planted_loss(**changes))
        if why := unrefused(ValueError, call, text):
            wrong.append(f"{name}: {why}")
    wrong += fixtures.wrong_backends()
    num_ways = 4 * len(each) + len(fixtures.CHUNK_SIZES) + len(fixtures.WRONG_LOSSES)
    measured = f"{num_ways} calls, {len(wrong)} wrong"
    required = "as defined, and errors that name what is wrong"
    return Verdict("memory-plan/loss-calls", not wrong, measured, required, "; ".join(wrong[:4]))


def _wrong_gradients(loss: CrossEntropy) -> list[str]:
    """Return the choices of inputs with a gradient in which gradients are wrong."""
    wrong = []
    for reduction in ("mean", "none"):
        for needs in itertools.product((False, True), repeat=3):
            found = []
            for function in (loss, fixtures.loss_by_definition):
                bias = torch.linspace(0, 1, fixtures.LOSS_CLASSES, dtype=torch.float64)
                given = fixtures.planted_loss(torch.float64, bias=bias)
                # Another highest logit in each row.
                given["hidden"][0] *= 1000
                names = list(itertools.compress(("hidden", "weight", "bias"), needs))
                leaves = [given[name].requires_grad_() for name in names]
                value = function(**given, reduction=reduction).sum()
                again = [
                    torch.autograd.grad(3 * value, leaves, retain_graph=True)
                    for _ in range(2 if leaves else 0)
                ]
                found.append([value.detach(), *itertools.chain(*again)])
            if value.requires_grad != any(needs) or max(map(_difference, *found)) > 1e-10:
                wrong.append(f"gradients of {names} with reduction={reduction}")
    given = fixtures.planted_loss()
    given["weight"].requires_grad_()
    twice = partial(torch.autograd.grad, loss(**given), given["weight"], create_graph=True)
    if why := unrefused(RuntimeError, twice, "differentiated twice"):
        wrong.append(f"a second derivative: {why}")
    ours = chunked_log_probabilities(**fixtures.planted_loss(), softcap=2.0)
    definition = partial(fixtures.loss_by_definition, softcap=2.0, reduction="none")
    by_hand = -definition(**fixtures.planted_loss())
    if ours.shape != fixtures.LOSS_SHAPE or _difference(ours, by_hand) > 1e-5:
        wrong.append("log-probabilities")
    return wrong


def every_loss_form(case: Case, *, apply: ApplyToHead = apply_chunked_loss) -> Verdict:
    """Compare losses written in many ways over the model's head with the same over plain logits.

    The report has to tell which of them ran in chunks, and which needed all of the logits.
    """
    gate = "memory-plan/loss-forms"
    tolerance = OUTER_BOUND[case.dtype]
    required = f"each loss within {tolerance:.0e} and reported, wrong input refused"
    head = _find_head(case)
    if isinstance(head, str):
        return not_applicable(gate, required=required, why=head)

    needs_all = fixtures.WHOLE_FORMS | (fixtures.FORMS_WITHOUT_BIAS if head.bias else {})
    forms = fixtures.FORMS_IN_CHUNKS | fixtures.FORMS_WITHOUT_BIAS | fixtures.WHOLE_FORMS
    wrong = [
        f"{name}: {why}"
        for name, form in forms.items()
        if (why := _wrong_form(case, head, apply, form, needs_all=name in needs_all))
    ]
    wrong += _taken_although_wrong(case, head, apply)
    measured = f"{len(forms)} losses, {len(fixtures.WRONG_CHUNKS)} wrong inputs; {len(wrong)} wrong"
    return Verdict(gate, not wrong, measured, required, "; ".join(wrong))


def _wrong_form(
    case: Case,
    head: Head,
    apply: ApplyToHead,
    form: Callable[[Tensor, Tensor], Tensor],
    *,
    needs_all: bool,
) -> str:
    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return form(module(batch[0]), batch[1])

    same, modules = _compared_on_head(case, head, apply, loss, (2, OPTION_TOKENS // 2))
    if not same.holds:
        return same.describe()
    (use,) = chunked_loss_report(modules[1]).values()
    if bool(use.whole) != needs_all:
        return f"reported as {use}"
    hidden = torch.ones(2, head.width).to(next(modules[0].parameters()))
    evaluated = [module.eval()(hidden) for module in modules]
    is_plain = type(evaluated[1]) is Tensor
    return "" if is_plain and torch.equal(*evaluated) else "other logits in eval mode"


def _taken_although_wrong(case: Case, head: Head, apply: ApplyToHead) -> list[str]:
    """List the wrong inputs that are not refused, or that change the model."""
    taken = []
    for name, options in fixtures.WRONG_CHUNKS.items():
        module = nn.Sequential(_linear_of(case, head), nn.Identity())
        try:
            apply(module, **{"head": "0"} | options)
        except (ValueError, TypeError):
            if type(module[0]) is not nn.Linear:
                taken.append(f"{name}: refused after the head was changed")
            continue
        taken.append(f"{name} is taken")
    return taken


def every_head(case: Case, *, apply: ApplyToHead = apply_chunked_loss) -> Verdict:
    """Find the heads of planted models, read their logits, and undo the chunks again."""
    wrong = []
    for name, (make, options, expected) in fixtures.PLANTED_HEADS.items():
        model = make()
        before = [type(module) for module in model.modules()]
        try:
            found: list[str] | str = apply(model, **options)
            restored = remove_chunked_loss(model), [type(module) for module in model.modules()]
            if restored != (found, before):
                wrong.append(f"{name}: {restored} after the chunks are removed")
        except ValueError as error:
            found = str(error)
        if found != expected and not (isinstance(found, str) and str(expected) in found):
            wrong.append(f"{name}: {found}")
    for name, read in fixtures.READS.items():
        model = nn.Sequential(nn.Linear(4, 9))
        apply(model)
        hidden = torch.linspace(-1, 1, 16).reshape(2, 2, 4)
        (use,) = chunked_loss_report(model).values()
        with contextlib.suppress(ValueError, RuntimeError):
            read(model(hidden))
        (use,) = chunked_loss_report(model).values()
        if use.whole != [name] or str(use) != f"all logits made for {name}":
            wrong.append(f"{name} is reported as {use}")
    wrong += _wrong_reports(apply)
    num_ways = len(fixtures.PLANTED_HEADS) + len(fixtures.READS)
    measured = f"{num_ways - len(wrong)} of {num_ways} right"
    return Verdict("memory-plan/loss-heads", not wrong, measured, "all", "; ".join(wrong[:4]))


def _wrong_reports(apply: ApplyToHead) -> list[str]:
    """Return what is wrong with a report of losses, and with logits that are read too late."""
    model: Any = nn.Sequential(nn.Linear(4, 9))
    apply(model)
    wrong = []
    logits = model(torch.ones(3, 4))
    (use,) = chunked_loss_report(model).values()
    texts: list[Any] = [str(use)]
    for _ in range(2):
        F.cross_entropy(logits, torch.zeros(3).long())
        texts.append(str(use))
    if texts != ["no loss yet", "1 loss in chunks", "2 losses in chunks"]:
        wrong.append(f"losses are reported as {texts}")
    with torch.no_grad():
        model[0].weight.mul_(2)
    if why := unrefused(RuntimeError, logits.exp, "had changed"):
        wrong.append(f"logits that are read after the weight has changed: {why}")
    for needs in itertools.product((False, True), repeat=3):
        found = [fixtures.read_by_operations(change, needs) for change in (apply, nn.Module.train)]
        if max(map(_difference, *found)) > OUTER_BOUND[torch.bfloat16]:
            wrong.append(f"logits that are read, where {needs} of input, weight and bias train")
    logits = model(torch.ones(3, 4))
    register_multi_grad_hook((logits,), texts.append)
    F.cross_entropy(logits, torch.zeros(3).long()).backward()
    (use,) = chunked_loss_report(model).values()
    if use.whole or len(texts) != 4:
        wrong.append(f"a hook that watches logits is not called, or {use}")
    return wrong


CHUNKED_TAKES = {"apply_chunked_loss": Takes("apply")}
CHUNKED_LOSS_GATES = (
    Gate("memory-plan/loss-options", every_loss_option, {"chunked_cross_entropy": Takes("loss")}),
    Gate("memory-plan/loss-calls", every_loss_call),
    Gate("memory-plan/loss-forms", every_loss_form, CHUNKED_TAKES),
    Gate("memory-plan/loss-heads", every_head),
    Gate("memory-plan/chunked-loss", chunked_loss, CHUNKED_TAKES),
    Gate("memory-plan/chunked-memory", chunked_memory, CHUNKED_TAKES),
)


def _head_peak(case: Case, head: Head, tokens: int, *, apply: ApplyToHead | None = None) -> int:
    """Measure the peak of a head of this shape and its loss, with chunks if `apply` is given."""
    module = nn.Sequential(_linear_of(case, head))
    if apply is not None:
        apply(module, head="0", chunk_tokens=tokens // NUM_CHUNKS)
    hidden = torch.zeros(
        tokens, head.width, device=case.device, dtype=case.dtype, requires_grad=True
    )
    targets = torch.zeros(tokens, device=case.device, dtype=torch.int64)
    return measure_memory(module, (hidden, targets), _head_loss).peak_bytes


def _linear_of(case: Case, head: Head) -> nn.Linear:
    return nn.Linear(head.width, head.classes, bias=head.bias, device=case.device, dtype=case.dtype)


def _find_head(case: Case) -> Head | str:
    """Find the head whose loss can run in chunks, or return why there is none."""
    module = case.build()
    rows = list[int]()
    try:
        (name,) = apply_chunked_loss(module)
    except UnsuitableHead as error:
        return error.in_short
    head: Any = module.get_submodule(name)
    head.register_forward_pre_hook(lambda _, args: rows.append(args[0].numel() // head.in_features))
    with untouched(module), seeded(case.seed):
        case.workload.mean_loss(module, case.batch())
    use = chunked_loss_report(module)[name]
    if not use.num_chunked or use.whole:
        return f"the loss is not a cross-entropy on the output of {name} alone: {use}"
    return Head(head.in_features, head.out_features, head.bias is not None, sum(rows))


def _masked(case: Case, batch: Any) -> Any:
    return case.workload.mask(batch) if case.workload.mask else batch


def _step(case: Case, batch: Any, apply: Callable[[nn.Module], Any] = lambda module: None) -> Any:
    module = case.build()
    loss = case.workload.mean_loss
    apply(module)
    with seeded(case.seed):
        record = record_step(module, batch, loss)
    # Ignored tokens cost a chunked loss no product, which would hide one that runs twice.
    return record, count_flops(module, case.batch(), loss)


def _rounding(case: Case, batch: Any, reference: StepRecord) -> float:
    """Return how far the plain step is from the same step in higher precision."""
    if case.dtype not in fixtures.HIGHER_PRECISION:
        return 0.0
    precise = replace(case, dtype=fixtures.HIGHER_PRECISION[case.dtype])
    try:
        with seeded(case.seed):
            module = case.build().to(precise.dtype)
            step = record_step(module, precise.place(batch), case.workload.mean_loss)
    except (RuntimeError, TypeError):
        # The model or the device computes in other dtypes alone.
        return 0.0
    gradients = {
        name: None if gradient is None else gradient.to(case.dtype)
        for name, gradient in step.gradients.items()
    }
    loss = step.loss.to(reference.loss.dtype)
    return compare(replace(reference, loss=loss, gradients=gradients), reference).worst


def _head_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    hidden, targets = batch
    return token_loss(module(hidden), targets) / len(targets)


# Gates of memory plans: exact estimates, peaks within the budget, the same training.

# The model unchanged, and with blocks alternately under full recompute and under regions.
PLAIN_VARIANT = "plain"
ALTERNATING_VARIANT = "full and regions"
# Position of the budget between the peaks of these two.
BUDGET_POSITION = 0.5
# On CUDA, where the allocator rounds up and libraries allocate workspaces.
CUDA_PEAK_TOLERANCE = 0.02
ModelChange = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Prepared:
    """Predictions from shapes, which the gates compare with measurements."""

    # The peak of a step as PLAIN and, if the model has blocks, as IN_TURNS.
    peaks: Mapping[str, int]
    # A plan, or why there is none.
    plan: Plan | str
    # Why nothing can be predicted from shapes, or None.
    why_real: str | None


def estimate(
    case: Case,
    *,
    predict: Callable[[Case], Mapping[str, int]] | None = None,
    optimizer: str | OptimizerFactory = "adamw",
) -> Verdict:
    """Compare predicted and measured peaks, unchanged and with blocks recomputed alternately."""
    gate = "memory-plan/estimate"
    is_cuda = case.device.type == "cuda"
    required = f"within {CUDA_PEAK_TOLERANCE:.0%}" if is_cuda else "equal to the byte"
    if (why := prepared(case).why_real) is not None:
        return not_applicable(gate, required=required, why=why)

    if predict is not None:
        predicted = predict(case)
    elif optimizer == "adamw":
        predicted = prepared(case).peaks
    else:
        with Sketch(case.workload, optimizer=optimizer) as sketch:
            predicted = predicted_peaks(sketch, case.batch_size)
    ways = {PLAIN_VARIANT: None, ALTERNATING_VARIANT: _in_turns(case.blocks)}
    pairs = {
        way: (peak, measured_peak(case, ways[way], optimizer)) for way, peak in predicted.items()
    }
    wrong = {
        way: pair
        for way, pair in pairs.items()
        if abs(pair[0] - pair[1]) > (CUDA_PEAK_TOLERANCE * pair[1] if is_cuda else 0)
    }

    reported = (wrong or pairs).items()
    measured = "; ".join(f"{way} {peak:,} of {real:,}" for way, (peak, real) in reported)
    hint = ""
    if wrong:
        hint = "an owner is missing, or an operation allocates other bytes than its shapes give"
    return Verdict(gate, not wrong, measured, required, hint)


def fits(case: Case, *, make: Callable[[Case], Plan | str] | None = None) -> Verdict:
    """Apply a plan for a budget below the plain peak; compare the peak with its prediction."""
    gate = "memory-plan/fits"
    required = "a peak within the budget, as predicted"
    plan = (make or planned)(case)
    if isinstance(plan, str):
        return not_applicable(gate, required=required, why=plan)

    peak = measured_peak(case, plan.apply)
    error = abs(peak - plan.peak_bytes)
    allowed = CUDA_PEAK_TOLERANCE * peak if case.device.type == "cuda" else 0
    held = peak <= plan.budget_bytes and error <= allowed
    measured = f"peak {peak:,}, predicted {plan.peak_bytes:,}, budget {plan.budget_bytes:,}"
    hint = ""
    if not held:
        hint = "the applied options are not those of the plan, or the prediction omits some memory"
    return Verdict(gate, held, measured, required, hint)


def plan_parity(case: Case, *, make: Callable[[Case], Plan | str] | None = None) -> Verdict:
    """Compare loss, gradients, buffers and generators of one step with and without the plan."""
    gate = "memory-plan/parity-plan"
    plan = (make or planned)(case)
    if isinstance(plan, str):
        return not_applicable(gate, required="bit-equal", why=plan)
    return same_training(gate, case, lambda module, sample: plan.apply(module), alone=_alone(plan))


def _planned_by(given: Implementation, present: Any) -> Callable[[Case], Plan | str]:
    """Plan with another `plan` for the budget that our own plan meets."""

    def make(case: Case) -> Plan | str:
        ours = planned(case)
        if isinstance(ours, str):
            return ours
        size = case.batch_size
        plan: Plan = given.value(
            case.workload,
            ours.budget_bytes,
            global_batch=size,
            microbatch=size,
            **_planner_options(case),
        )
        return plan

    return make


JUDGED_CALLABLES = (
    Judged(
        "plan",
        lambda workload, budget_bytes, *, global_batch, microbatch, device, **options: None,
    ),
    Judged("apply_chunked_loss", lambda model, *, head, chunk_tokens: None),
    Judged("chunked_cross_entropy", lambda hidden, weight, targets, *, chunk_tokens: None),
)
PLAN_TAKES = {"plan": Takes("make", _planned_by)}

PLAN_GATES = (
    Gate("memory-plan/estimate", estimate),
    Gate("memory-plan/fits", fits, PLAN_TAKES),
    Gate("memory-plan/parity-plan", plan_parity, PLAN_TAKES),
)


@functools.lru_cache(maxsize=8)
def prepared(case: Case) -> Prepared:
    """Compute the predictions for all gates from one sketch of the model."""
    with _planner(case) as planner:
        peaks = predicted_peaks(planner.sketch, case.batch_size)
        return Prepared(peaks, _plan(planner, case, peaks), planner.sketch.why_real)


def predicted_peaks(sketch: Sketch, batch_size: int) -> dict[str, int]:
    """Predict the peaks of `Prepared` for a step with the sketch's optimizer."""
    peaks = {PLAIN_VARIANT: sketch.step(batch_size).peak_bytes}
    if sketch.blocks(sketch.build()):
        peaks[ALTERNATING_VARIANT] = sketch.step(
            batch_size, change=_in_turns(sketch.case.blocks)
        ).peak_bytes
    return peaks


def planned(case: Case) -> Plan | str:
    """Return a plan for half of the saving of recompute, or why there is none."""
    return prepared(case).plan


def _plan(planner: Planner, case: Case, peaks: Mapping[str, int]) -> Plan | str:
    try:
        find_blocks(planner.sketch.build(), case.blocks)
    except NoBlocks as error:
        return error.in_short
    if peaks[ALTERNATING_VARIANT] >= peaks[PLAIN_VARIANT]:
        return "recomputing every block does not lower the peak: something else owns it"
    budget = round(
        peaks[ALTERNATING_VARIANT]
        + BUDGET_POSITION * (peaks[PLAIN_VARIANT] - peaks[ALTERNATING_VARIANT])
    )
    try:
        return planner.plan(budget, global_batch=case.batch_size, microbatch=case.batch_size)
    except Infeasible as error:
        return f"no plan fits: {str(error).splitlines()[0]}"


def measured_peak(
    case: Case, change: ModelChange | None, optimizer: str | OptimizerFactory = "adamw"
) -> int:
    """Measure the peak of a real step."""
    module = case.build()
    made = make_optimizer(optimizer, module, foreach=case.device.type == "cuda")
    if change is not None:
        change(module)
    lives = record_step_storages(
        module,
        case.batch(),
        case.workload.mean_loss,
        optimizer=made,
        keeps_output=case.device.type == "cuda",
    )
    return timeline_of(lives, type(module).__name__).peak.bytes_alive


def _planner(case: Case) -> Planner:
    """Build a planner with few options, for speed; the techniques' gates check the others."""
    return Planner(case.workload, **_planner_options(case))


def _planner_options(case: Case) -> dict[str, Any]:
    return {
        "device": "h100" if case.device.type == "cuda" else "cpu",
        "dtype": case.dtype,
        "blocks": case.blocks,
        "chunked_loss": False,
        "without": (SAC_KIND, OFFLOAD_KIND),
        "seed": case.seed,
        # Tensors are measured here, not the memory that the allocator reserves.
        "by_reserved": False,
    }


def _in_turns(blocks: str | Sequence[str] | None) -> ModelChange:
    def change(module: nn.Module) -> None:
        options = {
            name: Option((FULL_KIND, REGIONS_KIND)[place % 2])
            for place, name in enumerate(find_blocks(module, blocks))
        }
        apply_options(module, options)

    return change


def _alone(plan: Plan) -> Callable[..., list[str]]:
    """Apply the plan's option to the block that a sample names only."""
    return lambda module, sample: apply_options(
        module, {name: option for name, option in plan.options.items() if name == sample.blocks}
    )


GATES = (*CHUNKED_LOSS_GATES, *PLAN_GATES)
