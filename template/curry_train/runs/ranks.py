"""Let all ranks decide together, and raise the error of one rank on all of them.

The first rank decides; every rank gets the result, or the error of any rank. The errors of this
room stand here too. Torch is imported in the methods that use it, because listing and comparing
runs needs only the errors, and importing torch takes seconds.

Proof: `python -m pytest tests/runs/test_store.py tests/runs/test_store_ranks.py`.
"""

import contextlib
import datetime
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

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


def report_in_one_line() -> None:
    """Print these errors without a traceback where a script does not catch them.

    Their message says what to do next; other errors are printed as before.
    """
    before = sys.excepthook
    if getattr(before, "reports_in_one_line", False):
        return

    def report(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if isinstance(error, RunError | StateMismatch):
            print(f"{kind.__name__}: {error}", file=sys.stderr)
        else:
            before(kind, error, at)

    vars(report)["reports_in_one_line"] = True
    sys.excepthook = report


# Decisions of the ranks that save and load together.

LocalT = TypeVar("LocalT")
ResultT = TypeVar("ResultT")
# What a rank sends: its result, or an error; every rank raises the damage of any.
RESULT = "result"
DAMAGE = "damage"
ERROR = "error"
# The longest wait for a process group's threads to release the tensors of a collective.
RELEASE_SECONDS = 1.0


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
        self._sent: list[weakref.ref[Tensor]] = []

    @classmethod
    def on_the_host(cls) -> "Ranks":
        """Return all ranks in a group that does not wait for a GPU; every rank must call this."""
        import torch.distributed as dist

        ranks = cls()
        if ranks.size > 1 and dist.get_backend() == "nccl":
            return cls(dist.new_group(backend="gloo"))
        return ranks

    def apart(self, seconds: float) -> "Ranks":
        """Return these ranks in a group that another thread may use; every rank must call this."""
        import torch.distributed as dist

        if self.size == 1:
            return self
        members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        timeout = datetime.timedelta(seconds=seconds)
        return Ranks(
            dist.new_group(members, timeout, backend="gloo", use_local_synchronization=True)
        )

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agree(self, decide: Callable[[], LocalT]) -> LocalT:
        """Call `decide` on the first rank and return its result on every rank."""
        return self.collect(lambda: None, lambda _: decide())

    def all_do(self, act: Callable[[], LocalT]) -> LocalT:
        """Call `act` on every rank; return this rank's result once all ranks have finished."""
        results: list[LocalT] = []
        self.exchange(lambda: results.append(act()), lambda every: every)
        return results[0]

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
        if self.size == 1:
            return list(numbers)
        with _other_ranks_answer():
            maxima = self._maxima(numbers, device="cpu")
        self._wait_for_release()
        return maxima

    def exchange(
        self, local: Callable[[], LocalT], central: Callable[[list[LocalT]], list[ResultT]]
    ) -> ResultT:
        """Gather the results of `local` on the first rank, and scatter those of `central`.

        `central` gets the results of all ranks and returns one result for each rank.
        """
        if not self.together:
            return central([local()])[0]
        own_error: Exception | None = None
        own_result: tuple[str, Any]
        try:
            own_result = RESULT, local()
        except Exception as error:  # noqa: BLE001 - raised below, once the other ranks got it
            own_error = error
            own_result = _described(error)

        with _other_ranks_answer():
            gathered = self._gather(own_result)
        answers: list[Any] | None = None
        if gathered is not None:
            try:
                answers = self._answers(gathered, central)
            except Exception as error:  # noqa: BLE001 - the others wait for an answer; raised below
                own_error = error
                what, words = _described(error)
                answers = [(what, f"rank 0: {words}")] * self.size
        try:
            with _other_ranks_answer():
                what, value = self._scatter(answers)
        except OtherRank as error:
            raise own_error or error from error
        self._wait_for_release()

        if what == DAMAGE:
            raise own_error or DamagedCheckpoint(value)
        # Damage is passed over, so a rank may not raise it where another rank ends.
        if what == ERROR and (own_error is None or own_result[0] == DAMAGE):
            raise OtherRank(value) from own_error
        if own_error is not None:
            raise own_error
        result: ResultT = value
        return result

    def _answers(
        self, gathered: list[tuple[str, Any]], central: Callable[[list[LocalT]], list[ResultT]]
    ) -> list[tuple[str, Any]]:
        """Return one answer for each rank: its result of `central`, or the errors of all ranks."""
        errors = {rank: found for rank, found in enumerate(gathered) if found[0] != RESULT}
        if errors:
            what = ERROR if any(kind == ERROR for kind, _ in errors.values()) else DAMAGE
            words = "; ".join(f"rank {rank}: {value}" for rank, (_, value) in errors.items())
            return [(what, words)] * self.size
        return [(RESULT, result) for result in central([value for _, value in gathered])]

    def _gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on the first rank, and None on the others."""
        import torch
        import torch.distributed as dist

        data = pickle.dumps(value)
        own = self._bytes_to_send(data, self._maxima([len(data)], device=self._device)[0])
        pieces = None
        if self.first:
            pieces = [self._tracked(torch.empty_like(own)) for _ in range(self.size)]
        dist.gather(own, pieces, dst=self._first_rank, group=self.group)
        return None if pieces is None else [_received(piece) for piece in pieces]

    def _scatter(self, values: Sequence[Any] | None) -> Any:
        """Return this rank's one of the values, which only the first rank has."""
        import torch
        import torch.distributed as dist

        data = [pickle.dumps(value) for value in values or ()]
        longest = self._maxima([max(map(len, data), default=0)], device=self._device)[0]
        own = self._tracked(torch.empty(longest, dtype=torch.uint8, device=self._device))
        pieces = [self._bytes_to_send(each, longest) for each in data] or None
        dist.scatter(own, pieces, src=self._first_rank, group=self.group)
        return _received(own)

    def _maxima(self, numbers: Sequence[int], *, device: str) -> list[int]:
        import torch
        import torch.distributed as dist

        maxima = self._tracked(torch.tensor(numbers, dtype=torch.int64, device=device))
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in maxima]

    @property
    def _device(self) -> str:
        import torch.distributed as dist

        return "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"

    @property
    def _first_rank(self) -> int:
        import torch.distributed as dist

        return 0 if self.group is None else dist.get_global_rank(self.group, 0)

    def _bytes_to_send(self, data: bytes, length: int) -> "Tensor":
        import torch

        padded = bytearray(data.ljust(length, b"\0"))
        return self._tracked(torch.frombuffer(padded, dtype=torch.uint8).to(self._device))

    def _tracked(self, tensor: "Tensor") -> "Tensor":
        """Note a tensor of a collective for `_wait_for_release`."""
        self._sent.append(weakref.ref(tensor))
        return tensor

    def _wait_for_release(self) -> None:
        """Wait until the process group's threads have released the tensors of the collectives.

        A collective is done before gloo's thread has released its tensors, for which the thread
        needs the interpreter. If the interpreter is ending by then, torch 2.13 aborts the process,
        and a run that was saved and stopped ends like one that crashed.
        """
        deadline = time.monotonic() + RELEASE_SECONDS
        while any(tensor() is not None for tensor in self._sent):
            if time.monotonic() > deadline:
                break
            time.sleep(0.0001)
        self._sent.clear()


@contextlib.contextmanager
def _other_ranks_answer() -> Iterator[None]:
    """Raise OtherRank where a collective call fails, because a rank ended or does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise OtherRank(
            f"another rank ended, or did not answer within the process group's timeout: read its "
            f"error first ({str(error).strip().partition(chr(10))[0]})"
        ) from error


def _received(data: "Tensor") -> Any:
    """Unpickle what another rank of this training has sent; padding at the end is left out."""
    return pickle.loads(data.cpu().numpy().tobytes())


def _described(error: Exception) -> tuple[str, str]:
    """Return what a rank tells the others of its error."""
    is_damage = isinstance(error, DamagedCheckpoint) and not isinstance(error, HostileCheckpoint)
    return DAMAGE if is_damage else ERROR, f"{type(error).__name__}: {error}"
