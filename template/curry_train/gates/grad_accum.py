"""Gates of gradient accumulation: it gives the gradients of the large batch.

Each gate takes the implementation as `train`, so that its tests can plant a wrong one. A large
batch is compared in eval mode: dropout and BatchNorm depend on the microbatch, and would differ for
the right implementation too.

Why so long: the gates of one technique, in one process and on two ranks.

Proof: `python -m pytest tests/gates/test_grad_accum.py`.
"""

import copy
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..core.parity import (
    GRADIENT_TOLERANCES,
    NothingToCompare,
    Parity,
    StepRecord,
    check_comparable,
    compare,
    record,
)
from ..core.rerun import seeded
from ..primitives.grad_accum import GradientAccumulation, NonFiniteWindow, train_window
from ..workloads.workload import Case, Workload
from .trials import has_complex_parameters
from .two_ranks import (
    Found,
    GradientSyncs,
    Wrapped,
    by_name,
    judged,
    load_function,
    on_two_ranks,
    under_both,
)
from .verdict import (
    Gate,
    Implementation,
    Judged,
    Takes,
    Verdict,
    not_applicable,
    with_errors,
)
from .windows_by_hand import (
    DIVIDED_BATCH_FACTOR,
    IN_BACKWARD_GATES,
    IN_BACKWARD_JUDGED,
    MOST_LEARNING_RATE,
    Train,
    Windows,
    accumulate_by_hand,
    reference_by_hand,
    sgd_with_schedule,
    windows_parity,
)

RANK_SIZES = [1, 4, 3]  # of the microbatches of one rank
# Of a norm, which is rounded as it is summed; a wrong one is off by a factor.
NORM_TOLERANCE = 1e-2
# Of the gradient's own norm, so that every model is clipped.
CLIPPED_SHARE = 0.5
# The scale of the losses under a scaler, and one under which every gradient overflows.
LOSS_SCALE = 2.0**10
OVERFLOWING_SCALE = 2.0**127
# Steps of the optimizer and of its schedule in two windows.
TWO_WINDOWS = {"steps": 2, "schedule steps": 2}


def _our_windows(microbatches: Any, steps: int, count: Callable[[Any], int]) -> Any:
    return GradientAccumulation(steps).windows(microbatches, count=count)


def equal_windows(
    case: Case, *, train: Train = train_window, windows: Windows = _our_windows
) -> Verdict:
    """Compare four equally weighted microbatches with one large batch."""
    found = windows_parity(case, sizes=[case.batch_size] * 4, train=train, windows=windows)
    return _verdict(
        "grad-accum/equal", found, "divide each summed loss once, by the terms of the whole window"
    )


def uneven_windows(
    case: Case, *, train: Train = train_window, windows: Windows = _our_windows
) -> Verdict:
    """Compare microbatches of different sizes and, if the loss can be masked, token counts."""
    found = windows_parity(case, sizes=[1, 4, 2, 3], masked=True, train=train, windows=windows)
    return _verdict(
        "grad-accum/uneven",
        found,
        "sum each loss and divide by the window's terms; a mean of means weights terms unequally",
    )


def short_window(
    case: Case, *, train: Train = train_window, windows: Windows = _our_windows
) -> Verdict:
    """Compare six microbatches in windows of four, where the last window has two."""
    steps = _no_steps()
    parity, tolerance = windows_parity(
        case, sizes=[2] * 6, masked=True, steps=4, train=train, windows=windows, counted=steps
    )
    held = parity.holds and steps == TWO_WINDOWS
    return Verdict(
        "grad-accum/short-window",
        held,
        f"{parity.describe()}; {_counts(steps)}",
        f"gradients within {tolerance:.1e} of the large batch; {_counts(TWO_WINDOWS)}",
        "" if held else "take divisor and last microbatch from the window, not from K",
    )


def once_per_window(
    case: Case, *, train: Train = train_window, windows: Windows = _our_windows
) -> Verdict:
    """Check that clipping, optimizer and schedule run once per window, on its whole gradient."""
    steps = _no_steps()
    parity, tolerance = windows_parity(
        case,
        sizes=[2] * 8,
        masked=True,
        steps=4,
        clip_share=CLIPPED_SHARE,
        train=train,
        windows=windows,
        counted=steps,
    )
    held = parity.holds and steps == TWO_WINDOWS
    measured = f"{parity.describe()}; {_counts(steps)}"
    required = f"clipped gradients within {tolerance:.1e}; {_counts(TWO_WINDOWS)}"
    hint = ""
    if not held:
        hint = "clip, step and schedule after the last microbatch of the window, never inside it"
    return Verdict("grad-accum/once", held, measured, required, hint)


