"""Gates of selective checkpointing: policies, and regions.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from ..core.measure import untouched
from ..primitives import sac
from ..primitives.regions import apply_regions
from ..primitives.sac import PolicyError
from ..primitives.strategies import STRATEGIES, Apply
from ..workloads.workload import Case
from .same_training import (
    PLAIN,
    Change,
    build_changed,
    flops_again,
    flops_of_blocks,
    memory_of,
    on_blocks,
    same_training,
    same_without_training,
)
from .verdict import Gate, NotApplicable, Outcome

REGIONS = STRATEGIES["regions"].apply

# The same training.


def compare_policy(case: Case, *, apply_sac: Change = sac.apply_sac) -> Outcome:
    """Compare a training with a policy to the plain one."""
    return compare_strategy(case, apply=on_blocks(apply_sac), policy="save_expensive")


def compare_strategy(case: Case, *, apply: Apply, policy: str) -> Outcome:
    """Compare a training with a strategy that applies a policy to the plain one."""
    with _require_ours_to_run(case, policy):
        return same_training(case, apply, every_block=True)


@contextlib.contextmanager
def _require_ours_to_run(case: Case, policy: Any) -> Iterator[None]:
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
            # Buffers that were restored before backward would count as changed in place.
            with untouched(module):
                case.mean_loss(module).backward()
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
    most = flops_of_blocks(case)
    with _require_ours_to_run(case, "save_expensive"):
        why = "our own policy frees nothing in these blocks"
        held, again = _measure_held_and_flops(case, apply_sac, ours=sac.apply_sac, why=why)
    hint = ""
    if again >= most:
        hint = (
            "the policy saves no product, attention or convolution, so the blocks are recomputed "
            "whole: it names operations that never reach the dispatcher, such as aten.linear"
        )
    elif held >= 1:
        hint = "nothing is freed: the policy saves too much, or is not applied"
    return f"holds {held:.0%}, {again:,} of {most:,} FLOPs again", required, hint


def _measure_held_and_flops(
    case: Case, change: Change, *, ours: Change, why: str
) -> tuple[float, int]:
    """Return the share of the plain held bytes, and the FLOPs of a step that are spent again.

    Where ours frees nothing, raise `NotApplicable` with the reason.
    """
    apply = on_blocks(change)
    plain = memory_of(case, PLAIN).held_bytes
    if memory_of(case, on_blocks(ours)).held_bytes >= plain:
        raise NotApplicable(why)
    again, _ = flops_again(case, build_changed(case, apply))
    return memory_of(case, apply).held_bytes / plain, again


# Regions.


def measure_regions(case: Case, *, apply: Change = apply_regions) -> Outcome:
    """Check that regions hold fewer bytes, and recompute no FLOPs."""
    why = (
        "no tensor in the blocks is cheap to compute from saved tensors, as with Linear and ReLU, "
        "or convolutions"
    )
    held, again = _measure_held_and_flops(case, apply, ours=apply_regions, why=why)
    hint = "a product runs again; if nothing is freed, give also= modules"
    measured = f"holds {held:.0%}, {again:,} FLOPs again"
    return measured, "under 100%, 0 FLOPs", "" if held < 1 and again == 0 else hint


# Where nothing is trained.


def compare_eval_mode(
    case: Case, *, apply_sac: Change = sac.apply_sac, apply: Change = apply_regions
) -> Outcome:
    """Compare eval mode, and a forward without gradients, with the plain model.

    A policy of the user's is compared alone. It may recompute in any mode, as torch's checkpoint
    does, which changes no value.
    """
    regions = {"regions": apply} if apply_sac is sac.apply_sac else {}
    return same_without_training(case, {"a policy": apply_sac, **regions})


GATES = (
    Gate("sac/parity-sac", compare_policy),
    Gate(
        "sac/parity-every-second",
        # A policy that counts products.
        partial(
            compare_strategy,
            apply=STRATEGIES["sac_every_second"].apply,
            policy="every_second_matmul",
        ),
    ),
    Gate(
        "sac/parity-regions",
        # Other layers may have run while bytes were counted.
        partial(
            same_training, apply=REGIONS, known=(REGIONS, "our own regions change nothing here")
        ),
    ),
    Gate("sac/products", count_recomputed),
    Gate("sac/regions", measure_regions),
    Gate("sac/off", compare_eval_mode),
)
