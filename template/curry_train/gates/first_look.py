"""Look at a model once before its gates: find what several of them would fail on.

    findings = look(case)
    verdict = explain_failure(gate.run(case), findings)

Two steps of the plain model show it: state between calls, noise in eval mode, blocks that no
technique can change. A gate that fails for such a cause is not applicable, and the cause is printed
once. A gate that holds stays held.

Proof: `python -m pytest tests/gates/test_first_look.py`.
"""

import fnmatch
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import keystr, tree_flatten_with_path

from ..core.blocks import blocks_if_any, find_modules
from ..core.generators import seeded
from ..core.measure import buffers_kept
from ..primitives.grad_flow_probe import in_backward
from ..primitives.rerun import TORCH_ATTRIBUTES
from ..primitives.running_blocks import (
    ForwardRecord,
    HooksRefused,
    listed,
    record_forward,
    unusual_blocks,
)
from ..workloads.workload import Case, tensors_at
from .same_training import run_uncompiled
from .verdict import Verdict

# Gates of strategies that measure the model before they change it, which moves its state.
MEASURE_FIRST = (
    "recompute/parity-sequential",
    "recompute/parity-selective",
    "recompute/budget",
    "recompute/offload-*",
    "sac/parity-regions",
)
# Gates that a technique on the blocks decides.
CHANGE_BLOCKS = ("recompute/*", "sac/*", "memory-plan/*", "grad-flow/*")

# Gates that expect one forward, which also runs without gradients, and one backward after it.
DERIVE_INSIDE = (
    "checkpoint-policy/two-ranks",
    "grad-accum/*",
    "recompute/flops",
    "recompute/memory",
    "recompute/off",
    "recompute/offload-*",
    "recompute/two-ranks",
    "recompute/budget",
    "sac/*",
)
# Gates that read storages and lengths, which nested tensors have not.
MEASURE_TENSORS = (
    "grad-flow/*",
    "memory-plan/*",
    "recompute/memory",
    "recompute/budget",
    "recompute/offload-*",
    "recompute/parity-sequential",
    "sac/regions",
)
# Gates that count calls in blocks, of which some may run in backward already.
COUNT_CALLS = ("grad-flow/*", "recompute/flops", "recompute/off", "sac/products", "sac/regions")
# Gates that count the bytes of one step, or take several steps of one module.
HOLD_ONE_STEP = ("memory-plan/*", "recompute/memory", "sac/regions")
# Gates that compare one step of a module with a later one, or with a step of another module.
COMPARE_STEPS = ("grad-accum/*", *MEASURE_FIRST, *HOLD_ONE_STEP)
# Gates that restore what a checkpoint holds.
RESUMED_GATES = ("checkpoint-policy/bitwise", "checkpoint-policy/two-ranks", "loss-spike/*")
# Traits of blocks under which no technique on them has an effect, or none can be applied.
PREVENTING_TRAITS = ("off", "writing", "refused", "checkpointed")


@dataclass(frozen=True)
class FailureCause:
    """A property of a model, and the gates that can't judge a model that has it."""

    # One sentence: what it is, where, and what to do.
    text: str

    # Globs over names of gates.
    gates: tuple[str, ...]

    # A word in what such a gate measured or raised; others failed for another reason.
    symptom: str = ""


def explain_failure(verdict: Verdict, findings: Sequence[FailureCause]) -> Verdict:
    """Return a failed verdict as not applicable, if a finding is its cause."""
    described = f"{verdict.measured} {verdict.hint}".lower()
    for finding in findings if verdict.passed is False else ():
        is_meant = any(fnmatch.fnmatch(verdict.gate, pattern) for pattern in finding.gates)
        if is_meant and finding.symptom in described:
            return replace(verdict, passed=None, measured="not applicable", hint=finding.text)
    return verdict


def look(case: Case) -> tuple[FailureCause, ...]:
    """Run a few forwards and one backward of the plain model, and return what was found."""
    module = case.build()
    with run_uncompiled(module):
        return tuple(_find_causes(case, module))


