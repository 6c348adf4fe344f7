"""Selective activation checkpointing (SAC): a policy chooses which operations to recompute.

    apply_sac(model)    # saves the outputs of matrix products, attention and convolutions
    apply_sac(model, "every_second_matmul")
    apply_sac(model, ["aten.mm", "aten.addmm"], blocks="layers.*")

Operations that draw random numbers are always recomputed, from the generator state of their first
run. In torch's own implementation a saved random operation shifts all random numbers drawn after
it.

Proof: `python -m pytest tests/test_sac.py`.
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

OPTIONS = "_sac"
CONTEXTS = "_sac_contexts"
CAST = torch.ops.aten._to_copy.default
# A policy may save this share of the outputs of cheap operations: for a few, such as those of a
# router, there may be a reason.
MANY = 1 / 3
KEPT = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


@dataclass
class _Run:
    """One forward of one block and the decisions of its policy.

    The recompute repeats the decisions of the first run. Torch before 2.13 calls the policy a
    second time, where a policy that counts its calls would decide differently.
    """

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
        first.at_exit = self.check
        second.at_entry = self.replay
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
        policy = self.policy
        family = operations.family_of(operation)
        self.calls[family] += 1
        if (family, self.calls[family] - 1) in policy.calls:
            return True
        if policy.choose is not None:
            return _as_bool(policy, policy.choose(context, operation, *args, **kwargs), operation)
        if operation in policy.alternate:
            return self.calls[family] % 2 == 1
        return operation in policy.save

    def replay(self) -> None:
        self.replays = True
        self.asked.clear()

    def check(self) -> None:
        """Refuse, after the first run, a policy that saved nothing or only cheap outputs."""
        saved = [operation for operation, choices in self.kept.items() if any(choices)]
        if not saved:
            names = {str(operation).removesuffix(".default") for operation in self.kept}
            raise PolicyError(
                f"policy {self.policy.name!r} saves no output of {self.block}, so the block would "
                "be recomputed whole; use recompute_blocks if that is intended. Its operations are "
                f"{', '.join(sorted(names))}. (Composite ones such as aten.linear never appear "
                "here, and calls that draw random numbers are always recomputed.)"
            )

        for operation in operations.SPLITS:
            if operation in self.kept:
                raise PolicyError(
                    f"{self.block} runs {operation}, as nn.GRU does on a CPU, and overwrites the "
                    "outputs, which torch does not detect: a saved output would have another value "
                    "in backward; use recompute_blocks, or leave the block out"
                )

        cheap = {
            operation: choices
            for operation, choices in self.kept.items()
            if operations.is_cheap(operation)
        }
        num_saved_cheap = sum(map(sum, cheap.values()))
        most_saved_cheap = sum(map(len, cheap.values())) * MANY
        num_expensive = sum(
            len(self.kept[operation]) for operation in self.kept.keys() & operations.EXPENSIVE
        )
        saves_expensive = bool(operations.EXPENSIVE & set(saved))
        if num_expensive and not saves_expensive and num_saved_cheap > most_saved_cheap:
            raise PolicyError(
                f"policy {self.policy.name!r} is the wrong way round for {self.block}: it saves "
                f"{num_saved_cheap} outputs of cheap operations, and recomputes all "
                f"{num_expensive} matrix products, convolutions and attentions. {FIGURES}"
            )


def _as_bool(policy: Policy, answer: Any, operation: Operation) -> bool:
    """Convert the answer of a torch policy for an operation into True for save."""
    if answer is CheckpointPolicy.MUST_CPU_OFFLOAD:
        raise PolicyError(
            f"policy {policy.name!r} returns MUST_CPU_OFFLOAD for {operation}, which torch "
            "silently treats as recompute; use offload_blocks to move activations to the CPU"
        )
    if not isinstance(answer, bool | CheckpointPolicy):
        raise PolicyError(
            f"policy {policy.name!r} must return a CheckpointPolicy or a bool, got {answer!r}"
        )
    keep = answer if isinstance(answer, bool) else answer in KEPT
    if keep and operations.writes_in_place(operation):
        raise PolicyError(
            f"policy {policy.name!r} saves {operation}, which writes in place: leave it out"
        )
    return keep


@functools.cache
def _told(kind: Any) -> Any:
    """Subclass torch's dispatch mode with callbacks at entry and exit, and leave casts out.

    The exit callback runs only without an error. Autocast casts a weight once and caches it for the
    whole forward, so the recompute of a block may run more or fewer casts than the first run;
    therefore a cast is always recomputed. The compiler accepts only dispatch modes here, so this is
    a subclass and not a context around one.
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
    """A block that saves the outputs its policy selects and recomputes the others.

    In eval mode and without grad mode it behaves as the original block.
    """

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
    """Apply a policy to the blocks of a model, in place, and return the blocks' names.

    Each block saves the outputs that `policy` selects and recomputes the rest. A policy that saves
    nothing of a block raises an error in the block's first forward. The options are those of
    `Recompute`, except that reentrant checkpointing does not support policies. Call this before
    DDP, `fully_shard` and `torch.compile`.
    """
    chosen = make_policy(policy)
    settings = Options(**options)
    if settings.use_reentrant:
        raise PolicyError(
            "reentrant checkpointing does not support policies: leave use_reentrant at False"
        )

    found = find_blocks(model, blocks)
    for name, block in found.items():
        contexts = functools.partial(_contexts, chosen, name)
        become(Sac, block, **{OPTIONS: settings, CONTEXTS: contexts})
    return list(found)


def _contexts(policy: Policy, block: str) -> Pair:
    return _Run(policy, block).contexts()


def remove_sac(model: nn.Module) -> list[str]:
    """Undo `apply_sac` and return the names of the blocks that had a policy."""
    names = [name for name, module in model.named_modules() if isinstance(module, Sac)]
    for name in names:
        restore(model.get_submodule(name), OPTIONS, CONTEXTS)
    return names
