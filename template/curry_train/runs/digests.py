"""The hash of a file, made of the bytes as they are written.

`xxh3_128` finds every accidental change and costs next to nothing; where xxhash is not installed, blake2b of the
standard library does it at about a second for each GB. Neither says who wrote a file: against that, see safe_reader.
Proof: `python -m pytest tests/test_store.py`.
"""

import hashlib
import importlib.util
from typing import Any, BinaryIO

from .errors import DamagedCheckpoint

CHUNK_BYTES = 2**22
ALGORITHMS = ("xxh3_128", "blake2b")


def default_algorithm() -> str:
    """The fastest that is installed; the manifest names it."""
    return "xxh3_128" if importlib.util.find_spec("xxhash") else "blake2b"


def new_hash(algorithm: str) -> Any:
    """A hash object with `update` and `hexdigest`."""
    if algorithm == "blake2b":
        return hashlib.blake2b(digest_size=16)
    if algorithm != "xxh3_128":
        raise DamagedCheckpoint(
            f"hash {algorithm!r} is not known: it is one of {', '.join(ALGORITHMS)}"
        )
    try:
        import xxhash
    except ImportError as error:
        raise RuntimeError(
            "this checkpoint was hashed with xxhash, which is missing: pip install xxhash"
        ) from error
    return xxhash.xxh3_128()


def hash_bytes(algorithm: str, data: bytes) -> str:
    """The hash of bytes at hand."""
    hasher = new_hash(algorithm)
    hasher.update(data)
    return str(hasher.hexdigest())


def hash_stream(algorithm: str, stream: BinaryIO) -> tuple[int, str]:
    """Bytes and hash of what is left in a stream."""
    hasher, num_bytes = new_hash(algorithm), 0
    while chunk := stream.read(CHUNK_BYTES):
        hasher.update(chunk)
        num_bytes += len(chunk)
    return num_bytes, str(hasher.hexdigest())


class HashingStream:
    """Writes on to a binary stream, and keeps count and hash of what went through."""

    def __init__(self, stream: BinaryIO, algorithm: str) -> None:
        self._stream, self._hash = stream, new_hash(algorithm)
        self.num_bytes = 0
        self.failed: OSError | None = (
            None  # torch's zip writer says only that it is at an unexpected place
        )

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        while written < view.nbytes:  # an unbuffered stream may take a part
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
        """Nothing: torch flushes after each tensor, and only the end has to be on the disk."""

    def close(self) -> None:
        """Nothing: whoever opened the stream beneath syncs and closes it."""

    def hexdigest(self) -> str:
        return str(self._hash.hexdigest())