def _find_causes(case: Case, module: nn.Module) -> Iterator[FailureCause]:
    scripted = [*find_modules(module, torch.jit.ScriptModule)]
    if scripted:
        cause = (
            f"{listed(scripted)}: scripted, so neither hooks nor techniques reach what runs "
            "inside; judge the model before torch.jit.script"
        )
        yield FailureCause(cause, (*CHANGE_BLOCKS, "bench/*", "snn-timesteps/*"))
        return
    with seeded(case.seed):
        unused = case.workload.build()
    if any(map(is_lazy, unused.parameters())):
        yield FailureCause(
            "the model has lazy modules, which can't be built from shapes alone: plan a model "
            "whose layers get their sizes",
            ("memory-plan/*",),
        )
    batch = case.batch()
    if type(module).__name__ == "OptimizedModule":
        yield FailureCause(
            "the model is compiled as a whole, which runs its layers without their hooks: judge it "
            "before torch.compile",
            ("grad-flow/*",),
        )
    if any(tensor.is_nested for _, tensor in tensors_at(batch)):
        yield FailureCause(
            "the batch has nested tensors, whose saved parts can't be counted: judge a model on "
            "padded tensors",
            MEASURE_TENSORS,
        )
    names = list(blocks_if_any(module, case.blocks))
    saves = True
    try:
        record = record_forward(module, batch, case.workload.mean_loss)
        yield from _examine_blocks(record, names)
        names = [name for name in names if name in record.calls]
        saves = any(call.end > call.start for name in names for call in record.calls[name])
    except HooksRefused as refusal:
        yield FailureCause(str(refusal), (*CHANGE_BLOCKS, "snn-timesteps/*"))
    yield from _compare_calls(case, module)
    yield from _examine_step(case, batch, names, saves=saves)


def _examine_blocks(record: ForwardRecord, names: Sequence[str]) -> Iterator[FailureCause]:
    unusual = unusual_blocks(record, names)
    reasons = {
        trait: found
        for trait, found in unusual.items()
        if trait in PREVENTING_TRAITS or trait == "idle"
    }
    prevented = {name for _, blocks in reasons.values() for name in blocks}
    if reasons.keys() - {"idle"} and prevented.issuperset(names):
        yield FailureCause("; ".join(text for text, _ in reasons.values()), CHANGE_BLOCKS)
    elif "writing" in reasons:
        # Other blocks could be judged, but a step with these can't run.
        yield FailureCause(reasons["writing"][0], CHANGE_BLOCKS)
    if record.runs_backward:
        cause = (
            "forward or loss takes derivatives of the model: a backward inside forward, which "
            "selective policies, offload and calls without gradients don't allow, and which "
            "changes what a step holds and computes"
        )
        yield FailureCause(cause, DERIVE_INSIDE)
        yield FailureCause(cause, ("recompute/parity-*",), symptom="nothing ran twice")


def _compare_calls(case: Case, module: nn.Module) -> Iterator[FailureCause]:
    """Compare calls of one module on one batch."""

    def loss_of_call() -> float:
        with buffers_kept(module):
            # Two losses that are not a number don't compare as equal.
            return case.mean_loss(module).nan_to_num(torch.inf, torch.inf).item()

    before = _read_numbers_and_generators(module)
    values = [loss_of_call() for _ in range(2)]
    changing = [
        name
        for name, value in _read_numbers_and_generators(module).items()
        if before.get(name) != value
    ]
    # A counter may act only in each n-th call.
    while changing and len(set(values)) == 1 and len(values) < CALLS_OF_A_COUNTER:
        values.append(loss_of_call())
    if values[-1] != values[0]:
        where = f"{listed(changing)}: " if changing else ""
        yield FailureCause(
            f"{where}state stays in the model between calls: the loss of one batch changes from "
            f"{values[0]:.6g} to {values[-1]:.6g} with the same parameters, buffers and random "
            "numbers, and a resumed run begins with other state; keep it in buffers, or reset it "
            "in each call",
            (*COMPARE_STEPS, *RESUMED_GATES),
        )
    case.mean_loss(module)
    after = loss_of_call()
    if values[-1] == values[0] != after:
        yield FailureCause(
            f"each call changes buffers, and with them the loss of one batch, from {values[0]:.6g} "
            f"to {after:.6g}, so steps of one module can't be compared; judge it without them",
            COMPARE_STEPS,
        )
    yield from _call_in_eval_mode(case, module)


