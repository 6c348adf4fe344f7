"""Save while training goes on: the training thread waits for almost nothing, and no two saves ever meet.

Parameters and optimizer state are copied by a thread during the next forward and backward; the optimizers' next step
waits for the copies by itself. Then the thread writes and commits. One save runs at a time, in a thread that ends with
it. Torch's `async_save` stalls for as long as the copy takes, and a stager used again tears a save that still runs.
Proof: `python -m pytest tests/test_store_background.py`.
"""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from .errors import SaveError
from .names import Saved
from .ranks import Ranks
from .snapshot import State
from .staging import Staging
from .store import Store
from .writing import Writing

logger = logging.getLogger(__name__)


class BackgroundSaver:
    """Use it as a context, or call `finish`; an error of a save comes up at the next optimizer step, save or `finish`.

    `stalled` sums the seconds that the training thread waited. `timeout` is how long the first rank waits for the parts
    of the others. What else than the optimizers changes parameters has to call `wait_copied` first.
    """

    def __init__(self, store: Store, *, timeout: float = 1800.0) -> None:
        self.store, self.timeout, self.stalled = store, timeout, 0.0
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._saved: Saved | None = None
        self._hooks: dict[int, Any] = {}
        atexit.register(_call, weakref.WeakMethod(self._report))

    def __enter__(self) -> "BackgroundSaver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self._join()  # the ranks may be at different places now, so nothing is asked of them together
        self._release()
        if self._error is not None:
            logger.error("%s", self._error)
            self._error = None

    def save(
        self, kind: str, step: int, state: State, *, metric: tuple[str, float] | None = None
    ) -> None:
        """Begin a save; returns before it is copied. Waits for the one before, and raises its error."""
        began = time.perf_counter()
        ranks = Ranks(self.store.group)
        ranks.all_do(self._settle)
        self._saved = None
        writing = self.store.begin(kind, step, state, metric=metric)
        optimizers = writing.optimizers
        self._hook(optimizers)
        self._staging.begin(writing.tensors)
        self._thread = threading.Thread(target=self._run, args=(writing,), name=f"save step {step}")
        self._thread.start()
        if not optimizers:  # nobody would wait before the tensors change
            self._staging.wait()
        self.stalled += time.perf_counter() - began

    def wait_copied(self) -> None:
        """Until the parameters may change."""
        began = time.perf_counter()
        self._staging.wait()
        self.stalled += time.perf_counter() - began

    def check(self) -> None:
        """Raise the error of a save that ended."""
        if self._thread is not None and not self._thread.is_alive():
            self._settle()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> Saved | None:
        """Wait for the save that runs; returns the last one that was committed, on every rank."""
        ranks = Ranks(self.store.group)
        return ranks.exchange(self._settle, lambda _: [self._saved] * ranks.size)

    def close(self) -> None:
        """Finish, and leave no thread, hook or buffer behind."""
        try:
            self.finish()
        finally:
            self._release()

    def _settle(self) -> None:
        self._join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _release(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._staging.release()

    def _hook(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            if id(optimizer) not in self._hooks:
                self._hooks[id(optimizer)] = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, *_: Any) -> None:
        self.wait_copied()
        self.check()

    def _run(self, writing: Writing) -> None:
        """On the thread. No rank waits for another but the first, which reads in the folder what they wrote."""
        try:
            try:
                part = writing.write(self._staging.copy())
            except Exception as error:
                if not writing.ranks.first:
                    writing.leave_part(None, f"{type(error).__name__}: {error}")
                raise
            if writing.ranks.first:
                parts = writing.collect_parts(part, timeout=self.timeout)
                self._saved = self.store.commit(writing, parts)
            else:
                writing.leave_part(part)
        except Exception as error:  # noqa: BLE001 - it is raised on the training thread
            self._error = self.store.failed(writing, error)
            self._error.__cause__ = error

    def _report(self) -> None:
        """At the end of the process, for an error that nobody asked for."""
        if self._error is not None:
            raise SaveError(
                f"a save in the background failed, and nobody asked: {self._error}"
            ) from self._error


def _call(method: Any) -> None:
    bound = method()
    if bound is not None:
        bound()
