"""Let all ranks decide together, and raise the error of one rank on all of them.

The first rank decides; every rank gets the result, or the error of any rank. The errors of this
room stand here too.

Proof: `python -m pytest tests/runs/test_store.py tests/runs/test_store_ranks.py`.
"""

import atexit
import contextlib
import datetime
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..core.unpickle import DAMAGE

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


@contextlib.contextmanager
def reading(what: str, *others: type[Exception]) -> Iterator[None]:
    """Raise DamagedCheckpoint for errors that damaged or forged bytes raise; `others` are more."""
    damage: tuple[type[Exception], ...] = (*DAMAGE, ArithmeticError, OSError, RecursionError)
    try:
        yield
    except (RunError, StateMismatch):
        raise
    except damage + others as error:
        raise DamagedCheckpoint(f"{what} ({type(error).__name__}: {error!s:.200})") from error


# Decisions of the ranks that save and load together.

LocalT = TypeVar("LocalT")
ResultT = TypeVar("ResultT")
RELEASE_SECONDS = 0.2


class OtherRank(RunError):
    """An error that was raised on another rank."""


class Ranks:
    """The ranks of a process group (the default group if None), or one process without a group."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.together else 0
        self.size = dist.get_world_size(group) if self.together else 1
        if self.together:
            _wait_at_exit()

    @classmethod
    def on_the_host(cls, *, timeout: float | None = None) -> "Ranks":
        """Return all ranks in a group that does not wait for a GPU; every rank must call this.

        With a timeout in seconds it is a group of its own, which another thread may use.
        """
        ranks = cls()
        if ranks.size == 1 or (timeout is None and dist.get_backend() != "nccl"):
            return ranks
        limit = None if timeout is None else datetime.timedelta(seconds=timeout)
        return cls(dist.new_group(timeout=limit, backend="gloo"))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agree(self, decide: Callable[[], LocalT]) -> LocalT:
        """Call `decide` on the first rank and return its result on every rank."""
        return self._scatter(lambda: [decide()] * self.size)

    def all_do(self, act: Callable[[], LocalT]) -> LocalT:
        """Call `act` on every rank; return this rank's result once all ranks have finished."""
        if not self.together:
            return act()
        own_error: Exception | None = None
        # What the other ranks raise, with the message.
        own: tuple[type[RunError], str] | None = None
        failures: list[Any] = [None] * self.size
        try:
            result = act()
        except Exception as error:  # noqa: BLE001 - raised below, once the other ranks got it
            own_error = error
            kind = type(error) if isinstance(error, RunError) else OtherRank
            own = kind, f"{type(error).__name__}: {error}"
        try:
            with _require_other_ranks():
                dist.all_gather_object(failures, own, group=self.group)
        except OtherRank as error:
            raise own_error or error from error

        found = {rank: one for rank, one in enumerate(failures) if one is not None}
        if not found:
            return result
        # Damage is passed over, and so is a step that is saved already. So a rank may not raise it
        # where another rank ends.
        kinds = {kind for kind, _ in found.values()}
        kind = kinds.pop() if len(kinds) == 1 else OtherRank
        if own_error is not None and own and kind is own[0]:
            raise own_error
        words = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in found.items())
        raise kind(words) from own_error

    def collect(
        self, local: Callable[[], LocalT], central: Callable[[list[LocalT]], ResultT]
    ) -> ResultT:
        """Return on every rank what the first rank makes of the results of `local` on all ranks."""
        return self.exchange(local, lambda results: [central(results)] * self.size)

    def first_found(self, local: Callable[[], LocalT | None]) -> LocalT | None:
        """Return on every rank the result of the first rank that has one."""
        return self.collect(
            local, lambda all_: next((one for one in all_ if one is not None), None)
        )

    def highest(self, numbers: Sequence[int]) -> list[int]:
        """Return the elementwise maximum of `numbers` over the ranks.

        It takes one message in host memory, so it is cheap enough for every step.
        """
        return list(map(int, self._reduce(numbers, "MAX")))

    def mean(self, number: float) -> float:
        """Return the mean of a number over the ranks."""
        return self._reduce([number], "SUM")[0] / self.size

    def _reduce(self, numbers: Sequence[float], operation: str) -> list[float]:
        if self.size == 1:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.float64)
        with _require_other_ranks():
            dist.all_reduce(found, getattr(dist.ReduceOp, operation), group=self.group)
        return found.tolist()

    def exchange(
        self, local: Callable[[], LocalT], central: Callable[[list[LocalT]], list[ResultT]]
    ) -> ResultT:
        """Gather the results of `local` on the first rank, and scatter those of `central`.

        `central` gets the results of all ranks and returns one result for each rank.
        """
        own = self.all_do(local)
        gathered = [own] * self.size
        if self.together:
            into = gathered if self.first else None
            with _require_other_ranks():
                dist.gather_object(own, into, group=self.group, group_dst=0)
        return self._scatter(lambda: central(gathered))

    def _scatter(self, decide: Callable[[], list[ResultT]]) -> ResultT:
        """Call `decide` on the first rank, and return on each rank its own of the results."""
        results: list[Any] = self.all_do(lambda: decide() if self.first else [None])
        own = results[:1]
        if self.together:
            with _require_other_ranks():
                dist.scatter_object_list(own, results, group=self.group, group_src=0)
        result: ResultT = own[0]
        return result


@functools.cache
def _wait_at_exit() -> None:
    """Let the process group's threads release the tensors of the last collective.

    A collective is done before gloo's thread has released its tensors, for which the thread needs
    the interpreter. If the interpreter is ending by then, torch 2.13 aborts the process, and a run
    that was saved and stopped ends like one that crashed.
    """
    atexit.register(time.sleep, RELEASE_SECONDS)


@contextlib.contextmanager
def _require_other_ranks() -> Iterator[None]:
    """Raise OtherRank where a collective call fails, because a rank ended or does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise OtherRank(
            f"another rank ended, or did not answer within the process group's timeout: read its "
            f"error first ({str(error).strip().partition(chr(10))[0]})"
        ) from error
