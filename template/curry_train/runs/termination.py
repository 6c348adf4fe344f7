"""Record SIGTERM, so that a training loop can stop between two steps.

Clusters send SIGTERM before they end a job.

    termination = Termination()
    if termination.signal:
        ...

Proof: `python -m pytest tests/test_attach.py -k signal`.
"""

import signal
import threading
from typing import Any


class Termination:
    """Sets `signal` to SIGTERM's number when it arrives; 0 until then.

    Only the main thread can handle signals; in another thread `signal` stays 0.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._before = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def release(self) -> None:
        """Restore the previous SIGTERM handler."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, number: int, frame: Any) -> None:
        self.signal = number
