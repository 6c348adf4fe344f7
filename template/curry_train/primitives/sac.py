"""Selective recompute by operation: in each block some operations keep their outputs, the others are computed again.

    apply_sac(model)                                   # matrix products, attention, convolutions are kept
    apply_sac(model, "every_second_matmul")
    apply_sac(model, ["aten.mm", "aten.addmm"], blocks="layers.*")

Calls that draw random numbers are always computed again, from the generator's state of the first time; torch lets a
kept one shift all that are drawn after it. Proof: `python -m pytest tests/test_sac.py`.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..core import operations
from ..core.blocks import find_blocks
from ..core.checkpointed import Options, Pair, run_checkpointed
from ..core.derive import Derived, become, restore
from ..core.operations import Operation
from ..core.policies import FIGURES, POLICIES, Policy, PolicyError, make_policy

__all__ = [
    "FIGURES",
    "POLICIES",
    "Policy",
    "PolicyError",
    "Sac",
    "apply_sac",
    "make_policy",
    "remove_sac",
]

OPTIONS, CONTEXTS = "_sac", "_sac_contexts"
CAST = torch.ops.aten._to_copy.default
MANY = (
    1 / 3
)  # of the outputs of cheap operations; a few, such as those of a router, may have a reason
KEPT = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


@dataclass
class _Run:
    """One forward of one block. What is decided in it holds when the block is computed again: torch before 2.13 asks a
    second time, and a policy that counts would answer otherwise."""

    policy: Policy
    block: str
    kept: defaultdict[Operation, list[bool]] = field(default_factory=lambda: defaultdict(list))
    asked: Counter[Operation] = field(default_factory=Counter)
    replays: bool = False
    calls: Counter[str | None] = field(default_factory=Counter)

    def contexts(self) -> Pair:
        first, second = create_selective_checkpoint_contexts(self.decide)
        kinds: list[Any] = [type(first), type(second)]
        first.__class__, second.__class__ = map(_told, kinds)
        first.at_exit, second.at_entry = self.check, self.replay
        return first, second

    def decide(self, context: Any, operation: Operation, *args: Any, **kwargs: Any) -> bool:
        if self.replays:
            self.asked[operation] += 1
            return self.kept[operation][self.asked[operation] - 1]
        keep = self._wants(context, operation, args, kwargs) and not operations.draws(
            operation, args, kwargs
        )
        self.kept[operation].append(keep)
        return keep

    def _wants(
        self, context: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        policy, family = self.policy, operations.family_of(operation)
        self.calls[family] += 1
        if (family, self.calls[family] - 1) in policy.calls:
            return True
        if policy.choose is not None:
            return _as_bool(policy, policy.choose(context, operation, *args, **kwargs), operation)
        return (
            self.calls[family] % 2 == 1
            if operation in policy.alternate
            else operation in policy.save
        )

    def replay(self) -> None:
        self.replays = True
        self.asked.clear()

    def check(self) -> None:
        """After the first run: a policy that kept nothing, or only what is cheap, is a mistake."""
        kept = [operation for operation, choices in self.kept.items() if any(choices)]
        if not kept:
            seen = ", ".join(
                sorted({str(operation).removesuffix(".default") for operation in self.kept})
            )
            raise PolicyError(
                f"policy {self.policy.name!r} keeps no output of {self.block}, so the block would be recomputed whole; "
                f"use recompute_blocks if that is meant. Its operations are {seen}. (Composite ones such as "
                "aten.linear never appear here, and calls that draw random numbers are always computed again.)"
            )
        for operation in operations.SPLITS:
            if operation in self.kept:
                raise PolicyError(
                    f"{self.block} runs {operation}, as nn.GRU does on a CPU, and writes over its parts, which torch "
                    "does not see: a kept output would be another in backward; use recompute_blocks, or leave it out"
                )
        cheap = {
            operation: choices
            for operation, choices in self.kept.items()
            if operations.is_cheap(operation)
        }
        outputs, most = sum(map(sum, cheap.values())), sum(map(len, cheap.values())) * MANY
        expensive = sum(
            len(self.kept[operation]) for operation in self.kept.keys() & operations.EXPENSIVE
        )
        if expensive and not operations.EXPENSIVE & set(kept) and outputs > most:
            raise PolicyError(
                f"policy {self.policy.name!r} is the wrong way round for {self.block}: it keeps {outputs} outputs of "
                f"cheap operations, and computes all {expensive} matrix products, convolutions and attentions again. "
                f"{FIGURES}"
            )


def _as_bool(policy: Policy, answer: Any, operation: Operation) -> bool:
    """What a policy of torch's kind says of an operation."""
    if answer is CheckpointPolicy.MUST_CPU_OFFLOAD:
        raise PolicyError(
            f"policy {policy.name!r} says MUST_CPU_OFFLOAD for {operation}, which torch takes for recompute without a "
            "word; offload_blocks moves activations to the CPU"
        )
    if not isinstance(answer, bool | CheckpointPolicy):
        raise PolicyError(
            f"policy {policy.name!r} must answer with a CheckpointPolicy or a bool, got {answer!r}"
        )
    keep = answer if isinstance(answer, bool) else answer in KEPT
    if keep and operations.writes_in_place(operation):
        raise PolicyError(
            f"policy {policy.name!r} keeps {operation}, which writes in place: leave it out"
        )
    return keep