def scaled_window(
    case: Case, *, train: Train = train_window, windows: Windows = _our_windows
) -> Verdict:
    """Compare a window under a gradient scaler, clipped, with one trained by hand without it.

    A gradient that overflows must skip the step and the schedule.
    """
    gate = "grad-accum/scaled"
    if not _takes(train, "scaler"):
        return not_applicable(
            gate, required="a scaler", why="the implementation takes no gradient scaler"
        )
    if has_complex_parameters(case.build()):
        why = "the model has complex parameters, and torch's scaler takes no complex gradients"
        return not_applicable(gate, required="gradients that can be scaled", why=why)
    options: dict[str, Any] = {"train": train, "windows": windows}
    sizes = [2] * 4
    parity, tolerance = windows_parity(
        case, sizes=sizes, clip_share=CLIPPED_SHARE, scale=LOSS_SCALE, **options
    )

    module = case.build().eval()
    before = copy.deepcopy(module.state_dict())
    optimizer, scheduler = sgd_with_schedule(module, MOST_LEARNING_RATE)
    microbatches = case.split(case.batch(sum(sizes)), sizes)
    (window,) = windows(microbatches, len(sizes), case.workload.count)
    scaler = torch.amp.GradScaler(case.device.type, init_scale=OVERFLOWING_SCALE)
    overflowing = _overflowing(case)
    result = train(module, window, overflowing, optimizer, scheduler=scheduler, scaler=scaler)
    changed = _changed(module, before)
    steps = scheduler.last_epoch

    measured = f"{parity.describe()}; overflow: {changed} weights changed, {steps} schedule steps"
    required = f"clipped gradients within {tolerance:.1e}; overflow: nothing changed"
    hint = ""
    if not parity.holds:
        hint = "unscale once per window, after the last backward and before clipping"
    elif changed or steps or getattr(result, "stepped", False):
        hint = "step through the scaler, and the schedule only if the scaler stepped; report it"
    return Verdict(gate, not hint, measured, required, hint)


def _overflowing(case: Case) -> Callable[[nn.Module, Any], torch.Tensor]:
    """Return the loss, large enough that its scaled gradient overflows."""
    most = 2.0**100 if case.dtype is not torch.float16 else 2.0**10
    return lambda module, microbatch: case.workload.loss(module, microbatch) * most


def _takes(train: Train, option: str) -> bool:
    """Return whether an implementation takes a keyword argument."""
    try:
        parameters = inspect.signature(train).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return True
    return any(one.name == option or one.kind is one.VAR_KEYWORD for one in parameters)


def _changed(module: nn.Module, before: Mapping[str, Any]) -> int:
    return sum(
        not torch.equal(value, before[name])
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    )


def random_numbers(
    case: Case, *, train: Train = train_window, windows: Windows = _our_windows
) -> Verdict:
    """Compare a window in training mode with a loop by hand on the same random numbers.

    A number drawn beside each loss shows whether each microbatch draws its own.
    """
    gate = "grad-accum/random"
    sizes = [case.batch_size] * 3
    microbatches = case.split(case.batch(sum(sizes)), sizes)
    (window,) = windows(microbatches, len(sizes), case.workload.count)
    runs = []
    for is_by_hand in (True, True, False):
        module = case.build()
        draws: list[float] = []

        def loss(model: nn.Module, microbatch: Any, draws: list[float] = draws) -> torch.Tensor:
            draws.append(torch.rand(()).item())
            return case.workload.loss(model, microbatch)

        with seeded(case.seed):
            if is_by_hand:
                total = accumulate_by_hand(module, microbatches, loss, case.workload.count)
            else:
                optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
                total = torch.tensor(train(module, window, loss, optimizer).loss)
            runs.append((record(module, total), draws))
    (first, expected), (second, _), (ours, found) = runs
    required = f"as by hand within {GRADIENT_TOLERANCES[case.dtype]:.0e}, random numbers equal"
    if not compare(first, second).bit_equal:
        why = "a loop by hand in training mode does not repeat itself bit for bit"
        return not_applicable(gate, required=required, why=why)

    ours = replace(ours, loss=ours.loss.to(first.loss))
    found_parity = compare(first, ours, tolerance=GRADIENT_TOLERANCES[case.dtype])
    num_own = len(set(found))
    measured = (
        f"{found_parity.describe()}; {num_own} of {len(expected)} microbatches draw their own"
    )
    hint = ""
    if found != expected:
        hint = "draw on from microbatch to microbatch: do not seed inside the window"
    elif not found_parity.holds:
        hint = "run each microbatch once, in order, in the mode that the module has"
    return Verdict(gate, not hint, measured, required, hint)


