"""Gates of memory-plan: plans fit, estimates are exact, chunked loss is the same.

Each gate takes the technique as `apply`, so that its tests can plant a wrong one.

Why so long: the gates of the loss and of the plan are one technique, and share its head and steps.

Proof: `python -m pytest tests/gates/test_memory_plan.py tests/gates/test_memory_plan_fit.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

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
)
from ..primitives.cross_entropy import IGNORED_TARGET, chunked_cross_entropy
from ..workloads.workload import Case, token_loss
from .same_training import same_training
from .verdict import Gate, Implementation, Judged, Takes, Verdict, not_applicable

# Gates of the chunked loss: the same training step, at a lower peak.

ApplyToHead = Callable[..., list[str]]  # takes what apply_chunked_loss takes
CrossEntropy = Callable[..., Tensor]  # takes what chunked_cross_entropy takes
HALF_PRECISION_DTYPES = (torch.bfloat16, torch.float16)
# The next higher precision. Tokens that the model predicts with a probability near 1 have gradients
# that are small differences of it and 1, so float32 may round them by more than its bound.
HIGHER_PRECISION = {
    torch.float32: torch.float64,
    **dict.fromkeys(HALF_PRECISION_DTYPES, torch.float32),
}
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


class _LossesPerToken(TorchFunctionMode):
    """Count the tokens that `F.cross_entropy` gets with `reduction="none"`."""

    num_tokens = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and kwargs.get("reduction") == "none":
            self.num_tokens += (args[1] if len(args) > 1 else kwargs["target"]).numel()
        return func(*args, **kwargs)


def _num_losses_per_token(case: Case) -> int:
    """Return how many tokens of the plain step have a loss of their own."""
    module = case.build()
    with seeded(case.seed), torch.no_grad(), _LossesPerToken() as found:
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
    dtype = torch.float32 if case.dtype in HALF_PRECISION_DTYPES else case.dtype
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
    if case.dtype in HALF_PRECISION_DTYPES:
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
        weights = torch.rand(head.classes).to(case.device) + 0.5
        token_weights = torch.rand(OPTION_TOKENS).to(case.device)
        bias = torch.randn(head.classes).to(linear.weight)
    is_ignored = torch.arange(OPTION_TOKENS).to(case.device) % 3 == 0

    def own(reference: Any, sources: Any, targets: Tensor, used: Any) -> Tensor:
        loss: Tensor = reference(*sources, targets, **used)
        return loss

    each: dict[str, dict[str, Any]] = {
        "sum": {"reduction": "sum"},
        "a bias": {"bias": bias},
        "class weights": {"class_weights": weights},
        "label smoothing": {"label_smoothing": 0.1},
        "z-loss": {"z_loss": 1e-2},
        "softcap": {"softcap": 2.0},
        "token weights": {"token_weights": token_weights, "reduction": "sum"},
        "probability": {"token_weights": "probability"},
        "another ignored target": {"ignore_index": 0},
        "the leanest backend": {"backend": "auto"},
        "a backend of one's own": {"backend": own, "bias": bias, "reduction": "sum"},
    }
    each["all, by token"] = {key: value for one in each.values() for key, value in one.items()}
    each["all, by token"] |= {"reduction": "none", "ignore_index": IGNORED_TARGET}
    wrong = {}
    for name, options in each.items():
        for size in ({"chunk_tokens": OPTION_TOKENS // 3}, {"chunk_bytes": 16 * head.classes}):
            ignored = options.get("ignore_index", IGNORED_TARGET)
            given = (hidden, linear.weight, targets.where(~is_ignored, ignored))
            found = _loss_and_gradients(partial(loss, **size), *given, **options)
            expected = _loss_and_gradients(_defined, *given, **options)
            worst = max(map(_difference, found, expected))
            if not worst <= tolerance:
                wrong[name] = f"{name} off by {worst:.1e}"
    measured = f"{len(each) - len(wrong)} of {len(each)} right"
    hint = ""
    if wrong:
        hint = f"{'; '.join(wrong.values())}: apply it to each chunk, and in its gradient"
    return Verdict(gate, not wrong, measured, required, hint)


def _defined(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: str = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
    class_weights: Tensor | None = None,
    token_weights: Tensor | str | None = None,
    ignore_index: int = IGNORED_TARGET,
    backend: object = None,
    **smoothing: float,
) -> Tensor:
    """Compute the loss from whole logits, in the next higher precision, whatever the backend."""
    dtype = HIGHER_PRECISION.get(hidden.dtype, hidden.dtype)
    logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    shares = None if class_weights is None else class_weights.to(dtype)
    options: dict[str, Any] = {"weight": shares, "ignore_index": ignore_index, **smoothing}
    is_used = targets != ignore_index
    losses = F.cross_entropy(logits, targets, reduction="none", **options)
    losses = losses + is_used * z_loss * logits.logsumexp(-1).square()
    if token_weights is not None:
        factors = token_weights
        if isinstance(factors, str):
            chosen = targets.where(is_used, 0)[:, None]
            factors = logits.softmax(-1).gather(1, chosen)[:, 0].detach()
        losses = losses * factors
    if reduction == "none":
        return losses
    terms = is_used if shares is None else is_used * shares[targets.where(is_used, 0)]
    return losses.sum() / (terms.sum() if reduction == "mean" else 1)


def _loss_and_gradients(
    function: CrossEntropy, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any
) -> list[Tensor]:
    """Return the loss, and its gradients of inputs, weight and bias; a loss per token is summed."""
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    if "bias" in options:
        leaves.append(options["bias"].clone().requires_grad_())
        options["bias"] = leaves[-1]
    value = function(*leaves[:2], targets, **options)
    factors = torch.arange(1, value.numel() + 1).to(value).reshape(value.shape)
    return [value.detach(), *torch.autograd.grad((value * factors).sum(), leaves)]


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the difference relative to what is expected; NaN where either is."""
    return float((found.to(expected.dtype) - expected).norm() / expected.norm())


