"""Gates of selective checkpointing: policies, and regions without a dispatch mode.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from ..bench.steps import python_calls
from ..core.blocks import find_blocks, refuse
from ..core.generators import seeded, untouched
from ..core.measure import (
    REST_LAYER,
    FlopCount,
    RunningLayers,
    count_flops,
    measure_memory,
    recompute_flops,
)
from ..core.measure_compiled import holds_compiled_code
from ..core.parity import StepRecord, compare, record_step
from ..primitives import sac
from ..primitives.regions import apply_regions
from ..primitives.sac import PolicyError
from ..primitives.strategies import STRATEGIES, Apply
from ..workloads.workload import Case
from .same_training import (
    bit_difference,
    change_in_place,
    on_blocks,
    same_training,
    sample_of,
    why_torch_reruns_nothing,
)
from .verdict import Gate, NotApplicable, Verdict, not_applicable

# Takes a model, and the names of its blocks.
Change = Callable[..., Any]
# Of the Python function calls that torch's own selective checkpointing adds to a step. A dispatch
# mode costs all of them. Regions without one cost 0.16 of them in a transformer, and up to 0.72 in
# blocks of few operations with many norms.
MOST_CALL_OVERHEAD = 0.9
# Calls of attention in a block, at most.
MOST_ATTENTIONS = 100


# The same training.


def compare_policy(case: Case, *, apply_sac: Change = sac.apply_sac) -> Verdict:
    """Compare a training with a policy to the plain one."""
    return _compare("sac/parity-sac", case, on_blocks(apply_sac), "save_expensive")


def compare_count(case: Case, *, apply: Apply = STRATEGIES["sac_every_second"].apply) -> Verdict:
    """Compare a training with a policy that counts products to the plain one."""
    return _compare("sac/parity-every-second", case, apply, "every_second_matmul")


def _compare(gate: str, case: Case, apply: Apply, policy: str) -> Verdict:
    _check_blocks(case)
    with _where_ours_runs(case, policy):
        return same_training(gate, case, apply, by_torch=why_torch_reruns_nothing, every_block=True)


def compare_regions(case: Case, *, apply: Apply = STRATEGIES["regions"].apply) -> Verdict:
    """Compare a training with regions to the plain one."""
    _check_blocks(case)

    def why_nothing_differs(*found: Any) -> str:
        def change(module: nn.Module, *, blocks: Any) -> None:
            apply(module, sample_of(case))

        # Both draw the same random numbers.
        if _held_bytes(case, change) < _held_bytes(case, _nothing):
            return (
                "the model draws at random which layers run, and those that ran while bytes were "
                "counted hold nothing that regions could free: set the rate of dropped layers to 0"
            )
        return why_torch_reruns_nothing(*found)

    return same_training("sac/parity-regions", case, apply, by_torch=why_nothing_differs)


def _check_blocks(case: Case) -> None:
    """Raise `NotApplicable` if a block of the plain model can't be changed."""
    for name, block in find_blocks(case.build(), case.blocks).items():
        try:
            refuse(block)
        except ValueError as error:
            why = f"{name}: {error}"
            raise NotApplicable(why, required="blocks that can be changed") from error


@contextlib.contextmanager
def _where_ours_runs(case: Case, policy: Any) -> Iterator[None]:
    """Turn an error into `NotApplicable` where our own implementation fails too.

    A block may have no output that this policy could save, or overwrite one in place.
    """
    try:
        yield
    except Exception as error:
        module = case.build()
        sac.apply_sac(module, policy, blocks=case.blocks)
        try:
            with seeded(case.seed), untouched(module):
                case.workload.mean_loss(module, case.batch()).backward()
        except PolicyError as refusal:
            why = refusal.in_short
        except RuntimeError as refusal:
            if "has been mutated" not in str(refusal):
                raise error from refusal
            why = (
                "a block overwrites in place an output that would be saved: recompute it whole, or "
                "write to another tensor"
            )
        else:
            raise
        raise NotApplicable(why, required="an operation to keep") from error


# What is recomputed.


