"""Selective activation checkpointing: keep the results of chosen operations in each block.

    apply_sac(model)    # saves the outputs of matrix products, attention and convolutions
    apply_sac(model, "every_second_matmul")
    apply_sac(model, ["aten.mm", "aten.addmm"], blocks="layers.*")

Operations that draw random numbers are always recomputed, from the generator state of their first
run. In torch's own implementation a saved one shifts all random numbers that are drawn after it.

Proof: `python -m pytest tests/primitives/test_sac_contract.py
tests/peers/test_peer_behaviours.py`.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from ..core.blocks import Globs, Unsuitable, become, find_blocks, restore
from .recompute import Checkpointed, RecomputeOptions
from .rerun import Pair

# Classify dispatcher operations: cost, random numbers, writes in place.

Operation = OpOverload | HigherOrderOperator


def writes_in_place(operation: Operation) -> bool:
    """Return whether the operation writes into one of its arguments."""
    return isinstance(operation, OpOverload) and operation._schema.is_mutable


def find_operations(named: Iterable[Any]) -> frozenset[Operation]:
    """Find operations given as overloads, packets, or text (`aten.mm`, `aten.mm.default`)."""
    found: set[Operation] = set()
    for item in named:
        operation = item
        if isinstance(item, str):
            operation = torch.ops
            for name in item.removeprefix("torch.ops.").split("."):
                operation = getattr(operation, name, None)
        if isinstance(operation, OpOverloadPacket):
            # Overloads that write in place are left out, unless all do.
            overloads = [getattr(operation, name) for name in operation.overloads()]
            found.update([one for one in overloads if not writes_in_place(one)] or overloads)
        elif isinstance(operation, Operation):
            found.add(operation)
        else:
            raise ValueError(
                f"an operation is named as torch.ops.aten.mm or 'aten.mm', got {item!r}"
            )
    return frozenset(found)


def _find_overloads(namespace: str, *names: str) -> frozenset[Operation]:
    """Return the overloads of those named operations that this version of torch has."""
    space = getattr(torch.ops, namespace)
    return find_operations(getattr(space, name) for name in names if hasattr(space, name))


MATMULS = _find_overloads(
    "aten", "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"
)
ATTENTION_OPERATIONS = _find_overloads(
    "aten",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
) | _find_overloads("higher_order", "flex_attention")
CONVOLUTIONS = _find_overloads(
    "aten", "convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"
)
COLLECTIVES = _find_overloads(
    "_c10d_functional",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
)

# Autograd treats the outputs of these as new tensors, although they are views.
UNSAFE_SPLITS = _find_overloads("aten", "unsafe_split", "unsafe_split_with_sizes")

# The family of each expensive operation, the same on every device.
FAMILIES = {
    **dict.fromkeys(MATMULS, "matmul"),
    **dict.fromkeys(ATTENTION_OPERATIONS, "attention"),
    **dict.fromkeys(CONVOLUTIONS, "convolution"),
    **dict.fromkeys(COLLECTIVES, "collective"),
}
EXPENSIVE_OPERATIONS = frozenset(FAMILIES)


def draws(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call draws random numbers; attention does so only with dropout."""
    if (
        not isinstance(operation, OpOverload)
        or torch.Tag.nondeterministic_seeded not in operation.tags
    ):
        return False
    names = [argument.name for argument in operation._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return any((kwargs.get("dropout_p"), *args[place : place + 1]))


def is_cheap(operation: Operation) -> bool:
    """Return whether an operation is elementwise, a reduction or a normalization."""
    if not isinstance(operation, OpOverload):
        return False
    kinds = {"pointwise", "reduction"}
    return any(tag.name in kinds for tag in operation.tags) or operation in _NORMALIZATIONS


_NORMALIZATIONS = _find_overloads(
    "aten",
    "native_layer_norm",
    "native_group_norm",
    "_fused_rms_norm",
    "_softmax",
    "_log_softmax",
    "native_batch_norm",
)


# Policies of selective recompute: which outputs of a block are saved.


class PolicyError(Unsuitable):
    """A policy that is unknown or would not save memory as intended."""


@dataclass(frozen=True)
class Policy:
    """Rule for which outputs a block saves under selective recompute."""

    name: str

    # Operations whose outputs are saved.
    save: frozenset[Operation] = frozenset()

    # Operations of which every second output is saved.
    alternate: frozenset[Operation] = frozenset()

    # A policy in torch's form, called in the first run only.
    choose: Callable[..., Any] | None = None

    # Calls whose outputs are saved, by family and index: `("matmul", 0)` is the first matrix
    # product of the block.
    calls: frozenset[tuple[str, int]] = frozenset()

    def __post_init__(self) -> None:
        for operation in self.save | self.alternate:
            if writes_in_place(operation):
                raise PolicyError(
                    f"{operation} writes in place, and a tensor that is written into can't be "
                    "saved: leave it out"
                )

    def __reduce__(self) -> Any:
        """Pickle by the names of the operations, because operations can't be pickled."""
        if POLICIES.get(self.name) == self:
            return make_policy, (self.name,)
        if self.calls:
            return Policy, (self.name, frozenset(), frozenset(), None, self.calls)
        return make_policy, (self.choose or sorted(str(operation) for operation in self.save),)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("save_expensive", EXPENSIVE_OPERATIONS),
        Policy("save_matmuls", MATMULS),
        Policy("save_attention", ATTENTION_OPERATIONS),
        Policy("save_matmuls_and_attention", MATMULS | ATTENTION_OPERATIONS),
        Policy("every_second_matmul", ATTENTION_OPERATIONS, alternate=MATMULS),
    )
}