# What people write between the head and the loss. Each takes logits and targets of two sequences.
FORMS_IN_CHUNKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a shift": lambda logits, targets: _by_row(logits[:, :-1], targets[:, 1:]),
    "a shift by ...": lambda logits, targets: _by_row(
        logits[..., :-1, :].contiguous(), targets[..., 1:]
    ),
    "one position": lambda logits, targets: F.cross_entropy(logits[:, -2], targets[:, -2]),
    "flatten": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
    "a mask": lambda logits, targets: F.cross_entropy(
        logits[targets != IGNORED_TARGET], targets[targets != IGNORED_TARGET]
    ),
    "indices": lambda logits, targets: F.cross_entropy(
        torch.reshape(logits, (-1, logits.shape[-1]))[_every_second(targets)],
        targets.flatten()[_every_second(targets)],
    ),
    "transpose": lambda logits, targets: F.cross_entropy(logits.transpose(1, 2), targets),
    "permute": lambda logits, targets: F.cross_entropy(logits.permute(0, -1, 1), targets),
    "transpose twice": lambda logits, targets: _by_row(
        logits.transpose(-1, -2).transpose(2, 1), targets
    ),
    "float": lambda logits, targets: _by_row(logits.float().to(logits.device), targets),
    "two losses": lambda logits, targets: (
        _by_row(logits[:1], targets[:1]) + 2 * _by_row(logits[1:], targets[1:])
    ),
}
# A factor changes the rows of the head's input, which leaves out a bias.
FORMS_WITHOUT_BIAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a temperature": lambda logits, targets: _by_row(logits / 0.7, targets),
    "a factor": lambda logits, targets: _by_row(torch.mul(2 * logits, 0.25), targets),
    "a softcap": lambda logits, targets: _by_row(3.0 * torch.tanh(logits / 2.0), targets),
}
# These need all of the logits, which are computed then.
WHOLE_FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log_softmax": lambda logits, targets: F.nll_loss(logits[0].log_softmax(-1), targets[0]),
    "a term beside the loss": lambda logits, targets: (
        _by_row(logits, targets) + 0.1 * logits.logsumexp(-1).square().mean()
    ),
    "a factor below 0": lambda logits, targets: _by_row(logits * -1, targets),
    "classes left out": lambda logits, targets: F.cross_entropy(
        logits[..., :-1].flatten(0, 1), targets.flatten().clamp(max=logits.shape[-1] - 2)
    ),
    "probabilities": lambda logits, targets: F.cross_entropy(logits[0], logits[1].softmax(-1)),
}


def _by_row(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def _every_second(targets: Tensor) -> Tensor:
    return torch.arange(0, targets.numel(), 2, device=targets.device)


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

    needs_all = WHOLE_FORMS | (FORMS_WITHOUT_BIAS if head.bias else {})
    forms = FORMS_IN_CHUNKS | FORMS_WITHOUT_BIAS | WHOLE_FORMS
    wrong = [
        f"{name}: {why}"
        for name, form in forms.items()
        if (why := _wrong_form(case, head, apply, form, needs_all=name in needs_all))
    ]
    wrong += _taken_although_wrong(case, head, apply)
    measured = f"{len(forms)} losses, {len(WRONG_CHUNKS)} wrong inputs; {len(wrong)} wrong"
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
    return "" if torch.equal(*evaluated) else "other logits in eval mode"


WRONG_CHUNKS: dict[str, dict[str, Any]] = {
    "no tokens": {"chunk_tokens": 0},
    "no bytes": {"chunk_bytes": 0},
    "half a token": {"chunk_tokens": 1.5},
    "tokens and bytes": {"chunk_tokens": 4, "chunk_bytes": 2**20},
    "a head that is not there": {"head": "no_such_head"},
    "a head that is no Linear": {"head": "1"},
    "an unknown backend": {"backend": "no_such_backend"},
}


def _taken_although_wrong(case: Case, head: Head, apply: ApplyToHead) -> list[str]:
    """List the wrong inputs that are not refused, or that change the model."""
    taken = []
    for name, options in WRONG_CHUNKS.items():
        module = nn.Sequential(_linear_of(case, head), nn.Identity())
        try:
            apply(module, **{"head": "0"} | options)
        except (ValueError, TypeError):
            if type(module[0]) is not nn.Linear:
                taken.append(f"{name}: refused after the head was changed")
            continue
        taken.append(f"{name} is taken")
    return taken


CHUNKED_TAKES = {"apply_chunked_loss": Takes("apply")}
CHUNKED_LOSS_GATES = (
    Gate("memory-plan/loss-options", every_loss_option, {"chunked_cross_entropy": Takes("loss")}),
    Gate("memory-plan/loss-forms", every_loss_form, CHUNKED_TAKES),
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
    if case.dtype not in HIGHER_PRECISION:
        return 0.0
    precise = replace(case, dtype=HIGHER_PRECISION[case.dtype])
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