def non_finite(
    case: Case, *, train: Train = train_window, windows: Windows = _our_windows
) -> Verdict:
    """Check that a NaN in one microbatch stops the window before the weights change.

    The NaN is the loss in one window, and in another the gradient of a loss that is finite.
    """
    loss_report, loss_held = _poisoned_window(case, _nan_loss, train, windows)
    gradient_report, gradient_held = _poisoned_window(case, _nan_gradient, train, windows)
    loss_held = loss_held and loss_report.startswith("names microbatch 2;")
    hint = ""
    if not loss_held:
        hint = "check loss and gradient norm before optimizer.step, on every rank"
    elif not gradient_held:
        hint = "check the gradient norm as well: the gradient of a finite loss may be NaN"
    return Verdict(
        "grad-accum/non-finite",
        not hint,
        f"{loss_report}; NaN gradient: {gradient_report}",
        "names microbatch 2; 0 weights, 0 states changed; the same for a gradient",
        hint,
    )


def _poisoned_window(case: Case, poison: Any, train: Train, windows: Windows) -> tuple[str, bool]:
    """Train a window whose microbatch 2 is poisoned; return a report, and if it was stopped."""
    module = case.build().eval()
    workload = case.workload
    before = copy.deepcopy(module.state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    microbatches = list(enumerate(case.split(case.batch(4), [1] * 4)))

    def poisoned(model: nn.Module, numbered: tuple[int, Any]) -> torch.Tensor:
        loss = workload.loss(model, numbered[1])
        return poison(loss, model) if numbered[0] == 2 else loss

    (window,) = windows(microbatches, 4, lambda numbered: workload.count(numbered[1]))
    try:
        train(module, window, poisoned, optimizer)
        report = "no error"
    except NonFiniteWindow as error:
        report = "names microbatch 2" if "microbatch 2 " in str(error) else "stopped"
    changed = _changed(module, before)
    held = report != "no error" and not changed and not optimizer.state
    return f"{report}; {changed} weights, {len(optimizer.state)} states changed", held


def _nan_loss(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    return loss * float("nan")


def _nan_gradient(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Add a term of 0 whose derivative is not finite."""
    trained = [one for one in model.parameters() if one.requires_grad and one.is_floating_point()]
    if not trained:
        return loss * float("nan")
    return loss + (trained[0].sum() * 0).abs().sqrt().to(loss)


def own_loop(case: Case, *, accumulation: Any = GradientAccumulation) -> Verdict:
    """Compare a loop that does what `train_step_kwargs` says with large batches.

    A window is asked about uneven microbatches with a short end, and `GradientAccumulation` about
    equal ones, by their number in the run. Both read the number of steps from a config.
    """
    gate = "grad-accum/own-loop"
    required = f"gradients of the large batch, {_counts(TWO_WINDOWS)}, 2 syncs"
    for name in ("from_config", "train_step_kwargs"):
        if not hasattr(accumulation, name):
            why = f"the implementation has no {name}"
            return not_applicable(gate, required=required, why=why)

    sizes = [2] * 6
    of_windows = _OwnLoop(accumulation.from_config({"gradient_accumulation_steps": _number(4)}))
    run: dict[str, Any] = {"train": of_windows.train, "windows": of_windows.windows}
    steps = _no_steps()
    found = [windows_parity(case, sizes=sizes, steps=4, masked=True, counted=steps, **run)]
    is_right = of_windows.synced == [False, False, False, True, False, True]
    of_one = accumulation.from_config({"gradient_accumulation_steps": 1})
    is_right = is_right and accumulation.from_config({}) == of_one
    by_attribute = accumulation.from_config(types.SimpleNamespace(micro=2), key="micro")
    is_right = is_right and (by_attribute.steps, by_attribute.sync_each_batch) == (2, False)
    is_right = is_right and accumulation(steps=_number(2)) == accumulation(steps=2)
    is_right = is_right and type(accumulation(steps=_number(2)).steps) is int
    made = accumulation(steps=4).windows(case.split(case.batch(sum(sizes)), sizes))
    is_right = is_right and [getattr(one, "index", at) for at, one in enumerate(made)] == [0, 1]

    counts = {case.workload.count(one) for one in case.split(case.batch(sum(sizes)), sizes)}
    if len(counts) == 1:
        config = types.SimpleNamespace(micro=3, sync_each_batch=True)
        by_number = _OwnLoop(accumulation.from_config(config, key="micro"), terms=max(counts))
        run = {"train": by_number.train, "windows": by_number.windows}
        found.append(windows_parity(case, sizes=sizes, steps=3, **run))
        is_right = is_right and all(by_number.synced)

    hint = ""
    if steps != TWO_WINDOWS or not all(parity.holds for parity, _ in found):
        hint = "zero at the first microbatch of a window, step at its last, divide by its terms"
    elif not is_right:
        hint = (
            "sync at the last microbatch, or at each with sync_each_batch; without steps in the "
            "config there is one"
        )
    measured = "; ".join(parity.describe() for parity, _ in found)
    measured += f"; {_counts(steps)}, {sum(of_windows.synced)} syncs"
    return Verdict(gate, not hint, measured, required, hint)


def _number(value: int) -> torch.Tensor:
    """Return a whole number as a tensor, as configs and counts often hold it."""
    return torch.tensor([value])


class _OwnLoop:
    """A loop by hand that does what an accumulation says, and notes where it syncs gradients.

    With `terms`, of each microbatch, the accumulation itself is asked, and not its windows.
    """

    def __init__(self, accumulation: Any, *, terms: int | None = None) -> None:
        self.accumulation = accumulation
        self.terms = terms
        self.synced: list[bool] = []

    def windows(self, microbatches: Any, steps: int, count: Callable[[Any], int]) -> Any:
        """Make windows whose terms are counted in a tensor, as loops often do."""
        return self.accumulation.windows(microbatches, count=lambda one: _number(count(one)))

    def train(
        self,
        model: nn.Module,
        window: Any,
        loss: Callable[[nn.Module, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
    ) -> Any:
        total = 0.0
        for index, microbatch in enumerate(window):
            if self.terms is None:
                what = window.train_step_kwargs(index)
                divisor = what["loss_divisor"]
            else:
                what = self.accumulation.train_step_kwargs(len(self.synced))
                divisor = what["loss_divisor"] * self.terms
            if what["zero_grad"]:
                optimizer.zero_grad()
            value = loss(model, microbatch) / divisor
            value.backward()
            total += value.item()
            self.synced.append(what["sync_gradients"])
            if what["step_optimizer"] and what["collect_metrics"]:
                optimizer.step()
                scheduler.step()
        return types.SimpleNamespace(loss=total)


def joint_loss(
    case: Case, *, train: Train = train_window, windows: Windows = _our_windows
) -> Verdict:
    """Compare a loss of all microbatches together, as contrastive losses are, with one by hand."""
    gate = "grad-accum/joint-loss"
    required = f"gradients of one backward by hand within {GRADIENT_TOLERANCES[case.dtype]:.1e}"
    if not _takes(train, "joint_loss"):
        why = "the implementation takes no joint loss"
        return not_applicable(gate, required=required, why=why)
    workload = case.workload
    sizes = [2, 4, 2]
    microbatches = case.split(case.batch(sum(sizes)), sizes)
    (window,) = windows(microbatches, len(sizes), workload.count)
    terms = sum(map(workload.count, microbatches))

    def together(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(values).div(terms).logsumexp(0) * terms

    def step(*, is_by_hand: bool, scale: float | None = None) -> StepRecord:
        module = case.build().eval()
        with seeded(case.seed):
            if is_by_hand:
                total = together([workload.loss(module, one) for one in microbatches]) / terms
                total.backward()
                return record(module, total.detach())
            options: dict[str, Any] = {"joint_loss": together}
            if scale is not None:
                options["scaler"] = torch.amp.GradScaler(case.device.type, init_scale=scale)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
            loss = train(module, window, workload.loss, optimizer, **options).loss
            return record(module, torch.tensor(loss).to(reference.loss))

    reference = step(is_by_hand=True)
    if not compare(reference, step(is_by_hand=True)).bit_equal:
        why = "a loop by hand does not repeat itself bit for bit"
        return not_applicable(gate, required=required, why=why)
    try:
        check_comparable(reference)
    except NothingToCompare as nothing:
        return not_applicable(gate, required=required, why=str(nothing))
    scales = [None, LOSS_SCALE]
    if not _takes(train, "scaler") or has_complex_parameters(case.build()):
        scales = [None]
    tolerance = GRADIENT_TOLERANCES[case.dtype]
    found = [
        compare(reference, step(is_by_hand=False, scale=scale), tolerance=tolerance)
        for scale in scales
    ]
    parity = max(found, key=lambda one: one.worst)
    hint = "run every forward, then one backward of the loss of all outputs, divided once"
    return Verdict(gate, parity.holds, parity.describe(), required, "" if parity.holds else hint)


# Wrong input, on a window of three planted samples: of each what the error has to name.
WrongUse = Callable[[Any, Train], Any]
WRONG_USES: dict[str, tuple[WrongUse, str]] = {
    "0 steps": (lambda kind, train: kind(steps=0), "steps"),
    "1.5 steps": (lambda kind, train: kind(steps=1.5), "steps"),
    "True steps": (lambda kind, train: kind(steps=True), "steps"),
    "0 steps in a config": (lambda kind, train: kind.from_config({"k": 0}, key="k"), "k"),
    "a word for sync_each_batch": (
        lambda kind, train: kind(steps=2, sync_each_batch="yes"),
        "sync_each_batch",
    ),
    "a negative index": (lambda kind, train: kind(steps=2).train_step_kwargs(-1), "-1"),
    "an index after the window": (
        lambda kind, train: _planted_window(kind).train_step_kwargs(3),
        "index 3",
    ),
    "no data": (lambda kind, train: [*kind(steps=2).windows([])], "empty"),
    "no terms": (lambda kind, train: _planted_window(kind, count=lambda one: 0), "count"),
    "negative terms": (lambda kind, train: _planted_window(kind, count=lambda one: -1), "count"),
    "half a term": (lambda kind, train: _planted_window(kind, count=lambda one: 0.5), "count"),
    "a clip of 0": (lambda kind, train: _planted_step(kind, train, clip_norm=0.0), "clip_norm"),
    "a clip of NaN": (lambda kind, train: _planted_step(kind, train, clip_norm=math.nan), "clip"),
    "a loss of several numbers": (
        lambda kind, train: _planted_step(kind, train, loss=lambda module, one: module(one)),
        "loss",
    ),
    "a joint loss that syncs each batch": (
        lambda kind, train: _planted_step(
            kind, train, joint_loss=lambda values: sum(values), sync_each_batch=True
        ),
        "sync_each_batch",
    ),
}
NUM_PLANTED_SAMPLES = 3


def _planted_window(kind: Any, *, count: Callable[[Any], Any] | None = None, **options: Any) -> Any:
    samples = torch.arange(1.0, NUM_PLANTED_SAMPLES + 1).view(-1, 1, 1)
    return next(kind(steps=NUM_PLANTED_SAMPLES, **options).windows([*samples], count=count))


def _planted_step(
    kind: Any,
    train: Train,
    *,
    loss: Callable[..., torch.Tensor] = lambda module, one: module(one).sum(),
    count: Callable[[Any], Any] | None = None,
    sync_each_batch: bool = False,
    **options: Any,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Train a weight of 1 on the inputs 1, 2 and 3.

    Returns the result, the weight, and one that only an earlier step used.
    """
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    unused = nn.Parameter(torch.ones(()))
    unused.grad = torch.ones(())
    optimizer = torch.optim.SGD([module.weight, unused], lr=1.0)
    window = _planted_window(kind, count=count, sync_each_batch=sync_each_batch)
    result = train(module, window, loss, optimizer, **options)
    return result, module.weight, unused


def wrong_uses(
    case: Case, *, accumulation: Any = GradientAccumulation, train: Train | None = None
) -> Verdict:
    """Check that wrong input is an error that names it, and that unusual input is not.

    Without `count` each microbatch is a term, and some may have none. On a planted weight, whose
    gradient is counted by hand. `train` is the `train_window` beside the accumulation.
    """
    gate = "grad-accum/refused"
    beside = sys.modules[getattr(accumulation, "__module__", __name__)]
    taken: Any = train or getattr(beside, "train_window", train_window)
    accepted = []
    for name, (use, text) in WRONG_USES.items():
        try:
            use(accumulation, taken)
            accepted.append(name)
        except (ValueError, TypeError) as error:
            if text not in str(error):
                accepted.append(f"{name} (the error does not name {text})")
    # The inputs 1, 2 and 3 have these terms, and the gradient is 6 over their sum.
    wrong = []
    for terms in (None, [0, 0, 1], [2, 0, 1]):
        count = None if terms is None else lambda one, terms=terms: terms[int(one) - 1]
        num_terms = NUM_PLANTED_SAMPLES if terms is None else sum(terms)
        result, weight, unused = _planted_step(accumulation, taken, count=count)
        found = [result.loss, result.grad_norm, 1 - weight.item()]
        expected = 6 / num_terms
        is_near = all(math.isclose(one, expected, rel_tol=1e-6) for one in found)
        if not is_near or result.num_terms != num_terms:
            wrong.append(f"terms {terms}")
        if unused.grad is not None:
            # With a gradient of zeros, optimizers go on by momentum and weight decay.
            wrong.append(f"a gradient of an earlier step is left with terms {terms}")
    hint = ""
    if accepted:
        hint = f"accepts this, or does not name it: {', '.join(accepted)}"
    elif wrong:
        hint = f"set gradients to None, and divide by the terms of the window: {', '.join(wrong)}"
    measured = f"{len(WRONG_USES) - len(accepted)} refused, {len(wrong)} of 3 sound steps wrong"
    required = f"{len(WRONG_USES)} refused, 0 of 3"
    return Verdict(gate, not hint, measured, required, hint)


def two_ranks(case: Case, *, train: str = f"{train_window.__module__}:train_window") -> Verdict:
    """Compare DDP and FSDP2 on two gloo ranks with the large batch, with one sync per window.

    The ranks load `train` by its name.
    """
    required = (
        f"{GRADIENT_TOLERANCES[case.dtype]:.0e} or {DIVIDED_BATCH_FACTOR} times that of a loop by "
        "hand; 1 sync a window"
    )
    # Raises NotApplicable here and not in the other processes.
    batch = case.batch(2 * sum(RANK_SIZES))
    reference_by_hand(case, [case.split(batch, 2 * RANK_SIZES)], batch)
    results = on_two_ranks(f"{__name__}:_rank_check", case, required=required, train=train)

    def figure(of_ranks: Sequence[dict[str, Any]]) -> tuple[bool, str]:
        worst = max(of_ranks, key=lambda found: found["error"])
        wrong = next((found["reported"] for found in of_ranks if found["reported"]), "")
        is_right = worst["error"] <= worst["tolerance"] and worst["syncs"] == 1.0 and not wrong
        return is_right, f"{worst['error']:.1e}, syncs {worst['syncs']:g}{wrong and f' ({wrong})'}"

    return judged(
        "grad-accum/two-ranks",
        results,
        required=required,
        figure=figure,
        hint="divide by the terms of all ranks; use no_sync or set_requires_gradient_sync until "
        "the window's last microbatch; report the norm and terms of all ranks",
    )


def _windows(given: Implementation, present: Any) -> Windows:
    return lambda microbatches, steps, count: given.value(steps=steps).windows(
        microbatches, count=count
    )


JUDGED_CALLABLES = (
    Judged("train_window", lambda model, window, loss, optimizer, *, clip_norm, scheduler: None),
    Judged("GradientAccumulation", lambda *, steps: None),
    *IN_BACKWARD_JUDGED,
)
TRAIN_TAKES = {
    "train_window": Takes("train", with_errors(NonFiniteWindow)),
    "GradientAccumulation": Takes("windows", _windows),
}
TRAIN_BY_NAME = {"train_window": Takes("train", by_name)}

GATES = (
    Gate("grad-accum/equal", equal_windows, TRAIN_TAKES),
    Gate("grad-accum/uneven", uneven_windows, TRAIN_TAKES),
    Gate("grad-accum/short-window", short_window, TRAIN_TAKES),
    Gate("grad-accum/once", once_per_window, TRAIN_TAKES),
    Gate("grad-accum/scaled", scaled_window, TRAIN_TAKES),
    Gate("grad-accum/random", random_numbers, TRAIN_TAKES),
    Gate("grad-accum/non-finite", non_finite, TRAIN_TAKES),
    Gate("grad-accum/own-loop", own_loop, {"GradientAccumulation": Takes("accumulation")}),
    Gate("grad-accum/joint-loss", joint_loss, TRAIN_TAKES),
    Gate("grad-accum/refused", wrong_uses, {"GradientAccumulation": Takes("accumulation")}),
    *IN_BACKWARD_GATES,
    Gate("grad-accum/two-ranks", two_ranks, TRAIN_BY_NAME),
)


def _verdict(gate: str, found: tuple[Parity, float], hint: str) -> Verdict:
    parity, tolerance = found
    required = f"gradients within {tolerance:.1e} of the large batch"
    return Verdict(gate, parity.holds, parity.describe(), required, "" if parity.holds else hint)


def _no_steps() -> dict[str, int]:
    return dict.fromkeys(TWO_WINDOWS, 0)


def _counts(steps: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in steps.items())


def _rank_check(case: Case, train: str) -> Found:
    """Train this rank's part of an uneven masked window, and compare it with the whole batch."""
    workload = case.workload
    num_ranks = dist.get_world_size()
    batch = case.batch(sum(RANK_SIZES) * num_ranks)
    if workload.mask:
        batch = workload.mask(batch)
    of_ranks = case.split(batch, RANK_SIZES * num_ranks)
    microbatches = of_ranks[len(RANK_SIZES) * dist.get_rank() :][: len(RANK_SIZES)]
    reference, tolerance = reference_by_hand(case, [of_ranks], batch)

    expected = {
        "grad_norm": _norm(reference.gradients),
        "num_terms": sum(map(workload.count, of_ranks)),
        "stepped": True,
    }

    def measure(wrapped: Wrapped, kind: str) -> dict[str, Any]:
        found, result = _rank_parity(reference, wrapped(), microbatches, workload, train)
        wrong = [
            f"{name} is reported as {getattr(result, name)}, not {value}"
            for name, value in expected.items()
            if hasattr(result, name) and abs(getattr(result, name) - value) > NORM_TOLERANCE * value
        ]
        return found | {"tolerance": tolerance, "reported": "; ".join(wrong)}

    unused = None in reference.gradients.values()
    return under_both(case, microbatches[0], measure, unused=unused)


def _rank_parity(
    reference: StepRecord, model: nn.Module, microbatches: list[Any], workload: Workload, train: str
) -> tuple[dict[str, float], Any]:
    for _ in range(2):  # DDP rebuilds its buckets after the first backward
        by_hand = _syncs_by_hand(model, microbatches, workload)
    window = next(
        GradientAccumulation(len(microbatches)).windows(microbatches, count=workload.count)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with GradientSyncs() as syncs:
        result = load_function(train)(model, window, workload.loss, optimizer)
    step = record(model, torch.tensor(result.loss, dtype=reference.loss.dtype))
    gradients = {
        name.removeprefix("module."): gradient for name, gradient in step.gradients.items()
    }
    candidate = replace(reference, loss=step.loss, gradients=gradients)
    error = compare(reference, candidate).worst
    return {"error": error, "syncs": syncs.num_calls / by_hand}, result


def _norm(gradients: Mapping[str, Any]) -> float:
    known = [gradient for gradient in gradients.values() if gradient is not None]
    return math.sqrt(sum(gradient.abs().double().square().sum().item() for gradient in known))


def _syncs_by_hand(model: Any, microbatches: list[Any], workload: Workload) -> int:
    """Count the syncs of a window that is synced at its end, by the switches of DDP and FSDP2."""
    with GradientSyncs() as syncs:
        for index, microbatch in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = is_last
            else:
                model.set_requires_gradient_sync(is_last)
            workload.loss(model, microbatch).backward()
    return syncs.num_calls
