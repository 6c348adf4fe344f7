"""Show that a process is alive to processes that can't see it, as on another host.

A `Heartbeat` rewrites a small file with a count every `BEAT_SECONDS`. A `Listener` reads it, and
measures by its own clock how long the count has not changed, so the clocks of the hosts need not
agree. A process that shows no sign of life for `SILENCE_SECONDS` is taken for dead.

Proof: `python -m pytest tests/runs/test_lock_hosts.py tests/runs/test_waits.py`.
"""

import contextlib
import threading
import time
from typing import Any

from .files import Files, keep_from_children

BEAT_SECONDS = 10.0
SILENCE_SECONDS = 60.0


class Heartbeat:
    """A thread that rewrites the file `key`, from `start` to `stop`."""

    def __init__(self, files: Files, key: str) -> None:
        self._files = files
        self._key = key
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write the first beat, and begin to beat."""
        self._files.put(self._key, b"0\n")
        self._ended.clear()
        self._thread = threading.Thread(target=self._beat, name=f"beats {self._key}", daemon=True)
        self._thread.start()
        keep_from_children(self)

    def stop(self) -> None:
        """End the beats and remove their file."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        # Another process may have taken this one for dead, and removed the file.
        with contextlib.suppress(FileNotFoundError):
            self._files.remove_file(self._key)

    def leave_behind(self) -> None:
        """Forget the thread in a forked child, where it does not run."""
        self._thread = None

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(BEAT_SECONDS):
            count += 1
            # A full or slow disk for a moment is no reason to stop for good.
            with contextlib.suppress(OSError):
                self._files.put(self._key, b"%d\n" % count)


class Listener:
    """Watches the beats of one process, in as many calls as it takes."""

    def __init__(self, files: Files, key: str) -> None:
        self._files = files
        self._key = key
        self._last: Any = self._read()
        self._since = time.monotonic()
        # Whether the count has changed since this listener began.
        self.heard = False

    def silent_seconds(self) -> float:
        """Return for how many seconds no beat was heard."""
        now = self._read()
        if now != self._last:
            self._last = now
            self._since = time.monotonic()
            self.heard = True
        return time.monotonic() - self._since

    def _read(self) -> bytes | None:
        try:
            with self._files.open(self._key) as stream:
                return stream.read(64)
        except OSError:
            return None