def count_recomputed(case: Case, *, apply_sac: Change = sac.apply_sac) -> Verdict:
    """Compare the recomputed FLOPs with the products that a policy leaves out.

    The policy of another implementation is not known: it has to free bytes, and to recompute less
    than all that the blocks compute.
    """
    gate = "sac/products"
    _check_blocks(case)
    counts = _count_by_call(case)
    if not counts.products:
        why = "the blocks have no matrix product"
        return not_applicable(gate, required="as predicted", why=why)
    if apply_sac is not sac.apply_sac:
        return _check_selection(gate, case, apply_sac, counts)

    first_product = sac.Policy(
        "the first product",
        calls=frozenset({("matmul", 0), *(("attention", n) for n in range(MOST_ATTENTIONS))}),
    )
    required: dict[str, int] = {}
    found: dict[str, int] = {}
    for name, policy, num_flops in (
        ("save_expensive", "save_expensive", 0),
        ("every_second_matmul", "every_second_matmul", counts.left_out(slice(1, None, 2))),
        ("the first product", first_product, counts.left_out(slice(1, None))),
    ):
        required[name] = num_flops
        with _where_ours_runs(case, policy):
            found[name] = _recomputed_flops(case, partial(sac.apply_sac, policy=policy))
    hint = ""
    if found != required:
        hint = "the policy names operations that never run, or counts the second run with the first"
    measured = "; ".join(f"{name} {num:,} of {required[name]:,}" for name, num in found.items())
    return Verdict(gate, not hint, measured, "recomputed FLOPs as the policy predicts", hint)


def _check_selection(gate: str, case: Case, apply_sac: Change, counts: "_Products") -> Verdict:
    required = "fewer bytes than plain, fewer FLOPs again than all of the blocks"
    with _where_ours_runs(case, "save_expensive"):
        plain = _held_bytes(case, _nothing)
        held = _held_bytes(case, apply_sac) / plain
        again = _recomputed_flops(case, apply_sac)
    most = counts.left_out(slice(None)) + counts.attention
    hint = ""
    if again >= most:
        hint = (
            "the policy saves no product, attention or convolution, so the blocks are recomputed "
            "whole: it names operations that never reach the dispatcher, such as aten.linear"
        )
    elif held >= 1 and _held_bytes(case, sac.apply_sac) < plain:
        hint = "nothing is freed: the policy saves too much, or is not applied"
    measured = f"holds {held:.0%}, {again:,} of {most:,} FLOPs again"
    return Verdict(gate, not hint, measured, required, hint)


def _nothing(module: nn.Module, *, blocks: Any) -> None:
    pass


def _changed(case: Case, change: Change) -> nn.Module:
    """Build the model and change its blocks."""
    module = case.build()
    change_in_place(change, module, list(find_blocks(module, case.blocks)))
    return module


def _held_bytes(case: Case, change: Change) -> int:
    module = _changed(case, change)
    return measure_memory(module, case.batch(), case.workload.mean_loss).held_bytes


def _recomputed_flops(case: Case, change: Change) -> int:
    """Count the FLOPs that blocks recompute to their end."""
    loss = case.workload.mean_loss
    plain = count_flops(case.build(), case.batch(), loss)
    with set_checkpoint_early_stop(False):
        return recompute_flops(plain, count_flops(_changed(case, change), case.batch(), loss))


