"""A gate of routers that recompute: a disturbed one chooses the same experts again.

It is disturbed between forward and backward. The gate is listed with those of recompute.

Proof: `python -m pytest tests/gates/test_adapters.py`.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ..core.parity import Parity, StepRecord, check_comparable, compare, record
from ..core.rerun import seeded
from ..workloads.workload import Case
from .verdict import Gate, Judged, Takes, Verdict, not_applicable

# A gate of recompute: a router that is disturbed between forward and backward.

Keep = Callable[[nn.Module], Any]
TOP_CHOICE = "topk"
# How far a bias that balances the load moves; scores of a softmax are at most 1.
BUFFER_SHIFT = 1.0


def routing(case: Case, *, keep: Keep | None = None) -> Verdict:
    """Compare a step whose routers are disturbed before backward with the plain one.

    Buffers with a number for each expert move, as a bias that balances the load does, and `topk`
    takes the smallest scores, as another kernel does at a tie. Counters must count forward alone.
    """
    gate = "recompute/routing"
    required = "bit-equal though each router is disturbed before backward"
    # Imported here because steps in backward need no recompute.
    from ..primitives.recompute import recompute_blocks
    from ..primitives.routing import keep_routing

    probe = case.build()
    recompute_blocks(probe, blocks=case.blocks)
    routed = keep_routing(probe)
    if not routed:
        why = "no block that recomputes has a router or experts"
        return not_applicable(gate, required=required, why=why)

    plain, again = (_step(case, case.build()) for _ in range(2))
    check_comparable(plain)
    if not compare(plain, again).bit_equal:
        why = "the plain step does not repeat itself bit for bit"
        return not_applicable(gate, required=required, why=why)
    counts = _expert_counts(case)
    without = _compared(case, plain, routed, counts, keep=None)
    if isinstance(without, Parity) and without.holds:
        why = "the gradients do not depend on what was disturbed: topk, and a bias of its experts"
        return not_applicable(gate, required=required, why=why)

    found = _compared(case, plain, routed, counts, keep=keep or keep_routing)
    hint = ""
    if isinstance(found, str):
        hint = "the recomputed run takes another way: repeat each choice of the first run"
    elif any(one.kind == "buffer" for one in found.differences):
        hint = "a counter of the load moves in the recomputed run too: restore it, or count once"
    elif not found.holds:
        hint = "the recomputed run chooses others: keep what was chosen, and the scores of it"
    described = found if isinstance(found, str) else found.describe()
    measured = f"{described}; {len(routed)} blocks with a router"
    return Verdict(gate, not hint, measured, required, hint)


def _step(
    case: Case, module: nn.Module, disturb: Callable[[], Any] = contextlib.nullcontext
) -> StepRecord:
    with seeded(case.seed):
        loss = case.workload.mean_loss(module, case.batch())
        with disturb():
            loss.backward()
        return record(module, loss.detach())


def _expert_counts(case: Case) -> set[int]:
    """Return among how many experts `topk` chooses in a step."""
    counts = set()

    def noted(choose: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
            counts.add(scores.shape[-1])
            return choose(scores, *args, **kwargs)

        return chosen

    with _replaced_topk(noted):
        _step(case, case.build())
    return counts


def _compared(
    case: Case,
    plain: StepRecord,
    routed: Sequence[str],
    counts: Collection[int],
    *,
    keep: Keep | None,
) -> Parity | str:
    """Compare a disturbed step under recompute with the plain one; an error is a string."""
    from ..primitives.recompute import recompute_blocks

    module = case.build()
    recompute_blocks(module, blocks=case.blocks)
    if keep is not None:
        keep(module)
    blocks = [module.get_submodule(name) for name in routed]
    try:
        return compare(plain, _step(case, module, lambda: _disturbed(blocks, counts)))
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


@contextlib.contextmanager
def _disturbed(blocks: Sequence[nn.Module], counts: Collection[int]) -> Iterator[None]:
    """Move buffers with a number for each expert, and let `topk` take the smallest scores.

    A buffer that nothing else has written gets its value back; another one differs then.
    """
    buffers = {
        buffer
        for block in blocks
        for buffer in block.buffers()
        if buffer.is_floating_point() and buffer.numel() in counts
    }
    values = {buffer: buffer.detach().clone() for buffer in buffers}
    moved = {}
    generator = torch.Generator().manual_seed(0)
    for buffer in buffers:
        shift = torch.rand(buffer.shape, generator=generator) * BUFFER_SHIFT
        buffer.data.add_(shift.to(buffer))
        moved[buffer] = buffer.detach().clone()
    with _replaced_topk(_reversed):
        yield
    for buffer, value in values.items():
        if torch.equal(buffer, moved[buffer]):
            buffer.data.copy_(value)


@contextlib.contextmanager
def _replaced_topk(replaced: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    with (
        mock.patch.object(torch, TOP_CHOICE, replaced(torch.topk)),
        mock.patch.object(Tensor, TOP_CHOICE, replaced(Tensor.topk)),
    ):
        yield


def _reversed(choose: Callable[..., Any]) -> Callable[..., Any]:
    from ..primitives.routing import MOST_EXPERTS

    def chosen(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not scores.is_floating_point() or scores.shape[-1] > MOST_EXPERTS:
            return choose(scores, *args, **kwargs)
        if scores.grad_fn is None:
            return choose(-scores, *args, **kwargs)
        # In place and unseen by autograd, as a kernel computes.
        scores.data.neg_()
        return choose(scores, *args, **kwargs)

    return chosen


ROUTING_JUDGED = (Judged("keep_routing", lambda model: None),)
ROUTING_GATES = (Gate("recompute/routing", routing, {"keep_routing": Takes("keep")}),)
