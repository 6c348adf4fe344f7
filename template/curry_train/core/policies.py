"""Policies of selective recompute: which outputs of a block are saved.

A policy is given by name, by a list of operations, or as a function in torch's form.

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
    """A policy that is unknown or would not save memory as intended."""


@dataclass(frozen=True)
class Policy:
    """Rule for which outputs a block saves under selective recompute."""

    name: str

    # Operations whose outputs are saved.
    save: frozenset[Operation] = frozenset()

    # Operations of which every second output is saved.
    alternate: frozenset[Operation] = frozenset()

    # A policy in torch's form, `choose(context, operation, *args, **kwargs)`. It is called in the
    # first run only.
    choose: Callable[..., Any] | None = None

    # Calls whose outputs are saved, by family and index: `("matmul", 0)` is the first matrix
    # product of the block.
    calls: frozenset[tuple[str, int]] = frozenset()

    def __post_init__(self) -> None:
        for operation in self.save | self.alternate:
            if operations.writes_in_place(operation):
                raise PolicyError(
                    f"{operation} writes in place, and a tensor that is written into can't be "
                    "saved: leave it out"
                )

    def __reduce__(self) -> Any:
        """Pickle by the names of the operations, because operations can't be pickled."""
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
    "On the built-in transformer keeping all but products and attention holds 144% of what no "
    "recompute holds, and recomputes 72% of a forward; 'save_expensive' holds 58%, and recomputes "
    "no product"
)

# Names of policies that people have written which save the cheap operations.
BACKWARDS = (
    "recompute_matmuls",
    "save_norms",
    "save_activations",
    "save_pointwise",
)


def make_policy(policy: Any) -> Policy:
    """Make a policy from a name, a list of operations, or a function in torch's form."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        if policy in BACKWARDS:
            raise PolicyError(
                f"{policy!r} saves the outputs that are cheap to recompute, which is the wrong way "
                f"round. {FIGURES}"
            )
        if policy not in POLICIES:
            raise PolicyError(f"no policy is called {policy!r}; {did_you_mean(policy, POLICIES)}")
        return POLICIES[policy]
    if callable(policy) and not isinstance(policy, Operation):
        return Policy(getattr(policy, "__name__", type(policy).__name__), choose=policy)
    if isinstance(policy, Sequence | set | frozenset) and policy:
        return Policy("the list", operations.find_operations(policy))
    raise PolicyError(f"a policy is a name, a list of operations or a function, got {policy!r}")
