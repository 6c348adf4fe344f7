"""Gates of selective checkpointing: policies, and regions without a dispatch mode.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..bench.steps import python_calls
from ..core.blocks import find_blocks
from ..core.generators import seeded, untouched
from ..core.measure import forward_flops
from ..primitives import sac
from ..primitives.regions import apply_regions
from ..primitives.sac import PolicyError
from ..primitives.strategies import STRATEGIES, Apply
from ..workloads.workload import Case
from .same_training import (
    changed,
    checkpoint_by_torch,
    flops_again,
    memory_of,
    on_blocks,
    same_training,
    same_without_training,
    sample_of,
    why_torch_reruns_nothing,
)
from .verdict import Gate, NotApplicable, Outcome

# Takes a model, and the names of its blocks.
Change = Callable[..., Any]
# Of the Python function calls that torch's own selective checkpointing adds to a step. A dispatch
# mode costs all of them. Regions without one cost 0.16 of them in a transformer, and up to 0.72 in
# blocks of few operations with many norms.
MOST_CALL_OVERHEAD = 0.9


# The same training.


def compare_policy(case: Case, *, apply_sac: Change = sac.apply_sac) -> Outcome:
    """Compare a training with a policy to the plain one."""
    return _compare(case, on_blocks(apply_sac), "save_expensive")


def compare_count(case: Case, *, apply: Apply = STRATEGIES["sac_every_second"].apply) -> Outcome:
    """Compare a training with a policy that counts products to the plain one."""
    return _compare(case, apply, "every_second_matmul")


def _compare(case: Case, apply: Apply, policy: str) -> Outcome:
    with _where_ours_runs(case, policy):
        return same_training(case, apply, by_torch=why_torch_reruns_nothing, every_block=True)


def compare_regions(case: Case, *, apply: Apply = STRATEGIES["regions"].apply) -> Outcome:
    """Compare a training with regions to the plain one."""

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

    return same_training(case, apply, by_torch=why_nothing_differs)


@contextlib.contextmanager
def _where_ours_runs(case: Case, policy: Any) -> Iterator[None]:
    """Turn an error into `NotApplicable` where our own implementation fails too.

    A block may have no output that this policy could save, or overwrite one in place.
    """
    try:
        yield
    except NotApplicable:
        raise
    except Exception as error:  # the user's model, loss or policy may raise anything
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
        raise NotApplicable(why) from error


# What is recomputed.


def count_recomputed(case: Case, *, apply_sac: Change = sac.apply_sac) -> Outcome:
    """Check that a policy frees bytes, and recomputes less than all that the blocks compute."""
    required = "fewer bytes than plain, fewer FLOPs again than all of the blocks"
    module = case.build()
    blocks = find_blocks(module, case.blocks)
    # Seeded as `count_flops` is: a model may drop layers at random.
    with untouched(module), seeded(0):
        flops = forward_flops(blocks, lambda: case.workload.mean_loss(module, case.batch()))
    most = sum(flops.values())
    if not most:
        raise NotApplicable("the blocks have no matrix product, convolution or attention")
    with _where_ours_runs(case, "save_expensive"):
        plain = _held_bytes(case, _nothing)
        if _held_bytes(case, sac.apply_sac) >= plain:
            raise NotApplicable("our own policy frees nothing in these blocks")
        held = _held_bytes(case, apply_sac) / plain
        again = flops_again(case, changed(case, apply_sac))
    hint = ""
    if again >= most:
        hint = (
            "the policy saves no product, attention or convolution, so the blocks are recomputed "
            "whole: it names operations that never reach the dispatcher, such as aten.linear"
        )
    elif held >= 1:
        hint = "nothing is freed: the policy saves too much, or is not applied"
    measured = f"holds {held:.0%}, {again:,} of {most:,} FLOPs again"
    return measured, required, hint


def _nothing(module: nn.Module, *, blocks: Any) -> None:
    pass


def _held_bytes(case: Case, change: Change) -> int:
    return memory_of(case, change).held_bytes


# Regions.


def measure_regions(case: Case, *, apply: Change = apply_regions) -> Outcome:
    """Check that regions hold fewer bytes, recompute no FLOPs, and cost less than torch's SAC."""
    plain = _held_bytes(case, _nothing)
    if _held_bytes(case, apply_regions) >= plain:
        raise NotApplicable(
            "no tensor in the blocks is cheap to compute from saved tensors, as with Linear and "
            "ReLU, or convolutions"
        )

    held = _held_bytes(case, apply) / plain
    again = flops_again(case, changed(case, apply))
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
    return measured, required, "" if passed else hint


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
    checkpoint_by_torch(module, blocks=blocks, context_fn=contexts)


# Where nothing is trained.


def compare_eval_mode(
    case: Case, *, apply_sac: Change = sac.apply_sac, apply: Change = apply_regions
) -> Outcome:
    """Compare eval mode, and a forward without gradients, with the plain model.

    Ours also saves what the plain model saves in eval mode; torch's checkpoint recomputes in any
    mode, which changes no value.
    """
    is_ours = apply_sac is sac.apply_sac
    changes = {"a policy": apply_sac} | ({"regions": apply} if is_ours else {})
    return same_without_training(case, changes, saved_too=is_ours)


GATES = (
    Gate("sac/parity-sac", compare_policy),
    Gate("sac/parity-every-second", compare_count),
    Gate("sac/parity-regions", compare_regions),
    Gate("sac/products", count_recomputed),
    Gate("sac/regions", measure_regions),
    Gate("sac/off", compare_eval_mode),
)
