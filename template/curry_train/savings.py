"""Measure what each strategy saves and costs on a model.

    rows = measure_savings(Case(load_workload("transformer")), ["full", "selective"])

Measured are bytes, recomputed FLOPs, step time, largest batch, and parity with `none`, which is
always measured as the reference. All models share one set of weights, and steps are timed in turns,
so that machine drift affects all alike. Proof: `python -m pytest tests/test_savings.py`.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from .core.allocated import count_executed_flops, measure_allocated
from .core.blocks import NoBlocks, find_blocks
from .core.builtin import BUILTIN
from .core.compiled import holds_compiled_code
from .core.load import load_workload
from .core.measure import Flops, Memory, count_flops, measure_memory, recompute_flops, time_step
from .core.nearest import did_you_mean
from .core.out_of_memory import is_out_of_memory
from .core.parity import StepRecord, compare, record_step
from .core.python_calls import python_calls
from .core.untouched import seeded
from .core.workload import Case, Workload, WorkloadError
from .largest_batch import largest_batch
from .plan.profiler import MemoryProfiler
from .plan.same_training import OUTER_BOUND, sample_of
from .plan.strategies import STRATEGIES
from .savings_row import FAILED, MEASURED, PLAIN, REFUSED, TOO_LARGE, Row, StepSeconds


@dataclass(frozen=True)
class _Plain:
    """Figures of the plain step, the reference for all others."""

    record: StepRecord
    memory: Memory
    flops: Flops
    blocks_held: int


def load_with_depth(spec: str, depth: int | None) -> Workload:
    """Load a workload; with `depth`, a built-in one with that many blocks."""
    is_misspelled = spec not in BUILTIN and ":" not in spec  # load_workload lists the valid names
    if depth is None or is_misspelled:
        return load_workload(spec)
    if spec not in BUILTIN:
        raise WorkloadError(
            f"depth applies to built-in workloads only ({', '.join(BUILTIN)}); set it in {spec} "
            "itself"
        )
    factory: Callable[..., Workload] = BUILTIN[spec]
    return replace(factory(depth=depth), spec=spec)


def choose_strategies(names: Sequence[str]) -> list[str]:
    """Check the names and return them, or all strategies if empty; `none` always comes first."""
    for name in names:
        if name not in STRATEGIES:
            raise ValueError(f"no strategy is called {name!r}; {did_you_mean(name, STRATEGIES)}")
    return list(dict.fromkeys([PLAIN, *(names or STRATEGIES)]))


def count_steps(num_strategies: int, *, repeats: int, limit: int | None) -> int:
    """Return how often `measure_savings` calls `tell`."""
    return num_strategies * (2 + repeats + (limit is not None))


def measure_savings(
    case: Case,
    strategies: Sequence[str] = (),
    *,
    depth: int | None = None,
    repeats: int = 5,
    limit: int | None = None,
    hints: dict[str, int] | None = None,
    tell: Callable[[str], None] = lambda doing: None,
) -> list[Row]:
    """Measure one row for each strategy, `none` first.

    With `limit` in bytes, the largest batch that fits it is searched too. `depth` is only recorded
    in the rows. `hints` holds the largest batches of a case that differs only in its batch size,
    and is updated.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    rows = [
        Row(case.workload.name, name, case.batch_size, depth)
        for name in choose_strategies(strategies)
    ]
    weights = case.build()
    plain = _measure_plain(case, weights)
    models = []
    for row in rows:
        tell(f"{row.strategy}: memory, FLOPs, parity")
        models.append(_measure(row, case, weights, plain))

    _time_in_turns(rows, models, case, repeats, tell)
    for row, model in zip(rows, models, strict=True):
        if limit is not None:
            tell(f"{row.strategy}: largest batch")
            if model is not None and row.outcome in (MEASURED, TOO_LARGE):
                _find_largest(row, case, model, limit, {} if hints is None else hints)
    return rows


