"""Selective recompute keeps what its policy says, trains the same model, and refuses a policy that would not help.

Each gate takes the technique as an argument, so that its tests can plant a wrong one. Proof:
`python -m pytest tests/test_sac.py`.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from ..core import operations
from ..core.blocks import find_blocks
from ..core.layers import REST, RunningLayers
from ..core.measure import FlopCount, count_flops, measure_memory, recompute_flops
from ..core.python_calls import python_calls
from ..core.untouched import seeded, untouched
from ..core.verdict import Gate, NotApplicable, Verdict, not_applicable
from ..core.workload import Case
from ..plan.same_training import same_training
from ..plan.strategies import STRATEGIES
from ..plan.strategy import Apply
from ..primitives.regions import apply_regions, report_regions
from ..primitives.sac import PolicyError, apply_sac

OVERHEAD = (
    0.4  # of what torch's own selective checkpointing adds to a step, in calls of Python functions
)
Policies = Callable[..., list[str]]  # of a model, a policy, and the blocks to have it


def parity(case: Case, *, strategy: str, apply: Apply | None = None) -> Verdict:
    """One step with and without: loss, gradients, buffers and generators."""
    gate = f"sac/parity-{strategy.removeprefix('sac_').replace('_', '-')}"
    with _where_outputs_can_be_kept():
        return same_training(gate, case, apply or STRATEGIES[strategy].apply, by_block=True)


def products(case: Case, *, apply: Policies = apply_sac) -> Verdict:
    """What backward computes again is what the policy does not keep: no product at all, or every second one."""
    gate, loss, batch = "sac/products", case.workload.mean_loss, case.batch()
    plain = case.build()
    per_call, others = _flops_by_call(case)
    if not per_call:
        return not_applicable(
            gate, required="as predicted", why="the blocks have no matrix product"
        )
    before = count_flops(plain, batch, loss)
    every_second = others + sum(sum(flops[1::2]) for flops in per_call)
    found = {}
    for policy, expected in (("save_expensive", 0), ("every_second_matmul", every_second)):
        module = case.build()
        apply(module, policy, blocks=case.blocks)
        with seeded(case.seed), set_checkpoint_early_stop(False), _where_outputs_can_be_kept():
            found[policy] = recompute_flops(before, count_flops(module, batch, loss)), expected
    held = all(again == expected for again, expected in found.values())
    measured = "; ".join(
        f"{policy} {again:,} of {expected:,}" for policy, (again, expected) in found.items()
    )
    hint = (
        ""
        if held
        else "the policy names operations that never run, or counts the second run with the first"
    )
    return Verdict(gate, held, measured, "FLOPs again as predicted from the policy", hint)


def regions(case: Case, *, apply: Callable[..., Any] = apply_regions) -> Verdict:
    """Fewer bytes held, no FLOP again, and a fraction of the overhead of torch's own selective checkpointing."""
    gate, loss, batch = "sac/regions", case.workload.mean_loss, case.batch()
    plain, module, selective = case.build(), case.build(), case.build()
    before = measure_memory(plain, batch, loss)
    apply_regions(module, blocks=case.blocks)
    report = report_regions(module, batch, loss)
    if measure_memory(module, batch, loss).held_bytes >= before.held_bytes:
        why = "nothing in the blocks follows cheaply from what is kept, as with Linear and ReLU, or convolutions"
        return not_applicable(gate, required="fewer bytes", why=why)
    module = case.build()
    apply(module, blocks=case.blocks)
    held = measure_memory(module, batch, loss).held_bytes / before.held_bytes
    again = recompute_flops(count_flops(plain, batch, loss), count_flops(module, batch, loss))
    torch_sac(selective, case)
    with _where_outputs_can_be_kept():
        theirs = measure_memory(selective, batch, loss).held_bytes / before.held_bytes
    with _where_outputs_can_be_kept():
        ours, added = (
            python_calls(case, changed) for changed in (partial(_apply, apply), torch_sac)
        )
    bare = python_calls(case, lambda module, case: None)
    share = (ours - bare) / (added - bare)
    good = held < 1 and again == 0 and 0 < share <= OVERHEAD
    missed = sum(row.nbytes for row in report.unreached)
    measured = (
        f"holds {held:.0%} (torch's SAC {theirs:.0%}), {again:,} FLOPs again, {share:.2f} of its Python calls; "
        f"{missed / 2**20:.1f} MiB not reached"
    )
    hint = (
        ""
        if good
        else "a product runs again, nothing is freed, or a dispatch mode is on: see report_regions"
    )
    return Verdict(
        gate, good, measured, f"under 100%, 0 FLOPs, at most {OVERHEAD} of the calls", hint
    )


