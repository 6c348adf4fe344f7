"""SIGTERM, which clusters send before they end a job: noted, for a loop to end where it is between two steps.

    termination = Termination()
    if termination.signal:
        ...

Proof: `python -m pytest tests/test_attach.py -k signal`.
"""

import signal
import threading
from typing import Any


class Termination:
    """`signal` is the number once it came. In a thread that can't have handlers it never does."""

    def __init__(self) -> None:
        self.signal, self._before = 0, None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def release(self) -> None:
        """Who handled it before does so again."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, number: int, frame: Any) -> None:
        self.signal = number