def _call_in_eval_mode(case: Case, module: nn.Module) -> Iterator[FailureCause]:
    """Call the module in eval mode, which may raise."""
    module.eval()
    try:
        with buffers_kept(module):
            case.mean_loss(module)
    except Exception as error:  # noqa: BLE001 the user's model may raise anything
        yield FailureCause(
            f"the model raises {type(error).__name__} in eval mode: {error}; gates that compare "
            "two calls need that mode, in which nothing is random",
            ("*",),
            symptom=str(error).partition("\n")[0].lower(),
        )
    finally:
        module.train()


# Calls after which a number that changes in each is taken for one that changes nothing else.
CALLS_OF_A_COUNTER = 20


def _list_own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what the modules inside keep in plain attributes, by name."""
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute not in TORCH_ATTRIBUTES:
                yield f"{name}.{attribute}".removeprefix("."), value


def _read_numbers_and_generators(module: nn.Module) -> dict[str, Any]:
    """Return numbers and states of generators in plain attributes of the modules, by name."""
    return {
        name: bytes(value.get_state().tolist()) if isinstance(value, torch.Generator) else value
        for name, value in _list_own_attributes(module)
        if isinstance(value, int | float | torch.Generator)
    }


def _examine_step(
    case: Case, batch: Any, names: Sequence[str], *, saves: bool
) -> Iterator[FailureCause]:
    """Find what a step leaves or runs again by itself, and gradients that are not dense."""
    module = case.build()
    again: list[str] = []
    # A block may checkpoint a part of itself.
    for name in names:
        for part in module.get_submodule(name).modules():
            part.register_forward_pre_hook(
                lambda *_, name=name: again.append(name) if in_backward() else None
            )
    before = {id(tensor) for tensor in _list_living_tensors()}
    case.mean_loss(module, batch).backward()
    parameters = [*module.parameters()]
    known = {*parameters, *module.buffers(), *(one.grad for one in parameters)}
    left = dict.fromkeys(
        one for one in _list_living_tensors() if id(one) not in before and one not in known
    )
    if left:
        kept = [
            f"{name}{keystr(path)}"
            for name, value in _list_own_attributes(module)
            for path, one in tree_flatten_with_path(value)[0]
            if isinstance(one, Tensor) and one in left
        ]
        where = listed(kept) or "a closure or a list outside of the modules"
        shape = tuple(next(iter(left)).shape)
        yield FailureCause(
            f"{where}: tensors of a step stay alive after it, {len(left)} from one of shape "
            f"{shape} on, with their graph if they have one, and count in what the next step "
            "holds; let go of them after each step",
            HOLD_ONE_STEP,
        )
    # If no block saves anything in forward, that is another finding.
    if again and saves:
        yield FailureCause(
            f"{listed(sorted({*again}))}: the model recomputes these by itself in backward, which "
            "counts with what a technique on them recomputes; turn that off",
            COUNT_CALLS,
        )
    sparse = [
        name
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and parameter.grad.layout is not torch.strided
    ]
    if sparse:
        yield FailureCause(
            f"{listed(sparse)}: the gradient is sparse, which AdamW does not take and no gate "
            "compares; train with sparse=False, or judge the rest of the model",
            ("*",),
            symptom="sparse",
        )


def _list_living_tensors() -> list[Tensor]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Tensor]