class _Products(TorchDispatchMode):
    """Count the FLOPs of each matrix product in each call of a block, in order."""

    def __init__(self, running: RunningLayers) -> None:
        super().__init__()
        self.running = running
        self.products: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.attention = 0
        self.others = 0  # such as convolutions

    def left_out(self, products: slice) -> int:
        """Sum the FLOPs of these products of each call, and of what is no product or attention."""
        return self.others + sum(sum(flops[products]) for flops in self.products.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with FlopCount() as counted:
            out = func(*args, **(kwargs or {}))
        block = self.running.called
        if block == REST_LAYER:
            return out
        if func in sac.MATMULS:
            self.products[block, self.running.calls[block]].append(counted.flops)
        elif func in sac.ATTENTION_OPERATIONS:
            self.attention += counted.flops
        else:
            self.others += counted.flops
        return out


def _count_by_call(case: Case) -> _Products:
    """Count the FLOPs of the blocks in one plain forward, which draws as `count_flops` does."""
    module = case.build()
    blocks = find_blocks(module, case.blocks)
    with (
        untouched(module),
        seeded(0),
        RunningLayers(module, blocks) as running,
        _Products(running) as counted,
    ):
        case.workload.mean_loss(module, case.batch())
    return counted


# Regions.


def measure_regions(case: Case, *, apply: Change = apply_regions) -> Verdict:
    """Check that regions hold fewer bytes, recompute no FLOPs, and cost less than torch's SAC."""
    gate = "sac/regions"
    _check_blocks(case)
    plain = _held_bytes(case, _nothing)
    if _held_bytes(case, apply_regions) >= plain:
        why = (
            "no tensor in the blocks is cheap to compute from saved tensors, as with Linear and "
            "ReLU, or convolutions"
        )
        return not_applicable(gate, required="fewer bytes", why=why)

    held = _held_bytes(case, apply) / plain
    again = _recomputed_flops(case, apply)
    measured = f"holds {held:.0%}, {again:,} FLOPs again; "
    required = "under 100%, 0 FLOPs"
    passed = held < 1 and again == 0
    try:
        calls = _added_calls(case, torch_sac)
        held_by_sac = _held_bytes(case, torch_sac) / plain
    except (AssertionError, RuntimeError, ValueError, TypeError, LookupError) as error:
        # The second forward of a block may find other inputs than the first.
        measured += f"torch's SAC raises {type(error).__name__} here, so calls are not compared"
    else:
        # No call is added where all layers were dropped.
        share = _added_calls(case, apply) / calls if calls else 0.0
        passed = passed and (0 < share <= MOST_CALL_OVERHEAD or not calls)
        measured += f"{share:.2f} of the Python calls of torch's SAC, which holds {held_by_sac:.0%}"
        required += f", at most {MOST_CALL_OVERHEAD} of the calls"
    hint = "a product runs again, or a dispatch mode is on; if nothing is freed, give also= modules"
    return Verdict(gate, passed, measured, required, "" if passed else hint)


def _added_calls(case: Case, change: Change) -> int:
    """Count the Python calls that a change adds to a step; both steps draw the same numbers."""

    def count(change: Change) -> int:
        with seeded(case.seed):
            return python_calls(case, lambda module, case: change(module, blocks=case.blocks))

    return count(change) - count(_nothing)


def torch_sac(module: nn.Module, *, blocks: Any = None) -> None:
    """Apply torch's own selective checkpointing of the same operations, as a reference."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = operation in sac.MATMULS or operation in sac.ATTENTION_OPERATIONS
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for block in find_blocks(module, blocks).values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


# Where nothing is trained.


def compare_eval_mode(
    case: Case, *, apply_sac: Change = sac.apply_sac, apply: Change = apply_regions
) -> Verdict:
    """Compare eval mode, and a forward without gradients, with the plain model.

    Compared are loss, gradients, buffers and generators. Ours also saves what the plain model
    saves in eval mode; torch's checkpoint recomputes in any mode, which changes no value.
    """
    gate = "sac/off"
    required = "as the plain model, to the bit"
    _check_blocks(case)
    try:
        plain = _without_training(case, _nothing)
        differs = _difference(plain, _without_training(case, _nothing))
    except Exception as error:  # noqa: BLE001 - a model may raise anything
        reason = str(error).partition("\n")[0]
        why = f"the plain model raises {type(error).__name__} in eval mode: {reason}"
        return not_applicable(gate, required=required, why=why)
    if differs:
        why = f"two steps of the plain model in eval mode differ: {differs}"
        return not_applicable(gate, required=required, why=why)

    is_ours = apply_sac is sac.apply_sac
    changes = {"a policy": apply_sac} | ({"regions": apply} if is_ours else {})
    found = {
        name: _difference(plain, _without_training(case, change), saved_too=is_ours)
        for name, change in changes.items()
    }
    differing = [f"{name}: {what}" for name, what in found.items() if what]
    hint = "be active only while module.training and torch.is_grad_enabled()" if differing else ""
    measured = "; ".join(differing) or f"{' and '.join(changes)}: nothing differs"
    return Verdict(gate, not hint, measured, required, hint)


@dataclass(frozen=True)
class _Idle:
    """A step in eval mode, the sizes of what it saves, and a loss in training without gradients."""

    step: StepRecord
    saved: list[int]
    loss: Tensor


def _without_training(case: Case, change: Change) -> _Idle:
    module = _changed(case, change)
    batch = case.batch()
    loss = case.workload.mean_loss
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with contextlib.ExitStack() as stack:
        if holds_compiled_code(module):
            # Compiled code does not reach the hooks, and fails to trace them.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        with seeded(case.seed), saved_tensors_hooks(pack, lambda tensor: tensor):
            step = record_step(module.eval(), batch, loss)
        with seeded(case.seed), torch.no_grad():
            return _Idle(step, saved, loss(module.train(), batch))


def _difference(plain: _Idle, other: _Idle, *, saved_too: bool = True) -> str:
    found = compare(plain.step, other.step)
    if not found.bit_equal:
        return f"in eval mode {found.describe(most=1)}"
    if saved_too and plain.saved != other.saved:
        return "saves other tensors in eval mode"
    return bit_difference(other.loss, plain.loss) and "another loss without gradients"


GATES = (
    Gate("sac/parity-sac", compare_policy),
    Gate("sac/parity-every-second", compare_count),
    Gate("sac/parity-regions", compare_regions),
    Gate("sac/products", count_recomputed),
    Gate("sac/regions", measure_regions),
    Gate("sac/off", compare_eval_mode),
)