@functools.cache
def _told(kind: Any) -> Any:
    """Torch's dispatch mode, which says when it is entered, and when it is left without an error, and lets casts pass.

    Autocast casts a weight once and remembers it for the whole forward, so the second run of a block may meet more
    casts than the first, or fewer; a cast is always done again. The compiler takes dispatch modes alone, so this is a
    subclass and no context around one.
    """

    class Told(kind):  # type: ignore[misc]
        at_entry: Callable[[], None] | None = None
        at_exit: Callable[[], None] | None = None

        def __enter__(self) -> Any:
            if self.at_entry is not None:
                self.at_entry()
            return super().__enter__()

        def __exit__(self, kind: Any, *raised: Any) -> Any:
            stopped = super().__exit__(kind, *raised)
            if kind is None and self.at_exit is not None:
                self.at_exit()
            return stopped

        def __torch_dispatch__(
            self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if operation is CAST:
                return operation(*args, **(kwargs or {}))
            return super().__torch_dispatch__(operation, types, args, kwargs)

    return Told


class Sac(Derived):
    """A block that keeps what its policy says; in eval mode and without grad mode it is the bare block."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        own = self.__dict__
        return run_checkpointed(
            super().forward,
            args,
            kwargs,
            modules=[self],
            options=own[OPTIONS],
            contexts=own[CONTEXTS],
        )


def apply_sac(
    model: nn.Module,
    policy: Any = "save_expensive",
    *,
    blocks: str | Sequence[str] | None = None,
    **options: Any,
) -> list[str]:
    """Make the blocks of a model keep what `policy` says and compute the rest again, in place; return their names.

    Before DDP, `fully_shard` and `torch.compile`. A policy that keeps nothing of a block is an error of its first
    forward. Options are those of `Recompute`, but reentrant checkpointing knows no policies.
    """
    chosen, settings = make_policy(policy), Options(**options)
    if settings.use_reentrant:
        raise PolicyError("reentrant checkpointing knows no policies: leave use_reentrant at False")
    found = find_blocks(model, blocks)
    for name, block in found.items():
        become(
            Sac, block, **{OPTIONS: settings, CONTEXTS: functools.partial(_contexts, chosen, name)}
        )
    return list(found)


def _contexts(policy: Policy, block: str) -> Pair:
    return _Run(policy, block).contexts()


def remove_sac(model: nn.Module) -> list[str]:
    """Undo `apply_sac`, and return the names of the blocks that had a policy."""
    names = [name for name, module in model.named_modules() if isinstance(module, Sac)]
    for name in names:
        restore(model.get_submodule(name), OPTIONS, CONTEXTS)
    return names
