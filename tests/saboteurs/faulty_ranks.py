"""Faults of runs on two ranks, which import them by name.

Proof: `python -m pytest tests/gates/test_gates.py`.
"""

from unittest import mock

from saboteurs import planted

from curry_train.primitives.grad_flow import GradFlow


class OfOneRank(GradFlow):
    """A probe whose activations are those of its own rank."""

    def __enter__(self):
        super().__enter__()
        self._ranks = None
        return self


class OfOneShard(GradFlow):
    """A probe whose gradients and weights are those of its own shard."""

    def __enter__(self):
        divided = "curry_train.primitives.grad_flow_probe.is_divided"
        with mock.patch(divided, return_value=False):
            return super().__enter__()


FAULTS = [
    planted(
        "grad-flow.two-ranks",
        "one-rank",
        probe=f"{__name__}:OfOneRank",
        hint="differ (outputs of",
        model="mlp",
    ),
    planted(
        "grad-flow.two-ranks",
        "one-shard",
        probe=f"{__name__}:OfOneShard",
        hint="FSDP2",
        model="mlp",
    ),
]