def make_policy(policy: Any) -> Policy:
    """Make a policy from a name, a list of operations, or a function in torch's form."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise PolicyError(f"no policy is called {policy!r}; there are {', '.join(POLICIES)}")
        return POLICIES[policy]
    if callable(policy) and not isinstance(policy, Operation):
        return Policy(getattr(policy, "__name__", type(policy).__name__), choose=policy)
    if isinstance(policy, Sequence | set | frozenset) and policy:
        return Policy("the list", find_operations(policy))
    raise PolicyError(f"a policy is a name, a list of operations or a function, got {policy!r}")


# Selective activation checkpointing (SAC): a policy chooses which operations to recompute.

READ_VALUE = torch.ops.aten._local_scalar_dense.default
CAST_OPERATION = torch.ops.aten._to_copy.default
# A policy may save this share of the outputs of cheap operations: for a few, such as those of a
# router, there may be a reason.
MOST_CHEAP_SHARE = 1 / 3
SAVE_POLICIES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


@dataclass
class _BlockForward:
    """One forward of one block and the decisions of its policy.

    The recompute repeats the decisions of the first run. Torch before 2.13 calls the policy a
    second time, where a policy that counts its calls would decide differently.
    """

    policy: Policy
    block: str
    kept: defaultdict[Operation, list[bool]] = field(default_factory=lambda: defaultdict(list))
    asked: Counter[Operation] = field(default_factory=Counter)
    calls: Counter[str | None] = field(default_factory=Counter)

    def repeat(self, context: Any, operation: Operation, *args: Any, **kwargs: Any) -> bool:
        self.asked[operation] += 1
        return self.kept[operation][self.asked[operation] - 1]

    def decide(self, context: Any, operation: Operation, *args: Any, **kwargs: Any) -> bool:
        policy = self.policy
        family = FAMILIES.get(operation)
        self.calls[family] += 1
        if (family, self.calls[family] - 1) in policy.calls:
            keep = True
        elif policy.choose is not None:
            answer = policy.choose(context, operation, *args, **kwargs)
            if answer is CheckpointPolicy.MUST_CPU_OFFLOAD:
                raise PolicyError(
                    f"policy {policy.name!r} returns MUST_CPU_OFFLOAD for {operation}, which torch "
                    "silently treats as recompute; use offload_blocks to move activations to the "
                    "CPU"
                )
            if not isinstance(answer, bool | CheckpointPolicy):
                raise PolicyError(
                    f"policy {policy.name!r} must return a CheckpointPolicy or a bool, got "
                    f"{answer!r}"
                )
            keep = answer is True or answer in SAVE_POLICIES
            if keep and writes_in_place(operation):
                raise PolicyError(
                    f"policy {policy.name!r} saves {operation}, which writes in place: leave it out"
                )
        elif operation in policy.alternate:
            keep = self.calls[family] % 2 == 1
        else:
            keep = operation in policy.save
        keep = keep and not draws(operation, args, kwargs)
        self.kept[operation].append(keep)
        return keep

    def check(self) -> None:
        """Refuse, after a run, a policy that saved nothing or only cheap outputs."""
        kept = self.kept
        # A call that skips the block, as in stochastic depth, computes nothing: it runs no
        # operation, or it chose by a value.
        computes = kept and READ_VALUE not in kept
        skips = not computes and EXPENSIVE_OPERATIONS.isdisjoint(kept)
        if not skips and not any(map(any, kept.values())):
            names = {str(operation).removesuffix(".default") for operation in kept}
            raise PolicyError(
                f"policy {self.policy.name!r} saves no output of {self.block}, so the block would "
                "be recomputed whole",
                "use recompute_blocks if that is intended. Its operations are "
                f"{', '.join(sorted(names))}. (Composite ones such as aten.linear never appear "
                "here, and calls that draw random numbers are always recomputed.)",
            )

        for operation in UNSAFE_SPLITS:
            if operation in kept:
                raise PolicyError(
                    f"{self.block} runs {operation}, as nn.GRU does on a CPU, and overwrites the "
                    "outputs, which torch does not detect: a saved output would have another value "
                    "in backward",
                    "use recompute_blocks, or leave the block out",
                )

        cheap = [one for operation, found in kept.items() if is_cheap(operation) for one in found]
        expensive = [
            one
            for operation, found in kept.items()
            if operation in EXPENSIVE_OPERATIONS
            for one in found
        ]
        if expensive and not any(expensive) and sum(cheap) > len(cheap) * MOST_CHEAP_SHARE:
            raise PolicyError(
                f"policy {self.policy.name!r} is the wrong way round for {self.block}: it saves "
                f"{sum(cheap)} outputs of cheap operations, and recomputes all {len(expensive)} "
                "matrix products, convolutions and attentions",
                "use 'save_expensive', which saves those and recomputes the rest",
            )


@functools.cache
def _subclass_mode(kind: Any) -> Any:
    """Subclass torch's dispatch mode for one run of a `_BlockForward`, and leave casts out.

    A run that ends without an error is checked. Autocast casts a weight once and caches it for the
    whole forward, so the two runs may differ in their casts, which are always recomputed. Torch
    drops each saved output that it hands out, so a second backward recomputes all. The compiler
    accepts only dispatch modes here, so this is a subclass and not a context around one.
    """

    class Reported(kind):  # type: ignore[misc]
        forward: _BlockForward
        num_entered = 0

        def __enter__(self) -> Any:
            self.num_entered += 1
            self.forward.asked.clear()
            return super().__enter__()

        def __exit__(self, kind: Any, *raised: Any) -> Any:
            stopped = super().__exit__(kind, *raised)
            if kind is None:
                self.forward.check()
            return stopped

        def __torch_dispatch__(
            self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if operation is CAST_OPERATION or self.num_entered > 1:
                return operation(*args, **(kwargs or {}))
            if operation is torch.ops.aten._unsafe_view.default:
                # Share the version counter, by which torch detects overwritten saved outputs.
                tensor, shape = args
                key = torch._C.DispatchKey.ADInplaceOrView
                with torch._C._SetExcludeDispatchKeyGuard(key, False):
                    return tensor.detach().view(shape).detach()
            return super().__torch_dispatch__(operation, types, args, kwargs)

    return Reported


class Sac(Checkpointed):
    """A block that saves the outputs its policy selects and recomputes the others."""


def apply_sac(
    model: nn.Module,
    policy: Any = "save_expensive",
    *,
    blocks: Globs | None = None,
    allow_cache_entry_mutation: bool = False,
    **options: Any,
) -> list[str]:
    """Apply a policy to the blocks of a model, in place, and return the blocks' names.

    Each block saves the outputs that `policy` selects and recomputes the rest. A policy that saves
    nothing of a block raises an error in the block's first forward. With
    `allow_cache_entry_mutation` nothing checks that saved outputs are not changed in place. The
    other options are those of `Recompute`, except `use_reentrant` and `context_fn`. Call this
    before DDP, `fully_shard` and `torch.compile`.
    """
    chosen = make_policy(policy)
    settings = RecomputeOptions(**options)
    if settings.use_reentrant or settings.context_fn is not noop_context_fn:
        raise PolicyError(
            "reentrant checkpointing does not support policies, and a policy takes the place of "
            "context_fn: leave both out"
        )

    found = find_blocks(model, blocks)
    for name, block in found.items():
        contexts = functools.partial(_make_contexts, chosen, name, allow_cache_entry_mutation)
        become(Sac, block, replace(settings, context_fn=contexts))
    return list(found)


def _make_contexts(policy: Policy, block: str, allow_mutation: bool) -> Pair:
    forward = _BlockForward(policy, block)
    modes: Any = create_selective_checkpoint_contexts(forward.decide, allow_mutation)
    for mode in modes:
        mode.__class__ = _subclass_mode(mode.__class__)
        mode.forward = forward
    first, second = modes
    second.policy_fn = forward.repeat
    return first, second


def remove_sac(model: nn.Module) -> list[str]:
    """Undo `apply_sac` and return the names of the blocks that had a policy."""
    return restore(model, Sac)
