"""Read pickles without importing, calling or building anything that they name.

Python's own unpickler reads them, and finds a `StandIn` in place of each class and function. A
forged pickle may still take any amount of memory or time, or overflow the stack of C, so a small
process of its own, which runs this module as a script, reads it first, within limits.

Proof: `python -m pytest tests/core/test_unpickle.py`.
"""

import contextlib
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

# The interpreter itself, without an environment.
PYTHON = getattr(sys, "_base_executable", sys.executable)
SOURCE = Path(__file__).read_text(encoding="utf-8") if "__file__" in globals() else ""
# Real pickles take a second for 30 MiB.
MOST_SECONDS = 120


class RefusedPickle(ValueError):
    """A pickle that is damaged, too large, or that names what its reader does not allow."""


class StandIn:
    """An inert value in place of what a pickle names; it keeps its arguments and its state."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, *_: Any) -> None:
        """Ignore an element or an entry, which lists and mappings take."""

    add = __setitem__ = append


class PickleReader(pickle.Unpickler):
    """Reads pickles that follow each other; `named` collects the names in them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        # Without the method `peek` of a buffered stream the unpickler reads byte by byte.
        super().__init__(io.BufferedReader(io.BytesIO(data), 2**17))
        self.named: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.named.add(f"{module}.{name}")
        return type(name, (StandIn,), {})

    def persistent_load(self, reference: Any) -> Any:
        return reference

    def all(self, count: int = 1) -> list[Any]:
        """Read so many pickles, in another process first; raise RefusedPickle."""
        # Without packages, and in a session of its own, which no signal to a group ends.
        command = [PYTHON, "-I", "-S", "-c", SOURCE, str(len(self.data)), str(count)]
        try:
            # A process that gave up its rights may start no other.
            with contextlib.suppress(PermissionError):
                subprocess.run(
                    command,
                    input=self.data,
                    capture_output=True,
                    check=True,
                    timeout=MOST_SECONDS,
                    start_new_session=True,
                )
            return [self.load() for _ in range(count)]
        except subprocess.SubprocessError as error:
            raise RefusedPickle("reading it takes too much memory, time or stack") from error
        except DAMAGE as error:
            raise RefusedPickle(f"{type(error).__name__}: {error!s:.200}") from error


# Errors that Python's unpickler raises for damaged bytes.
DAMAGE = (
    pickle.PickleError,
    AttributeError,
    EOFError,
    LookupError,
    OverflowError,
    TypeError,
    ValueError,
)


def read_plain(data: bytes) -> Any:
    """Return what a pickle of plain containers holds; raise RefusedPickle for any other."""
    reader = PickleReader(data)
    (value,) = reader.all()
    for name in reader.named:
        raise RefusedPickle(f"it names {name:.160}, and no name is allowed here")
    return value


if __name__ == "__main__":
    # Windows has no such limits. Any other error is the caller's, with the names before it.
    with contextlib.suppress(ImportError, *DAMAGE):
        import resource

        # Python's own memory, and 24 times the file: reading a memory snapshot takes 7 times it.
        limit = 2**27 + 24 * int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        # Less than any thread has, so that deeply nested keys end this process alone.
        resource.setrlimit(resource.RLIMIT_STACK, (2**21, 2**21))
        tried = PickleReader(sys.stdin.buffer.read())
        for _ in range(int(sys.argv[2])):
            tried.load()