def refusals(case: Case, *, apply: Policies = apply_sac) -> Verdict:
    """A policy that keeps nothing, one that is the wrong way round, and one that means offload are errors."""
    gate, refused = "sac/refused", []
    if not product_flops(case):
        return not_applicable(gate, required="3 of 3", why="the blocks have no matrix product")
    wrong = {
        "matches nothing": ["aten.linear", "aten.scaled_dot_product_attention"],
        "keeps cheap operations alone": _keep_cheap,
        "MUST_CPU_OFFLOAD": lambda context, operation, *args, **kwargs: (
            CheckpointPolicy.MUST_CPU_OFFLOAD
        ),
    }
    for name, policy in wrong.items():
        module = case.build()
        try:
            apply(module, policy, blocks=case.blocks)
            with untouched(module):
                case.workload.mean_loss(module, case.batch())
        except ValueError:
            refused.append(name)
    taken = [name for name in wrong if name not in refused]
    hint = f"takes a policy that {', '.join(taken)}, and silently recomputes" if taken else ""
    return Verdict(gate, not taken, f"{len(refused)} of 3 refused", "3 of 3", hint)


GATES = (
    Gate("sac/parity-sac", partial(parity, strategy="sac")),
    Gate("sac/parity-every-second", partial(parity, strategy="sac_every_second")),
    Gate("sac/parity-regions", partial(parity, strategy="regions")),
    Gate("sac/products", products),
    Gate("sac/regions", regions),
    Gate("sac/refused", refusals),
)


def _keep_cheap(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    keepable = not operations.writes_in_place(operation)
    return keepable and operations.is_cheap(operation) and operation not in operations.EXPENSIVE


@contextlib.contextmanager
def _where_outputs_can_be_kept() -> Iterator[None]:
    """Blocks that have none to keep, or write over them, are no matter of a policy."""
    try:
        yield
    except PolicyError as error:
        raise NotApplicable(str(error).split(";")[0], required="an operation to keep") from error
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        raise NotApplicable(
            "a block writes in place over an output that would be kept: recompute it whole, or write to another tensor",
            required="an operation to keep",
        ) from error


def _apply(apply: Callable[..., Any], module: nn.Module, case: Case) -> None:
    apply(module, blocks=case.blocks)


class _Products(TorchDispatchMode):
    """FLOPs of each matrix product in the order in which they run, by call of a block."""

    def __init__(self, running: RunningLayers) -> None:
        super().__init__()
        self.running = running
        self.flops: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.others = 0  # of what is neither a product nor attention, such as convolutions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with FlopCount() as counted:
            out = func(*args, **(kwargs or {}))
        block = self.running.current
        if func in operations.MATMULS and block != REST:
            self.flops[block, self.running.calls[block]].append(counted.flops)
        elif func not in operations.ATTENTION and block != REST:
            self.others += counted.flops
        return out


def product_flops(case: Case) -> list[list[int]]:
    """FLOPs of the matrix products of each call of a block in one plain forward."""
    return _flops_by_call(case)[0]


def _flops_by_call(case: Case) -> tuple[list[list[int]], int]:
    """Those, and the FLOPs of all calls that are neither products nor attention."""
    module = case.build()
    blocks = find_blocks(module, case.blocks)
    with (
        untouched(module),
        seeded(0),
        RunningLayers(module, blocks) as running,
        _Products(running) as counted,
    ):
        case.workload.mean_loss(module, case.batch())
    return list(counted.flops.values()), counted.others


def torch_sac(module: nn.Module, case: Case) -> None:
    """Torch's own selective checkpointing of the same operations: what regions are held against."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operation in operations.MATMULS or operation in operations.ATTENTION
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for block in find_blocks(module, case.blocks).values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
