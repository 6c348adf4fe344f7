"""What a block keeps under selective recompute: policies by name, by a list of operations, or as torch takes them.

    make_policy("every_second_matmul")
    make_policy(["aten.mm", "aten.addmm"])

Proof: `python -m pytest tests/test_sac_contract.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import operations
from .nearest import did_you_mean
from .operations import Operation


class PolicyError(ValueError):
    """A policy that would not do what it is there for."""


@dataclass(frozen=True)
class Policy:
    """Which outputs a block keeps: those of `save`, of the operations in `alternate` every second one, and those of the
    calls that `calls` names by family and place, such as `("matmul", 0)` for the first matrix product of the block.

    `choose` is a policy as torch takes it, `choose(context, operation, *args, **kwargs)`; the first run alone asks it.
    """

    name: str
    save: frozenset[Operation] = frozenset()
    alternate: frozenset[Operation] = frozenset()
    choose: Callable[..., Any] | None = None
    calls: frozenset[tuple[str, int]] = frozenset()

    def __post_init__(self) -> None:
        for operation in self.save | self.alternate:
            if operations.writes_in_place(operation):
                raise PolicyError(
                    f"{operation} writes in place, and what it wrote to can't be kept: leave it out"
                )

    def __reduce__(self) -> Any:
        """Operations can't be pickled, their names can."""
        named = POLICIES.get(self.name)
        if named == self:
            return make_policy, (self.name,)
        if self.calls:
            return Policy, (self.name, frozenset(), frozenset(), None, self.calls)
        return make_policy, (self.choose or sorted(str(operation) for operation in self.save),)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("save_expensive", operations.EXPENSIVE),
        Policy("save_matmuls", operations.MATMULS),
        Policy("save_attention", operations.ATTENTION),
        Policy("save_matmuls_and_attention", operations.MATMULS | operations.ATTENTION),
        Policy("every_second_matmul", operations.ATTENTION, alternate=operations.MATMULS),
    )
}
FIGURES = (
    "On the built-in transformer keeping all but products and attention holds 144% of what no recompute holds, and "
    "computes 72% of a forward again; 'save_expensive' holds 58%, and computes no product again"
)
BACKWARDS = (
    "recompute_matmuls",
    "save_norms",
    "save_activations",
    "save_pointwise",
)  # seen in the wild


def make_policy(policy: Any) -> Policy:
    """A policy by name, by a list of operations, or a function as torch takes it."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        if policy in BACKWARDS:
            raise PolicyError(
                f"{policy!r} keeps what is cheap to compute, which is the wrong way round. {FIGURES}"
            )
        if policy not in POLICIES:
            raise PolicyError(f"no policy is called {policy!r}; {did_you_mean(policy, POLICIES)}")
        return POLICIES[policy]
    if callable(policy) and not isinstance(policy, Operation):
        return Policy(getattr(policy, "__name__", type(policy).__name__), choose=policy)
    if isinstance(policy, Sequence | set | frozenset) and policy:
        return Policy("the list", operations.find_operations(policy))
    raise PolicyError(f"a policy is a name, a list of operations or a function, got {policy!r}")