def _measure_plain(case: Case, model: nn.Module) -> _Plain | None:
    """Measure the plain step; None if it does not fit into the device."""
    try:
        return _Plain(*_figures(case, model), _held_in_blocks(case, model))
    except (ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            return None
        raise WorkloadError(
            f"{case.workload.name}, batch size {case.batch_size}: a step raised {error}"
        ) from error


def _figures(case: Case, model: nn.Module) -> tuple[StepRecord, Memory, Flops]:
    """Record a step for parity, then measure memory and FLOPs.

    The recorded step comes first, while the model's buffers are still new.
    """
    batch = case.batch()
    loss = case.workload.mean_loss
    with seeded(case.seed):
        record = record_step(model, batch, loss)
    with seeded(case.seed):
        # Compiled code runs as eager code under a dispatch mode, so it is measured without one.
        if holds_compiled_code(model):
            memory = measure_allocated(model, batch, loss)
            return record, memory, count_executed_flops(model, batch, loss)
        return record, measure_memory(model, batch, loss), count_flops(model, batch, loss)


def _held_in_blocks(case: Case, model: nn.Module) -> int:
    """Return the bytes held by the blocks; 0 if the model repeats no block."""
    try:
        blocks = find_blocks(model, case.blocks)
    except NoBlocks:
        return 0
    with seeded(case.seed):
        report = MemoryProfiler(model).profile(
            case.batch(), 1, loss=case.workload.mean_loss, blocks=list(blocks)
        )
    return sum(layer.bytes for layer in report.layers if layer.name in blocks)


def _measure(row: Row, case: Case, weights: nn.Module, plain: _Plain | None) -> nn.Module | None:
    """Fill in all figures but times and largest batch; return None if there is nothing to train."""
    model = case.build()
    for parameter, shared in zip(model.parameters(), weights.parameters(), strict=True):
        parameter.data = shared.data
    applied = None
    try:
        with seeded(case.seed):
            row.modules = _apply(row.strategy, model, case)
        applied = model
        record, memory, flops = _figures(case, model)
        facts = STRATEGIES[row.strategy].facts
        row.facts = {} if facts is None else facts(model)
        row.python_calls = python_calls(
            case, lambda module, small: _apply(row.strategy, module, small)
        )
        blocks_held = None if holds_compiled_code(model) else _held_in_blocks(case, model)
    except ValueError as error:
        row.outcome = REFUSED
        row.why = " ".join(str(error).split())
        return None
    except RuntimeError as error:
        if is_out_of_memory(error):
            row.outcome = TOO_LARGE
            row.why = f"{row.batch_size} samples do not fit into the memory of {case.device}"
            return applied
        row.outcome = FAILED
        row.why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return None

    row.held_bytes = memory.held_bytes
    row.peak_bytes = memory.peak_bytes
    row.forward_flops = flops.forward
    if plain is not None:
        if blocks_held is not None:
            row.blocks_held_ratio = _ratio(blocks_held, plain.blocks_held)
        row.held_ratio = _ratio(memory.held_bytes, plain.memory.held_bytes)
        row.peak_ratio = _ratio(memory.peak_bytes, plain.memory.peak_bytes)
        row.recompute_flops = recompute_flops(plain.flops, flops)
        row.recompute_ratio = _ratio(row.recompute_flops, plain.flops.forward)
        parity = compare(plain.record, record, tolerance=OUTER_BOUND[case.dtype])
        row.worst_error = parity.worst if math.isfinite(parity.worst) else None
        description = parity.describe(most=1)
        row.parity = description if parity.holds else f"differs: {description}"
    return model


def _apply(strategy: str, model: nn.Module, case: Case) -> list[str]:
    return list(STRATEGIES[strategy].apply(model, sample_of(case)))


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _time_in_turns(
    rows: Sequence[Row],
    models: Sequence[nn.Module | None],
    case: Case,
    repeats: int,
    tell: Callable[[str], None],
) -> None:
    """Time rounds of one step per strategy, after one round to warm up.

    Every round begins with another strategy.
    """
    batch = case.batch()
    seconds: list[list[float]] = [[] for _ in rows]
    for turn in range(repeats + 1):
        for place in range(len(rows)):
            index = (place + turn) % len(rows)
            row = rows[index]
            model = models[index]
            tell(f"{row.strategy}: step {turn} of {repeats}")
            if model is not None and row.outcome == MEASURED:
                timed = time_step(model, batch, case.workload.mean_loss, repeats=1, warmup=0)
                seconds[index].append(timed.median)
    for row, taken in zip(rows, (steps[1:] for steps in seconds), strict=True):
        if taken:
            ratios = [step / plain for step, plain in zip(taken, seconds[0][1:], strict=False)]
            lower, middle, upper = _quartiles(ratios) if ratios else (None, None, None)
            row.seconds = StepSeconds(
                statistics.median(taken), min(taken), max(taken), middle, lower, upper
            )


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


def _find_largest(
    row: Row, case: Case, model: nn.Module, limit: int, hints: dict[str, int]
) -> None:
    try:
        row.largest_batch = largest_batch(case, model, limit, hint=hints.get(row.strategy))
    except ValueError as error:
        row.why = str(error)
    else:
        hints[row.strategy] = row.largest_batch
