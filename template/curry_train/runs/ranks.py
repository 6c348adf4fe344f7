"""Let all ranks decide together, and raise the error of one rank on all of them.

The first rank decides; every rank gets the result, or the error of any rank. The errors of this
room stand here too. Torch is imported in the methods that use it, because listing and comparing
runs needs only the errors, and importing torch takes seconds.

Proof: `python -m pytest tests/runs/test_store.py tests/runs/test_store_ranks.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

# Errors of saving and loading; every message names the problem, the place and the remedy.

PARTIAL_LOAD_ADVICE = "begin a new run with what matches: load_chosen(FOLDER, state, strict=False)"


class RunError(RuntimeError):
    """Base class of the errors about a run's folder."""


class SaveError(RunError):
    """A save was not committed; the checkpoints committed before it are intact."""


class StepExists(SaveError):
    """A valid checkpoint of this step exists already, and is never overwritten."""


class LockedRun(RunError):
    """Another process is writing to this run."""


class DamagedCheckpoint(RunError):
    """The files on the disk differ from what was saved."""


class HostileCheckpoint(DamagedCheckpoint):
    """Loading this checkpoint would run code, or read files outside of it."""


class StateMismatch(ValueError):
    """The checkpoint is intact but belongs to another model, optimizer or layout of ranks."""


# Decisions of the ranks that save and load together.

LocalT = TypeVar("LocalT")
ResultT = TypeVar("ResultT")


class OtherRank(RunError):
    """An error that was raised on another rank."""


class Ranks:
    """The ranks of a process group (the default group if None), or one process without a group."""

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self.group = group
        self.together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.together else 0
        self.size = dist.get_world_size(group) if self.together else 1

    @classmethod
    def on_the_host(cls) -> "Ranks":
        """Return all ranks in a group that does not wait for a GPU; every rank must call this."""
        import torch.distributed as dist

        ranks = cls()
        if ranks.size > 1 and dist.get_backend() == "nccl":
            return cls(dist.new_group(backend="gloo"))
        return ranks

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agree(self, decide: Callable[[], LocalT]) -> LocalT:
        """Call `decide` on the first rank and return its result on every rank."""
        return self.exchange(lambda: None, lambda _: [decide()] * self.size)

    def all_do(self, act: Callable[[], LocalT]) -> LocalT:
        """Call `act` on every rank; return this rank's result once all ranks have finished."""
        results: list[LocalT] = []
        self.exchange(lambda: results.append(act()), lambda every: every)
        return results[0]

    def highest(self, numbers: Sequence[int]) -> list[int]:
        """Return the elementwise maximum of `numbers` over the ranks.

        It takes one message in host memory, so it is cheap enough for every step.
        """
        if self.size == 1:
            return list(numbers)
        import torch
        import torch.distributed as dist

        maxima = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in maxima]

    def exchange(
        self, local: Callable[[], LocalT], central: Callable[[list[LocalT]], list[ResultT]]
    ) -> ResultT:
        """Gather the results of `local` on the first rank, and scatter those of `central`.

        `central` gets the results of all ranks and returns one result for each rank.
        """
        if not self.together:
            return central([local()])[0]
        import torch.distributed as dist

        own_error: Exception | None = None
        own_result: tuple[bool, Any]
        try:
            own_result = True, local()
        except Exception as error:  # noqa: BLE001 - raised below, once the other ranks got it
            own_error = error
            own_result = False, _words(error)

        gathered: list[Any] | None = [None] * self.size if self.first else None
        first = dist.get_global_rank(self.group, 0) if self.group is not None else 0
        dist.gather_object(own_result, gathered, dst=first, group=self.group)

        answers: list[Any] | None = None
        if gathered is not None:
            try:
                answers = self._answers(gathered, central)
            except Exception as error:  # noqa: BLE001 - the others wait for an answer; raised below
                own_error = error
                answers = [(False, f"rank 0: {_words(error)}")] * self.size

        answer: list[Any] = [None]
        dist.scatter_object_list(answer, answers, src=first, group=self.group)
        succeeded, value = answer[0]
        if own_error is not None:
            raise own_error
        if not succeeded:
            raise OtherRank(value)
        result: ResultT = value
        return result

    def _answers(
        self, gathered: list[tuple[bool, Any]], central: Callable[[list[LocalT]], list[ResultT]]
    ) -> list[tuple[bool, Any]]:
        """Return one answer for each rank: its result of `central`, or the errors of all ranks."""
        errors = []
        for rank, (succeeded, value) in enumerate(gathered):
            if not succeeded:
                errors.append(f"rank {rank}: {value}")
        if errors:
            return [(False, "; ".join(errors))] * self.size
        results = central([value for _, value in gathered])
        return [(True, result) for result in results]


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
