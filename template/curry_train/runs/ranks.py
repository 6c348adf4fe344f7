"""The ranks that save and load together, or this process alone: one agrees, all learn of it, an error on any is all's.

Proof: `python -m pytest tests/test_store_ranks.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .errors import RunError

T = TypeVar("T")
R = TypeVar("R")


class OtherRank(RunError):
    """What failed, failed on another rank."""


class Ranks:
    """A process group, the default one, or a process without any."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.together else 0
        self.size = dist.get_world_size(group) if self.together else 1

    @classmethod
    def on_the_host(cls) -> "Ranks":
        """All ranks, in a group that does not wait for a GPU. All together."""
        ranks = cls()
        if ranks.size > 1 and dist.get_backend() == "nccl":
            return cls(dist.new_group(backend="gloo"))
        return ranks

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agree(self, decide: Callable[[], T]) -> T:
        """What the first rank decides, on every rank."""
        return self.exchange(lambda: None, lambda _: [decide()] * self.size)

    def all_do(self, act: Callable[[], T]) -> T:
        """What `act` returns here, once it has returned on every rank."""
        done: list[T] = []
        self.exchange(lambda: done.append(act()), lambda every: every)
        return done[0]

    def highest(self, numbers: Sequence[int]) -> list[int]:
        """The highest that any rank gives, place by place; one message, on the host, so cheap enough for every step."""
        if self.size == 1:
            return list(numbers)
        told = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in told]

    def exchange(self, local: Callable[[], T], central: Callable[[list[T]], list[R]]) -> R:
        """Call `local` on every rank, `central` on the first with all results; each rank gets its part of those."""
        if not self.together:
            return central([local()])[0]
        own: Exception | None = None
        given: tuple[bool, Any]
        try:
            given = True, local()
        except Exception as error:  # noqa: BLE001 - it is raised below, once the others know of it
            own, given = error, (False, _words(error))
        everyone: list[Any] | None = [None] * self.size if self.first else None
        first = dist.get_global_rank(self.group, 0) if self.group is not None else 0
        dist.gather_object(given, everyone, dst=first, group=self.group)
        answers: list[Any] | None = None
        if everyone is not None:
            failed = [
                f"rank {rank}: {said}" for rank, (right, said) in enumerate(everyone) if not right
            ]
            try:
                parts = [] if failed else central([value for _, value in everyone])
                answers = (
                    [(False, "; ".join(failed))] * self.size
                    if failed
                    else [(True, part) for part in parts]
                )
            except Exception as error:  # noqa: BLE001 - the others wait for an answer; raised below
                own, answers = error, [(False, f"rank 0: {_words(error)}")] * self.size
        answer: list[Any] = [None]
        dist.scatter_object_list(answer, answers, src=first, group=self.group)
        right, value = answer[0]
        if own is not None:
            raise own
        if not right:
            raise OtherRank(value)
        found: R = value
        return found


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
