"""Hash files while they are written.

`xxh3_128` finds every accidental change at almost no cost. Without xxhash installed, blake2b from
the standard library is used, at about a second per GB. Neither authenticates the writer of a file;
safe_reader protects against hostile files.
Proof: `python -m pytest tests/test_store.py`.
"""

import hashlib
import importlib.util
from typing import Any, BinaryIO

from .errors import DamagedCheckpoint

CHUNK_BYTES = 2**22
ALGORITHMS = ("xxh3_128", "blake2b")


def default_algorithm() -> str:
    """Return the fastest installed algorithm; the manifest records its name."""
    return "xxh3_128" if importlib.util.find_spec("xxhash") else "blake2b"


def new_hash(algorithm: str) -> Any:
    """Return a hash object with `update` and `hexdigest`."""
    if algorithm == "blake2b":
        return hashlib.blake2b(digest_size=16)
    if algorithm != "xxh3_128":
        raise DamagedCheckpoint(
            f"hash {algorithm!r} is not one of {', '.join(ALGORITHMS)}: the manifest is damaged, "
            f"or a newer version of this package wrote it"
        )
    try:
        import xxhash
    except ImportError as error:
        raise RuntimeError(
            "this checkpoint was hashed with xxhash, which is missing: pip install xxhash"
        ) from error
    return xxhash.xxh3_128()


def hash_bytes(algorithm: str, data: bytes) -> str:
    hasher = new_hash(algorithm)
    hasher.update(data)
    return str(hasher.hexdigest())


def hash_stream(algorithm: str, stream: BinaryIO) -> tuple[int, str]:
    """Return the number of bytes left in a stream, and their hash."""
    hasher = new_hash(algorithm)
    num_bytes = 0
    while chunk := stream.read(CHUNK_BYTES):
        hasher.update(chunk)
        num_bytes += len(chunk)
    return num_bytes, str(hasher.hexdigest())


class HashingStream:
    """A writable stream that passes bytes on to another one, and counts and hashes them."""

    def __init__(self, stream: BinaryIO, algorithm: str) -> None:
        self._stream = stream
        self._hash = new_hash(algorithm)
        self.num_bytes = 0
        # The first error of a write. Torch's zip writer hides it behind "unexpected pos".
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        # An unbuffered stream may write only a part of the data.
        while written < view.nbytes:
            try:
                written += self._stream.write(view[written:])
            except OSError as error:
                self.failed = self.failed or error
                raise
        self._hash.update(view)
        self.num_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        """Do nothing: torch flushes after every tensor, but one sync at the end is enough."""

    def close(self) -> None:
        """Do nothing: the caller that opened the underlying stream syncs and closes it."""

    def hexdigest(self) -> str:
        return str(self._hash.hexdigest())
